"""The commands of the README, of docs/ and of `make quickstart`, as lists of words."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_MODULES = ("dit.report", "dit.playground", "dit.foreign")
"""Packages that are programs without commands of their own."""


@dataclass(frozen=True)
class Command:
    """One line of a page."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def commands(root: Path) -> list[Command]:
    """Every line of every fenced block marked bash."""
    found = []
    for page in pages(root):
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            lines = block.replace("\\\n", " ").splitlines()
            found += [
                Command(page.name, tuple(shlex.split(line, comments=True)))
                for line in lines
                if shlex.split(line, comments=True)
            ]
    return found


def blocks(page: Path, language: str) -> dict[str, str]:
    """The text of each fenced block of a language that begins with a comment, by its first word.

    The comment is the name of a file, such as `# flux.toml`, which the block is.
    """
    found = re.findall(rf"^```{language}\n# ([\w.]+)(.*?)^```", page.read_text(), re.DOTALL | re.M)
    return {name: rest.partition("\n")[2] for name, rest in found}


def script_call(words: tuple[str, ...]) -> tuple[list[str], list[str]] | None:
    """The program of ours that a line starts and what it is given; None where it starts none.

    Looks through `torch.distributed.run`, `docker run IMAGE` and the Slurm file.
    """
    words = words[: words.index(">")] if ">" in words else words
    if re.fullmatch(r"[A-Z_]+=.*", words[0]):  # of the environment
        return script_call(words[1:])
    if words[:2] == ("docker", "run"):
        return script_call(words[words.index("python") :])
    if words[0] == "sbatch":
        script = next(i for i, word in enumerate(words) if word.endswith(".sbatch"))
        return ["recipes/pretrain_dit.py"], list(words[script + 1 :])
    if words[:3] == ("python", "-m", "data_prep"):
        return ["-m", "data_prep", words[3]], list(words[4:])
    if words[0] != "python":
        return None
    if words[:2] == ("python", "-m") and words[2] in _MODULES:
        return list(words[1:3]), list(words[3:])
    if words[:3] == ("python", "-m", "dit.config_loading.reference_page"):
        return list(words[1:3]), list(words[3:])
    if "dit.convert" in words:
        command = words.index("dit.convert") + 1
        return ["-m", "dit.convert", words[command]], list(words[command + 1 :])
    if words[:2] == ("python", "-m") and words[2].startswith("recipes."):
        return [f"{words[2].replace('.', '/')}.py"], list(words[3:])
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return [words[script]], list(words[script + 1 :])


def launcher_flags(words: tuple[str, ...]) -> list[str]:
    """What torch.distributed.run itself is given."""
    if "torch.distributed.run" not in words:
        return []
    start = words.index("torch.distributed.run") + 1
    ends = (i for i, word in enumerate(words) if word.endswith(".py") or word == "-m")
    return list(words[start : next(end for end in ends if end >= start)])

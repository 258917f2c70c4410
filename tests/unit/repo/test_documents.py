"""What the pages say exists: links, files, programs, flags and configuration keys."""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from dit.codecs.vae import CODECS
from dit.config_loading.cli import parse_arguments
from recipes.runs import RECIPES
from tests.doc_commands import Command, commands, launcher_flags, pages, script_call
from tests.launching import run

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = commands(ROOT)
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
SECTIONS = {name: pages for one in NAV if isinstance(one, dict) for name, pages in one.items()}
GUIDES = ("README.md", "docs/index.md", *(f"docs/{page}" for page in SECTIONS["Guides"]))
"""Pages that are read from top to bottom; all others are looked up."""
TEXT = {".py", ".md", ".yaml", ".toml", ".txt", ".sbatch", ""}


def project_files() -> list[Path]:
    """Text files of the project, without what installing and running leaves behind."""
    places = ("dit", "data_prep", "recipes", "benchmarks", "examples", "tools")
    places += ("conf", "tests", "docs")
    places += ("docker", ".ci")
    inside = [file for place in places for file in (ROOT / place).rglob("*") if file.is_file()]
    found = [file for file in (*ROOT.iterdir(), *inside) if file.is_file()]
    return [f for f in found if f.suffix in TEXT and "__pycache__" not in f.parts]


@cache
def help_of(*program: str) -> str:
    """What a program of ours prints for --help=all."""
    done = run([sys.executable, *program, "--help=all"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def ours() -> list[Command]:
    return [command for command in COMMANDS if script_call(command.words)]


def test_pages_have_commands() -> None:
    assert {command.page for command in COMMANDS} == {page.name for page in pages(ROOT)}


@pytest.mark.parametrize("command", ours(), ids=str)
def test_program_exists_and_knows_the_flags(command: Command) -> None:
    program, arguments = script_call(command.words) or ([], [])
    flags = {word.partition("=")[0] for word in arguments if re.match(r"--[a-z_-]+$|--\w+=", word)}
    known = set(re.findall(r"--[a-zA-Z_-]+", help_of(*program)))
    assert flags <= known, f"{sorted(flags - known)} not in {program} --help=all"
    get_args_parser().parse_args([*launcher_flags(command.words), "script.py"])


@pytest.mark.parametrize(
    "command",
    [
        c
        for c in ours()
        if ("pretrain_dit.py" in str(c) or "sbatch" in str(c))
        and "/train.yaml" not in str(c)
        and "ours.yaml" not in str(c)  # tests/unit/foreign/test_example.py
    ],
    ids=str,
)
def test_configuration_resolves(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is there, every key is known and no rule is broken; packing writes train.yaml."""
    _, arguments = script_call(command.words) or ([], [])
    monkeypatch.chdir(ROOT)
    parse_arguments(arguments, recipes=RECIPES)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ours()], ids=str)
def test_other_commands_name_what_exists(command: Command) -> None:
    program, *arguments = command.words
    if program == "make":
        targets = re.findall(r"^(\S[^:=#]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        names = " ".join(targets).replace("$(VENV)", ".venv").split()
        assert {a for a in arguments if "=" not in a} <= set(names)
    elif program == "docker":
        assert arguments[0] == "build"
        assert (ROOT / arguments[arguments.index("--file") + 1]).is_file()
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = extras["optional-dependencies"]
        if "--no-deps" in arguments:  # a package of an extra, without what that declares
            assert arguments[-1] in {
                one.partition(";")[0] for ones in extras.values() for one in ones
            }
        else:
            (wanted,) = re.findall(r"\.\[(\w+)\]", str(command))
            assert wanted in extras
    elif program == "hf":
        assert arguments[0] == "download"
        assert arguments[1] in {codec.default_model for codec in CODECS.values()}
    elif program == "mkdocs":
        assert arguments == ["serve"] and (ROOT / "mkdocs.yml").is_file()
    elif program == "source":
        assert arguments == [".venv/bin/activate"]
    else:
        assert program in {"export", "tensorboard"}


def test_links_lead_to_files_of_the_project() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in [*pages(ROOT), ROOT / "CHANGELOG.md"]
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def test_every_page_that_is_mentioned_exists() -> None:
    names = {file.name for file in project_files()}
    missing = [
        f"{file.relative_to(ROOT)}: {page}"
        for file in project_files()
        if "tests" not in file.relative_to(ROOT).parts  # they write pages of their own
        for page in re.findall(r"[\w-]+\.md\b", file.read_text())
        if page not in names
    ]
    assert not missing


def test_no_file_names_a_path_of_this_machine() -> None:
    here = [re.escape(f"{path}/") for path in {ROOT.parent, Path.home()} if path != Path("/")]
    pattern = re.compile("|".join([*here, r"/home/\w+/", r"/Users/\w+/"]))
    found = [
        f"{file.relative_to(ROOT)}: {match}"
        for file in project_files()
        if file != Path(__file__)
        for match in pattern.findall(file.read_text())
    ]
    assert not found


def test_pages_list_every_configuration_file_folder_and_part() -> None:
    readme, listed, developing = (
        (ROOT / page).read_text()
        for page in ("README.md", "docs/configuration_files.md", "docs/developing.md")
    )
    for file in (ROOT / "conf").glob("*.yaml"):
        tiny = file.stem.endswith("_debug")
        assert f"`conf/{'NAME_debug.yaml' if tiny else file.name}`" in listed
    for folder in ("data_prep", "dit", "recipes", "conf", "docs", "docker", "tests"):
        assert re.search(rf"^    {folder}/", readme, re.MULTILINE)
    for part in (ROOT / "dit").iterdir():
        if (part / "__init__.py").is_file():
            assert f"    {part.name}/" in developing
        elif part.suffix == ".py" and part.name != "__init__.py":
            assert f"| `{part.name}` |" in developing


def words_of(text: str) -> int:
    """Number of words; bars and rules of tables are none."""
    return len(re.findall(r"\S*\w\S*", text))


def too_long(text: str) -> list[str]:
    """Which bounds of a guide its text exceeds."""
    before, command, _ = text.partition("```bash")
    counts = {"in all": (text, 1_100), "before the first command": (before, 60)}
    words = {where: words_of(part) for where, (part, _) in counts.items()}
    found = [f"{words[where]} words {where}" for where in words if words[where] > counts[where][1]]
    return found if command else [*found, "no command"]


@pytest.mark.parametrize("page", GUIDES)
def test_guide_is_read_through(page: str) -> None:
    """Rules and rare cases are in the pages that end with _reference."""
    assert not too_long((ROOT / page).read_text())


def test_all_guides_together_are_read_in_an_afternoon() -> None:
    assert sum(words_of((ROOT / page).read_text()) for page in GUIDES) <= 25_000


def test_a_long_guide_is_found() -> None:
    guide = "word " * 60 + "```bash\n" + "word " * 1_038
    assert not too_long(guide)
    assert too_long("| a | b |\n|---|---|\n" + "word " * 60) == [
        "62 words before the first command",
        "no command",
    ]
    assert too_long(guide + "word word word") == ["1102 words in all"]


def test_readme_ends_within_two_screens_after_the_networks() -> None:
    _, _, rest = (ROOT / "README.md").read_text().partition("\n## What is where\n")
    assert 0 < sum(1 + max(0, len(line) - 1) // 100 for line in rest.splitlines()) <= 100


def test_the_reference_of_data_names_what_each_codec_downloads() -> None:
    page = (ROOT / "docs" / "data_reference.md").read_text()
    table = page.partition("\n### Encoders to download\n")[2].partition("\n#")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`(.+?)`|none)", table, re.MULTILINE))
    assert rows == {name: "" if name == "pixel" else c.default_model for name, c in CODECS.items()}

"""Measures of the source tree. Run by hand, on any checkout.

    python tests/measure_house.py .
    python tests/measure_house.py ../older --json before.json --mock-run

Figures
    files, lines        Python files of dit/, data_prep/, recipes/ and benchmarks/; all their lines
    code_lines          lines that hold code: no blank line, comment line or docstring
    file, function      lines of a file; of a function from its `def` to its end, with its
                        docstring, without decorators: median/p90/max
    over_60             functions of more than 60 lines
    comments            lines that begin with #, per 100 code lines
    docstring_lines     per 100 code lines; a text that stands alone below a value counts too
    typed_arguments     arguments with an annotation, without self and cls, in percent
    public_docstrings   functions and methods with a docstring, in percent of those whose name does
                        not begin with _
    shaped_tensors      arguments whose name ends in dimensions (level_TD), in percent of those
                        with Tensor in their annotation

Lists
    short_files         files of fewer than 60 lines, apart from __init__.py and __main__.py
    files_per_folder    Python files directly in a folder, apart from those two; full_folders has
                        those with more than 12
    classes_twice       classes of one name in two places
    functions_twice     public functions of one name at the top level of two modules, without main
    files_twice         files of one name in two folders, apart from __init__.py and __main__.py
    unlisted            folder -> files and sub-folders whose name is no word of its docstring
    private_members     dependency -> file -> its private names there: those in source_tree.PRIVATE
                        that the file looks up, imports, overrides or names in a text; under "?"
                        attributes with a leading _ that the tree does not define, and imports
    family_leaks        where a module outside a family's folder dit/models/<family>/ imports the
                        folder, names one of its classes or compares `.family` with a text; one
                        import of each family directly in dit/models/ is the registry's
    riddles             phrases of RIDDLES in docstrings and comments
    mock_run            with --mock-run: files and lines of the tree that a training run of one
                        process and 4 steps imports (conf/dit_debug.yaml), by folder
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from pathlib import Path
from statistics import quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is run as a script

from tools.source_tree import (
    SPECIAL,
    TOPS,
    Function,
    Source,
    classes,
    families,
    family_leaks,
    files_per_folder,
    private_members,
    read,
    twice,
    unlisted,
)

FULL, SHORT, LONG = 12, 60, 60
RIDDLES = re.compile(
    r"\b(?:of (?:now|then|which|whom)|whoever|whose is|who (?:has|is|reads|asks)|as if"
    r"|(?:that|which) they belong to|those of \w+ are|has more by now|of which the|such as has"
    r"|may be none|may have more|what is learnt|begins? their|stays? as it|as a wish|their last)\b"
    r"|; its own\.",
    re.IGNORECASE,
)
_SHAPE = re.compile(r"[a-z0-9]_[A-Z][A-Z0-9]*$")
_RUN = """
import json, runpy, sys
from pathlib import Path
tree, out, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = f"{tree}/recipes/pretrain_dit.py"
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    opened = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    Path(out).write_text(json.dumps([sys.argv[0], *filter(None, opened)]))
"""


def measure(tree: Path) -> dict[str, Any]:
    """All but the mock run."""
    sources = read(tree)
    modules = [source for source in sources if source.stem not in SPECIAL]
    full = files_per_folder(sources)
    return {
        "figures": figures(sources),
        "short_files": [s.path for s in modules if s.lines < SHORT],
        "files_per_folder": full,
        "full_folders": {folder: count for folder, count in full.items() if count > FULL},
        "classes_twice": twice(classes(sources)),
        "functions_twice": twice(public_at_top(sources)),
        "files_twice": twice((s.stem, s.path) for s in modules),
        "unlisted": unlisted(sources),
        "private_members": private_members(sources),
        "families": families(sources),
        "family_leaks": family_leaks(sources),
        "riddles": riddles(sources),
    }


def figures(sources: list[Source]) -> dict[str, Any]:
    """The numbers of the table."""
    texts = [text for source in sources for text in texts_of(source)]
    comments = [c for s in sources for c in comments_of(s) if not c.line[: c.start[1]].strip()]
    functions = [f for s in sources for f in s.nodes(ast.FunctionDef, ast.AsyncFunctionDef)]
    lengths = [function.end_lineno - function.lineno + 1 for function in functions]
    given = [argument for function in functions for argument in arguments(function)]
    hints = [(one.arg, ast.unparse(one.annotation)) for one in given if one.annotation]
    public = [f for f in functions if not f.name.startswith("_")]
    code = sum(map(code_lines, sources))
    return {
        "files": len(sources),
        "lines": sum(source.lines for source in sources),
        "code_lines": code,
        "file": spread([source.lines for source in sources]),
        "function": spread(lengths),
        "over_60": sum(length > LONG for length in lengths),
        "comments": round(100 * len(comments) / code, 1),
        "docstring_lines": round(100 * sum(map(height, texts)) / code, 1),
        "typed_arguments": percent([one.annotation is not None for one in given]),
        "public_docstrings": percent([ast.get_docstring(f) is not None for f in public]),
        "shaped_tensors": percent(
            [bool(_SHAPE.search(name)) for name, hint in hints if re.search(r"\bTensor\b", hint)]
        ),
    }


def texts_of(source: Source) -> list[ast.Constant]:
    """Docstrings, and texts that stand alone below a value."""
    alone = [node.value for node in source.nodes(ast.Expr)]
    return [one for one in alone if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def height(node: ast.expr) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def comments_of(source: Source) -> list[tokenize.TokenInfo]:
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return [token for token in tokens if token.type == tokenize.COMMENT]


def code_lines(source: Source) -> int:
    prose = {text.lineno + row for text in texts_of(source) for row in range(height(text))}
    lines = enumerate(map(str.strip, source.text.splitlines()), 1)
    return sum(bool(line) and line[0] != "#" and number not in prose for number, line in lines)


def arguments(function: Function) -> list[ast.arg]:
    every = [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    return [one for one in every if one.arg not in ("self", "cls")]


def spread(values: list[int]) -> str:
    """Median/p90/max."""
    tenths = quantiles(values, n=10, method="inclusive")
    return f"{tenths[4]:.0f}/{tenths[8]:.0f}/{max(values)}"


def percent(values: list[bool]) -> float:
    return round(100 * sum(values) / max(1, len(values)), 1)


def public_at_top(sources: list[Source]) -> list[tuple[str, str]]:
    """(name, place) of the public functions of all modules, without main."""
    found = [(f, s) for s in sources for f in s.syntax.body if isinstance(f, Function)]
    return [(f.name, f"{s.path}:{f.lineno}") for f, s in found if not re.match("_|main$", f.name)]


def riddles(sources: list[Source]) -> list[str]:
    """file:line: phrase, of docstrings and comments."""
    found = []
    for source in sources:
        prose = [(text.lineno, str(text.value)) for text in texts_of(source)]
        prose += [(comment.start[0], comment.string) for comment in comments_of(source)]
        for first, text in sorted(prose):
            for hit in RIDDLES.finditer(text):
                line = first + text.count("\n", 0, hit.start())
                found.append(f"{source.path}:{line}: {' '.join(hit.group().split())}")
    return found


def mock_run(tree: Path) -> dict[str, Any]:
    """Files and lines of the tree that a training run of four steps imports."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "opened.json")
        given = ["--config-file", "conf/dit_debug.yaml", "train.train_iters=4"]
        given += [f"checkpoint.save={folder}/run"]
        done = subprocess.run(
            [sys.executable, "-c", _RUN, str(tree), str(out), *given],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"the mock run failed:\n{done.stdout}{done.stderr}")
        opened = {Path(file).resolve() for file in json.loads(out.read_text())}
    ours = sorted(file.relative_to(tree) for file in opened if file.is_relative_to(tree))
    ours = [file for file in ours if file.parts[0] in TOPS]
    return {**by_folder(tree, ours), "opened": [file.as_posix() for file in ours]}


def by_folder(tree: Path, files: list[Path]) -> dict[str, Any]:
    """Files and lines, of all and of each folder."""
    lines: dict[str, list[int]] = defaultdict(list)
    for file in files:
        lines["/".join(file.parts[:-1][:2])].append(len((tree / file).read_text().splitlines()))
    return {
        "files": len(files),
        "lines": sum(map(sum, lines.values())),
        "folders": {folder: [len(n), sum(n)] for folder, n in sorted(lines.items())},
    }


def show(measures: dict[str, Any]) -> str:
    """A line for each figure and each entry of a list."""
    lines = []
    for title, found in measures.items():
        lines.append(title if title in ("figures", "mock_run") else f"{title}: {len(found)}")
        items = found.items() if isinstance(found, dict) else ((one, "") for one in found)
        lines += [f"    {name}  {value}".rstrip() for name, value in items if name != "opened"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures of the source tree.")
    parser.add_argument("tree", type=Path, help="root of a checkout")
    parser.add_argument("--json", type=Path, help="file for all measures")
    parser.add_argument("--mock-run", action="store_true", help="train four steps, count the files")
    chosen = parser.parse_args()
    measures = measure(chosen.tree.resolve())
    if chosen.mock_run:
        measures["mock_run"] = mock_run(chosen.tree.resolve())
    sys.stdout.write(show(measures))
    if chosen.json:
        chosen.json.write_text(json.dumps(measures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures a checkout of the source tree, by its syntax trees and by runs.

    python -m tools.measure_house                                all, of this checkout
    python -m tools.measure_house --root ../older --json older.json
    python -m tools.measure_house --static                       without the three runs

Figures, of the Python files of dit/, data_prep/, recipes/ and benchmarks/
    files, lines        number of files, and of all their lines
    code_lines          lines that hold code: no blank line, comment line or docstring
    file, function      lines of a file; of a function from its `def` to its end, with its
                        docstring, without decorators: median/p90/longest
    over_60             functions of more than 60 lines
    comments            lines that begin with #, per 100 code lines
    docstring_lines     per 100 code lines; a text that stands alone below a value counts too
    typed_arguments     arguments with an annotation, without self and cls, in percent
    public_docstrings   functions and methods with a docstring, in percent of those whose name does
                        not begin with _
    shaped_tensors      arguments whose name ends in dimensions (level_TD), in percent of those
                        with Tensor in their annotation
    with_legends        shaped_tensors, and arguments whose shape is in brackets ([T, D]) in a
                        docstring: of their function, of a function or class around it, or of the
                        file
    tests, golden_yaml, tools   lines of the Python files of tests/, of the YAML files of
                        tests/golden/, of the Python files of tools/
    circles             import cycles: groups of files that import each other, directly or not; late
                        imports and those below TYPE_CHECKING count (import_graph.py)
    up_arrows           pairs of folders (dit.train, data_prep): the first imports the second,
                        although the order of tests/unit/test_import_directions.py, without its
                        SPLIT, has the first below the second
    exceptions          entries of that test's SPLIT without which it would refuse an up arrow:
                        parts of folders with a place of their own in the order, such as
                        dit.convert.cards
    late_imports        import statements inside functions, without benchmarks/
    of_run_config       functions and methods with RunConfig in the annotation of an argument
    any_arguments       arguments annotated Any, *args and **kwargs included; any_models: those of
                        them that are named model, module or network
    opening             largest number of lines, and of local names, of a function in
                        dit/train/opening/; arguments count, names of inner functions do not
    trainer             lines of dit/train/trainer.py
    over_400            files of more than 400 lines
    pack_missing        fields that a pack may lack, those with a default, over all types of a pack
    pack_own            fields among them that at most one module of dit/ gives a value (None and
                        empty ones do not count), so that they belong to one method or family
    family_names        names that a family's family.py, model.py and diffusers.py import from our
                        other modules, late imports included, each once: the median of all families
    settings            settings of layers: all, those that one family alone sets, those that none
                        sets (layer_settings.py; not with --static, nor of trees that it cannot ask)

Lists
    short_files         files of fewer than 60 lines, apart from __init__.py and __main__.py
    files_per_folder    Python files directly in a folder, apart from those two; full_folders has
                        those with more than 12
    long_functions      those of more than 60 lines
    long_files          those of more than 400 lines
    names_of_families   the numbers whose median is family_names
    of_one_family, of_none    settings of layers that one family sets, with its name, and none
    pack_fields         what pack_missing counts, with the number of modules that give it a value
    circles_of, arrows_of, exceptions_of    what these three figures count
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
    shaped_sample       20 of the arguments that with_legends counts, drawn at random, for a reader

Runs, each of one process: files and lines of the tree that it imports, by folder. The idle ones
among these files have no function that is entered, not even at import
    mock_run            a training of 4 steps by conf/dit_debug.yaml
    lora_run            the same of adapters of rank 2 on its checkpoint
    convert_import      `python -m dit.convert import` of a tiny FLUX
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import random
import re
import subprocess
import symtable
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tools.import_graph import arrows, circles, late_imports
from tools.opened_files import opened_by_runs
from tools.source_tree import (
    SPECIAL,
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

FULL, SHORT, LONG, LONG_FILE = 12, 60, 60, 400
RIDDLES = re.compile(
    r"\b(?:of (?:now|then|which|whom)|whoever|whose is|who (?:has|is|reads|asks)|as if"
    r"|(?:that|which) they belong to|those of \w+ are|has more by now|of which the|such as has"
    r"|may be none|may have more|what is learnt|begins? their|stays? as it|as a wish|their last)\b"
    r"|; its own\.",
    re.IGNORECASE,
)
_SHAPE = re.compile(r"[a-z0-9]_[A-Z][A-Z0-9]*$")
_BRACKETS = re.compile(r"\[[^\]\[]*\b[A-Z][A-Z0-9]?\b[^\]\[]*\]")
OPENING, TRAINER = "dit/train/opening/", "dit/train/trainer.py"
NO_PACK = ("LatentSample", "Problem", "SequenceShard")
PAGES = ("family.py", "model.py", "diffusers.py")
_RUNS = ("mock_run", "lora_run", "convert_import")


def measure(tree: Path) -> dict[str, Any]:
    """All figures and lists of the checkout `tree`, except those of the runs."""
    sources = read(tree)
    modules = [source for source in sources if source.stem not in SPECIAL]
    full = files_per_folder(sources)
    rings, (edges, excuses) = circles(sources), arrows(tree)
    shaped = [place for place, is_shaped in with_legends(sources) if is_shaped]
    imports = {"circles": len(rings), "up_arrows": len(edges), "exceptions": len(excuses)}
    others = {
        "tests": lines_in(tree / "tests"),
        "golden_yaml": lines_in(tree / "tests/golden", "yaml"),
    }
    others["tools"] = lines_in(tree / "tools")
    return {
        "figures": {**figures(sources), **others, **imports, "late_imports": late_imports(sources)},
        "long_functions": long_functions(sources),
        "long_files": [f"{s.path} {s.lines}" for s in sources if s.lines > LONG_FILE],
        "names_of_families": names_of_families(sources),
        "pack_fields": pack_fields(sources),
        "circles_of": [", ".join(ring) for ring in rings],
        "arrows_of": edges,
        "exceptions_of": excuses,
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
        "shaped_sample": sorted(random.Random(0).sample(shaped, min(20, len(shaped)))),
    }


def figures(sources: list[Source]) -> dict[str, Any]:
    """Sizes of the code, and how much of it is documented, by name."""
    texts = [text for source in sources for text in texts_of(source)]
    comments = [c for s in sources for c in comments_of(s) if not c.line[: c.start[1]].strip()]
    functions = [f for s in sources for f in s.nodes(ast.FunctionDef, ast.AsyncFunctionDef)]
    given = [argument for function in functions for argument in arguments(function)]
    public = [f for f in functions if not f.name.startswith("_")]
    loose = [one.arg for one in given if hint_of(one) == "Any"]
    steps = functions_of_opening(sources)
    code = sum(map(code_lines, sources))
    return {
        "files": len(sources),
        "lines": sum(source.lines for source in sources),
        "code_lines": code,
        "file": spread([source.lines for source in sources]),
        "function": spread(list(map(length, functions))),
        "over_60": len(long_functions(sources)),
        "comments": round(100 * len(comments) / code, 1),
        "docstring_lines": round(100 * sum(map(height, texts)) / code, 1),
        "typed_arguments": percent([one.annotation is not None for one in given]),
        "public_docstrings": percent([ast.get_docstring(f) is not None for f in public]),
        "shaped_tensors": percent([is_shaped(one) for one in given if is_tensor(one)]),
        "with_legends": percent([is_shaped for _, is_shaped in with_legends(sources)]),
        "of_run_config": sum(takes_run_config(function) for function in functions),
        "any_arguments": len(loose),
        "any_models": sum(name in ("model", "module", "network") for name in loose),
        "opening": [max(map(of, steps), default=0) for of in (length, local_names)],
        "trainer": sum(s.lines for s in sources if s.path == TRAINER),
        "over_400": sum(source.lines > LONG_FILE for source in sources),
        "pack_missing": len(pack_fields(sources)),
        "pack_own": sum(modules < 2 for modules in pack_fields(sources).values()),
        "family_names": median(names_of_families(sources).values()),
    }


def pack_fields(sources: list[Source]) -> dict[str, int]:
    """Number of modules that give a value to a pack's field, by "Type.field".

    Only fields with a default are listed. The types of a pack are the classes of dit/batch, except
    those of a sample and of a problem.
    """
    kinds = [
        node
        for source in sources
        if re.match(r"dit/batch(\.py|/)", source.path)
        for node in source.nodes(ast.ClassDef)
        if node.name not in NO_PACK
    ]
    optional = [
        (kind.name, line.target.id)
        for kind in kinds
        for line in kind.body
        if isinstance(line, ast.AnnAssign) and line.value and isinstance(line.target, ast.Name)
    ]
    others = [s for s in sources if re.match(r"dit/(?!batch[./])", s.path)]
    given = [fields_given(source, {kind.name for kind in kinds}) for source in others]
    return {f"{kind}.{name}": sum(name in one for one in given) for kind, name in optional}


def fields_given(source: Source, kinds: set[str]) -> set[str]:
    """Names of the fields that a module sets by keyword when it makes or replaces one of `kinds`.

    Keys of dictionaries count, too: tensors of a pack may be given by name.
    """
    found = set[str]()
    for call in source.nodes(ast.Call):
        if ast.unparse(call.func).rpartition(".")[2] in {*kinds, "replace"}:
            given = [k for k in call.keywords if ast.unparse(k.value) not in ("None", "()", "{}")]
            found |= {k.arg for k in given if k.arg}
    keys = [key for node in source.nodes(ast.Dict) for key in node.keys]
    keys += [node.slice for node in source.nodes(ast.Subscript) if isinstance(node.ctx, ast.Store)]
    return found | {str(key.value) for key in keys if isinstance(key, ast.Constant)}


def layer_settings(tree: Path) -> dict[str, list[str]]:
    """The families that set each setting of layers, in the checkout `tree`, by "Type.field".

    Empty if that checkout cannot be asked, because it specifies layers in another way.
    """
    # Not an import: the functions of that tree are asked.
    script, path = Path(__file__).with_name("layer_settings.py"), {"PYTHONPATH": str(tree)}
    asked = "json.dumps(runpy.run_path(sys.argv[1])['layer_settings']())"
    code = f"import json, runpy, sys; print({asked})"
    command = [sys.executable, "-P", "-c", code, str(script)]
    done = subprocess.run(command, cwd=tree, env=os.environ | path, capture_output=True, text=True)
    return {} if done.returncode else json.loads(done.stdout)


def add_settings(measures: dict[str, Any], setters: dict[str, list[str]]) -> None:
    """Adds the numbers and lists of settings of layers to `measures`.

    `setters` has the families that set each setting.
    """
    one = {name: names[0] for name, names in setters.items() if len(names) == 1}
    none = [name for name, names in setters.items() if not names]
    measures["figures"]["settings"] = f"{len(setters)}; {len(one)}; {len(none)}"
    measures |= {"of_one_family": one, "of_none": none}


def functions_of_opening(sources: list[Source]) -> list[ast.FunctionDef]:
    return [f for s in sources if s.path.startswith(OPENING) for f in s.nodes(ast.FunctionDef)]


def hint_of(argument: ast.arg) -> str:
    return ast.unparse(argument.annotation) if argument.annotation is not None else ""


def takes_run_config(function: Function) -> bool:
    return any("RunConfig" in hint_of(one) for one in arguments(function))


def local_names(function: Function) -> int:
    """Number of names bound in `function`, with arguments, without those of inner functions."""
    table = symtable.symtable(ast.unparse(function), function.name, "exec").get_children()
    # Before a generic function its type parameters have a table of their own.
    return len(next(one for one in table if isinstance(one, symtable.Function)).get_locals())


def names_of_families(sources: list[Source]) -> dict[str, int]:
    """Number of names that each family's files import from other modules of dit, by family.

    Only its family.py, model.py and diffusers.py count.
    """
    found = {family: set[tuple[str, str]]() for family in families(sources)}
    for source in sources:
        family, _, page = source.path.rpartition("/")
        if family in found and page in PAGES:
            own = family.replace("/", ".")
            for node in source.nodes(ast.ImportFrom):
                module = node.module or ""
                if module.startswith("dit.") and not f"{module}.".startswith(f"{own}."):
                    found[family] |= {(module, one.name) for one in node.names}
    return {family: len(names) for family, names in found.items()}


def lines_in(folder: Path, kind: str = "py") -> int:
    return sum(len(file.read_text().splitlines()) for file in folder.rglob(f"*.{kind}"))


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def long_functions(sources: list[Source]) -> list[str]:
    return [
        f"{source.path}:{function.lineno} {function.name} {length(function)}"
        for source in sources
        for function in source.nodes(ast.FunctionDef, ast.AsyncFunctionDef)
        if length(function) > LONG
    ]


def is_tensor(argument: ast.arg) -> bool:
    hint = argument.annotation
    return hint is not None and bool(re.search(r"\bTensor\b", ast.unparse(hint)))


def is_shaped(argument: ast.arg) -> bool:
    return bool(_SHAPE.search(argument.arg))


def with_legends(sources: list[Source]) -> list[tuple[str, bool]]:
    """(place, whether a docstring has its shape) of each argument that is a tensor."""
    return [found for source in sources for found in _told(source.path, source.syntax, told=False)]


def _told(path: str, node: ast.AST, *, told: bool) -> Iterator[tuple[str, bool]]:
    if isinstance(node, ast.Module | ast.ClassDef | Function):
        told = told or bool(_BRACKETS.search(ast.get_docstring(node) or ""))
    if isinstance(node, Function):
        for one in filter(is_tensor, arguments(node)):
            yield f"{path}:{node.lineno} {node.name}({one.arg})", told or is_shaped(one)
    for child in ast.iter_child_nodes(node):
        yield from _told(path, child, told=told)


def texts_of(source: Source) -> list[ast.Constant]:
    """The syntax nodes of docstrings and of texts below a value."""
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
    """The median, the 90th percentile and the maximum of `values` as text: median/p90/max."""
    tenths = quantiles(values, n=10, method="inclusive")
    return f"{tenths[4]:.0f}/{tenths[8]:.0f}/{max(values)}"


def percent(values: list[bool]) -> float:
    return round(100 * sum(values) / max(1, len(values)), 1)


def public_at_top(sources: list[Source]) -> list[tuple[str, str]]:
    """(name, place) of the public functions of all modules, without main."""
    found = [(f, s) for s in sources for f in s.syntax.body if isinstance(f, Function)]
    return [(f.name, f"{s.path}:{f.lineno}") for f, s in found if not re.match("_|main$", f.name)]


def riddles(sources: list[Source]) -> list[str]:
    """Phrases of RIDDLES in docstrings and comments, each as "file:line: phrase"."""
    found = []
    for source in sources:
        prose = [(text.lineno, str(text.value)) for text in texts_of(source)]
        prose += [(comment.start[0], comment.string) for comment in comments_of(source)]
        for first, text in sorted(prose):
            for hit in RIDDLES.finditer(text):
                line = first + text.count("\n", 0, hit.start())
                found.append(f"{source.path}:{line}: {' '.join(hit.group().split())}")
    return found


def show(measures: dict[str, Any]) -> str:
    """The figures and lists as text, with a line for each figure and each entry."""
    lines = []
    for title, found in measures.items():
        whole = title in ("figures", *_RUNS)
        lines.append(title if whole else f"{title}: {len(found)}")
        items = found.items() if isinstance(found, dict) else ((one, "") for one in found)
        lines += [f"    {name}  {value}".rstrip() for name, value in items if name != "opened"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path(), help="a checkout (default: this one)")
    parser.add_argument("--json", type=Path, help="file for all measures")
    parser.add_argument("--static", action="store_true", help="leave the runs out")
    chosen = parser.parse_args()
    tree = chosen.root.resolve()
    measures = measure(tree)
    if not chosen.static:
        if setters := layer_settings(tree):
            add_settings(measures, setters)
        measures |= opened_by_runs(tree)
    sys.stdout.write(show(measures))
    if chosen.json:
        chosen.json.write_text(json.dumps(measures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Analyses imports between files: cycles, imports against the order of folders, late imports.

Every import counts, also inside functions and below TYPE_CHECKING. A name that an `__init__` only
re-exports belongs to the file that defines it. The order is that of
tests/unit/test_import_directions.py of the same checkout: its ALLOWED, without the parts of SPLIT.
"""

from __future__ import annotations

import ast
import runpy
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx

from tools.source_tree import Function, Source

ORDER = "tests/unit/test_import_directions.py"


def circles(sources: list[Source]) -> list[list[str]]:
    """The import cycles: each is a list of modules that import each other, directly or not."""
    modules = {module_of(source): source for source in sources}
    graph = networkx.DiGraph(
        (module, target)
        for module, source in modules.items()
        for node in source.nodes(ast.Import, ast.ImportFrom)
        for target in _targets(node, modules)
        if target != module
    )
    found = networkx.strongly_connected_components(graph)
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def module_of(source: Source) -> str:
    """The name of a file as a module: dit.train.step for dit/train/step.py."""
    return source.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def _targets(node: ast.Import | ast.ImportFrom, modules: dict[str, Source]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif node.module:
        places = (_defining(node.module, alias.name, modules) for alias in node.names)
        yield from filter(None, places)


def _defining(module: str, name: str, modules: dict[str, Source]) -> str | None:
    """The module that defines `name`, which is imported from `module`; None if outside the tree.

    Re-exports are followed to their origin.
    """
    if f"{module}.{name}" in modules or module not in modules:
        return f"{module}.{name}" if f"{module}.{name}" in modules else None
    passed = [node for node in modules[module].syntax.body if isinstance(node, ast.ImportFrom)]
    for node in passed:
        for alias in node.names:
            if (alias.asname or alias.name) == name and node.module != module:
                return _defining(node.module or "", alias.name, modules) or module
    return module


def arrows(tree: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Imports against the order of folders; returns (arrows, exceptions).

    `arrows` has sentences "MODULE imports NAME" by "folder -> folder". `exceptions` are the entries
    of SPLIT that allow any of these imports.
    """
    test = runpy.run_path(str(tree / ORDER))
    allowed, split = test["ALLOWED"], test["SPLIT"]
    order = networkx.DiGraph(
        (part, below) for part, parts in allowed.items() for below in parts if part not in split
        if below not in split
    )  # fmt: skip
    found: dict[str, list[str]] = defaultdict(list)
    excuses = set()
    for module, name in _imports(tree, test):
        above, below = _folder(module), _folder(name)
        known = above in order and below in order and above != below
        if known and networkx.has_path(order, below, above):
            found[f"{above} -> {below}"].append(f"{module} imports {name}")
            excuses |= {test["part_of"](module), test["part_of"](name)} & set(split)
    return dict(sorted(found.items())), sorted(excuses)


def _imports(tree: Path, test: dict[str, Any]) -> Iterator[tuple[str, str]]:
    modules = {module for module, _ in test["sources"](tree)} - {"dit"}
    for module, file in test["sources"](tree):
        for name in test["imports_of"](file):
            if module != "dit" and name in modules:
                yield module, name


def _folder(module: str) -> str:
    names = module.split(".")
    return ".".join(names[:2]) if names[0] == "dit" else names[0]


def late_imports(sources: list[Source]) -> int:
    """Number of import statements inside functions, without benchmarks/."""
    return len({
        (source.path, node.lineno)
        for source in sources
        if not source.path.startswith("benchmarks/")
        for function in source.nodes(*Function.__args__)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    })  # fmt: skip

"""Checks the form of docstrings, to find those that cannot be understood alone.

A linter sees how a docstring begins, how long it is and which names it has, not whether it is true
or clear.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tools.source_tree import Function, Source

LEANING = re.compile(r"(Of|Those|The same|Likewise|Without)\b")
"""First words of a sentence that needs the sentence before it."""
PARTICIPLE = re.compile(
    r"([A-Za-z]+(ed|ing)|Drawn|Given|Held|Kept|Known|Made|Seen|Taken|Told|Written)\b(?!-)"
)
NOUNS = {
    *("Embedding", "Feed", "Hugging", "Learning", "Logging", "Packing", "Padding"),
    *("Pretraining", "Sampling", "Scaling", "Speed", "Training"),
    *("Anything", "Everything", "Nothing", "Something"),
}
"""First words that only look like participles."""
EMPTY = {"As", "For", "From", "If", "In", "Inside", "It", "On", "That", "There", "These", "They"}
EMPTY |= {"This", "To", "What", "When", "Where", "Which", "Who", "With"}
"""First words that name neither a thing nor an act."""
Documented = ast.Module | ast.ClassDef | Function


@dataclass(frozen=True)
class Fault:
    """A fault of a docstring or of a text below a field, and its line."""

    path: str  # of the file, relative to the tree
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.why}"


def docstring_faults(sources: Iterable[Source]) -> dict[str, list[Fault]]:
    """Finds faults of docstrings and of texts below fields; returns them by path of the file.

    Files without faults are left out.
    """
    found = {source.path: sorted(_faults(source), key=lambda one: one.line) for source in sources}
    return {path: faults for path, faults in found.items() if faults}


def _faults(source: Source) -> Iterator[Fault]:
    for node, public in _documented(source.syntax, True):
        if (text := ast.get_docstring(node)) is None:
            continue
        for why in (*_of_any(text), *(_of_function(node, text) if public else ())):
            yield Fault(source.path, node.body[0].lineno, why)
    for text, line in _texts_of_fields(source):
        yield from (Fault(source.path, line, why) for why in _of_beginning(text))


def _documented(node: Any, public: bool) -> Iterator[tuple[Any, bool]]:
    """Yields the nodes inside `node` that may have a docstring, and whether each is public."""
    yield node, public
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ClassDef | Function):
            seen = public and not inner.name.startswith("_") and not isinstance(node, Function)
            yield from _documented(inner, seen)
        elif isinstance(inner, ast.If | ast.With | ast.Try):
            yield from (one for one in _documented(inner, public) if one[0] is not inner)


def _of_any(text: str) -> Iterator[str]:
    if len(text.split("\n\n")[0].split()) < 3:
        yield f"has fewer than three words in its first paragraph: {text!r}"
    yield from _of_beginning(text)


def _of_beginning(text: str) -> Iterator[str]:
    first = PARTICIPLE.match(text)
    if LEANING.match(text) or (first is not None and first[0] not in NOUNS):
        yield f"begins with no subject of its own: {text.splitlines()[0]!r}"


def _of_function(node: Documented, text: str) -> Iterator[str]:
    if not isinstance(node, Function):
        return
    arguments = {one.arg for one in _arguments(node.args)} - {"self", "cls", "_"}
    named = {*re.findall(r"\w+", text.lower())}
    words = {word for one in arguments for word in (one, *one.split("_"))}
    if re.match(r"\w*", text)[0] in EMPTY and arguments and not named & {*map(str.lower, words)}:  # type: ignore[index]  # the pattern fits every text
        yield f"names neither an argument nor a result: {text.splitlines()[0]!r}"


def _arguments(all_of_them: ast.arguments) -> list[ast.arg]:
    every = [*all_of_them.posonlyargs, *all_of_them.args, *all_of_them.kwonlyargs]
    return [*every, *filter(None, (all_of_them.vararg, all_of_them.kwarg))]


def _texts_of_fields(source: Source) -> Iterator[tuple[str, int]]:
    """Yields (text, line) of strings below an assignment in a class or in the file."""
    for holder in source.nodes(ast.Module, ast.ClassDef):
        for before, after in zip(holder.body, holder.body[1:], strict=False):
            value = after.value if isinstance(after, ast.Expr) else None
            below = isinstance(before, ast.Assign | ast.AnnAssign)
            if below and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value.strip(), after.lineno

"""The page of errors quotes messages as the code has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_VALUE = "…"  # of the page, for what a message fills in
_PLACES = ("dit", "data_prep", "recipes")


def quoted() -> list[str]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"^\*\*`([^`]+)`\*\*", page, re.MULTILINE)


def written(expression: ast.expr) -> str:
    """The text of a string of the source, with `_VALUE` where it fills something in."""
    match expression:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(written(part) for part in parts)
        case ast.BinOp(op=ast.Add()):
            return written(expression.left) + written(expression.right)
    return _VALUE


def messages() -> Iterator[str]:
    for file in (file for place in _PLACES for file in (ROOT / place).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                yield " ".join(written(node).split())


def parts(quotation: str) -> list[str]:
    """What stands between the values; short words such as `of` could be anywhere."""
    return [part.strip() for part in quotation.split(_VALUE) if part.strip()]


def test_every_quotation_is_a_message_of_the_code() -> None:
    known = set(messages())
    lost = [
        quotation
        for quotation in quoted()
        if not any(_in_order(parts(quotation), message) for message in known)
    ]
    assert not lost


def _in_order(words: list[str], message: str) -> bool:
    place = 0
    for word in words:
        if (place := message.find(word, place)) < 0:
            return False
        place += len(word)
    return True


def test_there_are_thirty_errors_with_words_enough_to_find_them() -> None:
    found = quoted()
    assert len(found) >= 30 and len(set(found)) == len(found)
    assert all(len("".join(parts(quotation))) >= 8 for quotation in found)

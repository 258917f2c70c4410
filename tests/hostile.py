"""Bytes and values as a fault or a stranger makes them, for the tests named `hostile`.

`pytest tests/unit -k hostile` runs a bounded number of examples, the same each time;
`--hypothesis-profile=thorough` runs 2,000 new ones of each.
"""

from __future__ import annotations

import copy
import json
import math
from typing import Any

from hypothesis import strategies as st

_SPECIAL = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\n",
    b"\r\n",
    b"\xe2\x80\xa8",
    b'"',
    b"{",
    b"[",
]


@st.composite
def damaged(draw: st.DrawFn, valid: bytes, *, most: int = 4) -> bytes:
    """`valid` after up to `most` faults: flipped bits, lost, repeated or foreign bytes."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "insert", "repeat", "truncate", "overwrite"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at : at + draw(st.integers(1, 64))]
            case "insert":
                data[at:at] = draw(st.sampled_from(_SPECIAL) | st.binary(min_size=1, max_size=32))
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 64))]
            case "truncate":
                del data[at:]
            case "overwrite":
                fill = draw(st.sampled_from([b"\x00", b"\xff", b"7", b"9"]))
                span = draw(st.integers(1, 16))
                data[at : at + span] = fill * span
    return bytes(data)


odd_numbers = st.sampled_from(
    [0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e-320, 1e308, math.inf, math.nan]
)
odd_text = st.sampled_from(
    [
        "",
        " ",
        "\x00",
        "a\nb",
        "a\u2028b",
        "$x^2$",
        "../../etc",
        "/",
        "null",
        "nan",
        "1e9",
        "é" * 300,
    ]
) | st.text(max_size=12)
odd_values = st.recursive(
    st.none() | st.booleans() | odd_numbers | odd_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_text, inner, max_size=3),
    max_leaves=5,
)
"""What JSON, YAML or TOML can hold where something else is expected."""

deep_json = st.sampled_from(["[" * 50_000, '{"a":' * 50_000, "[" * 50_000 + "]" * 50_000])


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(place for key, item in inside for place in _places(item, (*path, key)))]


@st.composite
def mistaken(draw: st.DrawFn, valid: Any, *, most: int = 3) -> Any:
    """The document `valid` with up to `most` of its values replaced, left out or added."""
    document = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, most))):
        *way, last = draw(st.sampled_from(_places(document))) or (None,)
        if last is None:
            return draw(odd_values)
        parent = document
        for key in way:
            parent = parent[key]
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                parent[last] = draw(odd_values)
            case "remove":
                del parent[last]
            case "add" if isinstance(parent, dict):
                parent[draw(odd_text)] = draw(odd_values)
            case "add":
                parent.append(draw(odd_values))
    return document


def json_bytes(valid: Any) -> st.SearchStrategy[bytes]:
    """A file that should hold `valid` as JSON: damaged, mistaken, too deep, or no JSON at all."""
    text = json.dumps(valid, ensure_ascii=False).encode()
    return (
        damaged(text)
        | mistaken(valid).map(lambda value: json.dumps(value).encode())
        | deep_json.map(str.encode)
        | st.binary(max_size=64)
    )

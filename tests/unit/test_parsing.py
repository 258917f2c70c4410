from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dit import parsing
from dit.parsing import YamlError, cause, parse_json, parse_yaml
from tests.hostile import json_bytes

VALID = {"caption": "a “quote” \U0001f600", "size": [1, 2.5, None], "nested": {"a": True}}


@given(json_bytes(VALID) | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_hostile_json_is_a_value_or_a_value_error(text: bytes) -> None:
    for form in (text, text.decode("utf-8", "surrogateescape")):
        try:
            value = parse_json(form)
        except ValueError:
            continue
        repr(value).encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"\\ud800"', "surrogate"),
        (b'"\\ud800"', "surrogate"),
        ('"\udcff"', "surrogate"),
        (b'"\xed\xa0\x80"', "can't decode"),
        ("[" * 100_000, "too deeply"),
        ('{"a":' * 100_000, "too deeply"),
        ("9" * 5000, "Exceeds the limit"),
        (b"\xff", "can't decode"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_an_error_is_never_a_bare_key_and_never_empty() -> None:
    assert cause(KeyError("latent")) == "'latent' is missing"
    assert cause(ValueError("two\n lines")) == "ValueError: two lines"
    assert cause(MemoryError()) == "MemoryError"


def test_what_is_json() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00 \\\\ud800"}') == {
        "a": "\U0001f600 \\ud800"
    }


EDGES = r"""
a: {b: [1, 0x1f, 1e-4, 1:30, "a:b", 'it''s'], c: ~, d: !!str 1}   # a comment
long: >-
  one
  two

  three
text: |+
  kept

? list
: - - 1
    - yes
  - &x {k: .inf}
  - *x
"\u00e9\\": 2001-01-01
"""


def test_both_parsers_read_the_same(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [file.read_text() for file in (repo_root / "conf").glob("*.yaml")]
    found = []
    for loader in parsing._LOADERS:
        monkeypatch.setattr(parsing, "_LOADERS", (loader,))
        found.append([repr(parse_yaml(text)) for text in [*texts, EDGES]])
    assert len(found) == 2 and found[0] == found[1]  # libyaml is part of PyYAML's wheels


@pytest.mark.parametrize(("text", "line"), [("a: 1\nb: \0", 2), ("\x07", 1)])
def test_a_character_that_no_yaml_holds_is_named_with_what_to_do(text: str, line: int) -> None:
    code = f"U\\+00{ord(text[-1]):02X}"
    with pytest.raises(
        YamlError, match=f"line {line}: the text holds the character {code}.* take it out"
    ):
        parse_yaml(text.encode())

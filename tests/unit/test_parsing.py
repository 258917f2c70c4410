import pytest
from hypothesis import given
from hypothesis import strategies as st

from dit.parsing import cause, parse_json
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

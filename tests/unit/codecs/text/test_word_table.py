"""The text encoder `words`: the same numbers everywhere, whatever the script."""

import unicodedata
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dit.codecs import text
from dit.codecs.text import WordTable
from dit.codecs.text.fixed_vectors import drawn, pieces_of, positions, vector, words_of

CARD = {"format_version": 1, "text_encoder": {"name": "words", "width": 256, "revision": "1"}}


def test_the_embedding_is_pinned() -> None:
    # A change here makes models that were trained before it blind to their prompts: raise the
    # revision with it.
    assert zlib.crc32(drawn("cat", 256).tobytes()) == PINNED["drawn"]
    encoder = WordTable(width=256)
    for caption, number in PINNED["encoded"].items():
        assert zlib.crc32(encoder.encode(caption).numpy().tobytes()) == number, caption


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("A cat, don't!", ["a", "cat", ",", "don't", "!"]),
        ("Straße ÉCOLE e\u0301cole", ["strasse", "école", "école"]),
        ("3.5 x 1,000 is C++ 50%", ["3.5", "x", "1,000", "is", "c", "+", "+", "50", "%"]),
        ("red/green zipper-mouth", ["red", "/", "green", "zipper", "-", "mouth"]),
        ("猫が好き", ["猫", "が", "好", "き"]),
        ("สวัสดี", ["ส", "วั", "ส", "ดี"]),  # marks stay with their letter
        ("हिन्दी भाषा, 한국어", ["हिन्दी", "भाषा", ",", "한국어"]),
        ("👩\u200d💻 ❤\ufe0f 🇩🇪", ["👩", "💻", "❤", "🇩", "🇪"]),
        ("it\N{RIGHT SINGLE QUOTATION MARK}s ...", ["it's", ".", ".", "."]),
        (" \t\n\u00a0\u200b", []),
    ],
)
def test_words_of_any_script(caption: str, words: list[str]) -> None:
    assert words_of(caption) == words


@settings(max_examples=100, deadline=None)
@given(caption=st.text(max_size=80))
def test_a_row_for_the_caption_and_one_for_each_word(caption: str) -> None:
    encoder, words = WordTable(width=32), words_of(caption)
    encoded = encoder.encode(caption)
    assert encoded.shape == (1 + len(words), 32) == (encoder.length_of(caption), 32)
    assert encoded.dtype == torch.float16 and torch.isfinite(encoded).all()
    # Composed or not, in capitals or not, and with spaces around: the same words.
    other = f"  {unicodedata.normalize('NFD', caption)}  "
    assert torch.equal(encoder.encode(other), encoded)
    # Nothing but spaces and invisible characters is lost.
    folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", caption).casefold())
    lost = set(folded) - set("".join(words))
    kinds = {unicodedata.category(one)[0] for one in lost if not "\ufe00" <= one <= "\ufe0f"}
    assert kinds - {"P"} <= {"Z", "C"} and not {*".,!?'", "a"} & lost


def test_rows_are_what_the_formula_says() -> None:
    one, other = vector("red", 64), vector("cat", 64)
    first = drawn("w:cat", 64) * 2
    pieces = ["<ca", "cat", "at>", "<cat", "cat>"]
    assert list(pieces_of("cat")) == pieces
    first = first + sum(drawn(piece, 64) for piece in pieces) / np.sqrt(5)
    np.testing.assert_allclose(other, first / np.sqrt(5))
    rows = np.stack([(one + other) / np.sqrt(2), one, other, one]) + positions(4, 64) / 2
    expected = (rows / np.sqrt(1.25)).astype(np.float16)
    assert np.array_equal(WordTable(width=64).encode("red cat red").numpy(), expected)


def test_words_that_look_alike_are_near() -> None:
    def cosine(one: str, other: str) -> float:
        a, b = vector(one, 4096), vector(other, 4096)
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    assert cosine("cats", "cat") > 0.1 and cosine("firefighter", "firefighters") > 0.1
    assert abs(cosine("dog", "cat")) < 0.05


def test_rows_have_unit_variance() -> None:
    words = [f"{zlib.crc32(bytes([n])):x}" for n in range(200)]  # they share few pieces
    many = np.stack([vector(word, 64) for word in words])
    assert abs(many.mean()) < 0.05 and abs(many.var() - 1) < 0.05
    for caption in ("", "one", " ".join(words[:20])):
        assert abs(WordTable(width=4096).encode(caption)[0].double().square().mean() - 1) < 0.1


def test_pooled_text_does_not_know_the_order() -> None:
    assert WordTable(width=64).encode_all("a b").keys() == {"text"}
    encoder = WordTable(width=64, pooled=True)
    assert WordTable.from_settings(encoder.settings).pooled
    one, other, null = (
        encoder.encode_all(c)["pooled_text"] for c in ("a red cat", "cat red a", "")
    )
    assert one.shape == (64,)
    assert torch.allclose(one, other, atol=2e-3) and not torch.allclose(one, null, atol=0.1)


def test_a_caption_that_is_too_long_is_cut() -> None:
    encoder = WordTable(width=8, max_length=3)
    assert torch.equal(encoder.encode("one two three"), encoder.encode("one two"))
    assert encoder.is_cut("one two three") and not encoder.is_cut("one two")
    assert WordTable.from_settings(encoder.settings).max_length == 3
    assert "max_length" not in WordTable(width=8).settings


def test_a_card_rebuilds_the_encoder() -> None:
    encoder = text.text_encoder_of_card(CARD)
    assert encoder.settings == CARD["text_encoder"]
    assert torch.equal(encoder.encode("x"), WordTable(width=256).encode("x"))


PINNED = {
    "drawn": 0xBE6536BC,
    "encoded": {
        "": 0x4E3471D8,
        "a handwritten seven": 0xC9336A10,
        "Œuvre d'art, 猫 👍 3.5%": 0x997409BA,
    },
}

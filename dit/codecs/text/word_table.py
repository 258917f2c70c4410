"""The text encoder `words`: one fixed random vector for each word, alike for words that look alike.

1. words_of  caption -> words, whatever the script
2. vector    word -> its vector: of the word itself, and of its pieces of 3 and 4 letters
3. rows      one row for the whole caption, then one for each word
"""

# L rows, E width of the embedding, P pieces of a word

from __future__ import annotations

import hashlib
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar
from unicodedata import category, name, normalize

import numpy as np

from dit.codecs.text.byte_table import ByteTable
from dit.codecs.text.fixed_vectors import FixedVectors, add_arguments, positions

# Scripts that are written without spaces: first words of the Unicode names of their letters.
_WITHOUT_SPACES = {
    *("CJK", "HIRAGANA", "KATAKANA", "HALFWIDTH", "HENTAIGANA", "BOPOMOFO", "TANGUT", "YI"),
    *("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE", "BALINESE", "CHAM"),
}
_APOSTROPHE = "\N{RIGHT SINGLE QUOTATION MARK}"
# Over the kinds of `_kind`: letters and digits with their marks, joined by an apostrophe between
# letters or a point or comma between digits; else one character with its marks.
_WORD = re.compile(r"[ad](?:[adm]|'(?=a)|(?<=d)\.(?=d))*|\Sm*")
_POSITION = 0.5  # strength of the positions beside words of unit variance


def words_of(caption: str) -> list[str]:
    """The words of a caption in order, in NFC and case folded.

    Letters and digits that stand together are a word (`don't` and `3.5` are one). Any other
    character but a space is one, too: signs, emoji, and letters of scripts without spaces. Only
    invisible characters, such as joiners between emoji, are left out.
    """
    folded = normalize("NFC", normalize("NFC", caption).casefold()).replace(_APOSTROPHE, "'")
    seen = "".join(c for c in folded if category(c) != "Cf" and not "\ufe00" <= c <= "\ufe0f")
    kinds = "".join(map(_kind, seen))
    return [seen[found.start() : found.end()] for found in _WORD.finditer(kinds)]


def _kind(character: str) -> str:
    """a: letter, d: digit, m: mark, ' and . joiners, a space, x: a word of its own."""
    if character in "'.,":
        return "." if character == "," else character
    major = category(character)
    if character.isspace() or major == "Cc":
        return " "
    if major[0] == "L":
        script = name(character, "").split()[:1]
        return "x" if _WITHOUT_SPACES.issuperset(script) else "a"
    return {"N": "d", "M": "m"}.get(major[0], "x")


def drawn(text: str, width: int) -> np.ndarray:
    """[width] float64, uniform with zero mean and unit variance: a hash of the text.

    SHAKE is the same on every machine and in every version, as NumPy's distributions are not.
    """
    bits = hashlib.shake_128(text.encode(errors="surrogatepass")).digest(2 * width)
    return ((np.frombuffer(bits, "<u2") + 0.5) / 2**15 - 1) * np.sqrt(3)


def pieces_of(word: str) -> Iterator[str]:
    """All strings of 3 and 4 characters in `<word>` (arXiv:1607.04606, Sec. 3.2)."""
    marked = f"<{word}>"
    return (marked[i : i + n] for n in (3, 4) for i in range(len(marked) - n + 1))


@lru_cache(maxsize=10_000)
def vector(word: str, width: int) -> np.ndarray:
    """[width] float64 of unit variance: four fifths of it the word's own, a fifth its pieces'."""
    pieces_PE = np.stack([drawn(piece, width) for piece in pieces_of(word)])
    return (2 * drawn(f"w:{word}", width) + pieces_PE.sum(0) / len(pieces_PE) ** 0.5) / 5**0.5


class WordTable(FixedVectors):
    """A row for the caption, the sum of its words, and one for each word.

    So a network follows a caption from its first steps on: the first row differs for each set of
    words, whatever their order.
    """

    name: ClassVar[str] = "words"
    usual_width: ClassVar[int] = 256
    most_rows: ClassVar[int] = 1024

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        add_arguments(parser, (cls, ByteTable))  # once for both

    def rows(self, caption: str) -> np.ndarray:
        """[1 + words that are kept, E] of unit variance."""
        words = self._kept(caption)
        vectors = [self.pool(caption), *(vector(word, self.width) for word in words)]
        text_LE = np.stack(vectors) + _POSITION * positions(len(vectors), self.width)
        return text_LE / (1 + _POSITION**2) ** 0.5

    def pool(self, caption: str) -> np.ndarray:
        """The sum of the words, each once; a vector of its own for a caption without any."""
        words = dict.fromkeys(self._kept(caption))
        if not words:
            return drawn("", self.width)
        return np.stack([vector(word, self.width) for word in words]).sum(0) / len(words) ** 0.5

    def _kept(self, caption: str) -> list[str]:
        return words_of(caption)[: self.max_length - 1]

    def length_of(self, caption: str) -> int:
        return 1 + len(words_of(caption))

    def words_of(self, caption: str) -> list[str]:
        return words_of(caption)

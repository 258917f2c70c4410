"""Text encoders without weights: fixed random vectors, equal on every machine.

1. FixedVectors  options, lengths and positions of both encoders
2. ByteTable     `bytes`: a vector for each byte. Networks learn to follow such captions only after
                 they have learned to read, which `words` spares them
3. WordTable     `words`: a row for the whole caption, then a vector for each word, made of the word
                 and of its pieces of 3 and 4 letters, so that similar words have similar vectors
"""

# L rows, E width of the embedding, P pieces of a word

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar, Self
from unicodedata import category, name, normalize

import numpy as np
import torch
from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.codecs.encoder_options import VectorOptions
from dit.codecs.text.encoder import TextEncoder, requested_length
from dit.command_line import option_names

_PERIOD = 10_000.0  # longest wavelength of the positions over 2 pi (arXiv:1706.03762, Sec. 3.5)


def positions(length: int, width: int) -> np.ndarray:
    """Sinusoidal position embeddings [length, width], float64; each row has a mean square of 1."""
    frequency = _PERIOD ** -(np.arange(width // 2) / (width // 2))
    angle = np.arange(length)[:, None] * frequency
    return np.sqrt(2) * np.concatenate([np.sin(angle), np.cos(angle)], axis=1)


class FixedVectors(TextEncoder):
    """A text encoder whose rows are fixed random vectors of unit variance."""

    options = frozenset((*option_names(VectorOptions), "max_sequence_length"))
    usual_width: ClassVar[int]
    most_rows: ClassVar[int]
    """Most tokens of a caption, unless --max_sequence_length is set."""
    revision = "1"

    def __init__(self, *, width: int, max_length: int | None = None, pooled: bool = False):
        if width < 8 or width % 2:
            raise CodecError(f"--text_width {width} must be an even number of at least 8")
        self.width, self.pooled = width, pooled
        self.max_length = max_length or self.most_rows

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        width = cls.usual_width if args.text_width is None else args.text_width
        length = requested_length(args, cls.most_rows)
        return cls(width=width, max_length=length, pooled=args.pooled_text)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        return cls(
            width=int(settings["width"]),
            max_length=settings.get("max_length"),
            pooled=settings.get("pooled", False),
        )

    @property
    def settings(self) -> dict[str, Any]:
        limit = {} if self.max_length == self.most_rows else {"max_length": self.max_length}
        # Absent by default, as in cards of versions without the option.
        return super().settings | limit | ({"pooled": True} if self.pooled else {})

    @abstractmethod
    def rows(self, caption: str) -> np.ndarray:
        """The rows of `caption` [L, E], float64; `encode` rounds them to half precision."""

    @abstractmethod
    def pool(self, caption: str) -> np.ndarray:
        """One vector [E] of `caption`, float64 with unit variance.

        It does not depend on the order of the tokens.
        """

    def encode(self, caption: str) -> Tensor:
        return torch.from_numpy(self.rows(caption).astype(np.float16))

    def encode_all(self, caption: str) -> dict[str, Tensor]:
        """The tensors of `caption` by name: `text` [L, E], and `pooled_text` [E] if requested."""
        found = {"text": self.encode(caption)}
        if self.pooled:
            found["pooled_text"] = torch.from_numpy(self.pool(caption).astype(np.float16))
        return found


_SEED = 257
_BEGIN = 256  # token before the first byte, so that the empty string has a token, too


@lru_cache
def byte_table(width: int) -> np.ndarray:
    """The vectors of all bytes and of the begin token, [257, width] float64.

    They are uniform with zero mean and unit variance.
    """
    # Raw Philox words are the same in every version of NumPy and on every machine; NumPy does not
    # promise that of its distributions.
    words = np.random.Philox(np.random.SeedSequence((_SEED, width))).random_raw((257, width))
    unit = (words >> np.uint64(11)).astype(np.float64) / 2**53
    return (2 * unit - 1) * np.sqrt(3)


class ByteTable(FixedVectors):
    """A text encoder of fixed vectors whose tokens are the UTF-8 bytes of a caption.

    Each text begins with one more token.
    """

    name = "bytes"
    usual_width = 64
    most_rows = 4096

    def rows(self, caption: str) -> np.ndarray:
        """Rows of `caption`, [1 + number of bytes kept, E]: (byte + position) / sqrt(2)."""
        tokens_L = self._tokens(caption)
        text_LE = byte_table(self.width)[tokens_L] + positions(len(tokens_L), self.width)
        return text_LE / np.sqrt(2)

    def pool(self, caption: str) -> np.ndarray:
        tokens_L = self._tokens(caption)
        return byte_table(self.width)[tokens_L].sum(0) / len(tokens_L) ** 0.5

    def _tokens(self, caption: str) -> np.ndarray:
        """Indices of the begin token and of the bytes of `caption` in the table [L], int64."""
        kept = caption.encode()[: self.max_length - 1].decode(
            errors="ignore"
        )  # no part of a character
        tokens_L = np.frombuffer(bytes(1) + kept.encode(), np.uint8).astype(np.int64)
        tokens_L[0] = _BEGIN
        return tokens_L

    def length_of(self, caption: str) -> int:
        return 1 + len(caption.encode())


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

    Adjacent letters and digits form a word (`don't` and `3.5` are one each). Any other character
    except spaces is a word of its own: signs, emoji, letters of scripts without spaces. Invisible
    characters, such as joiners between emoji, are dropped.
    """
    folded = normalize("NFC", normalize("NFC", caption).casefold()).replace(_APOSTROPHE, "'")
    seen = "".join(c for c in folded if category(c) != "Cf" and not "\ufe00" <= c <= "\ufe0f")
    kinds = "".join(map(_kind, seen))
    return [seen[found.start() : found.end()] for found in _WORD.finditer(kinds)]


def _kind(character: str) -> str:
    """Class of a character: a letter, d digit, m mark, ' and . as joiners, " " space, x other.

    A character of class x is a word of its own.
    """
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
    """A random vector [width] that is a hash of `text`: uniform, zero mean, unit variance.

    SHAKE gives the same bits on every machine and in every version; NumPy's distributions do not.
    """
    bits = hashlib.shake_128(text.encode(errors="surrogatepass")).digest(2 * width)
    return ((np.frombuffer(bits, "<u2") + 0.5) / 2**15 - 1) * np.sqrt(3)


def pieces_of(word: str) -> Iterator[str]:
    """All strings of 3 and 4 characters in `<word>` (arXiv:1607.04606, Sec. 3.2)."""
    marked = f"<{word}>"
    return (marked[i : i + n] for n in (3, 4) for i in range(len(marked) - n + 1))


@lru_cache(maxsize=10_000)
def vector(word: str, width: int) -> np.ndarray:
    """The vector [width] of `word`: 4/5 of its variance from the word, 1/5 from its pieces."""
    pieces_PE = np.stack([drawn(piece, width) for piece in pieces_of(word)])
    return (2 * drawn(f"w:{word}", width) + pieces_PE.sum(0) / len(pieces_PE) ** 0.5) / 5**0.5


class WordTable(FixedVectors):
    """A text encoder with a row for the whole caption, then one for each of its words.

    The first row is the scaled sum over the distinct words. It differs between sets of words,
    whatever their order, so a network follows captions from its first steps on.
    """

    name = "words"
    usual_width = 256
    most_rows = 1024

    def rows(self, caption: str) -> np.ndarray:
        """Rows of `caption`, [1 + number of words kept, E], of unit variance."""
        words = self._kept(caption)
        vectors = [self.pool(caption), *(vector(word, self.width) for word in words)]
        text_LE = np.stack(vectors) + _POSITION * positions(len(vectors), self.width)
        return text_LE / (1 + _POSITION**2) ** 0.5

    def pool(self, caption: str) -> np.ndarray:
        """The sum of the vectors of distinct words, scaled to unit variance.

        A caption without words has a vector of its own.
        """
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

"""The text encoder `bytes`: one fixed random vector for each byte.

A network has to learn to read before it can follow such captions; `words` spares it that.
"""

# L tokens, E width of the embedding

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import numpy as np

from dit.codecs.text.fixed_vectors import FixedVectors, positions

_SEED = 257
_BEGIN = 256  # token before the first byte, so that the empty string has a token, too


@lru_cache
def byte_table(width: int) -> np.ndarray:
    """[257, width] float64, uniform with zero mean and unit variance."""
    # Raw Philox words are the same in every version of NumPy and on every machine; NumPy does not
    # promise that of its distributions.
    words = np.random.Philox(np.random.SeedSequence((_SEED, width))).random_raw((257, width))
    unit = (words >> np.uint64(11)).astype(np.float64) / 2**53
    return (2 * unit - 1) * np.sqrt(3)


class ByteTable(FixedVectors):
    """The tokens are the UTF-8 bytes of a caption, after one token that begins each text."""

    name: ClassVar[str] = "bytes"
    usual_width: ClassVar[int] = 64
    most_rows: ClassVar[int] = 4096

    def rows(self, caption: str) -> np.ndarray:
        """[1 + bytes that are kept, E]: (byte + position) / sqrt(2), unit variance."""
        tokens_L = self._tokens(caption)
        text_LE = byte_table(self.width)[tokens_L] + positions(len(tokens_L), self.width)
        return text_LE / np.sqrt(2)

    def pool(self, caption: str) -> np.ndarray:
        tokens_L = self._tokens(caption)
        return byte_table(self.width)[tokens_L].sum(0) / len(tokens_L) ** 0.5

    def _tokens(self, caption: str) -> np.ndarray:
        """Rows of the table [L], int64."""
        kept = caption.encode()[: self.max_length - 1].decode(
            errors="ignore"
        )  # no part of a character
        tokens_L = np.frombuffer(bytes(1) + kept.encode(), np.uint8).astype(np.int64)
        tokens_L[0] = _BEGIN
        return tokens_L

    def length_of(self, caption: str) -> int:
        return 1 + len(caption.encode())

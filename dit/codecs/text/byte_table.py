"""The text encoder without weights: one fixed random vector for each byte."""

# L tokens, E width of the embedding

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.codecs.text.encoder import TextEncoder, requested_length

_SEED = 257
_BEGIN = 256  # token before the first byte, so that the empty string has a token, too
_MOST = 4096  # tokens of a caption, unless --max_sequence_length says otherwise
_PERIOD = 10_000.0  # longest wavelength of the positions over 2 pi (arXiv:1706.03762, Sec. 3.5)


@lru_cache
def byte_table(width: int) -> np.ndarray:
    """[257, width] float64, uniform with zero mean and unit variance."""
    # Raw Philox words are the same in every version of NumPy and on every machine; NumPy does not
    # promise that of its distributions.
    words = np.random.Philox(np.random.SeedSequence((_SEED, width))).random_raw((257, width))
    unit = (words >> np.uint64(11)).astype(np.float64) / 2**53
    return (2 * unit - 1) * np.sqrt(3)


def byte_positions(length: int, width: int) -> np.ndarray:
    """[length, width] float64, sines and cosines; each row has a mean square of 1."""
    frequency = _PERIOD ** -(np.arange(width // 2) / (width // 2))
    angle = np.arange(length)[:, None] * frequency
    return np.sqrt(2) * np.concatenate([np.sin(angle), np.cos(angle)], axis=1)


class ByteTable(TextEncoder):
    """The tokens are the UTF-8 bytes of a caption, after one token that begins each text."""

    name: ClassVar[str] = "bytes"
    options: ClassVar[frozenset[str]] = frozenset(
        ("text_width", "pooled_text", "max_sequence_length")
    )
    revision = "1"

    def __init__(self, *, width: int, max_length: int = _MOST, pooled: bool = False):
        if width < 8 or width % 2:
            raise CodecError(f"--text_width {width} must be an even number of at least 8")
        self.width, self.max_length, self.pooled = width, max_length, pooled

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        group = parser.add_argument_group("text encoder bytes")
        group.add_argument(
            "--text_width",
            type=int,
            default=64,
            metavar="NUMBERS",
            help="Numbers in the embedding of one byte of a caption. (default: %(default)s)",
        )
        group.add_argument(
            "--pooled_text",
            action="store_true",
            help="Also store pooled_text, the sum over a caption's bytes, which FLUX reads.",
        )

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        length = requested_length(args, _MOST)
        return cls(width=args.text_width, max_length=length, pooled=args.pooled_text)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        return cls(
            width=int(settings["width"]),
            max_length=settings.get("max_length", _MOST),
            pooled=settings.get("pooled", False),
        )

    @property
    def settings(self) -> dict[str, Any]:
        limit = {} if self.max_length == _MOST else {"max_length": self.max_length}
        # Absent where nobody asks, as in cards of versions without the option.
        return super().settings | limit | ({"pooled": True} if self.pooled else {})

    def encode(self, caption: str) -> Tensor:
        """Float16 [1 + bytes that are kept, width]: (byte + position) / sqrt(2), unit variance."""
        tokens_L = self._tokens(caption)
        text_LE = byte_table(self.width)[tokens_L] + byte_positions(len(tokens_L), self.width)
        return torch.from_numpy((text_LE / np.sqrt(2)).astype(np.float16))

    def encode_all(self, caption: str) -> dict[str, Tensor]:
        """`text`, and where it is asked for `pooled_text` [width]: the bytes whatever their order.

        It has unit variance, too.
        """
        found = {"text": self.encode(caption)}
        if self.pooled:
            tokens_L = self._tokens(caption)
            sum_E = byte_table(self.width)[tokens_L].sum(0)
            found["pooled_text"] = torch.from_numpy(
                (sum_E / len(tokens_L) ** 0.5).astype(np.float16)
            )
        return found

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

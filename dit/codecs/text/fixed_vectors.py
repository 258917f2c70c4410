"""What the two text encoders without weights share: options, lengths, positions."""

# L rows, E width of the embedding

from __future__ import annotations

from abc import abstractmethod
from argparse import ArgumentParser, Namespace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.codecs.text.encoder import TextEncoder, requested_length

_PERIOD = 10_000.0  # longest wavelength of the positions over 2 pi (arXiv:1706.03762, Sec. 3.5)


def positions(length: int, width: int) -> np.ndarray:
    """[length, width] float64, sines and cosines; each row has a mean square of 1."""
    frequency = _PERIOD ** -(np.arange(width // 2) / (width // 2))
    angle = np.arange(length)[:, None] * frequency
    return np.sqrt(2) * np.concatenate([np.sin(angle), np.cos(angle)], axis=1)


class FixedVectors(TextEncoder):
    """A text encoder whose rows are fixed random vectors of unit variance."""

    options: ClassVar[frozenset[str]] = frozenset(
        ("text_width", "pooled_text", "max_sequence_length")
    )
    usual_width: ClassVar[int]
    most_rows: ClassVar[int]
    """Rows of a caption, unless --max_sequence_length says otherwise."""
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
        # Absent where nobody asks, as in cards of versions without the option.
        return super().settings | limit | ({"pooled": True} if self.pooled else {})

    @abstractmethod
    def rows(self, caption: str) -> np.ndarray:
        """[L, E] float64, rounded to half precision afterwards."""

    @abstractmethod
    def pool(self, caption: str) -> np.ndarray:
        """[E] float64 of unit variance, which does not depend on the order in the caption."""

    def encode(self, caption: str) -> Tensor:
        return torch.from_numpy(self.rows(caption).astype(np.float16))

    def encode_all(self, caption: str) -> dict[str, Tensor]:
        """`text`, and where it is asked for `pooled_text` [E]."""
        found = {"text": self.encode(caption)}
        if self.pooled:
            found["pooled_text"] = torch.from_numpy(self.pool(caption).astype(np.float16))
        return found


def add_arguments(parser: ArgumentParser, encoders: tuple[type[FixedVectors], ...]) -> None:
    """The options that these encoders share."""
    names = " and ".join(encoder.name for encoder in encoders)
    group = parser.add_argument_group(f"text encoders {names}")
    usual = ", ".join(f"{encoder.usual_width} of {encoder.name}" for encoder in encoders)
    group.add_argument(
        "--text_width",
        type=int,
        metavar="NUMBERS",
        help=f"Numbers in one row of the embedding of a caption. (default: {usual})",
    )
    group.add_argument(
        "--pooled_text",
        action="store_true",
        help="Also store pooled_text, the sum over a caption, which FLUX reads.",
    )

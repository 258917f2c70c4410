"""What every text encoder offers to data preparation and to generation."""

# L tokens, E width of the embedding

from __future__ import annotations

from abc import abstractmethod
from argparse import Namespace
from typing import Any, ClassVar

from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.codecs.dataset_encoder import DatasetEncoder


class TextEncoder(DatasetEncoder):
    """Captions to embeddings. A new one is a subclass and its line in `TEXT_ENCODERS`."""

    kind: ClassVar[str] = "text encoder"
    card_part: ClassVar[str] = "text_encoder"
    subfolder: ClassVar[str] = "text_encoder"

    revision: str  # changes whenever the embedding of a caption changes
    width: int
    max_length: int
    """Tokens of a caption, at most; what is longer is cut."""

    @property
    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "width": self.width, "revision": self.revision}

    @abstractmethod
    def encode(self, caption: str) -> Tensor:
        """Embedding [L, E] as a shard holds it, true length; the empty string is the null text."""

    def encode_all(self, caption: str) -> dict[str, Tensor]:
        """All that a shard holds of a caption: `text`, and what else the model needs."""
        return {"text": self.encode(caption)}

    def length_of(self, caption: str) -> int:
        """About how many tokens a caption has before it is cut, without a model."""
        return len(caption) // 4 + 2

    def is_cut(self, caption: str) -> bool:
        """Whether the end of a caption is lost."""
        return self.length_of(caption) > self.max_length

    def notes_on(self, caption: str) -> tuple[str, ...]:
        """What the summary should count."""
        return (f"caption cut to {self.max_length} tokens",) if self.is_cut(caption) else ()


def asked_length(args: Namespace, default: int) -> int:
    """Tokens of a caption that `--max_sequence_length` allows.

    Raises:
        CodecError: there would be none.
    """
    length = getattr(args, "max_sequence_length", None)
    if length is not None and length < 1:
        raise CodecError(f"--max_sequence_length {length} must be at least 1 token")
    return length or default

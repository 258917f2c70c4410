"""What every text encoder offers to data preparation and to generation."""

# L tokens, E width of the embedding

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from typing import Any, ClassVar, Self

from torch import Tensor


class TextEncoder(ABC):
    """Captions to embeddings. A new one is a subclass and its line in `TEXT_ENCODERS`."""

    name: ClassVar[str]
    revision: str  # changes whenever the embedding of a caption changes
    width: int

    @classmethod
    @abstractmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """Adds this encoder's own options to the command line."""

    @classmethod
    @abstractmethod
    def from_arguments(cls, args: Namespace) -> Self:
        """The encoder that the options ask for."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """The encoder that wrote `settings` into a dataset card."""

    @property
    def settings(self) -> dict[str, Any]:
        """All that `from_settings` needs, as JSON values."""
        return {"name": self.name, "width": self.width, "revision": self.revision}

    @abstractmethod
    def encode(self, caption: str) -> Tensor:
        """Embedding [L, E] as a shard holds it, true length; the empty string is the null text."""

    def encode_all(self, caption: str) -> dict[str, Tensor]:
        """All that a shard holds of a caption: `text`, and what else the model needs."""
        return {"text": self.encode(caption)}

    def on(self, device: str) -> Self:
        """The same encoder with its model on `device`; the one without a model stays put."""
        del device
        return self

    def length_of(self, caption: str) -> int:
        """About how many tokens a caption has, without a model."""
        return len(caption) // 4 + 2

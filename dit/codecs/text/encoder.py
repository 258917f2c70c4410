"""The interface of text encoders, and the vocabulary of captions and prompts."""

# L tokens, E width of the embedding

from __future__ import annotations

from abc import abstractmethod
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.codecs.dataset_encoder import DatasetEncoder


class TextEncoder(DatasetEncoder):
    """Interface of text encoders: caption -> embeddings; subclasses are in this folder."""

    kind: ClassVar[str] = "text encoder"
    card_part: ClassVar[str] = "text_encoder"
    subfolder: ClassVar[str] = "text_encoder"

    most_pictures: ClassVar[int] = 0
    """Largest number of control pictures that the encoder reads with a caption."""
    sees_alpha: ClassVar[bool] = False
    """Whether control pictures may be RGBA; the encoder puts them on white itself."""
    reads_alone: ClassVar[bool] = True
    """Whether the encoder accepts captions without control pictures."""
    sees_first_frame: ClassVar[bool] = False
    """Whether the encoder sees the first frame of a clip beside its caption. Its embeddings of
    captions alone are for negative prompts and the empty caption."""

    revision: str  # changes when the embedding of any caption changes
    width: int
    max_length: int
    """Most tokens of a caption; longer captions are cut."""

    @property
    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "width": self.width, "revision": self.revision}

    @abstractmethod
    def encode(self, caption: str) -> Tensor:
        """The embedding [L, E] of a caption without padding, as stored in shards.

        "" returns the null text.
        """

    def encode_all(self, caption: str) -> dict[str, Tensor]:
        """All tensors of a caption by their names in a shard: `text`, and more for some models."""
        return {"text": self.encode(caption)}

    def encode_negative(self, prompt: str) -> dict[str, Tensor]:
        """All tensors of a negative prompt; some pipelines encode it unlike a caption."""
        return self.encode_all(prompt)

    def encode_beside(self, caption: str, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """All tensors of a caption that edits `pictures`, or of a clip that begins with one.

        The pictures are upright RGB, or RGBA with `sees_alpha`. An encoder for edits also returns
        `null_text`: the embedding of the empty caption with the same pictures.
        """
        del pictures
        return self.encode_all(caption)

    def words_of(self, caption: str) -> list[str]:
        """The words of a caption, for encoders that read whole words; else empty."""
        del caption
        return []

    def length_of(self, caption: str) -> int:
        """An estimate of a caption's number of tokens, made without a tokenizer."""
        return len(caption) // 4 + 2

    def rows_of(self, caption: str) -> int:
        """An estimate of the rows of a caption's embedding."""
        return min(self.length_of(caption), self.max_length)

    def is_cut(self, caption: str) -> bool:
        """Whether a caption is too long, so that its end is cut off."""
        return self.length_of(caption) > self.max_length

    def notes_on(self, caption: str) -> tuple[str, ...]:
        """Notes on a caption that the summary of a packing counts."""
        return (f"caption cut to {self.max_length} tokens",) if self.is_cut(caption) else ()


def requested_length(args: Namespace, default: int) -> int:
    """The largest number of tokens of a caption, as `--max_sequence_length` sets it.

    Raises:
        CodecError: it would be below 1.
    """
    length = getattr(args, "max_sequence_length", None)
    if length is not None and length < 1:
        raise CodecError(f"--max_sequence_length {length} must be at least 1 token")
    return length or default


MOST_WORDS = 10_000
"""Number of words in a card's list, the most frequent ones."""
WORDS = "words"
"""Key of the list of words in a card."""


def vocabulary(captions: Iterable[str], encoder: TextEncoder) -> dict[str, Any]:
    """Counts of the different words in all captions, and of the most frequent ones.

    It is empty for encoders that do not read whole words.
    """
    counts = Counter(chain.from_iterable(map(encoder.words_of, captions)))
    if not counts:
        return {}
    frequent = sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:MOST_WORDS]
    return {WORDS: {"distinct": len(counts), "counts": dict(frequent)}}


def unknown_words(
    prompts: Iterable[str], encoder: TextEncoder, card: Mapping[str, Any]
) -> str | None:
    """A sentence on words of `prompts` that no caption of the data has; None if all occur.

    Cards of earlier versions, and of encoders that do not read whole words, have no list of words.
    """
    listed = card.get(WORDS) or {}
    known = listed.get("counts") or {}
    asked = dict.fromkeys(chain.from_iterable(map(encoder.words_of, prompts)))
    unknown = [word for word in asked if word not in known]
    if not known or not unknown:
        return None
    words = ", ".join(unknown)
    if listed["distinct"] > len(known):
        return f"not among the {len(known):,} most frequent words of the training data: {words}"
    return f"words that no caption of the training data has: {words}"

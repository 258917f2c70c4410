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
    """Encodes captions as embeddings; subclasses are in this folder."""

    kind: ClassVar[str] = "text encoder"
    card_part: ClassVar[str] = "text_encoder"
    subfolder: ClassVar[str] = "text_encoder"

    most_pictures: ClassVar[int] = 0
    """Most control pictures that the encoder reads with a caption; 0: it reads captions alone."""
    sees_alpha: ClassVar[bool] = False
    """Whether the encoder also accepts RGBA control pictures, which it puts on white itself."""
    reads_alone: ClassVar[bool] = True
    """Whether the encoder accepts a caption without control pictures."""
    sees_first_frame: ClassVar[bool] = False
    """Whether the encoder reads the first frame of a clip with its caption. Its embeddings of a
    caption alone are then only for negative prompts and the empty caption."""

    revision: str  # changes when the embedding of any caption changes
    width: int
    max_length: int
    """Most tokens of a caption; longer captions are cut."""

    @property
    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "width": self.width, "revision": self.revision}

    @abstractmethod
    def encode(self, caption: str) -> Tensor:
        """The embedding [L, E] of `caption`, as stored in shards.

        The embedding of the empty caption is the null text. Embeddings have no rows for padding,
        unless an encoder says otherwise.
        """

    def encode_all(self, caption: str) -> dict[str, Tensor]:
        """The tensors of `caption` by their names in a shard: `text`, and more for some models."""
        return {"text": self.encode(caption)}

    def encode_negative(self, prompt: str) -> dict[str, Tensor]:
        """The tensors of a negative prompt by name; some pipelines encode it unlike a caption."""
        return self.encode_all(prompt)

    def encode_beside(self, caption: str, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """The tensors, by name, of a caption with the `pictures` that an encoder reads beside it.

        They are the pictures to edit, or the first frame of a clip: upright RGB, or RGBA with
        `sees_alpha`. An encoder for edits also returns `null_text`, the embedding of the empty
        caption with the same pictures.
        """
        del pictures
        return self.encode_all(caption)

    def words_of(self, caption: str) -> list[str]:
        """The words of `caption`; empty for encoders that do not read whole words."""
        del caption
        return []

    def length_of(self, caption: str) -> int:
        """The estimated number of tokens of `caption`, without the use of a tokenizer."""
        return len(caption) // 4 + 2

    def rows_of(self, caption: str) -> int:
        """The estimated number of rows of the embedding of `caption`."""
        return min(self.length_of(caption), self.max_length)

    def is_cut(self, caption: str) -> bool:
        """Whether `caption` is so long that its end is cut off."""
        return self.length_of(caption) > self.max_length

    def notes_on(self, caption: str) -> tuple[str, ...]:
        """Notes on `caption`, which the summary of a data_prep run counts; empty without any."""
        return (f"caption cut to {self.max_length} tokens",) if self.is_cut(caption) else ()


def requested_length(args: Namespace, default: int) -> int:
    """The most tokens of a caption: --max_sequence_length in `args`, or else `default`.

    Raises:
        CodecError: the option is below 1.
    """
    length = getattr(args, "max_sequence_length", None)
    if length is not None and length < 1:
        raise CodecError(f"--max_sequence_length {length} must be at least 1 token")
    return length or default


MOST_WORDS = 10_000
"""Most words in the list of a dataset card, which has the most frequent ones."""
WORDS = "words"
"""Key of the list of words in a dataset card."""


def vocabulary(captions: Iterable[str], encoder: TextEncoder) -> dict[str, Any]:
    """Counts the words of `captions`, for the dataset card.

    Returns {"words": {"distinct": their number, "counts": {word: count}}}; counts are those of the
    `MOST_WORDS` most frequent words, largest first. The dict is empty for encoders that do not read
    whole words.
    """
    counts = Counter(chain.from_iterable(map(encoder.words_of, captions)))
    if not counts:
        return {}
    frequent = sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:MOST_WORDS]
    return {WORDS: {"distinct": len(counts), "counts": dict(frequent)}}


def unknown_words(
    prompts: Iterable[str], encoder: TextEncoder, card: Mapping[str, Any]
) -> str | None:
    """A sentence that lists the words of `prompts` that the word list of the dataset lacks.

    `card` is the dataset card, whose list may have only the most frequent words. The result is None
    if no word is lacking, or if the card has no list: cards of earlier versions have none, nor do
    those of encoders that do not read whole words.
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

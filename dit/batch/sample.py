"""`LatentSample`: one encoded image or video with its caption, as stored in a shard."""

# C latent channels, F H W frames, rows and columns of a latent, L text tokens, E text width

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

TEXT = "text"
"""Name of every family's main text input in a shard."""
NULL_TEXT = "null_text"
"""A sample's own replacement of `text` for a dropped caption; its text encoder sees pictures."""
SOUND = "sound"
"""The latent [K, A] of a sample's sound among its inputs, and its stream of tokens in a pack."""
REJECTED_LATENT = "rejected_latent"
"""Name of the rejected latent of a preference pair; it has the shape of `latent`."""
NullInputs = Mapping[str, Tensor]
"""Inputs by name that replace a sample's inputs when its caption is dropped. An absent input keeps
the sample's value."""
Grid = tuple[int, int, int]
"""(frames, rows, columns) of a latent, in patches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSample:
    """One encoded image or video with its caption, as a shard holds it."""

    key: str  # unique in its dataset; part of the pack identity
    latent_CFHW: Tensor  # float, whitened to unit variance per channel
    text_LE: Tensor  # float, true length
    fps: float  # frames per second of the latent's pixels; NaN for an image or unknown
    caption: str = ""
    source: str = ""  # name of the dataset in a blend
    loss_weight: float = 1.0  # multiplies the loss of the sample; at least 0
    loss_mask_1FHW: Tensor | None = None  # float, at least 0: multiplies that of each latent cell
    # Log variance of each number of the latent, whose mean `latent_CFHW` is; None: there is no draw
    latent_logvar_CFHW: Tensor | None = None
    # Of validation with a fixed level for each sample: k of the level k / 8; None: it has none
    level_index: int | None = None
    # What the family reads beside latent and text, by name, as far as the sample has it
    others: Mapping[str, Tensor] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()  # names of tensors in its record that the family does not read

    @property
    def is_weighted(self) -> bool:
        """Whether tokens of the sample have individual loss weights."""
        return self.loss_weight != 1 or self.loss_mask_1FHW is not None

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """All inputs beside the latent, by name."""
        return {TEXT: self.text_LE, **self.others}


def pack_identity(keys: tuple[str, ...]) -> int:
    """Order-sensitive 63-bit hash of the sample keys of a pack, the same on every machine."""
    digest = hashlib.blake2b("\0".join(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

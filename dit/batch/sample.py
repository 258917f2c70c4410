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
"""Name of an input that replaces `text` if the caption is dropped; for families whose text encoder
sees pictures."""
SOUND = "sound"
"""Name of a sample's sound: the latent [K, A] among its inputs, and the token stream in a pack."""
REJECTED_LATENT = "rejected_latent"
"""Name of the rejected latent in a preference pair; it has the shape of `latent`."""
NullInputs = Mapping[str, Tensor]
"""Name -> input that replaces a sample's input when its caption is dropped. A sample keeps its
inputs that are absent here."""
Grid = tuple[int, int, int]
"""(frames, rows, columns) of a latent, in patches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSample:
    """One encoded image or video with its caption, as stored in a shard."""

    key: str  # unique in its dataset; part of the pack identity
    latent_CFHW: Tensor  # float, whitened to unit variance per channel
    text_LE: Tensor  # float, true length
    fps: float  # frames per second of the latent's pixels; NaN for an image or unknown
    caption: str = ""
    source: str = ""  # name of the dataset in a blend
    loss_weight: float = 1.0  # multiplies the loss of the sample; at least 0
    loss_mask_1FHW: Tensor | None = None  # float, at least 0: multiplies the loss of each cell
    # Log variance of each value of the latent, whose mean is `latent_CFHW`; None: it is not drawn
    latent_logvar_CFHW: Tensor | None = None
    # In validation with fixed noise levels: k of the level k / 8; None: the sample names no level
    level_index: int | None = None
    # What the family reads beside latent and text, by name, as far as the sample has it
    others: Mapping[str, Tensor] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()  # names of tensors in its record that the family does not read

    @property
    def is_weighted(self) -> bool:
        """Whether the sample has loss weights: its own, or for its cells."""
        return self.loss_weight != 1 or self.loss_mask_1FHW is not None

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """All inputs besides the latent, by name."""
        return {TEXT: self.text_LE, **self.others}


def pack_identity(keys: tuple[str, ...]) -> int:
    """63-bit hash of the `keys` of a pack's samples in order, the same on every machine."""
    digest = hashlib.blake2b("\0".join(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

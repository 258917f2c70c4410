"""Low-rank adapters (LoRA, arXiv:2106.09685) beside frozen linears."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dit.config.checks import at_least_one, check, numbers, positive
from dit.config.choices import Precision
from dit.config.resume import AtStart, Live, Refused
from dit.local_path import LocalPath


class BaseType(StrEnum):
    """Dtypes in which frozen matrices can be stored, narrower than the model's."""

    FLOAT8_E4M3 = "float8_e4m3"


class LoraTargets(StrEnum):
    """Words in `lora.targets`, each of which selects one kind of linear in every layer."""

    ATTENTION = "attention"
    MLP = "mlp"
    MODULATION = "modulation"


class LoraStreams(StrEnum):
    """The streams whose layers get adapters, in networks with a sound."""

    BOTH = "both"
    VIDEO = "video"  # the layers that frames without sound pass
    SOUND = "sound"  # the layers that compute the sound


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters that are trained instead of the weights, which are frozen."""

    rank: Refused[int | None] = None
    """Rank of each adapter; null trains all weights, or takes the ranks of `init_from`."""
    alpha: Refused[float | None] = None
    """Scale: the adapter adds alpha / rank times its product; null: alpha = rank."""
    targets: Refused[tuple[str, ...]] = (LoraTargets.ATTENTION, LoraTargets.MLP)
    """Linears with an adapter: attention, mlp, modulation, or Diffusers' names, with *."""
    streams: Refused[LoraStreams] = LoraStreams.BOTH
    """Layers with adapters in networks with sound: both, video or sound. If no sample has sound,
    both means video."""
    dropout: Live[float] = 0.0
    """Dropout rate on the input of each adapter in training."""
    dtype: Live[Precision | None] = None
    """Dtype of the adapters, fp32 or bf16; null: the network's dtype."""
    base_dtype: Live[BaseType | None] = None
    """Dtype of the frozen matrices: float8_e4m3 with a scale for each row; null: unchanged."""
    plus_ratio: Refused[float | None] = None
    """Learning rate of B divided by that of A; null: 1 (LoRA+, arXiv:2402.12354, advises 16)."""
    init_from: Refused[LocalPath | None] = None
    """LoRA file or folder to start from; its ranks and linears override rank and targets."""
    frozen_adapter: Live[LocalPath | None] = None
    """LoRA file or folder that is added, frozen, while adapters train, and is left out of all
    results. On a resume the file may have moved, but must have the same numbers."""
    ignore_text_encoder: AtStart[bool] = False
    """Leave out the weights of text encoders in LoRA files, and log how many there are."""
    base: Live[LocalPath | None] = None
    """New path of the frozen weights, if they were moved since the run began."""

    def __post_init__(self) -> None:
        check(
            *at_least_one(self, "rank"),
            *positive(self, "alpha", "plus_ratio"),
            (
                self.plus_ratio is None or self.enabled,
                f"plus_ratio={self.plus_ratio} needs adapters, and rank=null trains all weights;"
                " set rank, or leave plus_ratio out",
            ),
            (0 <= self.dropout < 1, f"dropout={self.dropout} must lie in [0, 1)"),
            (
                len(self.targets) > 0,
                "targets=[] names no linear; leave it out, or set rank=null to train all weights",
            ),
            (
                self.streams is LoraStreams.BOTH or self.enabled,
                f"streams={self.streams} needs adapters, and rank=null trains all weights; set"
                " rank, or leave streams out",
            ),
            (
                self.streams is LoraStreams.BOTH or self.init_from is None,
                f"streams={self.streams} chooses linears, but init_from={self.init_from} already"
                " says which ones have adapters; leave streams out",
            ),
            (
                self.base_dtype is None or self.enabled,
                f"base_dtype={self.base_dtype} stores frozen weights, and rank=null trains all of"
                " them; set rank, or leave base_dtype out",
            ),
            (
                self.frozen_adapter is None or self.enabled,
                f"frozen_adapter={self.frozen_adapter} is added while adapters are trained, and"
                " rank=null trains all weights; set rank, or leave frozen_adapter out",
            ),
            *numbers(self, alpha=1e6, plus_ratio=1e6),
        )

    @property
    def enabled(self) -> bool:
        """Whether the run trains adapters instead of the weights."""
        return self.rank is not None or self.init_from is not None

"""What settings of the network may be chosen from."""

from __future__ import annotations

from enum import StrEnum


class Precision(StrEnum):
    """Type of the weights in matrix products; levels, positions and loss are always float32."""

    FP32 = "fp32"
    BF16 = "bf16"


class Recompute(StrEnum):
    """Which activations the backward pass computes again instead of keeping."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class RecomputeMethod(StrEnum):
    """How full recomputation picks layers: all in groups, or the first few."""

    UNIFORM = "uniform"
    BLOCK = "block"


class Implementation(StrEnum):
    """Whose linear layers and attention compute."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"


class Fp8(StrEnum):
    """Formats of 8-bit products: e4m3, or e4m3 with gradients in e5m2."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Fp8Recipe(StrEnum):
    """What shares a scaling factor: a tensor, a block of 128, or 32 numbers (Blackwell)."""

    TENSORWISE = "tensorwise"
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"


class WandbMode(StrEnum):
    """Whether a run is logged to W&B as it goes, in its folder for `wandb sync`, or not at all."""

    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


class ContextComm(StrEnum):
    """How context ranks exchange tokens: heads (a2a), or keys and values (all_gather; p2p, a ring).

    p2p is Transformer Engine's.
    """

    A2A = "a2a"
    ALL_GATHER = "all_gather"
    P2P = "p2p"

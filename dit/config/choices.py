"""What the keys of the network choose between."""

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
    AUTO = "auto"


class RecomputeMethod(StrEnum):
    """How full recomputation picks layers: all in groups, or the first few."""

    UNIFORM = "uniform"
    BLOCK = "block"


class Implementation(StrEnum):
    """Library whose linear layers are used."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"


class AttentionBackend(StrEnum):
    """Kernels of attention, those of the newest GPUs first; auto is the best that is here."""

    AUTO = "auto"
    FLASH_4 = "flash_4"  # the extra `attention`
    FLASH_3 = "flash_3"
    TRANSFORMER_ENGINE = "transformer_engine"  # whatever `transformer_impl` is
    CUDNN = "cudnn"  # for long samples; flash_2 for the others
    FLASH_2 = "flash_2"  # torch's own
    SDPA = "sdpa"  # torch's own, sample by sample: on CPUs, and in float32


class Fp8(StrEnum):
    """Formats of 8-bit matrix products: e4m3, or e4m3 with gradients in e5m2 (hybrid)."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Fp8Recipe(StrEnum):
    """Numbers that share a scaling factor: a tensor, a block of 128, or 32 (Blackwell)."""

    TENSORWISE = "tensorwise"
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"


class ContextComm(StrEnum):
    """How context ranks exchange tokens: heads (a2a), or keys and values (all_gather; p2p, a ring).

    p2p needs Transformer Engine.
    """

    A2A = "a2a"
    ALL_GATHER = "all_gather"
    P2P = "p2p"


class TextPadding(StrEnum):
    """Rows behind a caption that are attended to and are no zeros."""

    STORED = "stored"  # what the text encoder makes of its padding, as the shards hold it

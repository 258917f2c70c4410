"""Devices, and what software makes of them: every constant of the planner, with its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """Parts of a peak that software reaches. Not measured by us: fitted, see PUBLISHED."""

    matrices: float = 0.55
    """Linear layers: cuBLAS at widths of thousands, clocks under load."""
    attention: float = 0.38
    """Forward and backward together. FlashAttention-3 (arXiv:2407.08608) reports 0.75 and 0.55 of
    an H100's peak at best; within layers it is less."""
    bandwidth: float = 0.80
    """Of memory: a copy of large tensors."""
    links: float = 0.70
    """Of links and network: large collectives of NCCL."""
    memory: float = 0.90
    """Of memory: the rest is for buffers of libraries and for fragments."""


FUSED = Reached()
PLAIN = Reached(attention=0.23)
"""Plain PyTorch: FlashAttention-2 reaches half of its successor on an H100 (arXiv:2407.08608)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A figure of NVIDIA's: Wan 2.1 14B, 37,440 tokens a pack of one sample."""

    device: str
    devices: int
    packs: int  # in a step
    tensor: int
    context: int
    recomputed: int  # of 40 layers
    reached: Reached
    tflops: float


# DFM's performance page, and AutoModel's rows there. What they recomputed on B200 is not said; for
# AutoModel it is taken to be everything, which its recipes turn on.
PUBLISHED = (
    Published(
        device="h100", devices=128, packs=128, tensor=2, context=4, recomputed=8,
        reached=FUSED, tflops=325.77,
    ),
    Published(
        device="b200", devices=32, packs=64, tensor=1, context=2, recomputed=0,
        reached=FUSED, tflops=804.02,
    ),
    Published(
        device="h100", devices=8, packs=8, tensor=1, context=1, recomputed=40,
        reached=PLAIN, tflops=175.88,
    ),
    Published(
        device="h100", devices=64, packs=64, tensor=1, context=1, recomputed=40,
        reached=PLAIN, tflops=228.85,
    ),
)  # fmt: skip

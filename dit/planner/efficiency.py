"""The parts of a device's peak that software reaches, fitted to published figures."""

from __future__ import annotations

from dataclasses import dataclass

from dit.models.recomputation import USABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Parts of a peak that software reaches; fitted to PUBLISHED, not measured by us."""

    matrices: float = 0.55
    """Linear layers: cuBLAS at widths of thousands, clocks under load."""
    attention: float = 0.38
    """Forward and backward together. FlashAttention-3 (arXiv:2407.08608) reports 0.75 and 0.55 of
    an H100's peak at best; within layers it is less."""
    bandwidth: float = 0.80
    """Of memory bandwidth: a copy of large tensors."""
    links: float = 0.70
    """Of links and network: large NCCL collectives."""
    memory: float = USABLE
    """Of memory size: libraries' buffers and fragmentation take the rest."""


FUSED = Efficiency()
PLAIN = Efficiency(attention=0.23)
"""Plain PyTorch: FlashAttention-2 reaches half of its successor on an H100 (arXiv:2407.08608)."""
EFFICIENCIES = {"fused": FUSED, "plain": PLAIN}


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A figure that NVIDIA published for Wan 2.1 14B; a pack is one sample of 37,440 tokens."""

    device: str
    devices: int
    packs: int  # in a step
    tensor: int
    context: int
    recomputed: int  # of 40 layers
    efficiency: Efficiency
    tflops: float


# From DFM's performance page, with AutoModel's rows there. What was recomputed on B200 is not said;
# AutoModel's recipes turn on recomputation of all layers.
PUBLISHED = (
    Published(
        device="h100", devices=128, packs=128, tensor=2, context=4, recomputed=8,
        efficiency=FUSED, tflops=325.77,
    ),
    Published(
        device="b200", devices=32, packs=64, tensor=1, context=2, recomputed=0,
        efficiency=FUSED, tflops=804.02,
    ),
    Published(
        device="h100", devices=8, packs=8, tensor=1, context=1, recomputed=40,
        efficiency=PLAIN, tflops=175.88,
    ),
    Published(
        device="h100", devices=64, packs=64, tensor=1, context=1, recomputed=40,
        efficiency=PLAIN, tflops=228.85,
    ),
)  # fmt: skip

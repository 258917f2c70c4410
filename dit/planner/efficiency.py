"""The parts of a device's peak that software reaches: assumed ceilings, none of them measured here.

`make gpu` measures the first three on its device and writes what was expected beside each step, so
that the first run shows which of them is off.
"""

from __future__ import annotations

from dataclasses import dataclass

from dit.distributed.device_specs import Device
from dit.models.recomputation import USABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Parts of a peak that software reaches."""

    matrices: float = 0.62
    """Of dense bfloat16: linear layers. The best of all shapes reaches 0.77 to 0.79 on the H100s of
    an AWS p5 node (`mamf-finder.py` of stas00/ml-engineering). Four fifths of that are left for
    shapes that are not the best one and for clocks under a load that lasts; PUBLISHED, which is
    mostly attention, cannot tell 0.55 from 0.65."""
    attention: float = 0.33
    """Of dense bfloat16, forward and backward together; fitted to PUBLISHED. FlashAttention-3
    reaches 0.75 and 0.55 of an H100's peak at best (arXiv:2407.08608); within layers it is less."""
    bandwidth: float = 0.80
    """Of memory bandwidth: reads and writes of large tensors; assumed."""
    links: float = 0.70
    """Of links and network: large NCCL collectives; assumed."""
    gap_s: float = 1e-6
    """Between one kernel and the next, where the host is ahead of the device: 0.9 us on a V100
    (https://developer.nvidia.com/blog/cuda-graphs)."""
    memory: float = USABLE
    """Of memory size: libraries' buffers and fragmentation take the rest."""

    def of(self, device: Device) -> str:
        """The rates that are assumed for a device, in a line."""
        return (
            f"{device.flops / 1e12:.0f} TFLOP/s of dense bfloat16, of which products reach"
            f" {self.matrices:.0%} and attention {self.attention:.0%}; {self.bandwidth:.0%} of"
            f" {device.bandwidth / 1e12:.3g} TB/s of memory; {self.links:.0%} of"
            f" {device.link / 1e9:.0f} GB/s inside of a server and {device.network / 1e9:.0f}"
            f" between; {1e6 * self.gap_s:.2g} us between kernels"
        )


FUSED = Efficiency()
PLAIN = Efficiency(attention=0.20)
"""Plain PyTorch: FlashAttention-2 reaches half of its successor on an H100 (arXiv:2407.08608)."""
HEAD_WIDTHS = (32, 64, 96, 128, 192, 256)
"""For which FlashAttention has kernels; heads of other widths are computed as wider ones."""
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

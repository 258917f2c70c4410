"""The fractions of a device's peak that software reaches, as assumed or published.

`make gpu` measures the first three on its device and writes the expected value beside each step, so
that the first run shows which assumption is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from dit.config import AttentionBackend, Implementation, ModelConfig, TrainConfig
from dit.device_specs import Device
from dit.sizing.recomputation import USABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Fractions of a device's peak rates that software reaches, and the time between kernels."""

    matrices: float = 0.62
    """Fraction of dense bfloat16 FLOP/s in linear layers. The best of all shapes reaches 0.77 to
    0.79 on the H100s of an AWS p5 node (`mamf-finder.py` of stas00/ml-engineering). Four fifths
    of that are left for other shapes, and for clocks under a lasting load (assumed)."""
    attention_forward: float = 0.66
    """Fraction of dense bfloat16 FLOP/s: 650 TFLOP/s of FlashAttention-3 on an H100, head width
    128, 16k tokens (published: arXiv:2407.08608, Fig. 5)."""
    attention_backward: float = 0.40
    """Fraction of dense bfloat16 FLOP/s: 500 TFLOP/s, four fifths of which count. The backward
    kernel recomputes the scores, so it does five products, of which four (twice the forward's two)
    are counted."""
    bandwidth: float = 0.80
    """Fraction of memory bandwidth for reads and writes of large tensors; assumed."""
    links: float = 0.70
    """Fraction of link and network bandwidth in large NCCL collectives; assumed."""
    gap_s: float = 1e-6
    """Seconds between two kernels, if the host is ahead of the device: 0.9 us on a V100
    (https://developer.nvidia.com/blog/cuda-graphs)."""
    memory: float = USABLE
    """Usable fraction of device memory; libraries' buffers and fragmentation take the rest."""

    def of(self, device: Device) -> str:
        """The rates that are assumed for `device`, as a line of text."""
        return (
            f"{device.flops / 1e12:.0f} TFLOP/s of dense bfloat16, of which products reach"
            f" {self.matrices:.0%} (assumed) and attention {self.attention_forward:.0%} forward and"
            f" {self.attention_backward:.0%} backward (published); {self.bandwidth:.0%} of"
            f" {device.bandwidth / 1e12:.3g} TB/s of memory (assumed); {self.links:.0%} of"
            f" {device.link / 1e9:.0f} GB/s inside of a server and {device.network / 1e9:.0f}"
            f" between (assumed); {1e6 * self.gap_s:.2g} us between kernels (published)"
        )


FUSED = Efficiency()
"""Efficiency with FlashAttention-3 or newer, cuDNN, or Transformer Engine's kernels."""
PLAIN = Efficiency(attention_forward=0.37, attention_backward=0.25)
"""Efficiency with plain PyTorch: FlashAttention-2 reaches 370 and 310 TFLOP/s on an H100
(published: arXiv:2407.08608, Fig. 5)."""
HEAD_WIDTHS = (32, 64, 96, 128, 192, 256)
"""Head widths with FlashAttention kernels; other widths run in the kernel of the next larger
one."""
EFFICIENCIES = {"fused": FUSED, "plain": PLAIN}

_NEWER = (
    AttentionBackend.FLASH_4,
    AttentionBackend.FLASH_3,
    AttentionBackend.TRANSFORMER_ENGINE,
    AttentionBackend.CUDNN,
)


def efficiency_with(backend: AttentionBackend) -> Efficiency:
    """The efficiency to assume for a run with the attention kernel `backend`."""
    return FUSED if backend in _NEWER else PLAIN


def efficiency_of(model: ModelConfig, train: TrainConfig) -> Efficiency:
    """The efficiency to assume if only packages that the configuration names are installed."""
    backend = model.attention_backend
    if backend is AttentionBackend.AUTO:
        engine = model.transformer_impl is Implementation.TRANSFORMER_ENGINE
        engine = engine and not train.deterministic
        backend = AttentionBackend.TRANSFORMER_ENGINE if engine else AttentionBackend.FLASH_2
    return efficiency_with(backend)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A published run on H100s, with one sample in each pack, and its TFLOP/s per device."""

    layers: int
    hidden_size: int
    heads: int
    mlp_ratio: float
    tokens: int
    devices: int
    packs: int  # in a step
    context: int
    recomputed: bool
    efficiency: Efficiency
    tflops: float


PUBLISHED = (
    # arXiv:2503.12964, Sec. 4.5, says 48.2% of peak for the best of four workloads, but not for
    # which one. The planner expects the most for long samples of the smaller network.
    Published(
        layers=28, hidden_size=4096, heads=32, mlp_ratio=4.0, tokens=73_728, devices=64, packs=8,
        context=8, recomputed=False, efficiency=FUSED, tflops=0.482 * 989,
    ),
    # Wan 2.1 14B in AutoModel, from DFM's performance page. For 8 devices the page says 175.9,
    # although with FSDP each device has the same work.
    Published(
        layers=40, hidden_size=5120, heads=40, mlp_ratio=2.7, tokens=37_440, devices=64, packs=64,
        context=1, recomputed=True, efficiency=PLAIN, tflops=228.85,
    ),
)  # fmt: skip
"""List of published runs; a test checks that the planner's TFLOP/s are within 25% of theirs.

DFM's 325.8 TFLOP/s for Wan 2.1 14B is not among them: it does not say what it counts, and steps of
19.0 and of 12.1 s would both have that rate."""

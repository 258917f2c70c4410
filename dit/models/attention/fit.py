"""The attention kernels that a device, a network and the installed packages allow.

This module imports none of the kernels' packages, so a run for another machine can be planned
without a GPU. Whether an allowed kernel works is tried by `choice.fault`. The limits are copied
from the kernels' own checks:

    flash_4             flash-attn-4 4.0.0b36, flash_attn/cute/interface.py (`_validate_head_dims`)
    flash_3             torch 2.11 to 2.13, torch/nn/attention/_fa3.py
    transformer_engine  2.8 and 2.20.2, dot_product_attention/utils.py (`get_attention_backend`)
    cudnn               nvidia-cudnn-frontend 1.28 to 1.32, node/sdpa_support_surface.h and
                        node/scaled_dot_product_flash_attention.h, their checks for cuDNN 9.19
    flash_2             torch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Self

from packaging.version import Version

from dit.config import AttentionBackend, ModelConfig, Precision

FLASH_4, CUDNN_FRONTEND = "flash-attn-4", "nvidia-cudnn-frontend"
_SINCE = {FLASH_4: ("4.0.0b36", "attention"), CUDNN_FRONTEND: ("1.28", "cudnn")}
"""Maps a package to (oldest release with the functions that we call, extra of pyproject.toml that
installs it)."""
_BY_CHOICE = (
    AttentionBackend.FLASH_4,
    AttentionBackend.FLASH_3,
    AttentionBackend.TRANSFORMER_ENGINE,
    AttentionBackend.CUDNN,
    AttentionBackend.FLASH_2,
    AttentionBackend.SDPA,
)
"""Kernels that `auto` tries, the likely fastest first."""
_DETERMINISTIC = (AttentionBackend.FLASH_2, AttentionBackend.SDPA)
"""Kernels that `auto` tries if `train.deterministic` is set: torch guarantees that they are
deterministic."""
MOST_WIDTH = 256
"""Largest head width that the flash kernels accept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCase:
    """Properties of device, network and run that decide which kernels can compute attention."""

    capability: tuple[int, int] | None  # of the GPU; None is a CPU
    head_width: int
    half: bool  # queries and keys are in 16 bits, not 32
    deterministic: bool = False

    @classmethod
    def of(
        cls, model: ModelConfig, capability: tuple[int, int] | None, *, deterministic: bool
    ) -> Self:
        return cls(
            capability=capability,
            head_width=_head_width(model),
            half=model.precision is Precision.BF16,
            deterministic=deterministic,
        )


def _head_width(model: ModelConfig) -> int:
    return model.hidden_size // model.num_attention_heads


def fitting(case: AttentionCase) -> list[AttentionBackend]:
    """The kernels that `auto` tries for `case`, in order: its candidates that can compute it.

    The list is never empty: SDPA is always in it.
    """
    candidates = _DETERMINISTIC if case.deterministic else _BY_CHOICE
    return [one for one in candidates if not refusal(one, case)]


def refusal(backend: AttentionBackend, case: AttentionCase) -> str:
    """Why `backend` cannot compute `case`, such as "it needs an NVIDIA GPU"; empty if it can."""
    if backend is AttentionBackend.SDPA:
        return ""
    if case.capability is None:
        return "it needs an NVIDIA GPU"
    if not case.half:
        return "it computes only in bfloat16 (model.precision=bf16)"
    return next(filter(None, _RULES[backend](case)), "")


def _flash_4(case: AttentionCase) -> Iterator[str]:
    assert case.capability is not None
    major, _ = case.capability
    yield _missing(FLASH_4)
    yield _generation(case, major >= 9, "9.0 (Hopper) or later")
    # Kernels for Blackwell accept head widths up to 128, and also 256.
    most = MOST_WIDTH if major == 9 or case.head_width == MOST_WIDTH else 128
    yield _width(case, most)
    if case.deterministic and major == 12:
        yield "it has no deterministic backward pass for compute capability 12"


def _flash_3(case: AttentionCase) -> Iterator[str]:
    assert case.capability is not None
    yield (
        ""
        if find_spec("flash_attn_interface")
        else ("FlashAttention 3 (the module flash_attn_interface) is not installed")
    )
    yield _generation(case, case.capability[0] == 9, "9.0 (Hopper) alone")
    yield _width(case, MOST_WIDTH - 8 if case.deterministic else MOST_WIDTH)


def _engine(case: AttentionCase) -> Iterator[str]:
    yield (
        ""
        if find_spec("transformer_engine")
        else ("Transformer Engine is not installed; install the extra `te`")
    )
    if case.deterministic:
        # On Hopper cuDNN's deterministic backward pass takes 128 bytes for each pair of tokens and
        # each head. Transformer Engine 2.20 refuses it from 2^30 pairs on, 2.8 does not; on other
        # GPUs one of the two releases always refuses it. The remaining kernel keeps T x T numbers.
        yield (
            "with train.deterministic=true, its kernels need memory that grows with the square of"
            " the number of tokens"
        )


def _cudnn(case: AttentionCase) -> Iterator[str]:
    assert case.capability is not None
    major, _ = case.capability
    yield _missing(CUDNN_FRONTEND)
    if case.deterministic:
        yield "it is not deterministic, but train.deterministic=true"
    # On other GPUs there is no backward pass for packed statistics of softmax.
    yield _generation(case, major in (9, 10), "9 (Hopper) or 10 (Blackwell)")
    yield _width(case, MOST_WIDTH if major == 9 else 128)


def _flash_2(case: AttentionCase) -> Iterator[str]:
    yield _generation(case, (case.capability or (0, 0)) >= (8, 0), "8.0 (Ampere) or later")
    yield _width(case, MOST_WIDTH)


_RULES: dict[AttentionBackend, Callable[[AttentionCase], Iterator[str]]] = {
    AttentionBackend.FLASH_4: _flash_4,
    AttentionBackend.FLASH_3: _flash_3,
    AttentionBackend.TRANSFORMER_ENGINE: _engine,
    AttentionBackend.CUDNN: _cudnn,
    AttentionBackend.FLASH_2: _flash_2,
}


def _generation(case: AttentionCase, fits: bool, wanted: str) -> str:
    have = ".".join(map(str, case.capability or ()))
    return "" if fits else f"it needs compute capability {wanted}, and this GPU has {have}"


def _width(case: AttentionCase, most: int) -> str:
    if case.head_width % 8 == 0 and case.head_width <= most:
        return ""
    return (
        f"it needs a head width that is a multiple of 8 and at most {most}, but the network's is"
        f" {case.head_width} (model.hidden_size / model.num_attention_heads)"
    )


@cache
def _missing(package: str) -> str:
    """Why `package` cannot be used: it is not installed, or too old; empty if it can be used.

    Older releases, such as flash-attn 2.8, have other functions.
    """
    since, extra = _SINCE[package]
    try:
        here = version(package)
    except PackageNotFoundError:
        return f"{package} is not installed; install the extra `{extra}`"
    if Version(here) < Version(since):
        return f"{package} {here} is older than {since}; install the extra `{extra}`"
    return ""

"""What is measured on a GPU, in the order of its worth, with the limits of each part."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SIZES = ("full", "tiny")
"""`tiny` tries the way of a run on a CPU; its figures say nothing."""
MISSING = "missing"
"""In place of names: the parts that are not done yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One measurement."""

    name: str
    kind: str
    """imports, bounds, steps, profile, padded: functions of the worker; tests: pytest."""
    expected_s: float
    """It does not begin where less time is left."""
    limit_s: float
    """It is ended after this time."""
    shape: str = ""
    keys: tuple[str, ...] = ()
    """Overrides of the shape's configuration."""


IMPORTS = Part(name="imports", kind="imports", expected_s=0, limit_s=180)
"""It comes before all others, whatever is chosen."""

_PACKS = {
    "full": "dataset.task_encoder_seq_length=32768 dataset.packing_buffer_size=64"
    " dataset.num_workers=2 model.precision=bf16",
    "tiny": "dataset.task_encoder_seq_length=256 dataset.packing_buffer_size=16"
    " dataset.num_workers=0 model.precision=fp32",
}
_ALWAYS = "dataset.mock=true dataset.sample_multiple=16 train.global_batch_size=1"
_SMALL = "name=custom num_layers=1 hidden_size=48 num_attention_heads=4 crossattn_emb_size=16"
_WAN, _FLUX = "name=custom family=wan", "name=custom family=flux guidance_embed=false"
_XL = ("name=dit_xl crossattn_emb_size=1024", f"{_SMALL} adaln_lora_dim=8")
_7B = "num_layers=6 hidden_size=4096 num_attention_heads=32"  # of 28 layers: so many fit
_WAN_14B = "num_layers=4 hidden_size=5120 num_attention_heads=40 mlp_ratio=2.7"  # of 40
_FLUX_1 = "num_layers=2 num_single_layers=4 hidden_size=3072 num_attention_heads=24"  # of 19 + 38
_TIGHT = ((1, 64, 64, 128), (1, 16, 16, 8))  # 1,024 and 64 tokens
SHAPES: Mapping[str, tuple[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "xl": (_XL, _TIGHT),
    # One sample of 32,760 tokens: 81 frames of 480 x 832 pixels.
    "wan14b": (
        (f"{_WAN} {_WAN_14B} crossattn_emb_size=4096", f"{_SMALL} {_WAN} text_pad_to=12"),
        ((21, 60, 104, 512), (3, 8, 8, 8)),
    ),
    # Seven samples of 4,096 image tokens, each with 512 of text in the same attention.
    "flux": (
        (f"{_FLUX} {_FLUX_1}", f"{_SMALL} {_FLUX} num_single_layers=1 rope_axes=[4,4,4]"),
        ((1, 128, 128, 512), (1, 8, 8, 8)),
    ),
    "7b": (
        (f"name=custom {_7B} adaln_lora_dim=256 crossattn_emb_size=1024", _XL[1]),
        _TIGHT,
    ),
    "xl-padded": (_XL, ((1, 62, 66, 128), (1, 14, 18, 8))),  # one token fewer
}
"""Shape -> keys of the network, and (frames, height, width, text) of a sample, by size."""

PADDED_LOOP = {
    "full": ["--steps", "5", "model.name=dit_xl", "model.precision=bf16"],
    "tiny": ["--steps", "1", *(f"model.{key}" for key in _SMALL.split()[1:])],
}
"""What compare_padded.py is given."""

_MODES = {
    "eager": ("steps", ("model.fused_kernels=false",), 25, 120),
    "fused": ("steps", ("model.fused_kernels=true",), 30, 150),
    "compiled": ("steps", ("model.fused_kernels=false", "model.compile=true"), 60, 240),
    "profile": ("profile", (), 30, 150),
}
"""Mode -> kind, keys, and seconds: expected, and at most."""
_RECOMPUTE = (
    *("model.recompute_granularity=full", "model.recompute_method=uniform"),
    "model.recompute_num_layers=1",
)


def _of_shape(shape: str, mode: str, *, recompute: bool = False) -> Part:
    kind, keys, expected, limit = _MODES[mode]
    name = f"{shape}-{mode}" + "-recompute" * recompute
    keys = (*keys, *_RECOMPUTE * recompute)
    return Part(name=name, kind=kind, shape=shape, keys=keys, expected_s=expected, limit_s=limit)


PARTS: tuple[Part, ...] = (
    Part(name="ceilings", kind="bounds", expected_s=10, limit_s=90),
    Part(name="attention", kind="bounds", expected_s=40, limit_s=150),
    Part(name="fused", kind="bounds", expected_s=15, limit_s=90),
    *(_of_shape("xl", mode) for mode in ("fused", "eager")),
    *(_of_shape("wan14b", mode, recompute=True) for mode in ("fused", "eager")),
    _of_shape("flux", "fused"),
    _of_shape("xl", "profile"),
    _of_shape("wan14b", "profile", recompute=True),
    _of_shape("flux", "profile"),
    Part(name="tests", kind="tests", expected_s=90, limit_s=300),
    *(_of_shape("7b", mode) for mode in ("fused", "eager", "profile")),
    *(_of_shape(shape, "compiled") for shape in ("xl", "7b")),
    *(
        _of_shape(shape, mode, recompute=True)
        for mode in ("fused", "eager", "compiled")
        for shape in ("xl", "7b")
    ),
    *(_of_shape("xl-padded", mode) for mode in ("eager", "fused")),
    Part(name="padded-loop", kind="padded", expected_s=45, limit_s=180),
)
NAMES = tuple(part.name for part in PARTS)


def chosen(asked: str, *, done: Sequence[str]) -> list[Part]:
    """The parts of a list of names, in the order of their worth; all without any name.

    Raises:
        ValueError: a name that no part has.
    """
    wanted = {*re.findall(r"[^\s,]+", asked)} or {*NAMES}
    if unknown := wanted - {*NAMES, MISSING}:
        raise ValueError(
            f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(NAMES)},"
            f" and {MISSING} for those that are not done"
        )
    if MISSING in wanted:
        wanted |= {*NAMES} - {*done}
    return [part for part in PARTS if part.name in wanted]


def configuration(part: Part, size: str, *, more: Sequence[str] = ()) -> list[str]:
    """The overrides of a part; `more` are the user's."""
    return [*shape_keys(part.shape, size), *more, *part.keys]


def shape_keys(shape: str, size: str = SIZES[0]) -> list[str]:
    """The overrides of a network and its packs."""
    networks, samples = SHAPES[shape]
    which = SIZES.index(size)
    names = ("frames", "height", "width", "text_length")
    sample = ", ".join(f"{n}: {v}" for n, v in zip(names, samples[which], strict=True))
    keys = [*_ALWAYS.split(), *_PACKS[size].split(), f"dataset.mock_samples=[{{{sample}}}]"]
    return [*keys, *(f"model.{key}" for key in networks[which].split())]

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

_COMMON = {
    "full": (
        *("dataset.mock=true", "dataset.task_encoder_seq_length=32768"),
        *("dataset.packing_buffer_size=64", "dataset.sample_multiple=16", "dataset.num_workers=2"),
        *("train.global_batch_size=1", "model.precision=bf16"),
    ),
    "tiny": (
        *("dataset.mock=true", "dataset.task_encoder_seq_length=256"),
        *("dataset.packing_buffer_size=16", "dataset.sample_multiple=16", "dataset.num_workers=0"),
        *("train.global_batch_size=1", "model.precision=fp32"),
    ),
}


def _network(layers: int, width: int, heads: int, text: int, *more: str) -> tuple[str, ...]:
    sizes = f"num_layers={layers} hidden_size={width} num_attention_heads={heads}"
    keys = ("name=custom", *sizes.split(), f"crossattn_emb_size={text}", *more)
    return tuple(f"model.{key}" for key in keys)


def _samples(frames: int, height: int, width: int, text: int) -> str:
    kind = f"{{frames: {frames}, height: {height}, width: {width}, text_length: {text}}}"
    return f"dataset.mock_samples=[{kind}]"


_RANK = "adaln_lora_dim="
_XL = {
    "full": ("model.name=dit_xl", "model.crossattn_emb_size=1024"),
    "tiny": _network(2, 48, 2, 32, f"{_RANK}8"),
}
_TIGHT = {"full": _samples(1, 64, 64, 128), "tiny": _samples(1, 16, 16, 8)}  # 1,024 and 64 tokens
_PADDED = {"full": _samples(1, 62, 66, 128), "tiny": _samples(1, 14, 18, 8)}  # one token fewer
SHAPES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "xl": {size: (*_XL[size], _TIGHT[size]) for size in SIZES},
    # One sample of 32,760 tokens: 81 frames of 480 x 832 pixels. The model has 40 such layers.
    "wan14b": {
        "full": (
            *_network(4, 5120, 40, 4096, "family=wan", "mlp_ratio=2.7"),
            _samples(21, 60, 104, 512),
        ),
        "tiny": (
            *_network(1, 48, 4, 16, "family=wan", "mlp_ratio=1.5", "text_pad_to=12"),
            _samples(3, 8, 8, 8),
        ),
    },
    # Seven samples of 4,096 image tokens, each with 512 of text in the same attention.
    "flux": {
        "full": (
            *_network(
                2, 3072, 24, 4096, "family=flux", "num_single_layers=4", "guidance_embed=false"
            ),
            _samples(1, 128, 128, 512),
        ),
        "tiny": (
            *_network(
                1,
                48,
                4,
                16,
                "family=flux",
                "num_single_layers=1",
                "rope_axes=[4, 4, 4]",
                "guidance_embed=false",
            ),
            _samples(1, 8, 8, 8),
        ),
    },
    # A 7B model has 28 such layers; so many fit with optimizer and activations.
    "7b": {
        "full": (*_network(6, 4096, 32, 1024, f"{_RANK}256"), _TIGHT["full"]),
        "tiny": (*_network(1, 64, 2, 32, f"{_RANK}8"), _TIGHT["tiny"]),
    },
    "xl-padded": {size: (*_XL[size], _PADDED[size]) for size in SIZES},
}
"""Shape -> size -> overrides."""

PADDED_LOOP: Mapping[str, tuple[str, ...]] = {
    "full": ("--steps", "5", "model.name=dit_xl", "model.precision=bf16"),
    "tiny": ("--steps", "1", *_network(1, 48, 2, 32)[1:]),
}
"""What compare_padded.py is given."""

_MODES = {
    "eager": ("model.fused_kernels=false",),
    "fused": ("model.fused_kernels=true",),
    "compiled": ("model.fused_kernels=false", "model.compile=true"),
}
_RECOMPUTE = (
    *("model.recompute_granularity=full", "model.recompute_method=uniform"),
    "model.recompute_num_layers=1",
)
_SECONDS = {"eager": (25, 120), "fused": (30, 150), "compiled": (60, 240)}


def _steps(shape: str, mode: str, *, recompute: bool = False) -> Part:
    expected, limit = _SECONDS[mode]
    return Part(
        name=f"{shape}-{mode}" + "-recompute" * recompute,
        kind="steps",
        shape=shape,
        keys=(*_MODES[mode], *_RECOMPUTE * recompute),
        expected_s=expected,
        limit_s=limit,
    )


def _profile(shape: str, *keys: str) -> Part:
    name = f"{shape}-profile"
    return Part(name=name, kind="profile", shape=shape, keys=keys, expected_s=30, limit_s=150)


PARTS: tuple[Part, ...] = (
    Part(name="ceilings", kind="bounds", expected_s=10, limit_s=90),
    Part(name="attention", kind="bounds", expected_s=40, limit_s=150),
    Part(name="fused", kind="bounds", expected_s=15, limit_s=90),
    *(_steps("xl", mode) for mode in ("fused", "eager")),
    *(_steps("wan14b", mode, recompute=True) for mode in ("fused", "eager")),
    _steps("flux", "fused"),
    *(_profile("xl"), _profile("wan14b", *_RECOMPUTE), _profile("flux")),
    Part(name="tests", kind="tests", expected_s=90, limit_s=300),
    *(_steps("7b", mode) for mode in ("fused", "eager")),
    _profile("7b"),
    *(_steps(shape, "compiled") for shape in ("xl", "7b")),
    *(
        _steps(shape, mode, recompute=True)
        for mode in ("fused", "eager", "compiled")
        for shape in ("xl", "7b")
    ),
    *(_steps("xl-padded", mode) for mode in ("eager", "fused")),
    Part(name="padded-loop", kind="padded", expected_s=45, limit_s=180),
)


def chosen(asked: str, *, done: Sequence[str]) -> list[Part]:
    """The parts of a list of names, in the order of their worth; all without any name.

    Raises:
        ValueError: a name that no part has.
    """
    names = re.findall(r"[^\s,]+", asked)
    known = {part.name for part in PARTS}
    if unknown := set(names) - known - {MISSING}:
        raise ValueError(
            f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(known_names())},"
            f" and {MISSING} for those that are not done"
        )
    wanted = set(names) if names else known
    if MISSING in wanted:
        wanted |= known - {*done}
    return [part for part in PARTS if part.name in wanted]


def known_names() -> list[str]:
    return [part.name for part in PARTS]


def configuration(part: Part, size: str, *, more: Sequence[str] = ()) -> list[str]:
    """The overrides of a part; `more` are the user's."""
    return [*shape_keys(part.shape, size), *more, *part.keys]


def shape_keys(shape: str, size: str = SIZES[0]) -> list[str]:
    """The overrides of a network and its packs."""
    return [*_COMMON[size], *SHAPES[shape][size]]

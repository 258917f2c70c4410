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
    """imports, ceilings, steps, profile, padded: functions of the worker; tests: pytest."""
    expected_s: float
    """It does not begin where less time is left."""
    limit_s: float
    """It is ended after this time."""
    shape: str = ""
    keys: tuple[str, ...] = ()
    """Overrides of the shape's configuration; the part is not run where one has no such key."""
    if_known: tuple[str, ...] = ()
    """Overrides that are left out where the configuration has no such key."""


IMPORTS = Part(name="imports", kind="imports", expected_s=0, limit_s=180)
"""It comes before all others, whatever is chosen."""

_COMMON: Mapping[str, tuple[str, ...]] = {
    "full": (
        *("dataset.mock=true", "dataset.task_encoder_seq_length=32768"),
        *("dataset.packing_buffer_size=64", "dataset.sample_multiple=16", "dataset.num_workers=2"),
        *("train.global_batch_size=1", "model.precision=bf16", "model.crossattn_emb_size=1024"),
    ),
    "tiny": (
        *("dataset.mock=true", "dataset.task_encoder_seq_length=256"),
        *("dataset.packing_buffer_size=16", "dataset.sample_multiple=16", "dataset.num_workers=0"),
        *("train.global_batch_size=1", "model.precision=fp32", "model.crossattn_emb_size=32"),
    ),
}
_XL: Mapping[str, tuple[str, ...]] = {
    "full": ("model.name=dit_xl",),
    "tiny": (
        *("model.name=custom", "model.num_layers=2", "model.hidden_size=48"),
        *("model.num_attention_heads=2", "model.adaln_lora_dim=8"),
    ),
}
_7B: Mapping[str, tuple[str, ...]] = {
    # A 7B model has 28 such layers; so many fit with optimizer and activations.
    "full": (
        *("model.name=custom", "model.num_layers=6", "model.hidden_size=4096"),
        *("model.num_attention_heads=32", "model.adaln_lora_dim=256"),
    ),
    "tiny": (
        *("model.name=custom", "model.num_layers=1", "model.hidden_size=64"),
        *("model.num_attention_heads=2", "model.adaln_lora_dim=8"),
    ),
}


def _samples(height: int, width: int, text: int) -> tuple[str, ...]:
    kind = f"{{frames: 1, height: {height}, width: {width}, text_length: {text}}}"
    return (f"dataset.mock_samples=[{kind}]",)


_TIGHT = {"full": _samples(64, 64, 128), "tiny": _samples(16, 16, 8)}  # 1,024 and 64 tokens
_PADDED = {"full": _samples(62, 66, 128), "tiny": _samples(14, 18, 8)}  # one token fewer
SHAPES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    size: {
        "xl": (*_COMMON[size], *_XL[size], *_TIGHT[size]),
        "7b": (*_COMMON[size], *_7B[size], *_TIGHT[size]),
        "xl-padded": (*_COMMON[size], *_XL[size], *_PADDED[size]),
    }
    for size in SIZES
}
"""Size -> shape -> overrides; full packs have 32 samples, as in the counts of traffic."""

PADDED_LOOP: Mapping[str, tuple[str, ...]] = {
    "full": ("--steps", "5", "model.name=dit_xl", "model.precision=bf16"),
    "tiny": (
        *("--steps", "1", "model.num_layers=1", "model.hidden_size=48"),
        *("model.num_attention_heads=2", "model.crossattn_emb_size=32"),
    ),
}
"""What compare_padded.py is given."""

_OFF = ("model.fused_kernels=false",)
_MODES: Mapping[str, dict[str, tuple[str, ...]]] = {
    "eager": {"if_known": _OFF},
    "fused": {"keys": ("model.fused_kernels=true",)},
    "compiled": {"keys": ("model.compile=true",), "if_known": _OFF},
}
_RECOMPUTE = (
    *("model.recompute_granularity=full", "model.recompute_method=uniform"),
    "model.recompute_num_layers=1",
)
_SECONDS = {"eager": (25, 120), "fused": (30, 150), "compiled": (60, 240)}


def _steps(shape: str, mode: str, *, recompute: bool = False) -> Part:
    settings = _MODES[mode]
    expected, limit = _SECONDS[mode]
    return Part(
        name=f"{shape}-{mode}" + ("-recompute" if recompute else ""),
        kind="steps",
        shape=shape,
        keys=(*settings.get("keys", ()), *(_RECOMPUTE if recompute else ())),
        if_known=settings.get("if_known", ()),
        expected_s=expected,
        limit_s=limit,
    )


def _profile(shape: str) -> Part:
    name = f"{shape}-profile"
    return Part(name=name, kind="profile", shape=shape, expected_s=30, limit_s=150)


PARTS: tuple[Part, ...] = (
    Part(name="ceilings", kind="ceilings", expected_s=10, limit_s=90),
    *(_steps("xl", mode) for mode in ("eager", "fused")),
    *(_steps("7b", mode) for mode in ("eager", "fused")),
    *(_profile(shape) for shape in ("xl", "7b")),
    Part(name="tests", kind="tests", expected_s=90, limit_s=300),
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
    """The overrides of a part without those of `if_known`; `more` are the user's."""
    return [*SHAPES[size][part.shape], *more, *part.keys]

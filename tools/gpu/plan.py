"""What is measured on a GPU: rows in the order of their worth, each with its seconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MISSING = "missing"
"""In place of names: the rows that are not done yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement."""

    name: str
    kind: str
    """A function of the worker: imports, tests, bounds, steps, profile or padded."""
    expected_s: float
    """It does not begin where less time is left."""
    shape: str = ""
    """Network and packs of steps, by their name in `measuring.shapes`."""
    keys: tuple[str, ...] = ()
    """Overrides of the shape's configuration; of tests, what pytest is given."""

    @property
    def limit_s(self) -> float:
        """Seconds after which it is ended."""
        return 3 * self.expected_s + 60


_WORDS = {
    "fused": ("model.fused_kernels=true",),
    "eager": ("model.fused_kernels=false",),
    "compiled": ("model.fused_kernels=false", "model.compile=true"),
    "profile": (),
    "recompute": (
        *("model.recompute_granularity=full", "model.recompute_method=uniform"),
        "model.recompute_num_layers=1",
    ),
    "flash_2": ("model.attention_backend=flash_2",),
    "sdpa": ("model.attention_backend=sdpa",),
    "offload": ("model.cpu_offloading_num_layers=14",),
    # From the first step on; training begins with dense attention.
    "sparse": (
        *("model.sparse_attention=true", "model.sparse_share=0.1", "model.sparse_share_step=0.9"),
        "model.sparse_share_interval=1",
    ),
    # One picture of 1,024 pixels and its text.
    "lora": ("lora.rank=16", "dataset.task_encoder_seq_length=4608"),
    "fp8base": ("lora.base_dtype=float8_e4m3",),
}
"""What a word in the name of a row sets."""
_TINY = {
    "model.attention_backend=flash_2": "model.attention_backend=auto",
    "model.cpu_offloading_num_layers=14": "model.cpu_offloading_num_layers=1",
    "dataset.task_encoder_seq_length=4608": "dataset.task_encoder_seq_length=256",
    "lora.base_dtype=float8_e4m3": "lora.base_dtype=float8_e4m3 model.precision=bf16",
}
"""Keys of a GPU -> what a CPU takes in their place."""
_KERNELS = (
    "(adaln and pack) or (queries and 5000) or (across and 900) or dropout or fused_updates"
    " or (one_by_one and tight)"
)
"""Names of the tests of a kernel's numbers, one or two for each kernel and width."""
_COMPILERS = "compiled or chosen_blocks or returns"
"""Tests that wait minutes for a compiler, and the one that starts a training."""


def _steps(shape: str, words: str, expected_s: float) -> Row:
    return Row(
        name="-".join((shape, *words.split())),
        kind="profile" if "profile" in words else "steps",
        expected_s=expected_s,
        shape=shape,
        keys=tuple(key for word in words.split() for key in _WORDS[word]),
    )


def _tests(name: str, expected_s: float, chosen: str) -> Row:
    return Row(name=name, kind="tests", expected_s=expected_s, keys=("tests/gpu", "-k", chosen))


IMPORTS = Row(name="imports", kind="imports", expected_s=40)
"""It comes before all others, whatever is chosen."""
SMOKE = _tests("smoke", 25, _KERNELS)
"""It begins while packages are imported, and compiles kernels for all others meanwhile. Where it
fails, nothing is measured: times of wrong kernels are worth nothing."""
PLAN: tuple[Row, ...] = (
    SMOKE,
    Row(name="ceilings", kind="bounds", expected_s=8),
    _steps("xl", "fused", 30),
    _steps("xl", "fused flash_2", 15),
    _steps("xl", "fused sdpa", 15),
    _steps("7b", "fused", 20),
    _steps("wan14b", "fused recompute", 25),
    _steps("wan14b", "fused recompute flash_2", 20),
    _steps("flux-512", "fused", 20),
    _steps("flux", "fused", 25),
    Row(name="attention", kind="bounds", expected_s=55),
    Row(name="fused", kind="bounds", expected_s=30),
    _steps("xl", "profile", 30),
    _steps("wan14b", "profile recompute", 30),
    _steps("flux12b", "lora recompute", 40),
    _steps("flux12b", "lora fp8base recompute", 40),
    _steps("xl", "eager", 25),
    _steps("xl", "compiled", 60),
    _steps("xl", "fused offload", 25),
    _tests("tests", 80, f"not ({_COMPILERS})"),
    Row(name="padded-loop", kind="padded", expected_s=50),
    _steps("wan14b", "sparse recompute", 70),
    _tests("tests-compiled", 200, _COMPILERS),
    _steps("flux", "profile", 30),
    _steps("7b", "profile", 30),
    _steps("wan14b", "eager recompute", 25),
    _steps("xl", "fused recompute", 30),
    _steps("7b", "fused recompute", 30),
    _steps("xl-padded", "fused", 30),
)
NAMES = tuple(row.name for row in PLAN)


def chosen(asked: str, *, done: Sequence[str]) -> list[Row]:
    """The rows of a list of names, in the order of their worth; all without any name.

    Raises:
        ValueError: a name that no row has.
    """
    wanted = {*re.findall(r"[^\s,]+", asked)} or {*NAMES}
    if unknown := wanted - {*NAMES, MISSING}:
        raise ValueError(
            f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(NAMES)},"
            f" and {MISSING} for those that are not done"
        )
    if MISSING in wanted:
        wanted |= {*NAMES} - {*done}
    return [row for row in PLAN if row.name in wanted]


def keys_of(row: Row, size: str) -> list[str]:
    """The overrides of a row, for a GPU or in tiny sizes."""
    tiny = size == "tiny"
    return [word for key in row.keys for word in (_TINY.get(key, key) if tiny else key).split()]

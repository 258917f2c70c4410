"""The plan of `make gpu`: its rows, the most useful first, with their durations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_FULL = {
    "fused": "model.fused_kernels=true",
    "eager": "model.fused_kernels=false",
    "compiled": "model.fused_kernels=false model.compile=true",
    "profile": "",
    "recompute": "model.recompute_granularity=full model.recompute_method=uniform"
    " model.recompute_num_layers=1",
    "flash_2": "model.attention_backend=flash_2",
    "sdpa": "model.attention_backend=sdpa",
    "offload": "model.cpu_offloading_num_layers=14",
    # From the first step on; training begins with dense attention.
    "sparse": "model.sparse_attention=true model.sparse_share=0.1 model.sparse_share_step=0.9"
    " model.sparse_share_interval=1",
    # One picture of 1,024 pixels and its text.
    "lora": "lora.rank=16 dataset.task_encoder_seq_length=4608",
    "fp8base": "lora.base_dtype=float8_e4m3",
}
"""Overrides of the configuration on a GPU, by a word in the name of a row."""
_TINY = _FULL | {
    "flash_2": "model.attention_backend=auto",
    "offload": "model.cpu_offloading_num_layers=1",
    "lora": "lora.rank=16 dataset.task_encoder_seq_length=256",
    "fp8base": "lora.base_dtype=float8_e4m3 model.precision=bf16",
}
"""Overrides of the configuration on a CPU, by a word in the name of a row."""
_COMPILERS = "compiled or chosen_blocks or returns"
"""pytest expression for the tests that wait minutes for a compiler, and for one that starts a
training."""

Outcome = dict[str, Any]
"""The outcome of a row: `state`, `found` (its results), `took_s`; if it is not done also `why`, and
the end of its `log`."""


class State(StrEnum):
    """How a row ended."""

    DONE = "done"
    FAILED = "failed"
    ENDED = "ended at its limit"
    NOT_BEGUN = "not begun"


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement of the plan, which is a row of the page of results."""

    name: str
    """Name of the row; for steps a shape of `measuring.shapes`, then words that set keys."""
    expected_s: float
    """Seconds that the row is expected to take; it does not begin if fewer are left."""
    kind: str = "steps:steps"
    """The function that measures the row, as file:function of this folder."""
    tests: str = ""
    """Expression for `pytest -k` that selects tests of tests/gpu."""

    @property
    def shape(self) -> str:
        return "-".join(word for word in self.name.split("-") if word not in _FULL)

    def keys(self, size: str) -> list[str]:
        """Overrides of the configuration for the words in the name of this row.

        `size` is full for a GPU, and tiny for a CPU.
        """
        words = _TINY if size == "tiny" else _FULL
        return [key for word in self.name.split("-") for key in words.get(word, "").split()]


IMPORTS = Row("imports", 40, "checks:check_imports")
"""The row that comes before all others, whatever rows are chosen."""
SMOKE = Row(
    "smoke",
    25,
    "checks:run_tests",
    "(adaln and pack) or (queries and 5000) or (across and 900) or dropout or fused_updates"
    " or (one_by_one and tight)",
)
"""One or two tests of the numbers of each kernel and width. It runs while packages are imported,
and meanwhile compiles kernels for the other rows. If it fails, nothing is measured: times of wrong
kernels are worthless."""
PLAN = (
    SMOKE,
    Row("ceilings", 8, "steps:table"),
    Row("xl-fused", 30),
    Row("xl-fused-flash_2", 15),
    Row("xl-fused-sdpa", 15),
    Row("7b-fused", 20),
    Row("wan14b-fused-recompute", 25),
    Row("wan14b-fused-recompute-flash_2", 20),
    Row("flux-512-fused", 20),
    Row("flux-fused", 25),
    Row("attention", 55, "steps:table"),
    Row("fused", 30, "steps:table"),
    Row("xl-profile", 30, "steps:profile"),
    Row("wan14b-profile-recompute", 30, "steps:profile"),
    Row("flux12b-lora-recompute", 40),
    Row("flux12b-lora-fp8base-recompute", 40),
    Row("xl-eager", 25),
    Row("xl-compiled", 60),
    Row("xl-fused-offload", 25),
    Row("tests", 80, "checks:run_tests", f"not ({_COMPILERS})"),
    Row("padded-loop", 50, "steps:padded_loop"),
    Row("wan14b-sparse-recompute", 70),
    Row("tests-compiled", 200, "checks:run_tests", _COMPILERS),
    Row("flux-profile", 30, "steps:profile"),
    Row("7b-profile", 30, "steps:profile"),
    Row("wan14b-eager-recompute", 25),
    Row("xl-fused-recompute", 30),
    Row("7b-fused-recompute", 30),
    Row("xl-padded-fused", 30),
)
NAMES = tuple(row.name for row in PLAN)


def chosen(asked: str, *, done: Sequence[str]) -> list[Row]:
    """The rows that `asked` names, the most useful first; all rows if it names none.

    The name `missing` stands for all rows that are not in `done`.

    Raises:
        ValueError: no row has that name.
    """
    wanted = {*re.findall(r"[^\s,]+", asked)} or {*NAMES}
    if unknown := wanted - {*NAMES, "missing"}:
        raise ValueError(
            f"no part is named {', '.join(sorted(unknown))}; choose some of {', '.join(NAMES)},"
            " and missing for those that are not done"
        )
    if "missing" in wanted:
        wanted |= {*NAMES} - {*done}
    return [row for row in PLAN if row.name in wanted]

"""Plans of layouts, as tables for the terminal and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.table import Table

from dit.console import Console
from dit.planner.layouts import BatchPlan, LayoutPlan, Refusal
from dit.planner.times import Times
from dit.progress import brief

_BATCHES = (
    "What a larger batch (train.global_batch_size) brings: the best layout of each. The same tokens"
    " then make fewer updates"
)


def print_tables(
    title: str,
    best: list[LayoutPlan],
    bad: list[Refusal],
    batches: list[BatchPlan],
    *,
    tokens: float,
    why: bool,
) -> None:
    """Prints speed, times, memory and traffic of the best layouts, then why others do not work.

    A last table shows larger `batches`. `tokens` is the number of tokens of the whole training.
    With `why` each refused layout is listed with its reason; otherwise only their numbers are
    printed.
    """
    console = wide_console()
    console.print(title)
    if best:
        tables = {
            "": [_speed(plan, tokens) for plan in best],
            "Milliseconds of a step, and shares": [
                _name(plan) | milliseconds(plan.times) | {"MFU": f"{plan.mfu:.1%}"} for plan in best
            ],
            "GB on the fullest device": [_memory(plan) for plan in best],
            "GB a device sends in a step, and seconds that the step waits for it": [
                _traffic(plan) for plan in best
            ],
        }
        for heading, rows in tables.items():
            console.print(table_of(heading, rows))
        console.print(_checkpoint(best[0]))
    if batches:
        console.print(table_of(_BATCHES, [_batch(one, batches[0], tokens) for one in batches]))
    if why:
        for one in bad:
            console.print(f"{one.layout}: {one.why}")
    elif bad:
        short = Counter("do not fit" if "GB of" in one.why else "break a rule" for one in bad)
        counts = ", ".join(f"{count} {kind}" for kind, count in short.items())
        console.print(f"{counts}; --refused says why for each")


def _batch(one: BatchPlan, first: BatchPlan, tokens: float) -> dict[str, str]:
    plan, rate = one.best, one.best.tokens_per_s
    updates = tokens / (rate * plan.times.step)
    return (
        {"packs a step": f"{one.packs:,}"}
        | _name(plan)
        | {
            "step s": brief(plan.times.step),
            "MFU": f"{plan.mfu:.1%}",
            "days": brief(tokens / rate / 86400),
            "tokens a second": f"{rate / first.best.tokens_per_s - 1:+.1%}",
            "updates": f"{updates:,.0f}",
        }
    )


def wide_console() -> Console:
    """A console of 200 columns: a narrower terminal breaks a table's lines, but hides no number."""
    return Console(width=200)


def as_json(good: list[LayoutPlan], bad: list[Refusal], batches: list[BatchPlan]) -> dict[str, Any]:
    """All plans, the reasons of refused layouts, and the best plan of each batch, for JSON."""
    return {
        "plans": [_numbers(plan) for plan in good],
        "refused": [asdict(refusal) for refusal in bad],
        "batches": [{"packs": one.packs} | _numbers(one.best) for one in batches],
    }


def _numbers(plan: LayoutPlan) -> dict[str, Any]:
    return asdict(plan) | {"step_s": plan.times.step, "by_kind_s": plan.times.by_kind}


def _speed(plan: LayoutPlan, tokens: float) -> dict[str, str]:
    return _name(plan) | {
        "peak GB": f"{plan.memory.total / 1e9:.1f}",
        "bubble": f"{plan.bubble:.1%}",
        "step s": brief(plan.times.step),
        "TFLOP/s": f"{plan.tflops:.0f}",
        "MFU": f"{plan.mfu:.1%}",
        "days": brief(tokens / plan.tokens_per_s / 86400),
    }


def milliseconds(times: Times) -> dict[str, str]:
    """Table cells by kind of cost: milliseconds of a step, and their percentage of the step.

    The last cell, `step`, has the milliseconds of the whole step.
    """
    cells = {
        kind: f"{1e3 * seconds:.1f} {seconds / times.step:.0%}" if seconds else "-"
        for kind, seconds in times.by_kind.items()
    }
    return cells | {"step": f"{1e3 * times.step:.1f}"}


def _memory(plan: LayoutPlan) -> dict[str, str]:
    need = plan.memory
    gb = {
        "weights": need.weights,
        "grads": need.gradients,
        "optim.": need.optimizer,
        "EMA": need.ema,
        "activ.": need.activations,
        "backward": need.backward,
        "norms": need.norms,
        "gathered": need.gathered,
        "peak": need.total,
    }
    return _name(plan) | {name: f"{size / 1e9:.1f}" for name, size in gb.items()}


def _traffic(plan: LayoutPlan) -> dict[str, str]:
    return _name(plan) | {
        kind: f"{brief(size / 1e9)}, {getattr(plan.times, kind):.1g}" if size else "-"
        for kind, size in asdict(plan.traffic).items()
    }


def _checkpoint(plan: LayoutPlan) -> str:
    of = plan.checkpoint
    return (
        f"A checkpoint has {of.whole / 1e9:,.1f} GB. On the first of these layouts each rank writes"
        f" and reads {_size(of.share)} of it, with as much host memory; sends at most"
        f" {_size(of.sent)} when it saves; and takes {_size(of.received)} when it loads"
    )


def _size(size: float) -> str:
    return f"{brief(size / 1e9)} GB"


def _name(plan: LayoutPlan) -> dict[str, str]:
    layout = plan.layout
    stages = f"{layout.pipeline}" + (f"x{layout.virtual}" if layout.virtual > 1 else "")
    sizes = (layout.tensor, layout.context, stages, layout.data)
    return {
        "TP-CP-PP-DP": "-".join(map(str, sizes)),
        "recompute": str(layout.recompute),
        "sharding": layout.shared,
    }


def table_of(title: str, rows: list[dict[str, str]]) -> Table:
    """A table with a row for each mapping in `rows`, whose keys name the columns."""
    table = Table(title=title or None, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table

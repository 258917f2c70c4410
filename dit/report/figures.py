"""Computes the tables of the page, with one column for each run."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dit.report.charts import number
from dit.report.findings import count, refusals
from dit.report.reading import RunRecord, default_settings, flat
from dit.sizing.memory import parameter_count

Columns = Sequence[Mapping[str, Any]]  # for each run: name of a row -> value


def table(names: Sequence[str], columns: Columns) -> str:
    """An HTML table with a column for each run; `names` are those of the runs.

    Each of `columns` maps names of rows to values. Rows of later columns that earlier ones lack
    follow at the end.
    """
    rows = dict.fromkeys(row for column in columns for row in column)
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><th scope=row>{_breakable(row)}</th>"
        + "".join(f"<td>{escape(_shown(column.get(row, '')))}</td>" for column in columns)
        + "</tr>"
        for row in rows
    )
    top = f"<tr><th></th>{head}</tr>" if len(names) > 1 else ""
    return f"<div class=wide><table>{top}{body}</table></div>"


def _breakable(name: str) -> str:
    return re.sub(r"([._])", r"\1<wbr>", escape(name))


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def summary_table(run: RunRecord) -> dict[str, Any]:
    """Size, losses, validation results and speed of a run, by name."""
    seconds = sum(value for _, value in run.points("step_time_s"))
    last, total = run.lines[-1], run.settings.get("train.train_iters")
    rows = _model(run) | {
        "steps": f"{last['step']:,}" + (f" of {total:,}" if isinstance(total, int) else ""),
        "training time": _duration(seconds),
    }
    return rows | _losses(run) | _validation(run) | _speed(run)


def _losses(run: RunRecord) -> dict[str, Any]:
    losses = [value for _, value in run.points_of_updates("loss")]
    if not losses:
        return {"loss": "no step has a finite one"}
    tail = losses[-max(1, len(losses) // 50) :]
    return {
        "first loss": _number(losses[0]),
        "last loss (mean of 2% of the steps)": _number(statistics.fmean(tail)),
    }


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}"


def _model(run: RunRecord) -> dict[str, Any]:
    if run.config is None:
        return {}
    model = run.config.model
    return {
        "model": f"{model.name}, {parameter_count(model):,} parameters",
        "objective": f"{run.config.objective.name}, {model.precision}",
    }


def _validation(run: RunRecord) -> dict[str, Any]:
    rows = {}
    for name, label in (("val_loss", "validation loss"), ("val_loss_ema", "validation loss, EMA")):
        values = run.points(name)
        if values:
            step, lowest = min(values, key=lambda point: point[1])
            last = _number(values[-1][1])
            rows[label] = f"{last} (lowest {_number(lowest)} at step {step:,.0f})"
    if (samples := run.points("target_samples")) and (seconds := run.points("target_s")):
        step, spent = int(samples[-1][0]), _duration(seconds[-1][1])
        rows["target reached"] = f"step {step:,}, {samples[-1][1]:,.0f} samples, {spent}"
    return rows


def _speed(run: RunRecord) -> dict[str, Any]:
    rows = {}
    for name, label in (
        ("tokens_per_s", "tokens per second (median)"),
        ("model_tflops", "model TFLOP/s of a device (median)"),
    ):
        if values := [value for _, value in run.points_of_updates(name)]:
            rows[label] = number(statistics.median(values))
    return rows


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    if hours:
        return f"{hours:,} h {rest // 60:02d} min"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.1f} s"


def data(run: RunRecord) -> dict[str, Any]:
    """Samples and tokens that a run has read, refused samples, and the dataset card, by name."""
    last = run.lines[-1]
    tokens = sum(value for _, value in run.points("real_tokens"))
    fills = [value for _, value in run.points_of_updates("pack_fill")]
    rows: dict[str, Any] = {"samples seen": last.get("consumed_samples", "")}
    rows |= {"tokens seen": number(tokens)} if tokens else {}
    rows |= {"fill of packs (mean)": f"{statistics.fmean(fills):.1%}"} if fills else {}
    rows["samples refused"] = count(last.get("refused"))
    rows |= {f"refused: {reason}": number for reason, number in refusals(run).items()}
    for key, value in flat(run.card or {}):
        rows[f"card: {key}"] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return rows


def environment_table(run: RunRecord) -> dict[str, Any]:
    """Machine and software at the newest start of a run, and the number of starts, by name."""
    if not run.starts:
        return {"environment": "not recorded (a run of an earlier version)"}
    return {
        "run folder": run.folder,
        "last started at step": run.starts[-1]["step"],
        "starts": len(run.starts),
    } | {key: value for key, value in run.starts[-1].items() if key != "step"}


def settings(runs: Sequence[RunRecord]) -> tuple[str, list[dict[str, Any]]]:
    """Title and columns of the table of settings.

    It has the settings that differ between runs, or for a single run those that differ from the
    defaults.
    """
    known = [run.settings for run in runs]
    compared = known if len(runs) > 1 else [known[0], default_settings()]
    keys = dict.fromkeys(key for each in compared for key in each)
    differ = [k for k in keys if any(each.get(k) != compared[0].get(k) for each in compared)]
    title = "Settings that differ" if len(runs) > 1 else "Settings that are not the default"
    return title, [{k: each[k] for k in differ if k in each} for each in known]

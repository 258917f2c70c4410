"""Results of a run -> a page in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tools.gpu.plan import PLAN
from tools.gpu.results import State

_ABOUT = {"date": "{}", "commit": "commit {}", "python": "Python {}", "cuda": "CUDA {}"}
_ABOUT |= {"memory_gb": "{:.0f} GB", "cores": "{} cores"}
_NAMED = ("matrix products", "attention", "communication")
"""Kinds of kernels that the planner has by the same names."""


def page(content: dict[str, Any]) -> str:
    """The page of the JSON file's content."""
    about, rows = content["about"], content["rows"]
    lines = [f"# {about.get('device', 'Unknown device')}", "", _intro(about), ""]
    for section in (_steps, _bounds, _kernels, _padded, _tests, _others):
        if found := list(section(rows)):
            lines += [*found, ""]
    return "\n".join(lines).rstrip() + "\n"


def _intro(about: dict[str, Any]) -> str:
    said = [text.format(about[name]) for name, text in _ABOUT.items() if about.get(name)]
    said += (f"{name} {version}" for name, version in about.get("versions", {}).items())
    text = f"{'; '.join(said)}.\n\n`make gpu` wrote this page; all numbers are in its JSON file."
    if about.get("size") != "full":
        text += " **Tiny sizes: a trial of the way, no measurement.**"
    if about.get("keys"):
        text += f" Keys that were set: `{' '.join(about['keys'])}`."
    return text


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield from ("", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _found(rows: dict[str, Any], kind: str) -> Iterator[tuple[str, Any]]:
    """(name, found) of the rows of a kind; of tables and tests also of those that were ended."""
    partly = kind in ("bounds", "tests")
    for row in PLAN:
        outcome = rows.get(row.name, {})
        if row.kind == kind and "found" in outcome and (partly or outcome["state"] == State.DONE):
            yield row.name, outcome["found"]


def _steps(rows: dict[str, Any]) -> Iterator[str]:
    if measured := dict(_found(rows, "steps")):
        columns = (
            *("row", "attention", "step, s", "tokens/s", "TFLOP/s", "MFU, data sheet", "expected"),
            *("MFU, measured", "forward", "backward", "optimizer", "data", "rest"),
            *("peak memory, GB", "planned", "reserved"),
        )
        yield "## Steps"
        yield from _table(columns, (_cells(*one) for one in measured.items()))
        notes = [f"- `{name}`: {one['pack']}" for name, one in measured.items() if one["pack"]]
        notes += [
            f"- `{name}`: the whole network at as many TFLOP/s trains {rate:.3g} samples/s"
            for name, one in measured.items()
            if (rate := one.get("whole_samples_per_s"))
        ]
        if notes:
            yield from ("", *notes)


def _cells(name: str, found: dict[str, Any]) -> Sequence[str]:
    shares, planned = found["shares"], found.get("expected")
    mfu = {kind.split(",")[0]: f"{value:.1%}" for kind, value in found["mfu"].items()}
    rest = shares["other_s"] + shares["communication_s"]
    return (
        *(name, found["attention_backend"], f"{found['step_time_s']['median']:.4g}"),
        f"{found['tokens_per_s']['median']:,.0f}",
        f"{found['model_tflops']['median']:.4g}",
        *(mfu.get("data sheet", "-"), f"{planned['mfu']:.1%}" if planned else "-"),
        mfu["measured"],
        *(f"{shares[f'{one}_s']:.1%}" for one in ("forward", "backward", "optimizer", "data")),
        *(f"{rest:.1%}", f"{found['peak_memory_gb']:.3g}"),
        *(f"{planned['memory_gb']:.3g}" if planned else "-", f"{found['reserved_memory_gb']:.3g}"),
    )


def _bounds(rows: dict[str, Any]) -> Iterator[str]:
    for name, found in _found(rows, "bounds"):
        yield f"## Bounds: {name}"
        shown = ((row, one if isinstance(one, str) else f"{one:.4g}") for row, one in found.items())
        yield from _table(("", "measured"), shown)
        yield ""


def _kernels(rows: dict[str, Any]) -> Iterator[str]:
    for name, found in _found(rows, "profile"):
        step, kernels = found["step_s"], found["kernels_s"]
        yield from (f"## Kernels of a step: {name}", "")
        yield (
            f"{kernels:.4g} s of kernels in a step of {step:.4g} s, while it was profiled;"
            f" attention by {found['attention_backend']}."
        )
        if found["pack"]:
            yield from ("", f"{found['pack']}.")
        by_kind = sorted(found["by_kind_s"].items(), key=lambda one: -one[1])
        shown = ((kind, f"{time:.4g}", f"{time / kernels:.1%}") for kind, time in by_kind)
        yield from _table(("kind", "s", "of all kernels"), shown)
        if found.get("expected"):
            yield from ("", f"Beside what the planner expects of {found['expected']['assumed']}:")
            yield from _beside_expected(found)
        yield from _longest("longest", found["longest"], kernels)
        if found.get("of_no_kind"):
            yield from _longest("longest of everything else", found["of_no_kind"], kernels)
        yield ""


def _longest(title: str, kernels: list[dict[str, Any]], whole_s: float) -> Iterator[str]:
    shown = []
    for one in kernels:
        name, seconds = one["name"].replace("|", "\\|")[:100], one["seconds"]
        share = f"{seconds / whole_s:.1%}"
        shown.append((f"`{name}`", f"{1e3 * seconds:.4g}", f"{one['calls']:g}", share))
    return _table((title, "ms a step", "calls a step", "of all kernels"), shown)


def _beside_expected(found: dict[str, Any]) -> Iterator[str]:
    """Kernels of no other kind move what layers and optimizer move."""
    measured, expected = found["by_kind_s"], found["expected"]["by_kind_s"]
    rows = {name: (expected[name], measured.get(name, 0.0)) for name in _NAMED}
    rows["all other kernels: memory traffic of layers and optimizer"] = (
        expected["memory traffic"] + expected["optimizer"],
        found["kernels_s"] - sum(measured.get(name, 0.0) for name in _NAMED),
    )
    rows["between kernels"] = (expected["launches"], found["step_s"] - found["kernels_s"])
    name, (planned, took) = max(rows.items(), key=lambda row: abs(row[1][1] - row[1][0]))
    rows["step"] = (found["expected"]["step_s"], found["step_s"])
    shown = ((name, *(f"{1e3 * seconds:.1f}" for seconds in pair)) for name, pair in rows.items())
    yield from _table(("ms a step", "expected", "measured"), shown)
    more = "more" if took > planned else "less"
    yield ""
    yield f"Furthest off: {name}, {1e3 * abs(took - planned):.1f} ms {more} than expected."


def _padded(rows: dict[str, Any]) -> Iterator[str]:
    for _, found in _found(rows, "padded"):
        yield from ("## Against a padded loop", "", "Real tokens a second, and ours over theirs.")
        names = list(found[0]["tokens_per_s"])
        shown = [
            (
                one["samples"],
                *(f"{one['tokens_per_s'][n]:,.0f} ({one['ratio'][n]:.2f}x)" for n in names),
            )
            for one in found
        ]
        yield from _table(("samples", *names), shown)


def _tests(rows: dict[str, Any]) -> Iterator[str]:
    for name, found in _found(rows, "tests"):
        counts = Counter(said.split(":")[0] for said in found.values())
        ended = ", ".join(f"{counts[how]} {how}" for how in ("passed", "skipped", "failed"))
        yield from (f"## Tests: {name}", "", f"{ended}.")
        yield from (f"- `{n}`: {_line(said)}" for n, said in found.items() if "failed" in said[:6])
        yield ""


def _others(rows: dict[str, Any]) -> Iterator[str]:
    found = [
        f"- `{name}`: {one['state']}: {_line(one.get('why', ''))}"
        for name, one in rows.items()
        if one["state"] != State.DONE
    ]
    if found:
        yield from ("## Not measured", "", *found)


def _line(text: str) -> str:
    """The first line, not too long."""
    return (text.strip().splitlines() or [""])[0][:300]

"""Writes the results of a run as a page in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tools.gpu.plan import PLAN, State

_ABOUT = {"date": "{}", "commit": "commit {}", "python": "Python {}", "cuda": "CUDA {}"}
_ABOUT |= {"memory_gb": "{:.0f} GB", "cores": "{} cores"}
_NAMED = ("matrix products", "attention", "communication")
"""Kinds of kernels that have the same names in the planner."""


def page(content: dict[str, Any]) -> str:
    """The page in Markdown, from the content of the JSON file of results."""
    about, rows = content["about"], content["rows"]
    lines = [f"# {about.get('device', 'Unknown device')}", "", _intro(about), ""]
    lines += _steps(_found(rows, "steps:steps"))
    for kind, (heading, section) in _SECTIONS.items():
        for name, found in _found(rows, kind).items():
            lines += [f"## {heading.format(name)}", "", *section(found)]
    if left := {name: one for name, one in rows.items() if one["state"] != State.DONE}:
        lines += ["## Not measured", ""]
        lines += (f"- `{n}`: {one['state']}: {_line(one['why'])}" for n, one in left.items())
    return "\n".join(lines).rstrip() + "\n"


def _intro(about: dict[str, Any]) -> str:
    said = [text.format(about[name]) for name, text in _ABOUT.items() if about.get(name)]
    said += (f"{name} {version}" for name, version in about.get("versions", {}).items())
    text = f"{'; '.join(said)}.\n\n`make gpu` wrote this page; all numbers are in its JSON file."
    if about.get("size") != "full":
        text += " **Tiny sizes: a trial of the program, no measurement.**"
    if about.get("keys"):
        text += f" Keys that were set: `{' '.join(about['keys'])}`."
    return text


def _table(rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    if shown := list(rows):
        yield from (f"| {' | '.join(shown[0])} |", "|---" * len(shown[0]) + "|")
        yield from (f"| {' | '.join(row.values())} |" for row in shown)
        yield ""


def _found(rows: dict[str, Any], kind: str) -> dict[str, Any]:
    named = {row.name: rows.get(row.name, {}) for row in PLAN if row.kind == kind}
    return {name: one["found"] for name, one in named.items() if one.get("found")}


def _steps(measured: dict[str, Any]) -> Iterator[str]:
    if measured:
        yield from ("## Steps", "")
        yield from _table(_cells(*one) for one in measured.items())
        for name, one in measured.items():
            if one["pack"]:
                yield f"- `{name}`: {one['pack']}"
            if rate := one["whole_samples_per_s"]:
                yield f"- `{name}`: at this rate the whole network trains {rate:.3g} samples/s"
        yield ""


def _cells(name: str, found: dict[str, Any]) -> dict[str, str]:
    shares, planned = found["shares"], found["expected"]
    mfu = {kind.split(",")[0]: f"{value:.1%}" for kind, value in found["mfu"].items()}
    parts = ("forward", "backward", "optimizer", "data")
    return {
        **{"row": name, "attention": found["attention_backend"]},
        "step, s": f"{found['step_time_s']['median']:.4g}",
        "tokens/s": f"{found['tokens_per_s']['median']:,.0f}",
        "TFLOP/s": f"{found['model_tflops']['median']:.4g}",
        "MFU, data sheet": mfu.get("data sheet", "-"),
        "expected": f"{planned['mfu']:.1%}" if planned else "-",
        "MFU, measured": mfu["measured"],
        **{part: f"{shares[f'{part}_s']:.1%}" for part in parts},
        "rest": f"{shares['other_s'] + shares['communication_s']:.1%}",
        "peak memory, GB": f"{found['peak_memory_gb']:.3g}",
        "planned": f"{planned['memory_gb']:.3g}" if planned else "-",
        "reserved": f"{found['reserved_memory_gb']:.3g}",
    }


def _bounds(found: dict[str, Any]) -> Iterator[str]:
    shown = {row: one if isinstance(one, str) else f"{one:.4g}" for row, one in found.items()}
    return _table({"": row, "measured": text} for row, text in shown.items())


def _kernels(found: dict[str, Any]) -> Iterator[str]:
    step, kernels, expected = found["step_s"], found["kernels_s"], found["expected"]
    yield f"{kernels:.4g} s of kernels in a step of {step:.4g} s, while it was profiled;"
    yield from (f"attention by {found['attention_backend']}. {found['pack']}".rstrip(), "")
    yield from _table(
        {"kind": kind, "s": f"{time:.4g}", "of all kernels": f"{time / kernels:.1%}"}
        for kind, time in sorted(found["by_kind_s"].items(), key=lambda one: -one[1])
    )
    if expected:
        yield from (f"Beside what the planner expects of {expected['assumed']}:", "")
        yield from _beside(found, expected)
    yield from _table(_kernel("longest", kernels, **one) for one in found["longest"])
    yield from _table(_kernel("longest of no kind", kernels, **one) for one in found["of_no_kind"])


def _kernel(title: str, whole_s: float, name: str, seconds: float, calls: float) -> dict[str, str]:
    shown = name.replace("|", "\\|")[:100]
    return {
        **{title: f"`{shown}`", "ms a step": f"{1e3 * seconds:.4g}"},
        **{"calls a step": f"{calls:g}", "of all kernels": f"{seconds / whole_s:.1%}"},
    }


def _beside(found: dict[str, Any], planned: dict[str, Any]) -> Iterator[str]:
    """Yields lines that compare the times of kernels in a step with the planner's expectation."""
    measured, expected = found["by_kind_s"], planned["by_kind_s"]
    rows = {name: (expected[name], measured.get(name, 0.0)) for name in _NAMED}
    rows["all other kernels: memory traffic of layers and optimizer"] = (
        expected["memory traffic"] + expected["optimizer"],
        found["kernels_s"] - sum(measured.get(name, 0.0) for name in _NAMED),
    )
    rows["between kernels"] = (expected["launches"], found["step_s"] - found["kernels_s"])
    name, (asked, took) = max(rows.items(), key=lambda row: abs(row[1][1] - row[1][0]))
    rows["step"] = (planned["step_s"], found["step_s"])
    yield from _table(
        {"ms a step": kind, "expected": f"{1e3 * one:.1f}", "measured": f"{1e3 * two:.1f}"}
        for kind, (one, two) in rows.items()
    )
    more = "more" if took > asked else "less"
    yield f"Furthest off: {name}, {1e3 * abs(took - asked):.1f} ms {more} than expected."
    yield ""


def _padded(found: dict[str, Any]) -> Iterator[str]:
    yield from ("Real tokens a second, and ours over theirs.", "")
    yield from _table(
        {"samples": samples}
        | {n: f"{t:,.0f} ({one['ratio'][n]:.2f}x)" for n, t in one["tokens_per_s"].items()}
        for samples, one in found.items()
    )


def _tests(found: dict[str, Any]) -> Iterator[str]:
    counts = Counter(said.split(":")[0] for said in found.values())
    yield f"{', '.join(f'{counts[how]} {how}' for how in ('passed', 'skipped', 'failed'))}."
    yield from (f"- `{n}`: {_line(said)}" for n, said in found.items() if said[:6] == "failed")
    yield ""


def _line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]


_SECTIONS = {
    "steps:table": ("Bounds: {}", _bounds),
    "steps:profile": ("Kernels of a step: {}", _kernels),
    "steps:padded_loop": ("Against a padded loop", _padded),
    "checks:run_tests": ("Tests: {}", _tests),
}
"""The heading of each row, and the function that writes its lines, by kind of row."""

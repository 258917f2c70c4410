"""Results of a run -> a page in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpu_run.parts import PARTS
from gpu_run.schedule import State

_TITLES = {
    "xl": "DiT-XL",
    "wan14b": "Wan 14B, 4 layers",
    "flux": "FLUX, 2 + 4 layers",
    "7b": "7B shape",
    "xl-padded": "DiT-XL, padded samples",
}
_ABOUT = {"date": "{}", "commit": "commit {}", "python": "Python {}", "cuda": "CUDA {}"}
_ABOUT |= {"memory_gb": "{:.0f} GB", "cores": "{} cores"}


def page(content: dict[str, Any]) -> str:
    """The page of the JSON file's content."""
    about, parts = content["about"], content["parts"]
    lines = [f"# {about.get('device', 'Unknown device')}", "", _intro(about), ""]
    for section in (_bounds, _steps, _kernels, _padded, _tests, _others):
        if found := list(section(parts)):
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


def _done(parts: dict[str, Any], kind: str) -> Iterator[tuple[str, str, Any]]:
    """(name, shape, found) of the finished parts of a kind."""
    for part in PARTS:
        outcome = parts.get(part.name)
        if part.kind == kind and outcome and outcome["state"] == State.DONE:
            yield part.name, part.shape, outcome["found"]


def _bounds(parts: dict[str, Any]) -> Iterator[str]:
    for name, _, found in _done(parts, "bounds"):
        yield f"## Bounds: {name}"
        shown = ((row, one if isinstance(one, str) else f"{one:.4g}") for row, one in found.items())
        yield from _table(("", "measured"), shown)
        yield ""


def _steps(parts: dict[str, Any]) -> Iterator[str]:
    rows = [_row(*one) for one in _done(parts, "steps")]
    if rows:
        columns = (
            *("shape", "configuration", "step, s", "tokens/s", "TFLOP/s"),
            *("MFU, data sheet", "expected", "MFU, measured", "forward", "backward", "optimizer"),
            *("data", "rest", "peak memory, GB", "planned"),
        )
        yield "## Steps"
        yield from _table(columns, rows)
        found = [(name, one.get("smaller_pack")) for name, _, one in _done(parts, "steps")]
        if smaller := [f"- `{name}`: {why}" for name, why in found if why]:
            yield from ("", "Of the memory of this device:", "", *smaller)


def _row(name: str, shape: str, found: dict[str, Any]) -> Sequence[str]:
    shares = found["shares"]
    mfu = {kind.split(",")[0]: f"{value:.1%}" for kind, value in found["mfu"].items()}
    rest = shares["other_s"] + shares["communication_s"]
    planned = found.get("expected")
    expected = f"{planned['mfu']:.1%}" if planned else "-"
    memory = f"{planned['memory_gb']:.3g}" if planned else "-"
    return (
        *(_TITLES[shape], name.removeprefix(f"{shape}-"), f"{found['step_time_s']['median']:.4g}"),
        f"{found['tokens_per_s']['median']:,.0f}",
        f"{found['model_tflops']['median']:.4g}",
        *(mfu.get("data sheet", "-"), expected, mfu["measured"]),
        *(f"{shares[f'{one}_s']:.1%}" for one in ("forward", "backward", "optimizer", "data")),
        *(f"{rest:.1%}", f"{found['peak_memory_gb']:.3g}", memory),
    )


def _kernels(parts: dict[str, Any]) -> Iterator[str]:
    for _, shape, found in _done(parts, "profile"):
        step, kernels = found["step_s"], found["kernels_s"]
        yield from (f"## Kernels of a step: {_TITLES[shape]}", "")
        yield f"{kernels:.4g} s of kernels in a step of {step:.4g} s, while it was profiled."
        if found.get("smaller_pack"):
            yield from ("", f"{found['smaller_pack']}.")
        by_kind = sorted(found["by_kind_s"].items(), key=lambda one: -one[1])
        rows = ((kind, f"{time:.4g}", f"{time / kernels:.1%}") for kind, time in by_kind)
        yield from _table(("kind", "s", "of all kernels"), rows)
        if found.get("expected"):
            yield from ("", f"Beside what the planner expects of {found['expected']['assumed']}:")
            yield from _beside_expected(found)
        yield from _named("longest", found["longest"], kernels)
        if found.get("of_no_kind"):
            yield from _named("longest of everything else", found["of_no_kind"], kernels)
        yield ""


def _named(title: str, kernels: list[dict[str, Any]], whole_s: float) -> Iterator[str]:
    rows = []
    for one in kernels:
        name, seconds = one["name"].replace("|", "\\|")[:100], one["seconds"]
        share = f"{seconds / whole_s:.1%}"
        rows.append((f"`{name}`", f"{1e3 * seconds:.4g}", f"{one['calls']:g}", share))
    return _table((title, "ms a step", "calls a step", "of all kernels"), rows)


def _beside_expected(found: dict[str, Any]) -> Iterator[str]:
    """Kernels of no other row move what layers and optimizer move."""
    measured, expected = found["by_kind_s"], found["expected"]["by_kind_s"]
    named = ("matrix products", "attention", "communication")
    rows = {name: (expected[name], measured.get(name, 0.0)) for name in named}
    rows["all other kernels: memory traffic of layers and optimizer"] = (
        expected["memory traffic"] + expected["optimizer"],
        found["kernels_s"] - sum(measured.get(name, 0.0) for name in named),
    )
    rows["between kernels"] = (expected["launches"], found["step_s"] - found["kernels_s"])
    rows["step"] = (found["expected"]["step_s"], found["step_s"])
    shown = ((name, *(f"{1e3 * seconds:.1f}" for seconds in pair)) for name, pair in rows.items())
    yield from _table(("ms a step", "expected", "measured"), shown)
    rows.pop("step")
    name, (planned, took) = max(rows.items(), key=lambda row: abs(row[1][1] - row[1][0]))
    more = "more" if took > planned else "less"
    yield ""
    yield f"Furthest off: {name}, {1e3 * abs(took - planned):.1f} ms {more} than expected."


def _padded(parts: dict[str, Any]) -> Iterator[str]:
    for _, _, found in _done(parts, "padded"):
        yield from ("## Against a padded loop", "", "Real tokens a second, and ours over theirs.")
        names, rows = list(found[0]["tokens_per_s"]), []
        for one in found:
            rates, ratios = one["tokens_per_s"], one["ratio"]
            cells = (f"{rates[name]:,.0f} ({ratios[name]:.2f}x)" for name in names)
            rows.append((one["samples"], *cells))
        yield from _table(("samples", *names), rows)


def _tests(parts: dict[str, Any]) -> Iterator[str]:
    found = parts.get("tests", {}).get("found")
    if found:
        counts = ", ".join(f"{found[name]} {name}" for name in ("passed", "skipped", "failed"))
        yield from ("## tests/gpu", "", f"{counts}.")
        for name, why in found["failures"].items():
            yield f"- `{name}`: {_line(why)}"


def _others(parts: dict[str, Any]) -> Iterator[str]:
    rows = [
        f"- `{name}`: {one['state']}: {_line(one.get('why', ''))}"
        for name, one in parts.items()
        if one["state"] != State.DONE
    ]
    if rows:
        yield from ("## Not measured", "", *rows)


def _line(text: str) -> str:
    """The first line, not too long."""
    return (text.strip().splitlines() or [""])[0][:300]

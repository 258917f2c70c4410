"""Results of a run -> a page in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
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
_BOUNDS = {
    "ceilings": "Ceilings",
    "attention": "Attention by kernel",
    "fused": "Fused kernels, memory traffic",
}


def page(content: dict[str, Any]) -> str:
    """The page of the JSON file's content."""
    about, parts = content["about"], content["parts"]
    lines = [f"# {about.get('device', 'Unknown device')}", "", _intro(about), ""]
    for section in (_bounds, _steps, _kernels, _padded, _tests, _others):
        if found := list(section(parts)):
            lines += [*found, ""]
    return "\n".join(lines).rstrip() + "\n"


def _intro(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in about.get("versions", {}).items() if v)
    parts = [about.get("date"), f"Python {about.get('python')}", versions]
    parts += [f"CUDA {about['cuda']}"] if about.get("cuda") else []
    parts += [f"{about['memory_gb']:.0f} GB"] if about.get("memory_gb") else []
    parts += [f"{about['cores']} cores"] if about.get("cores") else []
    parts += [f"commit {about['commit']}"] if about.get("commit") else []
    text = "; ".join(part for part in parts if part) + "."
    command = (
        "\n\n```bash\nmake gpu\n```\n\nwrote this page; the JSON file beside it has all numbers."
    )
    if about.get("size") != "full":
        command += " **Tiny sizes: a trial of the way, no measurement.**"
    if about.get("keys"):
        command += f" Keys that were set: `{' '.join(about['keys'])}`."
    return text + command


def _done(parts: dict[str, Any], kind: str) -> Iterator[tuple[str, str, Any]]:
    """(name, shape, found) of the finished parts of a kind."""
    for part in PARTS:
        outcome = parts.get(part.name)
        if part.kind == kind and outcome and outcome["state"] == State.DONE:
            yield part.name, part.shape, outcome["found"]


def _bounds(parts: dict[str, Any]) -> Iterator[str]:
    for name, _, found in _done(parts, "bounds"):
        yield from (f"## {_BOUNDS[name]}", "", "| | measured |", "|---|---|")
        for row, value in found.items():
            yield f"| {row} | {value if isinstance(value, str) else format(value, '.4g')} |"
        yield ""


def _steps(parts: dict[str, Any]) -> Iterator[str]:
    rows = [_row(*one) for one in _done(parts, "steps")]
    if rows:
        columns = (
            *("shape", "configuration", "step, s", "tokens/s", "TFLOP/s"),
            *("MFU, data sheet", "expected", "MFU, measured", "forward", "backward", "optimizer"),
            *("data", "rest", "peak memory, GB", "planned"),
        )
        yield from ("## Steps", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")
        yield from rows
        yield from _smaller(parts, "steps")


def _smaller(parts: dict[str, Any], kind: str) -> Iterator[str]:
    """Which parts had smaller packs than planned, and why."""
    found = [(name, one.get("smaller_pack", "")) for name, _, one in _done(parts, kind)]
    if named := [f"- `{name}`: {why}" for name, why in found if why]:
        yield from ("", "Of the memory of this device:", "", *named)


def _row(name: str, shape: str, found: dict[str, Any]) -> str:
    shares, mfu = found["shares"], found["mfu"]
    sheet = next((value for kind, value in mfu.items() if kind.startswith("data sheet")), None)
    measured = next(value for kind, value in mfu.items() if kind.startswith("measured"))
    rest = shares["other_s"] + shares["communication_s"]
    planned = found.get("expected")
    expected = f"{planned['mfu']:.1%}" if planned else "-"
    memory = f"{planned['memory_gb']:.3g}" if planned else "-"
    cells = [
        *(_TITLES[shape], name.removeprefix(f"{shape}-"), f"{found['step_time_s']['median']:.4g}"),
        f"{found['tokens_per_s']['median']:,.0f}",
        f"{found['model_tflops']['median']:.4g}",
        *("-" if sheet is None else f"{sheet:.1%}", expected, f"{measured:.1%}"),
        *(f"{shares[f'{one}_s']:.1%}" for one in ("forward", "backward", "optimizer", "data")),
        *(f"{rest:.1%}", f"{found['peak_memory_gb']:.3g}", memory),
    ]
    return f"| {' | '.join(cells)} |"


def _kernels(parts: dict[str, Any]) -> Iterator[str]:
    for _, shape, found in _done(parts, "profile"):
        step, kernels = found["step_s"], found["kernels_s"]
        yield from (f"## Kernels of a step: {_TITLES[shape]}", "")
        yield f"{kernels:.4g} s of kernels in a step of {step:.4g} s, while it was profiled."
        if found.get("smaller_pack"):
            yield from ("", f"{found['smaller_pack']}.")
        yield from ("", "| kind | s | of all kernels |", "|---|---|---|")
        for kind, seconds in sorted(found["by_kind_s"].items(), key=lambda one: -one[1]):
            yield f"| {kind} | {seconds:.4g} | {seconds / kernels:.1%} |"
        if found.get("expected"):
            assumed = found["expected"]["assumed"]
            yield from ("", f"Beside what the planner expects of {assumed}:", "")
            yield from _beside_expected(found)
        yield from _named("longest", found["longest"], kernels)
        if found.get("of_no_kind"):
            yield from _named("longest of everything else", found["of_no_kind"], kernels)
        yield ""


def _named(title: str, rows: list[dict[str, Any]], kernels_s: float) -> Iterator[str]:
    yield from ("", f"| {title} | ms a step | calls a step | of all kernels |", "|---|---|---|---|")
    for row in rows:
        name, seconds = row["name"].replace("|", "\\|")[:100], row["seconds"]
        yield f"| `{name}` | {1e3 * seconds:.4g} | {row['calls']:g} | {seconds / kernels_s:.1%} |"


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
    yield from ("| ms a step | expected | measured |", "|---|---|---|")
    for name, pair in rows.items():
        yield f"| {name} | {' | '.join(f'{1e3 * seconds:.1f}' for seconds in pair)} |"
    rows.pop("step")
    name, (planned, took) = max(rows.items(), key=lambda row: abs(row[1][1] - row[1][0]))
    more = "more" if took > planned else "less"
    yield from (
        "",
        f"Furthest off: {name}, {1e3 * abs(took - planned):.1f} ms {more} than expected.",
    )


def _padded(parts: dict[str, Any]) -> Iterator[str]:
    for _, _, found in _done(parts, "padded"):
        yield from ("## Against a padded loop", "", "Real tokens a second, and ours over theirs.")
        names = list(found[0]["tokens_per_s"])
        yield from ("", f"| samples | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|")
        for one in found:
            rates, ratios = one["tokens_per_s"], one["ratio"]
            cells = [f"{rates[name]:,.0f} ({ratios[name]:.2f}x)" for name in names]
            yield f"| {one['samples']} | {' | '.join(cells)} |"


def _tests(parts: dict[str, Any]) -> Iterator[str]:
    found = parts.get("tests", {}).get("found")
    if found:
        yield from ("## tests/gpu", "")
        counts = ", ".join(f"{found[name]} {name}" for name in ("passed", "skipped", "failed"))
        yield f"{counts}."
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

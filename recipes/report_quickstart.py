"""One page about a run: its loss curve, its pictures beside their prompts, and its figures.

The page is a single file: pictures are inlined, nothing is fetched, no script runs. It reads well
on a phone, by day and by night.

1. read     metrics.jsonl of the run, samples.json of the pictures
2. draw     loss.png beside the page
3. write    the page
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

from rich.console import Console

from dit.configuring import read_config
from dit.configuring.estimate import parameter_count
from recipes.entry import run

# Reads on white and on black alike, so the curve needs no background of its own.
INK, LINE, VALIDATION = "#808890", "#3f8efc", "#e8743b"
VALIDATED = (
    ("val_loss", "validation", "o-"),
    ("val_loss_ema", "validation (averaged weights)", "o--"),
)
PACKAGES = ("megatron-dit", "torch", "megatron-core", "megatron-energon")
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { max-width: 56rem; margin: 0 auto; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
img { max-width: 100%; }
.prompt { margin: 1rem 0 .25rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(2.4rem, 1fr)); }
.pictures { gap: .25rem; max-width: 48rem; }
.pictures img { width: 100%; max-width: 12rem; image-rendering: pixelated; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8884; }
th, td { overflow-wrap: anywhere; vertical-align: top; }
th { font-weight: normal; width: 45%; }
</style>
</head>
<body>
<h1>$title</h1>
<h2>Pictures</h2>
$pictures
<h2>Loss</h2>
<img src="$curve" alt="Training loss by step">
<h2>Figures</h2>
<table>
$figures
</table>
<h2>Settings of the pictures</h2>
<table>
$settings
</table>
</body>
</html>
""")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The steps of a run that changed the weights, in order.

    Raises:
        ValueError: there is no metrics.jsonl, or it has no step.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; --run_dir wants the folder of a training run")
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    steps = [line for line in lines if line.get("loss") is not None]
    if not steps:
        raise ValueError(f"{path} is empty: the run has not finished a step")
    return steps


def draw_loss(steps: list[dict[str, Any]], file: Path) -> None:
    """Training loss, its running mean over 2% of the run, and the validation loss, as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    x, loss = [s["step"] for s in steps], [s["loss"] for s in steps]
    axes.plot(x, loss, color=LINE, alpha=0.25, linewidth=0.8)
    axes.plot(x, running_mean(loss, window=max(1, len(loss) // 50)), color=LINE, label="training")
    for key, label, style in VALIDATED:
        points = [(s["step"], s[key]) for s in steps if s.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, color=VALIDATION, label=label)
    if min(loss) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss", color=INK)
    axes.tick_params(which="both", colors=INK)
    axes.grid(which="both", color=INK, alpha=0.2)
    for spine in axes.spines.values():
        spine.set_color(INK)
    axes.legend(frameon=False, labelcolor=INK)
    figure.savefig(file, dpi=200, transparent=True)


def running_mean(values: Sequence[float], *, window: int) -> list[float]:
    """Mean of each value and those up to `window` - 1 before it."""
    return [
        statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)
    ]


def figures_of(steps: list[dict[str, Any]], run_dir: Path) -> dict[str, str]:
    """What the run's own log and configuration say about it."""
    last = steps[-1]
    tail = [s["loss"] for s in steps[-max(1, len(steps) // 50) :]]
    seconds = sum(s["step_time_s"] for s in steps)
    config = read_config(run_dir / "config.yaml")
    rows = {
        "model": f"{config.model.name}, {parameter_count(config.model):,} parameters",
        "objective": f"{config.objective.name}, {config.model.precision}",
        "steps": f"{last['step']:,}",
        "training time": f"{seconds / 60:.1f} minutes" if seconds >= 120 else f"{seconds:.1f} s",
        "first loss": f"{steps[0]['loss']:.4f}",
        f"final loss (mean of {len(tail)} steps)": f"{statistics.fmean(tail):.4f}",
    }
    for key, label, _ in VALIDATED:
        values = [s[key] for s in steps if s.get(key) is not None]
        if values:
            rows[f"final {label} loss"] = f"{values[-1]:.4f}"
    rows |= {
        "samples seen": f"{last['consumed_samples']:,}",
        "tokens per second (median)": f"{median(steps, 'tokens_per_s'):,.0f}",
        "fill of packs (mean)": f"{statistics.fmean(s['pack_fill'] for s in steps):.1%}",
        "model TFLOP/s (median)": f"{median(steps, 'model_tflops'):.3g}",
        "samples refused": f"{last['refused']:,}",
        "run folder": str(run_dir),
    }
    return rows | versions()


def median(steps: list[dict[str, Any]], key: str) -> float:
    return statistics.median(s[key] for s in steps)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers."""
    rows = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            rows[package] = version(package)
        except PackageNotFoundError:
            rows[package] = "not installed"
    return rows


def picture_rows(samples: list[dict[str, Any]], folder: Path) -> str:
    """Pictures beside their prompts: a line for each prompt, in the order they were asked."""
    lines = []
    for prompt, group in groupby(samples, key=lambda sample: sample["prompt"]):
        images = "".join(
            f'<img src="{data_uri(folder / sample["file"])}"'
            f' alt="{html.escape(prompt)}" title="seed {sample["seed"]}">'
            for sample in group
        )
        lines.append(f'<p class="prompt">{html.escape(prompt)}</p>')
        lines.append(f'<div class="pictures">{images}</div>')
    return "\n".join(lines)


def data_uri(file: Path) -> str:
    """A PNG as a URI that carries its bytes."""
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()


def table_rows(rows: dict[str, Any]) -> str:
    return "\n".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )


def shared_settings(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What all pictures were made with alike: sampler, steps, guidance, checkpoint and so on."""
    own = {"file", "prompt", "seed"}
    return {
        name: value
        for name, value in samples[0].items()
        if name not in own and all(sample.get(name) == value for sample in samples)
    }


def write_page(*, run_dir: Path, samples_dir: Path, output: Path) -> Path:
    """Writes the page and, beside it, loss.png; returns the latter.

    Raises:
        ValueError: the run has no metrics, or the folder of pictures no samples.json.
    """
    steps = read_metrics(run_dir)
    listing = samples_dir / "samples.json"
    if not listing.is_file():
        raise ValueError(f"{listing} does not exist; --samples_dir wants generate_dit's output_dir")
    samples = json.loads(listing.read_text())
    output.parent.mkdir(parents=True, exist_ok=True)
    curve = output.with_name("loss.png")
    draw_loss(steps, curve)
    page = PAGE.substitute(
        title="Quickstart: a diffusion transformer on handwritten digits",
        pictures=picture_rows(samples, samples_dir),
        curve=data_uri(curve),
        figures=table_rows(figures_of(steps, run_dir)),
        settings=table_rows(shared_settings(samples)),
    )
    output.write_text(page)
    return curve


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write one HTML page about a training run.")
    parser.add_argument("--run_dir", type=Path, required=True, help="folder with metrics.jsonl")
    parser.add_argument("--samples_dir", type=Path, required=True, help="folder with samples.json")
    parser.add_argument("--output", type=Path, required=True, help="the page, FILE.html")
    args, console = parser.parse_args(argv), Console(soft_wrap=True, highlight=False)
    curve = write_page(run_dir=args.run_dir, samples_dir=args.samples_dir, output=args.output)
    console.print(f"loss curve     {curve.resolve()}")
    console.print(f"picture grid   {(args.samples_dir / 'grid.png').resolve()}")
    console.print(f"all on a page  {args.output.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))

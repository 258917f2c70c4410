"""Prints summaries and tables about packed samples, a plan or a dataset for the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from data_prep.inspect.read_shards import ShardReport
from data_prep.packing import Summary
from data_prep.planning.statistics import CAPACITIES, PlanStatistics, crop_line
from data_prep.writing.dataset_folder import PAGE_NAME, PLAN_NAME, REFUSED_NAME
from dit.codecs.text import TEXT_ENCODERS
from dit.codecs.vae import CODECS
from dit.console import Console
from dit.progress import counted

_WORDS = 20  # most frequent words of the captions that are printed


def show_summary(
    console: Console,
    summary: Summary,
    folder: Path,
) -> None:
    """Prints how many samples were packed and refused, with reasons.

    It also prints the size of the shards, notes on samples, ignored files, the loss by cropping,
    and the PSNR of verified samples.
    """
    table = Table("split", "samples", "shards", box=None)
    for split, counts in summary.shards.items():
        table.add_row(split, str(sum(counts.values())), str(len(counts)))
    console.print(table)
    console.print(f"{summary.bytes_written} bytes in the shards of {folder}")
    for what, count in summary.notes.items():
        console.print(f"packed: {count} x {what}")
    for line in summary.refusals.lines:
        console.print(f"refused: {line}")
    for what, count in summary.ignored.items():
        console.print(f"ignored: {count} x {what}")
    if line := crop_line(summary.cropped):
        console.print(f"packed: {line}")
    if summary.psnr:
        least, mean, count = (summary.psnr[name] for name in ("least", "mean", "samples"))
        samples = counted(int(count), "sample")
        console.print(f"verified: PSNR {mean} dB on average, {least} dB at least, {samples}")
    if summary.refused:
        console.print(f"each refused file is named in {folder / REFUSED_NAME}")


def show_next(console: Console, command: str, *, before: str | None = None) -> None:
    """Prints `command` as the next one to run; `before`, if given, must be run first."""
    if before:
        console.print(f"first: {before}")
    console.print(f"next: {command}")


def show_plan(
    console: Console, facts: PlanStatistics, folder: Path, ignored: Mapping[str, int]
) -> None:
    """Prints how many samples the plan `facts` would pack and refuse.

    `folder` is where the page of the plan is, and `ignored` counts files that are not media.
    """
    samples, tokens = counted(facts.samples, "sample"), counted(facts.tokens, "token")
    console.print(f"planned: {samples}, {tokens}, {facts.token}")
    console.print(f"files were judged by {facts.judged_by}")
    console.print(f"expected: about {facts.bytes / 1e6:.1f} MB of shards")
    for what, count in facts.notes.most_common():
        console.print(f"planned: {count} x {what}")
    if facts.cut:
        limit = f"{facts.longest_text} tokens (--max_sequence_length)"
        console.print(f"planned: {facts.cut} x caption cut to {limit}")
    for line in facts.refusals.lines:
        console.print(f"refused: {line}")
    for what, count in ignored.items():
        console.print(f"ignored: {count} x {what}")
    for line in facts.duplicates.lines:
        console.print(f"planned: {line}")
    for capacity in CAPACITIES:
        console.print(
            f"packs of {capacity} tokens: {facts.fill(capacity):.1%} full,"
            f" {counted(facts.too_long(capacity), 'sample')} too long",
        )
    console.print(f"each file: {folder / PLAN_NAME}, with pictures: {folder / PAGE_NAME}")


def show_codecs(console: Console) -> None:
    table = Table("processor", "media", "weights", "latents are", box=None)
    for name, codec in CODECS.items():
        table.add_row(name, ", ".join(codec.media), codec.default_model, codec.description)
    console.print(table)
    console.print(f"text encoders: {', '.join(TEXT_ENCODERS)}")


def show_inspection(console: Console, folder: Path, reports: Sequence[ShardReport]) -> None:
    """Prints a row for each shard of `reports`, then totals.

    A range in a row goes from the least to the largest value in the shard.
    """
    table = Table(box=None)
    table.add_column("shard", no_wrap=True)
    for column in ("samples", "bytes", "latent C,F,H,W", "text L", "mean", "std", "check"):
        table.add_column(column, overflow="fold", justify="right")
    for report in reports:
        sides = [_range(side) for side in zip(*report.shapes, strict=True)]
        table.add_row(
            report.name,
            str(report.samples),
            str(report.bytes),
            ",".join(sides) or "-",
            _range(report.text_lengths),
            *_statistics(report),
            "BAD" if report.problems else "good",
        )
    console.print(table)
    total = sum(report.samples for report in reports)
    console.print(f"{counted(total, 'sample')} in {counted(len(reports), 'shard')} of {folder}")
    if sounds := [seconds for report in reports for seconds in report.sounds]:
        console.print(f"{counted(len(sounds), 'sample')} with sound, {sum(sounds):,.1f} s in all")
    if pairs := sum(report.pairs for report in reports):
        console.print(
            f"{counted(pairs, 'sample')} with a rejected partner, for objective.preference"
        )


def show_words(console: Console, words: Mapping[str, Any]) -> None:
    """Prints the number of distinct words in the captions, and the most frequent ones.

    `words` is the entry of the dataset card; nothing is printed if it is empty.
    """
    if not words:
        return
    most = [f"{word} {count:,}" for word, count in words["counts"].items()][:_WORDS]
    console.print(f"training captions have {counted(words['distinct'], 'word')}: {', '.join(most)}")


def _range(values: Sequence[int]) -> str:
    if not values:
        return "-"
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _statistics(report: ShardReport) -> tuple[str, str]:
    """Mean and standard deviation of the latents of a shard, over all channels, as texts.

    For whitened latents they are about 0 and 1; "-" if the shard has no latents.
    """
    if not report.moments.count:
        return "-", "-"
    whitening = report.moments.whitening()
    mean = sum(whitening.mean) / len(whitening.mean)
    std = (sum(std**2 for std in whitening.std) / len(whitening.std)) ** 0.5
    return f"{mean:.3f}", f"{std:.3f}"

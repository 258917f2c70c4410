"""The command that reads shards, measures this machine for some seconds, and writes train.yaml."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dit.command_line import OptionParser, recipe_command
from dit.config import RunConfig
from dit.config_loading import default_config, load_config
from dit.console import Console
from dit.fitting.corpus import Corpus, read_corpus
from dit.fitting.proposal import Draft, Proposal, by_samples, choose, drafts
from dit.fitting.rules import MINUTES
from dit.fitting.step_time import measured_seconds, planned_seconds
from dit.fitting.train_yaml import NAME, file_text, put_aside, settings, tokens
from dit.progress import brief
from dit.safe_writing import write_atomically
from dit.sizing.memory import parameter_count

MeasuredSeconds = Callable[[RunConfig], float]


def fit(
    folder: Path,
    *,
    minutes: float | None,
    gpu: str | None = None,
    seconds: MeasuredSeconds | None = None,
) -> tuple[Corpus, Proposal]:
    """Chooses the run for the shards in `folder` and a training of `minutes`.

    Returns the facts about the shards and the proposed run. `gpu` is the name of the device that
    trains, whose seconds per step are planned; without one, or if it is unknown, `seconds` measures
    steps on this machine. Without `minutes` a CPU trains for 30 minutes, and a GPU for the
    recommended number of passes.

    Raises:
        DataError: the folder is not a dataset with captions.
    """
    corpus = read_corpus(folder.absolute())
    ladder = drafts(corpus, gpu=gpu is not None)

    def of(draft: Draft) -> float:
        config = configuration(corpus, draft)
        planned = planned_seconds(config, gpu) if gpu else None
        return (seconds or measured_seconds)(config) if planned is None else planned

    if gpu and minutes is None:
        return corpus, by_samples(corpus, ladder, seconds=of)
    return corpus, choose(
        corpus,
        ladder,
        minutes=MINUTES if minutes is None else minutes,
        seconds=of,
    )


def configuration(corpus: Corpus, draft: Draft, *, steps: int = 1000) -> RunConfig:
    """The configuration of the run `draft`, as `pretrain_dit.py` would read it.

    Raises:
        ConfigError: no valid configuration results.
    """
    return load_config(default_config(), overrides=tokens(settings(corpus, draft, steps=steps)))


def say(console: Console, corpus: Corpus, found: Proposal, *, machine: str) -> None:
    """Prints what was chosen, and why."""
    draft, size = found.draft, found.draft.size
    count = parameter_count(configuration(corpus, draft).model)
    name = "" if size.name == "custom" else f"{size.name}, "
    console.print(
        f"fitted: {name}{size.layers} layers of width {size.width}, {brief(count / 1e6)} M"
        f" parameters: {found.why}"
    )
    console.print(
        f"fitted: {draft.capacity:,} tokens in a step, about {brief(draft.samples)} samples of"
        f" {brief(draft.tokens)} tokens; {found.seconds:.2g} s a step on {machine}"
    )
    console.print(
        f"fitted: {found.steps:,} steps in about {brief(found.minutes)} minutes see each of"
        f" {corpus.samples:,} samples {brief(found.passes)} times"
    )
    busy, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if busy > 1.5 * cores:
        console.print(
            f"note: other programs keep this machine busy ({busy:.0f} processes want its {cores}"
            " cores); fit the run again when they have ended"
        )
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the fitted train.yaml beside the shards that `argv` names; returns exit code 0."""
    args = _parser().parse_args(argv)
    if args.minutes is not None and not 0 < args.minutes <= 1e6:
        raise ValueError(
            f"--minutes {args.minutes:g} must be more than 0 and at most 1,000,000; 40 are usual"
            " on a CPU"
        )
    gpu = _gpu()
    machine = gpu or _cpu()
    corpus, found = fit(args.folder, minutes=args.minutes, gpu=gpu)
    console, place = Console(), args.folder / NAME
    say(console, corpus, found, machine=machine)
    text = file_text(corpus, found, machine=machine)
    aside = put_aside(place)
    write_atomically(place, text.encode())
    console.print(f"written: {place}" + (f"; your old file is now {aside.name}" if aside else ""))
    console.print(f"next: {recipe_command('pretrain_dit', '--config-file', str(place))}")
    return 0


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _cpu() -> str:
    import torch

    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    return f"{threads} CPU thread{'s' * (threads != 1)} of {cores}"


def _parser() -> OptionParser:
    parser = OptionParser(
        description="Chooses network, noise levels and steps for shards, for the time and the"
        " machine at hand, and writes train.yaml beside the shards. It trains some steps to measure"
        " the machine."
    )
    parser.add_argument("folder", type=Path, metavar="DATA", help="folder that data_prep wrote")
    parser.add_argument(
        "--minutes",
        type=float,
        help="minutes that training may take; 140 passes over the data are enough for small"
        " pictures. (default: 30 without a GPU; on a GPU, as long as 140 passes take)",
    )
    return parser

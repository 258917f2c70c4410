"""What each command does once its options are read."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from data_prep import processors, text
from data_prep.captions import MissingCaption
from data_prep.digits import Digits
from data_prep.images import ImageFolder
from data_prep.inspection import check_encoders, inspect_shard, shard_counts
from data_prep.packing import PackOptions, pack
from data_prep.pictures import Fit
from data_prep.processors import Pixel
from data_prep.refusals import PrepError
from data_prep.report import (
    output,
    progress_on,
    say,
    show_inspection,
    show_summary,
    training_command,
)
from data_prep.splits import SplitFractions

_PATCH = 2  # latent cells along one side of a token in the models of conf/


def _options(args: argparse.Namespace, *, max_bad_fraction: float) -> PackOptions:
    return PackOptions(
        split=SplitFractions.parse(args.split),
        shard_size=args.shard_size,
        max_shard_bytes=args.max_shard_bytes,
        max_bad_fraction=max_bad_fraction,
        overwrite=args.overwrite,
    )


def _settings(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options that decided the samples; no paths, which would differ between machines."""
    names = ("split", "shard_size", "max_shard_bytes", *names)
    return {name: getattr(args, name) for name in names}


def run_digits(args: argparse.Namespace) -> int:
    encoder = text.named(args.text_encoder).from_arguments(args)
    summary = pack(
        Digits(num_samples=args.num_samples),
        args.output_dir,
        processor=Pixel.of(block=2, colours=1),
        text=encoder,
        options=_options(args, max_bad_fraction=0),
        settings=_settings(args, "num_samples"),
        track=progress_on(Console(stderr=True)),
    )
    width = {} if encoder.width == 64 else {"model.crossattn_emb_size": encoder.width}
    command = training_command(args.output_dir, "conf/dit_digits.yaml", width)
    show_summary(output(), summary, args.output_dir, command)
    return 0


def run_image(args: argparse.Namespace) -> int:
    processor = processors.named(args.processor).from_arguments(args)
    encoder = text.named(args.text_encoder).from_arguments(args)
    options = _options(args, max_bad_fraction=args.max_bad_fraction)
    if args.size_multiple is None:
        args.size_multiple = _PATCH * processor.stride
    if args.size_multiple % processor.stride:
        raise PrepError(
            f"--size_multiple {args.size_multiple} must be a multiple of the {processor.stride}"
            f" pixels of one latent cell of processor {processor.name!r}"
        )
    source = ImageFolder(
        args.image_dir,
        fit=Fit(size_multiple=args.size_multiple, max_pixels=args.max_pixels),
        colours=processor.pixel_channels,
        caption_field=args.caption_field,
        missing=MissingCaption(args.missing_caption),
    )
    names = ("size_multiple", "max_pixels", "caption_field", "missing_caption", "max_bad_fraction")
    summary = pack(
        source,
        args.output_dir,
        processor=processor,
        text=encoder,
        options=options,
        settings=_settings(args, *names),
        track=progress_on(Console(stderr=True)),
    )
    sizes = {"model.in_channels": processor.channels, "model.crossattn_emb_size": encoder.width}
    command = training_command(args.output_dir, "conf/dit_xl_image.yaml", sizes)
    show_summary(output(), summary, args.output_dir, command)
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    counts = shard_counts(args.folder)
    reports = [inspect_shard(args.folder, name, expected=n) for name, n in counts.items()]
    show_inspection(output(), args.folder, reports)
    problems = check_encoders(args.folder)
    problems += [problem for report in reports for problem in report.problems]
    for problem in problems:
        say(Console(stderr=True), f"error: {problem}")
    return 1 if problems else 0

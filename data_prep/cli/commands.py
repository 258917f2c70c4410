"""Functions that run the commands of data preparation, each from its parsed options."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep.cli.inspection import inspect_folder, run_inspect
from data_prep.cli.media_arguments import LATER_SETTINGS, SETTINGS
from data_prep.cli.media_options import (
    gentler_sizings,
    sound_codec_of,
    source_of,
    unused_options,
)
from data_prep.cli.next_command import edit_keys, fit_run, from_scratch, training_command, tuning_of
from data_prep.cli.terminal import show_next, show_plan, show_summary
from data_prep.engine.block_worker import Task
from data_prep.engine.processes import Engine, InProcess, Processes, RayWorkers
from data_prep.engine.ranks import Ranks, join
from data_prep.formats.automodel import INDEX, relocate
from data_prep.formats.convert import convert
from data_prep.formats.export import export
from data_prep.packing import Packing, PackOptions, Summary, pack_dataset
from data_prep.planning.plan_page import write_plan_page
from data_prep.planning.splits import DEFAULT_SPLIT, Split, SplitFractions
from data_prep.refusals import PrepError
from data_prep.sources.digits import SIDE, Digits, EditedDigits, MirroredClips, MovingDigits
from data_prep.sources.folders import FolderCollection
from data_prep.writing.dataset_folder import (
    PAGE_NAME,
    SUMMARY_NAME,
    check_folder,
    check_source_outside,
    locked_folder,
)
from dit.codecs import sound, text, vae
from dit.codecs.dataset_card import read_card
from dit.codecs.dataset_encoder import DatasetEncoder
from dit.codecs.normalization import Whitening
from dit.codecs.vae import Codec, Pixel
from dit.command_line import chosen
from dit.console import Console
from dit.progress import counted, progress_on
from dit.safe_writing import write_atomically

_FEW = 16  # with fewer blocks this process works alone, because starting workers takes longer
_BLOCK = {"video": 4}  # samples in a block; other commands have 32, because images are small


def _options(args: argparse.Namespace) -> PackOptions:
    return chosen(
        PackOptions,
        args,
        split=SplitFractions.parse(args.split or DEFAULT_SPLIT),
        split_is_given=args.split is not None,
        block_size=_BLOCK.get(args.command, 32),
    )


def _settings(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of the options `names`, --split, --shard_size and --max_shard_bytes, by name.

    The dataset keeps these values. `names` must contain no paths, which differ between machines.
    """
    given = {name: getattr(args, name) for name in ("shard_size", "max_shard_bytes", *names)}
    return {"split": args.split or DEFAULT_SPLIT, **given}


def _command(args: argparse.Namespace, *readers: DatasetEncoder) -> str:
    """The command in `args` as shell text, for the dataset card.

    Paths, options at their default, and options that do not change the samples are left out.
    `readers` are the codecs and text encoders, whose own options are included.
    """
    words, own = ["python", "-m", "data_prep", args.command], (sorted(r.options) for r in readers)
    names = dict.fromkeys(
        ("processor", "text_encoder", "split", *SETTINGS, *LATER_SETTINGS, *chain(*own))
    )
    for name in names:
        value = getattr(args, name, None)
        if value is None or isinstance(value, Path) or value == args.parser.get_default(name):
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            several = isinstance(value, list | tuple)
            words += [f"--{name}", ",".join(map(str, value)) if several else str(value)]
    return shlex.join(words)


def _validation_keys(summary: Summary) -> dict[str, Any]:
    """Overrides (key -> value) to validate on the train split; empty if there is a val split."""
    return {} if Split.VAL in summary.shards else {"dataset.use_train_split_for_val": "true"}


def _notify(text: str) -> None:
    Console().print(f"note: {text}")


def _whitening(args: argparse.Namespace, codec: Codec) -> Whitening | None:
    """The whitening that the dataset in `--whitening_from` uses.

    None if the option is not given (the whitening is then measured on the data if `codec` needs
    that) or if `codec` has fixed constants.

    Raises:
        PrepError: the codec of that dataset has other settings than `codec`.
        CodecError: the folder is not a dataset.
    """
    folder = args.whitening_from
    if folder is None or not codec.whitens_by_dataset:
        return None
    other = vae.codec_of_card(read_card(folder))
    forms = [_form(c) for c in (other, codec)]
    if forms[0] != forms[1]:
        raise PrepError(
            f"--whitening_from {folder} has latents of {forms[0]}, and this command makes those"
            f" of {forms[1]}; give a dataset that was packed with the same options of the processor"
        )
    return other.whitening


def _sound_scale(args: argparse.Namespace, codec: sound.SoundCodec | None) -> float | None:
    """The scale of the sound latents of the dataset in `--whitening_from`.

    None if the option is not given, if `codec` measures no scale, or if that dataset has no sound.
    """
    if args.whitening_from is None or codec is None or not codec.scales_by_dataset:
        return None
    other = sound.sound_codec_of_card(read_card(args.whitening_from))
    return None if other is None else other.scale


def _form(codec: Codec) -> str:
    """Describes the settings of `codec` that must be equal in datasets with the same whitening."""
    settings = {k: v for k, v in codec.settings.items() if k != "image_conditioning"}
    options = ", ".join(f"{name} {value}" for name, value in settings.items())
    return f"{codec.name!r} with {codec.channels} channels ({options})"


def run_digits(args: argparse.Namespace) -> int:
    if args.side != SIDE and (args.moving or args.edits):
        kind = "--moving" if args.moving else "--edits"
        raise PrepError(
            f"--side {args.side}: digits of {kind} always have {SIDE} pixels; leave --side or"
            f" {kind} out"
        )
    if args.pixel_block and (args.moving or args.edits or args.side % args.pixel_block):
        raise PrepError(
            f"--pixel_block {args.pixel_block} must divide --side {args.side}, and is not for"
            " --moving or --edits; give a divisor, or leave --pixel_block out"
        )
    encoder = text.text_encoder_named(args.text_encoder or Pixel.text_encoder).from_arguments(args)
    source, config = partial(Digits, side=args.side), "conf/dit_digits.yaml"
    if args.moving and args.edits:
        source, config = MirroredClips, "conf/ltx_digits_edit.yaml"
    elif args.moving:
        source, config = MovingDigits, "conf/wan_moving_digits.yaml"
    elif args.edits:
        source, config = EditedDigits, "conf/flux_digits_edit.yaml"
    elif args.invert:
        config = "conf/dit_digits_lora.yaml"
    elif args.pooled_text:
        config = "conf/mlperf_digits.yaml" if args.pixel_block else "conf/flux_digits.yaml"
    codec = Pixel.of(
        block=args.pixel_block or args.side // 4,
        colours=1,
        image_conditioning=args.moving and not args.edits,
    )
    # The settings of plain digits do not have these keys.
    kinds = {name: True for name in ("moving", "edits", "invert") if getattr(args, name)}
    large = {"side": args.side} if args.side != SIDE else {}
    large |= {"pixel_block": args.pixel_block} if args.pixel_block else {}
    asked = [*(f"--{kind}" for kind in kinds), *(f"--{key} {n}" for key, n in large.items())]
    with locked_folder(args.output_dir):
        summary = pack_dataset(
            source(num_samples=args.num_samples, inverted=args.invert),
            args.output_dir,
            codec=codec,
            whitening=_whitening(args, codec),
            text=encoder,
            options=replace(_options(args), max_bad_fraction=0),
            settings=_settings(args, "num_samples") | kinds | large,
            command=" ".join(["python -m data_prep digits", *asked]),
            notify=_notify,
            track=progress_on(Console(stderr=True)),
        )
    width = (
        {}
        if encoder.width == text.WordTable.usual_width
        else {"model.crossattn_emb_size": encoder.width}
    )
    cells = {"model.in_channels": codec.channels} if large else {}
    keys = cells | width | _validation_keys(summary)
    command = training_command(args.output_dir, config, keys)
    show_summary(Console(), summary, args.output_dir)
    show_next(Console(), command)
    return 0


def _check_model(args: argparse.Namespace, codec: Codec, encoder: text.TextEncoder) -> None:
    """Raises PrepError if --model_name is given, but neither codec nor text encoder has weights."""
    if args.model_name and "model_name" not in codec.options | encoder.options:
        raise PrepError(
            f"--model_name {args.model_name} means nothing to --processor {codec.name}, which has"
            " no weights; name the processor of that model, such as --processor wan"
            " (--list_processors shows all)"
        )


def run_media(args: argparse.Namespace) -> int:
    """Runs the commands `image` and `video`: packs media into a dataset and returns the exit code.

    Several processes that torchrun or srun launched may run it together; they share the work.
    """
    codec = vae.codec_named(args.processor).from_arguments(args)
    encoder = text.text_encoder_named(args.text_encoder or codec.text_encoder).from_arguments(args)
    _check_model(args, codec, encoder)
    options = _options(args)
    heard = sound_codec_of(args)
    asked, source = args.video_loader_type, source_of(args, codec, heard)
    source = replace(source, keeps_originals=encoder.most_pictures > 0)
    for given in source.inputs:
        if isinstance(given.collection, FolderCollection):
            root, option = given.collection.root, given.collection.option
            check_source_outside(args.output_dir, source=root, option=option)
            for folder in given.collection.beside:
                check_source_outside(args.output_dir, source=folder.root, option=folder.option)
    later = {
        name: getattr(args, name)
        for name in LATER_SETTINGS
        if getattr(args, name) != args.parser.get_default(name)
    }
    ranks = join()
    if ranks.rank == 0:
        readers = (codec, encoder, *filter(None, [heard]))
        for sentence in unused_options(args, args.parser, readers):
            Console().print(sentence)
    if ranks.rank == 0 and asked == "torchvision":
        Console().print(
            "--video_loader_type torchvision: torchvision no longer decodes videos, so PyAV is"
            " used; leave the option out"
        )
    with ExitStack() as ends:
        ends.callback(ranks.leave)
        if ranks.rank == 0:  # holds the lock for all ranks of this packing
            ends.enter_context(locked_folder(args.output_dir))
        packing = Packing(
            source=source,
            folder=args.output_dir,
            codec=codec,
            text=encoder,
            options=options,
            whitening=_whitening(args, codec),
            sound=heard,
            sound_scale=_sound_scale(args, heard),
            settings=_settings(args, *SETTINGS, "max_bad_fraction") | later,
            command=_command(args, codec, encoder, *filter(None, [heard])),
            gentler=gentler_sizings(args, codec, encoder),
            engine=_engine(args, ranks),
            ranks=ranks,
            notify=_notify,
            track=progress_on(Console(stderr=True)),
        )
        if args.plan:
            return _plan(args, packing)
        summary = packing.run()
        return _report(args, packing, summary) if ranks.rank == 0 else 0


def _report(args: argparse.Namespace, packing: Packing, summary: Summary) -> int:
    """Prints a summary of the packed dataset and the command that trains on it.

    Depending on `args`, it also fits a training configuration to the dataset (see `fit_run`),
    exports the dataset to the format of another tool, and verifies it. Returns the exit code.
    """
    download = None
    if tuning := tuning_of(packing.codec, packing.text):
        config, keys, download = tuning
        if args.control_dir or args.reference_size:
            keys |= edit_keys(packing.codec, len(args.control_dir or ()))
    else:
        config, keys = from_scratch(args.command, packing.codec, packing.text)
    keys |= _validation_keys(summary)
    command = training_command(args.output_dir, config, keys)
    show_summary(Console(), summary, args.output_dir)
    fitted = []
    # Fine-tuning published weights is better than training from scratch, so training from scratch
    # is fitted only if --minutes asks for it.
    if args.minutes != 0 and (tuning is None or args.minutes is not None):
        fitted = fit_run(args.output_dir, args.minutes, notify=_notify)
    for line in fitted:
        Console().print(line if tuning is None else line.replace("next:", "from scratch:"))
    if tuning or not fitted:
        show_next(Console(), command, before=download)
    if args.output_format != "shards":
        done = export(args.output_dir, form=args.output_format, shard_size=args.shard_size)
        Console().print(
            f"written as {args.output_format} as well: {counted(done.samples, 'sample')}"
        )
        if done.left_out:
            names = ", ".join(
                f"{name} of {counted(count, 'sample')}" for name, count in done.left_out.items()
            )
            kept = "only the shards have them"
            Console().print(f"{args.output_format} has no place for {names}; {kept}")
    return inspect_folder(args.output_dir) if args.verify else 0


def _plan(args: argparse.Namespace, packing: Packing) -> int:
    if packing.ranks.rank > 0:
        return 0
    check_folder(args.output_dir, overwrite=args.overwrite)  # a plan removes no dataset
    plan = packing.plan()
    if args.plan == "decode":
        plan = packing.decode_all(plan)
    refusals = packing.review(plan)
    facts = write_plan_page(
        plan,
        packing.work(Task.DECODE),
        args.output_dir / PAGE_NAME,
        cropped=packing.cropped,
        decoded=packing.decoded if args.plan == "decode" else None,
    )
    summary = json.dumps(facts.summary, indent=1, ensure_ascii=False) + "\n"
    write_atomically(args.output_dir / SUMMARY_NAME, summary.encode())
    show_plan(Console(), facts, args.output_dir, packing.source.ignored)
    if len(refusals) > args.max_bad_fraction * plan.total:
        _notify(
            f"packing would publish nothing: {len(refusals)} of {plan.total} files are refused,"
            f" more than --max_bad_fraction {args.max_bad_fraction} allows; repair or remove them,"
            " or raise that option"
        )
    return 0


def _engine(args: argparse.Namespace, ranks: Ranks) -> Engine:
    """The engine that the options in `args` ask for; a launched rank uses only its own GPU.

    Raises:
        PrepError: the options contradict each other, or Ray is not installed.
    """
    if args.num_workers is not None and args.num_workers < 0:
        raise PrepError(
            f"--num_workers {args.num_workers} must be at least 0; leave it out for the default"
        )
    if args.engine == "ray":
        if ranks.world > 1:
            raise PrepError(
                f"--engine ray starts the workers itself, and this command runs in {ranks.world}"
                " processes; start it once, without torchrun or srun"
            )
        return RayWorkers(workers=args.num_workers)
    devices = _devices(ranks)
    workers, few = args.num_workers, 0
    if workers is None:
        few = _FEW
        on_gpus = devices[0] != "cpu"
        workers = len(devices) if on_gpus else max(1, len(os.sched_getaffinity(0)) // ranks.world)
    return (
        InProcess(devices[0])
        if not workers
        else Processes(workers=workers, devices=devices, few=few)
    )


def _devices(ranks: Ranks) -> tuple[str, ...]:
    import torch

    count = torch.cuda.device_count()
    if not count:
        return ("cpu",)
    if ranks.world > 1:
        return (f"cuda:{ranks.local % count}",)
    return tuple(f"cuda:{index}" for index in range(count))


def run_convert(args: argparse.Namespace) -> int:
    """Runs the command `convert`: turns another tool's cache into shards; returns the exit code."""
    readers = [vae.codec_named(args.processor)] if args.processor else []
    encoders = [text.text_encoder_named(args.text_encoder)] if args.text_encoder else []
    for sentence in unused_options(args, args.parser, [*readers, *encoders]):
        Console().print(sentence)
    check_source_outside(args.output_dir, source=args.folder, option="the cache")
    with locked_folder(args.output_dir):
        counts, refusals, notices = convert(args)
    for notice in notices:
        _notify(notice)
    for split, count in counts.items():
        Console().print(f"{split}: {counted(count, 'sample')}")
    for line in refusals.lines:
        Console().print(f"refused: {line}")
    return 0


def run_relocate(args: argparse.Namespace) -> int:
    """Runs the command `relocate`: corrects the index of a moved AutoModel cache; returns 0."""
    count = relocate(args.folder)
    Console().print(f"{args.folder / INDEX}: {counted(count, 'sample')} in this folder now")
    return 0


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "digits": run_digits,
    "image": run_media,
    "video": run_media,
    "convert": run_convert,
    "relocate": run_relocate,
    "inspect": run_inspect,
}

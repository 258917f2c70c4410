"""Options that were typed and that nothing of this run reads."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping

from dit.codecs.text import TEXT_ENCODERS, TextEncoder
from dit.codecs.vae import PROCESSORS, Codec

_FRAMES = {
    "mode", "target_frames", "num_frames", "frame_buckets", "train_fps", "window", "drop_short",
    "video_loader_type",
}  # fmt: skip
_ROWS = {"dataset_split", "image_column", "video_column", "caption_column"}


Reader = Codec | TextEncoder | type[Codec] | type[TextEncoder]


def unused_options(args: Namespace, parser: ArgumentParser, readers: Iterable[Reader]) -> list[str]:
    """One sentence for each reason for which options of `args` change nothing."""
    readers = list(readers)
    known = (*PROCESSORS.values(), *TEXT_ENCODERS.values())
    read = {name for reader in readers for name in reader.options}
    ignored = {name for reader in known for name in reader.options} - read
    chosen = " and ".join(repr(reader.name) for reader in readers) or "this command"
    reasons = [(ignored, f"it means nothing to {chosen}")]
    if args.command == "image" and not _may_hold_videos(args):
        reasons.append((_FRAMES, "there are no videos"))
    if args.command in ("image", "video") and not _rows(args):
        reasons.append((_ROWS, "there is no --hf_dataset"))
    return [
        f"{_option(parser, name)} is not used: {why}"
        for names, why in reasons
        for name in sorted(names)
        if getattr(args, name, None) != parser.get_default(name)
    ]


def unused_places(reader: Reader, given: Mapping[str, str | None]) -> list[str]:
    """The same for options that say where the model of a dataset card is, by their spelling."""
    if "model_name" in reader.options:
        return []
    why = f"{reader.name!r}, which made the dataset, has no weights"
    return [f"{option} is not used: {why}" for option, value in given.items() if value]


def _may_hold_videos(args: Namespace) -> bool:
    return any((args.video_dir, args.dataset_config, args.dataset_path, args.hf_dataset))


def _rows(args: Namespace) -> bool:
    return bool(args.hf_dataset) or args.dataset_type == "hf"


def _option(parser: ArgumentParser, name: str) -> str:
    """The spelling that the help gives first."""
    actions = (action for action in parser._actions if action.dest == name)
    return next((action.option_strings[0] for action in actions), f"--{name}")

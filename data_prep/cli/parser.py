"""The command line of data preparation: its commands, options, exit codes and error messages."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from data_prep.cli.media_arguments import InputOptions, Minutes, add_media, add_models
from data_prep.planning.splits import DEFAULT_SPLIT
from data_prep.refusals import PrepError
from data_prep.writing.pack_options import ShardOptions, WorkOptions
from dit.codecs.dataset_card import CodecError
from dit.codecs.encoder_options import OF_CODECS, OF_SOUND_CODECS, OF_TEXT_ENCODERS
from dit.command_line import OptionParser, Whole, add_options, not_an_option, option
from dit.console import Console
from dit.launched import LauncherWatch, local_rank
from dit.streams import result
from dit.system_errors import explained

EXIT_CODES = """\
Exit codes: 0 success, 1 an error (the last line says what to change), 2 a wrong command line,
130 interrupted. A dataset can be trained on only after exit code 0.
"""


_GOES_ON = "nothing was published; the same command goes on from here"
_ENDINGS = {
    **dict.fromkeys(("image", "video", "digits"), _GOES_ON),
    "convert": "nothing was published; the same command begins anew",
}
"""The last sentence of a command's error message: what to do with a half-written dataset.
The commands that are missing here leave no half-written dataset."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` (`sys.argv` if None) name, and returns its exit code."""
    parser = build_parser()
    given = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args([re.sub(r"^--preprocess\.", "--", word) for word in given])
    if args.command is None:
        parser.print_help()
        return 0
    LauncherWatch(_leave)
    errors = Console(stderr=True)
    try:
        # Imported late: --help and a wrong option answer without torch.
        from data_prep.cli.commands import COMMANDS

        return COMMANDS[args.command](args)
    except (PrepError, CodecError) as error:
        errors.print(f"error: {error}")
    except OSError as error:
        said = [f"error: {explained(error)}", _remedy(error, args), _ending(args)]
        errors.print("; ".join(filter(None, said)))
    except KeyboardInterrupt:
        errors.print(": ".join(filter(None, ["interrupted", _ending(args)])))
        return 130
    return 1


def _ending(args: argparse.Namespace) -> str:
    from data_prep.writing.dataset_folder import META  # late: --help answers without torch

    ending = _ENDINGS.get(args.command, "")
    is_whole = ending and (args.output_dir / META).exists()
    return f"the dataset in {args.output_dir} is whole" if is_whole else ending


def _leave(message: str) -> None:
    """Ends this process and its workers at once, with exit code 1.

    The first process of each machine prints `message`.
    """
    try:
        if local_rank() == 0:
            Console(stderr=True).print(f"error: {message}")
    finally:
        os._exit(1)


def _remedy(error: OSError, args: argparse.Namespace) -> str:
    """How to avoid `error` if it concerns a file inside `args.output_dir`; else an empty string."""
    folder = getattr(args, "output_dir", None)
    if folder is None:
        return ""
    is_inside = error.filename and Path(error.filename).absolute().is_relative_to(folder.absolute())
    return "give another --output_dir" if is_inside else ""


class _CommandParser(OptionParser):
    """A parser whose error message is one line, which points to --help=all."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; {self.prog} --help=all lists the options\n")

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - it is overloaded
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses options; an unknown one ends the program with exit code 2.

        argparse calls this for the parser of each command, so the message can suggest that
        command's options.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(not_an_option(unknown, self._option_string_actions))
        return found, unknown


def build_parser() -> argparse.ArgumentParser:
    parser = _CommandParser(
        prog="python -m data_prep",
        description="Packs images and videos with captions into shards for training.",
        epilog=EXIT_CODES,
    )
    parser.set_defaults(command=None)
    _add_list_processors(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_digits(commands)
    _add_media(commands, "image", "Packs images, with their captions.")
    _add_media(commands, "video", "Packs videos, or single frames of them, with their captions.")
    _add_readers(commands)
    return parser


@dataclass(frozen=True, kw_only=True)
class _OutputOptions:
    """Options for the output: its folder, its splits, and the text encoder of its captions."""

    output_dir: Path = option(MISSING, "--dataset_output_dir", metavar="DIR")
    """Folder of the dataset. A run that was interrupted, or whose files have changed, is continued
    there with the same options."""
    split: str | None = option(
        None,
        metavar="TRAIN,VAL,TEST",
        help="Fractions of the samples for train, val and test. The split of a file does not depend"
        f" on the other files. (default: {DEFAULT_SPLIT}; all in train if one of these parts would"
        " get none)",
    )
    text_encoder: str | None = option(
        None,
        metavar="NAME",
        help="Text encoder; --list_processors shows all. (default: that of the processor)",
    )


@dataclass(frozen=True, kw_only=True)
class _DigitKinds:
    """Options that choose what is made of the digits: pictures, clips or pairs for editing."""

    moving: bool = False
    """Pack clips of 9 frames, 16 x 16 pixels, in which a digit moves left, right, up or down: four
    clips of each digit, with the inputs of image-to-video models (condition_latent,
    first_frame_latent)."""
    edits: bool = False
    """Pack pairs for editing networks: each digit as a reference picture, and as its target the
    same digit `with a frame` or `mirrored`. With --moving: each clip, and its mirror image."""
    side: int = option(8, choices=(8, 16, 32))
    """Pixels along a side of a picture; for more than 8, digits are scaled up. A picture has 16
    latent cells, unless --pixel_block is given. Not for --moving and --edits."""
    pixel_block: int | None = option(None, choices=(1, 2, 4, 8))
    """Pixels along a side of a latent cell: 2 with --side 32 makes 256 cells, for
    conf/mlperf_digits.yaml. Not for --moving and --edits. (default: a quarter of --side)"""


@dataclass(frozen=True, kw_only=True)
class _DigitOptions:
    """Options that choose which digits are packed, and their colours."""

    num_samples: Whole | None = option(None, metavar="N")
    """Pack only the first N digits. (default: all)"""
    invert: bool = False
    """Draw dark ink on white, for fine-tuning; see --whitening_from."""


@dataclass(frozen=True, kw_only=True)
class _WhiteningOptions:
    """Options for the normalisation (whitening) of latents."""

    whitening_from: Path | None = option(None, metavar="DIR")
    """For processor pixel: normalise latents by the mean and standard deviation of the dataset in
    DIR, for a network that was trained on that dataset."""


@dataclass(frozen=True, kw_only=True)
class _RunningOptions:
    """Options for the work: planning only, worker processes, threads, and the time to train."""

    plan: str | None = option(None, nargs="?", const="decode", choices=("decode", "quick"))
    """Write plan.jsonl, plan.html and plan_summary.json, which say what will become of each file,
    and encode nothing. It decodes every file. --plan=quick reads only headers, so it misses
    damage inside files."""
    cache_only: bool = False
    """No effect: packing never trains."""
    num_workers: Whole | None = option(None, metavar="N")
    """Worker processes; 0 does the work in this process. The result is the same for any number.
    (default: one for each GPU or core, if there is enough work)"""
    minutes: Minutes | None = option(None, metavar="M")
    """Minutes that training may take. The command tries some training steps and writes train.yaml
    beside the shards, with network, noise levels and steps for that time; 0 does neither. For
    latents of networks with published weights, train.yaml is written only if this option is given.
    (default: 30 without a GPU; with one, the time of 140 passes over the samples)"""
    decode_threads: Whole = option(2, metavar="N")
    """Threads of each worker that decode the next files. (default: %(default)s)"""
    engine: Literal["local", "ray"] = "local"
    """ray runs the workers on the machines of a Ray cluster. (default: %(default)s)"""


@dataclass(frozen=True, kw_only=True)
class _CodecOptions:
    """Options that choose the codec and the text encoder."""

    processor: str = option("pixel", metavar="NAME")
    """Codec that encodes latents. (default: %(default)s)"""
    output_format: Literal["shards", "meta", "pt", "parquet", "dfm"] = "shards"
    """Write shards, and also the format of AutoModel (meta, pt), FastVideo (parquet) or DFM (dfm).
    (default: %(default)s)"""


@dataclass(frozen=True, kw_only=True)
class _CacheOptions:
    """Options for reading a cache of another tool."""

    processor: str | None = option(None, metavar="NAME")
    """Codec that encoded the latents."""
    latents: Literal["normalised", "raw"] | None = None
    """raw: latents as the codec encodes them (FastVideo, DFM's FLUX and DiT); convert normalises
    them for the processor. (default: raw for FastVideo's Parquet, except that of Cosmos 2.5,
    which has no default; else normalised)"""
    link: bool = False
    """For shards of MLPerf's FLUX.1: write links to the shards instead of copies, with the files
    that training reads beside them. The shards stay unchanged in their place."""
    max_bad_fraction: float = option(0.05, metavar="FRACTION")
    """Fraction of the samples that may be refused; if more are, nothing is published. (default:
    %(default)s)"""


def _add(commands: Any, name: str, about: str) -> Any:
    parser = commands.add_parser(name, help=about, description=about, epilog=EXIT_CODES)
    parser.set_defaults(command=name, parser=parser)
    return parser


def _add_digits(commands: Any) -> None:
    about = "Packs the 1,797 handwritten digits, 8 x 8 pixels, that come with scikit-learn."
    parser = _add(commands, "digits", about)
    parser.first = ("output_dir", "split", "pooled_text", "overwrite")
    parser.first += ("moving", "edits", "side", "num_samples", "invert", "whitening_from")
    _add_output(parser)
    add_options(parser, _DigitKinds, _DigitOptions, _WhiteningOptions)


_FIRST = ("dataset_config", "output_dir", "split", "plan", "max_pixels", "processor", "model_name")
"""Options of `image` and `video` that `--help` shows first."""


def _add_media(commands: Any, name: str, about: str) -> None:
    parser = _add(commands, name, about)
    own = ("pixel_block", "list_processors") if name == "image" else ("train_fps", "target_frames")
    parser.first = (*_FIRST, f"{name}_dir", *own)
    add_options(parser.add_argument_group("what to pack (one of these at least)"), InputOptions)
    _add_output(parser)
    add_options(parser.add_argument_group("running"), _RunningOptions, WorkOptions)
    add_media(parser)
    add_options(parser, _CodecOptions)
    _add_list_processors(parser)
    _add_groups(parser, OF_CODECS)
    _add_groups(parser, OF_SOUND_CODECS)
    add_options(parser, _WhiteningOptions)
    add_models(parser)


def _add_groups(parser: argparse.ArgumentParser, groups: Mapping[str, Any]) -> None:
    for title, options in groups.items():
        add_options(parser.add_argument_group(title), options)


def _add_list_processors(parser: argparse.ArgumentParser) -> None:
    about = "Show the known processors and text encoders and exit."
    parser.add_argument("--list_processors", action=_ListCodecs, help=about)


def _add_output(parser: argparse.ArgumentParser) -> None:
    add_options(parser, _OutputOptions, ShardOptions)
    _add_groups(parser, OF_TEXT_ENCODERS)


def _add_readers(commands: Any) -> None:
    """Adds the commands `convert`, `relocate` and `inspect`, which read a folder, to `commands`."""
    about = "Turns a cache of AutoModel, FastVideo, DFM or MLPerf into shards."
    parser = _add(commands, "convert", about)
    parser.first = ("output_dir", "split", "overwrite", "license", "processor", "latents", "link")
    parser.first += ("model_name", "text_padding", "max_bad_fraction")
    _add_folder(parser, "Folder that the other tool wrote.")
    _add_output(parser)
    add_options(parser, _CacheOptions)
    _add_groups(parser, OF_CODECS)
    add_models(parser)
    about = "Corrects the paths in the index of an AutoModel cache that was moved or copied."
    _add_folder(_add(commands, "relocate", about), "Folder with metadata.json.")
    about = "Reads a packed dataset, prints what it has, and checks every checksum."
    parser = _add(commands, "inspect", about)
    _add_folder(parser, "Folder of the dataset.")
    page = "Also write a page to look through the samples."
    parser.add_argument("--html", type=Path, metavar="FILE", help=page)


def _add_folder(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help=about)


class _ListCodecs(argparse.Action):
    """The action of --list_processors: shows the table of codecs and exits.

    Like `--help` it works even if required options are missing.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any):
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from data_prep.cli.terminal import show_codecs

        with result():
            show_codecs(Console())
        parser.exit()

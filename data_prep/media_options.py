"""The options of pictures and videos: what can be typed, and the source that follows from it."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.captions import PRECEDENCE, CaptionFormat, MissingCaption
from data_prep.frame_rules import FrameRule, Window
from data_prep.processors import Processor
from data_prep.refusals import PrepError
from data_prep.sizing import PRESETS, Buckets, Fit, ResizeMode, Sizing, aspect_buckets
from data_prep.sources.folders import CaptionOptions, Collection, FolderCollection
from data_prep.sources.listing import BOTH, IMAGES, VIDEOS
from data_prep.sources.media import Grid, Input, MediaSource, SeveralCaptions

PATCH = 2  # latent cells along one side of a token in the models of conf/

# All that decides the samples; no paths, which would differ between machines.
SETTINGS = (
    "bucketing", "size_multiple", "resolution_preset", "max_pixels", "height", "width",
    "resize_mode", "center_crop", "mode", "num_frames", "target_frames", "frame_buckets",
    "train_fps", "window", "drop_short", "caption_field", "caption_format", "missing_caption",
    "several_captions",
)  # fmt: skip


def add_inputs(parser: ArgumentParser) -> None:
    """Where media are, one or several of these."""
    group = parser.add_argument_group("what to pack (one of these at least)")
    for option, kind in (("--image_dir", "images"), ("--video_dir", "videos")):
        group.add_argument(
            option,
            type=Path,
            metavar="DIR",
            help=f"Folder of {kind}, with folders and uncompressed .tar files in it. Hidden files"
            " and linked folders are left out.",
        )
    group.add_argument(
        "--dataset_config",
        type=Path,
        metavar="FILE",
        help="YAML or TOML file that lists several folders, each with settings of its own.",
    )
    group.add_argument(
        "--hf_dataset",
        "--dataset_name",
        metavar="DIR|ID",
        help="Dataset of Hugging Face: a folder on disk, or the name of one on its hub.",
    )
    group.add_argument(
        "--dataset_type",
        choices=("hf", "merged"),
        help="What --dataset_path is: hf, as --hf_dataset; merged, a folder with videos/ and"
        " videos2caption.json.",
    )
    group.add_argument("--dataset_path", metavar="PATH", help="See --dataset_type.")
    group.add_argument("--dataset_split", default="train", metavar="NAME", help="Default: train.")
    group.add_argument(
        "--image_column", metavar="NAME", help="Column of images: bytes, paths, URLs."
    )
    group.add_argument(
        "--video_column", metavar="NAME", help="Column of videos: bytes, paths, URLs."
    )
    group.add_argument("--caption_column", metavar="NAME", help="Column of captions.")
    group.add_argument(
        "--max_items",
        "--max_images",
        "--max_videos",
        type=int,
        metavar="N",
        help="Pack only the first N files of the listing. (default: all)",
    )


def add_pictures(parser: ArgumentParser) -> None:
    """How large samples are."""
    group = parser.add_argument_group("size")
    group.add_argument(
        "--bucketing",
        choices=("native", "aspect"),
        default="native",
        help="native keeps the size of each medium, cropped to --size_multiple; aspect gives it the"
        " bucket within the pixel budget whose ratio is nearest. (default: %(default)s)",
    )
    group.add_argument(
        "--size_multiple",
        type=int,
        metavar="PIXELS",
        help="Sides are multiples of this many pixels; media with a shorter side are refused."
        " (default: two latent cells, one patch)",
    )
    group.add_argument(
        "--resolution_preset",
        choices=tuple(PRESETS),
        help="Pixel budget by name: 512p is 512 x 512 pixels.",
    )
    group.add_argument(
        "--max_pixels",
        type=int,
        metavar="PIXELS",
        help="Pixel budget: larger media are scaled down, both sides alike. (default: no limit;"
        " 256p for image and 512p for video with --bucketing aspect)",
    )
    group.add_argument(
        "--height",
        "--max_height",
        type=int,
        metavar="PIXELS",
        help="With --width: every sample gets this size, scaled to cover it and cropped.",
    )
    group.add_argument("--width", "--max_width", type=int, metavar="PIXELS", help="See --height.")
    group.add_argument(
        "--resize_mode",
        choices=[str(mode) for mode in ResizeMode],
        default=str(ResizeMode.LANCZOS),
        help="Interpolation; all but nearest are antialiased. (default: %(default)s)",
    )
    group.add_argument(
        "--center_crop",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Crop to a bucket; without, media are stretched to it. (default: crop)",
    )
    group.add_argument(
        "--no_center_crop", dest="center_crop", action="store_false", help=argparse.SUPPRESS
    )


def add_frames(parser: ArgumentParser) -> None:
    """Which frames of a video are kept."""
    group = parser.add_argument_group("frames of videos")
    group.add_argument(
        "--mode",
        choices=("video", "frames"),
        default="video",
        help="video: a clip is a sample; frames: --num_frames single frames of it, evenly spaced,"
        " are samples. (default: %(default)s)",
    )
    group.add_argument(
        "--target_frames",
        type=int,
        metavar="N",
        help="Frames in a sample, at most; the processor's rule (4n+1, 8n+1) must allow it."
        " (default: the whole clip)",
    )
    group.add_argument(
        "--num_frames",
        type=int,
        metavar="N",
        help="With --mode frames, frames of each clip (default: 10). Else as --target_frames.",
    )
    group.add_argument(
        "--frame_buckets",
        type=_integers,
        default=(),
        metavar="N,N,...",
        help="Numbers of frames to choose from; a clip gets the largest it can fill.",
    )
    group.add_argument(
        "--train_fps",
        type=float,
        metavar="FPS",
        help="Frames a second that are kept, by their times. (default: those of the file)",
    )
    group.add_argument(
        "--window",
        choices=[str(window) for window in Window],
        default=str(Window.FIRST),
        help="Part of a longer clip that is kept; all makes several samples."
        " (default: %(default)s)",
    )
    group.add_argument(
        "--drop_short",
        action="store_true",
        help="Refuse clips with fewer than --target_frames, instead of keeping what the rule"
        " allows.",
    )
    group.add_argument(
        "--video_loader_type",
        choices=("pyav", "torchcodec", "torchvision"),
        default="pyav",
        help="Decoder of videos; torchvision has none any more and means pyav, with a notice."
        " (default: %(default)s)",
    )


def add_captions(parser: ArgumentParser) -> None:
    """Where captions are looked for."""
    group = parser.add_argument_group("captions", PRECEDENCE)
    group.add_argument(
        "--caption_field",
        default="caption",
        metavar="FIELD",
        help="Field that holds the caption, in .json files and tables; '' looks at no .json file"
        " beside a medium. (default: %(default)s)",
    )
    group.add_argument(
        "--caption_format",
        choices=[str(choice) for choice in CaptionFormat],
        default=str(CaptionFormat.AUTO),
        help="Look at files beside the media alone, or at tables of one kind. (default: all)",
    )
    group.add_argument(
        "--missing_caption",
        choices=[str(choice) for choice in MissingCaption],
        default=str(MissingCaption.FILENAME),
        help="What a medium without a caption gets: its file name with spaces for underscores,"
        " the empty caption, or a refusal. (default: %(default)s)",
    )
    group.add_argument(
        "--several_captions",
        choices=[str(choice) for choice in SeveralCaptions],
        default=str(SeveralCaptions.ALL),
        help="Where a medium has several: a sample for each, the first, or one drawn by the name"
        " of the file. (default: %(default)s)",
    )


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give whole numbers, such as 17,33,65"
        ) from None


def source_of(args: Namespace, processor: Processor) -> MediaSource:
    """The source that the options describe.

    Raises:
        PrepError: they contradict each other, or a file that they name cannot be used.
    """
    if args.size_multiple is None:
        args.size_multiple = PATCH * processor.stride
    if args.size_multiple % processor.stride:
        raise PrepError(
            f"--size_multiple {args.size_multiple} must be a multiple of the {processor.stride}"
            f" pixels of one latent cell of processor {processor.name!r}"
        )
    basis = Input(
        collection=FolderCollection(root=Path()),
        sizings=(sizing_of(args),),
        frames=frame_rule_of(args, processor.temporal_stride),
        several=SeveralCaptions(args.several_captions),
    )
    inputs = [replace(basis, collection=each) for each in _collections(args)]
    if args.dataset_config:
        from data_prep.sources.dataset_file import inputs_of

        inputs += inputs_of(args, basis)
    if not inputs:
        raise PrepError(
            "nothing to pack: give --image_dir, --video_dir, --dataset_config or --hf_dataset"
        )
    return MediaSource(
        inputs=_prefixed(inputs),
        grid=Grid(spatial=processor.stride, temporal=processor.temporal_stride, patch=PATCH),
        colours=processor.pixel_channels,
        resize_mode=ResizeMode(args.resize_mode),
        most=args.max_items,
    )


def captions_of(args: Namespace) -> CaptionOptions:
    return CaptionOptions(
        field=args.caption_field,
        format=CaptionFormat(args.caption_format),
        missing=MissingCaption(args.missing_caption),
    )


def _collections(args: Namespace) -> list[Collection]:
    found: list[Collection] = []
    captions, merged = captions_of(args), None
    if (args.dataset_type is None) != (args.dataset_path is None):
        raise PrepError("--dataset_type and --dataset_path belong together; give both")
    if args.dataset_type == "hf":
        args.hf_dataset = args.dataset_path
    elif args.dataset_type == "merged":
        merged = Path(args.dataset_path)
    for root, option, kinds in (
        (args.image_dir, "--image_dir", IMAGES),
        (args.video_dir, "--video_dir", VIDEOS),
        (merged, "--dataset_path", BOTH),
    ):
        if root is not None:
            found.append(FolderCollection(root=root, captions=captions, kinds=kinds, option=option))
    if args.hf_dataset:
        from data_prep.sources.rows import rows_of

        found.append(rows_of(args, captions))
    return found


def _prefixed(inputs: list[Input]) -> tuple[Input, ...]:
    """Source paths of several inputs begin with a name that no other input has."""
    if len(inputs) == 1:
        return tuple(inputs)
    seen: dict[str, int] = {}
    named = []
    for given in inputs:
        name = given.collection.name
        number = seen[name] = seen.get(name, 0) + 1
        named.append(replace(given, prefix=f"{name}/" if number == 1 else f"{name}_{number}/"))
    return tuple(named)


def sizing_of(args: Namespace) -> Sizing:
    """The rule for sizes.

    Raises:
        PrepError: its parts contradict each other.
    """
    multiple, budget = args.size_multiple, args.max_pixels
    if args.resolution_preset and budget:
        raise PrepError("--resolution_preset and --max_pixels are both pixel budgets; give one")
    if args.resolution_preset:
        budget = PRESETS[args.resolution_preset]
    if (args.height is None) != (args.width is None):
        raise PrepError("--height and --width belong together; give both")
    if args.height is not None:
        for option, side in (("--height", args.height), ("--width", args.width)):
            if side < multiple or side % multiple:
                raise PrepError(
                    f"{option} {side} must be a multiple of {multiple} pixels, such as"
                    f" {max(1, round(side / multiple)) * multiple}"
                )
        return Buckets(sizes=((args.width, args.height),), center_crop=args.center_crop)
    if args.bucketing == "native":
        return Fit(size_multiple=multiple, max_pixels=budget)
    default = PRESETS["512p" if args.command == "video" else "256p"]
    sizes = aspect_buckets(budget=budget or default, multiple=multiple)
    return Buckets(sizes=sizes, center_crop=args.center_crop)


def frame_rule_of(args: Namespace, stride: int) -> FrameRule:
    """The rule for frames.

    Raises:
        PrepError: the processor cannot take what is asked for.
    """
    stills = args.num_frames or 10 if args.mode == "frames" else 0
    count = args.target_frames
    if args.mode == "video" and args.num_frames is not None:
        if count is not None and count != args.num_frames:
            raise PrepError(
                f"--target_frames {count} and --num_frames {args.num_frames} are the same option"
                " with --mode video; give one"
            )
        count = args.num_frames
    return FrameRule(
        stride=stride,
        count=count,
        fps=args.train_fps,
        buckets=tuple(args.frame_buckets),
        window=Window(args.window),
        drop_short=args.drop_short,
        stills=stills,
    )


def settings_of(args: Namespace) -> dict[str, Any]:
    """The options that decided the samples, for the card."""
    return {name: getattr(args, name) for name in SETTINGS}

"""Turns options of pictures and videos into a `MediaSource`; warns of options without effect."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from data_prep.cli.media_arguments import DecoderOptions, FrameOptions, SoundOptions
from data_prep.cli.next_command import is_published
from data_prep.media.captions import MissingCaption, SeveralCaptions
from data_prep.media.frame_selection import FrameRule, Window
from data_prep.media.resizing import PRESETS, Buckets, Fit, ResizeMode, Sizing, aspect_buckets
from data_prep.media.sounds import MissingAudio, SilentAudio, SoundRule
from data_prep.media.videos import VideoDecoder
from data_prep.refusals import PrepError
from data_prep.sources.beside_media import ControlFolder, ReferenceRule, RejectedFolder
from data_prep.sources.dataset_file import inputs_of, is_of_diffusion_pipe
from data_prep.sources.folders import CaptionOptions, Collection, FolderCollection
from data_prep.sources.huggingface import huggingface_rows
from data_prep.sources.listing import BOTH, IMAGES, VIDEOS
from data_prep.sources.loss_masks import MaskFolder
from data_prep.sources.media_source import Input, MediaSource, TokenGrid
from dit.codecs.dataset_encoder import DatasetEncoder
from dit.codecs.rgb import ReferenceFit
from dit.codecs.sound import SOUND_CODECS, SoundCodec
from dit.codecs.text import TEXT_ENCODERS, TextEncoder
from dit.codecs.vae import CODECS, Codec
from dit.command_line import option_names

_FRAMES = {*option_names(FrameOptions, DecoderOptions)}
_SOUND = {*option_names(SoundOptions)}
_ROWS = {"dataset_split", "image_column", "video_column", "caption_column"}


def sound_codec_of(args: Namespace) -> SoundCodec | None:
    """The sound codec that `args.audio_processor` names; None if that option is not given.

    Raises:
        CodecError: the options of that codec contradict each other.
    """
    if args.audio_processor is None:
        return None
    return SOUND_CODECS.named(args.audio_processor).from_arguments(args)


def source_of(args: Namespace, codec: Codec, sound: SoundCodec | None = None) -> MediaSource:
    """The source of media that `args` describes, with sizes and frames that `codec` accepts.

    If `sound` is given, the source also reads the sound of its videos for that codec. Options in
    `args` that are None, such as `size_multiple` and `missing_caption`, are set to their defaults
    in place.

    Raises:
        PrepError: options contradict each other, or a file that they name cannot be used.
    """
    if args.size_multiple is None:
        args.size_multiple = (codec.side_cells or codec.patch) * codec.stride
    if args.size_multiple % codec.stride:
        raise PrepError(
            f"--size_multiple {args.size_multiple} must be a multiple of the {codec.stride}"
            f" pixels of one latent cell of processor {codec.name!r}, such as {2 * codec.stride}"
        )
    basis = Input(
        collection=FolderCollection(root=Path()),
        sizings=(sizing_of(args),),
        frames=frame_rule_of(args, codec.temporal_stride),
        several=SeveralCaptions(args.several_captions),
    )
    inputs = [replace(basis, collection=each) for each in _collections(args)]
    if args.dataset_config:
        is_alone = not inputs
        inputs += inputs_of(args, basis)
        if is_alone and args.missing_caption is None and is_of_diffusion_pipe(args.dataset_config):
            args.missing_caption = str(MissingCaption.EMPTY)
    if args.missing_caption is None:  # stored in the dataset card
        args.missing_caption = str(MissingCaption.FILENAME)
    if not inputs:
        raise PrepError(
            "nothing to pack: give --image_dir, --video_dir, --dataset_config or --hf_dataset"
        )
    return MediaSource(
        inputs=tuple(_prefixed(_overlapping(inputs))),
        reference_rule=reference_rule_of(args, codec),
        grid=TokenGrid(spatial=codec.stride, temporal=codec.temporal_stride, patch=codec.patch),
        colours=codec.pixel_channels,
        resize_mode=ResizeMode(args.resize_mode),
        decoder=video_decoder_of(args),
        background=args.background,
        sound=None if sound is None else _sound_rule(args, sound),
        most=args.max_items,
    )


def _sound_rule(args: Namespace, codec: SoundCodec) -> SoundRule:
    return SoundRule(
        rate=codec.rate,
        channels=codec.sound_channels,
        missing=MissingAudio(args.missing_audio),
        silent=SilentAudio(args.silent),
        track=args.audio_track,
    )


def reference_rule_of(args: Namespace, codec: Codec) -> ReferenceRule:
    """The rule by which control pictures are resized, from --reference_size and the pixel budget.

    Raises:
        PrepError: --reference_size is `published`, and the pipeline of `codec` edits no pictures.
    """
    kind = ReferenceFit(args.reference_size or ReferenceFit.TARGET)
    if kind is ReferenceFit.PUBLISHED and not codec.edits_pictures:
        known = ", ".join(name for name, one in CODECS.items() if one.edits_pictures)
        raise PrepError(
            f"--reference_size published: the pipeline of processor {codec.name!r} edits no"
            f" pictures; give own or target, or one of the processors {known}"
        )
    budget = PRESETS[args.resolution_preset] if args.resolution_preset else args.max_pixels
    return ReferenceRule(
        kind=kind,
        own=Fit(size_multiple=args.size_multiple, max_pixels=budget),
        published=codec.reference_size,
        crops=codec.crops_references,
        center_crop=args.center_crop,
    )


def video_decoder_of(args: Namespace) -> VideoDecoder:
    """The library that decodes videos, as `args.video_loader_type` names it.

    `torchvision` is replaced by `pyav` in `args`, because its current releases decode no videos.

    Raises:
        PrepError: the library is not installed.
    """
    if args.video_loader_type == "torchvision":  # its current releases decode no videos
        args.video_loader_type = str(VideoDecoder.PYAV)
    decoder = VideoDecoder(args.video_loader_type)
    decoder.check()
    return decoder


def _collections(args: Namespace) -> list[Collection]:
    found: list[Collection] = []
    captions, merged = CaptionOptions.of(args), None
    masks = None if args.mask_dir is None else MaskFolder(root=args.mask_dir)
    controls = tuple(ControlFolder(root=folder) for folder in args.control_dir or ())
    rejected = None if args.rejected_dir is None else RejectedFolder(root=args.rejected_dir)
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
            found.append(
                FolderCollection(
                    root=root,
                    captions=captions,
                    kinds=kinds,
                    option=option,
                    masks=masks,
                    controls=controls,
                    rejected=rejected,
                    output=args.output_dir,
                )
            )
    for folder, what, key in (
        (masks, "masks", "mask_path"),
        (next(iter(controls), None), "control pictures", "control_path"),
        (rejected, "rejected pictures", "rejected_path"),
    ):
        if folder is not None and not found:
            raise PrepError(
                f"{folder.option} {folder.root} has {what} for --image_dir and --video_dir; give"
                f" one of these, or write {key} into the file of --dataset_config"
            )
    if args.hf_dataset:
        found.append(huggingface_rows(args, captions))
    return found


def _overlapping(inputs: list[Input]) -> list[Input]:
    """Changes `inputs` in place so that no file below two overlapping folders is packed twice.

    Returns the same list.
    """
    folders = {
        number: given.collection
        for number, given in enumerate(inputs)
        if isinstance(given.collection, FolderCollection)
    }
    for number, mine in folders.items():
        for other, its in folders.items():
            if number != other:
                mine = mine.next_to(its, is_later=number > other)
        inputs[number] = replace(inputs[number], collection=mine)
    return inputs


def _prefixed(inputs: list[Input]) -> Iterator[Input]:
    """Yields `inputs`; if there are several, each gets its own prefix for its source paths."""
    seen = Counter[str]()
    for given in inputs:
        name = given.collection.name
        seen[name] += 1
        number = f"_{seen[name]}" if seen[name] > 1 else ""
        yield replace(given, prefix=f"{name}{number}/") if len(inputs) > 1 else given


def sizing_of(args: Namespace) -> Sizing:
    """The rule for the size of samples that `args` describes: one size, buckets, or a pixel budget.

    Raises:
        PrepError: the options contradict each other.
    """
    multiple, budget = args.size_multiple, args.max_pixels
    if args.resolution_preset and budget:
        raise PrepError(
            f"--resolution_preset {args.resolution_preset} and --max_pixels {budget} are both"
            " pixel budgets; give only one of them"
        )
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


def gentler_sizings(args: Namespace, codec: Codec, text: TextEncoder) -> dict[str, Sizing]:
    """Rules for the size of samples that may crop less than the options in `args`.

    The keys are the options to change, as a user would type them, such as `--max_pixels 131072`,
    some with a remark in parentheses. If a published network reads samples of `codec` and `text`,
    its patch size is kept. The result is empty with --dataset_config, whose file has its own sizes.
    """
    if args.dataset_config:
        return {}
    rule, found = sizing_of(args), dict[str, Sizing]()
    if isinstance(rule, Fit):
        if rule.size_multiple > codec.stride and not is_published(codec, text):
            name = f"--size_multiple {codec.stride} (for model.patch_spatial=1)"
            found[name] = replace(rule, size_multiple=codec.stride)
        if rule.max_pixels is not None:
            more = 2 * rule.max_pixels
            found[f"--max_pixels {more}"] = replace(rule, max_pixels=more)
            sizes = aspect_buckets(budget=rule.max_pixels, multiple=rule.size_multiple)
            name = "--bucketing aspect --no_center_crop (stretched)"
            found[name] = Buckets(sizes=sizes, center_crop=False)
    elif rule.center_crop:
        most = max(wide * high for wide, high in rule.sizes)
        native = Fit(size_multiple=args.size_multiple, max_pixels=most)
        found[f"--bucketing native --max_pixels {most}"] = native
        found["--no_center_crop (stretched)"] = replace(rule, center_crop=False)
    return found


def frame_rule_of(args: Namespace, stride: int) -> FrameRule:
    """The rule that `args` describes for choosing the frames of a video.

    `stride` is the codec's temporal stride: the number of frames per latent frame.

    Raises:
        PrepError: options contradict each other, or the codec cannot encode that number of frames.
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


def unused_options(
    args: Namespace,
    parser: ArgumentParser,
    readers: Iterable[DatasetEncoder | type[DatasetEncoder]],
) -> list[str]:
    """Returns a sentence, with the reason, for each option in `args` that has no effect.

    `readers` are the codecs and text encoders in use; options of all others have no effect.
    """
    readers = list(readers)
    known = (*CODECS.values(), *TEXT_ENCODERS.values(), *SOUND_CODECS.values())
    read = {name for reader in readers for name in reader.options}
    ignored = {name for reader in known for name in reader.options} - read
    chosen = " and ".join(repr(reader.name) for reader in readers) or "this command"
    reasons = [(ignored, f"it means nothing to {chosen}")]
    if args.command == "image" and not any(
        (args.video_dir, args.dataset_config, args.dataset_path, args.hf_dataset)
    ):
        reasons.append((_FRAMES | _SOUND, "there are no videos"))
    has_rows = args.command == "convert" or args.hf_dataset or args.dataset_type == "hf"
    if not has_rows:
        reasons.append((_ROWS, "there is no --hf_dataset"))
    if args.command in ("image", "video"):
        reasons += _unused_of_media(args)
    why_of = dict[str, str]()
    for names, why in reasons:
        why_of |= {name: why for name in sorted(names - why_of.keys())}
    return [
        f"{_option(parser, name)} is not used: {why}"
        for name, why in why_of.items()
        if getattr(args, name, None) != parser.get_default(name)
    ]


def _unused_of_media(args: Namespace) -> Iterator[tuple[set[str], str]]:
    """Yields (names of options, reason): options of media that other options make useless."""
    counts = {"target_frames", "drop_short"}
    if args.audio_processor is None:
        yield _SOUND, "there is no --audio_processor, and shards hold no sound"
    elif args.mode == "frames":
        yield _SOUND, "--mode frames takes single frames, which have no sound"
    if args.mode == "frames":
        names = {"frame_buckets", "train_fps", "window"} | counts
        yield names, "--mode frames takes single frames, --num_frames of each video"
    elif args.frame_buckets:
        yield counts, "--frame_buckets says how many frames a clip has, and refuses shorter ones"
    elif args.target_frames is None and args.num_frames is None:
        yield {"drop_short"}, "there is no --target_frames"
    if args.height is not None:
        budgets = {"max_pixels", "resolution_preset"}
        of_controls = budgets if args.reference_size == ReferenceFit.OWN else set[str]()
        yield {"bucketing"} | budgets - of_controls, "--height and --width say the size"


def _option(parser: ArgumentParser, name: str) -> str:
    actions = (action for action in parser._actions if action.dest == name)
    return next((action.option_strings[0] for action in actions), f"--{name}")

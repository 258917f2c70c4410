"""The options of pictures and videos, with their help texts."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from pathlib import Path

from data_prep.media.captions import PRECEDENCE, CaptionFormat, MissingCaption
from data_prep.media.frame_selection import Window
from data_prep.media.resizing import PRESETS, ResizeMode
from data_prep.sources.media_source import SeveralCaptions
from dit.codecs.pretrained import PRECISIONS
from dit.codecs.reference_fit import ReferenceFit
from dit.codecs.rgb import WHITE, colour
from dit.codecs.text import EncoderPadding
from dit.local_path import local_text

# The options that decide the samples; no paths, because they differ between machines.
SETTINGS = (
    "bucketing", "size_multiple", "resolution_preset", "max_pixels", "height", "width",
    "resize_mode", "center_crop", "mode", "num_frames", "target_frames", "frame_buckets",
    "train_fps", "window", "drop_short", "caption_field", "caption_format", "missing_caption",
    "several_captions", "video_loader_type",
)  # fmt: skip
# They decide the samples, too, but datasets of versions without them have no such settings: where
# they have their default, the settings of a dataset leave them out.
LATER_SETTINGS = ("reference_size", "background")


def add_inputs(parser: ArgumentParser) -> None:
    """Options that say where the media are."""
    group = parser.add_argument_group("what to pack (one of these at least)")
    for option, kind in (("--image_dir", "images"), ("--video_dir", "videos")):
        group.add_argument(
            option,
            type=Path,
            metavar="DIR",
            help=f"Folder of {kind}; it may have subfolders and uncompressed .tar files. Hidden"
            " files and linked folders are left out.",
        )
    group.add_argument(
        "--dataset_config",
        type=Path,
        metavar="FILE",
        help="YAML or TOML file that lists several folders, each with its own settings.",
    )
    group.add_argument(
        "--hf_dataset",
        "--dataset_name",
        type=local_text,
        metavar="DIR|ID",
        help="Hugging Face dataset: a folder on disk, or a name on the hub.",
    )
    group.add_argument(
        "--dataset_type",
        choices=("hf", "merged"),
        help="Kind of --dataset_path: hf, as for --hf_dataset; merged, a folder with videos/ and"
        " videos2caption.json.",
    )
    group.add_argument(
        "--dataset_path", type=local_text, metavar="PATH", help="See --dataset_type."
    )
    group.add_argument("--dataset_split", default="train", metavar="NAME", help="Default: train.")
    group.add_argument(
        "--image_column", metavar="NAME", help="Column of images: bytes, paths, URLs."
    )
    group.add_argument(
        "--video_column", metavar="NAME", help="Column of videos: bytes, paths, URLs."
    )
    group.add_argument("--caption_column", metavar="NAME", help="Column of captions.")
    group.add_argument(
        "--mask_dir",
        type=Path,
        metavar="DIR",
        help="Masks of the loss for --image_dir and --video_dir: pictures or videos at the same"
        " relative paths, of the same sizes, with any file ending. White counts fully, black not"
        " at all; a file without a mask counts fully. (--dataset_config: mask_path)",
    )
    group.add_argument(
        "--control_dir",
        action="append",
        type=Path,
        metavar="DIR",
        help="Control pictures for editing models: each file of --image_dir and --video_dir"
        " before the edit that its caption asks for, at the same relative path, with any file"
        " ending. Repeat it for a second picture of each. A file without its picture is"
        " refused. (--dataset_config: control_path; or a column control_path of a table of"
        " captions)",
    )
    group.add_argument(
        "--max_items",
        "--max_images",
        "--max_videos",
        type=at_least_one_argument,
        metavar="N",
        help="Pack only the first N files of the listing. (default: all)",
    )


def add_pictures(parser: ArgumentParser) -> None:
    """Options that decide the size of samples."""
    group = parser.add_argument_group("size")
    group.add_argument(
        "--bucketing",
        choices=("native", "aspect"),
        default="native",
        help="native keeps the size of each file, cropped to --size_multiple; aspect chooses the"
        " bucket within the pixel budget with the nearest aspect ratio. (default: %(default)s)",
    )
    group.add_argument(
        "--size_multiple",
        type=whole,
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
        type=whole,
        metavar="PIXELS",
        help="Pixel budget: larger media are scaled down to about it, to the size next to it whose"
        " whole patches are cropped least. (default: no limit;"
        " 256p for image and 512p for video with --bucketing aspect)",
    )
    group.add_argument(
        "--height",
        "--max_height",
        type=whole,
        metavar="PIXELS",
        help="With --width: every sample gets this size, scaled to cover it and cropped.",
    )
    group.add_argument("--width", "--max_width", type=whole, metavar="PIXELS", help="See --height.")
    group.add_argument(
        "--reference_size",
        choices=[str(choice) for choice in ReferenceFit],
        help="Size of control pictures: own, cropped to --size_multiple, within the same budget;"
        " target, that of the edited picture; published, that of the processor's pipeline (FLUX"
        " Kontext: its list of resolutions; Qwen-Image-Edit: a megapixel). (default: target)",
    )
    group.add_argument(
        "--resize_mode",
        choices=[str(mode) for mode in ResizeMode],
        default=str(ResizeMode.LANCZOS),
        help="Interpolation; all but nearest are antialiased. (default: %(default)s)",
    )
    group.add_argument(
        "--background",
        type=_colour,
        default=WHITE,
        metavar="COLOUR",
        help="Colour behind transparent parts of images, videos and control pictures: a name, such"
        " as black, or #rrggbb. The plan and the summary count the samples that have such parts."
        " (default: %(default)s)",
    )
    group.add_argument(
        "--center_crop",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Crop media to a bucket, or (no) stretch them to it. (default: crop)",
    )


def add_frames(parser: ArgumentParser) -> None:
    """Options that decide which frames of a video are kept."""
    group = parser.add_argument_group("frames of videos")
    group.add_argument(
        "--mode",
        type=lambda text: "video" if text == "preprocess" else text,  # FastVideo's word
        choices=("video", "frames"),
        default="video",
        help="video (or preprocess, FastVideo's word): a clip is a sample; frames: --num_frames"
        " evenly spaced frames of it are samples. (default: %(default)s)",
    )
    group.add_argument(
        "--target_frames",
        type=whole,
        metavar="N",
        help="Frames in a sample, at most; the processor's rule (4n+1, 8n+1) must allow it."
        " (default: the whole clip)",
    )
    group.add_argument(
        "--num_frames",
        type=whole,
        metavar="N",
        help="With --mode frames: frames of each clip (default: 10). Else the same as"
        " --target_frames.",
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
        help="Frames per second to take, by their times. (default: those of the file)",
    )
    group.add_argument(
        "--window",
        choices=[str(window) for window in Window],
        default=str(Window.FIRST),
        help="Which part of a longer clip is kept; all makes several samples."
        " (default: %(default)s)",
    )
    group.add_argument(
        "--drop_short",
        action="store_true",
        help="Refuse clips with fewer than --target_frames, instead of keeping as many frames as"
        " the rule allows.",
    )
    group.add_argument(
        "--video_loader_type",
        choices=("pyav", "torchcodec", "torchvision"),
        default="pyav",
        help="Video decoder: PyAV, which has its own FFmpeg, or torchcodec if it is installed;"
        " torchvision no longer decodes videos and means pyav. (default: %(default)s)",
    )


def add_captions(parser: ArgumentParser) -> None:
    """Options that say where captions are looked for."""
    group = parser.add_argument_group("captions", PRECEDENCE)
    group.add_argument(
        "--caption_field",
        default="caption",
        metavar="FIELD",
        help="Field of the caption in .json files and tables; '' ignores .json files beside media."
        " (default: %(default)s)",
    )
    group.add_argument(
        "--caption_format",
        choices=[str(choice) for choice in CaptionFormat],
        default=str(CaptionFormat.AUTO),
        help="Use only files beside the media, or only tables of one kind. (default: all)",
    )
    group.add_argument(
        "--missing_caption",
        choices=[str(choice) for choice in MissingCaption],
        help="For a file without a caption: take its name, with spaces for underscores; take"
        " the empty caption; or refuse it. (default: filename; empty in a TOML file of"
        " --dataset_config, as in diffusion-pipe)",
    )
    group.add_argument(
        "--several_captions",
        choices=[str(choice) for choice in SeveralCaptions],
        default=str(SeveralCaptions.ALL),
        help="For a file with several captions: a sample for each, the first, or one chosen by a"
        " hash of the file name. (default: %(default)s)",
    )


def add_models(parser: ArgumentParser) -> None:
    """Options of codecs and text encoders with weights: where these are and how they run."""
    group = parser.add_argument_group("models of processors and text encoders that have weights")
    group.add_argument(
        "--model_name",
        "--model_path",
        type=local_text,
        metavar="NAME|DIR",
        help="Hub name or folder, in the layout of Diffusers. (default: that of the processor)",
    )
    for option, what in (
        ("--vae_cache_folder", "codecs"),
        ("--t5_cache_dir", "text encoders"),
        ("--tokenizer_cache_dir", "tokenizers"),
    ):
        group.add_argument(
            option, type=Path, metavar="DIR", help=f"Where downloaded {what} are kept."
        )
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=PRECISIONS[0],
        help="Type of codec and text encoder. (default: %(default)s)",
    )
    group.add_argument(
        "--stochastic",
        action="store_true",
        help="Draw latents from the codec's distribution, seeded by the sample's key. (default:"
        " its mean)",
    )
    group.add_argument(
        "--deterministic", dest="stochastic", action="store_false", help="The default."
    )
    group.add_argument(
        "--workload_type",
        choices=("t2v", "i2v", "flf2v"),
        help="i2v adds the inputs of image-to-video models: first_frame_latent; condition_latent"
        " for Wan 2.1 and 2.2 A14B; image_embed if the model has an image encoder. flf2v (Wan) is"
        " the same for first and last frame. Text-to-video trains on the same shards."
        " (default: t2v; i2v with --processor hunyuanvideo_i2v)",
    )
    group.add_argument(
        "--verify",
        action="store_true",
        help="Decode each latent again, report its PSNR against the source, and check all checksums"
        " at the end.",
    )
    group.add_argument("--tiling", action="store_true", help="Encode in tiles, to save memory.")
    group.add_argument(
        "--slicing",
        action="store_true",
        help="Encode one sample of a batch at a time, to save memory.",
    )
    group.add_argument(
        "--max_sequence_length",
        type=at_least_one_argument,
        metavar="TOKENS",
        help="Cut longer captions, and count them. (default: the text encoder's; 4096 for bytes)",
    )
    group.add_argument(
        "--text_padding",
        choices=[str(choice) for choice in EncoderPadding],
        default=str(EncoderPadding.TRIM),
        help="For text encoders whose published networks attend to padding (flux, sd3): keep also"
        " stores the states of padding, for fine-tuning these networks; trim stores only those of"
        " the caption, for your own networks. convert recognises what a cache has."
        " (default: %(default)s)",
    )


def whole(text: str) -> int:
    """A whole number of at most 31 bits."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if abs(number) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text} is out of range; it must be below {2**31}")
    return number


def minutes(text: str) -> float:
    """Minutes, from 0 to a million."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes") from None
    if not 0 <= number <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} must lie in 0 to 1,000,000; 40 is usual")
    return number


def _colour(text: str) -> str:
    try:
        return colour(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no opaque colour; give a name, such as black, or #rrggbb"
        ) from None


def at_least_one_argument(text: str) -> int:
    if (number := whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(whole(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give whole numbers, such as 17,33,65"
        ) from None

"""The options of `image` and `video`: their types, defaults and help texts."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from data_prep.media.captions import PRECEDENCE, CaptionFormat, MissingCaption, SeveralCaptions
from data_prep.media.frame_selection import Window
from data_prep.media.resizing import PRESETS, ResizeMode
from data_prep.media.sounds import MissingAudio, SilentAudio
from dit.codecs.encoder_options import SOUND_CODEC_NAMES, EncoderPadding
from dit.codecs.pretrained import PRECISIONS
from dit.codecs.rgb import WHITE, ReferenceFit, colour
from dit.command_line import Whole, add_options, option, option_names, whole
from dit.local_path import LocalPath


def minutes(text: str) -> float:
    """Parses a number of minutes from 0 to a million; a `type` for argparse."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of minutes; give one such as 40"
        ) from None
    if not 0 <= number <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} must lie in 0 to 1,000,000 minutes, such as 40")
    return number


def sample_kind(text: str) -> str:
    """The value of --mode that `text` means; `preprocess`, FastVideo's word, means "video"."""
    return "video" if text == "preprocess" else text


def opaque(text: str) -> str:
    """Parses an opaque colour from its name or its levels; a `type` for argparse."""
    try:
        return colour(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an opaque colour; give a name, such as black, #rrggbb, or levels"
            " from 0 to 255, such as rgb(255,128,0)"
        ) from None


def at_least_one(text: str) -> int:
    """Parses a whole number of at least 1; a `type` for argparse."""
    if (number := whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; give a whole number of at least 1")
    return number


def integers(text: str) -> tuple[int, ...]:
    """Parses comma-separated whole numbers such as 17,33,65; a `type` for argparse."""
    try:
        return tuple(whole(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers; give one such as 17,33,65"
        ) from None


Minutes = Annotated[float, minutes]
Positive = Annotated[int, at_least_one]


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Options that name folders, tables and datasets of media."""

    image_dir: Path | None = option(None, metavar="DIR")
    """Folder of images; it may have subfolders and uncompressed .tar files. Hidden files and linked
    folders are left out."""
    video_dir: Path | None = option(None, metavar="DIR")
    """Folder of videos; it may have subfolders and uncompressed .tar files. Hidden files and linked
    folders are left out."""
    dataset_config: Path | None = option(None, metavar="FILE")
    """YAML or TOML file that lists several folders, each with its own settings."""
    hf_dataset: LocalPath | None = option(None, "--dataset_name", metavar="DIR|ID")
    """Hugging Face dataset: a folder on disk, or a name on the hub."""
    dataset_type: Literal["hf", "merged"] | None = None
    """Kind of --dataset_path: hf, as for --hf_dataset; merged, a folder with videos/ and
    videos2caption.json."""
    dataset_path: LocalPath | None = option(None, metavar="PATH")
    """Folder, or name on the hub, of the data that --dataset_type describes."""
    dataset_split: str = option("train", metavar="NAME")
    """Split of the Hugging Face dataset that is packed. (default: %(default)s)"""
    image_column: str | None = option(None, metavar="NAME")
    """Column of images: bytes, paths, URLs."""
    video_column: str | None = option(None, metavar="NAME")
    """Column of videos: bytes, paths, URLs."""
    caption_column: str | None = option(None, metavar="NAME")
    """Column of captions."""
    mask_dir: Path | None = option(None, metavar="DIR")
    """Loss masks for --image_dir and --video_dir: pictures or videos at the same relative paths, of
    the same sizes, with any file ending. White has weight 1, black weight 0; a file without a
    mask has weight 1 everywhere. (--dataset_config: mask_path)"""
    control_dir: tuple[Path, ...] | None = option(None, metavar="DIR")
    """Control pictures for editing models: for each file of --image_dir and --video_dir, the
    picture before the edit that its caption describes, at the same relative path, with any file
    ending; for a video, a picture or a video. Repeat the option for a second control of each
    file. A file without its control is refused. (--dataset_config: control_path; or a column
    control_path of a table of captions)"""
    rejected_dir: Path | None = option(None, metavar="DIR")
    """For preference pairs: the rejected sample of each file of --image_dir and --video_dir, at the
    same relative path, of the same size, with any file ending. A file without one is refused.
    (--dataset_config: rejected_path; or a column rejected_path of a table of captions)"""
    max_items: Positive | None = option(None, "--max_images", "--max_videos", metavar="N")
    """Pack only the first N files of the listing. (default: all)"""


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Options that decide the size of samples in pixels."""

    bucketing: Literal["native", "aspect"] = "native"
    """native keeps the size of each file, cropped to --size_multiple; aspect chooses the bucket
    within the pixel budget with the nearest aspect ratio. (default: %(default)s)"""
    size_multiple: Whole | None = option(None, metavar="PIXELS")
    """Each side is a multiple of this many pixels; media with a shorter side are refused. (default:
    two latent cells, one patch)"""
    resolution_preset: str | None = option(None, choices=tuple(PRESETS))
    """Pixel budget by name: 512p is 512 x 512 pixels."""
    max_pixels: Whole | None = option(None, metavar="PIXELS")
    """Pixel budget: larger media are scaled down to about this many pixels, to the nearby size
    whose whole patches crop least. (default: no limit; 256p for image and 512p for video with
    --bucketing aspect)"""
    height: Whole | None = option(None, "--max_height", metavar="PIXELS")
    """Height of every sample, with --width: media are scaled to cover this size, and cropped."""
    width: Whole | None = option(None, "--max_width", metavar="PIXELS")
    """Width of every sample; see --height."""
    reference_size: ReferenceFit | None = None
    """Size of control pictures: own, cropped to --size_multiple, within the same budget; target,
    that of the edited picture; published, that of the processor's pipeline (FLUX Kontext: its
    list of resolutions; Qwen-Image-Edit: a megapixel). (default: target)"""
    resize_mode: ResizeMode = ResizeMode.LANCZOS
    """Interpolation; all but nearest are antialiased. (default: %(default)s)"""
    background: Annotated[str, opaque] = option(WHITE, metavar="COLOUR")
    """Colour behind transparent areas of images, videos and control pictures: a name, such as
    black, or #rrggbb. The plan and the summary count the samples with transparency. (default:
    %(default)s)"""
    center_crop: bool = True
    """Crop media to a bucket, or (no) stretch them to it. (default: crop)"""


@dataclass(frozen=True, kw_only=True)
class FrameOptions:
    """Options that decide which frames of a video become a sample."""

    mode: Annotated[str, sample_kind] = option("video", choices=("video", "frames"))
    """video (or preprocess, FastVideo's word): a clip is a sample; frames: --num_frames evenly
    spaced frames of it are samples. (default: %(default)s)"""
    num_frames: Positive | None = option(None, metavar="N")
    """With --mode frames: frames of each clip (default: 10). Else the same as --target_frames."""
    target_frames: Whole | None = option(None, metavar="N")
    """Frames in a sample, at most; the processor's rule (4n+1, 8n+1) must allow it. (default: the
    whole clip)"""
    frame_buckets: Annotated[tuple[int, ...], integers] = option((), metavar="N,N,...")
    """Numbers of frames to choose from; a clip gets the largest it can fill."""
    train_fps: float | None = option(None, metavar="FPS")
    """Frame rate of the samples, in frames per second, by presentation time. (default: that of the
    file)"""
    window: Window = Window.FIRST
    """Part of a longer clip that becomes the sample; all makes several samples. (default:
    %(default)s)"""
    drop_short: bool = False
    """Refuse clips with fewer than --target_frames, instead of keeping as many frames as the rule
    allows."""


@dataclass(frozen=True, kw_only=True)
class SoundOptions:
    """Options of the sound of videos."""

    audio_processor: str | None = option(None, choices=SOUND_CODEC_NAMES)
    """Codec for the sound of videos, over the span of their frames. (default: shards hold no
    sound)"""
    missing_audio: MissingAudio = MissingAudio.NONE
    """For a video without a sound track that can be used: pack it without sound; with silence,
    which a network then learns; or refuse it. (default: %(default)s)"""
    silent: SilentAudio = SilentAudio.KEEP
    """Sound that is silent from beginning to end: keep it, or pack the clip without sound.
    (default: %(default)s)"""
    audio_track: Whole | None = option(None, metavar="N")
    """Sound track of files with several, from 0. (default: the one that the file calls its default,
    or the first)"""


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """The option for the library that decodes videos."""

    video_loader_type: Literal["pyav", "torchcodec", "torchvision"] = "pyav"
    """Video decoder: PyAV, which has its own FFmpeg, or torchcodec if installed; torchvision no
    longer decodes videos and selects pyav. (default: %(default)s)"""


@dataclass(frozen=True, kw_only=True)
class CaptionTextOptions:
    """Options that decide where captions are found."""

    caption_field: str = option("caption", metavar="FIELD")
    """Field of the caption in .json files and tables; '' ignores .json files beside media.
    (default: %(default)s)"""
    caption_format: CaptionFormat = CaptionFormat.AUTO
    """Read captions only from files beside the media, or only from tables of one kind. (default:
    all)"""
    missing_caption: MissingCaption | None = None
    """Caption of a file without one: its name, with spaces for underscores; the empty caption; or
    refuse the file. A null caption, and a dataset row without a caption, are refused unless this
    is empty. (default: filename; empty in a TOML file of --dataset_config, as in diffusion-pipe)"""
    several_captions: SeveralCaptions = SeveralCaptions.ALL
    """For a file with several captions: a sample for each, the first, or one chosen by a hash of
    the file name. (default: %(default)s)"""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of codecs and text encoders with weights: their folders, and how they run."""

    model_name: LocalPath | None = option(None, "--model_path", metavar="NAME|DIR")
    """Hub name or folder, in the layout of Diffusers. (default: that of the processor)"""
    vae_cache_folder: Path | None = option(None, metavar="DIR")
    """Cache folder for downloaded codecs."""
    t5_cache_dir: Path | None = option(None, metavar="DIR")
    """Cache folder for downloaded text encoders."""
    tokenizer_cache_dir: Path | None = option(None, metavar="DIR")
    """Cache folder for downloaded tokenizers."""
    precision: str = option(PRECISIONS[0], choices=PRECISIONS)
    """Dtype of codec and text encoder. (default: %(default)s)"""
    stochastic: bool = False
    """Sample latents from the codec's distribution, seeded by the sample's key. (default: its
    mean)"""
    latent_distribution: bool = False
    """Store mean and log variance of latents, bfloat16, so that training samples each latent anew
    at each visit. (default: one latent, float16)"""
    workload_type: Literal["t2v", "i2v", "flf2v"] | None = None
    """i2v adds the inputs of image-to-video models: first_frame_latent; condition_latent for Wan
    2.1 and 2.2 A14B; image_embed if the model has an image encoder. flf2v (Wan) is the same for
    first and last frame. Text-to-video trains on the same shards. (default: t2v; i2v with
    --processor hunyuanvideo_i2v)"""
    verify: bool = False
    """Decode each latent again, report its PSNR against the source, and check all checksums at the
    end."""
    tiling: bool = False
    """Encode in tiles, to save memory."""
    slicing: bool = False
    """Encode one sample of a batch at a time, to save memory."""
    max_sequence_length: Positive | None = option(None, metavar="TOKENS")
    """Tokens to which longer captions are cut, and counted. (default: the text encoder's limit;
    4096 for bytes)"""
    text_padding: EncoderPadding = EncoderPadding.TRIM
    """For text encoders whose published networks attend to padding (flux, sd3): keep also stores
    the hidden states of padding, for fine-tuning these networks; trim stores only those of the
    caption, for networks trained from scratch. convert recognises the kind in a cache. (default:
    %(default)s)"""


# Options that change the samples, too, but did not exist in earlier versions. The settings of a
# dataset contain them only where they differ from their default, as in earlier versions.
LATER_SETTINGS = ("reference_size", "background", *option_names(SoundOptions))
_OF_SAMPLES = (SizeOptions, FrameOptions, CaptionTextOptions, DecoderOptions)
SETTINGS = tuple(name for name in option_names(*_OF_SAMPLES) if name not in LATER_SETTINGS)
"""Names of the options that change the samples, without paths, which differ between machines."""


def add_media(parser: ArgumentParser) -> None:
    """Adds the options for sizes, frames, sound and captions to `parser`."""
    add_options(parser.add_argument_group("size"), SizeOptions)
    add_options(parser.add_argument_group("frames of videos"), FrameOptions, DecoderOptions)
    add_options(parser.add_argument_group("sound of videos"), SoundOptions)
    add_options(parser.add_argument_group("captions", PRECEDENCE), CaptionTextOptions)


def add_models(parser: ArgumentParser) -> None:
    """Adds the options of codecs and text encoders that have weights to `parser`."""
    group = parser.add_argument_group("models of processors and text encoders that have weights")
    add_options(group, ModelOptions)
    group.add_argument(
        "--deterministic", dest="stochastic", action="store_false", help="The default."
    )

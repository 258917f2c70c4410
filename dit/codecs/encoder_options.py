"""Command-line options of codecs and text encoders; this file does not import torch.

Options of a single codec or encoder are fields of a dataclass. The keys of the tables OF_CODECS,
OF_SOUND_CODECS and OF_TEXT_ENCODERS are titles of groups of options in the help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dit.command_line import option
from dit.local_path import LocalPath

SOUND_CODEC_NAMES = ("wave", "ltx2")
"""The keys of `dit.codecs.sound.SOUND_CODECS`."""


class EncoderPadding(StrEnum):
    """What is stored of the hidden states of padding, for text encoders without a mask."""

    TRIM = "trim"  # cut off: an embedding is as long as its caption
    KEEP = "keep"  # stored, as the published networks attend to them


class Basis(StrEnum):
    """What the channels of a latent cell of the codec `pixel` hold."""

    PIXELS = "pixels"  # its pixels, each whitened
    DCT = "dct"  # its frequencies, each divided by the root of its deviation


@dataclass(frozen=True, kw_only=True)
class PixelOptions:
    """Options of the codec `pixel`, which has no weights."""

    pixel_block: int = option(4, metavar="PIXELS")
    """Side, in pixels, of the square that becomes one latent cell. (default: %(default)s)"""
    pixel_channels: int = option(3, metavar="CHANNELS")
    """Colour channels kept: 3 for RGB, 1 for grey. (default: %(default)s)"""
    pixel_basis: Basis = Basis.DCT
    """Channels of a latent cell: its frequencies, which make cleaner pictures, or its pixels.
    (default: %(default)s)"""


@dataclass(frozen=True, kw_only=True)
class WaveOptions:
    """Options of the sound codec `wave`, which has no weights."""

    wave_rate: int = option(16_000, metavar="HZ")
    """Sampling rate in samples per second; sound of other rates is resampled. (default:
    %(default)s)"""
    wave_channels: int = option(1, metavar="CHANNELS")
    """Channels: 1 for mono, 2 for stereo. (default: %(default)s)"""
    wave_frame: int = option(160, metavar="SAMPLES")
    """Samples of each channel in one latent frame. (default: %(default)s)"""


@dataclass(frozen=True, kw_only=True)
class VectorOptions:
    """Options of the text encoders `words` and `bytes`, which have no weights."""

    text_width: int | None = option(None, metavar="NUMBERS")
    """Width of a caption's embedding. (default: 256 for words, 64 for bytes)"""
    pooled_text: bool = False
    """Also store pooled_text, the sum over a caption, which FLUX reads."""


@dataclass(frozen=True, kw_only=True)
class ProjectionOptions:
    """Options of the text encoder of Cosmos-Predict2.5."""

    text_projection: Path | None = option(None, metavar="DIR")
    """Diffusers folder of a Cosmos-Predict2.5 transformer: store the outputs of its crossattn_proj,
    1,024 numbers a token instead of 100,352, for training with this projection frozen. (default:
    the hidden states of all layers)"""


@dataclass(frozen=True, kw_only=True)
class FirstFrameOptions:
    """Options of the text encoder of HunyuanVideo that sees the first frame."""

    image_embed_interleave: int | None = option(None, choices=range(1, 6), metavar="N")
    """Keep the first of each N of the 576 rows that Llava makes of a first frame. (default: as the
    pipeline of the folder, by its transformer/config.json: 4 with token_replace, 2 with
    latent_concat)"""


@dataclass(frozen=True, kw_only=True)
class LlamaOptions:
    """Options of the text encoder of HiDream-I1, one of whose models is Llama."""

    llama_model: LocalPath | None = option(None, metavar="NAME|DIR")
    """Folder or hub model of Llama 3.1, if the pipeline has no text_encoder_4. (default:
    meta-llama/Llama-3.1-8B-Instruct)"""


OF_CODECS: Mapping[str, Any] = {"processor pixel": PixelOptions}
"""The options of codecs, by the title of their group in the help."""
OF_SOUND_CODECS: Mapping[str, Any] = {"audio processor wave": WaveOptions}
"""The options of sound codecs, by the title of their group in the help."""
OF_TEXT_ENCODERS: Mapping[str, Any] = {
    "text encoders words and bytes": VectorOptions,
    "text encoder cosmos_predict25": ProjectionOptions,
    "text encoder hunyuanvideo_i2v": FirstFrameOptions,
    "text encoder hidream": LlamaOptions,
}

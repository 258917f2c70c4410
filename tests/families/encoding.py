"""Codecs and text encoders on a folder in Diffusers' layout, as the command line opens them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from dit.codecs import text, vae

_UNSET = ("workload_type", "vae_cache_folder", "t5_cache_dir", "tokenizer_cache_dir")
_USUAL = {
    **dict.fromkeys((*_UNSET, "max_sequence_length", "text_projection")),
    **dict.fromkeys(("stochastic", "tiling", "slicing", "latent_distribution"), False),
    "precision": "float32",
}


def codec(name: str, folder: Path, **options: Any) -> Any:
    arguments = Namespace(**{**_USUAL, "model_name": str(folder), **options})
    return vae.codec_named(name).from_arguments(arguments)


def encoder(name: str, folder: Path, **options: Any) -> Any:
    arguments = Namespace(**{**_USUAL, "model_name": str(folder), **options})
    return text.text_encoder_named(name).from_arguments(arguments)


def check_card(encoder: Any) -> None:
    """Its settings in a dataset card make the same again, and the codec of its name wants it."""
    card = {"format_version": 1, "text_encoder": encoder.settings}
    assert text.text_encoder_of_card(card) == encoder
    assert vae.codec_named(encoder.name).text_encoder == encoder.name

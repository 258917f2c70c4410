"""The dataset card that stands for a pipeline of Diffusers.

An imported checkpoint was trained on no dataset of ours, so that nothing beside it names its text
encoder and its VAE.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dit.codecs.dataset_card import FORMAT_VERSION, CodecError
from dit.codecs.text import TEXT_ENCODERS
from dit.codecs.vae import CODECS
from dit.parsing import parse_json

_PRECISION = {"text_encoder": "bfloat16", "vae": "float32"}  # as the pages of pipelines open them


def card_of_pipeline(folder: Path) -> dict[str, Any]:
    """The card of data that were encoded with the text encoder and the VAE of a pipeline folder.

    Raises:
        CodecError: the folder has none of the two, or there is no codec with both.
    """
    vae = _config(folder, "vae").get("_class_name")
    (text, *_) = _config(folder, "text_encoder").get("architectures") or [None]
    for codec in CODECS.values():
        encoder = TEXT_ENCODERS.get(getattr(codec, "text_encoder", ""))
        if vae == getattr(codec, "vae", None) and text == getattr(encoder, "network", None):
            break
    else:
        raise CodecError(
            f"{folder} has a VAE of class {vae} and a text encoder of class {text}, which no"
            f" processor has; known are {', '.join(CODECS)}"
        )
    where = {"model_name": str(folder)}
    made = codec.from_settings(
        {
            **where,
            "precision": _PRECISION["vae"],
            "stochastic": False,
            "image_conditioning": False,
        }
    )
    reads: Any = encoder
    length = {"max_length": reads.default_length, "precision": _PRECISION["text_encoder"]}
    return {
        "format_version": FORMAT_VERSION,
        "processor": {"name": made.name, **made.settings},
        "text_encoder": reads.from_settings(where | length).settings,
        "latent": {
            "channels": made.channels,
            "stride": made.stride,
            "temporal_stride": made.temporal_stride,
            "mean": made.whitening.mean,
            "std": made.whitening.std,
        },
    }


def _config(folder: Path, part: str) -> dict[str, Any]:
    file = folder / part / "config.json"
    try:
        content = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CodecError(
            f"{file} cannot be read ({error}); give the folder of a whole pipeline"
        ) from error
    return content if isinstance(content, dict) else {}

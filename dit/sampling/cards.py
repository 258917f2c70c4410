"""Opens the decoder and text encoder that a dataset card names, or makes a card for a pipeline.

An imported checkpoint has no dataset, so only the card of a Diffusers pipeline names its text
encoder and VAE.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dit.codecs import text, vae
from dit.codecs.dataset_card import FORMAT_VERSION, CodecError
from dit.codecs.dataset_encoder import unused_places
from dit.codecs.encoder_options import EncoderPadding
from dit.codecs.pretrained import ModelLocation
from dit.codecs.sound import sound_in_card
from dit.codecs.sound.ltx2 import Ltx2Sound
from dit.codecs.text import TextEncoder
from dit.codecs.vae import Codec
from dit.distributed.entry import say_notice
from dit.distributed.process_groups import device
from dit.parsing import parse_json
from dit.system_errors import explained

_PRECISION = {"text_encoder": "bfloat16", "vae": "float32"}  # as in the documentation of pipelines


def decoder_of_card(card: dict[str, Any], model: str | None, cache: str | None) -> Codec:
    """The decoder (VAE) that a dataset card names, on the GPU if there is one.

    `model` (a hub name or folder) and `cache` say where its weights are now; None: as in the card.
    If the decoder has no weights, a notice says that `model` or `cache` has no effect.

    Raises:
        ValueError: the decoder cannot be opened.
    """
    decoder = vae.codec_of_card(card, ModelLocation(model=model, cache=cache)).on(str(device()))
    given = {"--tokenizer_model": model, "--tokenizer_cache_dir": cache}
    for sentence in unused_places(decoder, given):
        say_notice(sentence)
    return decoder


def encoder_of_card(card: dict[str, Any], cache: str | None) -> TextEncoder:
    """The text encoder that a dataset card names, on the CPU.

    `cache` is a Hugging Face cache or a pipeline folder with its weights; None: as in the card. If
    the encoder has no weights, a notice says that `cache` has no effect.

    Raises:
        CodecError: the encoder cannot be opened.
    """
    encoder = text.text_encoder_of_card(card, ModelLocation(cache=cache))
    for sentence in unused_places(encoder, {"--t5_cache_dir": cache}):
        say_notice(sentence)
    return encoder


def card_of_pipeline(
    folder: Path, *, processor: str | None = None, stored_padding: bool = False
) -> dict[str, Any]:
    """A dataset card for the text encoder, the VAE and any audio VAE in the pipeline `folder`.

    If several processors match, the card names `processor` if it is one of them, else the first.
    With `stored_padding` the card says that texts include the encoder's hidden states of padding.

    Raises:
        CodecError: the folder has no VAE or text encoder; no processor has both; or its text
            encoder reads first frames and that of `processor` does not, or the other way round.
    """
    found = _config(folder, "vae").get("_class_name")
    for codec in sorted(vae.CODECS.values(), key=lambda one: one.name != processor):
        encoder = text.TEXT_ENCODERS.get(codec.text_encoder)
        if found == getattr(codec, "vae", None) and encoder and _has(folder, encoder):
            break
    else:
        architecture = _architecture(folder, "text_encoder")
        raise CodecError(
            f"{folder} has a VAE of class {found} and a text encoder of class {architecture}, which"
            f" belong to no processor ({', '.join(vae.CODECS)}); name the folder of the pipeline"
            " that the network was trained for"
        )
    _check_sees_as_much(encoder, processor, folder)
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
    if stored_padding:
        length["padding"] = str(EncoderPadding.KEEP)
    heard = Ltx2Sound(model_name=str(folder)) if (folder / Ltx2Sound.subfolder).is_dir() else None
    return {
        "format_version": FORMAT_VERSION,
        "processor": {"name": made.name, **made.settings},
        **sound_in_card(heard),
        "text_encoder": reads.from_settings(where | length).settings,
        "latent": {
            "channels": made.channels,
            "stride": made.stride,
            "temporal_stride": made.temporal_stride,
            "mean": made.whitening.mean,
            "std": made.whitening.std,
        },
    }


def _check_sees_as_much(encoder: type[TextEncoder], processor: str | None, folder: Path) -> None:
    """Checks that `encoder` reads first frames exactly if the encoder of `processor` does.

    Raises:
        CodecError: only one of them does.
    """
    if processor is None or processor not in vae.CODECS:
        return
    wanted = text.TEXT_ENCODERS[vae.CODECS[processor].text_encoder]
    if wanted.sees_first_frame is not encoder.sees_first_frame:
        sees = "sees" if encoder.sees_first_frame else "does not see"
        raise CodecError(
            f"{folder}: its text encoder is that of {encoder.name}, which {sees} a first frame, but"
            f" the network reads texts of {wanted.name}; give the folder of the network's own"
            " pipeline"
        )


def _has(folder: Path, encoder: type[TextEncoder]) -> bool:
    (part, _) = getattr(encoder, "subfolders", ("text_encoder", ""))
    exists = (folder / part).is_dir()
    known = getattr(encoder, "networks", (getattr(encoder, "network", None),))
    return exists and _architecture(folder, part) in known


def _architecture(folder: Path, part: str) -> str | None:
    (found, *_) = _config(folder, part).get("architectures") or [None]
    return found


def _config(folder: Path, part: str) -> dict[str, Any]:
    file = folder / part / "config.json"
    try:
        content = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CodecError(
            f"{file} cannot be read ({explained(error)}); give the folder of a complete Diffusers"
            " pipeline"
        ) from error
    return content if isinstance(content, dict) else {}

"""Turns the prompts of a file, with their pictures, into requests for each validation.

1. check_prompts       the pictures of prompts, checked before anything is encoded
2. _encode             texts, together with pictures that the encoder reads
3. _request_of_prompt  pictures, encoded by the VAE at the size of the sample
"""

# L text tokens, E text width; F H W 3 frames, rows, columns, colours

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dit.codecs import text, vae
from dit.codecs.pretrained import forget
from dit.codecs.rgb import ReferenceFit
from dit.codecs.text import TextEncoder
from dit.codecs.vae import Codec, ModelLocation, usual_size
from dit.config import ModelConfig, RunConfig, ValidationConfig
from dit.distributed.process_groups import device
from dit.distributed.watchdog import heartbeat
from dit.models.registry import family_of
from dit.sampling.conditions.sound import SoundRequest, sound_frames
from dit.sampling.generate import Request
from dit.sampling.given_pictures import OF_VALIDATION, GivenPictures, PromptTexts
from dit.sampling.latent_sizes import LatentStride, Size
from dit.sampling.prompts import Prompt
from dit.sampling.validation.requests import PreparedPrompts, Texts, ValidationRequest
from dit.train.train_state import TrainState


class _OfData(Protocol):
    """What these functions read of a training run, or of a dry run in its place."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def card(self) -> dict[str, Any] | None: ...


def prepare_prompts(run: TrainState, prompts: Sequence[Prompt]) -> PreparedPrompts:
    """Encodes all prompts with their pictures, and looks for the decoder of the data.

    Raises:
        ValueError: the text encoder of the data, a size or a picture is missing.
    """
    given = check_prompts(run, prompts)
    alone, texts = _encode(prompts, given, run)
    decoder, note = find_decoder(run)
    stride = latent_stride(decoder, run, needed=bool(prompts))
    found = PreparedPrompts(inputs=alone, latent_stride=stride, note=note)
    requests = [
        _request_of_prompt(*each, run=run, found=found, decoder=decoder)
        for each in zip(prompts, texts, given, strict=True)
    ]
    return replace(found, requests=requests)


def check_prompts(run: _OfData, prompts: Sequence[Prompt]) -> list[GivenPictures]:
    """The pictures of each prompt, after sizes and pictures were checked.

    Raises:
        ValueError: the data do not name their text encoder, or a size or a picture is missing.
    """
    if (asked := _asked(run.config.validation)) and run.card is None:
        raise ValueError(
            f"{asked}: {run.config.dataset.path} has no dataset_card.json that names the text"
            " encoder of the data; pack it with `python -m data_prep`, or use only"
            " validation.num_captions, which needs no text encoder"
        )
    return [_given(prompt, run) for prompt in prompts]


def _given(prompt: Prompt, run: _OfData) -> GivenPictures:
    """The pictures of a prompt, after checks that they can be read and that the network takes them.

    Raises:
        ValueError: a picture is missing, damaged or too many.
    """
    model, (frames, height, width) = run.config.model, _size(prompt, run)
    if given := prompt.frames_of or prompt.sound_of:
        raise ValueError(
            f"{prompt.place}: {given}: only generate_dit.py can take frames or sound from a file;"
            " leave frames_path and sound_path out of validation.prompts_file"
        )
    # References are scaled as in the data; data_prep wrote into the card how.
    size = ((run.card or {}).get("settings") or {}).get("reference_size", ReferenceFit.TARGET)
    given = GivenPictures(
        first=prompt.image,
        last=prompt.last_image,
        references=prompt.references,
        reference_size=size,
        options=OF_VALIDATION.of(prompt),
    )
    given.check(family_of(model).inputs(model), frames=frames)
    given.shown(height, width)
    return given


def check_encoder(run: _OfData, given: Sequence[GivenPictures]) -> None:
    """Checks that the text encoder of the data is on this machine, without loading its weights.

    Raises:
        ValueError: the encoder is not on this machine, is another one than the network reads, or
            needs pictures that are missing.
    """
    if asked := _asked(run.config.validation):
        encoder = _checked_encoder(run, given)
        with _encoder_is_here(asked):
            encoder.is_cut("")


def _checked_encoder(run: _OfData, given: Sequence[GivenPictures]) -> TextEncoder:
    """The text encoder of the data, which is not loaded yet.

    Raises:
        ValueError: the encoder is not on this machine, is another one than the network reads, or
            needs pictures that are missing.
    """
    assert run.card is not None
    c, asked = run.config, _asked(run.config.validation)
    with _encoder_is_here(asked):
        place = ModelLocation(cache=c.validation.t5_cache_dir, local_only=True)
        encoder = text.text_encoder_of_card(run.card, place)
        width = encoder.width
    if width != c.model.crossattn_emb_size:
        raise ValueError(
            f"{asked}: the text encoder {encoder.name} of the data makes rows of {width} numbers,"
            f" but model.crossattn_emb_size={c.model.crossattn_emb_size}; use the text encoder that"
            " the data of the run were packed with"
        )
    _check_pictures(encoder, given, c.validation)
    return encoder


def _asked(validation: ValidationConfig) -> str:
    asking = {
        "prompts_file": validation.prompts_file,
        "negative_prompt": validation.negative_prompt,
    }
    return " and ".join(f"validation.{name}={value}" for name, value in asking.items() if value)


def _negative(prompt: Prompt, validation: ValidationConfig) -> str:
    return validation.negative_prompt if prompt.negative is None else prompt.negative


def _encode(
    prompts: Sequence[Prompt], given: Sequence[GivenPictures], run: TrainState
) -> tuple[Texts, list[PromptTexts]]:
    """Encodes the texts of all prompts.

    The first value has the tensors of the empty text and of negative prompts, encoded without
    pictures, by text. The second value has both texts of each prompt. If no option needs the text
    encoder, the first value has only the run's null text, and the second is empty. Otherwise all
    models that this process has loaded are forgotten at the end.

    Raises:
        ValueError: the text encoder of the data is not on this machine, or needs pictures that are
            missing.
    """
    c = run.config
    common, asked = c.validation.negative_prompt, _asked(c.validation)
    negatives: dict[str, Mapping[str, Tensor]] = {"": {n: v.cpu() for n, v in run.null.items()}}
    if not asked:
        return negatives, []
    captions = dict(negatives)

    def without_picture(word: str, negative: bool) -> Mapping[str, Tensor]:
        found = negatives if negative else captions
        if word not in found:
            heartbeat("encoding of prompts")
            found[word] = (encoder.encode_negative if negative else encoder.encode_all)(word)
        return found[word]

    words = [(prompt.text, _negative(prompt, c.validation)) for prompt in prompts]
    try:
        encoder = _checked_encoder(run, given)
        each = list[PromptTexts]()
        with _encoder_is_here(asked):
            if encoder.reads_alone:
                without_picture(common, True)
            for pair, pictures in zip(words, given, strict=True):
                heartbeat("encoding of prompts")
                each.append(pictures.texts(encoder, pair, alone=without_picture))
        return negatives, each
    finally:
        forget()


@contextmanager
def _encoder_is_here(asked: str) -> Iterator[None]:
    """Adds to a ValueError inside the context how to make the text encoder available.

    `asked` names the options that need it.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{asked}: the text encoder of the data is not on this machine ({error}); set"
            " validation.t5_cache_dir to the Hugging Face cache or pipeline folder that has it, or"
            " use only validation.num_captions, which needs no text encoder"
        ) from error


def _check_pictures(
    encoder: TextEncoder, given: Sequence[GivenPictures], validation: ValidationConfig
) -> None:
    """Checks that the pictures that the text encoder reads with a text are given.

    Raises:
        ValueError: a picture is missing; the message names the prompt, or the option that needs it.
    """
    for pictures in given:
        pictures.check_seen_by(encoder)
    if encoder.most_pictures and validation.negative_prompt and validation.num_captions:
        raise ValueError(
            f"validation.negative_prompt={validation.negative_prompt}: the text encoder"
            f" {encoder.name} of the data encodes it together with the pictures to edit, which are"
            f" unknown for validation.num_captions={validation.num_captions} held-out samples;"
            " leave one of the two keys out, or give negative_prompt with each prompt of"
            " validation.prompts_file"
        )


def find_decoder(run: _OfData) -> tuple[Codec | None, str]:
    """(decoder of the data, ""); or (None, why there is none) if it is not on this machine."""
    named = (run.card or {}).get("processor")
    if run.card is None or not isinstance(named, dict):
        return None, "latents in false colours, because the data name no decoder"
    cache = run.config.model.vae_cache_folder
    try:
        decoder = vae.codec_of_card(run.card, ModelLocation(cache=cache, local_only=True))
        with decoder.visiting(torch.device("cpu")):
            return decoder, ""
    except ValueError:
        name = named.get("model_name", named.get("name"))
        return None, (
            f"latents in false colours, because the decoder {name} is not on this machine; set"
            " model.vae_cache_folder to the Hugging Face cache or pipeline folder that has it"
        )


def latent_stride(decoder: Codec | None, run: _OfData, *, needed: bool) -> LatentStride | None:
    """The size of a latent cell, from the decoder or the dataset card.

    Returns None if neither has it and it is not needed.

    Raises:
        ValueError: the size is needed, and neither has it.
    """
    model, latent = run.config.model, (run.card or {}).get("latent", {})
    if decoder is not None:
        return LatentStride.of(decoder, model)
    if "stride" in latent:
        return LatentStride(
            stride=latent["stride"],
            temporal_stride=latent["temporal_stride"],
            side_cells=model.side_cells,
            patch_temporal=model.patch_temporal,
        )
    if needed:
        raise ValueError(
            "validation.prompts_file: the size of a latent is unknown, as the decoder is not on"
            " this machine and the dataset card is of an older version; set"
            " model.vae_cache_folder to the folder of the decoder, or pack the data again"
        )
    return None


def _request_of_prompt(
    prompt: Prompt,
    texts: PromptTexts,
    given: GivenPictures,
    *,
    run: TrainState,
    found: PreparedPrompts,
    decoder: Codec | None,
) -> ValidationRequest:
    stride, c = found.latent_stride, run.config
    assert stride is not None
    pixels = _size(prompt, run)
    latent = stride.latent(pixels)
    made = _inputs(given, decoder, c.model, stride, size=stride.pixels(latent))
    negative = _negative(prompt, c.validation)
    heard = sound_frames(c.model, frames=pixels[0], fps=c.validation.fps)
    request = Request(
        inputs={**texts.prompt, **made},
        negative=texts.negative,
        latent_FHW=latent,
        fps=math.nan if pixels[0] == 1 else c.validation.fps,
        seed=0,
        sound=SoundRequest(frames=heard) if heard else None,
    )
    return ValidationRequest(
        prompt=prompt.text,
        negative=negative,
        request=request,
        pixels=pixels,
        given_HW3=given.shown(*pixels[1:]),
        pictures=_files(given),
    )


def _inputs(
    given: GivenPictures,
    decoder: Codec | None,
    model: ModelConfig,
    stride: LatentStride,
    *,
    size: Size,
) -> dict[str, Tensor]:
    """The network's inputs from pictures; the VAE is on the run's device while it encodes.

    `size` is that of the sample in pixels.
    """
    wanted, multiple = family_of(model).inputs(model), stride.stride * stride.side_cells
    with ExitStack() as visit:
        if decoder is not None and (given.first or given.references):
            heartbeat("encoding of the pictures of prompts")
            visit.enter_context(decoder.visiting(device()))
        return given.inputs(decoder, wanted, size=size, multiple=multiple)


def _files(given: GivenPictures) -> dict[str, Any]:
    each = {"image": given.first, "last_image": given.last, "reference": list(given.references)}
    return {name: file for name, file in each.items() if file}


def _size(prompt: Prompt, run: _OfData) -> Size:
    """Frames, rows and columns, in pixels, of the sample for `prompt`.

    Raises:
        ValueError: neither the prompt nor the options nor the data determine the size.
    """
    assert run.card is not None
    sizes: dict[str, Any] = prompt.size(run.config.validation, usual_size(run.card))
    missing = [f"validation.{name}" for name, value in sizes.items() if not value]
    if missing:
        raise ValueError(f"set {', '.join(missing)}: the dataset card lists no sizes")
    return sizes["num_video_frames"], sizes["height"], sizes["width"]

"""The samples that each validation generates, prepared once before training.

1. prepare_prompts       first rank: is there a decoder; prompts and pictures -> requests
2. requests_of_captions  captions and inputs of held-out samples -> `ValidationRequest`s
"""

# L text tokens, E text width; F H W frames, rows, columns of a latent

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dit.batch import TEXT, PackedBatch
from dit.codecs import text, vae
from dit.codecs.pretrained import forget
from dit.codecs.vae import Codec, ModelLocation
from dit.config import ModelConfig, RunConfig
from dit.data.pack import PatchLayout
from dit.distributed.process_groups import device
from dit.distributed.watchdog import heartbeat
from dit.models.family import InputKind, SampleInput, family_of
from dit.objectives import own_null_texts
from dit.sampling.generate import Request
from dit.sampling.given_pictures import OF_VALIDATION, GivenPictures
from dit.sampling.latent_sizes import LatentStride, Size, rounding
from dit.sampling.prompts import Prompt, unguided
from dit.sampling.unpatchify import sample_inputs, unpatchify
from dit.train.train_state import TrainState

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ValidationRequest:
    """One sample that every validation generates."""

    prompt: str
    negative: str  # negative prompt; the request has its embedding
    request: Request
    pixels: Size | None  # the decoded video is cut to this size; None keeps all
    real_D: Tensor | None = None  # features of the held-out sample with this caption
    given_HW3: np.ndarray | None = None  # uint8, the picture that its prompt begins with
    pictures: Mapping[str, str] = field(default_factory=dict)  # files, for samples.json


@dataclass(frozen=True, kw_only=True)
class PreparedPrompts:
    """What the first rank finds out about text encoder and decoder, for all ranks."""

    # What the encoder makes of each text: prompts, negative prompts, the empty prompt
    inputs: dict[str, Mapping[str, Tensor]]
    latent_stride: LatentStride | None
    note: str  # why there is no decoder; empty where there is one
    requests: list[ValidationRequest] = field(default_factory=list)  # of the prompts, in order


def prepare_prompts(run: TrainState, prompts: Sequence[Prompt]) -> PreparedPrompts:
    """Encodes all prompts with their pictures, and looks for the decoder.

    Raises:
        ValueError: the text encoder of the data, a size or a picture is missing.
    """
    c, card = run.config, run.card
    words = [c.validation.negative_prompt]
    for prompt in prompts:
        words += [prompt.text, _negative(prompt, c)]
    null = {name: value.cpu() for name, value in run.null.items()}
    inputs = {"": null} | _encode([w for w in dict.fromkeys(words) if w], run)
    decoder, note = find_decoder(run)
    stride = _latent_stride(decoder, card, c)
    found = PreparedPrompts(inputs=inputs, latent_stride=stride, note=note)
    requests = [_request_of_prompt(prompt, run, found, decoder) for prompt in prompts]
    return replace(found, requests=requests)


def _negative(prompt: Prompt, config: RunConfig) -> str:
    """The negative prompt of a prompt, else that of the configuration."""
    return config.validation.negative_prompt if prompt.negative is None else prompt.negative


def _encode(words: Sequence[str], run: TrainState) -> dict[str, Mapping[str, Tensor]]:
    """What the encoder makes of each text.

    Raises:
        ValueError: the data do not name their encoder, or it is not on this machine.
    """
    c, card = run.config, run.card
    if not words:
        return {}
    asking = {
        "prompts_file": c.validation.prompts_file,
        "negative_prompt": c.validation.negative_prompt,
    }
    asked = " and ".join(f"validation.{name}={value}" for name, value in asking.items() if value)
    if card is None:
        raise ValueError(
            f"{asked}: {c.dataset.path} has no dataset_card.json that names the text encoder of the"
            " data; pack it with `python -m data_prep`, or leave that unset and use"
            " validation.num_captions, which needs none"
        )
    try:
        place = ModelLocation(cache=c.validation.t5_cache_dir, local_only=True)
        encoder, inputs = text.text_encoder_of_card(card, place), {}
        for word in () if encoder.most_pictures else words:
            heartbeat("encoding of prompts")
            inputs[word] = encoder.encode_all(word)
    except ValueError as error:
        raise ValueError(
            f"{asked}: the text encoder of the data is not here ({error}); set"
            " validation.t5_cache_dir to the Hugging Face cache or pipeline folder that has it, or"
            " leave that unset and use validation.num_captions, which needs none"
        ) from error
    finally:
        forget()
    if not inputs:
        raise ValueError(
            f"{asked}: the text encoder {encoder.name} of the data sees the pictures to edit beside"
            " a caption, and there are none here; leave that unset and use validation.num_captions,"
            " whose samples have theirs"
        )
    return inputs


def find_decoder(run: TrainState) -> tuple[Codec | None, str]:
    """The decoder with its weights, or a text that says why there is none."""
    named = (run.card or {}).get("processor")
    if run.card is None or not isinstance(named, dict):
        return None, "the data name no decoder: latents, in false colours"
    cache = run.config.model.vae_cache_folder
    try:
        decoder = vae.codec_of_card(run.card, ModelLocation(cache=cache, local_only=True))
        with decoder.visiting(torch.device("cpu")):
            return decoder, ""
    except ValueError:
        name = named.get("model_name", named.get("name"))
        return None, (
            f"latents, in false colours, for the decoder {name} is not on this machine; set"
            " model.vae_cache_folder to the Hugging Face cache or pipeline folder that has it"
        )


def _latent_stride(decoder: Codec | None, card: Any, config: RunConfig) -> LatentStride | None:
    if decoder is not None:
        return LatentStride.of(decoder, config.model)
    latent = (card or {}).get("latent", {})
    if "stride" not in latent:
        return None
    return LatentStride(
        stride=latent["stride"],
        temporal_stride=latent["temporal_stride"],
        patch_spatial=config.model.patch_spatial,
        patch_temporal=config.model.patch_temporal,
    )


def _request_of_prompt(
    prompt: Prompt, run: TrainState, found: PreparedPrompts, decoder: Codec | None
) -> ValidationRequest:
    stride, c = found.latent_stride, run.config
    if stride is None:
        raise ValueError(
            "validation.prompts_file: the size of a latent is unknown, for the decoder is not on"
            " this machine and the dataset card is of an older version; set model.vae_cache_folder"
        )
    pixels = _size(prompt, run)
    latent = stride.latent(pixels)
    given = GivenPictures(first=prompt.image, last=prompt.last_image, options=OF_VALIDATION)
    inputs = family_of(c.model).inputs(c.model)
    given.check(inputs, frames=pixels[0])
    made = _picture_inputs(given, decoder, inputs, size=stride.pixels(latent))
    negative = _negative(prompt, c)
    request = Request(
        inputs={**found.inputs[prompt.text], **made},
        negative=found.inputs[negative],
        latent_FHW=latent,
        fps=math.nan if pixels[0] == 1 else c.validation.fps,
        seed=0,
    )
    files = {"image": prompt.image, "last_image": prompt.last_image}
    return ValidationRequest(
        prompt=prompt.text,
        negative=negative,
        request=request,
        pixels=pixels,
        given_HW3=given.shown(*pixels[1:]),
        pictures={name: file for name, file in files.items() if file is not None},
    )


def _picture_inputs(
    given: GivenPictures, decoder: Codec | None, inputs: Sequence[SampleInput], *, size: Size
) -> dict[str, Tensor]:
    """As `GivenPictures.inputs`, with the VAE on the device of the run while it encodes."""
    if given.first is None or decoder is None:
        return given.inputs(decoder, inputs, size=size)
    heartbeat("encoding of the pictures of prompts")
    with decoder.visiting(device()):
        return given.inputs(decoder, inputs, size=size)


def _size(prompt: Prompt, run: TrainState) -> Size:
    """Frames, rows and columns of a prompt's sample, in pixels.

    Raises:
        ValueError: nothing tells it.
    """
    c = run.config.validation
    assert run.card is not None
    usual = (run.card.get("sizes") or [{}])[0]
    given: dict[str, Any] = {
        "num_video_frames": prompt.num_video_frames or c.num_video_frames,
        "height": prompt.height or c.height,
        "width": prompt.width or c.width,
    }
    names = {"num_video_frames": "num_frames", "height": "height", "width": "width"}
    sizes: dict[str, Any] = {n: value or usual.get(names[n]) for n, value in given.items()}
    missing = [f"validation.{name}" for name, value in sizes.items() if not value]
    if missing:
        raise ValueError(f"set {', '.join(missing)}: the dataset card lists no sizes")
    return sizes["num_video_frames"], sizes["height"], sizes["width"]


PackPosition = tuple[int, int]
"""(index of a pack in the validation set, index of a sample in the pack)."""

Features = Callable[[Tensor], Tensor]
"""Normalized latent -> features [D] of its first decoded frame."""


def requests_of_captions(
    run: TrainState, found: PreparedPrompts, features: Features | None
) -> list[ValidationRequest]:
    """Requests with captions of the validation packs, each caption once before any is repeated.

    Collective. The choice does not depend on the layout.
    """
    first, replicas = run.data_ranks.rank(), run.data_ranks.size()
    packs = run.validation["val_loss"].packs if run.replica.reads else []
    mine: dict[PackPosition, tuple[PackedBatch, int]] = {
        (first + i * replicas, j): (packs[i], j)
        for i in range(len(packs))
        for j in range(packs[i].num_samples)
    }
    known: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        known, [(at, pack.keys[j], _shown(pack, j)) for at, (pack, j) in mine.items()]
    )
    chosen = round_robin([one for of in known for one in of])[: run.config.validation.num_captions]
    each = {
        at: _request_of_caption(run, *mine[at], found=found, features=features)
        for at in chosen
        if at in mine
    }
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, each)
    every = {at: one for share in shares for at, one in share.items()}
    return [every[at] for at in chosen]


def round_robin(samples: Iterable[tuple[PackPosition, str, str]]) -> list[PackPosition]:
    """Positions of samples (position, key, caption), in round robin over the captions.

    First comes the first sample of each caption, in the order of the packs, then the second of
    each, and so on. A sample that a short validation split repeats in several packs counts once.
    """
    first: dict[str, tuple[PackPosition, str]] = {}
    for position, key, caption in sorted(samples):
        first.setdefault(key, (position, caption))
    seen: Counter[str] = Counter()
    order = []
    for position, caption in first.values():
        order.append((seen[caption], position))
        seen[caption] += 1
    return [position for _, position in sorted(order)]


def _shown(pack: PackedBatch, index: int) -> str:
    """The caption of a sample, or its key if the shard has no caption."""
    return (pack.captions[index] if pack.captions else "") or pack.keys[index]


def _request_of_caption(
    run: TrainState,
    pack: PackedBatch,
    index: int,
    *,
    found: PreparedPrompts,
    features: Features | None,
) -> ValidationRequest:
    model, grid = run.config.model, pack.grids[index]
    negative = run.config.validation.negative_prompt
    against, own_LE = found.inputs[negative], own_null_texts(pack)[index]
    if not negative and len(own_LE):
        against = {**against, TEXT: own_LE}
    request = Request(
        inputs=inputs_of_held_out(run.config, pack, index),
        negative=against,
        latent_FHW=(
            grid[0] * model.patch_temporal,
            grid[1] * model.patch_spatial,
            grid[2] * model.patch_spatial,
        ),
        fps=float(pack.fps_N[index]),
        seed=0,
    )
    real_D = None
    if features is not None:
        heartbeat("features of held-out samples")
        real_D = features(own_latent(pack, index, model))
    return ValidationRequest(
        prompt=_shown(pack, index),
        negative=negative,
        request=request,
        pixels=None,
        real_D=real_D,
    )


def inputs_of_held_out(config: RunConfig, pack: PackedBatch, index: int) -> dict[str, Tensor]:
    """What the sample is generated from: its own caption, picture, condition, given frames.

    Where training draws how many of a sample's own frames are given, that is the least number of
    them that it draws, and one frame at least is left to generate.
    """
    layout = PatchLayout.of(config)
    inputs = sample_inputs(pack, index, layout)
    drawn, (frames, *_) = config.objective.given_frames or (), pack.grids[index]
    least = next((count for count, weight in enumerate(drawn) if count and weight), 0)
    given = min(least, frames - 1) * layout.patch_temporal
    if given:
        (name,) = layout.named(InputKind.FRAMES)
        inputs[name] = own_latent(pack, index, config.model)[:, :given].clone()
    return inputs


def own_latent(pack: PackedBatch, index: int, model: ModelConfig) -> Tensor:
    """The latent [C, F, H, W] of one sample of a whole pack."""
    patch = {"patch_temporal": model.patch_temporal, "patch_spatial": model.patch_spatial}
    return unpatchify(pack.latent_TC[pack.starts[index] :], pack.grids[index], **patch)


def notes(
    wanted: Sequence[ValidationRequest], found: PreparedPrompts, *, guidance: float
) -> list[str]:
    """Notices for the log of the run: no decoder, unused negative prompts, rounded sizes."""
    said = [found.note, unguided([one.negative for one in wanted], guidance=guidance)]
    for one in wanted:
        if one.pixels is not None and found.latent_stride is not None:
            said.append(rounding(one.pixels, found.latent_stride.pixels(one.request.latent_FHW)))
    return [note for note in dict.fromkeys(said) if note]

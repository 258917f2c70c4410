"""What is sampled at each validation, and what for: found once, before training."""

# L text tokens, E text width; F H W frames, rows, columns of a latent

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dit.batch import PackedBatch
from dit.codecs import text, vae
from dit.codecs.pretrained import forget
from dit.codecs.vae import Codec, ModelLocation
from dit.config import RunConfig
from dit.distributed.watchdog import heartbeat
from dit.sampling.generate import Request
from dit.sampling.latent_sizes import Size, Steps, rounding
from dit.sampling.prompts import Prompt, unguided
from dit.sampling.unpatchify import unpatch
from dit.train.train_state import TrainState

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One sample of every round."""

    prompt: str
    negative: str  # prompt, of which the request has the embedding
    request: Request
    pixels: Size | None  # what is kept of the decoded video; None keeps all
    real_D: Tensor | None = None  # features of the held-out sample whose caption it is


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the first rank knows of encoders and decoder."""

    texts: dict[str, Tensor]  # of the prompts, negative ones and the empty one among them
    steps: Steps | None
    note: str  # why there is no decoder; empty where there is one


def look(run: TrainState, prompts: Sequence[Prompt]) -> Found:
    c, card = run.config, run.card
    words = [c.validation.negative_prompt]
    for prompt in prompts:
        words += [prompt.text, _negative(prompt, c)]
    texts = {"": run.null_text_LE.cpu()} | _encode([w for w in dict.fromkeys(words) if w], run)
    decoder, note = open_decoder(run)
    return Found(texts=texts, steps=_steps(decoder, card, c), note=note)


def _negative(prompt: Prompt, config: RunConfig) -> str:
    """Its own, else that of the configuration."""
    return config.validation.negative_prompt if prompt.negative is None else prompt.negative


def _encode(words: Sequence[str], run: TrainState) -> dict[str, Tensor]:
    """Embeddings by text.

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
        encoder, texts = text.text_encoder_of_card(card, place), {}
        for word in words:
            heartbeat("encoding of prompts")
            texts[word] = encoder.encode(word)
        return texts
    except ValueError as error:
        raise ValueError(
            f"{asked}: the text encoder of the data is not here ({error}); set"
            " validation.t5_cache_dir to the Hugging Face cache or pipeline folder that has it, or"
            " leave that unset and use validation.num_captions, which needs none"
        ) from error
    finally:
        forget()


def open_decoder(run: TrainState) -> tuple[Codec | None, str]:
    """The decoder with its weights, or why there is none."""
    if run.card is None:
        return None, "the data name no decoder: latents, in false colours"
    cache = run.config.model.vae_cache_folder
    try:
        decoder = vae.codec_of_card(run.card, ModelLocation(cache=cache, local_only=True))
        with decoder.visiting(torch.device("cpu")):
            return decoder, ""
    except ValueError:
        name = run.card["processor"].get("model_name", run.card["processor"].get("name"))
        return None, (
            f"latents, in false colours, for the decoder {name} is not on this machine; set"
            " model.vae_cache_folder to the Hugging Face cache or pipeline folder that has it"
        )


def _steps(decoder: Codec | None, card: Any, config: RunConfig) -> Steps | None:
    if decoder is not None:
        return Steps.of(decoder, config.model)
    latent = card["latent"] if card else {}
    if "stride" not in latent:
        return None
    return Steps(
        stride=latent["stride"],
        temporal_stride=latent["temporal_stride"],
        patch_spatial=config.model.patch_spatial,
        patch_temporal=config.model.patch_temporal,
    )


def wanted_prompt(prompt: Prompt, run: TrainState, found: Found) -> Wanted:
    c = run.config.validation
    assert run.card is not None
    if found.steps is None:
        raise ValueError(
            "validation.prompts_file: the size of a latent is unknown, for the decoder is not on"
            " this machine and the dataset card is of an older version; set model.vae_cache_folder"
        )
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
    pixels = (sizes["num_video_frames"], sizes["height"], sizes["width"])
    negative = _negative(prompt, run.config)
    request = Request(
        text_LE=found.texts[prompt.text],
        negative_LE=found.texts[negative],
        latent_FHW=found.steps.latent(pixels),
        fps=math.nan if pixels[0] == 1 else c.fps,
        seed=0,
    )
    return Wanted(prompt=prompt.text, negative=negative, request=request, pixels=pixels)


Spot = tuple[int, int]
"""Number of a pack in the validation set, and of a sample in it."""

Features = Callable[[Tensor], Tensor]
"""Whitened latent -> features [D] of its first frame."""


def captions(run: TrainState, found: Found, features: Features | None) -> list[Wanted]:
    """Samples of the validation packs, each caption once before any is repeated.

    The same on any layout.
    """
    first, replicas = run.data_ranks.rank(), run.data_ranks.size()
    packs = run.validation["val_loss"].packs if run.replica.reads else []
    mine: dict[Spot, tuple[PackedBatch, int]] = {
        (first + i * replicas, j): (packs[i], j)
        for i in range(len(packs))
        for j in range(packs[i].num_samples)
    }
    known: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        known, [(at, pack.keys[j], _shown(pack, j)) for at, (pack, j) in mine.items()]
    )
    chosen = in_turns([one for of in known for one in of])[: run.config.validation.num_captions]
    each = {
        at: _caption(run, *mine[at], found=found, features=features) for at in chosen if at in mine
    }
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, each)
    every = {at: one for share in shares for at, one in share.items()}
    return [every[at] for at in chosen]


def in_turns(samples: Iterable[tuple[Spot, str, str]]) -> list[Spot]:
    """Spots of samples with their key and caption, the first of each caption before the second.

    A sample that is in two packs, because the split is shorter than the packs, counts once. Within
    a turn they stand in the order of the packs.
    """
    first: dict[str, tuple[Spot, str]] = {}
    for spot, key, caption in sorted(samples):
        first.setdefault(key, (spot, caption))
    turns: Counter[str] = Counter()
    order = []
    for spot, caption in first.values():
        order.append((turns[caption], spot))
        turns[caption] += 1
    return [spot for _, spot in sorted(order)]


def _shown(pack: PackedBatch, index: int) -> str:
    """The caption of a sample, else its key."""
    return (pack.captions[index] if pack.captions else "") or pack.keys[index]


def _caption(
    run: TrainState, pack: PackedBatch, index: int, *, found: Found, features: Features | None
) -> Wanted:
    start, stop = list(pairwise(pack.text_starts))[index]
    model, grid = run.config.model, pack.grids[index]
    negative = run.config.validation.negative_prompt
    request = Request(
        text_LE=pack.text_LE[start:stop].clone(),
        negative_LE=found.texts[negative],
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
        patch = {"patch_temporal": model.patch_temporal, "patch_spatial": model.patch_spatial}
        real_D = features(unpatch(pack.latent_TC[pack.starts[index] :], grid, **patch))
    return Wanted(
        prompt=_shown(pack, index),
        negative=negative,
        request=request,
        pixels=None,
        real_D=real_D,
    )


def notes(wanted: Sequence[Wanted], found: Found, *, guidance: float) -> list[str]:
    said = [found.note, unguided([one.negative for one in wanted], guidance=guidance)]
    for one in wanted:
        if one.pixels is not None and found.steps is not None:
            said.append(rounding(one.pixels, found.steps.pixels(one.request.latent_FHW)))
    return [note for note in dict.fromkeys(said) if note]

"""Prepares the requests for the samples of each validation, once before training.

1. requests of prompts   `prompt_requests.prepare_prompts`, on the first rank
2. requests_of_captions  captions and inputs of held-out samples -> `ValidationRequest`s
3. sample_inputs         inputs of a sample in a pack besides its latent: the inverse of packing
"""

# C patch features = c * pt * p * p, T packed tokens, N samples; L text tokens, E text width
# D features; F H W frames, rows, columns of a latent

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from dit.batch import SOUND, TEXT, NullTexts, PackedBatch
from dit.config import ModelConfig, RunConfig
from dit.distributed.watchdog import heartbeat
from dit.models.family import InputKind
from dit.models.patch_layout import PatchLayout
from dit.models.positions import unpatchify
from dit.objectives.pack_draws import own_null_texts
from dit.sampling.conditions.sound import SoundRequest
from dit.sampling.generate import Request
from dit.sampling.latent_sizes import LatentStride, Size, rounding
from dit.sampling.prompts import unguided
from dit.train.train_state import TrainState

Texts = Mapping[str, Mapping[str, Tensor]]
"""The text encoder's tensors of each text: text -> name -> tensor."""


@dataclass(frozen=True, kw_only=True)
class ValidationRequest:
    """A sample that every validation generates."""

    prompt: str
    negative: str  # negative prompt; the request has its embedding
    request: Request
    pixels: Size | None  # the decoded video is cut to this size; None keeps all
    real_D: Tensor | None = None  # features of the held-out sample with this caption
    given_HW3: np.ndarray | None = None  # uint8, its first frame or references, for the grid
    pictures: Mapping[str, Any] = field(default_factory=dict)  # files, for samples.json


@dataclass(frozen=True, kw_only=True)
class PreparedPrompts:
    """What the first rank has prepared with text encoder and decoder, for all ranks."""

    inputs: Texts  # of "" and of validation.negative_prompt, encoded without pictures
    latent_stride: LatentStride | None
    note: str  # why there is no decoder; empty if there is one
    requests: list[ValidationRequest] = field(default_factory=list)  # of the prompts, in order


PackPosition = tuple[int, int]
"""(index of a pack in the validation set, index of a sample in the pack)."""

Features = Callable[[Tensor], Tensor]
"""A function from a whitened latent to the features [D] of its first decoded frame."""


def requests_of_captions(
    run: TrainState, found: PreparedPrompts, features: Features | None
) -> list[ValidationRequest]:
    """Requests for `validation.num_captions` captions of the validation packs.

    Each caption occurs once before any is repeated. The choice does not depend on how the run is
    divided among ranks. All ranks must call it.
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
    """The positions of samples, ordered so that every caption occurs before any is repeated.

    First comes the first sample of each caption, in the order of the packs, then the second of
    each, and so on. `samples` are (position, key, caption). A sample that occurs in several packs,
    because the split is short, counts once.
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
    heard = pack.others[SOUND].latent_tokens[index] if SOUND in pack.others else 0
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
        sound=SoundRequest(frames=heard) if heard else None,
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
    """The inputs of the held-out sample `index`, by name, with which it is generated again.

    If training conditions on a random number of first frames, the sample is conditioned on the
    smallest such number above 0, but at least one latent frame is left to generate.
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
    """Latent [C, F, H, W] of sample `index` of a pack that is not split among ranks."""
    patch = {"patch_temporal": model.patch_temporal, "patch_spatial": model.patch_spatial}
    return unpatchify(pack.latent_TC[pack.starts[index] :], pack.grids[index], **patch)


def notes(
    wanted: Sequence[ValidationRequest], found: PreparedPrompts, *, guidance: float
) -> list[str]:
    """Sentences for the log: no decoder, negative prompts without effect, rounded sizes."""
    said = [found.note, unguided([one.negative for one in wanted], guidance=guidance)]
    for one in wanted:
        if one.pixels is not None and found.latent_stride is not None:
            said.append(rounding(one.pixels, found.latent_stride.pixels(one.request.latent_FHW)))
    return [note for note in dict.fromkeys(said) if note]


def sample_inputs(batch: PackedBatch, index: int, layout: PatchLayout) -> dict[str, Tensor]:
    """Copies of the inputs of sample `index`, by name, except its latent."""
    found = {}
    for name, starts in batch.text_offsets.items():
        found[name] = batch.texts[name][starts[index] : starts[index + 1]].clone()
    own = batch.method(NullTexts)
    for name in layout.named(InputKind.NULL_TEXT):
        if own is not None:
            first, stop = own.starts[index : index + 2]
            found |= {name: own.rows_LE[first:stop].clone()} if stop > first else {}
    found |= {name: rows_NE[index].clone() for name, rows_NE in batch.vectors.items()}
    grid, first = batch.grids[index], batch.starts[index]
    patch = (layout.patch_temporal, layout.patch_spatial)
    if (clean := batch.clean_tokens[index]) and (given := layout.named(InputKind.FRAMES)):
        (name,) = given
        frames = (clean // math.prod(grid[1:]), *grid[1:])
        found[name] = unpatchify(batch.latent_TC[first:], frames, *patch).clone()
    others = batch.references[index]
    starts = accumulate(map(math.prod, (grid, *others)), initial=first)
    for name, other, (at, _) in zip(
        layout.named(InputKind.REFERENCE), others, pairwise([*starts][1:]), strict=False
    ):
        found[name] = unpatchify(batch.latent_TC[at:], other, *patch).clone()
    if batch.condition_TC is not None:
        channels_CFHW = unpatchify(batch.condition_TC[first:], grid, *patch)
        kinds = (InputKind.CHANNELS, InputKind.FRAME_CHANNELS)
        named = [one for one in layout.inputs if one.kind in kinds]
        masks = [one.kind is InputKind.FRAME_CHANNELS for one in named]
        parts = channels_CFHW.split([one.width + m for one, m in zip(named, masks, strict=True)])
        for one, part, has_mask in zip(named, parts, masks, strict=True):
            if not has_mask:
                found[one.name] = part.clone()
            elif frames := int((part[-1, :, 0, 0] > 0).sum()):
                found[one.name] = part[:-1, :frames].clone()
    return found

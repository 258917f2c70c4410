"""The baseline: Diffusers' model in a plain PyTorch loop, with samples padded or in buckets."""

# B samples of a batch; C channels, F H W frames, rows, columns of a latent; L text tokens, E width

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn

from dit.batch import PackedBatch, Problem
from dit.config import ModelConfig, OptimizerConfig, RunConfig
from dit.convert.diffusers_config import diffusers_transformer_config
from dit.models.diffusers_names import pairs
from dit.sampling.unpatchify import unpatchify


class Batching(StrEnum):
    """How a plain loop batches samples of several sizes."""

    PADDED = "padded to the longest"
    BUCKETS = "one bucket for each size"


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Input and target of a network for one sample."""

    key: str
    input_CFHW: Tensor
    target_CFHW: Tensor
    text_LE: Tensor
    level: Tensor
    weight: Tensor
    fps: float
    patches: int

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.input_CFHW.shape[1:])


def examples(model: ModelConfig, batch: PackedBatch, problem: Problem) -> Iterator[Example]:
    """The samples of a pack, one by one."""
    patch = (model.patch_temporal, model.patch_spatial)
    texts = pairwise(batch.text_starts)
    for i, (grid, start, (a, b)) in enumerate(zip(batch.grids, batch.starts, texts, strict=False)):
        yield Example(
            key=batch.keys[i],
            input_CFHW=unpatchify(problem.input_TC[start:], grid, *patch),
            target_CFHW=unpatchify(problem.target_TC[start:], grid, *patch),
            text_LE=batch.text_LE[a:b].float(),
            level=problem.level_M[i],
            weight=problem.weight_N[i],
            fps=float(batch.fps_N[i]),
            patches=batch.num_tokens[i],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedBatch:
    """Samples stacked in a batch, shorter ones padded with zeros."""

    input_BCFHW: Tensor
    target_BCFHW: Tensor
    weight_BCFHW: Tensor
    """Weight of the squared error; zero on padding."""
    text_BLE: Tensor
    is_text_BL: Tensor | None
    """None if all captions have the same length."""
    level_B: Tensor
    fps: int | None

    @classmethod
    def of(cls, chosen: Sequence[Example], *, dtype: torch.dtype) -> Self:
        sides = [max(sides) for sides in zip(*(one.size for one in chosen), strict=True)]
        longest = max(len(one.text_LE) for one in chosen)
        lengths = torch.tensor([len(one.text_LE) for one in chosen])
        ones = [torch.ones_like(one.target_CFHW) * one.weight for one in chosen]
        is_text_BL = (torch.arange(longest) < lengths[:, None]).to(chosen[0].text_LE.device)
        fps = chosen[0].fps
        return cls(
            input_BCFHW=torch.stack([_grown(one.input_CFHW, sides) for one in chosen]).to(dtype),
            target_BCFHW=torch.stack([_grown(one.target_CFHW, sides) for one in chosen]),
            weight_BCFHW=torch.stack([_grown(one, sides) for one in ones]),
            text_BLE=torch.stack(
                [_grown(one.text_LE, [longest, one.text_LE.shape[1]]) for one in chosen]
            ).to(dtype),
            is_text_BL=None if bool((lengths == longest).all()) else is_text_BL,
            level_B=torch.stack([one.level for one in chosen]).to(dtype),
            fps=None if fps != fps else int(fps),
        )


def _grown(x: Tensor, sides: Sequence[int]) -> Tensor:
    """With zeros behind, so that its last axes have these sides."""
    missing = [side - old for old, side in zip(x.shape[-len(sides) :], sides, strict=True)]
    return nn.functional.pad(x, [n for side in reversed(missing) for n in (0, side)])


def rectangles(
    found: Sequence[Example], batching: Batching, *, batch: int, capacity: int, dtype: torch.dtype
) -> list[PaddedBatch]:
    """Samples side by side: `batch` padded ones, or as many of a bucket as a pack has room for."""
    groups: dict[Any, list[Example]] = defaultdict(list)
    for one in found:
        # As text: NaN, for no rate, equals nothing.
        groups[(one.size, str(one.fps)) if batching is Batching.BUCKETS else None].append(one)
    made = []
    for group in groups.values():
        padded = batching is Batching.PADDED
        count = batch if padded else max(1, capacity // group[0].patches)
        parts = [group[i : i + count] for i in range(0, len(group), count)]
        made += [PaddedBatch.of(part, dtype=dtype) for part in parts]
    return made


class PlainLoop:
    """A training step as one writes it without any of our parts."""

    def __init__(self, network: nn.Module, c: OptimizerConfig):
        self.network = network.train()
        self.clip = c.clip_grad
        self.optimizer = torch.optim.AdamW(
            network.parameters(),
            lr=c.lr,
            betas=(c.adam_beta1, c.adam_beta2),
            eps=c.adam_eps,
            weight_decay=c.weight_decay,
        )

    def step(self, batches: Sequence[PaddedBatch], *, numbers: int) -> float:
        """Loss: the weighted squared error over `numbers`, the real numbers of all samples."""
        total = 0.0
        for batch in batches:
            loss = self._error(batch) / numbers
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self.network.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _error(self, batch: PaddedBatch) -> Tensor:
        (prediction,) = self.network(
            hidden_states=batch.input_BCFHW,
            timestep=batch.level_B,
            encoder_hidden_states=batch.text_BLE,
            attention_mask=batch.is_text_BL,
            fps=batch.fps,
            return_dict=False,
        )
        error = (prediction.float() - batch.target_BCFHW).square()
        return (error * batch.weight_BCFHW).sum()


def diffusers_network(config: RunConfig) -> nn.Module:
    """Diffusers' model of these sizes.

    Raises:
        ValueError: it has parts that this comparison does not feed.
    """
    from diffusers.models.transformers.transformer_cosmos import CosmosTransformer3DModel

    model = config.model
    if getattr(model, "concat_padding_mask", False) or model.text_pad_to is not None:
        raise ValueError(
            "model.concat_padding_mask and model.text_pad_to are not compared; use false and null"
        )
    content = diffusers_transformer_config(config)
    return CosmosTransformer3DModel(**{k: v for k, v in content.items() if k[0] != "_"})


def diffusers_weights(ours: nn.Module, model: ModelConfig) -> dict[str, Tensor]:
    """Our weights under Diffusers' names, so that both networks start equal."""
    mine, theirs = dict(ours.named_parameters()), {}
    for pair in pairs(model):
        name = pair.ours.replace("decoder.layers", f"decoder.layers.{pair.layer}")
        parts = pair.split(mine[name].detach())
        theirs |= zip(pair.theirs, (part.clone() for part in parts), strict=True)
    return theirs

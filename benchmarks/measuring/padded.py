"""The baseline: Diffusers' model in a plain PyTorch loop, with samples padded or in buckets."""

# B samples of a batch; C channels, F H W frames, rows, columns of a latent; L text tokens
# E text width

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn

from dit.batch import TEXT, PackedBatch, Problem
from dit.config import ModelConfig, RunConfig
from dit.convert.diffusers_config import diffusers_transformer_config
from dit.models.diffusers.form import DiffusersForm, StackedSamples
from dit.models.diffusers.names import Pair, their_tensors
from dit.models.parameter_groups import own_name
from dit.models.patch_layout import PatchLayout
from dit.models.positions import unpatchify
from dit.models.registry import diffusers_form, pairs


class Batching(StrEnum):
    """How a plain loop batches samples of several sizes."""

    PADDED = "padded to the longest"
    BUCKETS = "one bucket for each size"


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """What a network gets and should predict for one sample."""

    key: str
    input_CFHW: Tensor
    target_CFHW: Tensor
    texts: Mapping[str, Tensor]  # [L, E] by name
    vectors: Mapping[str, Tensor]  # [E] by name
    level: Tensor
    weight: Tensor
    fps: float
    tokens: int  # its part of a pack's capacity in tokens, without padding

    @property
    def kind(self) -> tuple[Any, ...]:
        """What all samples of a bucket share: (frames, height, width, text lengths ..., fps)."""
        lengths = [len(rows) for rows in self.texts.values()]
        # The rate as text: NaN, for no rate, equals nothing.
        return (*self.input_CFHW.shape[1:], *lengths, str(self.fps))


def examples(config: RunConfig, batch: PackedBatch, problem: Problem) -> Iterator[Example]:
    """Yields each sample of the pack `batch`, with its input and target from `problem`."""
    layout = PatchLayout.of(config)
    patch = (layout.patch_temporal, layout.patch_spatial)
    starts = {name: list(pairwise(offsets)) for name, offsets in batch.text_offsets.items()}
    for i, (grid, start) in enumerate(zip(batch.grids, batch.starts, strict=False)):
        texts = {name: rows[slice(*starts[name][i])] for name, rows in batch.texts.items()}
        yield Example(
            key=batch.keys[i],
            input_CFHW=unpatchify(problem.input_TC[start:], grid, *patch),
            target_CFHW=unpatchify(problem.target_TC[start:], grid, *patch),
            texts={name: rows.float() for name, rows in texts.items()},
            vectors={name: rows[i].float() for name, rows in batch.vectors.items()},
            level=problem.level_M[i],
            weight=problem.weight_N[i],
            fps=float(batch.fps_N[i]),
            tokens=batch.num_tokens[i] + layout.text_room(batch.text_rows[i]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedBatch:
    """Samples stacked in a batch, shorter ones padded with zeros."""

    samples: StackedSamples
    target_BCFHW: Tensor
    weight_BCFHW: Tensor
    """Weight of the squared error of each number; zero on padding."""

    @classmethod
    def of(cls, chosen: Sequence[Example], *, dtype: torch.dtype) -> Self:
        ones = [torch.ones_like(one.target_CFHW) * one.weight for one in chosen]
        texts = {n: _stacked([one.texts[n] for one in chosen]) for n in chosen[0].texts}
        vectors = {n: torch.stack([one.vectors[n] for one in chosen]) for n in chosen[0].vectors}
        lengths = torch.tensor([len(one.texts[TEXT]) for one in chosen])
        is_text_BL = torch.arange(int(lengths.max())) < lengths[:, None]
        samples = StackedSamples(
            latent_BCFHW=_stacked([one.input_CFHW for one in chosen]).to(dtype),
            inputs={name: value.to(dtype) for name, value in (texts | vectors).items()},
            is_text_BL=None if bool(is_text_BL.all()) else is_text_BL.to(texts[TEXT].device),
            level_B=torch.stack([one.level for one in chosen]).to(dtype),
            fps=chosen[0].fps,
        )
        return cls(
            samples=samples,
            target_BCFHW=_stacked([one.target_CFHW for one in chosen]),
            weight_BCFHW=_stacked(ones),
        )


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """`parts` [C, F, H, W] or [L, E] stacked to [B, ...], with zeros after the shorter ones."""
    sides = [max(sides) for sides in zip(*(part.shape for part in parts), strict=True)]
    stacked = parts[0].new_zeros(len(parts), *sides)
    for row, part in zip(stacked, parts, strict=True):
        row[tuple(map(slice, part.shape))] = part
    return stacked


def rectangles(
    found: Sequence[Example], batching: Batching, *, batch: int, capacity: int, dtype: torch.dtype
) -> list[PaddedBatch]:
    """Splits the examples `found` into batches of padded samples.

    With `Batching.PADDED` a batch has `batch` samples of any size. With `Batching.BUCKETS` it has
    samples of one size, as many as fit into `capacity` tokens, and at least one.
    """
    groups: dict[Any, list[Example]] = defaultdict(list)
    for one in found:
        groups[one.kind if batching is Batching.BUCKETS else None].append(one)
    made = []
    for group in groups.values():
        padded = batching is Batching.PADDED
        count = batch if padded else max(1, capacity // group[0].tokens)
        parts = [group[i : i + count] for i in range(0, len(group), count)]
        made += [PaddedBatch.of(part, dtype=dtype) for part in parts]
    return made


class PlainLoop:
    """A training step in plain PyTorch, without this project's modules.

    Raises:
        ValueError: the family of the network cannot be compared in this way.
    """

    def __init__(self, network: nn.Module, config: RunConfig):
        self.network = network.train()
        self.config, c = config, config.optimizer
        self.form = _form(config.model)
        self.clip = c.clip_grad
        self.optimizer = torch.optim.AdamW(
            network.parameters(),
            lr=c.lr,
            betas=(c.adam_beta1, c.adam_beta2),
            eps=c.adam_eps,
            weight_decay=c.weight_decay,
        )

    def step(self, batches: Sequence[PaddedBatch], *, numbers: int) -> float:
        """Runs one training step on `batches` and returns the loss.

        The loss is the weighted sum of squared errors over `numbers`, the count of all latent
        numbers that are not padding.
        """
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
        model, guidance = self.config.model, self.config.objective.guidance
        prediction = self.form.run_side_by_side(
            self.network, batch.samples, model, guidance=guidance
        )
        error = (prediction.float() - batch.target_BCFHW).square()
        return (error * batch.weight_BCFHW).sum()


def diffusers_network(config: RunConfig) -> nn.Module:
    """Diffusers' model with the sizes in `config`, with random weights."""
    import diffusers

    content = diffusers_transformer_config(config)
    network = getattr(diffusers, diffusers_form(config.model).class_name)
    return network(**{key: value for key, value in content.items() if key[0] != "_"})


def _form(model: ModelConfig) -> DiffusersForm:
    form = diffusers_form(model)
    if form.run_stacked is None:
        raise ValueError(
            f"model.family={model.family} is not compared: its Diffusers form has no run_stacked"
            " (dit/models/family.py); choose another family, such as dit or flux"
        )
    return form


def diffusers_weights(ours: nn.Module, model: ModelConfig) -> dict[str, Tensor]:
    """The weights of `ours` under Diffusers' names, so that both networks start with equal ones."""
    mine = dict(ours.named_parameters())

    def own(pair: Pair) -> Tensor:
        name = pair.ours if pair.layer is None else own_name((pair.ours, pair.layer))
        return mine[name].detach()

    theirs = their_tensors(pairs(model), own)
    return {name: tensor.clone() for name, tensor in theirs.items()}

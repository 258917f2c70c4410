"""Starts a run from a Diffusers folder, whose weights are read one tensor at a time.

1. assign      ranks that hold the same shards (data and context parallelism) divide the reading
2. read        this rank's shard of matrices with equal layout in both formats; others, such as
               joined queries, keys and values, as a whole
3. exchange    the ranks of step 1 send each other what they have read

No optimizer is needed: the network may be unwrapped, or trained in part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dit.config import ModelConfig, RunConfig
from dit.convert.diffusers_checkpoint import DiffusersFolder
from dit.convert.errors import ConvertError, listed
from dit.convert.load_hf.settings import (
    HfWeights,
    objective_notes,
    open_hf_weights,
    weights_of_run,
)
from dit.distributed.collective_errors import RankError, on_all_ranks
from dit.distributed.watchdog import heartbeat
from dit.models.diffusers.arrangements import Same
from dit.models.diffusers.names import Pair
from dit.models.layers.adaptable import is_of_any_adapter
from dit.models.registry import is_distilled
from dit.train.checkpoint.starting_point import Origin, read_origin
from dit.train.model_and_optimizer import fill_shards, weight_shards


@dataclass(frozen=True, slots=True)
class HfStart:
    """Weights of a Diffusers folder, for the start of a run (see `train_state.InitialWeights`)."""

    weights: HfWeights
    of_run: tuple[str, ...] = ()
    """Log lines about these weights that depend on the run's settings."""

    def fill(self, model: MegatronModule) -> None:
        """Sets the weights of `model` to those of the folder; all ranks call it.

        Raises:
            ConvertError: a file is damaged, or holds NaN or Inf.
        """
        groups: Any = model.groups
        fill_from_diffusers(model, self.weights, copies=groups.dp_cp, left_out=is_of_any_adapter)

    def origin(self) -> Origin:
        """Digests of the folder's files; all ranks call it.

        Raises:
            CheckpointError: a file cannot be read.
        """
        return origin_of(self.weights.source)

    @property
    def notes(self) -> list[str]:
        """Log lines for the start of a run from these weights."""
        source = self.weights.source
        kind, zeros = source.config.get("_class_name"), source.absent
        count = len(source.headers) - len(zeros)
        return [
            f"starting at step 0 from the weights of {source.path} ({kind}, {count} tensors)",
            *([f"not there, so that they start at zero: {listed(zeros, most=4)}"] if zeros else []),
            *(f"other than {source.path} says: {note}" for note in self.weights.notes),
            *self.of_run,
        ]


def origin_of(source: DiffusersFolder) -> Origin:
    """Digests of config.json and all weight files; all ranks call it, and each reads some files.

    Raises:
        CheckpointError: a file cannot be read.
    """
    return read_origin(source.path, source.files)


def weights_of_folder(folder: Path, model: ModelConfig) -> HfStart:
    """The weights of the Diffusers folder `folder`, to be the frozen base of adapters.

    Raises:
        ConvertError: the folder is damaged, or does not fit the network.
    """
    return HfStart(open_hf_weights(folder, model))


def hf_start(config: RunConfig) -> HfStart | None:
    """The weights that `checkpoint.load_hf` names; None if it is unset or the run resumes.

    Raises:
        ConvertError: the folder does not fit the run.
        CheckpointError: the run's own checkpoint cannot be read.
    """
    if (weights := weights_of_run(config)) is None:
        return None
    notes = objective_notes(weights.source, config.model, config.objective)
    return HfStart(weights, (*_of_distillation(weights.source, config), *notes))


def _of_distillation(source: DiffusersFolder, config: RunConfig) -> Iterator[str]:
    """A warning if plain fine-tuning would undo that a network was distilled to few steps."""
    held = config.passes_without_gradient or config.lora.frozen_adapter
    if (source.is_distilled or is_distilled(config)) and not held:
        yield source.of_few_steps


LayerWeight = tuple[str, int | None]
"""(name of a weight in a checkpoint, number of its layer; None: no layer)."""


def fill_from_diffusers(
    module: MegatronModule,
    weights: HfWeights,
    *,
    copies: dist.ProcessGroup | None = None,
    left_out: Callable[[str], bool] = lambda _: False,
) -> None:
    """Sets the parameters of `module` on this rank, in their own dtype and on their device.

    The ranks `copies` hold the same shards and divide the reading. `left_out` accepts names that
    the folder lacks, such as those of an adapter; these parameters stay unchanged. Collective: all
    ranks call it, once for each of their modules.

    Raises:
        ConvertError: a file is damaged, or holds NaN or Inf; on all ranks.
    """
    pairs = {(pair.ours, pair.layer): pair for pair in weights.table}
    shards = [shard for shard in weight_shards(module) if not left_out(shard.key)]
    failed: list[Exception] = []
    not_finite: list[str] = []

    def read(shard: ShardedTensor) -> Tensor:
        heartbeat("read of checkpoint.load_hf")
        if not failed:  # else the other ranks go on to where all of them hear of it
            try:
                return _part(shard, pairs[_place(shard)], weights.source, not_finite)
            except (OSError, RuntimeError, ValueError) as error:
                failed.append(error)
        return torch.zeros(shard.local_shape)

    fill_shards(shards, read, copies)
    try:
        on_all_ranks(lambda: _check(failed, not_finite, weights.source))
    except RankError as error:
        raise ConvertError(str(error)) from error


def _check(failed: list[Exception], not_finite: list[str], source: DiffusersFolder) -> None:
    if failed:
        raise failed[0]
    if not_finite:
        file = source.headers[not_finite[0]].file
        raise ConvertError(
            f"{file} has NaN or Inf in {listed(not_finite)}, so that every output would be NaN;"
            " download it or export it again"
        )


def _place(shard: ShardedTensor) -> LayerWeight:
    return shard.key, shard.global_offset[0] if shard.prepend_axis_num else None


def _part(
    shard: ShardedTensor, pair: Pair, source: DiffusersFolder, not_finite: list[str]
) -> Tensor:
    """This rank's shard of a weight; adds names of tensors with NaN or Inf to `not_finite`."""
    begins = shard.global_offset[shard.prepend_axis_num :]
    part = tuple(slice(at, at + size) for at, size in zip(begins, shard.local_shape, strict=True))
    alike = type(pair.arrangement) is Same
    read = {name: source.read(name, part if alike else None) for name in pair.theirs}
    not_finite += [name for name, tensor in read.items() if not tensor.isfinite().all()]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in read.values()))
    whole = pair.join([tensor.to(dtype) for tensor in read.values()])
    return whole if alike else whole[part]

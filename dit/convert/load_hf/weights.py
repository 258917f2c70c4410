"""Diffusers' weights -> the parameters of a built network, one tensor at a time.

1. shared out  ranks that hold the same parts (data and context parallelism) read a share each
2. read        of matrices that are the same on both sides this rank's part alone; of others, such
               as queries, keys and values laid together, the whole tensor, before the part is taken
3. exchanged   the ranks of step 1 send each other what they have read

No optimizer is needed: the network may be unwrapped as yet, or trained in part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dit.convert.diffusers_checkpoint import DiffusersFolder
from dit.convert.errors import ConvertError, listed
from dit.convert.load_hf.settings import HfWeights
from dit.distributed.collective_errors import RankError, on_all_ranks
from dit.distributed.watchdog import heartbeat
from dit.models.diffusers_names import Pair, Same
from dit.train.model_and_optimizer import exchange_shares, own_share, weight_shards

LayerWeight = tuple[str, int | None]
"""Name of a weight as a checkpoint has it, and its layer."""


def fill_from_diffusers(
    module: MegatronModule,
    weights: HfWeights,
    *,
    copies: dist.ProcessGroup | None = None,
    left_out: Callable[[str], bool] = lambda _: False,
) -> None:
    """Fills the parameters of `module` on this rank, in their own type and on their device.

    The ranks `copies`, which hold the same parts, share the reading. `left_out` tells names that
    the folder does not have, such as those of an adapter; these keep their values. Collective: all
    ranks call it, once for each of their modules.

    Raises:
        ConvertError: a file is damaged, or holds NaN or Inf; on all ranks.
    """
    pairs = {(pair.ours, pair.layer): pair for pair in weights.table}
    shards = [shard for shard in weight_shards(module) if not left_out(shard.key)]
    mine = own_share(shards, copies)
    try:
        on_all_ranks(lambda: _fill(mine, pairs, weights.source))
    except RankError as error:
        raise ConvertError(str(error)) from error
    exchange_shares(shards, copies)


@torch.no_grad()
def _fill(
    shards: list[ShardedTensor], pairs: Mapping[LayerWeight, Pair], source: DiffusersFolder
) -> None:
    not_finite: list[str] = []
    for shard in shards:
        heartbeat("read of checkpoint.load_hf")
        assert shard.data is not None
        shard.data.copy_(_part(shard, pairs[_place(shard)], source, not_finite))
    if not_finite:
        file = source.headers[not_finite[0]].file
        raise ConvertError(
            f"NaN or Inf in {listed(not_finite)} of {file}; a network with them computes nothing"
            " else: download it or export it again"
        )


def _place(shard: ShardedTensor) -> LayerWeight:
    """Layers of one name are stacked on a first axis."""
    return shard.key, shard.global_offset[0] if shard.prepend_axis_num else None


def _part(
    shard: ShardedTensor, pair: Pair, source: DiffusersFolder, not_finite: list[str]
) -> Tensor:
    """This rank's part of a weight; names of tensors with NaN or Inf go to `not_finite`."""
    begins = shard.global_offset[shard.prepend_axis_num :]
    part = tuple(slice(at, at + size) for at, size in zip(begins, shard.local_shape, strict=True))
    alike = type(pair.arrangement) is Same
    read = {name: source.read(name, part if alike else None) for name in pair.theirs}
    not_finite += [name for name, tensor in read.items() if not tensor.isfinite().all()]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in read.values()))
    whole = pair.join([tensor.to(dtype) for tensor in read.values()])
    return whole if alike else whole[part]

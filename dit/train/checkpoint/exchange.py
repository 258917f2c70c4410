"""Sends weights and optimizer state between the ranks that update and those that store them.

1. gather      before a save: each rank receives the state that it stores, in host memory
2. hand_out    after a load: state goes from the rank that read it to the ranks that use it

State is sent in buckets, so that no rank ever has much more than its shard. Megatron-Core's
`fully_reshardable` creates the whole optimizer state on every data rank. The stored result is the
same: neither names nor shapes depend on the layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dit.distributed.data_parallel import holdings, main_param_shards
from dit.distributed.process_groups import broadcast, device
from dit.distributed.row_shares import numbers_of, put_rows
from dit.models.parameter_groups import NOTHING_FROZEN, FrozenWeights
from dit.train.checkpoint.shares import (
    Owner,
    SharedWeight,
    data_of,
    entries_of,
    share_weights,
    weight_of,
)
from dit.train.optimizer.states import has_state

_FLOAT32_BYTES = 4
BUCKET_BYTES = 2**28
"""Most bytes that are sent in one collective; a larger tensor is sent alone."""

Values = Mapping[str, Sequence[Tensor]]
"""Optimizer states of this rank's main parameters, float32, in the order of `main_param_shards`.
The keys are the prefixes of the states in checkpoints, such as that of Adam's first moment."""
WEIGHT = ""
"""Prefix of the weights themselves, as a key of `Values`."""
_UNUSED = "unused"
"""Prefix of a layer's tensor that is read only with other layers of its name, and is dropped."""


# Copies with `non_blocking` go between the device and memory of `SharedWeight.on_host`, which is in
# PinnedRows; from pageable memory they would wait for the stream.
class _Route(NamedTuple):
    """Transfer of one shard of a weight, or of its state, from one data rank to another."""

    of: SharedWeight
    prefix: str
    part: slice  # of the flattened weight
    source: int
    target: int

    @property
    def numel(self) -> int:
        return self.part.stop - self.part.start


_TensorAt = Callable[[_Route], Tensor]
"""Function that returns, on the source rank of a route, the flat tensor to send."""
_PutAt = Callable[[_Route, Tensor], object]
"""Function that stores a received tensor on the target rank of its route."""
_Bucket = Sequence[tuple[SharedWeight, str]]
"""Weights that are sent together, each with the prefix of one of its tensors."""


class StateExchange:
    """Exchange of weights and optimizer state among the ranks of a pipeline stage.

    All ranks of the stage create it and call its methods together.
    """

    def __init__(
        self,
        modules: Sequence[MegatronModule],
        groups: ProcessGroupCollection,
        *,
        optimizer: MegatronOptimizer | None = None,
        values: Values | None = None,
        chosen: Callable[[str], bool] = lambda _: True,
        frozen: FrozenWeights = NOTHING_FROZEN,
    ):
        """Prepares the exchange for `modules`.

        `values` has the states of the optimizer's main parameters. `chosen` selects weights by
        name; weights with state are always exchanged. `frozen` are the frozen weights of the run
        that wrote the checkpoint.
        """
        self._frozen = frozen
        self._groups = groups
        self._me = Owner(groups.tp.rank(), groups.dp_cp.rank())
        self._values = values or {}
        weights = (data_of(entry) for module in modules for entry in entries_of(module))
        held = holdings(optimizer, groups, weights)
        trained = {w for w in held if w.requires_grad} if optimizer is not None else set()
        shards = main_param_shards(optimizer) if optimizer is not None else []
        numbered = enumerate(shards)
        self._numbers: dict[Tensor, int] = {shard.weight: n for n, shard in numbered}
        self._weights = share_weights(
            modules,
            groups,
            held=held,
            trained=trained,
            tensors=len(self._values),
            chosen=chosen,
            apart=frozen.partly,
        )

    @torch.no_grad()
    def gather(self) -> list[ShardedTensor]:
        """Copies in host memory of the weights and state that this rank stores.

        Collective: each shard goes once from the rank that updates it to the rank that stores it.
        """
        mine = [w for w in self._weights if self._stores(w) and not w.in_shares]
        share = [w.stored(WEIGHT, w.on_host(w.entry.dtype).copy_(w.weight)) for w in mine]
        for bucket in self._buckets():
            share += self._gather_state(bucket)
        if device().type == "cuda":
            torch.cuda.current_stream().synchronize()  # waits for the copies to the host
        return share

    def _gather_state(self, bucket: _Bucket) -> list[ShardedTensor]:
        whole = {
            (w, prefix): w.on_host(self._type(w, prefix)) for w, prefix in bucket if self._stores(w)
        }
        for (w, prefix), state in whole.items():
            if not w.holdings:
                state.view(-1).copy_(self._own(w, prefix), non_blocking=True)
        self._exchange(
            [
                _Route(w, prefix, held.part, source=held.rank, target=w.place.data)
                for w, prefix in bucket
                if w.place.tensor == self._me.tensor
                for held in w.holdings
                if held.copy == self._copy_of(w.place.data)
            ],
            source=lambda route: self._own(route.of, route.prefix),
            put=lambda route, values: (
                whole[route.of, route.prefix].view(-1)[route.part].copy_(values, non_blocking=True)
            ),
        )
        return [w.stored(prefix, state) for (w, prefix), state in whole.items()]

    def wanted(
        self, *, weights: str = WEIGHT, everywhere: bool = False
    ) -> dict[str, dict[str, ShardedTensor]]:
        """Host tensors that this rank reads from a checkpoint, by number of the weight, and prefix.

        `weights` is the prefix of the stored tensors that become the weights. State is read for the
        weights that this network trains; with `everywhere`, for all weights.
        """
        return {
            str(number): self._wanted_of(w, weights, with_state=w.trained or everywhere)
            for number, w in enumerate(self._weights)
            if self._stores(w)
        }

    def _wanted_of(
        self, w: SharedWeight, weights: str, *, with_state: bool
    ) -> dict[str, ShardedTensor]:
        """The tensors of the weight `w` that this rank reads, by prefix.

        A stored tensor that is both state and weight is read once, as state.
        """
        states = [p for p in self._values if with_state and has_state(w.weight, p)]
        names = {prefix: prefix for prefix in states} | {WEIGHT: weights}
        if weight_of(w.entry) in self._frozen.alone:
            names = dict.fromkeys(names, WEIGHT)
        elif w.apart:  # Megatron-Core cannot read only some layers of a stacked tensor
            names[_UNUSED] = WEIGHT
        once: dict[str, str] = {}
        for prefix, name in names.items():
            once.setdefault(name, prefix)
        return {
            prefix: w.stored(name, w.on_host(torch.float32 if prefix and name else w.entry.dtype))
            for name, prefix in once.items()
        }

    @torch.no_grad()
    def hand_out(self, read: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copies tensors that ranks have `read` from a checkpoint to the weights and `values`.

        `read` has the keys of `wanted`. Collective: a weight goes to each data rank, or its rows to
        the ranks that hold them (FSDP); its state goes to the ranks that update it.
        """
        found = {w: read.get(str(number), {}) for number, w in enumerate(self._weights)}
        for w in self._weights:
            if w.in_shares:
                continue  # it is handed out with its state
            if self._stores(w):
                w.weight.copy_(self._weight_in(found[w]))
            self._to_tensor_ranks(w, w.weight)
            self._to_data_ranks(w, w.weight)
        for bucket in self._buckets():
            self._hand_out_state(bucket, found)

    def _weight_in(self, read: Mapping[str, Tensor]) -> Tensor:
        """The weight in `read` (prefix -> tensor); if it was read as a state, that state."""
        return read[WEIGHT] if WEIGHT in read else read[next(p for p in self._values if p in read)]

    def _hand_out_state(
        self, bucket: _Bucket, found: Mapping[SharedWeight, Mapping[str, Tensor]]
    ) -> None:
        whole = {
            (w, prefix): w.empty(self._type(w, prefix))
            for w, prefix in bucket
            if w.place.data == self._me.data or not w.holdings
        }
        for (w, prefix), state in whole.items():
            if self._stores(w):
                state.copy_(found[w][prefix] if prefix else self._weight_in(found[w]))
            self._to_tensor_ranks(w, state)
            if not w.holdings:
                self._to_data_ranks(w, state)
                self._put(w, prefix, state.view(-1))
        self._exchange(
            [
                _Route(w, prefix, held.part, source=w.place.data, target=held.rank)
                for w, prefix in bucket
                for held in w.holdings
            ],
            source=lambda route: whole[route.of, route.prefix].view(-1)[route.part],
            put=lambda route, values: self._put(route.of, route.prefix, values),
        )

    def _exchange(self, routes: Sequence[_Route], *, source: _TensorAt, put: _PutAt) -> None:
        """Sends the shards of `routes` to their targets; all data ranks pass the same routes."""
        me = self._me.data
        # In the order of ranks, in which the collective splits its input. Sorting is stable, so
        # sender and receiver have their common routes in the same order.
        leaving = sorted((r for r in routes if r.source == me != r.target), key=lambda r: r.target)
        coming = sorted((r for r in routes if r.target == me != r.source), key=lambda r: r.source)
        for route in routes:
            if route.source == route.target == me:
                put(route, source(route))
        # All data ranks have the same routes: none of them waits alone in the collective.
        if all(route.source == route.target for route in routes):
            return
        ranks, sizes_out, sizes_in = self._groups.dp_cp.size(), Counter(), Counter()
        for route in leaving:
            sizes_out[route.target] += route.numel
        for route in coming:
            sizes_in[route.source] += route.numel
        pieces = [source(route).to(device(), torch.float32) for route in leaving]
        received = torch.empty(sizes_in.total(), device=device())
        dist.all_to_all_single(
            received,
            torch.cat(pieces) if pieces else received.new_empty(0),
            [sizes_in[rank] for rank in range(ranks)],
            [sizes_out[rank] for rank in range(ranks)],
            group=self._groups.dp_cp,
        )
        for route, piece in zip(
            coming, received.split([route.numel for route in coming]), strict=True
        ):
            put(route, piece)

    def _stores(self, w: SharedWeight) -> bool:
        return w.place == self._me

    def _copy_of(self, data_rank: int) -> int:
        return data_rank // self._groups.intra_dp_cp.size()

    def _prefixes(self, w: SharedWeight) -> list[str]:
        """Prefixes of the tensors of `w` that are sharded over data ranks."""
        states = [p for p in self._values if has_state(w.weight, p)] if w.trained else []
        return [*([WEIGHT] if w.in_shares else []), *states]

    def _type(self, w: SharedWeight, prefix: str) -> torch.dtype:
        return torch.float32 if prefix else w.entry.dtype

    def _own(self, w: SharedWeight, prefix: str) -> Tensor:
        """This rank's shard of the state `prefix` of `w`, or of the weight itself, flat."""
        if prefix == WEIGHT:
            return numbers_of(w.weight)
        return self._values[prefix][self._numbers[w.weight]].view(-1)

    def _put(self, w: SharedWeight, prefix: str, values: Tensor) -> None:
        if prefix == WEIGHT:
            put_rows(w.weight, values)
        else:
            self._own(w, prefix).copy_(values, non_blocking=True)

    def _to_tensor_ranks(self, w: SharedWeight, tensor: Tensor) -> None:
        """Broadcasts `tensor` to all tensor ranks from the one that has read `w`."""
        if not w.split and self._groups.tp.size() > 1 and w.place.data == self._me.data:
            broadcast(tensor, self._groups.tp, source=w.place.tensor)

    def _to_data_ranks(self, w: SharedWeight, tensor: Tensor) -> None:
        if self._groups.dp_cp.size() > 1:
            broadcast(tensor, self._groups.dp_cp, source=w.place.data)

    def _buckets(self) -> Iterator[_Bucket]:
        """Groups of the sharded tensors, each of at most `BUCKET_BYTES` or of one tensor."""
        bucket, size = [], 0
        for w in self._weights:
            own = w.numel * _FLOAT32_BYTES
            for prefix in self._prefixes(w):
                if bucket and size + own > BUCKET_BYTES:
                    yield bucket
                    bucket, size = [], 0
                bucket.append((w, prefix))
                size += own
        if bucket:
            yield bucket

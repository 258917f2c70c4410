"""Computes packs on the ranks of a model replica: context ranks and pipeline stages.

1. rank_part       each context rank takes its shard of every sample
2. run_pipeline    the stages process several packs by Megatron-Core's schedule
3. whole_outputs   runs both, and joins the outputs of all ranks, for distillation
4. FullForward     the model as a function of one pack, for sampling

Tensor parallelism concerns only the model's linear layers.
"""

# C patch features, T packed tokens, N samples, M level rows

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.nn.functional import pad

from dit.batch import LATENTS, NoisyTokens, PackedBatch, Problem, SequenceShard, TokenStream
from dit.config import ModelConfig
from dit.distributed.watchdog import heartbeat
from dit.pack_wire import to_device

Item = tuple[PackedBatch, Problem]
Shape = list[int]
Stream = TypeVar("Stream", bound=TokenStream)


class _HasShare(Protocol):
    @property
    def share(self) -> SequenceShard: ...


class SharesTokens(Protocol):
    """Interface of a network that says how ranks divide its tokens; all families implement it."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def groups(self) -> ProcessGroupCollection: ...
    @property
    def context(self) -> _HasShare: ...


def rank_part(module: SharesTokens, item: Item) -> Item:
    """This rank's shard of `item`, a pack and its regression problem; `module` is its network."""
    multiple = module.model.token_multiple
    return split_tokens(*item, share=module.context.share, multiple=multiple)


def split_tokens(
    batch: PackedBatch, problem: Problem, *, share: SequenceShard, multiple: int
) -> Item:
    """A context rank's tokens of a pack and of its regression problem, with padding at the end.

    Their number becomes a multiple of `multiple` (`ModelConfig.token_multiple` says why). All
    random draws were made for the whole pack before, so the numbers are those of a single rank.
    Other token streams (such as sound) also get their noisy tokens, which the network reads
    (`NoisyTokens`).
    """
    others, problems = dict[str, TokenStream](), dict[str, Problem]()
    for name, own in problem.others.items():
        fed = NoisyTokens(input_TC=own.input_TC, level_M=own.level_M)
        stream = batch.others[name].with_method(fed)
        others[name], problems[name] = _split(stream, own, share=share, multiple=multiple)
    batch, problem = _split(batch, problem, share=share, multiple=multiple)
    if not others:
        return batch, problem
    return replace(batch, others=others), replace(problem, others=problems)


def _split(
    stream: Stream, problem: Problem, *, share: SequenceShard, multiple: int
) -> tuple[Stream, Problem]:
    """A context rank's tokens of one token stream, and of its regression problem.

    There is at least one token, so that every weight has a gradient.
    """
    rows_T = stream.rows(share)
    padding = -len(rows_T) % multiple if len(rows_T) else multiple
    if share.count == 1 and padding == 0:
        return stream, problem
    rows_T = to_device(rows_T, stream.latent_TC.device)

    def part(tensor: Tensor, value: Any = 0) -> Tensor:
        """This rank's rows of `tensor` [T, ...], followed by padding with `value`."""
        mine = tensor[rows_T]
        return pad(mine, (0, 0) * (mine.dim() - 1) + (0, padding), value=value)

    # Padding needs the index of an existing sample and level row; any will do, because nothing
    # reads the output of padding.
    last, rows_of = stream.num_samples - 1, ("segment_T", "level_row_T")
    tensors = {
        name: part(tensor, last if name in rows_of else 0)
        for name, tensor in stream.token_tensors.items()
    }
    mine = replace(stream.with_tensors(tensors), share=share)
    return mine, replace(
        problem, input_TC=part(problem.input_TC), target_TC=part(problem.target_TC)
    )


def join_tokens(part_TC: Tensor, batch: TokenStream, module: SharesTokens) -> Tensor:
    """The tokens of all context ranks [T, C] in the order of the pack; undoes `split_tokens`.

    `part_TC` has this rank's tokens and their padding, and `batch` is the whole pack. All context
    ranks call it.
    """
    share, tokens = module.context.share, len(batch.segment_T)
    if share.count == 1:
        return part_TC[:tokens]
    part_TC = part_TC[: tokens // share.count].contiguous()
    parts = [torch.empty_like(part_TC) for _ in range(share.count)]
    dist.all_gather(parts, part_TC, group=module.groups.cp)
    joined_TC = part_TC.new_empty(tokens, part_TC.shape[1])
    for index, part in enumerate(parts):
        rows_T = batch.rows(replace(share, index=index))
        joined_TC[to_device(rows_T, part.device)] = part
    return joined_TC


def run_pipeline(
    chunks: Sequence[nn.Module],
    items: Sequence[Item],
    forward_step: Callable[[Iterator[Item], nn.Module], tuple[Tensor, Any]],
    *,
    forward_only: bool,
) -> list[Any]:
    """Runs Megatron-Core's pipeline schedule over `items`, one micro-batch each.

    `forward_step` returns an output, and a loss function or None. On the last stage the result has,
    for each item, the last value that the loss function returns, or the output if there is no loss
    function; on other stages it is empty. Unless `forward_only`, gradients are accumulated.
    """
    module: Any = getattr(chunks[0], "module", chunks[0])
    groups, virtual = module.groups, len(chunks)
    # The interleaved schedule takes multiples of the stages. Only validation may have other counts:
    # its first item is repeated, and the results of the copies are dropped.
    spare = -len(items) % groups.pp.size() if virtual > 1 else 0
    items = [*items, *(items[0] for _ in range(spare))]
    shapes = [module.hidden_shape(batch) for batch, _ in items]
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(items) for _ in chunks] if virtual > 1 else iter(items),
        model=[*chunks],
        num_microbatches=len(items),
        seq_length=1,  # packs vary in length: `StageLink` knows the shape of each
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=StageLink(groups.pp, module.config, shapes),
        pg_collection=groups,
    )
    return results[: len(results) - spare] if results else []


class StageLink(P2PCommunicator):
    """Megatron-Core's communicator between pipeline stages, for packs that differ in length.

    Megatron-Core sends the shape of each tensor ahead of it and waits until the shape is received.
    With as many packs as stages, one virtual stage then waits to send a gradient's shape while the
    stage that should receive it waits to send hidden states, for ever. But every stage has every
    pack, and the order of the schedule is known: so shapes are computed locally and never sent.

    It needs `batch_p2p_comm=False`: with two stages each is both the next and the previous one of
    the other, and only unbatched messages have a defined order then.
    """

    def __init__(self, group: dist.ProcessGroup, config: ModelParallelConfig, shapes: list[Shape]):
        """`shapes` are the shapes of the packs' hidden states, in the order of packs."""
        super().__init__(group, config)
        virtual = config.virtual_pipeline_model_parallel_size or 1
        self._from_previous, self._from_next = received_shapes(
            shapes, stage=group.rank(), stages=group.size(), virtual=virtual
        )

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,  # noqa: ARG002
        tensor_send_prev: Tensor | None,  # noqa: ARG002
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        """Shapes of the tensors from the previous and next stage, found without communication."""
        previous = next(self._from_previous) if recv_prev else []
        following = next(self._from_next) if recv_next else []
        return previous, following


def received_shapes(
    shapes: Sequence[Shape], *, stage: int, stages: int, virtual: int
) -> tuple[Iterator[Shape], Iterator[Shape]]:
    """Shapes that a stage receives: hidden states from the previous, gradients from the next one.

    Both are in the order in which the schedule takes the packs. The last stage sends its output to
    the first as input of the next virtual stage, except the output of the last virtual stage.
    Gradients go the other way.
    """
    table = get_schedule_table(len(shapes), virtual, stages)
    every = [shapes[pack] for pack, _ in table]
    wrapped_around = [shapes[pack] for pack, chunk in table if chunk < virtual - 1]
    return (
        iter(wrapped_around if stage == 0 else every),
        iter(wrapped_around if stage == stages - 1 else every),
    )


@torch.no_grad()
def whole_outputs(
    chunks: Sequence[nn.Module], items: Sequence[Item], *, doing: str = "sampling"
) -> list[Any]:
    """Outputs of the network for all tokens of whole packs, float32 [T, C] each, on all ranks.

    For a pack with several token streams, the output is a dict of tensors by stream. All tensor,
    context and pipeline ranks of a replica call it with the same packs. `doing` names the activity
    in messages of the watchdog.
    """
    module: Any = getattr(chunks[0], "module", chunks[0])
    mine, stages = [rank_part(module, item) for item in items], module.groups.pp

    def forward_step(waiting: Iterator[Item], model: nn.Module) -> tuple[Any, None]:
        heartbeat(doing)
        batch, problem = next(waiting)
        return model(problem.input_TC, problem.level_M, batch), None

    if stages.size() == 1:
        parts = [forward_step(iter([item]), chunks[0])[0] for item in mine]
    else:
        parts = run_pipeline([*chunks], mine, forward_step, forward_only=True)
    outputs = []
    for index, (batch, problem) in enumerate(mine):
        of_streams, whole, made = bool(problem.others), items[index][0].streams, dict[str, Tensor]()
        for name, stream in batch.streams.items():
            features = module.model.output_features
            if name in problem.others:
                features = problem.others[name].input_TC.shape[1]
            if not parts:
                out_TC = problem.input_TC.new_empty(len(stream.segment_T), features)
            else:
                out_TC = (parts[index][name] if of_streams else parts[index]).float()
            if stages.size() > 1:  # the last stage sends its output to all
                out_TC = out_TC.contiguous()
                dist.broadcast(out_TC, group=stages, group_src=stages.size() - 1)
            made[name] = join_tokens(out_TC, whole[name], module)
        outputs.append(made if of_streams else made[LATENTS])
    return outputs


class FullForward(nn.Module):
    """The model as a function of a whole pack, the same on every layout; it has no backward pass.

    All tensor, context and pipeline ranks of a replica call it with the same input and get the same
    output [T, C]. For a pack with several token streams, the output is a dict of tensors by stream.
    """

    def __init__(self, chunks: Sequence[nn.Module]):
        """`chunks` are this rank's model chunks, with or without wrapper for data parallelism."""
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.first: Any = getattr(chunks[0], "module", chunks[0])
        self.groups = self.first.groups

    @torch.no_grad()
    def forward(self, input_TC: Tensor, level_M: Tensor, batch: PackedBatch) -> Any:
        others = dict[str, Problem]()
        for name, stream in batch.others.items():
            fed = stream.method(NoisyTokens)
            assert fed is not None, "each stream has its noisy tokens"
            others[name] = _without_loss(fed.input_TC, fed.level_M)
        problem = replace(_without_loss(input_TC, level_M), others=others)
        return whole_outputs([*self.chunks], [(batch, problem)])[0]


def _without_loss(input_TC: Tensor, level_M: Tensor) -> Problem:
    return Problem(
        input_TC=input_TC,
        level_M=level_M,
        target_TC=input_TC,
        weight_N=level_M,
        noise_N=level_M,
    )

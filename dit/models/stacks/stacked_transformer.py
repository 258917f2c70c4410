"""Base of the networks of all families: stacks of layers, divided into pipeline stages.

A pass is: `embed`, the layers of each stack in order, `head`.
"""

# T tokens of a stream (latents, text or both), N samples, M timesteps
# C patch features, D model width

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import pad

from dit.batch import AdapterDropout, PackedBatch, Perturbation
from dit.config import ModelConfig
from dit.models.compilation import check_compiler
from dit.models.layer_spec import ALL_NOISE, TOKENS, StackSpec
from dit.models.layers.adaptable import DropoutRows, TokenPlaces, dropping
from dit.models.layers.context_parallel import Context
from dit.models.layers.parallel_linear import BuildContext
from dit.models.layers.per_sample import PerSample
from dit.models.layers.transformer_engine import check_engine
from dit.models.stacks.stack import LayerStack, pipeline_stages, token_multiplications
from dit.models.stacks.token_routing import WAITING, RoutedPass, RoutedTokens, kept_pack
from dit.pack_wire import to_device

Blocks = dict[str, Tensor]
"""Hidden states and embeddings of a pack's other inputs, by name."""
Output = Tensor | Mapping[str, Tensor]
"""The output for the latents, or a mapping from the names of streams to their outputs."""


class StackedTransformer(MegatronModule):
    """Base of all networks: maps each noisy token of a pack to an output.

    Every sample of the pack has its own timestep, positions and text, and does not attend to other
    samples. The first pipeline stage embeds all inputs, and sends the embeddings of timesteps,
    positions and text with the hidden states, so that later stages need no copy of those weights.

    A family defines, in the order of a pass: `prepared` (adjusts the pack), `layout` (the order of
    tokens, computed once for a pass), `embed`, `conditions` and `head`. It also defines
    `condition_shapes`, the shapes of the tensors that stages send besides hidden states.
    """

    shares_samples: ClassVar[bool] = False
    """Whether each context rank must have an equal shard of every sample."""
    sign: ClassVar[int] = 1
    """Factor of the head's output, `ObjectiveConventions.sign` of the family."""
    tells_data_part: ClassVar[bool] = False
    """Whether the network embeds 1 - t instead of t; all other code uses t."""
    unread: ClassVar[tuple[str, ...]] = ()
    """Names of streams that the head does not use; the last layer does not compute them."""
    token_blocks: ClassVar[tuple[str, ...]] = ()
    """Names in `condition_shapes` of tensors that have a row for each token."""

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        groups: ProcessGroupCollection,
        vp_stage: int | None,
        stacks: Sequence[StackSpec],
    ):
        check_engine(model)
        if model.compile:
            check_compiler()
        super().__init__(config=config)
        self.model: Any = model  # the configuration class of the family
        self.groups = groups
        # Attributes that Megatron-Core's schedules read.
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = False
        self.vp_stage = vp_stage
        self.input_tensor: Tensor | None = None  # output of the previous stage
        self.context = Context(
            group=groups.cp, comm=model.cp_comm_type, shares_samples=self.shares_samples
        )
        ranks, virtual = groups.pp.size(), model.virtual_stages
        context = BuildContext(model=model, config=config, groups=groups)
        work_of = partial(token_multiplications, context)
        self.plan = pipeline_stages(stacks, ranks * virtual, work_of)
        self.stage = (vp_stage or 0) * ranks + groups.pp.rank()
        self.pre_process, self.post_process = self.stage == 0, self.stage == len(self.plan) - 1
        self.stack_specs = tuple(stacks)
        self.adapter_dropout = 0.0  # `attach_adapters` sets it

    def build_stacks(self) -> None:
        """Creates the stacks as attributes; called between the creation of embedders and head.

        Weights are summed in the gradient norm in the order in which they are created.
        """
        context = BuildContext(model=self.model, config=self.config, groups=self.groups)
        before, (*_, last) = 0, (spec for spec in self.stack_specs if spec.count)
        for spec in self.stack_specs:
            # Not a name of nn.Module: a stack `double` would be mistaken for nn.Module.double.
            assert not hasattr(self, spec.name), f"the network has an attribute {spec.name} already"
            here = self.plan[self.stage][spec.name]
            at = {"vp_stage": self.vp_stage, "layers_before": before}
            unread = self.unread if spec is last else ()
            setattr(self, spec.name, LayerStack(context, spec, here, **at, unread=unread))
            before += here.count

    @property
    def stacks(self) -> dict[str, LayerStack]:
        """The stacks by name, in the order of the pass; some may have no layers on this stage."""
        return {spec.name: getattr(self, spec.name) for spec in self.stack_specs}

    def parameters_without_gradient(self) -> list[str]:
        """Name patterns of weights on this stage whose gradient is zero for every pack.

        They get no weight decay, because no gradient would counteract it.
        """
        return [
            f"{name}.{pattern}"
            for name, stack in self.stacks.items()
            for pattern in stack.without_gradient()
        ]

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Stores the previous stage's output, [rows, 1, D], or None on the first stage.

        Megatron-Core's schedules call this method, with one tensor in the list `input_tensor`.
        """
        self.input_tensor = input_tensor[0]

    def hidden_shape(self, batch: PackedBatch) -> list[int]:
        """The shape of the tensor that stages send for `batch`, equal between all stages."""
        # Any stage will do: separate latents and text have as many rows as one joint stream.
        shapes = self.stage_shapes(batch, after=0)
        return [stage_rows(shapes, self.config.hidden_size), 1, self.config.hidden_size]

    def forward(self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch) -> Output:
        """The network's output [T, C], float32; it is undefined on padding tokens.

        For a pack with other streams it is a mapping from the names of streams to their outputs.
        Every pipeline stage but the last returns the next stage's input instead.
        """
        batch = self.prepared(batch)
        layout = self.layout(batch)
        if self.tells_data_part:
            level_M = self.data_part(level_M)
        with dropping(self._dropout_rows(batch, layout)):
            return self._forward(x_TC, level_M, batch, layout)

    @staticmethod
    def data_part(level_M: Tensor) -> Tensor:
        """The timesteps 1000 - `level_M`, for networks with `tells_data_part`."""
        return ALL_NOISE - level_M

    def _dropout_rows(self, batch: PackedBatch, layout: Any) -> DropoutRows | None:
        """The seed and positions for dropout on the inputs of adapters in this pass.

        Returns None without such dropout, or in evaluation.
        """
        drops = batch.method(AdapterDropout)
        if drops is None or not self.training or not self.adapter_dropout:
            return None
        places = {
            name: TokenPlaces(whole_T=place_T, own_T=self.my_tokens(place_T))
            for name, place_T in self.token_places(batch, layout).items()
        }
        kernels = self.model.fused_kernels
        return DropoutRows(seed=drops.seed, places=places, fused_kernels=kernels)

    def token_places(self, batch: PackedBatch, layout: Any) -> Mapping[str, Tensor]:  # noqa: ARG002
        """The index in the pack, int64, of each token of this context rank, by stream."""
        place_T = to_device(batch.rows(batch.share), batch.segment_T.device)
        # Padding of this context rank gets index 0; no real token depends on it.
        return {TOKENS: pad(place_T, (0, len(batch.segment_T) - len(place_T)))}

    def _forward(self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: Any) -> Output:
        if self.pre_process:
            blocks = self.embed(x_TC, level_M, batch, layout)
        else:
            assert self.input_tensor is not None
            shapes = self.stage_shapes(batch, after=self.stage - 1)
            blocks = unpack_stage_state(self.input_tensor, shapes, self.config.hidden_size)
        conditions = self.conditions(blocks, batch, layout)
        conditions = replace(conditions, perturbation=batch.method(Perturbation))
        learned = {name: blocks[name] for name in self.condition_shapes(batch)}
        routed = self._routed_pass(learned, batch)
        blocks = learned | self.run_stacks(blocks, conditions, routed)
        if not self.post_process:
            shapes = self.stage_shapes(batch, after=self.stage)
            return pack_stage_state(blocks, shapes, self.config.hidden_size)
        made = self.head(blocks, batch, layout)
        if isinstance(made, Tensor):
            return self._raw(made)
        return {name: self._raw(made_TC) for name, made_TC in made.items()}

    def _raw(self, made_TC: Tensor) -> Tensor:
        return made_TC.float() if self.sign == 1 else -made_TC.float()

    def _routed_pass(self, learned: Blocks, batch: PackedBatch) -> RoutedPass | None:
        """The inputs of the routed layers (token routing), from the blocks `learned` of all tokens.

        Returns None if all layers process all tokens.
        """
        route = self.model.token_route
        if route is None or not batch.is_routed:
            return None
        tokens = RoutedTokens.of(batch, route, my_tokens=self.my_tokens)
        kept = kept_pack(batch, route)
        layout = self.layout(kept)
        learned = learned | {
            name: tokens.apart(learned[name])[0] for name in self.token_blocks if name in learned
        }
        return RoutedPass(
            tokens=tokens,
            conditions=self.conditions(learned, kept, layout),
            dropout=self._dropout_rows(kept, layout),
        )

    def run_stacks(
        self, blocks: Blocks, conditions: Any, routed: RoutedPass | None = None
    ) -> Blocks:
        """The hidden states, by name, after the layers of this stage.

        If the stage ends between routed layers, they include, as `WAITING`, the tokens that skip
        these layers.
        """
        hidden = blocks
        for name, stack in self.stacks.items():
            if not len(stack.layers):
                continue
            if routed is None:
                hidden = self._run_layers(stack, hidden, conditions)
            else:
                first = self._first_layer(name, self.stage)
                hidden = self._run_route(stack, first, hidden, conditions, routed)
        return hidden

    def _run_route(
        self, stack: LayerStack, first: int, hidden: Blocks, conditions: Any, routed: RoutedPass
    ) -> Blocks:
        """The hidden states after the layers of `stack`, some of which are routed layers.

        `first` is the index, over all stacks, of the stack's first layer on this stage.
        """
        tokens, here = routed.tokens, first + len(stack.layers)
        for start, stop, inside in tokens.route.parts(first, here):
            part = (start - first, stop - first)
            if not inside:
                hidden = self._run_layers(stack, hidden, conditions, part)
                continue
            if WAITING not in hidden:
                hidden = self.parted(hidden, conditions)
                kept, waiting = tokens.apart(hidden[TOKENS])
                hidden = hidden | {TOKENS: kept, WAITING: waiting}
            waiting = hidden[WAITING]
            with dropping(routed.dropout):
                hidden = self._run_layers(stack, hidden, routed.conditions, part)
            if stop <= tokens.route.last:
                hidden = hidden | {WAITING: waiting}
                continue
            hidden = self.parted(hidden, routed.conditions)
            hidden = hidden | {TOKENS: tokens.together(hidden[TOKENS], waiting)}
            hidden = self._as_taken(stack, hidden, conditions)
        return hidden

    def _run_layers(
        self,
        stack: LayerStack,
        hidden: Blocks,
        conditions: Any,
        part: tuple[int, int] | None = None,
    ) -> Blocks:
        hidden = self._as_taken(stack, hidden, conditions)
        beside = {name: hidden[name] for name in self.rows_beside(stack)}
        first, *others = stack.hidden
        if not others:
            return beside | {first: stack(hidden[first], conditions, part)}
        rows = stack(tuple(hidden[name] for name in stack.hidden), conditions, part)
        return beside | dict(zip(stack.hidden, rows, strict=True))

    def _as_taken(self, stack: LayerStack, hidden: Blocks, conditions: Any) -> Blocks:
        return hidden if stack.hidden[0] in hidden else self.joined(hidden, conditions)

    def _first_layer(self, stack: str, stage: int) -> int:
        """The index, over all stacks, of the first layer of `stack` on pipeline stage `stage`."""
        names = [spec.name for spec in self.stack_specs]
        before = self.stack_specs[: names.index(stack)]
        return sum(spec.count for spec in before) + self.plan[stage][stack].first

    def stage_shapes(self, batch: PackedBatch, *, after: int) -> Shapes:
        """The shapes, by name, of the tensors that stage `after` sends to the next stage.

        They are hidden states, including tokens that skip routed layers, then the tensors of
        `condition_shapes`.
        """
        width, rows = self.config.hidden_size, dict(self.hidden_rows(batch))
        *_, last = (s.name for s in self.stack_specs if self.plan[after][s.name].count)
        hidden, waiting = self.rows_beside(self.stacks[last]), dict[str, tuple[int, ...]]()
        behind = self._first_layer(last, after) + self.plan[after][last].count
        route = self.model.token_route
        if batch.is_routed and route.holds(behind):
            left_out = rows[TOKENS] - route.rows(rows[TOKENS])
            rows[hidden[0]] -= left_out  # the first of the hidden states has the latents
            waiting[WAITING] = (left_out, width)
        shapes = {name: (rows[name], self.hidden_width(name)) for name in hidden} | waiting
        return shapes | dict(self.condition_shapes(batch))

    def my_tokens(self, x_T: Tensor) -> Tensor:
        """This tensor rank's shard of the tokens `x_T`, or all without sequence parallelism."""
        if not self.config.sequence_parallel:
            return x_T
        return scatter_to_sequence_parallel_region(x_T, group=self.groups.tp)

    def per_sample(self, level_row_T: Tensor) -> PerSample:
        """A `PerSample` for tokens of this tensor rank with the table rows `level_row_T` [T]."""
        model = self.model
        return PerSample.of(level_row_T, compiled=model.compile, fused_kernels=model.fused_kernels)

    def all_tokens(self, x_T: Tensor) -> Tensor:
        """All tokens of the context rank, gathered from the shards `x_T` of its tensor ranks.

        Each tensor rank computes the whole loss, so gradients are not summed over ranks.
        """
        if not self.config.sequence_parallel:
            return x_T
        # `tensor_parallel_output_grad=False`: gradients are not summed over ranks.
        return gather_from_sequence_parallel_region(
            x_T, tensor_parallel_output_grad=False, group=self.groups.tp
        )

    @property
    def token_parts(self) -> int:
        """Number of tensor ranks that divide the tokens; 1 without sequence parallelism."""
        return self.groups.tp.size() if self.config.sequence_parallel else 1

    # Methods that families override.

    def at_step(self, step: int) -> None:  # noqa: ARG002
        """Sets the training step, counted from 1; most networks do not depend on it."""
        return

    def step_values(self) -> dict[str, float]:
        """Values for the log that depend on the training step, by name."""
        return {}

    def prepared(self, batch: PackedBatch) -> PackedBatch:
        """The pack as the network needs it, for example with padded text.

        `batch` itself is not changed.
        """
        return batch

    def hidden_rows(self, batch: PackedBatch) -> Mapping[str, int]:
        """The number of tokens on this rank, for each stream of hidden states by its name."""
        return {"hidden": len(batch.segment_T) // self.token_parts}

    def hidden_width(self, name: str) -> int:  # noqa: ARG002
        """The width of the stream of hidden states `name`, by default the model's width.

        A stream of another modality may have another width. Between stages its numbers are sent in
        rows of the model's width.
        """
        return self.config.hidden_size

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        """The shapes, by name, of the tensors that stages send besides hidden states.

        `conditions` and `head` use these tensors. The shapes must depend only on the pack, and be
        equal on all stages.
        """
        raise NotImplementedError

    def layout(self, batch: PackedBatch) -> Any:
        """The order and timesteps of the tokens of `batch`, computed once for a pass.

        Every pipeline stage computes it. Its type depends on the family.
        """
        raise NotImplementedError

    def embed(self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: Any) -> Blocks:
        """The hidden states and the tensors of `condition_shapes`; called on the first stage."""
        raise NotImplementedError

    def conditions(self, blocks: Blocks, batch: PackedBatch, layout: Any) -> Any:
        """The inputs of every layer besides tokens, from the `blocks` that stages send."""
        raise NotImplementedError

    def rows_beside(self, stack: LayerStack) -> tuple[str, ...]:
        """The names of the streams of hidden states that exist while `stack` runs."""
        return stack.hidden

    def joined(self, hidden: Blocks, conditions: Any) -> Blocks:
        """A mapping with the joint stream, the input of single-stream layers.

        It is computed from the separate streams in `hidden`.
        """
        raise NotImplementedError

    def parted(self, hidden: Blocks, conditions: Any) -> Blocks:  # noqa: ARG002
        """`hidden` with separate streams: a joint stream in it is split."""
        return hidden

    def head(self, blocks: Blocks, batch: PackedBatch, layout: Any) -> Output:
        """The output [T, C] for all tokens of this context rank; called on the last stage.

        For a pack with other streams it is a mapping from the names of streams to their outputs.
        """
        raise NotImplementedError


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name, in the order in which pipeline stages send them."""


def _rows(shape: tuple[int, ...], width: int) -> int:
    return -(-math.prod(shape) // width)


def stage_rows(shapes: Shapes, width: int) -> int:
    """The number of rows of `width` numbers for tensors of `shapes`; each tensor starts a row."""
    return sum(_rows(shape, width) for shape in shapes.values())


def pack_stage_state(blocks: Mapping[str, Tensor], shapes: Shapes, width: int) -> Tensor:
    """The tensors `blocks` as one tensor [rows, 1, `width`], in the order of `shapes`.

    All are converted to the dtype of the first tensor, the hidden states.
    """
    parts, dtype = [], blocks[next(iter(shapes))].dtype
    for name, shape in shapes.items():
        assert blocks[name].shape == shape, f"{name} is {tuple(blocks[name].shape)}, not {shape}"
        flat = blocks[name].flatten().to(dtype)
        parts.append(pad(flat, (0, -len(flat) % width)).view(-1, width))
    return torch.cat(parts)[:, None]


def unpack_stage_state(rows: Tensor, shapes: Shapes, width: int) -> dict[str, Tensor]:
    """The tensors of `shapes` by name, from `rows`: the inverse of `pack_stage_state`."""
    parts = rows[:, 0].split([_rows(shape, width) for shape in shapes.values()])
    return {
        name: part.flatten()[: math.prod(shape)].view(shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }

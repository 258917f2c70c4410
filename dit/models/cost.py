"""What a network costs, from the description of its layers: parameters, operations, memory.

A family describes its network once (`Family.cost`): its stacks, and what comes before and after
them. Everything else is counted from that, so that estimates, plans and the cost of a pack need
neither torch nor a formula for each family.
"""

# n latent tokens, m text tokens of a sample

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from dit.config import EmaKind, ModelConfig, Precision, Recompute, RecomputeMethod, RunConfig
from dit.config.checks import check
from dit.models.family import family_of
from dit.models.layer_spec import Cost, Multiplications, RowKind, StackSpec

if TYPE_CHECKING:
    from dit.batch import PackedBatch

KEPT_OUTSIDE = 4
"""Numbers that the backward pass needs outside of split matrices, for each exchange of tensor ranks
and each token and unit of width; sequence parallelism splits them."""
_FACTOR_BYTES = 4
"""Of a row of a matrix in 8 bits."""
MOST_BYTES = 2**44
"""16 TiB: more than any device has, even if the estimate is wrong by a large factor."""


@dataclass(frozen=True, kw_only=True)
class NetworkCost:
    """A network: what comes before its layers, the layers, and what comes after them."""

    before: Cost
    stacks: tuple[StackSpec, ...]
    after: Cost
    text_tokens: int | None = None
    """Text is filled up to this many tokens a sample; None leaves it as long as it is."""
    image_rows: int = 0
    """Rows of an image encoder in each sample: of its text inputs' rows, but no text tokens. The
    description counts what they cost with the sample."""

    @property
    def layers(self) -> int:
        return sum(stack.count for stack in self.stacks)

    @property
    def exchanges(self) -> int:
        """Those of all layers."""
        return sum(stack.count * stack.layer.cost.exchanges for stack in self.stacks)

    @cached_property
    def multiplications(self) -> Multiplications:
        total = self.before.multiplications + self.after.multiplications
        for stack in self.stacks:
            total += stack.layer.cost.multiplications.times(stack.count)
        return total

    @cached_property
    def in_attention(self) -> Multiplications:
        """Those of `multiplications` that attention makes."""
        total = Multiplications()
        for stack in self.stacks:
            total += stack.layer.cost.in_attention.times(stack.count)
        return total

    @property
    def attends_jointly(self) -> bool:
        """Whether layers attend to latents and text together, so that each pays for the other."""
        shapes = (shape for stack in self.stacks for shape in stack.layer.cost.attentions)
        return any(shape.queries == RowKind.JOINT for shape in shapes)

    def text(self, lengths: Sequence[int]) -> Sequence[int]:
        """Text tokens that the layers see, of samples with so many rows of all text inputs."""
        if self.text_tokens is not None:
            return [self.text_tokens] * len(lengths)
        return [length - self.image_rows for length in lengths] if self.image_rows else lengths

    def parameters(self, *, tensor: int = 1, pipeline: int = 1) -> int:
        """On the fullest rank: the first stage has what comes before the layers, the last the rest.

        Each stage has as many layers; where they are of several kinds, its kinds are the largest.
        """
        sizes = [stack.layer.cost.parameters(tensor=tensor) for stack in self.stacks]
        each = [
            size for size, stack in zip(sizes, self.stacks, strict=True) for _ in range(stack.count)
        ]
        held = -(-len(each) // pipeline)
        layers = max(sum(each[at : at + held]) for at in range(0, len(each), held))
        ends = [self.before.parameters(tensor=tensor), self.after.parameters(tensor=tensor)]
        return layers + (sum(ends) if pipeline == 1 else max(ends))

    def layer_matrices(self, *, tensor: int = 1) -> tuple[int, int]:
        """Numbers, and rows, of the matrices of a layer, on average over the kinds of layers."""
        each = [(s.count, s.layer.cost) for s in self.stacks]
        numbers = sum(count * cost.matrix_numbers(tensor=tensor) for count, cost in each)
        rows = sum(count * cost.matrix_rows for count, cost in each)
        return numbers // self.layers, rows // self.layers

    def adapter_numbers(self, rank: int, *, tensor: int = 1, pipeline: int = 1) -> int:
        """Of adapters of attention and MLP in all layers, on one of the pipeline stages."""
        each = [s.layer.cost.adapter_numbers(rank, tensor=tensor) * s.count for s in self.stacks]
        return -(-sum(each) // pipeline)


@lru_cache(maxsize=64)  # of a plan's layouts; the cost of a pack is asked for at every pack
def network_cost(model: ModelConfig) -> NetworkCost:
    """The description of the network, by its family."""
    return family_of(model).cost(model)


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, over all ranks."""
    return network_cost(model).parameters()


def parameters_here(model: ModelConfig) -> int:
    """Parameters on the fullest rank."""
    return network_cost(model).parameters(
        tensor=model.tensor_model_parallel_size, pipeline=model.pipeline_model_parallel_size
    )


def trained_count(config: RunConfig) -> int:
    """Numbers that are trained, over all ranks; of adapters it takes the default targets."""
    if config.lora.enabled:
        return network_cost(config.model).adapter_numbers(adapter_rank(config))
    return parameter_count(config.model) - frozen_count(config)


def frozen_count(config: RunConfig) -> int:
    """Parameters that `optimizer.groups` freezes.

    Raises:
        Problems: as `group_of_weights`.
    """
    if not any(group.frozen for group in config.optimizer.groups):
        return 0
    from dit.models.parameter_groups import frozen_weights  # names of weights need torch

    return sum(math.prod(pair.shape) for pair in frozen_weights(config).pairs)


def trained_here(config: RunConfig) -> int:
    """Trained numbers on the fullest rank: parameters, or adapters in their place.

    Frozen groups count as if they were spread over the ranks as all parameters are.
    """
    model = config.model
    if not config.lora.enabled:
        return parameters_here(model) * trained_count(config) // parameter_count(model)
    layout = {
        "tensor": model.tensor_model_parallel_size,
        "pipeline": model.pipeline_model_parallel_size,
    }
    return network_cost(model).adapter_numbers(adapter_rank(config), **layout)


def adapter_rank(config: RunConfig) -> int:
    """That of the configuration, and 32 for a file whose ranks are not read yet."""
    return config.lora.rank or 32


def forward_flops(model: ModelConfig, *, tokens: Sequence[int], text: Sequence[int]) -> int:
    """Operations of one forward pass over samples of `tokens` patches and `text` caption tokens.

    A product of matrices counts 2 m n k. Lengths are the true ones: padding of samples and
    recomputation count nothing. Linears go by tokens or samples, attention by pairs of tokens.
    """
    cost = network_cost(model)
    return 2 * cost.multiplications.of(tokens, cost.text(text))


def attention_flops(model: ModelConfig, *, tokens: Sequence[int], text: Sequence[int]) -> int:
    """Those of `forward_flops` that attention takes."""
    cost = network_cost(model)
    return 2 * cost.in_attention.of(tokens, cost.text(text))


def pack_forward_flops(model: ModelConfig, batch: PackedBatch) -> int:
    """Operations of one forward pass, from the true geometry of the pack."""
    return forward_flops(model, tokens=batch.num_tokens, text=batch.text_rows)


def training_flops(model: ModelConfig, batch: PackedBatch) -> int:
    """Operations of a training step on a pack: the backward pass costs twice the forward one."""
    return 3 * pack_forward_flops(model, batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on the fullest device."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.ema + self.activations


def memory(config: RunConfig, *, world_size: int) -> Memory:
    """Rough need of one device: buffers of libraries and fragmentation come on top.

    Raises:
        Problems: the processes or the global batch do not divide.
    """
    model = config.model
    replicas = config.data_parallel_size(world_size)
    trained = trained_here(config)
    shards = config.optimizer_ranks(replicas)
    wide = model.precision is Precision.FP32
    hosted, moments = config.optimizer.optimizer_cpu_offload, config.optimizer.moment_bytes
    return Memory(
        weights=_weights(config),
        gradients=trained * (4 if wide or config.ddp.grad_reduce_in_fp32 else 2),
        # Two moments where they are not the host's, and a float32 copy of narrower weights.
        optimizer=trained * (moments * (not hosted) + 4 * (not wide)) // shards,
        ema=0 if config.ema.kind is EmaKind.NONE else trained * 4 // shards,
        activations=_activations(config, accumulation=config.train.global_batch_size // replicas),
    )


def _weights(config: RunConfig) -> int:
    """Bytes of weights and adapters."""
    model, lora = config.model, config.lora
    size = 4 if model.precision is Precision.FP32 else 2
    total = parameters_here(model) * size
    if not lora.enabled:
        return total
    cost = network_cost(model)
    numbers, rows = cost.layer_matrices(tensor=model.tensor_model_parallel_size)
    matrices = numbers * size
    if lora.base_dtype is not None:
        narrow = numbers + _FACTOR_BYTES * rows
        total -= -(-cost.layers // model.pipeline_model_parallel_size) * (matrices - narrow)
        matrices = numbers
    total -= model.blocks_to_swap * model.virtual_stages * matrices
    return total + trained_here(config) * size


def check_memory(config: RunConfig, *, world_size: int) -> None:
    """Refuses a run that no device could hold, before any process tries.

    Raises:
        Problems: names the sizes that ask for it, or processes and packs that do not divide.
    """
    model, data = config.model, config.dataset
    need = memory(config, world_size=world_size)
    states = need.total - need.activations
    check(
        (
            states <= MOST_BYTES,
            f"model.hidden_size={model.hidden_size}, model.num_layers={model.num_layers} and"
            f" model.mlp_ratio={model.mlp_ratio:g} make {parameter_count(model):,} parameters:"
            f" {states / 2**40:,.0f} TiB a device, more than any has; lower them",
        ),
        (
            need.activations <= MOST_BYTES,
            f"dataset.task_encoder_seq_length={data.task_encoder_seq_length} tokens of"
            f" model.hidden_size={model.hidden_size} keep {need.activations / 2**40:,.0f} TiB a"
            " device for the backward pass, more than any has; lower the first",
        ),
    )


def _activations(config: RunConfig, *, accumulation: int) -> int:
    """Bytes kept for the backward pass."""
    model = config.model
    pipeline = model.pipeline_model_parallel_size
    tokens = config.dataset.task_encoder_seq_length / model.context_parallel_size
    in_flight = min(accumulation, pipeline) / pipeline  # packs on a stage, times its part of layers
    if model.virtual_stages > 1:  # arXiv:2205.05198, Sec. 4.2.3
        in_flight *= 1 + (pipeline - 1) / (pipeline * model.virtual_stages)
    size = 4 if model.precision is Precision.FP32 else 2
    return int(_kept(model) * tokens * model.hidden_size * in_flight * size)


def _kept(model: ModelConfig) -> float:
    """Numbers that all layers keep for each token and unit of width, as they recompute."""
    layer, layers = kept_by_layer(model), network_cost(model).layers
    stages = model.pipeline_model_parallel_size * model.virtual_stages
    away = min(model.cpu_offloading_num_layers * stages, layers)
    # Of the layers on the host, at most one on its way there, or two on their way back.
    staying = min(layers - away + min(away, 1), layers)
    if model.recompute_granularity is not Recompute.FULL:
        return max(staying, min(away, 2)) * layer
    if model.recompute_method is RecomputeMethod.BLOCK:
        # The inputs of the first layers, and all others; at the end, the one that is recomputed.
        again = min(model.recompute_num_layers * stages, layers)
        return max(again - away, 0) + max(min(layers - again, staying), 1) * layer
    again = min(model.recompute_num_layers, layers)
    # The input of every group, and the group that is being recomputed.
    return staying / again + again * layer


def kept_by_layer(model: ModelConfig) -> float:
    """What a layer keeps, on average over the kinds of layers.

    Of the DiT, about 27 + 2 mlp_ratio, and 2 fewer where self- and cross-attention are recomputed.
    Counted at mlp_ratio 4 with autograd's saved-tensor hooks on a CPU: 34.5 in bf16, 32.3 with
    selective recomputation. On a GPU 6 rows of scale and gate come on top, and kernels of the norms
    of heads keep 4 fewer. Of Wan 10 more in bf16 (counted: 46.4, and 44.2 with selective
    recomputation), 11 with image rows (47.5).
    """
    cost = network_cost(model)
    kept = sum(stack.count * Fraction(_kept_in(stack.layer.cost, model)) for stack in cost.stacks)
    return float(kept / cost.layers)


def _kept_in(layer: Cost, model: ModelConfig) -> float:
    """Tensor parallelism splits what attention and MLP keep, sequence parallelism all of it."""
    tensor = model.tensor_model_parallel_size
    selective = model.recompute_granularity is Recompute.SELECTIVE
    narrow = model.precision is not Precision.FP32
    inside = layer.kept + narrow * layer.float32_inside - len(layer.attentions) * selective
    outside = KEPT_OUTSIDE * layer.exchanges + narrow * layer.float32_outside
    return outside / (tensor if model.sequence_parallel else 1) + inside / tensor

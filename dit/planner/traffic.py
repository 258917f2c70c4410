"""Bytes that one rank sends in a step, by kind of parallelism; and bytes of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from dit.config import (
    ContextComm,
    EmaKind,
    ModelConfig,
    Precision,
    Recompute,
    RecomputeMethod,
    RunConfig,
    Sharding,
)
from dit.models.linears import orthogonalisation, orthogonalising_ranks
from dit.models.registry import network_spec
from dit.sizing.activations import seen_tokens
from dit.sizing.memory import (
    parameter_count,
    parameters_here,
    trained_count,
    trained_here,
)
from dit.sizing.pack_traffic import pack_traffic

# Each exchange of a layer gathers its input and scatters its output. The backward pass does both in
# reverse, and gathers the input again for the weights' gradients.
_TENSOR_FORWARD, _TENSOR_BACKWARD = 2, 3
_FLOAT32 = 4  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that one rank sends in a step, by kind of parallelism."""

    tensor: float
    """Bytes between tensor ranks; the step waits for the fraction `exposed_part` of them."""
    context: float
    pipeline: float
    data: float
    """Bytes between data-parallel ranks; with FSDP, for all packs of the step."""
    copies: float = 0.0
    """Bytes to sum gradients over FSDP copies (`ddp.dp_replicate_size`), once a step."""


def traffic(config: RunConfig, *, tokens: float, accumulated: int, replicas: int) -> Traffic:
    """Bytes that one rank sends in a step of `accumulated` packs for each of `replicas`.

    `tokens` is the length of a pack before ranks divide it.
    """
    model = config.model
    tensor, context = model.tensor_model_parallel_size, model.context_parallel_size
    size = 4 if model.precision is Precision.FP32 else 2
    cost, stages = network_spec(model), model.pipeline_model_parallel_size
    layers, each = cost.layers / stages * accumulated, cost.exchanges / cost.layers
    rows = tokens / context * model.hidden_size * size  # bytes of one hidden state
    learned, forward = config.learning_passes, forward_passes(config)
    by_heads = model.cp_comm_type is ContextComm.A2A
    # a2a exchanges queries, keys, values and outputs; all_gather sends all keys and values to all.
    seen = rows * seen_tokens(model)
    exchanged = seen / tensor * (4 if by_heads else 2 * context)
    stage = rows / (tensor if model.sequence_parallel else 1)
    passes = config.mean_passes_without_gradient
    first_or_last = model.pipeline_model_parallel_size > 1
    return Traffic(
        tensor=layers
        * seen
        * (each * _TENSOR_FORWARD * forward + each * _TENSOR_BACKWARD * learned)
        * _others(tensor),
        context=layers * exchanged * (learned + forward) * _others(context),
        pipeline=(2 * learned + passes)
        * stage
        * accumulated
        * model.virtual_stages
        * first_or_last,
        **_data(config, size=size, packs=accumulated, replicas=replicas),
    )


def exposed_part(config: RunConfig) -> float:
    """Fraction of the tensor-parallel exchange that no computation hides.

    With sequence parallelism the backward pass of a linear with divided outputs gathers the
    linear's input while it computes the input's gradient, and scatters that gradient while it
    computes the weight's (`LinearWithGradAccumulationAndAsyncCommunication` of Megatron-Core).
    """
    forward = _TENSOR_FORWARD * forward_passes(config)
    backward = _TENSOR_BACKWARD * config.learning_passes
    beside = 2 * config.learning_passes if config.model.sequence_parallel else 0
    return (forward + backward - beside) / (forward + backward)


def forward_passes(config: RunConfig) -> float:
    """Number of forward passes over each pack, with recomputation and passes without gradients."""
    again = _recomputed_part(config.model)
    return passes_before(config) + config.learning_passes * (1 + again)


def passes_before(config: RunConfig) -> float:
    """Number of passes without gradients over each pack, in units of the pass with gradients.

    The pass of `cfg_target` has all tokens in all layers, the others those of the token route.
    """
    objective = config.objective
    by_all = objective.cfg_target is not None
    return config.mean_passes_without_gradient + by_all * (1 / seen_tokens(config.model) - 1)


def _recomputed_part(model: ModelConfig) -> float:
    """Fraction of the layers that are recomputed in full."""
    if model.recompute_granularity is not Recompute.FULL:
        return 0.0
    if model.recompute_method is RecomputeMethod.UNIFORM:
        return 1.0
    chunks = model.pipeline_model_parallel_size * model.virtual_stages
    return min(1.0, model.recompute_num_layers * chunks / network_spec(model).layers)


def _data(config: RunConfig, *, size: int, packs: int, replicas: int) -> dict[str, float]:
    """Bytes that one rank sends in a step to sum gradients and to gather weights.

    They are the fields `data` and, with FSDP, `copies` of `Traffic`. `size` is the number of bytes
    of a weight, `packs` the number of packs of a replica in a step.
    """
    gradient = 4 if config.ddp.grad_reduce_in_fp32 else size
    here, ranks = trained_here(config), replicas * config.model.context_parallel_size
    matrices = _matrices(config, size=size, replicas=replicas)
    learned = config.learning_passes
    if config.ddp.sharding is Sharding.WEIGHTS:
        shards, copies = config.optimizer_ranks(replicas), config.ddp.dp_replicate_size
        sent = pack_traffic(config, shards=shards)
        passes = learned + config.mean_passes_without_gradient  # each gathers all weights
        gathered = packs * (passes * sent.forward + learned * sent.backward)
        sums = config.ddp.sums(packs) * sent.gradients + matrices
        copied = here / shards * 2 * gradient * _others(copies)
        return {"data": gathered + learned * sums, "copies": learned * copied}
    if config.ddp.use_distributed_optimizer:
        return {"data": learned * (here * (gradient + size) * _others(ranks) + matrices)}
    return {"data": learned * here * 2 * gradient * _others(ranks)}


def _matrices(config: RunConfig, *, size: int, replicas: int) -> float:
    """Mean bytes that a rank sends in a step, so that Muon can orthogonalise its matrices."""
    ranks = orthogonalising_ranks(config, replicas)
    together = ranks // config.model.pipeline_model_parallel_size
    moved = orthogonalisation(config.model, config.optimizer).numbers / config.optimizer.muon_period
    return 2 * size * moved / ranks * _others(together)


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointBytes:
    """Bytes of a checkpoint, and those that each rank reads and writes (`dit/train/checkpoint`).

    Numbers for a rank are means; no rank exceeds them by more than the bytes of one weight.
    """

    whole: int
    share: float
    """Bytes that a rank writes and reads, and holds in host memory meanwhile."""
    sent: float
    """Largest number of bytes that a rank sends when saving: its state, and rows of weights."""
    received: int
    """Bytes that a rank receives when loading: its weights, and its optimizer state."""


def checkpoint_bytes(config: RunConfig, *, world_size: int) -> CheckpointBytes:
    """The bytes of a checkpoint of `config`, by arithmetic alone."""
    weight = 2 if config.model.precision is Precision.BF16 else _FLOAT32
    averaged = config.ema.kind is not EmaKind.NONE
    sharded = config.ddp.use_distributed_optimizer
    # Main parameters are stored as well, unless the weights are float32 and not sharded.
    states = len(config.optimizer.states.names)
    state = _FLOAT32 * (states + (sharded or weight == 2) + averaged)
    trained, adapted = trained_count(config), config.lora.enabled
    # A checkpoint of adapters holds no other weights, and frozen weights have no state.
    stored = trained if adapted else parameter_count(config.model)
    of_states = (
        trained * state - _FLOAT32 * orthogonalisation(config.model, config.optimizer).numbers
    )
    narrow = _FLOAT32 * orthogonalisation(config.model, config.optimizer).numbers_here
    whole = stored * weight + of_states
    kept, trained_of_rank = of_states / world_size, trained_here(config)
    here = trained_of_rank if adapted else parameters_here(config.model)
    weights = here * weight
    if config.ddp.sharding is Sharding.WEIGHTS:
        weights /= config.optimizer_ranks(config.data_parallel_size(world_size))
        kept += weights  # rows, which a rank sends as well
        weights = 0
    return CheckpointBytes(
        whole=whole,
        share=whole / world_size,
        sent=kept if sharded else 0,
        received=round(weights + (kept if sharded else trained_of_rank * state - narrow)),
    )

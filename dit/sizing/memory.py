"""Parameters of a run, trained parameters, and the memory of one device."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dit.config import (
    EmaKind,
    ModelConfig,
    Precision,
    RunConfig,
    Sharding,
)
from dit.config.checks import check
from dit.models.linears import orthogonalisation
from dit.models.registry import network_spec
from dit.sizing.activations import activation_bytes, number_bytes, numbers_of_pack
from dit.sizing.inventory import Inventory, Part, alone, inventory

_BACKWARD = 7
"""Peak size of temporary tensors in a layer's backward pass besides saved activations, in numbers
per token and unit of width. Counted at the peak: 3 for most layers, 5 for single-stream layers, 7
for Wan without the fused kernels."""
_FACTOR_BYTES = {Sharding.OPTIMIZER: 1, Sharding.WEIGHTS: 16}
"""Bytes of the scale of one row of an 8-bit matrix, alignment included, by `ddp.sharding`."""
_UNREAD_RANK = 32
"""Rank that estimates assume for an adapter file that is not on this machine."""
MOST_BYTES = 2**44
"""Limit for estimates, 16 TiB: more than any device has, even if the estimate is far too large."""


def inventory_of(model: ModelConfig) -> Inventory:
    """Weights and linears of the network of `model`, as one tensor rank has them."""
    return inventory(alone(model), tensor=model.tensor_model_parallel_size)


def parameter_count(model: ModelConfig) -> int:
    """Number of parameters of the whole network, over all tensor and pipeline ranks."""
    return inventory(alone(model)).parameters()


def parameters_here(model: ModelConfig) -> int:
    """Number of parameters on the rank that has most of them."""
    return inventory_of(model).parameters(pipeline=model.pipeline_model_parallel_size)


def trained_count(config: RunConfig) -> int:
    """Number of trained parameters over all ranks.

    Adapters are counted as with the default `lora.targets`.
    """
    if config.lora.enabled:
        return inventory(alone(config.model)).adapter_numbers(adapter_rank(config))
    return parameter_count(config.model) - frozen_count(config)


def frozen_count(config: RunConfig) -> int:
    """Number of parameters that `optimizer.groups` freezes.

    Raises:
        Problems: as `group_of_weights`.
    """
    if not any(group.frozen for group in config.optimizer.groups):
        return 0
    from dit.models.parameter_groups import frozen_weights  # names of weights need torch

    return sum(math.prod(pair.shape) for pair in frozen_weights(config).pairs)


def trained_here(config: RunConfig) -> int:
    """Number of trained parameters of network or adapters, on the rank with most parameters.

    Frozen groups are assumed to be spread over ranks as all parameters are.
    """
    model = config.model
    if not config.lora.enabled:
        return parameters_here(model) * trained_count(config) // parameter_count(model)
    return _adapters_here(model, adapter_rank(config))


def _adapters_here(model: ModelConfig, rank: int) -> int:
    """Number of parameters of adapters of `rank` on the rank that has most of them.

    Adapters are counted as with the default `lora.targets`.
    """
    layout = {
        "tensor": model.tensor_model_parallel_size,
        "pipeline": model.pipeline_model_parallel_size,
    }
    return inventory(alone(model)).adapter_numbers(rank, **layout)


def adapter_rank(config: RunConfig) -> int:
    """Rank of the adapters in `lora.init_from`, if it is set, else `lora.rank`.

    It is `_UNREAD_RANK` if neither is known.
    """
    lora = config.lora
    if lora.init_from is not None:
        return _rank_of_file(config.model, lora.init_from)
    return lora.rank or _UNREAD_RANK


def _rank_of_file(model: ModelConfig, file: str) -> int:
    """The rank at which adapters with the default targets have as many parameters as `file`.

    It is rounded up; `_UNREAD_RANK` if `file` cannot be read.
    """
    numbers = _numbers_of_file(file)
    if numbers is None:
        return _UNREAD_RANK
    return -(-numbers // inventory(alone(model)).adapter_numbers(1))


@lru_cache(maxsize=8)  # a plan asks for each of its layouts
def _numbers_of_file(place: str) -> int | None:
    """Number of elements of all matrices in a LoRA file, or in the first file of a folder.

    The shapes are read from the file's header. The result is None if the file cannot be read, so
    that an estimate can be made on another machine.
    """
    path = Path(place)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    try:
        with safe_open(files[0], framework="numpy") as opened:
            shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118
    except (IndexError, SafetensorError, OSError):
        return None
    # Alphas and magnitudes have fewer axes.
    return sum(math.prod(shape) for shape in shapes if len(shape) >= 2) or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of memory on the fullest device by kind, as estimated."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    activations: int
    """Activations that forward passes save for backward."""
    backward: int
    """Temporary tensors of the backward pass of one layer."""
    norms: int
    """Copy of the weights, from which `update_ratio` is computed at steps that are logged."""
    gathered: int = 0
    """With FSDP: the weights of gathered layers, and gradients before their reduction."""

    @property
    def total(self) -> int:
        return sum(getattr(self, one.name) for one in fields(self))


def memory(config: RunConfig, *, world_size: int) -> Memory:
    """A rough estimate of one device's memory, without fragmentation and buffers of libraries.

    Raises:
        Problems: the layout does not divide the processes, or replicas do not divide the global
            batch.
    """
    model = config.model
    replicas = config.data_parallel_size(world_size)
    networks = 1 + config.has_critic
    trained = trained_here(config) * networks
    shards, packs = config.optimizer_ranks(replicas), config.train.global_batch_size // replicas
    wide, in_shares = model.precision is Precision.FP32, config.ddp.sharding is Sharding.WEIGHTS
    hosted, moments = config.optimizer.optimizer_cpu_offload, config.optimizer.states.bytes
    states = (
        trained * moments * (not hosted)
        - 4 * orthogonalisation(config.model, config.optimizer).numbers_here * networks
    )
    weights = weight_bytes(config) + teacher_bytes(config) + critic_bytes(config)
    gradients = trained * summed_size(config)
    if in_shares:  # rows of trained weights are the main parameters, float32 as their gradients
        weights = (weights + trained * (4 - number_bytes(model))) // shards
        if config.ddp.sums(packs) == packs:  # else they are whole until the last pack
            gradients = trained * 4 // shards
    return Memory(
        weights=weights,
        gradients=gradients,
        # States unless the host keeps them, and a float32 copy of narrower weights.
        optimizer=(states + trained * 4 * (not wide and not in_shares)) // shards,
        ema=_averages(config) * trained // networks * 4 // shards,
        activations=activation_bytes(config, accumulation=packs),
        backward=int(_BACKWARD * numbers_of_pack(config) * number_bytes(model)),
        norms=trained // networks * 4 // shards,
        gathered=_gathered(config, trained=trained // networks, shards=shards) if in_shares else 0,
    )


def _averages(config: RunConfig) -> int:
    """Number of networks whose weights have an exponential moving average."""
    of_critic = config.has_critic and config.of_critic.ema.kind is not EmaKind.NONE
    return (config.ema.kind is not EmaKind.NONE) + of_critic


def weight_bytes(config: RunConfig) -> int:
    """Bytes of weights and adapters of one network on the fullest rank, before FSDP shards them.

    Weights have the dtype in which passes compute; with `lora.base_dtype` the matrices of layers
    have 8 bits. Swapped blocks are left out.
    """
    model, lora = config.model, config.lora
    size = 4 if model.precision is Precision.FP32 else 2
    total = parameters_here(model) * size
    if not lora.enabled:
        return total
    numbers, rows = inventory_of(model).layer_matrices()
    matrices = numbers * size
    if lora.base_dtype is not None:
        narrow = numbers + _FACTOR_BYTES[config.ddp.sharding] * rows
        layers = -(-network_spec(model).layers // model.pipeline_model_parallel_size)
        total -= layers * (matrices - narrow)
        matrices = numbers
    total -= model.blocks_to_swap * model.virtual_stages * matrices
    if lora.frozen_adapter is not None:
        total += _adapters_here(model, _rank_of_file(model, lora.frozen_adapter)) * size
    return total + trained_here(config) * size


def teacher_bytes(config: RunConfig) -> int:
    """Bytes of a teacher's weights on the fullest rank; 0 without one, or if it is the base."""
    c, model = config.distill, config.model
    return parameters_here(model) * number_bytes(model) if c.method is not None and c.teacher else 0


def critic_bytes(config: RunConfig) -> int:
    """Bytes of a critic's weights on the fullest rank; 0 without a critic.

    A critic of adapters shares the student's base, but with `ddp.sharding=weights` (FSDP) it has a
    copy of the base.
    """
    if not config.has_critic:
        return 0
    shared = config.lora.enabled and config.ddp.sharding is not Sharding.WEIGHTS
    return trained_here(config) * number_bytes(config.model) if shared else weight_bytes(config)


def _gathered(config: RunConfig, *, trained: int, shards: int) -> int:
    """Peak bytes of gathered weights and gradients in a backward pass, with FSDP.

    Weights outside the layers stay gathered. With `ddp.reshard_after_forward` one layer and those
    that are prefetched are gathered, otherwise all layers. Gradients of two layers wait for
    reduction, both in the compute dtype and in the dtype of the reduction. `trained` is the number
    of trained parameters of this rank, `shards` the number of ranks that share a weight.
    """
    model, found = config.model, inventory_of(config.model)
    size, summed, ahead = number_bytes(model), summed_size(config), config.ddp.prefetch_layers
    layers = 2 * max(layer.parameters for _, layer in found.stacks)
    sent = max(_layer_bytes(config, layer) for _, layer in found.stacks)
    ends_here = found.ends(pipeline=model.pipeline_model_parallel_size)
    part = trained / parameters_here(model)
    weights = size * ends_here + (1 + ahead) * sent
    if not config.ddp.reshard_after_forward:
        weights = weight_bytes(config)
    gradients = part * (size + summed) * max(layers, ends_here)
    return int(weights + gradients + (2 * sent + layers * part * summed) / shards)


def _layer_bytes(config: RunConfig, layer: Part) -> int:
    """Bytes of the weights of `layer` after FSDP has gathered them."""
    size = number_bytes(config.model)
    whole = layer.parameters * size
    if config.lora.base_dtype is None:
        return whole
    return (
        whole
        - layer.matrix_numbers * (size - 1)
        + layer.matrix_rows * _FACTOR_BYTES[Sharding.WEIGHTS]
    )


def summed_size(config: RunConfig) -> int:
    """Bytes of one number of a gradient when it is summed over ranks."""
    wide = config.model.precision is Precision.FP32
    return 4 if wide or config.ddp.grad_reduce_in_fp32 else 2


def check_memory(config: RunConfig, *, world_size: int) -> None:
    """Refuses a run that no device could hold, before any process starts.

    Raises:
        Problems: the estimated memory exceeds `MOST_BYTES`, or the number of processes or packs
            does not divide.
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
            " device for the backward pass, more than any has; lower the number of tokens",
        ),
    )

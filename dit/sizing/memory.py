"""Parameters of a run, trained parameters, and the memory of one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

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
from dit.config.checks import check
from dit.config.data import MockGeometry
from dit.config.sparsity import CUBE
from dit.models.layer_spec import LayerNeeds
from dit.models.layer_spec.shapes import NOTHING, gathered
from dit.models.linears import orthogonalisation, part_learns
from dit.models.registry import network_spec
from dit.sizing.inventory import Inventory, Part, alone, inventory

_BACKWARD = 7
"""Numbers for each token and unit of width that the backward pass of a layer makes beside what was
kept, at most: counted at the peak, 3 of most layers, 5 of single-stream ones, 7 of Wan without the
fused kernels."""
_FACTOR_BYTES = {Sharding.OPTIMIZER: 1, Sharding.WEIGHTS: 16}
"""Bytes of the factor of a row of a matrix in 8 bits, with what fills the row up."""
_UNREAD_RANK = 32
"""Rank that is assumed of adapters in a file that is not on this machine."""
_CUBE_PAIR_BYTES = 8
"""Bytes that a pair of cubes takes for each head: a place, int32, in the list of cubes that one
sees, and one in the list of cubes that see it."""
MOST_BYTES = 2**44
"""16 TiB: more than any device has, even if the estimate is wrong by a large factor."""


def inventory_of(model: ModelConfig) -> Inventory:
    """The parts of a network, on one tensor rank of `model`."""
    return inventory(alone(model), tensor=model.tensor_model_parallel_size)


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, over all ranks."""
    return inventory(alone(model)).parameters()


def parameters_here(model: ModelConfig) -> int:
    """Parameters on the fullest rank."""
    return inventory_of(model).parameters(pipeline=model.pipeline_model_parallel_size)


def trained_count(config: RunConfig) -> int:
    """Numbers that are trained, over all ranks; for adapters it assumes the default targets."""
    if config.lora.enabled:
        return inventory(alone(config.model)).adapter_numbers(adapter_rank(config))
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
    """Numbers that are trained on the fullest rank: parameters, or adapters instead.

    Frozen groups count as if they were distributed over the ranks like all parameters.
    """
    model = config.model
    if not config.lora.enabled:
        return parameters_here(model) * trained_count(config) // parameter_count(model)
    return _adapters_here(model, adapter_rank(config))


def _adapters_here(model: ModelConfig, rank: int) -> int:
    """Weights of adapters with the default targets on the rank that has most of them."""
    layout = {
        "tensor": model.tensor_model_parallel_size,
        "pipeline": model.pipeline_model_parallel_size,
    }
    return inventory(alone(model)).adapter_numbers(rank, **layout)


def adapter_rank(config: RunConfig) -> int:
    """Rank of the adapters in `lora.init_from`, if given, else `lora.rank`."""
    lora = config.lora
    if lora.init_from is not None:
        return _rank_of_file(config.model, lora.init_from)
    return lora.rank or _UNREAD_RANK


def _rank_of_file(model: ModelConfig, file: str) -> int:
    """The adapter rank at which the default targets have as many weights as the adapter `file`."""
    numbers = _numbers_of_file(file)
    if numbers is None:
        return _UNREAD_RANK
    return -(-numbers // inventory(alone(model)).adapter_numbers(1))


@lru_cache(maxsize=8)  # a plan asks for each of its layouts
def _numbers_of_file(place: str) -> int | None:
    """Numbers in all factors of a LoRA file, or a folder's first one, from its header.

    None if there is no such file: an estimate can be made on another machine.
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


def seen_tokens(model: ModelConfig) -> float:
    """The fraction of latent tokens that layers see in training, averaged over the layers."""
    if (route := model.token_route) is None:
        return 1.0
    routed = (route.last - route.first + 1) / network_spec(model).layers
    return 1 - routed * (1 - route.kept / route.run)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on the fullest device."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    activations: int
    """What a forward pass keeps for the backward pass."""
    backward: int
    """What the backward pass of one layer makes."""
    norms: int
    """Copy of the weights of a step that is logged, for `update_ratio`."""
    gathered: int = 0
    """With weights in shares: the layers that a pass has gathered, and gradients not yet summed."""

    @property
    def total(self) -> int:
        return sum(getattr(self, one.name) for one in fields(self))


def memory(config: RunConfig, *, world_size: int) -> Memory:
    """A rough estimate for one device, without buffers of libraries and fragmentation.

    Raises:
        Problems: the layout does not divide the processes, or replicas do not divide the global
            batch.
    """
    model = config.model
    replicas = config.data_parallel_size(world_size)
    trained = trained_here(config)
    shards, packs = config.optimizer_ranks(replicas), config.train.global_batch_size // replicas
    wide, in_shares = model.precision is Precision.FP32, config.ddp.sharding is Sharding.WEIGHTS
    hosted, moments = config.optimizer.optimizer_cpu_offload, config.optimizer.states.bytes
    states = (
        trained * moments * (not hosted)
        - 4 * orthogonalisation(config.model, config.optimizer).numbers_here
    )
    weights = weight_bytes(config) + teacher_bytes(config)
    gradients = trained * summed_size(config)
    if in_shares:  # rows of trained weights are the main parameters, float32 as their gradients
        weights = (weights + trained * (4 - _size(model))) // shards
        if config.ddp.sums(packs) == packs:  # else they are whole until the last pack
            gradients = trained * 4 // shards
    return Memory(
        weights=weights,
        gradients=gradients,
        # States where they are not the host's, and a float32 copy of narrower weights.
        optimizer=(states + trained * 4 * (not wide and not in_shares)) // shards,
        ema=0 if config.ema.kind is EmaKind.NONE else trained * 4 // shards,
        activations=_activations(config, accumulation=packs),
        backward=int(_BACKWARD * _numbers(config) * _size(model)),
        norms=trained * 4 // shards,
        gathered=_gathered(config, trained=trained, shards=shards) if in_shares else 0,
    )


def weight_bytes(config: RunConfig) -> int:
    """Bytes of weights and adapters on the fullest rank, in the type that passes read."""
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
    """Bytes of a teacher's weights on the fullest rank; 0 if it is the base of adapters."""
    c, model = config.distill, config.model
    return parameters_here(model) * _size(model) if c.method is not None and c.teacher else 0


def _gathered(config: RunConfig, *, trained: int, shards: int) -> int:
    """Bytes besides the shares at the peak of a backward pass, with `ddp.sharding=weights`.

    Weights outside the layers stay gathered; of the layers all, or one and those that are
    prefetched. Gradients of two layers wait for their sums, as computed and in the type of the sum.
    """
    model, found = config.model, inventory_of(config.model)
    size, summed, ahead = _size(model), summed_size(config), config.ddp.prefetch_layers
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
    """Bytes of the weights of a gathered layer."""
    size = _size(config.model)
    whole = layer.parameters * size
    if config.lora.base_dtype is None:
        return whole
    return (
        whole
        - layer.matrix_numbers * (size - 1)
        + layer.matrix_rows * _FACTOR_BYTES[Sharding.WEIGHTS]
    )


def summed_size(config: RunConfig) -> int:
    """Bytes of a gradient's number while gradients are summed over ranks."""
    wide = config.model.precision is Precision.FP32
    return 4 if wide or config.ddp.grad_reduce_in_fp32 else 2


def check_memory(config: RunConfig, *, world_size: int) -> None:
    """Refuses a run that no device could hold, before any process tries.

    Raises:
        Problems: names the sizes that need it, or numbers of processes and packs that do not
            divide.
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
    in_flight = min(accumulation, pipeline) / pipeline  # packs on a stage, times its part of layers
    if model.virtual_stages > 1:  # arXiv:2205.05198, Sec. 4.2.3
        in_flight *= 1 + (pipeline - 1) / (pipeline * model.virtual_stages)
    text = _text_of_pack(config)
    tokens = config.dataset.task_encoder_seq_length / model.context_parallel_size
    # What passes without gradients say of all packs of a step, float32, waits on the last stage.
    said = config.objective.predictions_kept * accumulation * 4 * model.output_features
    pairs, again = _cube_pairs(config), model.recompute_granularity is Recompute.SELECTIVE
    layers = _kept(model, text=text, more=0 if again else pairs / _numbers(config))
    texts = _kept_of_captions(config, accumulation=accumulation)
    texts += _kept_of_text_layers(config, accumulation=accumulation)
    return int(layers * _numbers(config) * in_flight + pairs * again + said * tokens + texts)


def _kept_of_captions(config: RunConfig, *, accumulation: int) -> float:
    """Bytes that a conditioner keeps on the first stage for captions of all packs in flight."""
    kept = network_spec(config.model).conditioner_kept
    if kept == NOTHING or not part_learns(config):
        return 0.0
    size, width = _size(config.model), config.model.hidden_size
    return kept.eager.bytes(size) * width * _text_rows_in_flight(config, accumulation)


def _kept_of_text_layers(config: RunConfig, *, accumulation: int) -> float:
    """Bytes that layers over text keep on the first stage, whose ranks divide the text."""
    model, spec = config.model, network_spec(config.model)
    if not spec.text_layers or not part_learns(config, spec.text_layers):
        return 0.0
    ranks = model.tensor_model_parallel_size if model.sequence_parallel else 1
    rows = _text_rows_in_flight(config, accumulation) / (model.context_parallel_size * ranks)
    return spec.text_layers_kept * _size(model) * rows


def _text_rows_in_flight(config: RunConfig, accumulation: int) -> float:
    """Rows of text in the packs that the first stage holds at once."""
    model = config.model
    lengths = [one.text_length for one in config.dataset.mock_samples]
    rows = config.dataset.task_encoder_seq_length * _rows_of_texts(config, lengths)
    # The first of several groups of layers runs up to twice as far ahead.
    packs = min(accumulation, model.pipeline_model_parallel_size * min(model.virtual_stages, 2))
    return rows * packs


def _cube_pairs(config: RunConfig) -> float:
    """Bytes that a layer keeps for all pairs of cubes in a pack like `dataset.mock_samples`."""
    model, mixture, cost = config.model, config.dataset.mock_samples, network_spec(config.model)
    heads = sum(stack.count * stack.layer.needs.cube_heads for stack in cost.stacks) / cost.layers
    if not heads:
        return 0.0
    sides = (model.patch_temporal, model.patch_spatial, model.patch_spatial)
    cubes = tokens = 0.0
    for one in mixture:
        latent = (one.frames, one.height, one.width)
        grid = (side // patch for side, patch in zip(latent, sides, strict=True))
        cubes += one.weight * math.prod(-(-side // CUBE) for side in grid)
        tokens += one.weight * geometry_tokens(model, one)
    of_pack = config.dataset.task_encoder_seq_length * cubes / max(tokens, 1)
    ranks = model.tensor_model_parallel_size * model.context_parallel_size  # that share heads
    return _CUBE_PAIR_BYTES * heads / ranks * of_pack**2


def _numbers(config: RunConfig) -> float:
    """Numbers of a hidden row: the tokens of a pack on one rank, times the width."""
    model = config.model
    return config.dataset.task_encoder_seq_length / model.context_parallel_size * model.hidden_size


def _text_of_pack(config: RunConfig) -> float:
    """Rows of text and image for each token of a rank, in samples like `dataset.mock_samples`.

    Context ranks divide the tokens, and each has all such rows. 0 if layers attend to latents and
    text jointly, because text then counts as tokens of a pack.
    """
    cost = network_spec(config.model)
    if cost.attends_jointly:
        return 0.0
    texts = cost.text([one.text_length for one in config.dataset.mock_samples])
    lengths = [cost.image_rows + max(length, 0) for length in texts]
    return _rows_of_texts(config, lengths) * config.model.context_parallel_size


def _rows_of_texts(config: RunConfig, lengths: Sequence[int]) -> float:
    """Rows for each token of a pack, for samples like `dataset.mock_samples`, of `lengths`."""
    mixture = config.dataset.mock_samples
    latents = [geometry_tokens(config.model, one) for one in mixture]
    weighted = [
        sum(one.weight * count for one, count in zip(mixture, counts, strict=True))
        for counts in (lengths, latents)
    ]
    return config.objective.levels_a_sample * weighted[0] / max(weighted[1], 1)


def geometry_tokens(model: ModelConfig, geometry: MockGeometry) -> int:
    """Latent tokens of a sample that attention computes."""
    return model.tokens_of(geometry.frames, geometry.height, geometry.width)


def _size(model: ModelConfig) -> int:
    return 4 if model.precision is Precision.FP32 else 2


def _kept(model: ModelConfig, *, text: float, more: float) -> float:
    """Bytes that all layers keep for each token and unit of width, with their recomputation.

    `more` is what each layer keeps besides `kept_by_layer`.
    """
    layer, layers = kept_by_layer(model, text=text) + more, network_spec(model).layers
    row = _size(model)  # the input of a layer
    stages = model.pipeline_model_parallel_size * model.virtual_stages
    away = min(model.cpu_offloading_num_layers * stages, layers)
    # Of the layers on the host, at most one on its way there, or two on their way back.
    staying = min(layers - away + min(away, 1), layers)
    if model.recompute_granularity is not Recompute.FULL:
        return max(staying, min(away, 2)) * layer
    if model.recompute_method is RecomputeMethod.BLOCK:
        # The inputs of the first layers, and all others; at the end, the one that is recomputed.
        again = min(model.recompute_num_layers * stages, layers)
        return max(again - away, 0) * row + max(min(layers - again, staying), 1) * layer
    again = min(model.recompute_num_layers, layers)
    # The input of every group, and the group that is being recomputed.
    return staying / again * row + again * layer


def kept_by_layer(model: ModelConfig, *, text: float = 0.0) -> float:
    """Bytes that a layer keeps for each token and unit of width, averaged over the layers.

    `text` is the number of rows of text and image for each token. Layers of a token route keep
    less; in joint rows all tokens count as latents.
    """
    cost, seen = network_spec(model), seen_tokens(model)
    each = ((s.count, _kept_in(s.layer.needs, model, text / seen)) for s in cost.stacks)
    return seen * sum(count * kept for count, kept in each) / cost.layers


def _kept_in(layer: LayerNeeds, model: ModelConfig, text: float) -> float:
    tensor, size = model.tensor_model_parallel_size, _size(model)
    fused = model.fused_kernels and not model.compile
    split = {"tensor": tensor, "sequence_parallel": model.sequence_parallel}
    rows = [(layer.kept, 1.0), (layer.kept_of_text, text)]
    ranks = model.context_parallel_size
    if ranks > 1 and layer.kept_exchanged != NOTHING and model.cp_comm_type is not ContextComm.P2P:
        rows.append((layer.kept_exchanged, 1.0))
        if model.cp_comm_type is ContextComm.ALL_GATHER:
            rows.append((gathered(ranks), 1.0))
    # Attention that is computed again frees nothing: the next linear keeps what it makes.
    return sum((of.fused if fused else of.eager).bytes(size, **split) * n for of, n in rows)

"""Seconds of a step, from operations and bytes: each term is a quantity over a rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from dit.config import ModelConfig, Precision, Recompute, RunConfig
from dit.models.cost import attention_flops, forward_flops, network_cost, parameters_here
from dit.models.memory import kept_by_layer
from dit.planner.devices import Device, Reached
from dit.planner.traffic import recomputed_part, traffic

# How often memory sees what a layer keeps, all that it does not keep included. Fitted to the
# published figures, with the rates of devices.py.
_PASSES = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What the packs of a run ask for, of one pack."""

    tokens: float
    """Real ones."""
    flops: float
    """Of a forward pass."""
    attention: float
    """Those of them in attention."""

    @classmethod
    def of(cls, model: ModelConfig, samples: Sequence[tuple[int, int]], times: float = 1.0) -> Load:
        """`samples` are (tokens, caption tokens), `times` over."""
        tokens, text = zip(*samples, strict=True)
        return cls(
            tokens=times * sum(tokens),
            flops=times * forward_flops(model, tokens=tokens, text=text),
            attention=times * attention_flops(model, tokens=tokens, text=text),
        )


def expected_load(config: RunConfig, *, fill: float = 0.99) -> Load:
    """Of a pack of the samples in `dataset.mock_samples`, by their weights."""
    model, parts = config.model, []
    for geometry in config.dataset.mock_samples:
        rows, columns = (side // model.patch_spatial for side in (geometry.height, geometry.width))
        tokens = geometry.frames // model.patch_temporal * rows * columns
        parts.append((geometry.weight, Load.of(model, [(tokens, geometry.text_length)])))
    mean = sum(weight * load.tokens for weight, load in parts)
    times = fill * config.dataset.task_encoder_seq_length / mean
    return Load(
        tokens=times * mean,
        flops=times * sum(weight * load.flops for weight, load in parts),
        attention=times * sum(weight * load.attention for weight, load in parts),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of one step on each device; overlapped communication is not in them."""

    matrices: float
    attention: float
    memory: float
    """Norms, modulation, activations: what waits for memory, not for arithmetic."""
    tensor: float
    context: float
    pipeline: float
    data: float
    bubble: float
    """Stages that wait for others."""
    update: float
    """Adam and the average."""

    @property
    def step(self) -> float:
        return sum(asdict(self).values())


def times(
    config: RunConfig, load: Load, *, world_size: int, device: Device, reached: Reached
) -> Times:
    """Of a step in which every rank has as much to do.

    Raises:
        Problems: the processes or the global batch do not divide.
    """
    model, replicas = config.model, config.data_parallel_size(world_size)
    packs = config.train.global_batch_size // replicas
    parts = world_size // replicas
    within = packs / parts  # packs' worth of arithmetic on this device
    again = recomputed_part(config)
    selective = model.recompute_granularity is Recompute.SELECTIVE
    busy = Times(
        matrices=within * (3 + again) * (load.flops - load.attention) / _rate(device, reached),
        attention=within
        * (3 + (1 if selective else again))
        * load.attention
        / (device.flops * reached.attention),
        memory=packs
        * _moved(model, load)
        * (1 + again / 3)
        / (device.bandwidth * reached.bandwidth),
        **_communication(config, load, packs, replicas, device, reached),
        bubble=0.0,
        update=_update(config, replicas) / (device.bandwidth * reached.bandwidth),
    )
    return _with_overlap(config, busy, packs)


def _rate(device: Device, reached: Reached) -> float:
    return device.flops * reached.matrices


def _moved(model: ModelConfig, load: Load) -> float:
    """Bytes of activations to and from memory, of one pack on one device."""
    size = 4 if model.precision is Precision.FP32 else 2
    layers = network_cost(model).layers / model.pipeline_model_parallel_size
    rows = load.tokens / model.context_parallel_size * model.hidden_size
    return _PASSES * kept_by_layer(model) * rows * layers * size


def _communication(
    config: RunConfig, load: Load, packs: int, replicas: int, device: Device, reached: Reached
) -> dict[str, float]:
    model = config.model
    bytes_ = traffic(config, tokens=load.tokens, accumulated=packs, replicas=replicas)
    tensor = model.tensor_model_parallel_size
    near = tensor * model.context_parallel_size
    reach = {  # devices that a group spans, from the first to the last of them
        "tensor": tensor,
        "context": near,
        "data": near * replicas,
        "pipeline": near * replicas * model.pipeline_model_parallel_size,
    }
    return {
        name: getattr(bytes_, name)
        / ((device.link if span <= device.together else device.network) * reached.links)
        for name, span in reach.items()
    }


def _update(config: RunConfig, replicas: int) -> float:
    """Bytes: gradient, two moments, float32 weight and average are read, all but one written."""
    sharded = config.ddp.use_distributed_optimizer
    shards = replicas * config.model.context_parallel_size if sharded else 1
    return 36 * parameters_here(config.model) / shards


def _with_overlap(config: RunConfig, busy: Times, packs: int) -> Times:
    """Data-parallel traffic hides behind the pack computed meanwhile; stages wait for the first."""
    model = config.model
    one = (busy.matrices + busy.attention + busy.memory + busy.tensor + busy.context) / packs
    hidden = one * ((2 / 3) * config.ddp.overlap_grad_reduce)
    hidden += one * ((1 / 3) * config.ddp.overlap_param_gather)
    stages = model.pipeline_model_parallel_size
    bubble = one * (stages - 1) / model.virtual_stages
    return replace(busy, data=max(0.0, busy.data - hidden), bubble=bubble)

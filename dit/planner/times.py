"""Seconds of a step, from operations and bytes: each term is a quantity over a rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from dit.config import ModelConfig, Precision, Recompute, RunConfig
from dit.distributed.device_specs import Device
from dit.models.cost import (
    attention_flops,
    forward_flops,
    kept_by_layer,
    network_cost,
    parameters_here,
)
from dit.planner.efficiency import Efficiency
from dit.planner.traffic import recomputed_part, traffic

# Memory traffic of a layer in a step, over the size of the activations that it keeps. Fitted to the
# published figures, like the rates of efficiency.py.
_PASSES = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The work in one pack of a run."""

    tokens: float
    """Real tokens."""
    flops: float
    """FLOPs of a forward pass."""
    attention: float
    """The FLOPs among them in attention."""

    @classmethod
    def of(cls, model: ModelConfig, samples: Sequence[tuple[int, int]], times: float = 1.0) -> Load:
        """The load of `samples`, (tokens, caption tokens), taken `times` times."""
        tokens, text = zip(*samples, strict=True)
        return cls(
            tokens=times * sum(tokens),
            flops=times * forward_flops(model, tokens=tokens, text=text),
            attention=times * attention_flops(model, tokens=tokens, text=text),
        )


def expected_load(config: RunConfig, *, fill: float = 0.99) -> Load:
    """The load of a pack of the samples in `dataset.mock_samples`, by their weights."""
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
    """Seconds of one step on each device, without overlapped communication."""

    matrices: float
    attention: float
    memory: float
    """Norms, modulation and activations, which memory bandwidth limits."""
    tensor: float
    context: float
    pipeline: float
    data: float
    bubble: float
    """Pipeline stages that wait for others."""
    update: float
    """Adam and the average of the weights."""

    @property
    def step(self) -> float:
        return sum(asdict(self).values())


def times(
    config: RunConfig, load: Load, *, world_size: int, device: Device, efficiency: Efficiency
) -> Times:
    """The times of a step in which every rank has the same load.

    Raises:
        Problems: the processes or the global batch do not divide.
    """
    model, replicas = config.model, config.data_parallel_size(world_size)
    packs = config.train.global_batch_size // replicas
    parts = world_size // replicas
    within = packs / parts  # arithmetic on this device, in packs
    again = recomputed_part(config)
    selective = model.recompute_granularity is Recompute.SELECTIVE
    busy = Times(
        matrices=within * (3 + again) * (load.flops - load.attention) / _rate(device, efficiency),
        attention=within
        * (3 + (1 if selective else again))
        * load.attention
        / (device.flops * efficiency.attention),
        memory=packs
        * _moved(model, load)
        * (1 + again / 3)
        / (device.bandwidth * efficiency.bandwidth),
        **_communication(config, load, packs, replicas, device, efficiency),
        bubble=0.0,
        update=_update(config, replicas) / (device.bandwidth * efficiency.bandwidth),
    )
    return _with_overlap(config, busy, packs)


def _rate(device: Device, efficiency: Efficiency) -> float:
    return device.flops * efficiency.matrices


def _moved(model: ModelConfig, load: Load) -> float:
    """Bytes of activations that one pack moves to and from the memory of one device."""
    size = 4 if model.precision is Precision.FP32 else 2
    layers = network_cost(model).layers / model.pipeline_model_parallel_size
    rows = load.tokens / model.context_parallel_size * model.hidden_size
    return _PASSES * kept_by_layer(model) * rows * layers * size


def _communication(
    config: RunConfig, load: Load, packs: int, replicas: int, device: Device, efficiency: Efficiency
) -> dict[str, float]:
    model = config.model
    bytes_ = traffic(config, tokens=load.tokens, accumulated=packs, replicas=replicas)
    tensor = model.tensor_model_parallel_size
    near = tensor * model.context_parallel_size
    reach = {  # number of devices from the first to the last of a group
        "tensor": tensor,
        "context": near,
        "data": near * replicas,
        "pipeline": near * replicas * model.pipeline_model_parallel_size,
    }
    return {
        name: getattr(bytes_, name)
        / ((device.link if span <= device.together else device.network) * efficiency.links)
        for name, span in reach.items()
    }


def _update(config: RunConfig, replicas: int) -> float:
    """Bytes to read gradient, two moments, float32 weight and average, and to write all but one."""
    return 36 * parameters_here(config.model) / config.optimizer_ranks(replicas)


def _with_overlap(config: RunConfig, busy: Times, packs: int) -> Times:
    """Hides data-parallel traffic behind the last pack, and adds the pipeline bubble."""
    model = config.model
    one = (busy.matrices + busy.attention + busy.memory + busy.tensor + busy.context) / packs
    hidden = one * ((2 / 3) * config.ddp.overlap_grad_reduce)
    hidden += one * ((1 / 3) * config.ddp.overlap_param_gather)
    stages = model.pipeline_model_parallel_size
    bubble = one * (stages - 1) / model.virtual_stages
    return replace(busy, data=max(0.0, busy.data - hidden), bubble=bubble)

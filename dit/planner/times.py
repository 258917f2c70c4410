"""Seconds of a step, from operations and bytes: each term is a quantity divided by a rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dit.bin_packing import mean_fill
from dit.config import (
    ContextComm,
    DdpConfig,
    EmaKind,
    LoraConfig,
    ModelConfig,
    Precision,
    Recompute,
    RunConfig,
    Sharding,
)
from dit.config.sparsity import trained_as
from dit.device_specs import Device
from dit.models.linears import orthogonalisation, orthogonalising_ranks
from dit.models.registry import network_spec
from dit.planner.efficiency import HEAD_WIDTHS, Efficiency
from dit.planner.layer_traffic import KERNELS, LayerLoad, Moved, layer_units
from dit.planner.traffic import exposed_part, forward_passes, passes_before, traffic
from dit.sizing.activations import geometry_tokens, seen_tokens, sound_tokens
from dit.sizing.flops import attention_flops, forward_flops
from dit.sizing.memory import (
    inventory_of,
    parameter_count,
    trained_count,
    trained_here,
    weight_bytes,
)
from dit.sizing.pack_traffic import pack_traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLoad:
    """The work in one pack of a run."""

    tokens: float
    """Tokens of the pack, padding excluded; those of sound among them."""
    text: float
    """Number of text tokens that the layers process or attend to."""
    flops: float
    """FLOPs of a forward pass."""
    attention: float
    """FLOPs of attention in a forward pass, contained in `flops`."""

    @classmethod
    def of(
        cls, model: ModelConfig, samples: Sequence[tuple[int, int]], *, sound: Sequence[int] = ()
    ) -> PackLoad:
        """The load of a pack of `samples`, pairs (latent tokens, caption tokens).

        `sound` has the number of sound tokens of each sample that has sound. For memory and traffic
        a token of sound counts as a latent token, which is wider.
        """
        tokens, text = zip(*samples, strict=True)
        about: Any = {"tokens": tokens, "text": text, "sound": sound}
        return cls(
            tokens=sum(tokens) + sum(sound),
            text=sum(network_spec(model).text(text)),
            flops=forward_flops(model, **about),
            attention=attention_flops(model, **about),
        )


def expected_load(config: RunConfig, *, fill: float | None = None) -> PackLoad:
    """The load of a mean pack of the samples in `dataset.mock_samples`, by their weights.

    Packs are as full as the loader packs them, or have the fraction `fill` of the capacity.
    """
    model, data, parts, lengths = config.model, config.dataset, [], dict[int, float]()
    joint = network_spec(model).attends_jointly
    for geometry in data.mock_samples:
        tokens = geometry_tokens(model, geometry)
        trained = trained_as(tokens, geometry.text_length, config.objective.level_share)
        heard = sound_tokens(model, geometry)
        sound = [heard] if heard else []
        parts.append((geometry.weight, PackLoad.of(model, trained, sound=sound)))
        (text,) = network_spec(model).text([geometry.text_length])
        taken = config.mock_tokens(geometry) + joint * text * len(trained)
        taken += -(-heard // config.sample_multiple) * config.sample_multiple
        taken = min(taken, data.task_encoder_seq_length)  # longer ones are refused
        lengths[taken] = lengths.get(taken, 0.0) + geometry.weight
    capacity = data.task_encoder_seq_length
    if fill is None:
        fill = mean_fill(lengths, capacity=capacity, buffer=data.packing_buffer_size)
    times = fill * capacity / sum(taken * weight for taken, weight in lengths.items())
    return PackLoad(
        **{
            one.name: times * sum(weight * getattr(load, one.name) for weight, load in parts)
            for one in fields(PackLoad)
        }
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of one step on each device, without communication that computation hides."""

    matrices: float
    attention: float
    memory: float
    """Seconds of norms, modulation and activations, which memory bandwidth limits."""
    launches: float
    """Seconds in which the device waits between kernels."""
    tensor: float
    context: float
    pipeline: float
    data: float
    copies: float
    """Seconds of summing gradients over FSDP copies, as far as computation does not hide them."""
    host: float
    """Seconds of waiting for swapped blocks that come from host memory."""
    bubble: float
    """Seconds in which pipeline stages wait for others."""
    update: float
    """Seconds of adding up gradients, of the optimizer, and of the moving average of the
    weights."""

    @property
    def step(self) -> float:
        return sum(asdict(self).values())

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds of a step by kind of cost; a profile's kernels belong to the first four."""
        return {
            "matrix products": self.matrices,
            "attention": self.attention,
            "memory traffic": self.memory,
            "optimizer": self.update,
            "launches": self.launches,
            "communication": self.tensor + self.context + self.pipeline + self.data + self.copies,
            "host copies": self.host,
            "bubble": self.bubble,
        }


def times(
    config: RunConfig, load: PackLoad, *, world_size: int, device: Device, efficiency: Efficiency
) -> Times:
    """The times of a step on `world_size` devices, if every pack has the load `load`.

    For frozen weights the backward pass computes only gradients of inputs.

    Raises:
        Problems: the layout does not divide the processes, or replicas do not divide the global
            batch.
    """
    model, replicas = config.model, config.data_parallel_size(world_size)
    packs = config.train.global_batch_size // replicas
    parts = world_size // replicas
    within = packs / parts  # arithmetic on this device, in packs
    learned, forward = config.learning_passes, forward_passes(config)
    selective = model.recompute_granularity is Recompute.SELECTIVE
    bandwidth = device.bandwidth * efficiency.bandwidth
    trained = trained_count(config) / parameter_count(model)
    layers = network_spec(model).layers / model.pipeline_model_parallel_size
    busy = Times(
        matrices=within
        * (forward + learned * (1 + trained))
        * (load.flops - load.attention)
        / (device.flops * efficiency.matrices),
        attention=within
        * load.attention
        * _head_padding(model)
        / device.flops
        * (
            (forward + selective * learned) / efficiency.attention_forward
            + 2 * learned / efficiency.attention_backward
        ),
        memory=packs
        * (_moved(config, load) + _restored(config) + _copied(config, packs))
        / bandwidth,
        # The backward pass has two thirds of the kernels.
        launches=packs
        * layers
        * (forward + 2 * learned)
        / 3
        * KERNELS[_is_fused(model)]
        * efficiency.gap_s,
        **_communication(config, load, packs, replicas, device, efficiency),
        host=packs * _swapped_bytes(config.model, config.lora) / (device.host * efficiency.links),
        bubble=0.0,
        update=learned
        * (
            _update(config, packs, replicas) / bandwidth
            + orthogonalisation(config.model, config.optimizer).flops
            / (orthogonalising_ranks(config, replicas) * device.flops * efficiency.matrices)
        ),
    )
    return _with_overlap(config, busy, packs, forward=1 / (forward + learned * (1 + trained)))


def _head_padding(model: ModelConfig) -> float:
    """Head width that attention kernels compute, divided by the network's head width."""
    width = model.hidden_size // model.num_attention_heads
    return next((one for one in HEAD_WIDTHS if one >= width), width) / width


def _is_fused(model: ModelConfig) -> bool:
    """Whether kernels are fused; torch.compile is assumed to save as much traffic as ours."""
    return model.fused_kernels or model.compile


def _moved(config: RunConfig, load: PackLoad) -> float:
    """Bytes of memory traffic of the layers on one device for one pack, over all passes.

    Matrix products and attention kernels are left out.
    """
    model, forward, learned = config.model, forward_passes(config), config.learning_passes
    here = LayerLoad(
        fused=_is_fused(model),
        text=load.text / (load.tokens * seen_tokens(model)),
        tensor=model.tensor_model_parallel_size,
        sequence_parallel=model.sequence_parallel,
        context=model.context_parallel_size,
        by_heads=model.cp_comm_type is ContextComm.A2A,
    )
    total = Moved()
    for stack in network_spec(model).stacks:
        layer = layer_units(stack.layer, here)
        passes = Moved(forward * layer.forward, learned * layer.backward)
        total += passes.times(stack.count)
    tokens = load.tokens * seen_tokens(model)
    unit = tokens / model.context_parallel_size * model.hidden_size * _number(model)
    return unit * (total.forward + total.backward) / model.pipeline_model_parallel_size


def _restored(config: RunConfig) -> float:
    """Bytes that one device reads and writes to restore 8-bit matrices, for one pack."""
    model = config.model
    if config.lora.base_dtype is None:
        return 0.0
    numbers, _ = inventory_of(model).layer_matrices()
    layers = network_spec(model).layers / model.pipeline_model_parallel_size
    # torch writes the numbers in their new type, then reads and writes them once more.
    moved = 1 + _number(model) * (1 if model.fused_kernels else 3)
    return layers * numbers * moved * (forward_passes(config) + config.learning_passes)


def _in_shares(ddp: DdpConfig) -> bool:
    return ddp.sharding is Sharding.WEIGHTS


def _copied(config: RunConfig, packs: int) -> float:
    """Bytes that a device copies in its memory for one of `packs` packs, to gather weights (FSDP).

    Weights arrive in one piece and are copied to their places in each pass that gathers them.
    Gradients are read for each sum, and written in one piece in the type of the sum.
    """
    if not _in_shares(config.ddp):
        return 0.0
    size = _number(config.model)
    summed = 4 if config.ddp.grad_reduce_in_fp32 else size
    learned = config.learning_passes
    gathers = config.mean_passes_without_gradient
    gathers += learned * (1 + config.ddp.reshard_after_forward)
    copied = gathers * 2 * weight_bytes(config)
    sums = learned * config.ddp.sums(packs) / packs
    return copied + sums * (size + summed) * trained_here(config)


def not_modelled(lora: LoraConfig) -> list[str]:
    """Names of the parts of a run whose time `times` leaves out."""
    return ["products of adapters with their rank"] if lora.enabled else []


def _swapped_bytes(model: ModelConfig, lora: LoraConfig) -> float:
    """Bytes of swapped blocks that a device copies from the host for one pack, in both passes.

    Two blocks more than `blocks_to_swap` wait on the host. A forward pass ends with two of them on
    the device, with which the backward pass begins; the backward pass leaves two for the next
    forward pass. Chunks of virtual stages share this memory, so with them each pass copies all
    blocks.
    """
    again = 2 if model.virtual_stages > 1 else 0
    if not model.blocks_to_swap:
        return 0.0
    numbers, _ = inventory_of(model).layer_matrices()
    block = numbers * (1 if lora.base_dtype is not None else _number(model))
    return 2 * block * model.virtual_stages * (model.blocks_to_swap + again)


def _number(model: ModelConfig) -> int:
    return 4 if model.precision is Precision.FP32 else 2


def _communication(
    config: RunConfig,
    load: PackLoad,
    packs: int,
    replicas: int,
    device: Device,
    efficiency: Efficiency,
) -> dict[str, float]:
    model = config.model
    bytes_ = traffic(config, tokens=load.tokens, accumulated=packs, replicas=replicas)
    tensor = model.tensor_model_parallel_size
    near, in_shares = tensor * model.context_parallel_size, _in_shares(config.ddp)
    reach = {  # number of devices from the first to the last of a group
        "tensor": tensor,
        "context": near,
        "data": tensor * config.optimizer_ranks(replicas) if in_shares else near * replicas,
        "copies": near * replicas,
        "pipeline": near * replicas * model.pipeline_model_parallel_size,
    }
    waited = {"tensor": exposed_part(config)}
    return {
        name: getattr(bytes_, name)
        * waited.get(name, 1.0)
        / ((device.link if span <= device.together else device.network) * efficiency.links)
        for name, span in reach.items()
    }


def _update(config: RunConfig, packs: int, replicas: int) -> float:
    """Bytes that weights, gradients and optimizer states move in device memory in a step.

    Each pack adds its gradients to their sums, which are zeroed before and read for the norm. The
    rank that updates a weight reads the gradient, the optimizer's states and the main weight,
    writes states and main weight, then reads the main weight again to write weight and average.
    """
    size = _number(config.model)
    total = 4 if config.ddp.grad_reduce_in_fp32 else size
    here = trained_here(config)
    average = 3 * 4 * (config.ema.kind is not EmaKind.NONE)
    # States and main weight, read and written.
    states = 2 * (
        config.optimizer.states.bytes
        + 4
        - 4 * orthogonalisation(config.model, config.optimizer).numbers_here / here
    )
    ranks = config.optimizer_ranks(replicas)
    if _in_shares(config.ddp):  # rows are the main weights: gradients add to them, float32
        updated = 4 + 4 + states + average
        sums = config.ddp.sums(packs)
        whole = here * packs * (size + 2 * total) * (sums < packs)
        return whole + here / ranks * (updated + sums * 3 * 4)
    updated = total + total + states + 4 + size + average
    added = packs * (size + 2 * total) * (not config.model.gradient_accumulation_fusion)
    return here * (total + added + updated / ranks)


def _with_overlap(config: RunConfig, busy: Times, packs: int, *, forward: float) -> Times:
    """The times `busy` without hidden data-parallel traffic, and with the pipeline bubble.

    Blocks are copied from the host during computation, so each pass takes the longer of the two.
    `packs` is the number of packs of a replica, `forward` the fraction of a pack's computation that
    is in one forward pass.
    """
    model = config.model
    one = (busy.matrices + busy.attention + busy.memory + busy.launches) / packs
    one += (busy.tensor + busy.context) / packs
    data = _exposed(config, busy, one, packs, forward=forward)
    stages = model.pipeline_model_parallel_size
    bubble = one * (stages - 1) / model.virtual_stages
    host = sum(max(0.0, busy.host / 2 - packs * one * part) for part in (forward, 1 - forward))
    # `fully_shard` sums the rows of a layer over copies beside the backward passes of those before
    # it, in the last pack; copies are commonly on servers of their own, and shares on one.
    copies = max(0.0, busy.copies - one * _backward_part(config, forward))
    return replace(busy, data=data, copies=copies, host=host, bubble=bubble)


def _backward_part(config: RunConfig, forward: float) -> float:
    """Fraction of a pack's work in its backward pass, if `forward` is that of a forward pass.

    Passes without gradients, such as a teacher's, count as forward passes.
    """
    return 1 - forward * (config.learning_passes + passes_before(config))


def _exposed(config: RunConfig, busy: Times, one: float, packs: int, *, forward: float) -> float:
    """Seconds of data-parallel traffic that no computation hides.

    FSDP has traffic in each pass, and the computation of that pass hides it. Other traffic is
    hidden by the last pack, as far as `ddp.overlap_*` are set. `one` is the number of seconds of a
    pack.
    """
    if _in_shares(config.ddp):
        moved = pack_traffic(config, shards=2)  # for the parts of the passes alone
        learned = config.learning_passes
        sums, backward = learned * config.ddp.sums(packs), _backward_part(config, forward) / learned
        gathers = packs * (learned + config.mean_passes_without_gradient)
        learned *= packs
        total = gathers * moved.forward + learned * moved.backward + sums * moved.gradients
        a_byte = busy.data / max(total, 1)
        passes = (  # bytes, the part of a pack's computation beside them, and how many there are
            (moved.forward, forward, gathers),
            (moved.backward, backward, learned - sums),
            (moved.backward + moved.gradients, backward, sums),
        )
        return sum(max(0.0, sent * a_byte - one * part) * count for sent, part, count in passes)
    hidden = one * ((2 / 3) * config.ddp.overlap_grad_reduce)
    hidden += one * ((1 / 3) * config.ddp.overlap_param_gather)
    return max(0.0, busy.data - hidden)

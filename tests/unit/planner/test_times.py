"""Seconds by kind of cost, from round numbers."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from dit.config import (
    AttentionBackend,
    BaseType,
    DdpConfig,
    DistillConfig,
    DistillMethod,
    EmaConfig,
    EmaKind,
    Implementation,
    LoraConfig,
    ObjectiveConfig,
    Precision,
    Recompute,
    RecomputeMethod,
    RunConfig,
    SamplingLevels,
    TrainConfig,
)
from dit.device_specs import Device
from dit.models.dit.family import DitConfig
from dit.models.registry import named_model, network_spec
from dit.planner.efficiency import FUSED, PLAIN, Efficiency, efficiency_of
from dit.planner.layer_traffic import LayerLoad, Moved, layer_units
from dit.planner.times import PackLoad, Times, expected_load, not_modelled, times
from dit.planner.traffic import traffic
from dit.sizing.memory import memory, parameter_count, trained_count

# Every rate is half of the device's, so that bytes and operations are seconds.
DEVICE = Device(flops=2.0, memory=1.0, bandwidth=2.0, link=2.0, network=2.0, host=2.0, together=8)
HALF = Efficiency(
    matrices=0.5,
    attention_forward=0.5,
    attention_backward=0.5,
    bandwidth=0.5,
    links=0.5,
    gap_s=1.0,
)
LOAD = PackLoad(tokens=1000.0, text=125.0, flops=70.0, attention=20.0)


def spent(
    *, packs: int = 1, ddp: DdpConfig | None = None, ema: bool = False, **model: Any
) -> Times:
    config = RunConfig(
        model=DitConfig(precision=Precision.BF16, **model),
        train=TrainConfig(global_batch_size=packs),
        ema=EmaConfig(kind=EmaKind.POWER if ema else EmaKind.NONE),
        ddp=ddp or DdpConfig(),
    )
    return times(config, LOAD, world_size=1, device=DEVICE, efficiency=HALF)


def test_products_and_attention():
    plain = spent()
    assert plain.matrices == 3 * 50
    assert plain.attention == pytest.approx(3 * 20 * 96 / 72)  # kernels have heads of 96
    assert spent(num_attention_heads=18).attention == 3 * 20  # of 64
    selective = spent(recompute_granularity=Recompute.SELECTIVE)
    assert selective.attention == pytest.approx(4 / 3 * plain.attention)
    assert replace(selective, attention=plain.attention) == plain


UNIT = 1000 * 1152 * 2


def xl_units(*, fused: bool) -> Moved:
    (stack,) = network_spec(DitConfig()).stacks
    return layer_units(stack.layer, LayerLoad(fused=fused, text=125 / 1000))


def test_memory_traffic_is_that_of_layers():
    units = [xl_units(fused=fused) for fused in (False, True)]
    eager, fused = spent(fused_kernels=False), spent()
    for found, moved in zip((eager, fused), units, strict=True):
        assert found.memory == pytest.approx(UNIT * 28 * (moved.forward + moved.backward))
    assert fused.memory == pytest.approx(0.305 * eager.memory, rel=0.01)
    assert spent(fused_kernels=False, compile=True).memory == fused.memory
    assert (eager.launches, fused.launches) == (28 * 190, 28 * 90)
    wide = spent(fused_kernels=False, packs=3)
    assert wide.memory == pytest.approx(3 * eager.memory)


def test_what_is_recomputed_moves_its_forward_pass_again():
    block = {
        "recompute_granularity": Recompute.FULL,
        "recompute_method": RecomputeMethod.BLOCK,
        "recompute_num_layers": 7,
    }
    more, plain = spent(fused_kernels=False, **block), spent(fused_kernels=False)
    assert more.memory - plain.memory == pytest.approx(UNIT * 7 * xl_units(fused=False).forward)
    assert more.matrices == pytest.approx((3 + 1 / 4) * 50)
    assert more.launches == pytest.approx(plain.launches * (1 + 1 / 12))
    assert more.update == plain.update


def test_optimizer_by_hand():
    """Bytes of each weight, on one rank."""
    weights = parameter_count(DitConfig())
    # Zeroed 4; each pack reads 2 and adds to 4. Norm 4; gradient 4, moments and main weight read
    # and written 24; main weight 4 to weight 2.
    once = 4 + 4 + 4 + 24 + 4 + 2
    assert spent().update == weights * (once + 10)
    assert spent(packs=3).update == weights * (once + 30)
    assert spent(packs=3, gradient_accumulation_fusion=True).update == weights * once
    assert spent(ema=True).update == weights * (once + 10 + 12)
    assert spent(ddp=DdpConfig(grad_reduce_in_fp32=False)).update == weights * (2 + 6 + 2 + 2 + 30)


def distilled(**c: Any) -> RunConfig:
    """A distillation by DMD2 of 4 steps, with guidance, of which every fifth is the student's."""
    return RunConfig(
        model=DitConfig(precision=Precision.BF16),
        objective=ObjectiveConfig(name="flow", sampling_levels=SamplingLevels.LCM),
        train=TrainConfig(global_batch_size=1),
        distill=DistillConfig(method=DistillMethod.DMD, teacher="a run", **c),
        ema=EmaConfig(kind=EmaKind.NONE),
    )


@pytest.mark.parametrize(("alone", "turns", "student"), [(False, 1, 0.2), (True, 0.8, 0.2)])
def test_a_critic_and_its_student_take_turns(alone: bool, turns: float, student: float):
    """The critic makes latents by 4 passes and learns by 3; the student is judged by 3 more."""
    config, plain = distilled(critic_alone=alone), spent()
    found = times(config, LOAD, world_size=1, device=DEVICE, efficiency=HALF)
    both, forward = turns + student, turns * (4 + 1) + student * (4 + 3 + 1)
    assert found.matrices == pytest.approx((forward + 2 * both) * 50)
    assert found.attention == pytest.approx(plain.attention / 3 * (forward + 2 * both))
    assert found.update == pytest.approx(both * plain.update)
    units = xl_units(fused=True)
    moved = UNIT * 28 * (forward * units.forward + both * units.backward)
    assert found.memory == pytest.approx(moved)
    sent, once = (
        traffic(
            replace(one, model=replace(config.model, pipeline_model_parallel_size=2)),
            tokens=1e3,
            accumulated=1,
            replicas=2,
        )
        for one in (config, replace(config, distill=DistillConfig()))
    )
    assert sent.pipeline == pytest.approx(once.pipeline / 2 * (forward + both))
    assert sent.data == pytest.approx(once.data * both)


def beside(base: BaseType | None, **model: Any) -> RunConfig:
    """A run of adapters."""
    return RunConfig(
        model=DitConfig(precision=Precision.BF16, **model),
        lora=LoraConfig(rank=4, base_dtype=base),
        train=TrainConfig(global_batch_size=1),
        ema=EmaConfig(kind=EmaKind.NONE),
    )


def test_a_frozen_base_has_no_gradients_and_8_bits_are_restored_in_each_pass():
    runs = [beside(None), beside(BaseType.FLOAT8_E4M3)]
    plain, narrow = (times(run, LOAD, world_size=1, device=DEVICE, efficiency=HALF) for run in runs)
    # Adapters of rank 4 are less than a hundredth of the weights.
    assert 100 < plain.matrices < 100.5 and plain.attention == spent().attention
    trained = trained_count(runs[0])
    assert plain.update == trained * (42 + 10) and trained < parameter_count(DitConfig()) / 100
    sent = [traffic(run, tokens=1e3, accumulated=1, replicas=2).data for run in runs]
    assert sent == [trained * (4 + 2) / 2] * 2
    # Each number that is one byte less is read as one byte and written as two, there and back.
    saved, less = (memory(run, world_size=1).weights for run in runs)
    assert narrow.memory - plain.memory == pytest.approx(6 * (saved - less), rel=0.01)
    assert replace(narrow, memory=plain.memory) == plain
    # Without our kernel they are written, read and written: 7 bytes where it moves 3.
    torchs = [replace(run, model=replace(run.model, fused_kernels=False)) for run in runs]
    by_torch = [times(run, LOAD, world_size=1, device=DEVICE, efficiency=HALF) for run in torchs]
    more = (by_torch[1].memory - by_torch[0].memory) / (narrow.memory - plain.memory)
    assert more == pytest.approx(7 / 3)


def test_what_the_times_leave_out_is_said():
    assert not_modelled(RunConfig(model=DitConfig()).lora) == []
    (adapters,) = not_modelled(beside(None).lora)
    assert "products of adapters" in adapters


@pytest.mark.parametrize("base", [None, BaseType.FLOAT8_E4M3])
def test_each_pass_takes_the_longer_of_computation_and_copies(base: BaseType | None):
    """Wan 14B: 20 blocks of 4 attention matrices twice and two of the MLP, in both passes."""
    model = named_model("wan2.1_t2v_14b")
    runs = [
        replace(beside(base), model=replace(model, blocks_to_swap=swapped)) for swapped in (0, 20)
    ]
    block = (8 * 5120**2 + 2 * 5120 * 13824) * (2 if base is None else 1)

    def found(config: RunConfig, host: float) -> Times:
        # Bytes of host memory in units of 1 / host seconds; half of the rate is reached.
        device = replace(DEVICE, host=2 * host)
        return times(config, LOAD, world_size=1, device=device, efficiency=HALF)

    plain = found(runs[0], 1.0)
    assert plain.host == 0 and plain.by_kind["host copies"] == 0
    one = plain.matrices + plain.attention + plain.memory + plain.launches
    copied = 20 * block  # in each pass
    slow, fast = found(runs[1], copied / (10 * one)), found(runs[1], copied / (one / 4))
    # In each pass ten times the whole computation; a quarter of it, which is hidden.
    assert slow.host == pytest.approx(2 * 10 * one - one)
    assert fast.host == 0 and replace(slow, host=0.0) == fast == plain
    # Beside a frozen network the way back is as long as the way there.
    middle = found(runs[1], copied / (0.6 * one))
    assert middle.host == pytest.approx(2 * 0.6 * one - one)
    assert middle.step == pytest.approx(plain.step + middle.host)


def test_kinds_are_the_step():
    numbers = dict(zip(asdict(spent()), (2.0**n for n in range(12)), strict=True))
    found = Times(**numbers)
    assert sum(found.by_kind.values()) == found.step == 2**12 - 1
    assert found.by_kind["communication"] == sum(
        numbers[name] for name in ("tensor", "context", "pipeline", "data", "copies")
    )


def test_load_of_mixed_samples_fills_the_pack():
    config = RunConfig(model=DitConfig())
    load = expected_load(config, fill=1.0)
    assert load.tokens == pytest.approx(config.dataset.task_encoder_seq_length)
    shares = [
        (one.weight, one.frames * (one.height // 2) * (one.width // 2), one.text_length)
        for one in config.dataset.mock_samples
    ]
    mean = sum(weight * tokens for weight, tokens, _ in shares)
    text = load.tokens / mean * sum(weight * text for weight, _, text in shares)
    assert load.text == pytest.approx(text)


_AUTO, _ENGINE = AttentionBackend.AUTO, Implementation.TRANSFORMER_ENGINE


@pytest.mark.parametrize(
    ("backend", "linears", "deterministic", "expected"),
    [
        (_AUTO, Implementation.LOCAL, False, PLAIN),
        (_AUTO, _ENGINE, False, FUSED),
        (_AUTO, _ENGINE, True, PLAIN),
        (AttentionBackend.FLASH_2, _ENGINE, False, PLAIN),
        (AttentionBackend.SDPA, _ENGINE, False, PLAIN),
        (AttentionBackend.FLASH_4, Implementation.LOCAL, False, FUSED),
        (AttentionBackend.FLASH_3, Implementation.LOCAL, False, FUSED),
        (AttentionBackend.TRANSFORMER_ENGINE, Implementation.LOCAL, False, FUSED),
        (AttentionBackend.CUDNN, Implementation.LOCAL, False, FUSED),
    ],
)
def test_attention_goes_by_the_kernel_that_the_run_takes(backend, linears, deterministic, expected):
    config = RunConfig(
        model=DitConfig(
            precision=Precision.BF16, attention_backend=backend, transformer_impl=linears
        ),
        train=TrainConfig(deterministic=deterministic),
    )
    assert efficiency_of(config.model, config.train) is expected

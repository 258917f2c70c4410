"""Learning rates, AdamW by lists of weights, gradients that a product adds to DDP's sums."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from megatron.core.tensor_parallel import layers
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

from dit.config import (
    DdpConfig,
    Decay,
    EmaConfig,
    EmaKind,
    Implementation,
    OptimizerConfig,
    Precision,
    RunConfig,
    SchedulerConfig,
    TrainConfig,
)
from dit.distributed.full_sharding import over_rows
from dit.models.dit.family import ExtraPosition
from dit.models.layers import parallel_linear
from dit.train.model_and_optimizer import build_model_and_optimizer
from dit.train.optimizer import adamw, foreach
from dit.train.optimizer.adamw import GroupStepAdam
from dit.train.optimizer.ema import decay_at, power_exponent
from dit.train.optimizer.update import clip_and_step, learning_rate, set_learning_rate
from dit.train.step import optimizer_step
from tests.late_copies import LateCopies
from tests.learning import tiny_run, train, weights_and_averages
from tests.packs import run_config, tiny_model

MODEL = tiny_model(
    hidden_size=48,
    num_attention_heads=2,
    crossattn_emb_size=8,
    adaln_lora_dim=8,
    extra_pos_embed=ExtraPosition.LEARNABLE,
    max_size=(4, 8, 8),
)


def test_adam_equals_torch():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(7, 5, generator=generator), torch.randn(3, generator=generator)]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    mine, reference = GroupStepAdam(ours, **options), torch.optim.AdamW(theirs, **options)
    for _ in range(50):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)
    assert mine.param_groups[0]["step"] == 50


def test_moments_on_the_host_come_and_leave_beside_updates(monkeypatch):
    """Copies are made as late as their streams allow: what waits for too little has NaN."""
    copies = LateCopies()
    monkeypatch.setattr(adamw, "copies_of", lambda _: copies)
    both = [[torch.nn.Parameter(torch.ones(9, 5)) for _ in range(5)] for _ in range(2)]
    plain, hosted = (GroupStepAdam(params, lr=0.1) for params in both)
    hosted.keep_on_host()
    for step in range(3):
        for params in both:
            for number, p in enumerate(params):
                p.grad = torch.full_like(p, 1.0 + number + step)
        copies.log.clear()
        plain.step()
        hosted.step()
    for ours, theirs in zip(*both, strict=True):
        assert torch.equal(ours, theirs)
        for name, moment in plain.state[ours].items():
            assert torch.equal(hosted.state[theirs][name], moment)
    # Those of the next weight are on their way before anything waits for those of the first.
    order = [(what, len(list(same))) for what, same in groupby(copies.log)]
    between = [("wait", 2), ("leave", 2), ("overwrite", 2), ("wait", 4), ("leave", 2)]
    assert order[:6] == [("overwrite", 4), *between]
    # One weight's leave while the next is updated and a third's come.
    assert max(copies.living) == 3 * 2 * both[0][0].nbytes and copies.living_bytes() == 0


def test_decay_reaches_matrices_only(groups):
    config = RunConfig(model=MODEL, optimizer=OptimizerConfig(weight_decay=0.3))
    model = build_model_and_optimizer(config, groups)
    set_learning_rate(model.optimizer, 1e-3, weight_decay=0.3)
    names = {p: n for n, p in model.chunks[0].named_parameters()}
    shards = {id(s.value): names[s.weight] for s in model.ema.shards}
    decayed, spared = set(), set()
    for inner in model.optimizer.chained_optimizers:
        for group in inner.optimizer.param_groups:
            target = decayed if group["weight_decay"] else spared
            target |= {shards[id(p)] for p in group["params"]}
    assert {group["weight_decay"] for group in model.optimizer.param_groups} == {0.0, 0.3}
    assert all(n.endswith("norm.weight") or "pos_emb" in n for n in spared)
    assert sum("pos_emb" in n for n in spared) == 3
    assert not [n for n in decayed if "norm" in n or "pos_emb" in n]
    assert decayed | spared == set(names.values())


def test_decoupled_decay_shrinks_a_weight_without_gradient(groups):
    config = RunConfig(model=MODEL, optimizer=OptimizerConfig(weight_decay=0.3, lr=0.1))
    model = build_model_and_optimizer(config, groups)
    before = [s.value.clone() for s in model.ema.shards]
    set_learning_rate(model.optimizer, 0.1, weight_decay=0.3)
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    assert not clip_and_step(model.optimizer, clip_grad=1.0).skipped
    for old, shard in zip(before, model.ema.shards, strict=True):
        kept = 1 - 0.1 * 0.3 if shard.weight.dim() == 2 and shard.weight.shape[1] > 1 else 1.0
        expected = old * kept
        if not torch.allclose(shard.value, expected):
            assert torch.allclose(shard.value, old), "neither decayed nor spared"


@pytest.mark.parametrize("bad", ["gradient", "loss"])
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("precision", list(Precision))
def test_step_that_is_not_finite_changes_nothing(groups, sharded, precision, bad):
    config = RunConfig(
        model=replace(MODEL, precision=precision, extra_pos_embed=ExtraPosition.NONE),
        optimizer=OptimizerConfig(lr=0.1, weight_decay=0.3),
        ddp=DdpConfig(use_distributed_optimizer=sharded),
    )
    model = build_model_and_optimizer(config, groups)

    def state() -> list[torch.Tensor]:
        adam = [inner.optimizer.state.values() for inner in model.optimizer.chained_optimizers]
        moments = [t for of in adam for one in of for t in one.values() if torch.is_tensor(t)]
        shards = [shard.value for shard in model.ema.shards]
        weights = [*model.chunks[0].parameters()]
        return [t.detach().clone() for t in (*weights, *shards, *moments, *model.ema.averages)]

    def step(number: int, *, gradient: float, loss: float) -> bool:
        for weight in model.chunks[0].parameters():
            weight.main_grad.fill_(gradient)
        return optimizer_step(model, config=config, number=number, loss=loss).skipped

    assert not step(1, gradient=0.01, loss=1.0)
    before = state()
    wrong = {bad: math.nan}
    assert step(2, gradient=wrong.get("gradient", 0.01), loss=wrong.get("loss", 1.0))
    for old, new in zip(before, state(), strict=True):
        assert torch.equal(old, new)
    assert not step(2, gradient=0.01, loss=1.0)
    assert not any(map(torch.equal, before[:3], state()[:3]))


def _config(style: Decay, warmup: int = 10, iters: int = 110, horizon: int | None = None):
    return run_config(
        train=TrainConfig(train_iters=iters),
        optimizer=OptimizerConfig(lr=1.0, min_lr=0.2),
        scheduler=SchedulerConfig(
            lr_decay_style=style, lr_warmup_iters=warmup, lr_decay_iters=horizon
        ),
    )


def test_learning_rate_follows_its_closed_form():
    for style, middle in ((Decay.COSINE, 0.6), (Decay.LINEAR, 0.6), (Decay.CONSTANT, 1.0)):
        config = _config(style)
        assert learning_rate(config, 1) == pytest.approx(0.1)
        assert learning_rate(config, 10) == pytest.approx(1.0)
        assert learning_rate(config, 60) == pytest.approx(middle)
        end = 1.0 if style is Decay.CONSTANT else 0.2
        assert learning_rate(config, 110) == pytest.approx(end)


def test_decay_horizon_follows_the_length_of_the_run():
    assert learning_rate(_config(Decay.LINEAR, iters=210), 210) == pytest.approx(0.2)
    fixed = _config(Decay.LINEAR, iters=210, horizon=110)
    assert learning_rate(fixed, 110) == learning_rate(fixed, 210) == pytest.approx(0.2)


@pytest.mark.parametrize("sigma_rel", [0.05, 0.1, 0.2])
def test_power_average_has_the_width_it_is_named_for(sigma_rel):
    gamma = power_exponent(sigma_rel)
    # The profile t^gamma on [0, 1] has this relative standard deviation (arXiv:2312.02696, Eq. 3).
    width = ((gamma + 1) ** 0.5) / ((gamma + 2) * (gamma + 3) ** 0.5)
    assert width == pytest.approx(sigma_rel, rel=1e-6)


def test_power_average_weighs_steps_by_their_power():
    config, steps = EmaConfig(kind=EmaKind.POWER, sigma_rel=0.1), 2000
    weights = []
    for step in range(1, steps + 1):
        keep = decay_at(config, step)
        weights = [w * keep for w in weights] + [1 - keep]
    times = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    profile = times ** power_exponent(0.1)
    got = torch.tensor(weights, dtype=torch.float64)
    assert got.sum() == pytest.approx(1)
    torch.testing.assert_close(got, profile / profile.sum(), rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("precision", list(Precision))
def test_average_is_used_and_taken_back(groups, sharded, precision):
    config = RunConfig(
        model=replace(MODEL, precision=precision),
        ddp=DdpConfig(use_distributed_optimizer=sharded),
        ema=EmaConfig(kind=EmaKind.CONSTANT, decay=0.75),
    )
    model = build_model_and_optimizer(config, groups)
    first = [s.value.clone() for s in model.ema.shards]
    for shard in model.ema.shards:
        shard.value.data.add_(1.0)
    model.ema.update(1)
    for old, average in zip(first, model.ema.averages, strict=True):
        torch.testing.assert_close(average, old + 0.25)
        assert average.dtype == torch.float32
    averages = [average.clone() for average in model.ema.averages]
    with model.ema.as_weights(model.chunks):
        for shard, average in zip(model.ema.shards, averages, strict=True):
            inside = shard.weight.flatten()[shard.part]
            torch.testing.assert_close(inside, average.flatten().to(inside.dtype))
    assert all(map(torch.equal, model.ema.averages, averages))
    for shard, old in zip(model.ema.shards, first, strict=True):
        assert torch.equal(shard.value, old + 1)
        inside = shard.weight.flatten()[shard.part]
        assert torch.equal(inside, (old + 1).flatten().to(inside.dtype))


@pytest.mark.parametrize("sharded", [True, False])
def test_configured_numbers_are_those_in_effect(groups, sharded):
    numbers = OptimizerConfig(adam_beta1=0.85, adam_beta2=0.97, adam_eps=1e-5, weight_decay=0.07)
    ddp = DdpConfig(use_distributed_optimizer=sharded)
    model = build_model_and_optimizer(RunConfig(model=MODEL, optimizer=numbers, ddp=ddp), groups)
    set_learning_rate(model.optimizer, 3e-4, weight_decay=numbers.weight_decay)
    for group in model.optimizer.param_groups:
        assert group["betas"] == (0.85, 0.97)
        assert group["eps"] == 1e-5
        assert group["lr"] == 3e-4
        assert group["weight_decay"] in (0, 0.07)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("in_fp32", [True, False])
def test_gradients_are_reduced_in_the_configured_type(groups, precision, in_fp32):
    config = RunConfig(
        model=replace(MODEL, precision=precision), ddp=DdpConfig(grad_reduce_in_fp32=in_fp32)
    )
    model = build_model_and_optimizer(config, groups)
    half = precision is Precision.BF16 and not in_fp32
    wanted = torch.bfloat16 if half else torch.float32
    assert {p.main_grad.dtype for p in model.chunks[0].parameters()} == {wanted}


SHAPES = [(1,), (37, 19), (5,), (64, 3, 3), (1000,)]


def _tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("rate", [0.0, 1e-4, 0.3, 1.0])
def test_an_average_moves_as_in_a_loop(rate):
    averages, values, expected = _tensors(1), _tensors(2), _tensors(1)
    foreach.lerp(averages, values, rate)
    for average, value in zip(expected, values, strict=True):
        average.lerp_(value, rate)
    assert all(torch.equal(a, b) for a, b in zip(averages, expected, strict=True))
    foreach.lerp([], [], rate)  # a rank may have no part of any weight


def test_differences_and_norms():
    kept, weights = _tensors(1), _tensors(2)
    foreach.subtract(kept, weights)
    expected = [a - b for a, b in zip(_tensors(1), _tensors(2), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))
    assert foreach.norms(kept).tolist() == pytest.approx([float(x.norm()) for x in expected])
    foreach.copy(kept, weights)
    assert all(torch.equal(a, b) for a, b in zip(kept, weights, strict=True))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3_000_000])
def test_a_norm_does_not_depend_on_how_ranks_share_its_numbers(size):
    """Torch's own is 5e-5 off for 3 million numbers."""
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(0)) + 0.3
    true = float(numbers.double().norm())
    for parts in (1, 7):
        shares = foreach.norms(numbers.tensor_split(parts)).double()
        assert float(shares.norm()) == pytest.approx(true, rel=1e-6)
    whole, _ = foreach._l2_norm(0, None, [[*numbers.tensor_split(7)]], False)
    assert float(whole) == pytest.approx(true, rel=1e-6)


def test_gradients_are_clipped_as_megatron_clips_them(groups, monkeypatch):
    monkeypatch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", local_multi_tensor_scale)
    lists, numbers = [_tensors(1), _tensors(3)], [_tensors(1), _tensors(3)]
    theirs, _ = local_multi_tensor_l2_norm(0, None, [lists[0]], False)
    local_multi_tensor_scale(0, None, lists, 0.37)
    foreach.install_norm_and_scale()
    assert clip_grads.l2_norm_impl is not local_multi_tensor_l2_norm
    assert clip_grads.multi_tensor_scale_impl is not local_multi_tensor_scale
    norm, _ = clip_grads.l2_norm_impl(0, None, [numbers[0]], False)
    clip_grads.multi_tensor_scale_impl(0, None, numbers, 0.37)
    assert norm.shape == (1,) and float(norm) == pytest.approx(float(theirs))
    assert all(torch.equal(a, b) for a, b in zip(lists[1], numbers[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(numbers[0], _tensors(1), strict=True))
    clip_grads.multi_tensor_scale_impl(0, None, [numbers[0]] * 2, 0.37)
    assert all(torch.equal(a, b) for a, b in zip(*numbers, strict=True))


class _Products:
    """Apex's extension, by torch."""

    def __init__(self) -> None:
        self.calls = 0

    def wgrad_gemm_accum_fp32(self, inputs, gradient, total) -> None:
        self.calls += 1
        total.add_(gradient.t().float() @ inputs.float())


def test_rows_that_a_rank_has_none_of_are_not_in_its_optimizer(groups):
    """Kernels of Transformer Engine and Apex leave out tensors that stand before an empty one."""
    rows = [torch.nn.Parameter(torch.zeros(count, 3)) for count in (2, 0, 1, 0)]
    adam = GroupStepAdam([{"params": rows[:2]}, {"params": rows[2:]}])
    inner = FP32Optimizer(adam, CoreOptimizerConfig(), lambda *_: None)
    over_rows(ChainedOptimizer([inner]), groups)
    assert [*map(id, inner.get_parameters())] == [id(rows[0]), id(rows[2])]


@pytest.mark.parametrize("precision", list(Precision))
def test_weights_are_those_of_separate_sums(groups, monkeypatch, precision):
    products = _Products()
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", products, raising=False)
    monkeypatch.setattr(parallel_linear, "find_spec", lambda name: name)
    config = tiny_run(precision=precision)
    fused = replace(config, model=replace(config.model, gradient_accumulation_fusion=True))
    found = []
    for one in (config, fused):
        model = build_model_and_optimizer(one, groups)
        train(model, one, 1, 3)
        found.append(weights_and_averages(model))
    assert products.calls == 3 * 7 * config.model.num_layers
    bound = 1e-6 if precision is Precision.FP32 else 0.05  # of gradients in bf16
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= bound * a.norm()


def test_layers_of_the_engine_need_no_apex(groups, stand_in):
    """Of a layer's seven products the one of the caption is Megatron-Core's, and stays plain."""
    engine = Implementation.TRANSFORMER_ENGINE
    config = tiny_run(
        transformer_impl=engine, hidden_size=64, num_attention_heads=2, precision=Precision.BF16
    )
    fused = replace(config, model=replace(config.model, gradient_accumulation_fusion=True))
    found = []
    for one in (config, fused):
        model = build_model_and_optimizer(one, groups)
        train(model, one, 1, 3)
        found.append(weights_and_averages(model))
    assert stand_in.seen.fused == 3 * 6 * config.model.num_layers
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 0.05 * a.norm()


def test_missing_products_are_named(groups):
    config = tiny_run(gradient_accumulation_fusion=True)
    with pytest.raises(ValueError, match="gradient_accumulation_fusion=true needs Apex"):
        build_model_and_optimizer(config, groups)

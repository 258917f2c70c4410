"""Weight gradients that a product adds to DDP's sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron.core.tensor_parallel import layers

from dit.config import Implementation, Precision
from dit.models.layers import parallel_linear
from dit.train.model_and_optimizer import build_model_and_optimizer
from tests.learning import tiny_run, train, weights_and_averages


class _Products:
    """Apex's extension, by torch."""

    def __init__(self) -> None:
        self.calls = 0

    def wgrad_gemm_accum_fp32(self, inputs, gradient, total) -> None:
        self.calls += 1
        total.add_(gradient.t().float() @ inputs.float())


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

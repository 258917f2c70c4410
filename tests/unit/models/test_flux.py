"""What FLUX alone has: angles at far places, a told scale, words for adapters, optional inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxPosEmbed

from dit.config import InitMethod, LoraConfig, ObjectiveConfig, Problems
from dit.config_loading import ConfigError, load_config
from dit.config_loading.validate import check_objective_inputs
from dit.data.cook import Expected, cook
from dit.data.mock import mock_record
from dit.lora.targets import chosen_adapters
from dit.models.flux.model import FluxNetwork
from dit.models.patch_layout import PatchLayout
from dit.models.registry import family_of
from dit.train.checkpoint.without_tensors import _fixed
from dit.train.model_and_optimizer import initialise_weights, randomise
from recipes.runs import dit_debug
from tests.families.flux import flux_model
from tests.packs import run_config


def _network(groups, **changes: Any) -> FluxNetwork:
    network = FluxNetwork(flux_model(**changes), groups)
    randomise(network, seed=7)
    return network.eval()


def test_angles_are_those_of_diffusers_at_far_places(groups) -> None:
    """Which angles in float32 are not: their cosines are off by 4e-5 there."""
    place = torch.tensor([[1.0, 1000.0, 777.0], [0.0, 3.0, 1023.0]])
    theirs = FluxPosEmbed(theta=10_000, axes_dim=[4, 4, 4])(place)
    for ours, wanted in zip(_network(groups).rotary(place), theirs, strict=True):
        # Neighbours turn together there, and halves of a head here.
        torch.testing.assert_close(ours[:, :6], wanted[:, ::2], rtol=0, atol=2e-7)


def test_what_the_objective_tells_reaches_the_pack() -> None:
    config = run_config(model=flux_model(), objective=ObjectiveConfig(name="flow", guidance=2.5))
    assert PatchLayout.of(config).guidance == 2.5
    check_objective_inputs(config)
    assert _fixed(config)["objective.guidance"] == 2.5  # no run goes on with another one
    untold = replace(config, objective=ObjectiveConfig(name="flow"))
    with pytest.raises(Problems, match=r"objective.guidance=null: .*set the scale to 1.0"):
        check_objective_inputs(untold)
    with pytest.raises(Problems, match=r"objective.guidance=2.5: .*has no guidance embedding"):
        check_objective_inputs(replace(config, model=flux_model("flux1_schnell")))


@pytest.mark.parametrize(
    ("size", "told"),
    [("flux1_dev", 1.0), ("flux1_schnell", None), ("flux2_dev", 1.0), ("flux2_klein_4b", None)],
)
def test_a_named_size_says_what_it_is_told(size: str, told: float | None) -> None:
    words = [f"model.name={size}", "dataset.task_encoder_seq_length=2048"]
    found = load_config(dit_debug(), overrides=words)
    assert (found.objective.name, found.objective.guidance) == ("flow", told)
    with pytest.raises(ConfigError, match=r"objective\.guidance="):
        other = "null" if told else "3.5"
        load_config(dit_debug(), overrides=[*words, f"objective.guidance={other}"])


def test_layers_start_as_the_identity(groups) -> None:
    model = flux_model()
    network = FluxNetwork(model, groups)
    initialise_weights(network, run_config(model=model))
    for name, weight in network.named_parameters():
        zero = "modul" in name or name.endswith("proj_out.weight") or name.endswith(".bias")
        assert weight.any() == (not zero), name


def test_words_of_adapters_mean_the_linears_of_both_kinds_of_layers() -> None:
    model = flux_model(num_layers=1, num_single_layers=1)
    found = {
        word: {*chosen_adapters(model, LoraConfig(rank=2, targets=(word,)))}
        for word in ("attention", "mlp", "modulation")
    }
    double, single = "transformer_blocks.0", "single_transformer_blocks.0"
    own = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
    assert found["attention"] == {
        *(f"{double}.attn.{name}" for name in (*own, "to_add_out")),
        *(f"{single}.attn.{name}" for name in own[:3]),
    }
    assert found["mlp"] == {
        *(f"{double}.{ff}.net.{n}" for ff in ("ff", "ff_context") for n in ("0.proj", "2")),
        *(f"{single}.{name}" for name in ("proj_mlp", "proj_out")),
    }
    assert found["modulation"] == {
        *(f"{double}.{name}.linear" for name in ("norm1", "norm1_context")),
        f"{single}.norm.linear",
    }


def test_inputs_that_a_sample_may_lack_and_must_have() -> None:
    model = flux_model(reference_latents=2)
    inputs = {one.name: one for one in family_of(model).inputs(model)}
    assert [*inputs] == ["text", "pooled_text", "reference_latent_0", "reference_latent_1"]
    assert [one.required for one in inputs.values()] == [True, True, False, False]
    assert inputs["text"].may_be_empty and not inputs["reference_latent_0"].clean
    config = run_config(model=model, objective=ObjectiveConfig(name="flow", guidance=1.0))
    for index in range(6):
        assert cook(mock_record(config, seed=1, index=index), Expected.of(config), key="a")


def test_xavier_draws_what_mlperf_starts_from(groups) -> None:
    """Of each matrix the bound and variance of torch's, with fused ones as one linear."""
    model = flux_model(init_method=InitMethod.XAVIER, init_method_std=0.02, crossattn_emb_size=96)
    network = FluxNetwork(model, groups)
    initialise_weights(network, run_config(model=model, objective=ObjectiveConfig(name="flow")))
    drawn = dict[str, float]()
    for name, weight in network.named_parameters():
        if weight.dim() < 2 or family_of(model).weights.starts_at_zero(name):
            assert weight.unique().tolist() == [1 if "norm" in name else 0], name
            continue
        torch.manual_seed(0)
        oracle = torch.empty_like(weight)
        if "told" in name:
            torch.nn.init.normal_(oracle, std=0.02)
        else:
            torch.nn.init.xavier_uniform_(oracle)
            assert weight.abs().max().item() == pytest.approx(oracle.max().item(), rel=0.02), name
        # The mean square of n numbers varies by sqrt(2 / n) of it at most.
        apart = (2 / weight.numel()) ** 0.5
        ours, theirs = (one.square().mean().item() for one in (weight, oracle))
        assert ours == pytest.approx(theirs, rel=8 * apart), name
        assert weight.mean().abs() < 6 * (theirs / weight.numel()) ** 0.5, name
        drawn[name.rpartition("layers.")[2]] = theirs
    fused = [drawn["0.attention.linear_qkv.weight"], drawn["0.linear_in.weight"]]
    assert fused[1] < 0.7 * fused[0]  # 7 outputs a width beside 3

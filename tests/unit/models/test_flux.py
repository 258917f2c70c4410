"""FLUX's network on one process: what each input moves, and what its description counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.batch import PackedBatch
from dit.config import LoraConfig, ObjectiveConfig, Problems, RunConfig
from dit.config_loading import ConfigError, load_config
from dit.data.cook import Expected, cook
from dit.data.mock import mock_record
from dit.data.pack import PatchLayout
from dit.lora.targets import chosen_adapters
from dit.models.cost import forward_flops, parameter_count
from dit.models.flux.family import MODEL_SIZES, FluxConfig
from dit.models.flux.model import FluxNetwork
from dit.models.registry import diffusers_form, family_of, named_model, pairs
from dit.models.training_checks import check_objective_inputs
from dit.train.checkpoint.state_dict import _fixed
from dit.train.model_and_optimizer import initialise_weights, randomise
from recipes.runs import dit_debug
from tests.flux_networks import GUIDANCE, flux_model
from tests.packs import random_pack, run_config

GRIDS, TEXTS = [(1, 2, 3), (1, 4, 2), (1, 3, 1), (1, 2, 2), (1, 1, 1)], [9, 2, 0, 30, 1]
LEVELS = torch.tensor([812.5, 0.5, 437.0, 999.0, 31.25])
PUBLISHED = {
    "flux1_dev": 11_901_408_320,
    "flux1_schnell": 11_891_178_560,
    "flux1_kontext": 11_901_408_320,
}


def _theirs(model: FluxConfig) -> FluxTransformer2DModel:
    """Diffusers' network of the same sizes, without numbers."""
    with torch.device("meta"):
        return FluxTransformer2DModel(**diffusers_form(model).content(RunConfig(model=model)))


@pytest.mark.parametrize("name", MODEL_SIZES)
def test_named_sizes_have_the_tensors_of_diffusers(name: str) -> None:
    model: Any = named_model(name)
    theirs = _theirs(model).state_dict()
    ours = {name: shape for pair in pairs(model) for name, shape in pair.their_shapes.items()}
    assert ours == {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    assert parameter_count(model) == PUBLISHED[name] == sum(t.numel() for t in theirs.values())


@pytest.mark.parametrize("kind", ["flux1_schnell", "flux1_kontext"])
def test_description_counts_parameters_and_operations(groups, kind: str) -> None:
    model = flux_model(kind)
    network = FluxNetwork(model, groups)
    assert parameter_count(model) == sum(weight.numel() for weight in network.parameters())
    tokens, text, theirs = 35, 12, _theirs(model)
    with torch.device("meta"):
        inputs: dict[str, Any] = {
            "hidden_states": torch.empty(1, tokens, model.patch_features),
            "encoder_hidden_states": torch.empty(1, text, model.crossattn_emb_size),
            "pooled_projections": torch.empty(1, model.pooled_size),
            "timestep": torch.empty(1),
            "img_ids": torch.empty(tokens, 3),
            "txt_ids": torch.empty(text, 3),
            "guidance": torch.empty(1) if model.guidance_embed else None,
        }
    counter = FlopCounterMode(display=False)
    with torch.device("meta"), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        theirs(**inputs)
    assert forward_flops(model, tokens=[tokens], text=[text]) == counter.get_total_flops()


def _network(groups, **changes: Any) -> FluxNetwork:
    network = FluxNetwork(flux_model(**changes), groups)
    randomise(network, seed=7)
    return network.eval()


def _pack(model: FluxConfig) -> PackedBatch:
    return random_pack(GRIDS, TEXTS, model=model, guidance=GUIDANCE)


def _moved(network: FluxNetwork, before: PackedBatch, after: PackedBatch, level_N: Tensor) -> list:
    """Whether the targets of each sample move."""
    with torch.no_grad():
        one = network(before.latent_TC, LEVELS, before)
        other = network(after.latent_TC, level_N, after)
    spans = zip(before.starts, before.latent_tokens, strict=False)
    return [not torch.equal(one[s : s + n], other[s : s + n]) for s, n in spans]


@pytest.mark.parametrize(
    "name", ["latent", "reference", "texts.text", "vectors.pooled_text", "level", "place"]
)
def test_output_moves_with_its_own_inputs_and_with_no_neighbours(groups, name: str) -> None:
    """Of the second sample, which has a reference of four tokens behind its eight."""
    network = _network(groups, reference_latents=2)
    batch = _pack(network.model)
    assert batch.references[1] == ((1, 2, 1), (1, 3, 1)) and batch.starts[1] == 8
    level_N, tensors = LEVELS.clone(), {n: x.clone() for n, x in batch.tensors.items()}
    {
        "latent": tensors["latent_TC"][8:16],
        "reference": tensors["latent_TC"][16:],
        "texts.text": tensors["texts.text"][9:],
        "vectors.pooled_text": tensors["vectors.pooled_text"][1:],
        "level": level_N[1:],
        "place": tensors["position_TA"][16:, :1],
    }[name][0] += 1
    found = _moved(network, batch, batch.with_tensors(tensors), level_N)
    assert found == [False, True, False, False, False]


def test_angles_are_those_of_diffusers_at_far_places(groups) -> None:
    """Which angles in float32 are not: their cosines are off by 4e-5 there."""
    place = torch.tensor([[1.0, 1000.0, 777.0], [0.0, 3.0, 1023.0]])
    theirs = FluxPosEmbed(theta=10_000, axes_dim=[4, 4, 4])(place)
    for ours, wanted in zip(_network(groups).rotary(place), theirs, strict=True):
        # Neighbours turn together there, and halves of a head here.
        torch.testing.assert_close(ours[:, :6], wanted[:, ::2], rtol=0, atol=2e-7)


def test_guidance_moves_every_sample_of_networks_that_are_told_it(groups) -> None:
    for kind, moves in (("flux1_kontext", True), ("flux1_schnell", False)):
        network = _network(groups, kind=kind)
        batch = _pack(network.model)
        other = replace(batch, guidance=1.0)
        assert _moved(network, batch, other, LEVELS) == [moves] * len(GRIDS)


def test_what_the_objective_tells_reaches_the_pack() -> None:
    config = run_config(model=flux_model(), objective=ObjectiveConfig(name="flow", guidance=2.5))
    assert PatchLayout.of(config).guidance == 2.5
    check_objective_inputs(config)
    assert _fixed(config)["objective.guidance"] == 2.5  # no run goes on with another one
    untold = replace(config, objective=ObjectiveConfig(name="flow"))
    with pytest.raises(Problems, match=r"objective.guidance=null: .*set it to 1.0"):
        check_objective_inputs(untold)
    with pytest.raises(Problems, match=r"objective.guidance=2.5: .*has no guidance embedding"):
        check_objective_inputs(replace(config, model=flux_model("flux1_schnell")))


@pytest.mark.parametrize(("size", "told"), [("flux1_dev", 1.0), ("flux1_schnell", None)])
def test_a_named_size_says_what_it_is_told(size: str, told: float | None) -> None:
    found = load_config(dit_debug(), overrides=[f"model.name={size}"])
    assert (found.objective.name, found.objective.guidance) == ("flow", told)
    with pytest.raises(ConfigError, match=r"objective\.guidance="):
        other = "null" if told else "3.5"
        load_config(dit_debug(), overrides=[f"model.name={size}", f"objective.guidance={other}"])


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_axes": (4, 4, 2)}, "add up to 10, and hidden_size=48 .* width 12"),
        ({"rope_axes": (3, 5, 4)}, "must be even"),
        ({"reference_latents": -1}, "must not be negative"),
        ({"mlp_ratio": 1.95}, "MLP width 93 .* does not divide by num_attention_heads=4"),
        ({"num_single_layers": 0}, "num_single_layers=0 must be at least 1"),
        ({"num_layers": 2, "pipeline_model_parallel_size": 5}, "4 layers do not fill"),
    ],
)
def test_sizes_that_cannot_be_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Problems, match=words):
        flux_model(**changes)

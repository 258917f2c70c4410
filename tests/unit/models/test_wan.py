"""Wan's network on one process: what each input moves, and what its description counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.config import Problems, RunConfig
from dit.data.cook import Expected, cook
from dit.data.mock import mock_record
from dit.data.rejections import Reject, SampleRefused
from dit.models.cost import forward_flops, parameter_count
from dit.models.registry import diffusers_form, family_of, named_model, pairs
from dit.models.wan.family import MODEL_SIZES, WanConfig
from dit.models.wan.model import WanNetwork
from dit.train.model_and_optimizer import initialise_weights, randomise
from tests.packs import random_pack, run_config
from tests.toy_networks import level_rows
from tests.wan_networks import CONDITIONS, wan_model

GRIDS, TEXTS = [(3, 2, 3), (1, 4, 2), (2, 3, 1), (4, 1, 2), (1, 1, 1)], [9, 2, 4, 30, 1]
LEVELS = torch.tensor([812.5, 0.5, 437.0, 999.0, 31.25])
PUBLISHED = {
    "wan2.1_t2v_1.3b": 1_418_996_800,
    "wan2.1_t2v_14b": 14_288_491_584,
    "wan2.1_i2v_14b": 16_394_878_784,
    "wan2.1_flf2v_14b": 16_395_536_704,
    "wan2.2_t2v_a14b": 14_288_491_584,
    "wan2.2_i2v_a14b": 14_288_901_184,
    "wan2.2_ti2v_5b": 4_999_787_712,
}


def _theirs(model: WanConfig) -> WanTransformer3DModel:
    """Diffusers' network of the same sizes, without numbers."""
    with torch.device("meta"):
        return WanTransformer3DModel(**diffusers_form(model).content(RunConfig(model=model)))


@pytest.mark.parametrize("name", MODEL_SIZES)
def test_named_sizes_have_the_tensors_of_diffusers(name: str) -> None:
    model: Any = named_model(name)
    theirs = _theirs(model).state_dict()
    ours = {name: shape for pair in pairs(model) for name, shape in pair.their_shapes.items()}
    assert ours == {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    assert parameter_count(model) == PUBLISHED[name] == sum(t.numel() for t in theirs.values())


@pytest.mark.parametrize("kind", CONDITIONS)
@pytest.mark.parametrize("pad_to", [None, 512])
def test_description_counts_parameters_and_operations(groups, kind: str, pad_to: int | None):
    """Operations are those of Diffusers' network, which takes 512 rows of text beside images."""
    model = wan_model(kind, text_pad_to=pad_to)
    network = WanNetwork(model, groups)
    assert parameter_count(model) == sum(weight.numel() for weight in network.parameters())
    text, image = 512, model.image_rows or 0
    theirs, frames, height, width = _theirs(model), 2, 6, 8
    channels = model.in_channels + model.condition_channels
    with torch.device("meta"), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        states = None
        if image:
            size = model.image_embed_size
            pictures = (2, image // 2) if model.image_embed_positions else (1, image)
            states = torch.empty(*pictures, size)
        with FlopCounterMode(display=False) as counter:
            theirs(
                torch.empty(1, channels, frames, height, width),
                torch.empty(1),
                torch.empty(1, text, model.crossattn_emb_size),
                states,
            )
    tokens = frames * height * width // 4
    made = forward_flops(model, tokens=[tokens], text=[text + image])
    assert made == counter.get_total_flops()


def _network(groups, kind: str, **changes: Any) -> WanNetwork:
    network = WanNetwork(wan_model(kind, **changes), groups)
    randomise(network, seed=7)
    return network.eval()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("t2v", name) for name in ("latent_TC", "texts.text", "level")),
        *(("i2v", "condition_TC"), ("i2v_image", "texts.image_embed")),
        *(("flf2v", name) for name in ("condition_TC", "texts.image_embed", "texts.text", "level")),
        *(("ti2v", name) for name in ("first frame", "latent_TC", "level")),
    ],
)
def test_output_moves_with_its_own_inputs_and_with_no_neighbours(groups, kind: str, name: str):
    network = _network(groups, kind, text_pad_to=32)
    batch = random_pack(GRIDS, TEXTS, model=network.model)
    level_N, tensors = LEVELS.clone(), {n: x.clone() for n, x in batch.tensors.items()}
    first, others = tensors["latent_TC"][:6], tensors["latent_TC"][6:18]
    changed: Mapping[str, Tensor] = {
        **tensors,
        "level": level_N,
        "first frame": first,  # of a sample of three frames of 6 tokens each
        "latent_TC": others,
    }
    altered = batch.with_tensors(tensors)
    changed[name][0] += 1
    with torch.no_grad():
        before = network(batch.latent_TC, level_rows(LEVELS, batch), batch)
        after = network(altered.latent_TC, level_rows(level_N, batch), altered)
    spans = zip(batch.starts, batch.num_tokens, strict=False)
    moved = [not torch.equal(before[s : s + n], after[s : s + n]) for s, n in spans]
    assert moved == [True, False, False, False, False]


def test_tokens_of_a_given_frame_are_told_level_0(groups) -> None:
    """The first row of levels is told them instead: other numbers."""
    network = _network(groups, "ti2v")
    batch = random_pack(GRIDS, TEXTS, model=network.model)
    assert batch.clean_tokens == (6, 0, 3, 2, 0)
    with torch.no_grad():
        rows = level_rows(LEVELS, batch)
        assert rows[len(GRIDS) :].tolist() == [0.0] * len(GRIDS)
        told = network(batch.latent_TC, rows, batch)
        untold = batch.with_tensors({"level_row_T": batch.segment_T})
        assert not torch.allclose(told, network(batch.latent_TC, rows, untold), atol=1e-3)


def test_the_first_and_the_last_frame_are_marked(groups) -> None:
    """The mask changes what the network makes of the same condition."""
    made = []
    for kind in ("i2v", "flf2v"):
        network = _network(groups, kind, image_embed_size=None, image_embed_positions=False)
        batch = random_pack(GRIDS, TEXTS, model=network.model)
        with torch.no_grad():
            made.append(network(batch.latent_TC, LEVELS, batch))
    spans = zip(batch.starts, batch.num_tokens, strict=False)
    equal = [torch.equal(made[0][s : s + n], made[1][s : s + n]) for s, n in spans]
    assert equal == [grid[0] == 1 for grid in GRIDS]  # one frame is first and last


def test_tables_and_learned_positions_start_as_in_the_published_code(groups) -> None:
    model = wan_model("flf2v")
    network = WanNetwork(model, groups)
    initialise_weights(network, run_config(model=model))
    state = network.state_dict()
    assert not state["proj_out.weight"].any() and not state["image_embedder.positions"].any()
    spread = float(state["blocks.layers.0.modulation.table"].std())
    assert 0.8 < spread * model.hidden_size**0.5 < 1.2
    assert (state["blocks.layers.1.cross_attention.across_heads.image_key_scale"] == 1).all()


def _refused(model: WanConfig, parts: Mapping[str, Any]) -> SampleRefused:
    expected = Expected.of(run_config(model=model))
    with pytest.raises(SampleRefused) as caught:
        cook(parts, expected, key="a")
    return caught.value


def test_samples_without_what_a_network_needs_are_refused() -> None:
    text, both = (run_config(model=wan_model(kind)) for kind in ("t2v", "i2v_image"))
    found = _refused(both.model, mock_record(text, seed=1, index=0))  # type: ignore[arg-type]
    assert found.reason is Reject.NO_INPUT and "condition_latent" in str(found)
    assert cook(mock_record(both, seed=1, index=0), Expected.of(both), key="a")
    longer = wan_model("i2v_image", image_embed_length=6)
    found = _refused(longer, mock_record(both, seed=1, index=0))
    assert found.reason is Reject.INPUT_SHAPE and "takes [6, 10]" in str(found)


def test_a_given_first_frame_is_optional() -> None:
    (one,) = [i for i in family_of(wan_model()).inputs(wan_model("ti2v")) if i.name != "text"]
    assert (one.name, one.required) == ("first_frame_latent", False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 16}, "an even width of at least 6"),
        ({"image_embed_positions": True}, "needs image_embed_size"),
        ({"freq_dim": 0}, "freq_dim=0 must be at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Problems, match=words):
        wan_model(**changes)

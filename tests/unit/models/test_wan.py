"""What Wan alone has: levels of given frames, marks of frames, first values, refused samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from dit.data.cook import Expected, cook
from dit.data.mock import mock_record
from dit.data.rejections import Reject, SampleRefused
from dit.models.registry import family_of
from dit.models.wan.family import WanConfig
from dit.models.wan.model import WanNetwork
from dit.train.model_and_optimizer import initialise_weights, randomise
from tests.families.wan import wan_model
from tests.packs import random_pack, run_config
from tests.toy_networks import level_rows

GRIDS, TEXTS = [(3, 2, 3), (1, 4, 2), (2, 3, 1), (4, 1, 2), (1, 1, 1)], [9, 2, 4, 30, 1]
LEVELS = torch.tensor([812.5, 0.5, 437.0, 999.0, 31.25])


def _network(groups, kind: str, **changes: Any) -> WanNetwork:
    network = WanNetwork(wan_model(kind, **changes), groups)
    randomise(network, seed=7)
    return network.eval()


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

"""Cosmos-Predict2 and 2.5: outputs and gradients of a mixed pack are Diffusers' of each sample."""

from __future__ import annotations

import json

import pytest
import torch

from dit.convert.cli import main
from dit.convert.export import export_weights
from dit.convert.import_ import import_weights
from dit.data.pack import PatchLayout, pack_samples
from dit.models.diffusers_names import their_tensors
from dit.models.dit.model import DiT
from dit.models.patches import unpack_latents
from dit.models.registry import pairs
from dit.train.checkpoint.state_dict import load_weights
from tests.cosmos_predict import LEVELS, NETWORKS, gap, samples, told_diffusers
from tests.published import publish, random_model
from tests.unit.convert.test_round_trip import _assert_same, _tensors


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_and_gradients_are_those_of_diffusers(groups, resize, tmp_path, name):
    theirs = random_model(seed=len(name), **NETWORKS[name])
    done = import_weights(
        publish(tmp_path / "hf", theirs), tmp_path / "a", **TEXT.get(name.split(",")[0], {})
    )
    model = done.config.model
    ours = DiT(model, groups)
    load_weights(done.path, [ours], groups, averaged=False)
    given = samples(done.config)
    batch = pack_samples(given, PatchLayout.of(done.config))
    assert (batch.clean_level is not None) == ("image" not in name)
    level_M = torch.tensor([*LEVELS, *[1e-4] * (batch.num_levels - len(LEVELS))])

    made_TC = ours(batch.latent_TC, level_M, batch)
    patch = {"patch_temporal": model.patch_temporal, "patch_spatial": model.patch_spatial}
    mine = unpack_latents(made_TC, batch, **patch)
    their = [
        theirs(**told_diffusers(sample, level, model))[0][0]
        for sample, level in zip(given, LEVELS, strict=True)
    ]
    assert max(map(gap, mine, their)) <= 1e-5

    rng = torch.Generator().manual_seed(7)
    pulls = [torch.randn(latent.shape, generator=rng) for latent in their]
    for outputs in (mine, their):
        sum((o * pull).sum() for o, pull in zip(outputs, pulls, strict=True)).backward()
    table, weights = pairs(model), dict(ours.named_parameters())
    found = their_tensors(table, lambda pair: weights[_own_name(pair)].grad)
    wanted = {n: weight.grad for n, weight in theirs.named_parameters()}
    assert found.keys() == wanted.keys()
    assert all(gradient.any() for gradient in wanted.values())
    assert max(gap(found[n], wanted[n]) for n in wanted) <= 1e-4


TEXT = {"images": {"text_pad_to": 12}, "video": {"text_pad_to": 12}}
"""Captions of Predict2 are filled up; those of 2.5 are as the shards have them."""


def _own_name(pair) -> str:
    return pair.ours.replace("layers.", f"layers.{pair.layer}.", 1)


@pytest.mark.parametrize("name", NETWORKS)
def test_there_and_back_is_bit_exact(groups, tmp_path, name):
    source = publish(tmp_path / "hf", random_model(**NETWORKS[name]))
    done = import_weights(source, tmp_path / "ours")
    assert done.config.model.text_pad_to == (None if "2.5" in name else 512)
    assert done.config.model.base_fps == (None if "2.5" in name else 24.0)
    export_weights(done.path, tmp_path / "back")
    _assert_same(_tensors(source), _tensors(tmp_path / "back"))
    one, two = (json.loads((d / "config.json").read_text()) for d in (source, tmp_path / "back"))
    told = {key: value for key, value in two.items() if key[0] != "_"}
    assert told == {key: one[key] for key in told}
    again = import_weights(tmp_path / "back", tmp_path / "again").config
    assert again == done.config


@pytest.mark.parametrize("name", ["images", "video", "2.5"])
def test_verify_compares_given_frames_too(groups, tmp_path, capsys, name):
    source = publish(tmp_path / "hf", random_model(**NETWORKS[name]))
    words = ["--hf-path", str(source), "--megatron-path", str(tmp_path / "ours")]
    assert main(["import", *words]) == 0
    assert main(["verify", *words]) == 0
    assert "outputs of 3 random samples in one pack" in capsys.readouterr().out

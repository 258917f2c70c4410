"""OmniGen2: the network that it is held against makes what the public code makes; its rules."""

from __future__ import annotations

import pytest
import torch

from dit.config_loading import ConfigError, load_config
from dit.models.omnigen2.family import TINY, OmniGen2Config
from dit.models.omnigen2.model import OmniGen2Network
from recipes.runs import dit_xl
from tests.families import omnigen2
from tests.packs import random_pack


@pytest.mark.parametrize("number", omnigen2.JUDGED)
def test_outputs_and_gradients_are_those_of_the_public_code(number: int) -> None:
    """Of no reference, of one and of three; a table has more rows than these have pictures."""
    network = omnigen2.OmniGen2Transformer2DModel(
        **{**omnigen2.TINY, **omnigen2.configuration(number)}
    )
    found, stored = omnigen2.judged(network, number), omnigen2.stored()
    assert found.keys() == {name for name in stored if name.startswith(f"{number}.")}
    for name, value in found.items():
        # Stored on another processor, in float32: kernels differ by up to 4e-6.
        torch.testing.assert_close(value, stored[name], rtol=1e-4, atol=5e-5)


def test_samples_with_references_stay_whole() -> None:
    """Half of a sample's tokens could hold no whole reference."""
    words = ["model.name=omnigen2", "objective.second_level_rate=0.5"]
    load_config(dit_xl(), overrides=words)
    with pytest.raises(ConfigError, match=r"model.reference_latents=2 needs all of them together"):
        load_config(dit_xl(), overrides=[*words, "model.reference_latents=2"])


def test_all_weights_are_asked_for_without_references(groups) -> None:
    """As Megatron-Core's DDP asks with ddp.overlap_param_gather: before the call of a module."""
    model = OmniGen2Config(name="custom", **TINY["omnigen2"])
    network, asked = OmniGen2Network(model, groups), set[torch.Tensor]()
    for module in network.modules():
        module.register_forward_pre_hook(lambda one, _: asked.update(one.parameters(recurse=False)))
    batch = random_pack([(1, 3, 5)], [3], model=model)
    assert not any(batch.references)
    network(batch.latent_TC.float(), torch.tensor([500.0]), batch)
    assert [name for name, weight in network.named_parameters() if weight not in asked] == []

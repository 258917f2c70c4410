"""OmniGen2: the network that it is held against makes what the public code makes; its rules."""

from __future__ import annotations

import pytest
import torch

from dit.config_loading import ConfigError, load_config
from recipes.runs import dit_xl
from tests.families import omnigen2


@pytest.mark.parametrize("number", omnigen2.JUDGED)
def test_outputs_and_gradients_are_those_of_the_public_code(number: int) -> None:
    """Of no reference, of one and of three; a table has more rows than these have pictures."""
    network = omnigen2.OmniGen2Transformer2DModel(
        **{**omnigen2.TINY, **omnigen2.configuration(number)}
    )
    found, stored = omnigen2.judged(network, number), omnigen2.stored()
    assert found.keys() == {name for name in stored if name.startswith(f"{number}.")}
    for name, value in found.items():
        torch.testing.assert_close(value, stored[name], rtol=1e-5, atol=5e-6)


def test_samples_with_references_stay_whole() -> None:
    """Half of a sample's tokens could hold no whole reference."""
    words = ["model.name=omnigen2", "objective.second_level_rate=0.5"]
    load_config(dit_xl(), overrides=words)
    with pytest.raises(ConfigError, match=r"model.reference_latents=2 needs all of them together"):
        load_config(dit_xl(), overrides=[*words, "model.reference_latents=2"])

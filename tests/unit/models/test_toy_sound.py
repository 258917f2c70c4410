"""A network of three rows, of which sound is not in every sample, on one process."""

from __future__ import annotations

import pytest
import torch

from dit.batch import LATENTS
from dit.config import Precision
from dit.models.registry import VARIABLE
from dit.train.model_and_optimizer import randomise
from tests.sounding import ROUTED, Mixed, assert_each_as_alone, trained
from tests.toy_networks import RECOMPUTED
from tests.toy_sound_family import PLACE, ToySoundConfig, ToySoundNetwork


@pytest.fixture(autouse=True)
def _registered(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, PLACE)


def network_of(groups, **changes) -> ToySoundNetwork:
    model = ToySoundConfig(**({"num_layers": 2, "precision": Precision.FP32} | changes))
    network = ToySoundNetwork(model, groups)
    randomise(network, seed=7)
    return network.train()


@pytest.mark.parametrize("changes", [{}, ROUTED], ids=["all tokens", "route"])
def test_each_of_six_mixed_samples_is_as_alone(groups, changes) -> None:
    assert_each_as_alone(network_of(groups, **changes))


def test_not_even_a_bias_of_sound_reaches_a_sample_without(groups) -> None:
    """To the bit as in a network whose streams do not meet, with the same weights."""
    network, apart = network_of(groups), network_of(groups, streams_meet=False)
    apart.load_state_dict({name: network.state_dict()[name] for name in apart.state_dict()})
    for layer in network.blocks.layers:
        assert layer.from_sound_attention.linear_proj.bias.any()
    with_sound, silent = Mixed(network.model, [0, 5]), Mixed(network.model, [1, 5])
    found, wanted = (trained(one, silent)[0][LATENTS] for one in (network, apart))
    assert torch.equal(found, wanted)
    _, gradients, _ = trained(network, silent)
    assert gradients["patches.weight"].any()
    for name, gradient in gradients.items():
        assert not (gradient.any() and ("sound" in name or "from_video" in name)), name
    # A sample beside one with sound, too.
    first = with_sound.batch.starts[1]
    found, wanted = (trained(one, with_sound)[0][LATENTS] for one in (network, apart))
    torch.testing.assert_close(found[first:], wanted[first:], rtol=0, atol=0)
    assert not torch.equal(found[:first], wanted[:first])


@pytest.mark.parametrize("changes", RECOMPUTED, ids=["full", "groups", "block", "selective"])
def test_recomputation_changes_no_bit(groups, changes) -> None:
    mixed = Mixed(network_of(groups).model)
    _, plain, _ = trained(network_of(groups), mixed)
    _, found, _ = trained(network_of(groups, **changes), mixed)
    assert all(torch.equal(found[name], gradient) for name, gradient in plain.items())

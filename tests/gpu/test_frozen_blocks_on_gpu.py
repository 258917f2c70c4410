"""Blocks that wait on the host, and matrices in 8 bits: on a GPU, with streams that run ahead."""

from __future__ import annotations

import pytest
import torch

from dit.config import LoraConfig, Precision, Recompute
from dit.distributed.process_groups import device, process_groups, start_processes
from dit.lora.targets import attach_adapters, chosen_adapters
from dit.models.dit.family import DitConfig
from dit.models.dit.model import DiT
from dit.models.stacks.frozen_blocks import place_networks, round_blocks
from dit.pack_wire import pack_to
from dit.train.model_and_optimizer import randomise
from tests.packs import random_pack, tiny_model

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 1024, "num_attention_heads": 8, "num_layers": 8}


@pytest.fixture(scope="module")
def groups():
    start_processes(seed=1, model=DitConfig())
    return process_groups()


def _network(groups, *, swapped: int, narrow: bool, **changes):
    model = tiny_model(**SIZES, precision=Precision.BF16, **changes)
    network = DiT(model, groups).train()
    lora = LoraConfig(rank=3, targets=("*blocks.*",))
    attach_adapters(network, chosen_adapters(model, lora), precision=Precision.BF16)
    randomise(network, seed=3)
    if narrow:
        round_blocks(network, device())
    place_networks([network], device(), swapped=swapped)
    return network


def _numbers(network):
    network.zero_grad()
    batch = pack_to(random_pack([(1, 32, 32)] * 4, [9] * 4, model=network.model), device())
    out_TC = network(batch.latent_TC, torch.linspace(-0.5, 0.5, 4).to(device()), batch)
    (out_TC * batch.latent_TC).sum().backward()
    return [out_TC.detach(), *(p.grad.clone() for p in network.parameters() if p.requires_grad)]


@pytest.mark.parametrize("narrow", [False, True], ids=["whole", "8 bits"])
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize("swapped", [2, 5, 7])
def test_blocks_that_take_turns_change_no_number(groups, swapped, recompute, narrow):
    made = {"narrow": narrow, "recompute_granularity": recompute}
    plain = _network(groups, swapped=0, **made)
    wanted = _numbers(plain)
    del plain
    network = _network(groups, swapped=swapped, **made)
    for _ in range(3):
        found = _numbers(network)
        assert torch.equal(wanted[0], found[0])
        # Sums over tokens are added in any order on a GPU; another block's weights are far off.
        for a, b in zip(wanted, found, strict=True):
            assert (a - b).norm() <= 0.02 * a.norm()


def test_the_device_has_memory_for_fewer_blocks(groups):
    def held(**options) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        network = _network(groups, **options)
        assert network is not None
        return torch.cuda.memory_allocated() - before

    whole = held(swapped=0, narrow=False)
    block = 2 * sum(
        p.numel() for p in DiT(tiny_model(**SIZES), groups).decoder.layers[0].parameters()
    )
    assert held(swapped=5, narrow=False) == pytest.approx(whole - 5 * block, rel=0.05)
    assert held(swapped=0, narrow=True) == pytest.approx(whole - 4 * block, rel=0.05)

"""Transformer Engine's layers and 8-bit products on a GPU, against the local ones in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from dit.config import AttentionBackend, Fp8, Fp8Recipe, Implementation, Precision, Recompute
from dit.distributed.process_groups import process_groups, start_processes
from dit.models.dit.family import DitConfig
from dit.models.dit.model import DiT
from dit.pack_wire import pack_to
from dit.train.model_and_optimizer import randomise
from tests.packs import random_pack, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not find_spec("transformer_engine"), reason="needs Transformer Engine"),
]
MODEL = tiny_model(
    hidden_size=256, num_attention_heads=4, precision=Precision.BF16, crossattn_emb_size=64
)
ENGINE = {
    "transformer_impl": Implementation.TRANSFORMER_ENGINE,
    "attention_backend": AttentionBackend.TRANSFORMER_ENGINE,
}


@pytest.fixture(scope="module")
def groups():
    start_processes(seed=1, model=DitConfig())
    return process_groups()


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL])
@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, 0.05),
        ({"fp8": Fp8.HYBRID}, 0.25),
        ({"fp8": Fp8.E4M3, "fp8_recipe": Fp8Recipe.BLOCKWISE}, 0.25),
    ],
    ids=["bf16", "tensorwise", "blockwise"],
)
def test_predictions_and_gradients_are_those_of_the_local_layers(groups, changes, bound, recompute):
    batch = random_pack([(1, 16, 16), (4, 8, 9), (1, 3, 5)], [9, 1, 4], model=MODEL, multiple=16)
    batch = pack_to(batch, torch.device("cuda"))
    level_N = torch.tensor([0.1, -0.3, 0.5], device="cuda")
    found = []
    for asked in ({}, {**ENGINE, **changes}):
        network = DiT(replace(MODEL, recompute_granularity=recompute, **asked), groups).cuda()
        randomise(network, seed=3)
        out_TC = network.train()(batch.latent_TC, level_N, batch)
        (out_TC * batch.latent_TC).sum().backward()
        found.append([out_TC.detach(), *(p.grad.float() for p in network.parameters())])
    for local, other in zip(*found, strict=True):
        assert (local - other).norm() <= bound * local.norm() + 1e-6

"""The network in bfloat16 on a GPU: fused paths, nothing to wait for, the CPU's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dit.config import ObjectiveConfig, Precision, Recompute
from dit.models.dit.model import DiT
from dit.objectives.registry import training_objective
from dit.objectives.training_target import draw_problem
from dit.pack_wire import pack_to
from dit.train.loss import loss_of
from dit.train.model_and_optimizer import randomise
from tests.packs import random_pack, tiny_model

pytestmark = pytest.mark.gpu

MODEL = tiny_model(
    hidden_size=256, num_attention_heads=4, precision=Precision.BF16, crossattn_emb_size=64
)
PATHS = {
    "fused kernels": {},
    "eager": {"fused_kernels": False},
    "compiled": {"compile": True},
    "offloaded": {"cpu_offloading_num_layers": 1},
    "offloaded inputs": {"cpu_offloading_num_layers": 2, "recompute_granularity": Recompute.FULL},
    "compiled and offloaded": {"compile": True, "cpu_offloading_num_layers": 2},
}
PACKS = ([(1, 16, 16), (4, 8, 9), (1, 3, 5)], [(2, 12, 12)], [(1, 8, 8)] * 6)


def _pack(grids, model):
    return random_pack(grids, [5 + i for i in range(len(grids))], model=model)


def _numbers(network, batch):
    """Prediction and gradients, float32."""
    network.zero_grad()
    level_N = torch.linspace(-0.5, 0.5, batch.num_samples).to(batch.latent_TC.device)
    out_TC = network(batch.latent_TC, level_N, batch)
    (out_TC * batch.latent_TC).sum().backward()
    return [out_TC.detach(), *(p.grad.float().clone() for p in network.parameters())]


@pytest.mark.parametrize("changes", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("grids", PACKS, ids=["mixed", "one", "equal"])
def test_fast_paths_give_the_numbers_of_float32(groups, grids, changes):
    plain = {"precision": Precision.FP32, "fused_kernels": False}
    exact = DiT(replace(MODEL, **plain), groups).cuda()
    fast = DiT(replace(MODEL, **changes), groups).cuda()
    batch = pack_to(_pack(grids, MODEL), torch.device("cuda"))
    found = []
    for network in (exact, fast):
        randomise(network, seed=3)
        found.append(_numbers(network.train(), batch))
    for reference, number in zip(*found, strict=True):
        assert (number - reference).norm() <= 0.05 * reference.norm() + 1e-6


@pytest.mark.parametrize("changes", PATHS.values(), ids=PATHS)
def test_a_step_never_waits_for_the_device(groups, changes):
    network = DiT(replace(MODEL, **changes), groups).cuda().train()
    objective = training_objective(ObjectiveConfig())
    device = torch.device("cuda")
    packs = [_pack(grids, MODEL) for grids in PACKS]

    def step(batch):
        batch = pack_to(batch, device)
        problem = draw_problem(
            objective, batch, levels_rng=torch.Generator(), noise_rng=torch.Generator(device)
        )
        out_TC = network(problem.input_TC, problem.level_M, batch)
        loss_of(batch, problem, out_TC, ObjectiveConfig()).total.backward()

    for batch in packs:  # kernels are compiled and loaded
        step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in packs:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")

"""Networks of all kinds of layers, on one process: samples are independent, weights are used."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest
import torch

from dit.config import Precision
from dit.models.layers import packed_attention
from dit.train.model_and_optimizer import initialise, randomise
from tests.packs import single
from tests.plain_kernel import attend_as_a_gpu
from tests.toy_networks import NETWORKS, RECOMPUTED, level_rows, toy_model, toy_pack

# The toy family's videos have a given first frame.
GRIDS, TEXTS = [(1, 4, 6), (3, 2, 5), (1, 1, 1), (2, 4, 3)], [9, 0, 4, 30]
LEVELS = torch.tensor([0.1, -0.2, 0.4, 0.3])


def _network(groups, name: str, **changes):
    network = NETWORKS[name](toy_model(name, **changes), groups)
    randomise(network, seed=7)
    return network.train()


def _pack(name: str):
    return toy_pack(toy_model(name), GRIDS, TEXTS)


def _gradients(network, batch, level_N, weight_TC) -> dict[str, torch.Tensor]:
    network.zero_grad()
    out_TC = network(batch.latent_TC, level_rows(level_N, batch), batch)
    (out_TC * weight_TC)[batch.is_real_T].sum().backward()
    found = {n: p.grad.clone() for n, p in network.named_parameters()}
    return found | {"output": out_TC.detach()}


@pytest.mark.parametrize("attend", [None, attend_as_a_gpu], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_sample_in_a_pack_equals_sample_alone(groups, monkeypatch, name, attend):
    if attend is not None:
        monkeypatch.setattr(packed_attention, "attention_for", lambda *of: attend)
    network, batch = _network(groups, name), _pack(name)
    weight_TC = torch.randn(batch.latent_TC.shape, generator=torch.Generator().manual_seed(2))
    packed = _gradients(network, batch, LEVELS, weight_TC)
    output_TC, sums = packed.pop("output"), {}
    for i in range(len(GRIDS)):
        rows, mine = slice(*batch.starts[i : i + 2]), single(batch, i)
        alone = _gradients(network, mine, LEVELS[i : i + 1], weight_TC[rows])
        out_TC, real = alone.pop("output"), slice(0, mine.real_tokens)
        torch.testing.assert_close(out_TC[real], output_TC[rows][real], rtol=1e-5, atol=2e-5)
        sums = {n: sums.get(n, 0) + g for n, g in alone.items()}
    for n, gradient in packed.items():
        assert (sums[n] - gradient).norm() <= 3e-5 * gradient.norm(), n


@pytest.mark.parametrize("name", list(NETWORKS))
def test_every_weight_has_a_gradient_but_for_those_that_are_listed(groups, name):
    network, batch = _network(groups, name), _pack(name)
    gradients = _gradients(network, batch, LEVELS, torch.ones_like(batch.latent_TC))
    listed = network.parameters_without_gradient()
    without = {n for n, g in gradients.items() if not g.norm() > 0}
    assert without == {n for n in gradients if any(fnmatch(n, pattern) for pattern in listed)}
    assert len(without) == (7 if name == "double" else 0)


def test_weights_without_gradient_lie_in_the_last_layer_alone(groups):
    listed = _network(groups, "double").parameters_without_gradient()
    assert listed and all(name.startswith("double_blocks.layers.1.text_") for name in listed)


@pytest.mark.parametrize("change", ["latent", "text", "level", "pooled"])
@pytest.mark.parametrize("name", ["joint", "double", "cross"])  # families: tests/contract
def test_output_moves_with_its_own_sample_and_with_no_neighbour(groups, name, change):
    network, batch = _network(groups, name), _pack(name)
    latent_TC, text_LE, level_N = batch.latent_TC.clone(), batch.text_LE.clone(), LEVELS.clone()
    changed = {"latent": latent_TC, "text": text_LE, "level": level_N}
    vectors = {f"vectors.{n}": rows.clone() for n, rows in batch.vectors.items()}
    for of in changed.get(change, next(iter(vectors.values()), level_N))[:1]:
        of += 1
    altered = batch.with_tensors({"latent_TC": latent_TC, "texts.text": text_LE, **vectors})
    with torch.no_grad():
        before = network(batch.latent_TC, level_rows(LEVELS, batch), batch)
        after = network(latent_TC, level_rows(level_N, batch), altered)
    spans = zip(batch.starts, batch.num_tokens, strict=False)
    moved = [not torch.equal(before[s : s + n], after[s : s + n]) for s, n in spans]
    assert moved == [True, False, False, False]


@pytest.mark.parametrize(
    "changes",
    [
        *RECOMPUTED,
        {"cpu_offloading_num_layers": 3},
    ],
    ids=["full", "groups", "block", "selective", "offload"],
)
def test_recomputation_and_offload_change_no_bit(groups, changes):
    """The first three layers of a stage are two of one stack and one of the next."""
    batch = _pack("joint")
    weight_TC = torch.ones_like(batch.latent_TC)
    plain = _gradients(_network(groups, "joint"), batch, LEVELS, weight_TC)
    other = _network(groups, "joint", **changes)
    stacks = list(other.stacks.values())
    assert [stack.layers_before for stack in stacks] == [0, 2]
    if changes.get("recompute_method"):
        picked = [stack._recomputed(i) for stack in stacks for i in range(len(stack.layers))]
        assert picked == [True, True, True, False, False]
    found = _gradients(other, batch, LEVELS, weight_TC)
    assert all(torch.equal(found[name], value) for name, value in plain.items())


@pytest.mark.parametrize("name", list(NETWORKS))
def test_bfloat16_is_near_float32(groups, name):
    batch = _pack(name)
    outputs = []
    for precision in (Precision.FP32, Precision.BF16):
        network = _network(groups, name, precision=precision)
        x_TC = batch.latent_TC.to(network.config.params_dtype)
        with torch.no_grad():
            outputs.append(network(x_TC, level_rows(LEVELS, batch), batch)[batch.is_real_T])
    assert (outputs[1] - outputs[0]).norm() <= 0.05 * outputs[0].norm()


def test_a_family_says_what_starts_at_zero(groups):
    network = NETWORKS["joint"](toy_model("joint"), groups)
    initialise(network, seed=1, std=None, zero=lambda name: "modulat" in name)
    state = network.state_dict()
    assert not state["double_blocks.layers.0.text_modulation.linear.weight"].any()
    assert not state["modulate_out.linear.weight"].any() and state["proj_out.weight"].any()
    assert (state["single.layers.1.attention.q_layernorm.weight"] == 1).all()
    assert not state["patches.bias"].any()
    batch = _pack("joint")
    layout = network.layout(batch)
    blocks = network.embed(batch.latent_TC, level_rows(LEVELS, batch), batch, layout)
    conditions = network.conditions(blocks, batch, layout)
    joint = network.joined(blocks, conditions)["joint"]  # layers of closed gates change nothing
    torch.testing.assert_close(network.run_stacks(blocks, conditions)["joint"], joint)

"""Frozen matrices in 8 bits, and blocks that wait on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dit.config import (
    BaseType,
    EmaConfig,
    EmaKind,
    Fp8,
    Implementation,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParameterGroup,
    Precision,
    Problems,
    Recompute,
    RecomputeMethod,
)
from dit.lora.targets import attach_adapters, chosen_adapters
from dit.models.dit.model import DiT
from dit.models.layers import per_sample
from dit.models.layers.adaptable import Adaptable, TensorSharing, is_adapter
from dit.models.stacks import frozen_blocks
from dit.models.stacks.frozen_blocks import (
    FrozenMatrix,
    freeze_matrix,
    frozen_product,
    place_networks,
    restored,
    round_blocks,
    rounded,
)
from dit.models.wan.model import WanNetwork
from dit.train.model_and_optimizer import randomise
from tests import toy_networks
from tests.families.wan import wan_model
from tests.late_copies import LateCopies
from tests.packs import random_pack, run_config, tiny_model
from tests.toy_networks import level_rows, toy_model, toy_pack

CPU, E8M0 = torch.device("cpu"), torch.float8_e8m0fnu
PACK = ([(1, 8, 8), (2, 6, 6)], [9, 30])
NETWORKS: dict[str, tuple[Callable[..., Any], Callable[..., ModelConfig]]] = {
    "dit": (DiT, tiny_model),
    "wan": (WanNetwork, lambda **changes: wan_model("t2v", **changes)),
}
RECOMPUTED = {
    "none": {},
    "selective": {"recompute_granularity": Recompute.SELECTIVE},
    "full": {"recompute_granularity": Recompute.FULL},
    "pairs": {"recompute_granularity": Recompute.FULL, "recompute_num_layers": 2},
    "block": {
        "recompute_granularity": Recompute.FULL,
        "recompute_method": RecomputeMethod.BLOCK,
        "recompute_num_layers": 2,
    },
}


@pytest.mark.parametrize("scale", [1e-38, 1e-6, 1.0, 3e7])
def test_a_matrix_is_rounded_row_by_row(scale: float) -> None:
    weight = torch.randn(64, 96, dtype=torch.float64) * torch.logspace(-6, 0, 64)[:, None] * scale
    weight = weight.float()
    weight[7] = 0
    narrow, factor = rounded(weight)
    assert narrow.dtype is torch.float8_e4m3fn and narrow.nbytes == weight.numel()
    assert torch.equal(factor.log2(), factor.log2().round())  # exact in any type
    back = restored(narrow, factor, torch.float32)
    assert torch.equal(back, restored(narrow, factor, torch.bfloat16).float())
    # 3 bits after the leading one; what is 2^14 times smaller than the rest of its row has fewer.
    least = factor[:, None] * 2.0**-6
    assert ((back - weight).abs() <= torch.maximum(weight.abs(), least) * 2**-4).all()
    assert ((back - weight).norm() / weight.norm() < 0.03) == (scale > 1e-20)
    # What is rounded already stays.
    assert torch.equal(restored(*rounded(back), torch.float32), back)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("allowed", [False, True])
def test_matrices_are_restored_by_our_kernel_where_it_runs(groups, monkeypatch, allowed, shares):
    calls = []

    def kernel(narrow, exponents, dtype):
        calls.append((narrow.stride(0) % 16, narrow.stride(1), exponents.dtype))
        return restored(narrow.view(frozen_blocks.ROUNDED), exponents.view(E8M0), dtype)

    monkeypatch.setattr("dit.models.kernels.restored_rows.restored_rows", kernel)
    monkeypatch.setattr(per_sample, "kernels_run_on", lambda _: True)
    network = _network(groups, "dit", fused_kernels=allowed)
    linear = next(frozen_blocks._linears(frozen_blocks._layers(network)[0]))
    wanted = restored(*rounded(linear.weight.detach()), linear.weight.dtype)
    if shares:
        (_, rows), *_ = frozen_blocks.byte_rows(network)
        linear.weight.data = rows.pack(linear.weight.detach())
    else:
        round_blocks(network, CPU)
    assert torch.equal(linear.frozen(), wanted)
    assert calls == [(0, 1, torch.uint8)] * allowed


class _SplitOutputs(Adaptable):
    """The part of a linear that one of two tensor ranks holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(24, 16).bfloat16(), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.randn(24).bfloat16(), requires_grad=False)

    def tensor_sharing(self) -> TensorSharing:
        group: Any = SimpleNamespace(size=lambda: 2)
        return TensorSharing(axis=0, group=group, partial=True)


def test_a_frozen_linear_with_split_outputs_adds_its_bias_in_the_product() -> None:
    split, x_TI = _SplitOutputs(), torch.randn(8, 16).bfloat16()
    freeze_matrix(split)
    once = torch.nn.functional.linear(x_TI, split.weight, split.bias)
    assert torch.equal(split.frozen.output_of(split, x_TI), once)
    assert not torch.equal(x_TI @ split.weight.T + split.bias, once)  # which rounds twice


def test_the_largest_number_of_a_row_fits_and_uses_the_range() -> None:
    most = torch.tensor([448.0, 449.0, 447.0, 1.0, 0.875, 0.8751, 464.0]).repeat_interleave(2)
    narrow, factor = rounded(torch.stack([most, -most], dim=1))
    assert narrow.float().isfinite().all()
    assert (narrow.float().abs().amax(1) >= 224).all()
    assert factor[0] == 1 and factor[2] == 2


def test_a_factor_is_that_of_the_whole_row(monkeypatch) -> None:
    """Of a row whose second half is large, the first rank alone would take a smaller factor."""
    whole = torch.randn(6, 32) * torch.logspace(-5, 0, 32)
    halves = whole[:, :16], whole[:, 16:]
    most = torch.stack([half.abs().amax(1) for half in halves]).amax(0)
    monkeypatch.setattr(dist, "all_reduce", lambda x, op, group: x.copy_(most))
    narrow, factor = rounded(whole)
    ranks: Any = SimpleNamespace(size=lambda: 2)
    for number, half in enumerate(halves):
        mine, same = rounded(half, columns=ranks)
        assert torch.equal(same, factor)
        assert torch.equal(mine.float(), narrow[:, 16 * number :][:, :16].float())
    assert not torch.equal(rounded(halves[0])[1], factor)


def test_a_product_keeps_neither_matrix_nor_input_and_has_the_gradients_of_a_linear() -> None:
    weight = torch.nn.Parameter(torch.randn(5, 7, dtype=torch.float64), requires_grad=False)
    linear: Any = SimpleNamespace(weight=weight)
    matrix = FrozenMatrix(linear)
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, b: frozen_product(x, matrix, b), (x, bias))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = frozen_product(x, matrix, bias)
    assert not kept
    assert torch.equal(out, torch.nn.functional.linear(x, weight, bias))


def _network(groups: Any, name: str, *, layers: int = 5, **changes: Any) -> Any:
    """With random adapters on all linears of the layers, and frozen weights."""
    made, config = NETWORKS[name]
    network = made(config(num_layers=layers, **changes), groups).train()
    lora = LoraConfig(rank=3, targets=("*blocks.*",))
    attach_adapters(network, chosen_adapters(network.model, lora), precision=Precision.FP32)
    randomise(network, seed=7)
    return network


def _numbers(network: Any) -> list[torch.Tensor]:
    """Prediction, and the gradients of all that is trained."""
    network.zero_grad()
    pack = random_pack(*PACK, model=network.model)
    out_TC = network(pack.latent_TC, torch.tensor([0.1, -0.3]), pack)
    (out_TC * pack.latent_TC).sum().backward()
    gradients = {n: p.grad for n, p in network.named_parameters() if p.requires_grad}
    assert gradients and all(is_adapter(name) for name in gradients)
    assert all(gradient is not None and gradient.any() for gradient in gradients.values())
    return [out_TC.detach(), *gradients.values()]


def _matrices(network: Any) -> Iterator[tuple[str, Adaptable]]:
    for name, module in network.named_modules():
        if isinstance(module, Adaptable) and ".layers." in name:
            yield name, module


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_those_of_a_network_that_holds_the_rounded_weights(groups, name, precision):
    network = _network(groups, name, precision=precision)
    plain, whole = _network(groups, name, precision=precision), _numbers(network)
    round_blocks(network, CPU)
    inside = dict(_matrices(network))
    assert len(inside) > 10
    for key, parameter in network.named_parameters():
        narrow = parameter.dtype is torch.float8_e4m3fn
        assert narrow == (key.removesuffix(".weight") in inside and key.endswith(".weight"))
    with torch.no_grad():
        for key, module in _matrices(plain):
            module.weight.copy_(inside[key].frozen())
    assert _same(_numbers(plain), _numbers(network))
    # Far from all zeros, and not what the unrounded weights give.
    assert 1e-3 < (whole[0] - _numbers(network)[0]).norm() / whole[0].norm() < 0.2


def test_names_and_shapes_in_a_checkpoint_stay(groups):
    network = _network(groups, "wan")
    before = {k: (e.key, e.global_shape) for k, e in network.sharded_state_dict().items()}
    round_blocks(network, CPU)
    place_networks([network], CPU, swapped=2)
    after = {k: (e.key, e.global_shape) for k, e in network.sharded_state_dict().items()}
    assert after == before


@pytest.mark.parametrize("changes", RECOMPUTED.values(), ids=RECOMPUTED)
@pytest.mark.parametrize(("swapped", "narrow"), [(1, False), (3, True), (4, False)])
def test_blocks_that_take_turns_change_no_bit(groups, monkeypatch, changes, narrow, swapped):
    """Copies are made as late as the streams allow: what waits for too little has other numbers."""
    copies = LateCopies()
    monkeypatch.setattr(frozen_blocks, "copies_of", lambda _: copies)
    plain, network = (_network(groups, "dit", **changes) for _ in range(2))
    for one in (plain, network) if narrow else ():
        round_blocks(one, CPU)
    place_networks([network], CPU, swapped=swapped)
    wanted = _numbers(plain)
    for _ in range(2):
        assert _same(_numbers(network), wanted)
    with torch.no_grad():
        pack = random_pack(*PACK, model=network.model)
        out = network.eval()(pack.latent_TC, torch.tensor([0.1, -0.3]), pack)
    assert torch.equal(out, wanted[0])


@pytest.mark.parametrize("every", [1, 2, 3])
def test_blocks_of_two_kinds_take_turns_in_places_of_the_larger(groups, monkeypatch, every):
    """Here biases and norms are trained, and the text of the last double block is not computed.

    Of every second or third block the matrices are frozen, which are fewer than may wait.
    """
    copies = LateCopies()
    monkeypatch.setattr(frozen_blocks, "copies_of", lambda _: copies)
    batch = toy_pack(toy_model("joint"), *PACK)
    found = []
    for swapped in (0, 3):
        network = toy_networks.NETWORKS["joint"](toy_model("joint"), groups).train()
        randomise(network, seed=7)
        for layer in frozen_blocks._layers(network)[every - 1 :: every]:
            for module in frozen_blocks._linears(layer):
                module.weight.requires_grad_(False)
                freeze_matrix(module)
        place_networks([network], CPU, swapped=swapped)
        network(
            batch.latent_TC, level_rows(torch.tensor([0.1, -0.3]), batch), batch
        ).sum().backward()
        found.append({n: p.grad for n, p in network.named_parameters() if p.requires_grad})
    assert copies.log.count("overwrite") > (5 if every == 1 else 0)
    plain, turning = found
    assert any(name.endswith("linear_qkv.bias") for name in plain)
    assert all(torch.equal(turning[name], gradient) for name, gradient in plain.items())


@pytest.mark.parametrize("full", [False, True])
def test_each_pass_copies_the_blocks_once_and_ahead_of_their_turns(groups, monkeypatch, full):
    copies = LateCopies()
    monkeypatch.setattr(frozen_blocks, "copies_of", lambda _: copies)
    granularity = Recompute.FULL if full else Recompute.NONE
    network = _network(groups, "dit", layers=6, recompute_granularity=granularity)
    place_networks([network], CPU, swapped=2)  # 4 of 6 take turns in 2 places
    turns = next(iter(network.stacks.values())).turns
    assert list(turns.blocks) == [1, 2, 4, 5]
    block = next(iter(turns.blocks.values()))
    assert block.home.numel() >= sum(part.bytes.stop - part.bytes.start for part in block.parts)
    rows = [row for row, _ in turns.places.held.values()] + turns.places.free
    assert len(rows) == 2 and all(row.numel() == block.home.numel() for row in rows)
    _numbers(network)
    began = copies.log.count("overwrite")
    assert began == 4 + 2  # forward; backward finds the last two still there
    _numbers(network)
    assert copies.log.count("overwrite") == began + 2 + 2  # as does the next forward pass
    # A block is on its way before anything waits for the one before it.
    kinds = [what for what in copies.log if what in ("overwrite", "wait")]
    assert kinds[:2] == ["overwrite", "overwrite"]
    assert copies.back.waited_for_compute == copies.log.count("overwrite")


def test_what_waits_lies_evenly_and_all_else_moves_to_the_device(groups, monkeypatch):
    network = _network(groups, "wan", layers=8)
    staying = []

    def moved(device: torch.device) -> None:
        assert device == CPU
        staying.append({n for n, p in network.named_parameters() if not p.numel()})

    monkeypatch.setattr(network, "to", moved)
    place_networks([network], CPU, swapped=2)
    assert list(network.blocks.turns.blocks) == [1, 3, 5, 7]
    waiting = [block for block in network.blocks.turns.blocks.values()]
    homes = {block.home.untyped_storage().data_ptr() for block in waiting}
    there = {
        name for name, p in network.named_parameters() if p.untyped_storage().data_ptr() in homes
    }
    linears = {name for name, _ in _matrices(network)}
    assert there == {f"{n}.weight" for n in linears if int(n.split(".")[2]) % 2}
    assert staying == [there]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {
                "lora": {"rank": 2, "base_dtype": BaseType.FLOAT8_E4M3},
                "model": {
                    "fp8": Fp8.HYBRID,
                    "transformer_impl": Implementation.TRANSFORMER_ENGINE,
                    "precision": Precision.BF16,
                },
            },
            ("model.fp8=hybrid", "lora.base_dtype=float8_e4m3", "leave one of them out"),
        ),
        ({"lora": {"base_dtype": BaseType.FLOAT8_E4M3}}, ("base_dtype=float8_e4m3", "set rank")),
        ({"model": {"blocks_to_swap": 1}}, ("model.blocks_to_swap=1", "lora.rank")),
        ({"model": {"blocks_to_swap": 2}}, ("blocks_to_swap=2 must lie in [0, 1]",)),
        ({"model": {"blocks_to_swap": -1}}, ("blocks_to_swap=-1 must lie in",)),
    ],
)
def test_keys_that_need_others_name_them(values, words):
    with pytest.raises(Problems) as error:
        run_config(
            model=tiny_model(**values.get("model", {})), lora=LoraConfig(**values.get("lora", {}))
        )
    assert all(word in str(error.value) for word in words)


def test_frozen_groups_let_blocks_wait():
    groups = (ParameterGroup(pattern="blocks.*", frozen=True),)
    config = run_config(
        model=tiny_model(blocks_to_swap=1),
        optimizer=OptimizerConfig(groups=groups),
        ema=EmaConfig(kind=EmaKind.NONE),
    )
    assert config.model.blocks_to_swap == 1

"""What a network on the meta device says, against networks that are built, and torch's counter."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dit.config import Recompute, RecomputeMethod
from dit.models.layer_spec import RowKind
from dit.models.layers.parallel_linear import BuildContext
from dit.models.registry import families, named_model, network_spec
from dit.models.stacks.stack import token_multiplications
from dit.sizing.count_work import count_work
from dit.sizing.flops import attention_flops, forward_flops, pass_work
from dit.sizing.inventory import alone, inventory
from dit.sizing.meta_network import META, groups_as_given, meta_pack, stage_on_meta

TINY = [
    pytest.param(family, keys, id=f"{family.name}-{size}")
    for family in families()
    for size, keys in family.tiny.items()
]


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(("family", "keys"), TINY)
def test_parts_make_the_network(family: Any, keys: Any, tensor: int) -> None:
    model = alone(family.config(**keys))
    found = inventory(model, tensor=tensor)
    shared = replace(model, tensor_model_parallel_size=tensor)
    whole = stage_on_meta(shared)
    assert found.parameters() == sum(weight.numel() for weight in whole.parameters())
    halves = [stage_on_meta(shared, stage=at, stages=2) for at in range(2)]
    sizes = [sum(weight.numel() for weight in half.parameters()) for half in halves]
    inside = [
        sum(w.numel() for s in half.stacks.values() for w in s.parameters()) for half in halves
    ]
    ends = [size - layers for size, layers in zip(sizes, inside, strict=True)]
    assert ends == [found.before.parameters, found.after.parameters]
    linears = sum(count * layer.matrix_numbers for count, layer in found.stacks)
    layers = sum(count for count, _ in found.stacks)
    assert found.layer_matrices()[0] == linears // layers <= sum(inside) // layers


def test_one_layer_more_is_one_layer_more() -> None:
    less, more = (
        inventory(alone(replace(named_model("dit_s"), name="custom", num_layers=n))) for n in (1, 2)
    )
    assert less.parameters() == more.parameters() - more.stacks[0][1].parameters
    assert less.ends() == more.ends()


def test_no_network_is_too_deep_to_be_asked() -> None:
    many = replace(named_model("dit_s"), name="custom", num_layers=2**12)
    (count, layer), ends = inventory(alone(many)).stacks[0], inventory(alone(many)).ends()
    assert inventory(alone(many)).parameters() == 2**12 * layer.parameters + ends and count == 2**12


def test_recomputation_of_other_layers_builds_no_other_network() -> None:
    """`auto` asks for the memory with each number of layers: 40 of a Wan, four times over."""
    model = replace(named_model("dit_s"), name="custom", recompute_granularity=Recompute.FULL)
    asked = (
        alone(replace(model, recompute_num_layers=number, recompute_method=method))
        for number in (1, 2)
        for method in RecomputeMethod
    )
    assert {*asked} == {alone(named_model("dit_s"))}


@pytest.mark.parametrize("size", ["dit_s", "flux1_schnell", "sd3", "lumina2", "qwen_image"])
def test_multiplications_are_those_of_torchs_counter(size: str) -> None:
    keys = {f.name: f for f in families()}[named_model(size).family].tiny
    model = alone(replace(named_model(size), **next(iter(keys.values())), name="custom"))
    network: Any = stage_on_meta(model).eval()
    batch = meta_pack(model, side=4, text=12, samples=1)
    with groups_as_given(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(batch.latent_TC.float(), torch.empty(batch.num_levels, device=META), batch)
    products = sum(
        count
        for operation, count in counter.get_flop_counts()["Global"].items()
        if str(operation) in ("aten.mm", "aten.addmm")
    )
    shape: Any = {"tokens": model.attended_in(batch), "text": model.text_in(batch)}
    ours = forward_flops(model, **shape) - attention_flops(model, **shape)
    (text,) = network_spec(model).text(shape["text"])
    head = 2 * model.hidden_size * model.output_features * text  # of text, which nothing reads
    assert products == ours + head * (size in ("flux1_schnell", "lumina2"))


@pytest.mark.parametrize(("family", "keys"), TINY)
def test_stages_are_cut_by_what_a_layer_multiplies(family: Any, keys: Any) -> None:
    model = alone(family.config(**keys))
    network, (_, layers, _), first = stage_on_meta(model), count_work(model), 0
    context = BuildContext(model=network.model, config=network.config, groups=network.groups)
    for stack in network_spec(model).stacks:
        if stack.layer.over is not RowKind.REFERENCES:  # there are none
            assert token_multiplications(context, stack) == layers[first].linears.n, stack.name
        first += stack.count


def test_a_worker_of_the_loader_imports_no_network() -> None:
    """It gets numbers: Megatron-Core takes 4 s and half a gigabyte."""
    work = pass_work(named_model("wan2.1_t2v_1.3b"))
    code = (
        "import pickle, sys, dit.data.energon.task_encoder\n"
        "work = pickle.load(sys.stdin.buffer)\n"
        "print(work.flops([1024, 7], [512, 3]))\n"
        "print([x for x in sys.modules if x.startswith(('megatron.core', 'dit.sizing'))])\n"
        "print([x for x in sys.modules if x.startswith('dit.models.stacks')])\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, input=pickle.dumps(work), capture_output=True, check=True)
    assert done.stdout.split(b"\n")[:3] == [
        str(work.flops([1024, 7], [512, 3])).encode(),
        b"[]",
        b"[]",
    ]

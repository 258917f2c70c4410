"""Megatron-Core without CUDA: what it asks for is answered by the CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

from dit.models.dit.model import DiT
from tests.packs import tiny_model
from tests.warm_python import warm_python

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")


@CPU_ONLY
def test_literal_cuda_devices_mean_the_cpu(groups):
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.tensor([1.0], device="cuda:0").device.type == "cpu"
    assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.ones(1).cuda().device.type == "cpu"
    assert torch.full((2,), 3.0, device=torch.device("cuda")).device.type == "cpu"
    torch.cuda.synchronize()


@CPU_ONLY
def test_no_function_of_torch_goes_through_python(groups):
    assert not torch.overrides._get_current_function_mode_stack()


@CPU_ONLY
def test_types_have_the_names_that_megatrons_optimizers_compare(groups):
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.float64).dtype is torch.float64
    with BaseTorchFunctionMode():
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"


@CPU_ONLY
def test_random_number_tracker_keeps_a_stream_of_its_own(groups):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with tracker.fork():
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with tracker.fork():
        assert not torch.equal(torch.rand(3), first)


@CPU_ONLY
def test_a_device_of_a_block_holds_for_what_is_made_in_it():
    script = """
import torch
from dit.distributed.process_groups import run_megatron_on_cpu
run_megatron_on_cpu()
with torch.device("meta"):
    made = [torch.tensor(1), torch.zeros(1), torch.ones(1), torch.full((1,), 2.0), torch.empty(1)]
assert {one.device.type for one in made} == {"meta"}
"""
    subprocess.run([warm_python(), "-c", script], check=True)


def test_nothing_is_patched_where_there_is_cuda():
    script = """
import torch
asked = "torch.tensor, torch.zeros, torch.Tensor.cuda, torch.cuda.synchronize"
before = eval(asked)
torch.cuda.is_available = lambda: True
from dit.distributed.process_groups import run_megatron_on_cpu
run_megatron_on_cpu()
assert before == eval(asked)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_sharded_state_holds_every_weight_once(groups):
    """A plain list of layers under a MegatronModule would lose its sharding, without an error."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    model = tiny_model(
        num_layers=3, hidden_size=48, num_attention_heads=2, crossattn_emb_size=8, adaln_lora_dim=8
    )
    dit = DiT(model, groups)
    shards = [e for e in dit.sharded_state_dict().values() if isinstance(e, ShardedTensor)]
    held = [id(shard.data) for shard in shards]
    assert sorted(held) == sorted(id(p) for p in dit.parameters())
    layers = [s for s in shards if s.key == "decoder.layers.mlp.linear_fc1.weight"]
    assert [s.global_offset[0] for s in layers] == [0, 1, 2]
    assert all(s.global_shape == (3, 192, 48) for s in layers)

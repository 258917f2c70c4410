"""The network with Transformer Engine's layers, computed by a stand-in, against the local ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from dit.batch import Problem, SequenceShard
from dit.config import (
    AttentionBackend,
    ContextComm,
    DatasetConfig,
    Fp8,
    Fp8Recipe,
    Implementation,
    Precision,
    Problems,
    Recompute,
    RunConfig,
)
from dit.distributed.model_parallel import rank_part
from dit.models.dit.family import DitConfig
from dit.models.dit.model import DiT
from dit.train.model_and_optimizer import randomise
from tests import stand_in_engine
from tests.packs import random_pack, tiny_model
from tests.toy_networks import NETWORKS, level_rows, toy_model, toy_pack

PRODUCTS = 12  # six in each layer: those of the captions are not in 8 bits
ENGINE = {
    "transformer_impl": Implementation.TRANSFORMER_ENGINE,
    "attention_backend": AttentionBackend.TRANSFORMER_ENGINE,
}
MODEL = tiny_model(hidden_size=64, num_attention_heads=2, precision=Precision.BF16)
PACK = [(1, 4, 6), (3, 2, 5), (1, 3, 3)]


def _numbers(network):
    randomise(network, seed=7)
    network.train()
    pack = toy_pack(network.model, PACK, [9, 1, 4], multiple=16)
    out_TC = network(pack.latent_TC, level_rows(torch.tensor([0.1, -0.3, 0.5]), pack), pack)
    (out_TC * pack.latent_TC).sum().backward()
    return [out_TC.detach()[pack.is_real_T], *(p.grad for p in network.parameters())]


def test_predictions_gradients_and_names_are_those_of_the_local_layers(groups, stand_in):
    local, other = (DiT(replace(MODEL, **changes), groups) for changes in ({}, ENGINE))
    for a, b in zip(_numbers(local), _numbers(other), strict=True):
        assert (a - b).float().norm() <= 0.02 * a.float().norm()
    assert len(stand_in.seen.recipes) == PRODUCTS
    assert stand_in.seen.attended == 2 * MODEL.num_layers
    states = [network.sharded_state_dict() for network in (local, other)]
    for a, b in zip(local.parameters(), other.parameters(), strict=True):
        marks = ("tensor_model_parallel", "partition_dim", "partition_stride")
        assert [getattr(a, m, None) for m in marks] == [getattr(b, m, None) for m in marks]
    shards = [
        {k: (v.key, v.global_shape) for k, v in s.items() if "extra" not in k} for s in states
    ]
    assert shards[0] == shards[1]
    assert not [name for name in states[1] if "extra_state" in name and "linear_kv" not in name]


@pytest.mark.parametrize("name", list(NETWORKS))
def test_other_kinds_of_layers_with_biases_are_those_of_the_local_ones(groups, stand_in, name):
    local, other = (
        NETWORKS[name](toy_model(name, precision=Precision.BF16, **c), groups) for c in ({}, ENGINE)
    )
    for number, (a, b) in enumerate(zip(_numbers(local), _numbers(other), strict=True)):
        # In bfloat16 the gradient of a bias, a sum over all tokens, has few digits.
        assert (a - b).float().norm() <= (0.2 if number else 0.02) * a.float().norm()
    shards = [
        {k: (v.key, v.global_shape) for k, v in n.sharded_state_dict().items() if "extra" not in k}
        for n in (local, other)
    ]
    assert shards[0] == shards[1]
    marks = ("tensor_model_parallel", "partition_dim", "sequence_parallel")
    for a, b in zip(local.parameters(), other.parameters(), strict=True):
        assert [getattr(a, m, False) for m in marks] == [getattr(b, m, False) for m in marks]


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize(
    ("recipe", "made"),
    [
        (Fp8Recipe.TENSORWISE, stand_in_engine.Float8CurrentScaling),
        (Fp8Recipe.BLOCKWISE, stand_in_engine.Float8BlockScaling),
        (Fp8Recipe.MXFP8, stand_in_engine.MXFP8BlockScaling),
    ],
)
def test_every_product_is_in_8_bits_when_recomputed_too(groups, stand_in, recipe, made, recompute):
    changes = {**ENGINE, "fp8": Fp8.HYBRID, "fp8_recipe": recipe}
    network = DiT(replace(MODEL, **changes, recompute_granularity=recompute), groups)
    _numbers(network)
    passes = 2 if recompute is Recompute.FULL else 1
    expected = made(fp8_format=stand_in_engine.Format.HYBRID)
    assert stand_in.seen.recipes == [expected] * (PRODUCTS * passes)
    assert stand_in.recipe is None


def test_a_missing_engine_is_named(groups):
    with pytest.raises(ValueError, match=r"=transformer_engine needs .* extra `te`"):
        DiT(replace(MODEL, **ENGINE), groups)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fp8": Fp8.E4M3}, "set transformer_impl=transformer_engine"),
        ({**ENGINE, "precision": Precision.FP32}, "set precision=bf16"),
        ({**ENGINE, "fp8": Fp8.E4M3, "hidden_size": 72}, "hidden_size=72 .* must divide by 16"),
    ],
)
def test_what_8_bits_need(changes, said):
    with pytest.raises(Problems, match=said):
        replace(MODEL, **changes)


@pytest.mark.parametrize(
    ("tensor", "context", "comm"),
    [
        (tensor, context, comm)
        for tensor, context in product((1, 2, 4, 8), (1, 2, 4))
        for comm in ContextComm
    ],
)
@pytest.mark.parametrize("recipe", [Fp8Recipe.TENSORWISE, Fp8Recipe.MXFP8])
def test_tokens_of_every_tensor_rank_fit_8_bits(recipe, tensor, context, comm):
    """Transformer Engine refuses products whose rows on a rank are no multiple of 8, in a run."""
    model = replace(
        tiny_model(num_attention_heads=32, hidden_size=512, precision=Precision.BF16),
        **ENGINE,
        fp8=Fp8.HYBRID,
        fp8_recipe=recipe,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        context_parallel_size=context,
        cp_comm_type=comm,
    )
    config = RunConfig(model=model, dataset=DatasetConfig(sample_multiple=8))
    pack = random_pack([(1, 4, 5), (3, 5, 5)], [3, 0], model=model, multiple=8)  # 24 + 80 tokens
    halves = comm is ContextComm.P2P and context > 1
    rows_TC, row_N = pack.latent_TC, torch.zeros(2)
    problem = Problem(
        input_TC=rows_TC, target_TC=rows_TC, level_M=row_N, weight_N=row_N, noise_N=row_N
    )
    for index in range(context):
        share = SequenceShard(index=index, count=context, halves=halves)
        module = SimpleNamespace(model=config.model, context=SimpleNamespace(share=share))
        mine, _ = rank_part(module, (pack, problem))
        rows, rest = divmod(len(mine.segment_T), tensor)
        assert rest == 0
        assert rows % (32 if recipe is Fp8Recipe.MXFP8 else 16) == 0
        assert 0 <= len(mine.segment_T) - 104 // context < model.token_multiple


def test_a_checkpoint_opens_where_there_is_no_engine():
    model = DitConfig(**ENGINE, fp8=Fp8.HYBRID, compile=True).on_one_rank()
    assert model == DitConfig()

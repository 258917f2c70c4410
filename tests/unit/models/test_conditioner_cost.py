"""What a trained conditioner of text costs, against what torch keeps, computes and has."""

# L tokens, S states, E width of the states

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.config import (
    LoraConfig,
    MockGeometry,
    ParameterGroup,
    Precision,
    Recompute,
    RunConfig,
    TrainConfig,
)
from dit.models.dit.conditioner_layers import Conditioner
from dit.models.dit.family import TextConditioner
from dit.models.dit.model import DiT
from dit.sizing.cuda_kernels import META, CudaKernels
from dit.sizing.flops import attention_flops, forward_flops, pack_forward_flops
from dit.sizing.memory import memory
from dit.token_ids import TOKEN_IDS
from dit.train.model_and_optimizer import randomise
from tests.packs import random_pack, run_config, tiny_model

ROWS, SAMPLES = 128, 4
SIZES = {
    "conditioner_size": 256,
    "conditioner_heads": 4,
    "conditioner_layers": 3,
    "conditioner_vocabulary": 500,
    "crossattn_emb_size": 256,
}


def a_run(*, conditioner: TextConditioner = TextConditioner.TRAINED, **model: Any) -> RunConfig:
    """Packs of `SAMPLES` pictures of 1,024 tokens with captions of `ROWS`."""
    sizes = {"precision": Precision.BF16, "num_layers": 4, **SIZES, **model}
    network = tiny_model(text_conditioner=conditioner, **sizes)
    config = run_config(model=network, train=TrainConfig(global_batch_size=8))
    mixture = (MockGeometry(height=64, width=64, text_length=ROWS),)
    data = {"mock_samples": mixture, "task_encoder_seq_length": SAMPLES * 1024}
    return replace(config, dataset=replace(config.dataset, **data))


def its(config: RunConfig, *parts: str) -> dict[str, int]:
    """Of each part of the memory, what the conditioner adds to that of stored texts."""
    model: Any = config.model
    stored = a_run(
        conditioner=TextConditioner.STORED,
        crossattn_emb_size=model.text_width,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        recompute_granularity=model.recompute_granularity,
    )
    stored = replace(stored, lora=config.lora)
    world = model.pipeline_model_parallel_size
    with_it, without = (memory(one, world_size=world) for one in (config, stored))
    return {name: getattr(with_it, name) - getattr(without, name) for name in parts}


def kept(config: RunConfig) -> int:
    """Bytes that autograd keeps of the captions of a pack, as on CUDA, beside weights."""
    with META:
        conditioner = Conditioner(config.model)
    weights = {weight.untyped_storage()._cdata for weight in conditioner.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        found[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    rows, starts = SAMPLES * ROWS, range(0, SAMPLES * ROWS + 1, ROWS)
    width = config.model.crossattn_emb_size
    states_SE = torch.empty(rows, width, device=META, dtype=torch.bfloat16)
    with CudaKernels(), saved_tensors_hooks(keep, lambda x: x):
        conditioner(states_SE, torch.empty(rows, 2, device=META), starts, starts)
    return sum(one.nbytes() for key, one in found.items() if key not in weights)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"conditioner_layers": 8, "conditioner_mlp_ratio": 2.0},
        {"crossattn_emb_size": 512, "crossattn_proj_size": 384},
    ],
)
def test_what_it_keeps_is_counted(sizes: dict[str, Any]) -> None:
    config = a_run(**sizes)
    found = its(config, "activations")["activations"]
    assert found == pytest.approx(kept(config), rel=0.03) and found > 0
    again = a_run(**sizes, recompute_granularity=Recompute.FULL)
    assert its(again, "activations")["activations"] == found  # it is no layer
    stages = a_run(**sizes, pipeline_model_parallel_size=2)
    assert its(stages, "activations")["activations"] == 2 * found  # of two packs


def test_what_does_not_learn_keeps_nothing_and_has_no_state() -> None:
    config = a_run()
    numbers = sum(weight.numel() for weight in Conditioner(config.model).parameters())
    sizes = {"weights": 2, "gradients": 4, "optimizer": 12, "ema": 4, "norms": 4}
    learnt = {name: size * numbers for name, size in sizes.items()}
    assert its(config, *sizes) == learnt
    frozen = ParameterGroup(pattern="conditioner.*", frozen=True)
    one = replace(config, optimizer=replace(config.optimizer, groups=(frozen,)))
    none = dict.fromkeys(sizes, 0) | {"weights": 2 * numbers, "activations": 0}
    assert its(one, *none) == none
    some = ParameterGroup(pattern="conditioner.embed.*", frozen=True)
    one = replace(config, optimizer=replace(config.optimizer, groups=(some,)))
    assert its(one, "activations")["activations"] == its(config, "activations")["activations"]


@pytest.mark.parametrize(
    ("targets", "learns"),
    [
        (("attention", "mlp"), False),
        (("attention", "text_conditioner.*"), True),
        (("q_proj", "attention"), True),
    ],
)
def test_adapters_keep_what_it_keeps_where_it_has_any(
    targets: tuple[str, ...], learns: bool
) -> None:
    adapted = replace(a_run(), lora=LoraConfig(rank=2, targets=targets))
    whole = its(a_run(), "activations")["activations"]
    assert its(adapted, "activations")["activations"] == learns * whole


@pytest.mark.parametrize("pad_to", [None, 16])
def test_operations_are_those_of_torch(groups, pad_to: int | None) -> None:
    """Layers see texts as they are filled up, and the conditioner as samples have them."""
    model = tiny_model(
        text_conditioner=TextConditioner.TRAINED, text_pad_to=pad_to, conditioner_size=32,
        conditioner_heads=4, conditioner_layers=2, conditioner_vocabulary=500,
    )  # fmt: skip
    network, lengths = DiT(model, groups), [5, 7, 4]
    randomise(network, seed=1)
    batch = random_pack([(1, 4, 4), (2, 4, 4), (1, 4, 4)], lengths, model=model)
    offsets = tuple(accumulate(lengths, initial=0))
    batch = batch.with_text(TOKEN_IDS, batch.texts[TOKEN_IDS][: offsets[-1]], offsets)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(batch.latent_TC, torch.zeros(3), batch)
    assert counter.get_total_flops() == pack_forward_flops(model, batch)
    shape: Any = {"tokens": batch.num_tokens, "text": lengths}
    assert forward_flops(model, **shape) == pack_forward_flops(model, batch)
    stored = replace(model, text_conditioner=TextConditioner.STORED)
    pairs = sum(length**2 for length in lengths)  # of self-attention, and as many of cross
    more = attention_flops(model, **shape) - attention_flops(stored, **shape)
    assert more == 2 * 2 * (2 * 2 * 32 * pairs)

"""Memory of layers over text alone, which are computed again in the backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dit.config import DatasetConfig, LoraConfig, RunConfig
from dit.models.registry import family_named
from dit.sizing.kept import kept_of_text
from dit.sizing.memory import memory
from tests.families import case, krea2


@pytest.mark.usefixtures("resize")
@pytest.mark.parametrize("more", [0, 1])
def test_they_keep_on_meta_what_they_keep_of_values(groups, more: int) -> None:
    """All that autograd saves there of a token of text, but for weights."""
    family = family_named("krea2")
    counts = dict.fromkeys(("num_fusion_layers", "num_refiner_layers"), 1 + more)
    model: Any = family.config(name="custom", **{**family.tiny["krea2_raw"], **counts})
    network, batch = family.network()(model, groups).train(), krea2.CASE.pack(model, 0)
    weights = {weight.data_ptr() for weight in network.parameters()}
    kept: dict[int, Any] = {}
    forward = network.text_fusion.forward

    def save(x: torch.Tensor) -> torch.Tensor:
        kept[x.data_ptr()] = x
        return x

    def watched(*given: Any) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            return forward(*given)

    network.text_fusion.forward = watched
    network(batch.latent_TC, torch.tensor(case.LEVELS), batch)
    found = sum(x.nbytes for place, x in kept.items() if place not in weights)
    assert found == kept_of_text(model, "text_fusion") * sum(batch.text_rows)


def test_they_keep_nothing_where_nothing_learns() -> None:
    """Ranks that share the text share what is kept of it."""
    model = family_named("krea2").default()
    config = RunConfig(model=model, dataset=DatasetConfig(mock=True, task_encoder_seq_length=9216))
    alone = replace(config, lora=LoraConfig(rank=4, targets=("transformer_blocks.*.attn.to_q",)))
    both = replace(
        alone, lora=LoraConfig(rank=4, targets=(*alone.lora.targets, "text_fusion.*.to_q"))
    )
    few, more = (memory(one, world_size=2).activations for one in (alone, both))
    assert few < more < few + 2**33
    shared = {"context_parallel_size": 2, "cp_comm_type": "all_gather"}
    split = (replace(one, model=replace(model, **shared)) for one in (alone, both))
    less, half = (memory(one, world_size=2).activations for one in split)
    assert half - less == pytest.approx((more - few) / 2, rel=1e-6)

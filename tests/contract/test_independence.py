"""Each input of a sample moves its own output and no neighbour's; new networks say nothing yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dit.batch import LATENTS, GuidanceInput, PackedBatch
from dit.models.family import InputKind
from dit.models.registry import family_of
from dit.train.model_and_optimizer import initialise_weights, randomise
from tests.contract.test_description import TINY, tiny
from tests.families.table import CASES
from tests.packs import random_pack, run_config
from tests.toy_networks import level_rows

GRIDS, TEXTS = [(3, 2, 3), (2, 4, 2), (2, 3, 1), (4, 1, 2), (1, 1, 1)], [9, 2, 4, 11, 1]
LEVELS = torch.tensor([812.5, 0.5, 437.0, 999.0, 31.25])
SECOND = 1
"""The sample that is changed: of two frames, with every input that the family has."""


def network_and_pack(groups: Any, size: str) -> tuple[Any, PackedBatch]:
    """Of two layers."""
    model = tiny(size, num_layers=2)
    family = family_of(model)
    pictures = all(frames == 1 for frames, _, _ in CASES[family.name].grids)
    grids = [(1, h, w) for _, h, w in GRIDS] if pictures else GRIDS
    batch = random_pack(grids, TEXTS, model=model, guidance=family.guidance(model))
    return family.network()(model, groups), batch


def places(batch: PackedBatch) -> dict[str, tuple[str, int]]:
    """Input -> its tensor in the pack, and a row that is of the second sample."""
    first = batch.starts[SECOND]
    clean = batch.clean_tokens[SECOND]
    found = {"latent": ("latent_TC", first + clean), "position": ("position_TA", first)}
    if clean:
        found["frames"] = ("latent_TC", first)
    if batch.references[SECOND]:
        found["reference"] = ("latent_TC", first + batch.latent_tokens[SECOND])
    if batch.condition_TC is not None:
        found["channels"] = ("condition_TC", first)
    for name, stream in batch.others.items():
        found[name] = (f"others.{name}.latent_TC", stream.starts[SECOND])
    for name, offsets in batch.text_offsets.items():
        assert offsets[SECOND] < offsets[SECOND + 1]
        found[name] = (f"texts.{name}", offsets[SECOND])
    return found | {name: (f"vectors.{name}", SECOND) for name in batch.vectors}


def outputs(network: Any, level_N: Tensor, batch: PackedBatch) -> list[Tensor]:
    """The output for each sample, of all streams of the pack."""
    made = network(batch.latent_TC, level_rows(level_N, batch), batch)
    of_streams = made if batch.others else {LATENTS: made}
    return [
        torch.cat(
            [
                of_streams[name][stream.starts[n] :][: stream.latent_tokens[n]].flatten()
                for name, stream in batch.streams.items()
            ]
        )
        for n in range(batch.num_samples)
    ]


OF_KIND = {
    InputKind.CHANNELS: "channels",
    InputKind.FRAME_CHANNELS: "channels",
    InputKind.FRAMES: "frames",
    InputKind.REFERENCE: "reference",
}
"""The others have names of their own."""


@pytest.mark.parametrize("size", TINY)
def test_output_moves_with_its_own_inputs_and_with_no_neighbours(groups, size: str) -> None:
    network, batch = network_and_pack(groups, size)
    randomise(network, seed=7)
    network.eval()

    @torch.no_grad()
    def made(level_N: Tensor, of: PackedBatch) -> list[Tensor]:
        return outputs(network, level_N, of)

    before, level_N = made(LEVELS, batch), LEVELS.clone()
    level_N[SECOND] += 1
    after = {"level": made(level_N, batch)}
    for name, (tensor, row) in places(batch).items():
        changed = batch.tensors[tensor].clone()
        changed[row] += 1
        after[name] = made(LEVELS, batch.with_tensors({tensor: changed}))
    inputs = family_of(network.model).inputs(network.model)
    names = {OF_KIND.get(one.kind, one.name) for one in inputs if one.kind != InputKind.NULL_TEXT}
    assert names <= after.keys()
    for name, others in after.items():
        pairs = zip(before, others, strict=True)
        moved = [not torch.equal(one, other) for one, other in pairs]
        assert moved == [number == SECOND for number in range(len(GRIDS))], name


@pytest.mark.parametrize("size", TINY)
def test_guidance_moves_every_sample_of_networks_that_are_told_it(groups, size: str) -> None:
    network, batch = network_and_pack(groups, size)
    randomise(network, seed=7)
    with torch.no_grad():
        one, other = (
            outputs(network.eval(), LEVELS, of)
            for of in (batch, batch.with_method(GuidanceInput(scale=3.5)))
        )
    told = batch.guidance is not None
    assert all(torch.equal(*both) != told for both in zip(one, other, strict=True))


@pytest.mark.parametrize("size", TINY)
def test_a_new_network_makes_zeros(groups, size: str) -> None:
    network, batch = network_and_pack(groups, size)
    initialise_weights(network, run_config(model=network.model))
    assert not torch.cat(outputs(network, LEVELS, batch)).any()

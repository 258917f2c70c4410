"""LTX-2's network of packs with sound: Diffusers' for each sample alone, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.config import Weights
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward, compare_tensors
from dit.models.diffusers.names import their_tensors
from dit.models.ltx2.diffusers import FORM
from dit.models.ltx2.family import SOUND, CrossLevels
from dit.models.ltx2.model import Ltx2Network
from dit.models.registry import named_model, pairs
from dit.sizing.memory import parameter_count
from dit.train.checkpoint.state_dict import load_weights
from tests.families import ltx2
from tests.families.case import gap
from tests.float64 import IN_FLOAT64, in_float64, widened

CASES = [(version, number) for number in range(12) for version in ltx2.VERSIONS]
QUICK = 2
NUMBERS = [pytest.param(*one, marks=[] if one[1] < QUICK else pytest.mark.slow) for one in CASES]


def _wide(batch: PackedBatch, model: Any) -> PackedBatch:
    """The pack in float64, with positions that were not rounded."""
    again = ltx2.pack_with_sound(model)
    wide = widened(batch, again)
    sound = replace(wide.others[SOUND], position_TA=again.others[SOUND].position_TA)
    return replace(wide, others={SOUND: sound})


def _weights(batch: PackedBatch) -> dict[str, Tensor]:
    """Weights of all outputs but those of references in the sum whose gradient is compared."""
    drawn, weights = torch.Generator().manual_seed(1), {}
    for name, stream in batch.streams.items():
        whole_TC = torch.randint(-512, 512, stream.latent_TC.shape, generator=drawn)
        sizes = zip(pairwise(stream.starts), stream.latent_tokens, strict=True)
        is_own_T = torch.cat([torch.arange(stop - start) < own for (start, stop), own in sizes])
        weights[name] = whole_TC / 256 * is_own_T[:, None]
    return weights


def _ours(network: Any, model: Any, batch: PackedBatch) -> tuple[dict[str, Tensor], Any]:
    """Outputs of each sample, and gradients by Diffusers' names."""
    network.zero_grad()
    made, weights = network(*ltx2.fed(batch)), _weights(batch)
    sum((made[name] * weights[name]).sum() for name in weights).backward()
    gradients: Any = {name: weight.grad for name, weight in network.named_parameters()}

    def of_ours(pair: Any) -> Tensor:
        name = pair.ours
        if pair.layer is not None:
            name = name.replace("layers.", f"layers.{pair.layer}.", 1)
        return gradients[name]

    outputs = {
        f"{name} {index}": made[name].detach()[start : start + stream.latent_tokens[index]]
        for name, stream in batch.streams.items()
        for index, start in enumerate(stream.starts[:-1])
        if stream.latent_tokens[index]
    }
    return outputs, their_tensors(pairs(model), of_ours)


def _theirs(network: nn.Module, model: Any, batch: PackedBatch) -> tuple[dict[str, Tensor], Any]:
    network.zero_grad()
    outputs, weights = dict[str, Tensor](), _weights(batch)
    for index in range(batch.num_samples):
        for name, made in ltx2.theirs(network, batch, index, model).items():
            start = batch.streams[name].starts[index]
            outputs[f"{name} {index}"] = made.detach()
            (made * weights[name][start : start + len(made)]).sum().backward(retain_graph=True)
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in network.named_parameters()
    }
    return outputs, gradients


@pytest.mark.parametrize(
    ("size", "count"),
    [("ltx2.0", 18_876_174_592), ("ltx2.3", 18_988_838_144), ("ltx2.5", 18_987_859_200)],
)
def test_named_sizes_have_the_tensors_of_diffusers(size: str, count: int) -> None:
    model = named_model(size)
    with torch.device("meta"):
        theirs = LTX2VideoTransformer3DModel(**FORM.keys.content(model))
    wanted = {name: tuple(value.shape) for name, value in theirs.state_dict().items()}
    found = {name: shape for pair in pairs(model) for name, shape in pair.their_shapes.items()}
    assert found == wanted
    assert parameter_count(model) == count == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(("version", "number"), NUMBERS)
def test_a_pack_with_sound_equals_diffusers_for_each_sample(
    groups, tmp_path: Path, version: str, number: int
) -> None:
    theirs = ltx2.random_network(version, number)
    theirs.save_pretrained(tmp_path / "hf")
    count, scale = (1, 0, 2)[number % 3], (2, 1, 1, 3)[number % 4]
    told = [f"model.reference_latents={count}", f"model.reference_scale={scale}"]
    done = import_weights(tmp_path / "hf", tmp_path / "ours", objective=told)
    levels = [*CrossLevels][number % 2]
    model: Any = replace(done.config.model, cross_levels=levels)
    ours = Ltx2Network(model, groups)
    load_weights(done.path, [ours], groups, averaged=False)
    with in_float64():
        both: Any = Ltx2Network(model, groups), type(theirs).from_config(theirs.config).eval()
        for network, weights in zip(both, (ours, theirs), strict=True):
            network.load_state_dict(weights.state_dict())
        batch = _wide(ltx2.pack_with_sound(model), model)
        found, expected = (f(n, model, batch) for f, n in zip((_ours, _theirs), both, strict=True))
    for made, wanted in zip(found, expected, strict=True):
        assert made.keys() == wanted.keys()
        for name, value in wanted.items():
            if "keyframes" in name:  # nothing reads it
                assert not value.any() and not made[name].any()
                continue
            assert value.any(), name
            assert gap(made[name], value) <= IN_FLOAT64, name
    export_weights(done.path, tmp_path / "back", ExportOptions(scheduler=False))
    again = type(theirs).from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(again[key], value) for key, value in theirs.state_dict().items())
    if number == 0:
        tensors, _ = compare_tensors(tmp_path / "hf", done.path, Weights.MODEL)
        assert (tensors.different, tensors.count) == (0, done.tensors)
        verified = compare_forward(tmp_path / "hf", done.path, Weights.MODEL)
        assert verified.samples == 3 and verified.largest <= 1e-5 * verified.scale

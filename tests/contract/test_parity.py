"""What Diffusers' network of a family computes, ours computes with its weights, and the gradients.

Of one pack of samples of unequal sizes against each sample alone, in both implementations.
"""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.config import Precision, Weights
from dit.convert.diffusers_config import model_config
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward, compare_tensors
from dit.models.diffusers.names import Pair, their_tensors
from dit.models.registry import family_of, pairs
from dit.train.checkpoint.state_dict import load_weights
from tests.families.case import Case, gap
from tests.families.table import CASES
from tests.packs import single

NUMBERS = [
    pytest.param(name, number, marks=[] if number < case.quick else pytest.mark.slow)
    for name, case in CASES.items()
    for number in range(case.cases)
]


@pytest.mark.parametrize(("name", "number"), NUMBERS)
def test_forward_gradients_and_the_way_back(
    groups, resize, tmp_path: Path, name: str, number: int
) -> None:
    case = CASES[name]
    theirs = case.random(seed=number, **case.configuration(number))
    theirs.save_pretrained(tmp_path / "hf")
    done = import_weights(tmp_path / "hf", tmp_path / "ours", **case.options(number))
    model: Any = done.config.model
    family, told = family_of(model), done.config.objective
    assert model.precision is Precision.FP32 and told.guidance == family.guidance(model)
    assert told.name == family.objective.settings.get("name", told.name)
    ours = family.network()(model, groups)
    load_weights(done.path, [ours], groups, averaged=False)

    batch = case.pack(model, number)
    levels_N = torch.tensor(case.levels(number))
    if family.tells_step_end(model):
        batch = replace(batch, step_end_N=0.75 * levels_N)
    weight_TC = torch.randn(batch.latent_TC.shape, generator=torch.Generator().manual_seed(1))
    weight_TC *= batch.is_target_T[:, None]
    out_TC = ours(batch.latent_TC, _levels(case, levels_N, batch), batch)
    (out_TC * weight_TC).sum().backward()
    for index, tokens in enumerate(batch.latent_tokens):
        expected = case.theirs(theirs, batch, index, float(levels_N[index]), model)
        rows, mine = slice(batch.starts[index], batch.starts[index] + tokens), single(batch, index)
        alone_TC = ours(mine.latent_TC, _levels(case, levels_N[index : index + 1], mine), mine)
        compared = batch.is_target_T[rows] | case.compares_given
        for found in (out_TC[rows], alone_TC[:tokens]):
            assert gap(found.detach()[compared], expected.detach()[compared]) <= 1e-5
        (expected * weight_TC[rows]).sum().backward()
    gradients = {name: weight.grad for name, weight in ours.named_parameters()}
    assert None not in gradients.values()
    _check_gradients(theirs, gradients, model, case, batch)
    source, back = tmp_path / "hf", tmp_path / "back"
    export_weights(done.path, back, ExportOptions(scheduler=False))
    again = case.network.from_pretrained(back).state_dict()
    assert all(torch.equal(again[key], value) for key, value in theirs.state_dict().items())
    _check_settings(source, back, model)
    if number < case.quick:
        tensors, _ = compare_tensors(source, done.path, Weights.MODEL)
        verified = compare_forward(source, done.path, Weights.MODEL)
        assert (tensors.different, tensors.count) == (0, done.tensors) and verified.samples == 3
        assert verified.largest <= 1e-4 * verified.scale


def _levels(case: Case, levels_N: Tensor, batch: PackedBatch) -> Tensor:
    """Rows of the clean level after those of the samples, where the pack has such tokens."""
    clean = levels_N.new_full((batch.num_levels - len(levels_N),), case.clean_level)
    return torch.cat([levels_N, clean])


def _check_gradients(
    theirs: nn.Module, gradients: dict[str, Tensor], model: Any, case: Case, batch: PackedBatch
) -> None:
    """Each tensor has one, but those that nothing reads, and of no picture."""
    fixed = family_of(model).weights.fixed

    def of_ours(pair: Pair) -> Tensor:
        if pair.layer is None:
            return gradients[pair.ours]
        return gradients[pair.ours.replace("layers.", f"layers.{pair.layer}.", 1)]

    trained = [pair for pair in pairs(model) if pair.ours not in fixed]
    found, weights = their_tensors(trained, of_ours), dict(theirs.named_parameters())
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        grad = weight.grad
        if case.unread(model, name, batch):
            assert not found[name].any() and (grad is None or not grad.any()), name
            continue
        assert grad is not None, name
        is_zero = any(fnmatchcase(name, pattern) for pattern in case.zero)
        if is_zero and not getattr(model, "qk_norm", False):
            assert not found[name].any() and grad.abs().max() <= 1e-5, name
        else:
            assert grad.any(), name
            assert gap(found[name], grad) <= 1e-4, name


def _check_settings(source: Path, back: Path, model: Any) -> None:
    """config.json of an export says what that of the import said, and means the same network."""
    one, two = (json.loads((folder / "config.json").read_text()) for folder in (source, back))
    told = {key: value for key, value in two.items() if key[0] != "_" and key in one}
    assert told == {key: one[key] for key in told}
    usual = {"precision": model.precision, "text_pad_to": model.text_pad_to}
    assert model_config(two, **usual, place="") == model

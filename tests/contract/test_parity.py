"""What Diffusers' network of a family computes, ours computes with its weights, and the gradients.

Of one pack of samples of unequal sizes against each sample alone, in both implementations. Both
compute in float64, where a gap does not depend on how the kernels of a processor round; once for
each family also in float32, and then each is held against float64.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dit.batch import PackedBatch, StepEnd
from dit.config import Precision, Weights
from dit.convert.cli import LARGEST_PART
from dit.convert.diffusers_config import model_config
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import Imported, import_weights
from dit.convert.verify import compare_forward, compare_tensors
from dit.models.diffusers.names import Pair, their_tensors
from dit.models.registry import family_of, pairs
from dit.train.checkpoint.state_dict import load_weights
from tests.families.case import Case, gap
from tests.families.table import CASES
from tests.float64 import IN_FLOAT64, in_float64, widened
from tests.packs import single

NUMBERS = [
    pytest.param(name, number, marks=[] if number < case.quick else pytest.mark.slow)
    for name, case in CASES.items()
    for number in range(case.cases)
]

OUTPUT = "output "
FLOAT32_FACTOR = 4
"""Largest error in float32 over that of Diffusers' network: two draws of one size, within 2.3."""


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

    batch = case.pack(model, number)
    levels_N = torch.tensor(case.levels(number))
    if family.tells_step_end(model):
        batch = batch.with_method(StepEnd(level_N=0.75 * levels_N))
    ours: Any = family.network()(model, groups)
    load_weights(done.path, [ours], groups, averaged=False)
    with in_float64():
        both = family.network()(model, groups), case.network.from_config(theirs.config).eval()
        for network, weights in zip(both, (ours, theirs), strict=True):
            network.load_state_dict(weights.state_dict())
        wide = widened(batch, case.pack(model, number))
        found, exact = _passes(case, model, both, wide, levels_N.double())
        zeros = _check_zeros(case, model, batch, found, exact)
        compared = [key for key in exact if key not in zeros]
        assert max(gap(found[key], exact[key]) for key in compared) <= IN_FLOAT64
        for index, tokens in enumerate(batch.latent_tokens):
            mine = single(wide, index)
            levels_M = _levels(case, levels_N[index : index + 1].double(), mine)
            alone_TC = both[0](mine.latent_TC, levels_M, mine)[:tokens].detach()
            alone_TC = alone_TC[_has_output(case, batch, index)]
            assert gap(alone_TC, exact[f"{OUTPUT}{index}"]) <= IN_FLOAT64
    _check_way_back(case, theirs, done, tmp_path / "hf", tmp_path / "back")
    if number < case.quick:
        verified = compare_forward(tmp_path / "hf", done.path, Weights.MODEL)
        assert verified.samples == 3 and verified.largest <= LARGEST_PART * verified.scale
    if number == 0:
        rounded = _passes(case, model, (ours, theirs), batch, levels_N)
        _check_rounding(*rounded, {key: exact[key] for key in compared})
        tensors, _ = compare_tensors(tmp_path / "hf", done.path, Weights.MODEL)
        assert (tensors.different, tensors.count) == (0, done.tensors)


def _levels(case: Case, levels_N: Tensor, batch: PackedBatch) -> Tensor:
    """Rows of the clean level after those of the samples, where the pack has such tokens."""
    clean = levels_N.new_full((batch.num_levels - len(levels_N),), case.clean_level)
    return torch.cat([levels_N, clean])


def _has_output(case: Case, batch: PackedBatch, index: int) -> Tensor:
    """Which tokens of the latent of a sample have an output to compare."""
    first, tokens = batch.starts[index], batch.latent_tokens[index]
    return batch.is_target_T[first : first + tokens] | case.compares_given


def _passes(
    case: Case, model: Any, networks: tuple[Any, Any], batch: PackedBatch, levels_N: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs of each sample and gradients by Diffusers' names, of ours and of Diffusers'."""
    ours, theirs = networks
    drawn = torch.Generator().manual_seed(1)
    # Whole numbers over a power of two are the same in float32 and float64.
    whole_TC = torch.randint(-512, 512, batch.latent_TC.shape, generator=drawn)
    weight_TC = whole_TC.to(levels_N.dtype) / 256
    weight_TC *= batch.is_target_T[:, None]
    out_TC = ours(batch.latent_TC, _levels(case, levels_N, batch), batch)
    (out_TC * weight_TC).sum().backward()
    found, expected = _gradients(ours, model), {}
    for index, tokens in enumerate(batch.latent_tokens):
        rows = slice(batch.starts[index], batch.starts[index] + tokens)
        made_TC = case.theirs(theirs, batch, index, float(levels_N[index]), model)
        (made_TC * weight_TC[rows]).sum().backward()
        has_output = _has_output(case, batch, index)
        found[f"{OUTPUT}{index}"] = out_TC.detach()[rows][has_output]
        expected[f"{OUTPUT}{index}"] = made_TC.detach()[has_output]
    for name, weight in theirs.named_parameters():
        expected[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
    assert found.keys() == expected.keys()
    return found, expected


def _gradients(ours: nn.Module, model: Any) -> dict[str, Tensor]:
    """The gradient of each tensor, by Diffusers' names."""
    gradients: Any = {name: weight.grad for name, weight in ours.named_parameters()}
    assert None not in gradients.values()

    def of_ours(pair: Pair) -> Tensor:
        if pair.layer is None:
            return gradients[pair.ours]
        return gradients[pair.ours.replace("layers.", f"layers.{pair.layer}.", 1)]

    fixed = family_of(model).weights.fixed
    return their_tensors([pair for pair in pairs(model) if pair.ours not in fixed], of_ours)


def _check_zeros(
    case: Case,
    model: Any,
    batch: PackedBatch,
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
) -> set[str]:
    """Tensors that nothing reads, or whose gradient is zero by mathematics: ours is zero."""
    unread = {name for name in expected if case.unread(model, name, batch)}
    zeros = {name for name in expected if any(fnmatchcase(name, one) for one in case.zero)}
    zeros = unread | (set() if getattr(model, "qk_norm", False) else zeros)
    for name, made in expected.items():
        if name in zeros:
            assert not found[name].any(), name
            assert made.abs().max() <= (0 if name in unread else IN_FLOAT64), name
        else:
            assert made.any(), name
    return zeros


def _check_rounding(
    found: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    """Float32 is as near to float64 in our network as in Diffusers', outputs and gradients.

    Both round the same mathematics in another order, so that chance says which is nearer: by a
    factor of 13 for one tensor among thousands, by less than 3 for the worst tensor of a network.
    """
    for is_output in (True, False):
        names = [name for name in exact if name.startswith(OUTPUT) is is_output]
        ours, usual = (
            max(gap(made[name].double(), exact[name]) for name in names) for made in (found, theirs)
        )
        assert ours <= FLOAT32_FACTOR * usual, (ours, usual)


def _check_way_back(
    case: Case, theirs: nn.Module, done: Imported, source: Path, back: Path
) -> None:
    """An export has every number of the import, and its config.json means the same network."""
    export_weights(done.path, back, ExportOptions(scheduler=False))
    again = case.network.from_pretrained(back).state_dict()
    assert all(torch.equal(again[key], value) for key, value in theirs.state_dict().items())
    one, two = (json.loads((folder / "config.json").read_text()) for folder in (source, back))
    told = {key: value for key, value in two.items() if key[0] != "_" and key in one}
    assert told == {key: one[key] for key in told}
    model = done.config.model
    usual: Any = {"precision": model.precision, "text_pad_to": model.text_pad_to}
    assert model_config(two, **usual, place="") == model

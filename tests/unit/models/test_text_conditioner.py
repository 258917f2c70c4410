"""Anima's conditioner as a part of the network: Diffusers' arithmetic, and folders both ways."""

# N samples, L tokens of T5, S states, C features of a token

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.condition_embedders.condition_embedder_anima import AnimaTextConditioner
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.batch import PackedBatch
from dit.checkpoint_paths import saved_config
from dit.config import LoraConfig, RunConfig, Weights
from dit.convert.diffusers_checkpoint import open_folder
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.load_hf.settings import checked_table
from dit.convert.verify import compare_forward, compare_tensors
from dit.lora.factors import shapes_of, to_stored
from dit.lora.targets import attach_adapters, chosen_adapters
from dit.models.diffusers.names import Pair, their_tensors
from dit.models.dit.family import TextConditioner
from dit.models.registry import family_of, pairs
from dit.sizing.flops import pass_work
from dit.sizing.memory import parameter_count
from dit.token_ids import TOKEN_IDS, as_ids
from dit.train.checkpoint.state_dict import load_weights
from tests.families import anima
from tests.families.anima import CONDITIONER, random_conditioner
from tests.families.case import gap, text_of
from tests.families.dit import CASE, NETWORKS, random_model
from tests.families.generation import noise_of, opened, texts_of
from tests.families.generation import ours as ours_made
from tests.float64 import IN_FLOAT64, in_float64, widened
from tests.lora_files import linears, merged, random_factors
from tests.packs import random_pack, single, tiny_model

ROWS = 12
LEVELS = (0.03, 0.31, 0.72, 0.988, 0.5)
STATES = CONDITIONER["source_dim"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A transformer of Anima's kind, and a conditioner beside it."""
    for name, network in (
        ("transformer", random_model(**NETWORKS["images"])),
        ("text_conditioner", random_conditioner()),
    ):
        network.save_pretrained(tmp_path / "pipeline" / name)
    return tmp_path / "pipeline"


def imported(folder: Path, target: Path, *told: str) -> RunConfig:
    return import_weights(folder, target, objective=told).config


TRAINED = "model.text_conditioner=trained"


@pytest.fixture
def ours(groups, folder: Path, tmp_path: Path) -> Any:
    """Both networks as one, of Diffusers' weights."""
    config = imported(folder, tmp_path / "checkpoint", TRAINED)
    network = family_of(config.model).network()(config.model, groups)
    load_weights(tmp_path / "checkpoint", [network], groups, averaged=False)
    return network


def packed(model: Any) -> PackedBatch:
    """The last sample has no states of its own: a row of zeros, as of the empty caption."""
    grids = [(1, 3, 5), (1, 4, 2), (1, 5, 3), (1, 2, 2), (1, 1, 4)]
    batch = random_pack(grids, [7, 3, ROWS - 1, 2, 1], model=model)
    states = batch.text_LE.clone()
    states[batch.text_starts[-2] :] = 0
    return batch.with_text("text", states, batch.text_starts)


def conditioned(conditioner: nn.Module, batch: PackedBatch, index: int) -> Tensor:
    """As the pipeline has it: the states of the empty caption are hidden."""
    states, ids = text_of(batch, index), as_ids(text_of(batch, index, TOKEN_IDS))
    mask = torch.full(states.shape[:2], bool(states.any()))
    return conditioner(
        source_hidden_states=states, target_input_ids=ids, source_attention_mask=mask
    )


def test_a_pack_is_what_diffusers_computes_of_each_sample(
    groups, ours: Any, folder: Path, resize: None, tmp_path: Path
) -> None:
    """And gradients of both networks are; in float64, as in tests/contract/test_parity.py."""
    given, model = (random_model(**NETWORKS["images"]), random_conditioner()), ours.model
    stored = replace(
        model, text_conditioner=TextConditioner.STORED, crossattn_emb_size=20, text_pad_to=None,
        crossattn_proj_size=None,
    )  # fmt: skip
    narrow = packed(model)
    weight_TC = torch.randn(
        narrow.latent_TC.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    weight_TC *= narrow.is_target_T[:, None]
    with in_float64():
        wide = family_of(model).network()(model, groups)
        transformer, conditioner = (type(one).from_config(one.config) for one in given)
        for network, weights in zip((wide, transformer, conditioner), (ours, *given), strict=True):
            network.load_state_dict(weights.state_dict())
        batch, level_N = widened(narrow, packed(model)), torch.tensor(LEVELS)
        made_TC = wide(batch.latent_TC, level_N, batch)
        (made_TC * weight_TC).sum().backward()
        texts = [conditioned(conditioner, batch, index) for index in range(batch.num_samples)]
        starts = tuple(range(0, ROWS * len(texts) + 1, ROWS))
        read = batch.with_text("text", torch.cat(texts, dim=1)[0], starts)
        total = torch.zeros(())
        for index, tokens in enumerate(batch.latent_tokens):
            rows, alone = (
                slice(batch.starts[index], batch.starts[index] + tokens),
                single(batch, index),
            )
            expected = CASE.theirs(transformer, read, index, LEVELS[index], stored)
            alone_TC = wide(alone.latent_TC, level_N[index : index + 1], alone)[:tokens]
            for found_TC in (made_TC[rows], alone_TC):
                assert gap(found_TC.detach(), expected.detach()) <= IN_FLOAT64
            total = total + (expected * weight_TC[rows]).sum()
        total.backward()
    gradients = {name: weight.grad for name, weight in wide.named_parameters()}
    assert None not in gradients.values()

    def of_ours(pair: Pair) -> Any:
        layer = "layers." if pair.layer is None else f"layers.{pair.layer}."
        return gradients[pair.ours.replace("layers.", layer, 1)]

    found = their_tensors(pairs(model), of_ours)
    theirs = dict(transformer.named_parameters())
    theirs |= {f"text_conditioner.{name}": p for name, p in conditioner.named_parameters()}
    assert found.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert weight.grad.any() and gap(found[name], weight.grad) <= IN_FLOAT64, name


def test_stages_know_how_many_rows_travel(ours: Any) -> None:
    """Before a pack is prepared, too, and though it has more states than tokens."""
    ours.model = replace(ours.model, text_pad_to=None)
    batch = packed(ours.model)
    states = batch.text_LE.new_zeros(50, batch.text_LE.shape[1])
    batch = batch.with_text("text", states, (0, 10, 20, 30, 40, 50))
    assert ours.hidden_shape(batch) == ours.hidden_shape(ours.prepared(batch))


@pytest.mark.parametrize("length", [ROWS, None])
def test_shards_may_hold_what_it_makes(
    groups, ours: Any, folder: Path, tmp_path: Path, length: int | None
) -> None:
    """The same weights with the texts of `stored`; there are more states than tokens."""
    told: Any = {"objective": ["model.text_conditioner=stored"], "text_pad_to": ROWS}
    config = import_weights(folder, tmp_path / "stored", **told).config
    network = family_of(config.model).network()(config.model, groups)
    load_weights(tmp_path / "stored", [network], groups, averaged=False)
    for one in (ours, network):
        one.model = replace(one.model, text_pad_to=length)
    batch, conditioner = packed(ours.model), random_conditioner(min_sequence_length=1)
    states = torch.randn(50, STATES, generator=torch.Generator().manual_seed(2))
    batch = batch.with_text("text", states, (0, 10, 20, 30, 40, 50))
    rows = [conditioned(conditioner, batch, index)[0] for index in range(batch.num_samples)]
    read = batch.with_text("text", torch.cat(rows), batch.text_offsets[TOKEN_IDS])
    real, level_N = batch.is_real_T, torch.tensor(LEVELS)
    with torch.no_grad():
        made, expected = (
            one(batch.latent_TC, level_N, b) for one, b in ((ours, batch), (network, read))
        )
    assert gap(made[real], expected[real]) <= 1e-5


def test_description_and_adapters() -> None:
    """Parameters and operations are Diffusers'; its linears have adapters where they are named."""
    sizes: Any = {"source_dim": 40, "target_dim": 64, "model_dim": 96, "mlp_ratio": 2.5}
    conditioner = random_conditioner(**sizes, num_attention_heads=4)
    model: Any = tiny_model(
        text_conditioner=TextConditioner.TRAINED, crossattn_emb_size=40, crossattn_proj_size=64,
        conditioner_size=96, conditioner_layers=2, conditioner_heads=4,
        conditioner_mlp_ratio=2.5, conditioner_vocabulary=700,
    )  # fmt: skip
    own = sum(one.numel() for one in conditioner.parameters())
    assert parameter_count(model) == own + parameter_count(
        replace(
            model,
            text_conditioner=TextConditioner.NONE,
            crossattn_emb_size=64,
            crossattn_proj_size=None,
        )
    )
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        conditioner(torch.zeros(1, ROWS, 40), torch.zeros(1, ROWS).long())
    angles = 2 * 2 * ROWS * 96 // 4 // 2  # two products of places and frequencies
    work = pass_work(model).conditioner
    multiplied = (work.linears + work.attention).of([0], [ROWS])
    assert 2 * multiplied == counter.get_total_flops() - angles
    usual = chosen_adapters(model, LoraConfig(rank=2, targets=("attention", "mlp", "modulation")))
    assert usual and not any(name.startswith("text_conditioner") for name in usual)
    every = chosen_adapters(model, LoraConfig(rank=2, targets=("text_conditioner.*",)))
    assert every.keys() == {f"text_conditioner.{name}" for name in linears(conditioner)}


def test_adapters_add_what_a_merge_adds(ours: Any) -> None:
    """And they alone are trained."""
    conditioner, batch = random_conditioner(), packed(ours.model)
    factors = random_factors(linears(conditioner))
    its = {f"text_conditioner.{name}": one for name, one in factors.items()}
    attach_adapters(ours, shapes_of(its), precision=ours.model.precision)
    own, starts = dict(ours.named_parameters()), batch.text_offsets[TOKEN_IDS]
    stored = to_stored(its, ours.model)
    assert {name for name, weight in own.items() if weight.requires_grad} == stored.keys()
    with torch.no_grad():
        for name, value in stored.items():
            own[name].copy_(value)
        made_LE = ours.conditioner(batch.text_LE, batch.texts[TOKEN_IDS], batch.text_starts, starts)
        expected = merged(conditioner, factors)
        for index, (first, stop) in enumerate(pairwise(starts)):
            rows_LE = conditioned(expected, batch, index)[0, : stop - first]
            assert gap(made_LE[first:stop], rows_LE) <= 1e-5


def test_folders_both_ways(ours: Any, folder: Path, resize: None, tmp_path: Path) -> None:
    """An export of the whole, and what it means as a start; what shards may hold instead."""
    config = saved_config(tmp_path / "checkpoint")
    assert (config.model.crossattn_emb_size, config.model.text_width) == (STATES, 20)
    source = open_folder(folder)
    checked_table(source, config.model)
    weights = "diffusion_pytorch_model.safetensors"
    own, second = ("config.json", weights), "../text_conditioner/"
    assert source.files == [*(second + name for name in own), *own]
    tensors, _ = compare_tensors(folder, tmp_path / "checkpoint", Weights.MODEL)
    assert tensors.different == 0
    verified = compare_forward(folder, tmp_path / "checkpoint", Weights.MODEL)
    assert verified.largest <= 1e-4 * verified.scale
    options = ExportOptions(scheduler=False, max_shard_size=40_000)
    export_weights(tmp_path / "checkpoint", tmp_path / "back", options)
    opened = AnimaTextConditioner.from_pretrained(tmp_path / "back/text_conditioner")
    told, wanted = (dict(one.config).items() for one in (opened, random_conditioner()))
    assert {k: v for k, v in told if k[0] != "_"} == {k: v for k, v in wanted if k[0] != "_"}
    for ours_there, theirs in (
        (CASE.network.from_pretrained(tmp_path / "back"), random_model(**NETWORKS["images"])),
        (opened, random_conditioner()),
    ):
        made = ours_there.state_dict()
        assert all(torch.equal(made[key], value) for key, value in theirs.state_dict().items())
    again = imported(tmp_path / "back", tmp_path / "again")
    assert again.model == config.model
    alone = imported(tmp_path / "back", tmp_path / "alone", "model.text_conditioner=stored").model
    assert (alone.text_conditioner, alone.crossattn_emb_size) == (TextConditioner.STORED, 20)
    random_model(**NETWORKS["images"]).save_pretrained(tmp_path / "alone_again")
    with pytest.raises(ConvertError, match="has no folder text_conditioner beside it"):
        imported(tmp_path / "alone_again", tmp_path / "none", TRAINED)


def test_pictures_and_the_whole_pipeline(groups, tmp_path: Path) -> None:
    """States and tokens of prompts are read by the network; the export is opened by Diffusers."""
    whole = anima.pipeline(tmp_path)
    run = opened(tmp_path, TRAINED)
    assert run.encoder.name == "anima_states" and run.config.objective.flow_shift == anima.SHIFT
    texts, rows = texts_of(run), {}
    # As it is in bfloat16, it has frequencies in bfloat16, too.
    conditioner = AnimaTextConditioner.from_pretrained(tmp_path / "pipeline/text_conditioner")
    for name, text in texts.items():
        told = {"source_hidden_states": text["text"][None].float()}
        told |= {"target_input_ids": as_ids(text[TOKEN_IDS])[None]}
        rows[name] = {"text": conditioner.float()(**told)[0].detach()}
    start = noise_of((1, 6, 10))
    theirs = anima.made_by(whole, start, rows, guidance=4.0)
    assert gap(ours_made(run, start, guidance=4.0), theirs) <= 1e-4

    source = tmp_path / "pipeline"
    export_weights(run.path, tmp_path / "out", ExportOptions(pipeline_from=source))
    again = anima.Whole.from_pretrained(tmp_path / "out", torch.float32)
    for part in ("transformer", "text_conditioner"):
        made, first = (getattr(one.pipe, part).state_dict() for one in (again, whole))
        assert all(torch.equal(made[key], value.float()) for key, value in first.items()), part

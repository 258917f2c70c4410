"""What a sample holds beside latent and text, from the shard to the pack and back."""

from __future__ import annotations

import io
import json
import math
import pickle
import zlib
from contextlib import nullcontext
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from torch import nn

from dit.batch import (
    CleanTokens,
    LatentSample,
    NullTexts,
    PictureTexts,
    ReferenceGrids,
    SequenceShard,
)
from dit.config import LossMean, ObjectiveConfig, RunConfig
from dit.data import DataError, build_train_loader, null_inputs
from dit.data.cook import Expected, cook, measure_sample
from dit.data.datasets import _null_inputs, train_leaves
from dit.data.loader_state import LoaderState, check_identity, loader_identity
from dit.data.pack import SampleSize, pack_samples
from dit.data.records import head_length
from dit.data.rejections import Bound, ReaderCounts, Reject, RejectCounts, SampleRefused, sum_counts
from dit.distributed.model_parallel import split_tokens
from dit.models.dit.family import DitConfig
from dit.models.family import InputKind, NullInput, SampleInput
from dit.models.patch_layout import PatchLayout
from dit.models.positions import GridPositions, unpack_latents
from dit.models.registry import VARIABLE
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem, validation_problem
from dit.pack_wire import flatten_pack, unflatten_pack
from dit.sampling.generate import Request, SamplingSettings, generate_latents
from dit.sampling.validation.requests import sample_inputs
from dit.stored_samples import RecordHeader
from dit.token_ids import as_digits
from dit.train.loss import loss_of
from dit.train.opening.checks import check_clean_level
from tests.families.wan import wan_model
from tests.packs import random_pack, run_config
from tests.toy_family import PLACE, ToyConfig

C = 2
EVERY = (
    SampleInput(name="text", kind=InputKind.TEXT, width=5),
    SampleInput(name="text_2", kind=InputKind.TEXT, width=3, may_be_empty=True, required=False),
    SampleInput(name="pooled_text", kind=InputKind.VECTOR, width=4, required=False),
    SampleInput(name="mask", kind=InputKind.CHANNELS, width=1, required=False),
    SampleInput(name="condition", kind=InputKind.CHANNELS, width=3, required=False),
    SampleInput(name="first_frame_latent", kind=InputKind.FRAMES, width=C, required=False),
    SampleInput(name="reference", kind=InputKind.REFERENCE, width=C, required=False),
    SampleInput(name="reference_2", kind=InputKind.REFERENCE, width=C, required=False),
    SampleInput(name="null_text", kind=InputKind.NULL_TEXT, width=5, required=False),
)


def layout_of(inputs=EVERY, *, multiple=4) -> PatchLayout:
    return PatchLayout(
        patch_temporal=1,
        patch_spatial=2,
        sample_multiple=multiple,
        positions=GridPositions(),
        inputs=inputs,
    )


def shapes_of(index: int) -> dict[str, tuple[int, ...]]:
    """Three samples: one has everything, one a reference and no text_2, one nothing beside text."""
    return [
        {
            "latent": (C, 3, 4, 6),
            "text": (4, 5),
            "text_2": (2, 3),
            "pooled_text": (4,),
            "mask": (1, 3, 4, 6),
            "condition": (3, 3, 4, 6),
            "first_frame_latent": (C, 1, 4, 6),
            "reference": (C, 1, 2, 4),
            "reference_2": (C, 1, 4, 2),
            "null_text": (2, 5),
        },
        {"latent": (C, 1, 4, 4), "text": (1, 5), "text_2": (0, 3), "reference": (C, 1, 4, 4)},
        {"latent": (C, 2, 2, 2), "text": (3, 5)},
    ][index]


def sample_of(index: int, dtype: torch.dtype = torch.float32) -> LatentSample:
    rng = torch.Generator().manual_seed(index)
    shapes = shapes_of(index).items()
    tensors = {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in shapes}
    return LatentSample(
        key=str(index),
        latent_CFHW=tensors.pop("latent"),
        text_LE=tensors.pop("text"),
        fps=math.nan,
        others=tensors,
    )


SAMPLES = [sample_of(index) for index in range(3)]
TOKENS = (18 + 2 + 2, 4 + 4, 2)  # of targets and references
CLEAN = (6, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_input_has_its_place_in_a_pack(dtype: torch.dtype) -> None:
    samples = [sample_of(index, dtype) for index in range(3)]
    pack = pack_samples(samples, layout_of())
    assert pack.starts == (0, 24, 32, 36) and pack.num_tokens == TOKENS
    assert pack.references == (((1, 1, 2), (1, 2, 1)), ((1, 2, 2),), ())
    assert pack.method(CleanTokens) == CleanTokens(level=0.0, counts=CLEAN) and pack.num_levels == 6
    assert pack.loss_tokens == (12, 4, 2)
    assert pack.text_offsets == {"text": (0, 4, 5, 8), "text_2": (0, 2, 2, 2)}
    assert pack.text_rows == (6, 1, 3) and pack.method(NullTexts).starts == (0, 2, 2, 2)
    assert pack.vectors["pooled_text"].shape == (3, 4)
    assert not pack.vectors["pooled_text"][1:].any()
    assert pack.condition_TC is not None and pack.condition_TC.shape == (36, 4 * 4)
    assert pack.condition_TC.dtype == pack.latent_TC.dtype == dtype
    assert not pack.condition_TC[18:].any()  # references, padding, and samples without
    for number, one in enumerate(samples):
        found = sample_inputs(pack, number, layout_of())
        missing = found.keys() - one.inputs.keys()
        assert all(not found[name].any() for name in missing)
        for name, value in one.inputs.items():
            assert torch.equal(found[name], value), name
    (first, *others) = unpack_latents(pack.latent_TC, pack, patch_temporal=1, patch_spatial=2)
    assert torch.equal(first[:, :1], samples[0].others["first_frame_latent"])
    assert torch.equal(first[:, 1:], samples[0].latent_CFHW[:, 1:])
    assert all(torch.equal(a, s.latent_CFHW) for a, s in zip(others, samples[1:], strict=True))


@pytest.mark.parametrize("clean", [True, False])
def test_who_is_a_target_and_which_level_it_is_told(clean: bool) -> None:
    inputs = tuple(replace(one, clean=clean) for one in EVERY)
    pack = pack_samples(SAMPLES, layout_of(inputs))
    wanted_target, wanted_row = torch.zeros(36, dtype=torch.bool), pack.segment_T.clone()
    for number, (start, own) in enumerate(zip((0, 24, 32), (18, 4, 2), strict=True)):
        wanted_target[start + CLEAN[number] : start + own] = True
        wanted_row[start : start + CLEAN[number]] += 3
        wanted_row[start + own : start + TOKENS[number]] += 3 * clean
    assert torch.equal(pack.is_target_T, wanted_target)
    assert torch.equal(pack.level_row_T, wanted_row)
    without = pack_samples([SAMPLES[2]], layout_of())
    assert without.method(CleanTokens) is None and without.num_levels == 1
    assert not without.has_given_tokens
    assert torch.equal(without.is_target_T, without.is_real_T)


def test_references_stand_after_the_frames_of_the_target() -> None:
    pack = pack_samples(SAMPLES[:1], layout_of())
    frames = pack.position_TA[:22, 0].tolist()
    assert frames == [0.0] * 6 + [1.0] * 6 + [2.0] * 6 + [3.0] * 2 + [4.0] * 2
    assert pack.position_TA[20:22].tolist() == [[4, 0, 0], [4, 1, 0]]


def test_a_latent_that_would_be_given_whole_keeps_its_own_frames() -> None:
    one = sample_of(1)
    given = replace(one, others={"first_frame_latent": torch.zeros(C, 1, 4, 4)})
    pack = pack_samples([given], layout_of())
    assert pack.clean_tokens == (0,) and pack.method(CleanTokens) is None
    assert torch.equal(sample_inputs(pack, 0, layout_of())["text"], one.text_LE)
    assert pack.is_target_T.sum() == 4 and pack.latent_TC[:4].any()


def test_packs_with_every_input_travel_between_processes() -> None:
    pack = pack_samples(SAMPLES, layout_of())
    empty = pack_samples([replace(SAMPLES[1], others={"text_2": torch.zeros(0, 3)})], layout_of())
    for one in (pack, empty):
        outline, row = flatten_pack(one)
        assert all(tensor.is_meta for tensor in outline.tensors.values())
        for other in (unflatten_pack(outline, row), pickle.loads(pickle.dumps(one))):
            assert other.text_offsets == one.text_offsets and other.grids == one.grids
            assert other.methods.keys() == one.methods.keys()
            for kind in (ReferenceGrids, CleanTokens, PictureTexts):
                assert other.method(kind) == one.method(kind)
            assert other.tensors.keys() == one.tensors.keys()
            for name, tensor in one.tensors.items():
                got = other.tensors[name]
                assert got.dtype == tensor.dtype and torch.equal(
                    got.nan_to_num(), tensor.nan_to_num()
                )


@pytest.mark.parametrize(
    ("count", "kind"),
    [(2, {}), (4, {}), (2, {"halves": True}), (2, {"contiguous": True}), (4, {"contiguous": True})],
)
@pytest.mark.parametrize("mean", list(LossMean))
def test_shares_of_a_pack_have_its_losses(
    count: int, kind: dict[str, bool], mean: LossMean
) -> None:
    pack = pack_samples(SAMPLES, layout_of(multiple=8))
    objective = training_objective(ObjectiveConfig(name="flow"))
    problem = validation_problem(objective, pack, seed=1, quantile=0.5)
    prediction_TC = torch.randn(problem.target_TC.shape, generator=torch.Generator().manual_seed(3))
    whole = loss_of(pack, problem, prediction_TC, ObjectiveConfig(loss_mean=mean))
    wanted = 3 if mean is LossMean.SAMPLE else 18
    assert whole.count == wanted
    errors = (prediction_TC - problem.target_TC).square().mean(-1)[pack.is_target_T]
    if mean is LossMean.TOKEN:
        torch.testing.assert_close(whole.total, errors.sum())
    parts = []
    for index in range(count):
        share = SequenceShard(index=index, count=count, **kind)
        mine, part = split_tokens(pack, problem, share=share, multiple=1)
        rows = pack.rows(share)
        assert torch.equal(mine.level_row_T, pack.level_row_T[rows])
        assert mine.condition_TC is not None and pack.condition_TC is not None
        assert torch.equal(mine.condition_TC, pack.condition_TC[rows])
        parts.append(loss_of(mine, part, prediction_TC[rows], ObjectiveConfig(loss_mean=mean)))
        if mean is LossMean.TOKEN:
            assert parts[-1].count == mine.is_target_T.sum()
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    assert sum(part.count for part in parts) == wanted
    assert whole.of_samples(pack)[:, 1].tolist() == (
        [12, 4, 2] if mean is LossMean.TOKEN else [1, 1, 1]
    )


def test_given_tokens_have_no_noise_no_loss_and_the_clean_level() -> None:
    pack, objective = (
        pack_samples(SAMPLES, layout_of()),
        training_objective(ObjectiveConfig(name="flow")),
    )
    null = {"text": torch.zeros(1, 5), "text_2": torch.zeros(0, 3), "pooled_text": torch.ones(4)}
    settings = {"seed": 1, "step": 2, "null": null, "options": ObjectiveConfig(text_dropout=0.0)}
    _, problem = training_problem(objective, pack, **settings)
    given = pack.is_real_T & ~pack.is_target_T
    assert torch.equal(problem.input_TC[given], pack.latent_TC[given])
    assert not problem.target_TC[~pack.is_target_T].any()
    assert problem.level_M.shape == (6,) and not problem.level_M[3:].any()
    # The noise of targets is that of a pack in which the same tokens are not given.
    bare = replace(pack, is_target_T=pack.is_real_T).without(ReferenceGrids, CleanTokens)
    bare = replace(bare, grids=((1, 1, 22), (1, 1, 8), (1, 1, 2)))
    _, other = training_problem(objective, bare, **settings)
    assert torch.equal(problem.level_M[:3], other.level_M)
    assert torch.equal(problem.target_TC[pack.is_target_T], other.target_TC[pack.is_target_T])


def test_edm_has_no_level_for_tokens_without_noise() -> None:
    objective, pack = (
        training_objective(ObjectiveConfig(name="edm")),
        pack_samples(SAMPLES, layout_of()),
    )
    with pytest.raises(ValueError, match=r"tokens without noise .* use objective\.name=flow"):
        validation_problem(objective, pack, seed=1, quantile=0.5)


def test_a_run_is_refused_before_it_starts_where_clean_tokens_have_no_level(toy) -> None:
    edm = ObjectiveConfig(name="edm")
    with pytest.raises(ValueError, match=r"use objective\.name=flow"):
        check_clean_level(RunConfig(model=toy, objective=edm))
    check_clean_level(RunConfig(model=toy, objective=ObjectiveConfig(name="flow")))
    check_clean_level(run_config(objective=edm))


def test_edm_has_the_level_of_given_frames_of_cosmos() -> None:
    """Sigma 1e-4, which is no level 0: nothing is refused, and the frames are fed as they are."""
    model = DitConfig(
        **{"name": "custom", "num_layers": 1, "hidden_size": 48, "num_attention_heads": 4},
        **{"in_channels": 4, "crossattn_emb_size": 8, "condition_mask": True},
    )
    config = RunConfig(model=model, objective=ObjectiveConfig(name="edm"))
    check_clean_level(config)
    pack = random_pack([(3, 2, 2), (2, 1, 2)], [4, 5], model=model)
    objective = training_objective(config.objective)
    problem = validation_problem(objective, pack, seed=1, quantile=0.5)
    torch.testing.assert_close(problem.level_M[2:], torch.full((2,), math.log(1e-4) / 4))
    given = pack.is_real_T & ~pack.is_target_T
    assert given.any() and torch.equal(problem.input_TC[given], pack.latent_TC[given])


def test_generation_with_a_clean_frame_that_edm_has_no_level_for() -> None:
    config = RunConfig(model=wan_model("ti2v"), objective=ObjectiveConfig(name="edm"))
    with pytest.raises(ValueError, match=r"objective\.name=flow"):
        check_clean_level(config)
    frame, text = torch.randn(4, 1, 2, 2), torch.randn(3, 16)
    request = Request(
        inputs={"text": text, "first_frame_latent": frame},
        negative={"text": text},
        latent_FHW=(2, 2, 2),
        fps=16.0,
        seed=0,
    )
    settings = SamplingSettings(num_steps=2)
    with pytest.raises(ValueError, match=r"tokens without noise .* use objective\.name=flow"):
        generate_latents(torch.nn.Linear(1, 1), [request], config=config, settings=settings)


def test_families_whose_inputs_contradict_each_other_are_refused() -> None:
    mixed = [replace(one, clean=one.name == "reference") for one in EVERY]
    for inputs in (mixed, [*EVERY, replace(EVERY[5], name="last_frame")]):
        with pytest.raises(AssertionError):
            layout_of(tuple(inputs))


def test_a_pack_without_any_text_input_has_no_rows_of_it() -> None:
    pack = pack_samples([SAMPLES[2]] * 2, layout_of(()))
    assert pack.text_rows == (0, 0) and pack.texts == {}


# From shards, of the toy family: a text that may be empty, a pooled text, a first frame.


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyConfig:
    monkeypatch.setenv(VARIABLE, PLACE)
    return ToyConfig(in_channels=C, crossattn_emb_size=5)


@pytest.fixture
def expected(shards, toy: ToyConfig) -> Expected:
    return Expected.of(replace(shards.config(), model=toy))


def record(*, without: str = "", **changes) -> dict[str, bytes]:
    rng = torch.Generator().manual_seed(1)
    shapes = {"latent": (C, 3, 4, 4), "text": (2, 5), "pooled_text": (6,)}
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    tensors = {name: t for name, t in (tensors | changes).items() if name != without}
    payload = safetensors.torch.save(tensors)
    about = {"format_version": 1, "crc32": {"safetensors": f"{zlib.crc32(payload):08x}"}}
    return {"safetensors": payload, "json": json.dumps(about).encode()}


def test_a_sample_of_a_family_with_inputs_is_cooked(expected: Expected) -> None:
    frame = torch.ones(C, 1, 4, 4)
    parts = record(first_frame_latent=frame.half(), text=torch.zeros(0, 5), spare=torch.ones(3))
    sample = cook(parts, expected, key="k")
    assert sample.others.keys() == {"pooled_text", "first_frame_latent"}
    assert torch.equal(sample.others["first_frame_latent"], frame) and len(sample.text_LE) == 0
    assert sample.unknown == ("spare",)
    size = measure_sample(record(latent=torch.ones(C, 3, 64, 64)), expected)
    assert size is None  # too long for a pack


REFUSED = [
    ({"without": "pooled_text"}, Reject.NO_INPUT, "no `pooled_text`, which model.family=toy needs"),
    ({"pooled_text": torch.ones(7)}, Reject.INPUT_SHAPE, r"`pooled_text` has shape \[7\], .*\[6\]"),
    ({"pooled_text": torch.ones(2, 6)}, Reject.UNDECODABLE, r"pooled_text has shape \[2, 6\]"),
    ({"pooled_text": torch.full((6,), math.nan)}, Reject.INPUT_NOT_FINITE, "6 of 6 numbers"),
    ({"first_frame_latent": torch.ones(C, 1, 2, 4)}, Reject.INPUT_SHAPE, "first_frame_latent"),
    ({"first_frame_latent": torch.ones(C, 4, 4, 4)}, Reject.INPUT_SHAPE, r"1\.\.3, 4, 4"),
    ({"pooled_text": torch.ones(6, dtype=torch.int64)}, Reject.UNDECODABLE, "pooled_text is .*int"),
    ({"without": "text"}, Reject.NO_TEXT, "no `text`"),
    # 12 tokens of latents and 55 rows of text: text takes room where layers attend to both.
    ({"text": torch.ones(55, 5)}, Reject.TOO_LONG, r"55 rows of text\) takes 67 tokens"),
]


@pytest.mark.parametrize(("fault", "reason", "told"), REFUSED)
def test_each_fault_of_an_input_has_its_reason(expected, fault, reason, told) -> None:
    with pytest.raises(SampleRefused, match=told) as caught:
        cook(record(**fault), expected, key="k")
    assert caught.value.reason is reason


def test_the_head_of_a_record_tells_the_size_of_all_inputs(expected: Expected) -> None:
    parts = record(latent=torch.randn(C, 3, 8, 8), first_frame_latent=torch.ones(C, 1, 8, 8))
    whole = SampleSize.of(cook(parts, expected, key="k"), expected.layout)
    assert whole.tokens == 48 + 2 and whole.rows == 48 and whole.shape == (48, 2)
    payload = parts["safetensors"]
    head = RecordHeader(data=payload[: head_length(payload)], size=len(payload))
    assert measure_sample({**parts, "safetensors": head}, expected) == whole


def test_the_pooled_text_of_dfm_is_read(shards, toy: ToyConfig) -> None:
    expected = Expected.of(replace(shards.config(), model=toy))
    stored = {"prompt_embeds": torch.ones(1, 2, 5), "pooled_prompt_embeds": torch.ones(1, 6)}
    buffer = io.BytesIO()
    torch.save(torch.ones(C, 4, 4), buffer)
    parts = {"pth": buffer.getvalue(), "pickle": pickle.dumps(stored), "json": b"{}"}
    sample = cook(parts, expected, key="k")
    assert torch.equal(sample.others["pooled_text"], torch.ones(6))
    text_alone = replace(expected, layout=layout_of(EVERY[:1]))
    assert cook(parts, text_alone, key="k").unknown == ("pooled_text",)


REQUESTS = [
    ({}, r"no `pooled_text`, which model\.family=toy needs; use the text encoder"),
    ({"pooled_text": torch.ones(7)}, r"`pooled_text` has shape \[7\]"),
    (
        {"pooled_text": torch.ones(6), "first_frame_latent": torch.ones(C, 1, 8, 8)},
        "`first_frame_latent` has shape",
    ),
]


@pytest.mark.parametrize(("others", "told"), REQUESTS)
def test_generation_refuses_inputs_that_do_not_fit(toy: ToyConfig, others, told) -> None:
    inputs = {"text": torch.zeros(1, 5), **others}
    request = Request(inputs=inputs, negative={}, latent_FHW=(3, 4, 4), fps=math.nan, seed=0)
    config = RunConfig(model=toy, objective=ObjectiveConfig(name="flow"))
    with pytest.raises(ValueError, match=told):
        generate_latents(nn.Linear(1, 1), [request], config=config, settings=SamplingSettings())


def test_names_of_unknown_tensors_are_bounded() -> None:
    counts = ReaderCounts(Bound(fraction=1.0, samples=1), readers=1)
    for number in range(200):
        counts.accept((f"name {number}" * 50,))
    unknown = counts.counts.unknown
    assert sum(unknown.values()) == 200 and len(unknown) <= 31 and max(map(len, unknown)) <= 100


def test_a_loader_counts_refused_and_unknown_inputs(shards, toy, tmp_path, opened) -> None:
    samples = [record(spare=torch.ones(1)) if i % 2 else record() for i in range(12)]
    samples[3] = record(without="pooled_text")
    shards.write(tmp_path, samples)
    config = replace(shards.config(tmp_path, max_bad_fraction=0.5), model=toy)
    loader = opened(build_train_loader(config, rank=0, world_size=1))
    packs = [next(loader) for _ in range(8)]
    counts = loader.reject_counts()
    assert set(counts.refused) == {Reject.NO_INPUT}
    assert counts.unknown.keys() == {"spare"} and 0 < counts.unknown["spare"] < counts.read
    assert all(pack.vectors["pooled_text"].shape == (pack.num_samples, 6) for pack in packs)
    state = loader.state_dict()
    again = opened(build_train_loader(config, rank=0, world_size=1))
    again.load_state_dict([state])
    assert again.reject_counts() == counts
    following = next(loader), next(again)
    assert following[0].keys == following[1].keys
    assert again.reject_counts() == loader.reject_counts()
    restored = RejectCounts()
    restored.restore_state(counts.save_state())
    assert restored == counts == sum_counts([counts, RejectCounts()])


def test_states_before_inputs_mean_text_alone(shards, toy: ToyConfig, tmp_path) -> None:
    config = shards.config(shards.good_set(tmp_path, 5))
    now = loader_identity(config)
    before = {k: v for k, v in now.items() if "inputs" not in k and "counts" not in k}
    assert len(before) == len(now) - 2
    plain = LoaderState.start(
        LoaderState.of(build_train_loader(config, rank=0, world_size=1).state_dict()).layout,
        rank=0,
        identity=before,
    ).plain()
    assert LoaderState.of(plain).identity == now
    other = loader_identity(replace(config, model=replace(toy, crossattn_emb_size=8)))
    with pytest.raises(DataError, match=r"inputs of model\.family beside the text"):
        check_identity(now, other, places=("a", "a"))


def test_null_inputs_of_a_family(shards, toy: ToyConfig, tmp_path) -> None:
    shards.write(tmp_path, [record() for _ in range(4)])
    config = replace(shards.config(tmp_path), model=toy)
    found = null_inputs(config)
    assert {name: value.shape for name, value in found.items()} == {
        "text": (1, 5),
        "pooled_text": (6,),
    }
    file = tmp_path / "null_text.safetensors"
    file.write_bytes(safetensors.torch.save({"text": torch.ones(2, 5)}))
    with pytest.raises(DataError, match=r"null_text\.safetensors has text, but no `pooled_text`"):
        null_inputs(config)
    stored = {"text": torch.ones(2, 5), "pooled_text": torch.ones(6), "text_2": torch.ones(1, 1)}
    file.write_bytes(safetensors.torch.save(stored))
    assert torch.equal(null_inputs(config)["pooled_text"], torch.ones(6))
    file.write_bytes(safetensors.torch.save({**stored, "pooled_text": torch.ones(7)}))
    with pytest.raises(DataError, match=r"pooled_text has shape \[7\]"):
        null_inputs(config)


def test_an_input_that_samples_may_lack_may_be_absent_from_the_null_file(shards, tmp_path) -> None:
    root = shards.good_set(tmp_path, 4)
    stored = safetensors.torch.save({"text": torch.ones(1, 5)})
    (root / "null_text.safetensors").write_bytes(stored)
    (leaf,) = train_leaves(shards.config(root).dataset)
    found = _null_inputs(leaf, [replace(EVERY[0], null=NullInput.KEPT), *EVERY[1:3]])
    assert {name: value.shape for name, value in found.items()} == {
        "text_2": (0, 3),
        "pooled_text": (4,),
    }
    ids = SampleInput(name="token_ids", kind=InputKind.TEXT, width=2, vocabulary=700)
    for number, known in ((699, True), (700, False)):
        stored = safetensors.torch.save({"token_ids": as_digits(torch.tensor([1, number]))})
        (root / "null_text.safetensors").write_bytes(stored)
        with (
            nullcontext()
            if known
            else pytest.raises(DataError, match="not whole numbers from 0 to 699")
        ):
            assert len(_null_inputs(leaf, [ids])["token_ids"]) == 2

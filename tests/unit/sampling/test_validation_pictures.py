"""Validation samples begin with the pictures of their prompts, or of their held-out samples."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from dit.batch import CleanTokens
from dit.codecs.vae.families import CosmosPredict2
from dit.config import ObjectiveConfig, Precision, RunConfig, Sampler
from dit.data.pack import pack_samples
from dit.lora.adapter import Adapter
from dit.lora.factors import linear_shapes, shapes_of
from dit.lora.files import read_lora, write_lora
from dit.lora.targets import attach_adapters
from dit.models.dit.family import FAMILY, DitConfig
from dit.models.patch_layout import PatchLayout
from dit.sampling.commands.generate_media import generate_opened
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.generate import check_requests, generate_latents, generate_streams
from dit.sampling.given_pictures import GivenPictures
from dit.sampling.open_checkpoint import OpenCheckpoint
from dit.sampling.prompts import Prompt, read_prompts
from dit.sampling.validation import samples as samples_module
from dit.sampling.validation.feature_extractor import frechet_distance
from dit.sampling.validation.requests import inputs_of_held_out, own_latent
from dit.sampling.validation.samples import open_samples
from dit.train.checkpoint.adapters import draw_adapters
from dit.train.checkpoint.state_dict import TrainProgress
from tests.families import flux, pipeline_parts, qwen_image
from tests.families.generation import opened
from tests.families.wan import pipeline, wan_model
from tests.lora_files import random_factors
from tests.media_files import image
from tests.packs import random_pack

SIZE: dict[str, Any] = {"num_video_frames": 9, "height": 32, "width": 48}


def pictures(folder: Path, size: tuple[int, int]) -> tuple[Path, Path]:
    """Two files of random pictures; a size is (width, height)."""
    first, last = folder / "first.png", folder / "last.png"
    return image(first, *size, seed=0), image(last, *size, seed=1)


def training(
    run: OpenCheckpoint,
    folder: Path,
    entries: list[dict],
    *,
    size: dict[str, int] | None = None,
    **changes: Any,
) -> Any:
    """What a training run of this network would ask its samples of."""
    (folder / "prompts.json").write_text(json.dumps({"data": entries}))
    c = run.config
    validation = replace(
        c.validation,
        prompts_file=str(folder / "prompts.json"),
        sampling_steps=2,
        sampler=Sampler.UNIPC,
        guidance=2.0,
        fps=24.0,
        t5_cache_dir=str(folder / "pipeline"),
        **(SIZE | (size or {})),
    )
    found: dict[str, Any] = {
        "config": replace(c, validation=validation),
        "card": run.card,
        "null": run.null,
        "folder": folder / "run",
        "replica": SimpleNamespace(reads=True),
        "data_ranks": run.model.groups.dp,
        "model": SimpleNamespace(ema=None, adapters=None, chunks=[]),
        "progress": TrainProgress(),
        "notes": [],
    }
    return SimpleNamespace(**(found | changes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["i2v_2.1", "flf2v", "5b"])
def test_pictures_of_prompts_are_those_of_generate_dit(groups, tmp_path: Path, kind: str) -> None:
    pipeline(tmp_path, kind, expand_timesteps=kind == "5b")
    run = opened(tmp_path)
    first, last = pictures(tmp_path, (50, 40))
    entry = {"caption": "a fox", "image_path": "first.png"}
    other = {"caption": "a fox", "image_path": str(last)}
    if kind == "flf2v":
        entry["last_image_path"], other["last_image_path"] = "last.png", str(first)
    train = training(run, tmp_path, [entry, other])
    samples: Any = open_samples(train)
    made = generate_latents(
        run.model,
        [one.request for one in samples.wanted],
        config=train.config,
        settings=settings(train.config),
    )
    ends = ((first, last), (last, first))
    prompts = [
        Prompt(text="a fox", image=str(a), last_image=str(b) if kind == "flf2v" else None)
        for a, b in ends
    ]
    options = GenerationOptions(num_steps=2, guidance=2.0, sampler="unipc", **SIZE)
    theirs = generate_opened(run, prompts, seed=0, options=options, latents=True)
    for mine, picture in zip(made, theirs, strict=True):
        assert picture.latent_CFHW is not None
        torch.testing.assert_close(mine, picture.latent_CFHW, rtol=0, atol=1e-5)
    assert not torch.equal(made[0], made[1])

    drawn = samples(train, run.model)
    folder = train.folder / "validation_generation/step_00000000"
    entries = json.loads((folder / "samples.json").read_text())
    assert [one["image"] for one in entries] == [str(first), str(last)]
    assert ("last_image" in entries[0]) == (kind == "flf2v")
    resized = Image.open(first).resize((48, 32), Image.Resampling.LANCZOS)
    assert np.array_equal(samples.wanted[0].given_HW3, np.asarray(resized))
    assert drawn.grid is not None and not drawn.undrawn and len(drawn.firsts) == 2


def train_adapters(network: Any, folder: Path) -> None:
    """Gives a network those of a file, as trained ones."""
    factors = read_lora(folder)
    attach_adapters(network, shapes_of(factors), precision=network.model.precision)
    draw_adapters(network, factors)


@pytest.mark.slow
@pytest.mark.parametrize("pictured", [False, True], ids=["text", "picture"])
def test_a_run_of_adapters_samples_without_them_too(
    groups, tmp_path: Path, monkeypatch, pictured: bool
) -> None:
    pipeline(tmp_path, "i2v_2.2" if pictured else "t2v")
    run = opened(tmp_path)
    first, _ = pictures(tmp_path, (48, 32))
    extra = {"image_path": str(first)} if pictured else {}
    train = training(run, tmp_path, [{"caption": one, **extra} for one in ("a fox", "a hen")])
    plain: Any = open_samples(train)
    plain(train, run.model)
    step = train.folder / "validation_generation/step_00000000"
    bare = {one.name: read_frames(one) for one in step.glob("*.mp4")}
    assert not (step / "without_adapter").exists() and len(bare) == 2
    assert {"adapter"} & json.loads((step / "samples.json").read_text())[0].keys() == set()
    alone = Image.open(step / "grid.png").size

    shapes = linear_shapes(run.config.model)
    (lora := tmp_path / "lora").mkdir()
    write_lora(lora, random_factors(shapes))
    train_adapters(run.model.first, lora)
    rng = torch.Generator().manual_seed(0)
    real_ND = torch.rand(2, 5, generator=rng)
    wanted = [replace(one, real_D=real) for one, real in zip(plain.wanted, real_ND, strict=True)]
    train.model.adapters, seen = {}, []

    def features(shown: list[np.ndarray]) -> torch.Tensor:
        seen.extend(shown)
        rows = [torch.from_numpy(one.copy()).float().mean((0, 1)) for one in shown]
        return torch.stack([torch.cat([row, row[:2].square() / 99]) for row in rows])

    extractor: Any = SimpleNamespace(pictures=features, reads_captions=False)
    adapted = replace(plain, wanted=wanted, extractor=extractor)
    made = []
    monkeypatch.setattr(
        samples_module,
        "generate_streams",
        lambda *a, **k: made.append(1) or generate_streams(*a, **k),
    )
    for step_number, calls in ((3, 2), (4, 3)):  # frozen weights are sampled once
        train.progress = replace(train.progress, step=step_number)
        drawn = adapted(train, run.model)
        assert len(made) == calls and drawn.grid is not None and not drawn.undrawn
        step = train.folder / f"validation_generation/step_{step_number:08d}"
        for name, frames in bare.items():
            assert np.array_equal(read_frames(step / "without_adapter" / name), frames)
            assert not np.array_equal(read_frames(step / name), frames)
        for place, adapter in ((step, True), (step / "without_adapter", False)):
            entries = json.loads((place / "samples.json").read_text())
            assert [one["adapter"] for one in entries] == [adapter] * 2
        assert Image.open(step / "grid.png").width > alone[0] + 40
        # Figures are those of the adapters.
        assert drawn.quality["val_fid"] == frechet_distance(features(seen[-2:]), real_ND)
        assert drawn.videos == [(step / one["file"], one["prompt"]) for one in entries]
    assert len(seen) == 2 * 4 and all(one.enabled for one in adapters_in(run.model))


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize("kind", ["flux1_kontext", "qwen_image_edit_2511"])
def test_references_of_prompts_are_those_of_generate_dit(groups, tmp_path: Path, kind: str) -> None:
    """Of the size that the data have; where the text encoder sees them, each prompt has its own."""
    edits = kind == "qwen_image_edit_2511"
    if edits:
        qwen_image.pipeline(tmp_path, kind)
        for part in ("text_encoder", "tokenizer"):
            shutil.copytree(tmp_path / "parts" / part, tmp_path / "pipeline" / part)
    else:
        flux.pipeline(tmp_path, "kontext")
    run = opened(tmp_path)
    stride, multiple = run.latent_stride.stride, 2 * run.latent_stride.stride
    sides = {"height": 2 * multiple, "width": 3 * multiple, "num_video_frames": 1}
    pictures(tmp_path, (9 * stride, 7 * stride))
    entries: list[dict[str, Any]] = [
        {"caption": "a fox", "reference_path": "first.png", "negative_prompt": "a hen"},
        {"caption": "a fox", "control_path": ["last.png", "first.png"] if edits else ["last.png"]},
    ]
    card = run.card | {"settings": {"reference_size": "own"}}
    train = training(run, tmp_path, entries, size=sides, card=card)
    samples: Any = open_samples(train)
    plain = replace(settings(train.config), sampler=Sampler.EULER)
    asked = [one.request for one in samples.wanted]
    shapes = [one.inputs["reference_latent_0"].shape[-2:] for one in asked]
    assert [tuple(shape) for shape in shapes] == [(6, 8)] * 2  # own, in whole tokens of 2 cells
    made = generate_latents(run.model, asked, config=train.config, settings=plain)
    options = GenerationOptions(
        num_steps=2, guidance=2.0, sampler="euler", reference_size="own", **sides
    )
    prompts = read_prompts(tmp_path / "prompts.json")
    theirs = generate_opened(run, prompts, seed=0, options=options, latents=True)
    for mine, picture, one in zip(made, theirs, samples.wanted, strict=True):
        torch.testing.assert_close(mine, picture.latent_CFHW, rtol=0, atol=1e-5)
        assert np.array_equal(one.given_HW3, picture.given_HW3)
    assert [one.pictures for one in samples.wanted] == [
        {"reference": list(prompt.references)} for prompt in prompts
    ]
    assert not torch.equal(made[0], made[1])

    many = {"caption": "a fox", "reference_path": ["first.png"] * (4 if edits else 2)}
    bad = [(many, r"reference_path .*first.png: the network takes at most \d")]
    if edits:
        bad += [({"caption": "a fox"}, r"needs the pictures .*: give reference_path beside the pr")]
    for entry, words in bad:
        with pytest.raises(ValueError, match=rf"prompts.json, entry 2: .*{words}"):
            open_samples(training(run, tmp_path, [*entries, entry], size=sides))
    if edits:
        train = training(run, tmp_path, entries, size=sides, card=card)
        alone = replace(train.config.validation, negative_prompt="a hen", num_captions=2)
        train.config = replace(train.config, validation=alone)
        with pytest.raises(
            ValueError, match=r"negative_prompt=a hen: .* unknown for .* held-out samples"
        ):
            open_samples(train)


def adapters_in(model: Any) -> list[Adapter]:
    found = [one for one in model.modules() if isinstance(one, Adapter)]
    assert found
    return found


def read_frames(file: Path) -> np.ndarray:
    with av.open(str(file)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def settings(config: RunConfig) -> Any:
    from dit.sampling.validation.samples import settings_of

    return settings_of(config)


@pytest.mark.slow
def test_what_is_missing_is_named(groups, tmp_path: Path) -> None:
    pipeline(tmp_path, "i2v_2.1")
    run = opened(tmp_path)
    first, last = pictures(tmp_path, (48, 32))
    good = {"caption": "a fox", "image_path": str(first)}
    (tmp_path / "text.png").write_text("no picture")
    at = "validation.prompts_file .*prompts.json, entry 1"
    for entry, words in (
        ({"caption": "a fox"}, r": .*`condition_latent` and `image_embed`.*: give image_path besi"),
        (good | {"image_path": "gone.png"}, r': the picture "gone.png" is neither in'),
        (good | {"image_path": "text.png"}, r": image_path .*text.png cannot be read as a picture"),
        (good | {"last_image_path": str(last)}, r": last_image_path .*the first picture alone"),
        (
            good | {"reference_path": str(last)},
            r": reference_path .*last.png: .* takes no references",
        ),
    ):
        with pytest.raises(ValueError, match=at + words):
            open_samples(training(run, tmp_path, [good, entry]))
    stride = {"stride": 8, "temporal_stride": 4}
    gone = run.card["processor"] | {"model_name": "nowhere/nothing"}
    card = run.card | {"processor": gone, "latent": run.card["latent"] | stride}
    with pytest.raises(
        ValueError, match=r"VAE of the data is not on this machine; set model.vae_cache_folder"
    ):
        open_samples(training(run, tmp_path, [good], card=card))
    encoder = {"image_encoder": [None, None]}
    index = tmp_path / "pipeline/model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | encoder))
    from dit.codecs.pretrained import has_component

    has_component.cache_clear()
    with pytest.raises(
        ValueError, match=r"`image_embed`.*no encoder for it; set model.vae_cache_f"
    ):
        open_samples(training(run, tmp_path, [good]))


def test_a_picture_for_a_network_that_takes_none(groups, tmp_path: Path) -> None:
    pipeline(tmp_path, "t2v")
    first, _ = pictures(tmp_path, (48, 32))
    train = training(opened(tmp_path), tmp_path, [{"caption": "a", "image_path": str(first)}])
    with pytest.raises(ValueError, match=r"image_path .*first.png: the network takes no picture"):
        open_samples(train)


@pytest.mark.parametrize("kind", ["i2v_image", "flf2v", "ti2v"])
def test_a_held_out_sample_lends_all_of_its_own_inputs(kind: str) -> None:
    model = wan_model(kind)
    config = RunConfig(model=model)
    pack = random_pack([(3, 2, 2), (2, 2, 3), (3, 1, 2)], [4, 5, 6], model=model)
    for index in range(3):
        inputs = inputs_of_held_out(config, pack, index)
        alone = repacked(config, inputs, pack, index)
        start, count = pack.starts[index], pack.latent_tokens[index]
        for name, offsets in pack.text_offsets.items():
            rows = pack.texts[name][offsets[index] : offsets[index + 1]]
            assert torch.equal(alone.texts[name], rows)
        if pack.condition_TC is not None:
            assert alone.condition_TC is not None
            wanted = pack.condition_TC[start : start + count]
            assert torch.equal(alone.condition_TC[:count], wanted) and wanted.any()
        if kind == "ti2v":
            clean = pack.clean_tokens[index]
            assert alone.clean_tokens == (clean,) and clean
            wanted = pack.latent_TC[start : start + clean]
            assert torch.equal(alone.latent_TC[:clean], wanted)


def repacked(config: RunConfig, inputs: dict[str, torch.Tensor], pack: Any, index: int) -> Any:
    from dit.sampling.generate import Request

    f, h, w = pack.grids[index]
    p, t = config.model.patch_spatial, config.model.patch_temporal
    size = (f * t, h * p, w * p)
    one = Request(inputs=inputs, negative={}, latent_FHW=size, fps=16.0, seed=0)
    return pack_samples(check_requests([one], config), PatchLayout.of(config))


@pytest.mark.parametrize(
    ("weights", "given"), [((0, 1, 1), 1), ((2, 1, 1), 1), ((2, 0, 1), 2), (None, 0)]
)
def test_drawn_given_frames_are_the_sample_s_own(weights: Any, given: int) -> None:
    """Cosmos-Predict2's video2world never trained without a given frame."""
    model = DitConfig(
        **{"name": "custom", "num_layers": 1, "hidden_size": 48, "num_attention_heads": 4},
        **{"in_channels": 4, "crossattn_emb_size": 8, "condition_mask": True},
        precision=Precision.FP32,
    )
    objective = ObjectiveConfig(name="flow", given_frames=weights)
    config = RunConfig(model=model, objective=objective)
    pack = random_pack([(3, 2, 2), (1, 2, 3), (2, 1, 2)], [4, 5, 6], model=model)
    pack = pack.with_method(replace(pack.method(CleanTokens), counts=(0,) * 3))
    for index, most in enumerate((2, 0, 1)):
        inputs = inputs_of_held_out(config, pack, index)
        count = min(given, most)
        assert ("first_frame_latent" in inputs) == (count > 0)
        if count:
            own_CFHW = own_latent(pack, index, model)
            assert torch.equal(inputs["first_frame_latent"], own_CFHW[:, :count])


def test_cosmos_video2world_begins_with_a_picture(tmp_path: Path) -> None:
    """Its first latent frame is that of the picture alone, the codec being causal."""
    folder = pipeline_parts.wan(tmp_path / "parts")
    settings = {"precision": "float32", "stochastic": False, "image_conditioning": False}
    codec = CosmosPredict2.from_settings({"model_name": str(folder), **settings})
    file, _ = pictures(tmp_path, (50, 40))
    given = GivenPictures(first=str(file), last=None)
    wanted = FAMILY.inputs(DitConfig(condition_mask=True))
    given.check(wanted, frames=9)
    (made,) = given.inputs(codec, wanted, size=(9, 32, 48), multiple=16).items()
    (alone,) = codec._encode(given.first_picture(32, 48)[:, :, None], None)
    assert made[0] == "first_frame_latent"
    torch.testing.assert_close(made[1], codec.whitening.apply(alone), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"--last_image .*first picture alone"):
        replace(given, last=str(file)).check(wanted, frames=9)
    with pytest.raises(ValueError, match=r"there is no first picture; give --image FILE"):
        GivenPictures(first=None, last="b.png").check([TWO], frames=9)


TWO = replace(FAMILY.inputs(DitConfig(condition_mask=True))[1], pictures=2)

"""Samples of a run at each validation, and of a checkpoint, on every layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dit.config_loading.cli import parse_arguments
from dit.lora.factors import linear_shapes
from dit.lora.files import write_lora
from recipes.runs import RECIPES
from tests.launching import ROOT, SMALL, command, metrics, pretrain, run
from tests.lora_files import random_factors

LAYOUTS = {
    "dp2": (),
    "tp2+sp": ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true"),
    "cp2": ("model.context_parallel_size=2",),
    "pp2+vpp2": (
        "model.pipeline_model_parallel_size=2",
        "model.virtual_pipeline_model_parallel_size=2",
    ),
}


def _latents(folder: Path) -> list[torch.Tensor]:
    entries = json.loads((folder / "samples.json").read_text())
    return [load_file(folder / entry["latent"])["latent"] for entry in entries]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_samples_of_a_run_are_the_same_on_every_layout(tmp_path):
    """Mock data have no decoder: what is compared is latents, of pictures and a video.

    Replicas read other mock data, so theirs are compared before the first step. A run of adapters
    has the samples of its frozen weights beside them, which are those of the run that made these.
    """
    conf = ["--config-file", str(ROOT / "conf/dit_debug.yaml"), "--mock", "model.num_layers=4"]
    steps = ["train.train_iters=2", "train.eval_interval=2", "train.eval_iters=2"]
    lr = ["optimizer.lr=1e-2", "scheduler.lr_warmup_iters=0", "optimizer.min_lr=1e-2"]
    sampling = ["validation.num_captions=5", "validation.sampling_steps=2"]
    sampling += ["validation.guidance=3", "validation.sampler=dpm++", "validation.at_start=true"]
    # Random ones on every linear: those that begin at zero, beside weights that do, learn slowly.
    model, file = parse_arguments(conf, recipes=RECIPES).config.model, tmp_path / "lora"
    file.mkdir()
    write_lora(file, random_factors(linear_shapes(model), ranks={"to_k": 3}))
    adapters = [f"lora.init_from={file}"]
    start = ["checkpoint.finetune=true", f"checkpoint.load={tmp_path / 'bare'}"]
    found, without = {}, {}
    for name, layout in {"bare": (), "one": (), **LAYOUTS}.items():
        nproc, save = 2 if name in LAYOUTS else 1, tmp_path / name
        more = [*conf, *steps, *lr, *sampling, *layout, f"checkpoint.save={save}"]
        # Its last weights are those that it is sampled with, and that adapters stand beside.
        more += ["ema.kind=none"] if name == "bare" else [*adapters, *start]
        done = run(command("pretrain_dit.py", *more, nproc=nproc))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "latents in false colours, because the data name no decoder" in done.stdout
        folders = [save / f"validation_generation/step_0000000{step}" for step in (0, 2)]
        found[name] = [_latents(folder) for folder in folders]
        assert (folders[0] / "without_adapter").is_dir() == (name != "bare")
        if name != "bare":
            before, after = (_latents(folder / "without_adapter") for folder in folders)
            assert all(map(torch.equal, before, after))
            without[name] = before
    first = found["bare"][1]
    assert len({tuple(latent.shape) for latent in first}) > 2
    assert all(map(torch.equal, without["one"], first))
    for one, other in ((found["one"][0], first), (found["one"][0], found["one"][1])):
        assert all(_apart(*pair) > 1e-2 for pair in zip(one, other, strict=True))
    for name in LAYOUTS:
        pairs = [*zip(without["one"], without[name], strict=True)]
        for step in (0,) if name == "dp2" else (0, 1):
            pairs += zip(found["one"][step], found[name][step], strict=True)
        assert max(_apart(ours, theirs) for ours, theirs in pairs) <= 1e-4, name


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, in standard deviations."""
    return float((ours - theirs).abs().max() / ours.std())


class Corners(nn.Module):
    """A network that sees how bright the four corners are."""

    def forward(self, pixels_N3HW: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(pixels_N3HW.float(), 2)[:, 0].flatten(1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quality_is_that_of_all_replicas(digits, tmp_path):
    network = tmp_path / "features.pt"
    torch.jit.script(Corners()).save(str(network))
    asked = ["dataset.num_workers=0", "train.train_iters=2", "train.eval_interval=2"]
    asked += ["train.eval_iters=4", "train.global_batch_size=2", f"dataset.path={digits}"]
    asked += ["validation.num_captions=9", "validation.sampling_steps=2"]
    asked += [f"validation.feature_extractor={network}", "validation.at_start=true"]
    asked += ["scheduler.lr_warmup_iters=0"]
    found = []
    for nproc in (1, 2):
        folder = tmp_path / str(nproc)
        pretrain(folder, *asked, nproc=nproc)
        found.append(metrics(folder)[0])  # before the first step the weights are the same
    for name in ("val_fid", "val_kid"):
        assert found[0][name] > 0
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4)


@pytest.fixture(scope="module")
def trained(enter, digits, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    conf = ("--config-file", ROOT / "conf/dit_digits.yaml", *SMALL, "dataset.num_workers=0")
    steps = ("train.train_iters=20", "train.eval_interval=0", "optimizer.lr=1e-2")
    done = enter(
        "pretrain_dit", *conf, *steps, f"dataset.path={digits}", f"checkpoint.save={folder}"
    )
    assert done.code == 0, done.said
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_generation_is_the_same_on_every_layout(trained, tmp_path):
    asked = ["--checkpoint_path", str(trained), "--num_steps", "4", "--save_latents"]
    asked += [part for word in ("zero", "seven", "x") for part in ("--prompt", word)]
    plain = [sys.executable, str(ROOT / "recipes/generate_dit.py")]
    layouts = {
        "one": (),
        "tp2+sp": ("--tensor_model_parallel_size", "2", "--sequence_parallel"),
        "cp2": ("--context_parallel_size", "2"),
        "pp2": ("--pipeline_model_parallel_size", "2"),
    }
    found = {}
    for name, flags in layouts.items():
        started = plain if name == "one" else command("generate_dit.py", nproc=2)
        done = run([*started, *asked, *flags, "--output_dir", str(tmp_path / name)])
        assert done.returncode == 0, done.stdout + done.stderr
        found[name] = _latents(tmp_path / name)
    for latents in found.values():
        for ours, theirs in zip(found["one"], latents, strict=True):
            assert float((ours - theirs).abs().max()) <= 1e-5


def test_any_size_is_rounded_up_cut_and_said(enter, trained, tmp_path):
    size = ("--height", 7, "--width", 9, "--num_images_per_prompt", 2)
    asked = ("--prompt", "a", "--prompt", "b", "--num_steps", 1, *size)
    place = ("--checkpoint_path", trained, "--output_dir", tmp_path, "--save_latents")
    done = enter("generate_dit", *place, *asked)
    assert done.code == 0, done.said
    assert "generates 8 rows" in done.said and "10 columns" in done.said
    entries = json.loads((tmp_path / "samples.json").read_text())
    assert [(entry["prompt"], entry["seed"]) for entry in entries] == [
        *(("a", 0), ("a", 1), ("b", 2), ("b", 3))
    ]
    assert [tuple(latent.shape) for latent in _latents(tmp_path)] == [(4, 1, 4, 5)] * 4
    # Decoded later they are the same pictures.
    later = ("--latents", tmp_path, "--output_dir", tmp_path / "later")
    done = enter("decode_latents", *later)
    assert done.code == 0, done.said
    for entry in entries:
        one, other = ((folder / entry["file"]).read_bytes() for folder in (tmp_path, later[-1]))
        assert one == other


@pytest.mark.parametrize("sampler", ["dpm++", "unipc"])
def test_other_samplers_and_guidance(enter, trained, tmp_path, sampler):
    asked = ("--prompt", "seven", "--num_steps", 6, "--sampler", sampler, "--save_latents")
    guidance = ("--guidance", 4, "--guidance_interval", 0.1, 5, "--guidance_rescale", 0.7)
    place = ("--checkpoint_path", trained, "--output_dir", tmp_path)
    done = enter("generate_dit", *place, *asked, *guidance)
    assert done.code == 0, done.said
    (entry,) = json.loads((tmp_path / "samples.json").read_text())
    assert entry["sampler"] == sampler and entry["guidance_interval"] == [0.1, 5.0]
    assert _latents(tmp_path)[0].isfinite().all()


HOSTILE = ("$\\frac", "costs $5 and $x", "a\nb\x07c", "W" * 5000, "שלום", "中文", "😀 \U0003fffd")
"""No font has the last character: it is not assigned."""


def test_samples_that_cannot_be_drawn_change_nothing_in_a_run(enter, digits, tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(HOSTILE))
    conf = ("--config-file", ROOT / "conf/dit_digits.yaml", *SMALL, "dataset.num_workers=0")
    steps = ("train.train_iters=4", "train.eval_interval=1", "train.eval_iters=1")
    sampling = ("validation.sampling_steps=1", f"validation.prompts_file={prompts}")
    found = {}
    for name, more in {"plain": (), "sampled": (*sampling, "validation.num_captions=2")}.items():
        folder = tmp_path / name
        drawn = folder / "validation_generation"
        if more:
            drawn.mkdir(parents=True)
            (drawn / "step_00000002").write_text("a file, where a folder should be")
            (drawn / "step_00000003/grid.png").mkdir(parents=True)
            (drawn / "step_00000004/00001.png").mkdir(parents=True)
        done = enter(
            "pretrain_dit",
            *conf,
            *steps,
            *more,
            f"dataset.path={digits}",
            f"checkpoint.save={folder}",
        )
        assert done.code == 0, done.said
        found[name] = [[line[key] for key in ("loss", "val_loss")] for line in metrics(folder)]
    assert found["plain"] == found["sampled"]  # to the last bit
    whole = json.loads((drawn / "step_00000001/samples.json").read_text())
    assert [entry["prompt"] for entry in whole][: len(HOSTILE)] == list(HOSTILE)
    assert (drawn / "step_00000001/grid.png").is_file()
    assert len(json.loads((drawn / "step_00000003/samples.json").read_text())) == len(whole)
    left = json.loads((drawn / "step_00000004/samples.json").read_text())
    assert [entry["file"] for entry in left] == [
        entry["file"] for entry in whole if entry["file"] != "00001.png"
    ]
    # Each once, and again in the last lines.
    for said in ("at step 2, the folder of the samples", f"at step 3, grid.png: {drawn}/step_"):
        assert done.said.count(said) == 2
    assert done.said.count("shown as code points") == 2
    assert done.said.startswith("dit custom: ")  # no library speaks before
    assert done.said.count("a sample: ") == 2  # of step 2; that of step 4 is of the same kind


def test_a_grid_that_cannot_be_drawn_costs_no_picture(enter, trained, tmp_path):
    (tmp_path / "grid.png").mkdir()
    (tmp_path / "samples.json").write_text("[]")  # of an earlier generation
    asked = [part for prompt in HOSTILE[:3] for part in ("--prompt", prompt)]
    place = ("--checkpoint_path", trained, "--output_dir", tmp_path)
    done = enter("generate_dit", *place, *asked, "--num_steps", 1, "--height", 8, "--width", 8)
    assert done.code == 0, done.said
    assert "grid.png: Is a directory" in done.said and "3 samples, samples.json in" in done.said
    entries = json.loads((tmp_path / "samples.json").read_text())
    assert [entry["prompt"] for entry in entries] == list(HOSTILE[:3])
    assert all((tmp_path / entry["file"]).is_file() for entry in entries)


def test_latents_are_decoded_where_they_lie(enter, trained, tmp_path):
    asked = ("--prompt", "a", "--prompt", "b", "--prompt", "c", "--num_steps", 1)
    place = ("--checkpoint_path", trained, "--output_dir", tmp_path, "--save_latents")
    done = enter("generate_dit", *place, *asked, "--height", 6, "--width", 10)
    assert done.code == 0, done.said
    before, latents = json.loads((tmp_path / "samples.json").read_text()), _latents(tmp_path)
    pictures = [(tmp_path / entry["file"]).read_bytes() for entry in before]
    decode = ("decode_latents", "--latents", tmp_path, "--output_dir")
    for place in (tmp_path, tmp_path / ".." / tmp_path.name, tmp_path):
        done = enter(*decode, place)
        assert done.code == 0, done.said
        entries = json.loads((tmp_path / "samples.json").read_text())
        assert entries == before
        assert [(tmp_path / entry["file"]).read_bytes() for entry in entries] == pictures
        assert all(map(torch.equal, _latents(tmp_path), latents))
    (tmp_path / before[1]["latent"]).write_bytes(b"\xff" * 40)
    for place, left in ((tmp_path / "new", [before[0], before[2]]), (tmp_path, before)):
        error = enter(*decode, place).error()
        assert "1 of 3 samples could not be written" in error and "00001.safetensors: " in error
        entries = json.loads((place / "samples.json").read_text())
        assert [entry["prompt"] for entry in entries] == [entry["prompt"] for entry in left]
    assert entries == before


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "[3]",
        '[{"latent": 3}]',
        '[{"prompt": "a", "seed": true, "latent": "x"}]',
        "[" * 99_999,
        '[{"prompt": "a", "seed": 1, "latent": ["a"]}]',
        '[{"prompt": "a", "seed": 1, "latent": "../../etc/passwd"}]',
        '[{"prompt": "a", "seed": 1, "latent": "gone", "fps": null}]',
    ],
)
def test_hostile_lists_of_latents_are_refused(enter, tmp_path, content, digits):
    (tmp_path / "samples.json").write_text(content)
    (tmp_path / "dataset_card.json").write_bytes((digits / "dataset_card.json").read_bytes())
    done = enter("decode_latents", "--latents", tmp_path, "--output_dir", tmp_path / "out")
    assert str(tmp_path) in done.error()
    left = (tmp_path / "samples.json").read_text()
    assert left == content or json.loads(left) == json.loads(content)
    (tmp_path / "dataset_card.json").write_text(content)
    (tmp_path / "samples.json").write_text('[{"prompt": "a", "seed": 1, "latent": "x"}]')
    done = enter("decode_latents", "--latents", tmp_path, "--output_dir", tmp_path / "out")
    assert "dataset_card.json" in done.error()

"""Runs that validate: what they write, and that training does not notice."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from data_prep.cli.parser import main as data_prep
from dit.codecs import vae
from dit.config_loading import read_config
from dit.data import build_val_packs
from dit.models.positions import unpack_latents
from dit.sampling.validation.feature_extractor import frechet_distance, kernel_distance
from tests.entering import Enter, Outcome
from tests.launching import ROOT, SMALL, metrics, stored_tensors


@pytest.fixture
def trained(enter: Enter, digits: Path, tmp_path: Path):
    """Lines of metrics.jsonl and the last weights of a run of four steps."""

    def call(name: str, *more: str) -> tuple[list[dict], dict]:
        folder = tmp_path / name
        config = ("--config-file", ROOT / "conf/dit_digits.yaml", *SMALL, "dataset.num_workers=0")
        places = (f"dataset.path={digits}", f"checkpoint.save={folder}")
        steps = ("train.train_iters=4", "checkpoint.save_interval=2", "checkpoint.keep_last=1")
        done = enter("pretrain_dit", *config, *places, *steps, *more)
        assert done.code == 0, done.said
        return metrics(folder), stored_tensors(folder)

    return call


class Halves(nn.Module):
    """A network that sees how bright the four corners are."""

    def forward(self, pixels_N3HW: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(pixels_N3HW.float() / 255, 2)[:, 0].flatten(1)


def _features(pictures: list[np.ndarray]) -> torch.Tensor:
    return Halves()(torch.stack([torch.from_numpy(p).permute(2, 0, 1) for p in pictures]))


def _held_out(file: Path, data: Path, *, count: int) -> torch.Tensor:
    """Features of the first held-out digits of different captions, as the decoder shows them."""
    config = read_config(file)
    (pack,) = build_val_packs(config, indices=[0]).packs
    patch = {"patch_temporal": 1, "patch_spatial": config.model.patch_spatial}
    latents = unpack_latents(pack.latent_TC, pack, **patch)
    first = [pack.captions.index(caption) for caption in dict.fromkeys(pack.captions)][:count]
    assert len(first) == count and first != list(range(count))
    decoder = vae.codec_of_card(json.loads((data / "dataset_card.json").read_text()))
    return _features([decoder.decode(latents[i])[0].numpy() for i in first])


def _check_round(folder: Path, line: dict, real_ND: torch.Tensor) -> None:
    """Two prompts, the second wide and moving, and the captions of six digits."""
    entries = json.loads((folder / "samples.json").read_text())
    assert [e["prompt"] for e in entries[:2]] == ["a handwritten seven", "a handwritten two"]
    captions = [entry["prompt"] for entry in entries[2:]]
    assert len(set(captions)) == 6 and all(c.startswith("a handwritten ") for c in captions)
    assert [entry["seed"] for entry in entries] == list(range(8))
    shown = [np.array(Image.open(folder / f"0000{i}.png")) for i in (0, *range(2, 8))]
    assert [picture.shape for picture in shown] == [(8, 8, 3)] * 7
    with av.open(str(folder / "00001.mp4")) as video:
        assert video.streams.video[0].average_rate == 12
        sizes = [(frame.height, frame.width) for frame in video.decode(video=0)]
    assert sizes == [(8, 12)] * 3  # seven rows, the last one twice: 4:2:0 needs even sides
    assert Image.open(folder / "grid.png").width > 100
    made_ND = _features(shown[1:])
    assert line["val_fid"] == pytest.approx(frechet_distance(made_ND, real_ND))
    assert line["val_kid"] == pytest.approx(kernel_distance(made_ND, real_ND))
    assert "val_clip_score" not in line


@pytest.mark.slow
def test_training_with_and_without_validation_is_the_same_to_the_last_bit(
    trained, digits, tmp_path
):
    sets = f"validation.sets=[{{name: again, path: {digits}}}]"
    validating = ("train.eval_interval=2", "train.eval_iters=2", "validation.at_start=true", sets)
    file = tmp_path / "prompts.json"
    wide = {"caption": "a handwritten two", "height": 7, "width": 12, "num_frames": 3}
    file.write_text(json.dumps({"data": [{"caption": "a handwritten seven"}, wide]}))
    sampling = ("validation.sampling_steps=2", "validation.guidance=3", "validation.fps=12")
    network = tmp_path / "features.pt"
    torch.jit.script(Halves()).save(str(network))
    sampling += (f"validation.prompts_file={file}", "validation.num_captions=6")
    sampling += (f"validation.feature_extractor={network}",)
    lines, weights = trained("with", *validating, *sampling)
    plain, same = trained("without", "train.eval_interval=0")
    assert weights == same
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in lines[1:]] == [line[name] for line in plain]

    for line in (lines[0], lines[2], lines[4]):
        kinds = {n.removeprefix("val_loss") for n in line if n.startswith("val_loss")}
        plain_kinds = {kind for kind in kinds if "ema" not in kind}
        assert plain_kinds == {"", "_q10", "_q30", "_q50", "_q70", "_q90", "_image_4"}
        for kind in kinds:
            assert line[f"val_again_loss{kind}"] == line[f"val_loss{kind}"]
        levels = [line[f"val_loss_q{percent}"] for percent in (10, 30, 50, 70, 90)]
        assert line["val_loss"] == pytest.approx(sum(levels) / 5)
        assert line["validation_s"] > 0 and line["sampling_s"] > 0
    steps = lines[1] | lines[3]
    assert not any("val" in name or "sampling" in name for name in steps)

    rounds = tmp_path / "with/validation_generation"
    names = [f"step_{step:08d}" for step in (0, 2, 4)]
    assert sorted(path.name for path in rounds.iterdir()) == names
    real_ND = _held_out(tmp_path / "with/config.yaml", digits, count=6)
    for name, line in zip(names, (lines[0], lines[2], lines[4]), strict=True):
        _check_round(rounds / name, line, real_ND)
    # The weights move from round to round, and the seeds do not.
    first, last = (np.array(Image.open(rounds / f"step_0000000{n}/00000.png")) for n in (0, 4))
    assert not np.array_equal(first, last)
    board = EventAccumulator(str(tmp_path / "with/tensorboard"), size_guidance={"images": 0})
    board.Reload()
    assert [image.step for image in board.Images("samples")] == [0, 2, 4]


@pytest.mark.slow
def test_negative_prompts_are_used_and_pictures_are_those_of_generate_dit(trained, enter, tmp_path):
    file = tmp_path / "prompts.json"
    own = {"caption": "a handwritten seven", "negative_prompt": "a handwritten two"}
    file.write_text(json.dumps({"data": ["a handwritten seven", own]}))
    asked = (f"validation.prompts_file={file}", "validation.num_captions=1")
    asked += ("validation.negative_prompt=a handwritten one", "validation.guidance=6")
    asked += ("validation.sampling_steps=3", "train.eval_interval=4", "train.eval_iters=1")
    trained("run", *asked, "optimizer.lr=1e-2")
    made = tmp_path / "run/validation_generation/step_00000004"
    entries = json.loads((made / "samples.json").read_text())
    assert [e["negative_prompt"].rpartition(" ")[2] for e in entries] == ["one", "two", "one"]

    def generated(name: str, *more: object) -> list[np.ndarray]:
        place = ("--checkpoint_path", tmp_path / "run", "--output_dir", tmp_path / name)
        done = enter("generate_dit", *place, "--num_steps", 3, "--guidance", 6, *more)
        assert done.code == 0, done.said
        return _pictures(tmp_path / name, range(2))

    negative = ("--negative_prompt", "a handwritten one")
    same = generated("same", "--prompts_file", file, *negative)
    for ours, theirs in zip(_pictures(made, range(2)), same, strict=True):
        assert _distance(ours, theirs) <= 1
    plain = generated("plain", *["--prompt", "a handwritten seven"] * 2)
    assert all(_distance(one, other) > 1 for one, other in zip(same, plain, strict=True))
    caption = ("--prompt", entries[2]["prompt"], "--seed", 2, *negative)
    generated("caption", *caption, "--num_images_per_prompt", 2)
    ours, theirs = _pictures(made, [2])[0], _pictures(tmp_path / "caption", [0])[0]
    assert _distance(ours, theirs) <= 1


def test_references_of_prompts_are_those_of_generate_dit(enter, tmp_path):
    """A small Kontext is shown two digits; what does not fit ends the run before its first step."""
    data, run = tmp_path / "edits", tmp_path / "run"
    packed = ["digits", "--num_samples", "40", "--edits", "--pooled_text", "--output_dir"]
    assert data_prep([*packed, str(data)]) == 0
    for number, level in enumerate((60, 200)):
        Image.new("L", (8, 8), level).save(tmp_path / f"{number}.png")
    prompts = tmp_path / "prompts.jsonl"
    entries = [{"caption": "mirrored", "reference_path": f"{number}.png"} for number in range(2)]
    prompts.write_text("\n".join(map(json.dumps, entries)))
    asked = ("validation.sampling_steps=3", "validation.guidance=2", "optimizer.lr=1e-2")

    def trained(file: Path) -> Outcome:
        config = ("--config-file", ROOT / "conf/flux_digits_edit.yaml", *EDITS)
        places = (f"dataset.path={data}", f"checkpoint.save={run}")
        return enter("pretrain_dit", *config, *places, *asked, f"validation.prompts_file={file}")

    for wrong, said in (
        ({"reference_path": "gone.png"}, 'line 3: the picture "gone.png" is neither in'),
        ({"reference_path": ["0.png", "1.png"]}, "1.png: the network takes at most 1"),
        ({"image_path": "0.png"}, "0.png: the network takes no picture; leave it out"),
    ):
        bad = tmp_path / "bad.jsonl"
        bad.write_text(f"{prompts.read_text()}\n{json.dumps({'caption': 'a'} | wrong)}")
        error = trained(bad).error()
        assert f"validation.prompts_file {bad}, line 3: " in error and said in error, error
        assert not (run / "metrics.jsonl").exists()

    done = trained(prompts)
    assert done.code == 0, done.said
    made = run / "validation_generation/step_00000002"
    shown = json.loads((made / "samples.json").read_text())
    assert [one["reference"] for one in shown] == [[str(tmp_path / f"{n}.png")] for n in range(2)]
    place = ("--checkpoint_path", run, "--output_dir", tmp_path / "same", "--prompts_file", prompts)
    done = enter("generate_dit", *place, "--num_steps", 3, "--guidance", 2)
    assert done.code == 0, done.said
    pairs = [_pictures(folder, range(2)) for folder in (made, tmp_path / "same")]
    assert all(_distance(*pair) <= 1 for pair in zip(*pairs, strict=True))
    grids = [np.array(Image.open(folder / "grid.png")) for folder in (made, tmp_path / "same")]
    assert grids[0].shape == grids[1].shape


EDITS = (
    *("model.num_layers=1", "model.num_single_layers=1", "model.hidden_size=32"),
    *("model.num_attention_heads=2", "model.rope_axes=[4, 6, 6]"),
    *("dataset.task_encoder_seq_length=256", "dataset.packing_buffer_size=8"),
    *("dataset.shuffle_buffer_size=8", "dataset.num_workers=0", "scheduler.lr_warmup_iters=0"),
    *("train.train_iters=2", "train.eval_interval=2", "train.eval_iters=1"),
)


def _pictures(folder: Path, numbers: Iterable[int]) -> list[np.ndarray]:
    return [np.array(Image.open(folder / f"{number:05d}.png")) for number in numbers]


def _distance(one: np.ndarray, other: np.ndarray) -> int:
    """Largest difference in grey levels."""
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def test_the_checkpoint_with_the_lowest_validation_loss_stays(trained, enter, tmp_path):
    # Steps that are far too large after the second.
    worse = ("optimizer.lr=0.5", "optimizer.min_lr=0.5", "scheduler.lr_warmup_iters=0")
    lines, _ = trained("run", "train.eval_interval=2", "train.eval_iters=1", *worse)
    assert lines[3]["val_loss_ema"] > lines[1]["val_loss_ema"]
    places = tmp_path / "run/checkpoints"
    assert sorted(path.name for path in places.glob("step_*")) == ["step_00000002", "step_00000004"]
    assert (places / "LOWEST_VAL").read_text() == "step_00000002"
    best = ("--checkpoint_path", places / "LOWEST_VAL", "--output_dir", tmp_path / "pictures")
    done = enter("generate_dit", *best, "--prompt", "a handwritten one", "--num_steps", "1")
    assert done.code == 0, done.said
    assert "step_00000002" in (tmp_path / "pictures/samples.json").read_text()

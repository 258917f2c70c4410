"""Conversion in several processes, of layouts, and as a part of runs."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from diffusers import CosmosTransformer3DModel
from diffusers.models.transformers import transformer_cosmos
from safetensors.torch import load_file

from dit.config import ModelConfig, Precision
from dit.convert.diffusers_config import model_config
from dit.models.positions import unpack_latents
from tests.distributed.convert_worker import LAYOUTS
from tests.entering import Enter
from tests.families.dit import PROJECTED, NearestResize, publish, random_model
from tests.launching import ROOT, SMALL, metrics, pretrain, run
from tests.packs import random_pack

LEVELS = torch.tensor([-2.1, 0.3, 437.5])
GRIDS, CAPTIONS, FPS = [(1, 3, 5), (4, 2, 3), (2, 5, 1)], [7, 1, 12], [math.nan, 16.0, 30.0]
MODELS = {
    "plain": ({"rope_scale": (2.0, 1.0, 3.0)}, None),
    "cosmos_1": ({"extra_pos_embed_type": "learnable", "concat_padding_mask": True}, 12),
    "cosmos_2_5": ({"patch_size": (2, 1, 1), "concat_padding_mask": True, **PROJECTED}, 12),
}


@dataclass(frozen=True)
class Case:
    """What a worker needs: a pack, and what Diffusers makes of each of its samples alone."""

    model: ModelConfig
    network: CosmosTransformer3DModel

    def content(self) -> dict:
        # Two context ranks share every sample, in an order that tests of packing hold.
        batch = random_pack(GRIDS, CAPTIONS, model=self.model, multiple=8, fps=FPS)
        expected_TC = torch.zeros_like(batch.latent_TC)
        patch = (self.model.patch_temporal, self.model.patch_spatial)
        latents = unpack_latents(
            batch.latent_TC, batch, patch_temporal=patch[0], patch_spatial=patch[1]
        )
        for index, latent in enumerate(latents):
            made = self._output(latent, batch, index)
            c, (f, h, w), (t, s) = len(made), batch.grids[index], patch
            tokens = made.view(c, f, t, h, s, w, s).permute(1, 3, 5, 0, 2, 4, 6).flatten(3)
            start = batch.starts[index]
            expected_TC[start : start + f * h * w] = tokens.flatten(0, 2)
        return {
            "batch": batch,
            "levels": LEVELS,
            "expected_TC": expected_TC,
            "text_pad_to": self.model.text_pad_to,
        }

    def _output(self, latent, batch, index):
        start, stop = batch.text_starts[index : index + 2]
        missing = (self.model.text_pad_to or stop - start) - (stop - start)
        text = torch.nn.functional.pad(batch.text_LE[start:stop], (0, 0, 0, missing))
        told = not math.isnan(FPS[index]) and self.model.base_fps is not None
        with torch.no_grad():
            return self.network(
                latent[None],
                LEVELS[index : index + 1],
                text[None],
                fps=FPS[index] if told else None,  # 2.5's pipeline tells none
                padding_mask=torch.zeros(1, 1, 4, 4),
            ).sample[0]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def worked(tmp_path_factory) -> Path:
    """Three models, each imported, run on every layout and exported, by two processes."""
    folder = tmp_path_factory.mktemp("convert")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_cosmos, "transforms", NearestResize, raising=False)
        for name, (changes, text_pad_to) in MODELS.items():
            network = random_model(**changes)
            publish(folder / f"{name}.hf", network)
            config = json.loads((folder / f"{name}.hf/config.json").read_text())
            padding = {"precision": Precision.FP32, "text_pad_to": text_pad_to}
            model = model_config(config, **padding, place=name)
            torch.save(Case(model, network).content(), folder / f"{name}.pt")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([sys.executable, *launcher, "-m", "tests.distributed.convert_worker", str(folder)])
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_imported_forward_equals_diffusers_on_every_layout(worked, name):
    found = json.loads((worked / "found.json").read_text())
    gaps = {layout: found[f"{name} {layout}"] for layout in LAYOUTS}
    assert max(gaps.values()) <= 1e-5, gaps


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_convert_as_one_does(worked, name):
    assert len(list((worked / f"{name}.ours").glob("*.distcp"))) == 2
    some, others = _tensors(worked / f"{name}.hf"), _tensors(worked / f"{name}.back")
    assert len(list((worked / f"{name}.back").glob("*.safetensors"))) > 2
    assert some.keys() == others.keys()
    assert all(torch.equal(some[key], others[key]) for key in some)
    CosmosTransformer3DModel.from_pretrained(worked / f"{name}.back")


def _verified(hf: Path, checkpoint: Path) -> None:
    words = ("--hf-path", str(hf), "--megatron-path", str(checkpoint))
    done = run([sys.executable, "-m", "dit.convert", "verify", *words])
    assert done.returncode == 0, done.stdout + done.stderr


MOCK = (
    *("--mock", "train.eval_interval=0", "model.num_layers=4", "checkpoint.save_interval=2"),
    *("dataset.task_encoder_seq_length=512", "scheduler.lr_warmup_iters=0"),
)
EXPORTING = (*MOCK, "checkpoint.also_save_hf=true", "train.train_iters=6", "checkpoint.keep_last=2")
TENSOR = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true")


@pytest.mark.slow
def test_a_run_on_tensor_ranks_exports_and_its_import_trains_on_stages(enter: Enter, tmp_path):
    folder, ours = tmp_path / "run", tmp_path / "ours"
    pretrain(folder, *EXPORTING, *TENSOR, nproc=2, config="dit_debug.yaml")
    exports = sorted(path.name for path in (folder / "diffusers").iterdir())
    assert exports == ["step_00000004", "step_00000006"]
    last = folder / "diffusers" / exports[-1]
    _verified(last, folder)

    words = ("--hf-path", str(last), "--megatron-path", str(ours))
    assert run([sys.executable, "-m", "dit.convert", "import", *words]).returncode == 0
    start = (f"checkpoint.load={ours}", "checkpoint.finetune=true", "train.train_iters=2")
    stages = "model.pipeline_model_parallel_size=2"
    tuned = tmp_path / "tuned"
    done = pretrain(tuned, *MOCK, *start, stages, nproc=2, config="dit_debug.yaml")
    assert f"starting at step 0 from the weights of {ours}" in done.stdout
    # The first step sees the averages of the run that was exported.
    averaged = ("checkpoint.finetune_weights=ema", f"checkpoint.load={folder}", *start[1:])
    other = tmp_path / "other"
    assert _train(enter, other, *averaged, "checkpoint.also_save_hf=false").code == 0
    (one, _), (two, _) = metrics(tuned), metrics(other)
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)


def _train(enter: Enter, folder: Path, *arguments: object):
    conf = ("--config-file", ROOT / "conf/dit_debug.yaml", *SMALL, *EXPORTING)
    return enter("pretrain_dit", *conf, f"checkpoint.save={folder}", *arguments)


@pytest.mark.slow
def test_a_run_made_again_replaces_its_exports(enter: Enter, tmp_path):
    folder = tmp_path / "run"
    assert _train(enter, folder, "train.train_iters=4").code == 0
    shutil.rmtree(folder / "checkpoints" / "step_00000004")
    (folder / "checkpoints" / "LATEST").write_text("step_00000002")
    done = _train(enter, folder, "train.train_iters=4", "checkpoint.async_save=true")
    assert done.code == 0 and "exported to" in done.said
    exports = sorted(path.name for path in (folder / "diffusers").iterdir())
    assert exports == ["step_00000002", "step_00000004"]


def test_what_cannot_be_exported_is_said_before_training(enter: Enter, tmp_path):
    error = _train(enter, tmp_path / "run", "model.base_fps=30").error()
    assert "model.base_fps=30" in error and not (tmp_path / "run").exists()
    assert "checkpoint.save" in _train(enter, tmp_path / "run", "~checkpoint.save").error()


@pytest.mark.slow
def test_an_import_is_no_run_to_go_on_with(enter: Enter, tmp_path):
    done = _train(enter, tmp_path / "run", "train.train_iters=2", "ema.kind=none")
    assert done.code == 0, done.said
    words = ("--hf-path", str(tmp_path / "run/diffusers/step_00000002"))
    words += ("--megatron-path", str(ours := tmp_path / "ours"))
    assert run([sys.executable, "-m", "dit.convert", "import", *words]).returncode == 0
    error = _train(enter, tmp_path / "new", f"checkpoint.load={ours}").error()
    assert "checkpoint.finetune=true" in error
    start = (f"checkpoint.load={ours}", "checkpoint.finetune=true", "train.train_iters=2")
    assert _train(enter, tmp_path / "new", *start).code == 0
    error = _train(enter, tmp_path / "b", *start, "model.text_pad_to=20").error()
    assert "model.text_pad_to" in error  # what the weights attended to is a part of the model

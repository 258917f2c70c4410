"""Every file of conf/ that tunes published weights, on folders whose scheduler has other values.

What scheduler_config.json says holds, whatever `model.name` of the file implies; what a person
sets holds over it, and the start says both.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from dit.config import ModelConfig, RunConfig
from dit.config_loading import ConfigError, load_config
from dit.config_loading.schema import hints
from dit.convert.diffusers_checkpoint import OUR_KEY
from dit.convert.diffusers_config import diffusers_transformer_config
from dit.convert.errors import ConvertError
from dit.convert.load_hf.start import hf_start
from dit.models.registry import family_of, named_model, pairs
from dit.objectives.diffusers_schedulers import EdmScheduler, FlowScheduler, UnipcScheduler
from dit.train import trainer
from recipes.pretrain_dit import main
from recipes.runs import dit_xl, for_weights, read_folder

CONF = Path(__file__).resolve().parents[3] / "conf"
KINDS = ("*_lora.yaml", "*_iclora.yaml", "*_finetune.yaml")
FILES = sorted(path.stem for kind in KINDS for path in CONF.glob(kind))
TUNING = [name for name in FILES if name != "dit_digits_lora"]  # of a checkpoint of ours
STATED = {*FlowScheduler.states, *UnipcScheduler.states, *EdmScheduler.states}
FLOW = "FlowMatchEulerDiscreteScheduler"
UNIPC = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "constant": {"_class_name": FLOW, "shift": 2.5},  # ports of Chroma1-HD have one
    "by tokens": {
        "_class_name": FLOW,
        "shift": 1.0,
        "use_dynamic_shifting": True,
        "time_shift_type": "linear",
        **{"base_shift": 0.7, "max_shift": 1.9, "base_image_seq_len": 100},
        **{"max_image_seq_len": 5000, "shift_terminal": 0.05},
    },
    "beta": {"_class_name": FLOW, "shift": 2.0, "use_beta_sigmas": True},  # as Chroma1-Base
    "unipc": {"_class_name": "UniPCMultistepScheduler", "flow_shift": 4.0, **UNIPC},
}
WANTED: dict[str, dict[str, Any]] = {
    "constant": {"flow_shift": 2.5, "time_shift_type": None, "shift_terminal": None},
    "by tokens": {
        **{"flow_shift": 1.0, "time_shift_type": "linear", "base_shift": 0.7, "max_shift": 1.9},
        **{"base_image_seq_len": 100, "max_image_seq_len": 5000, "shift_terminal": 0.05},
    },
    "beta": {"flow_shift": 2.0, "time_shift_type": None, "level_spacing": "beta"},
    "unipc": {"flow_shift": 4.0, "time_shift_type": None, "sampling_levels": "unipc"},
}
# Levels of LTX are respaced by none of these; Anima is told levels of 0 to 1, not whole numbers.
REFUSED = {
    **dict.fromkeys(
        [("ltx", "by tokens"), ("ltx", "beta")], "and not linear_quadratic; set it to null"
    ),
    ("anima", "unipc"): "unipc gives the network whole timesteps up to 1000, and timestep_scale=1",
}
"""Family of a file, and scheduler -> what is said."""

POSITIONS = {name: ["model.frame_positions=causal"] for name in TUNING if name.startswith("ltx_")}
BESIDE = POSITIONS | {
    name: ["model.text_connectors=stored"] for name in TUNING if name.startswith("ltx2_")
}
"""What no folder of a transformer alone tells, or has."""

FIXED = ("mlp_ratio", "glyph_hidden_size")
"""What Diffusers has in code, as the named sizes have it."""


def folder_of(place: Path, model: ModelConfig, scheduler: str | None, *, whole: bool) -> Path:
    """A folder as Diffusers writes it; unless `whole`, its one tensor is none of the network's."""
    place.mkdir(parents=True)
    config = diffusers_transformer_config(RunConfig(model=model))
    del config[OUR_KEY]
    (place / "config.json").write_text(json.dumps(config))
    tensors = {"x": torch.zeros(1)}
    if whole:
        rng = torch.Generator().manual_seed(1)
        shapes = {n: shape for pair in pairs(model) for n, shape in pair.their_shapes.items()}
        tensors = {n: 0.1 * torch.randn(shape, generator=rng) for n, shape in shapes.items()}
    save_file(tensors, place / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    if scheduler is not None:
        (place / "scheduler_config.json").write_text(json.dumps(SCHEDULERS[scheduler]))
    return place


def run_of(name: str, folder: Path, *words: str) -> RunConfig:
    overrides = [f"checkpoint.load_hf={folder}", "dataset.mock=true", *words]
    overrides += BESIDE.get(name, [])
    return load_config(
        dit_xl(), config_file=CONF / f"{name}.yaml", overrides=overrides, adapt=for_weights
    )


def size_of(name: str) -> str:
    return yaml.safe_load((CONF / f"{name}.yaml").read_text())["model"]["name"]


def said(config: RunConfig, keys: dict[str, Any]) -> dict[str, Any]:
    return {key: getattr(config.objective, key) for key in keys}


@pytest.mark.parametrize("name", TUNING)
def test_no_file_states_what_a_scheduler_states(name: str) -> None:
    keys = yaml.safe_load((CONF / f"{name}.yaml").read_text()).get("objective") or {}
    assert not keys.keys() & STATED


@pytest.mark.parametrize("name", TUNING)
def test_the_folder_holds_over_what_the_size_implies(name: str, tmp_path: Path) -> None:
    model = named_model(size_of(name))
    for scheduler, wanted in WANTED.items():
        folder = folder_of(tmp_path / scheduler, model, scheduler, whole=False)
        if (wrong := REFUSED.get((name.partition("_")[0], scheduler))) is not None:
            with pytest.raises(ConfigError, match=wrong):
                run_of(name, folder)
            continue
        config = run_of(name, folder)
        assert said(config, wanted) == wanted, scheduler
    # A person's key holds over the folder; without a scheduler the size decides as without folder.
    config = run_of(name, tmp_path / "constant", "objective.flow_shift=9")
    assert config.objective.flow_shift == 9
    bare = run_of(name, folder_of(tmp_path / "bare", model, None, whole=False))
    alone = load_config(
        dit_xl(),
        config_file=CONF / f"{name}.yaml",
        overrides=["dataset.mock=true", "checkpoint.load_hf=null"],
    )
    assert bare.objective == alone.objective


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_of_ltx_are_those_of_the_pipeline(name: str, tmp_path: Path, monkeypatch) -> None:
    folder = folder_of(tmp_path / "transformer", named_model(size_of(name)), None, whole=False)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "LTXPipeline"}))
    monkeypatch.delitem(BESIDE, name)
    with pytest.raises(ConvertError, match=r"does not determine model\.frame_positions"):
        run_of(name, folder)
    for size in ("model.name=ltxv_2b", "model.name=ltxv_13b"):
        assert run_of(name, tmp_path, size).model.frame_positions == "even"  # type: ignore


def tiny_run(name: str, place: Path, scheduler: str) -> list[str]:
    """Words that start the file on a tiny network of its family, in a folder that is made."""
    named = named_model(size_of(name))
    family = family_of(named)
    fixed = {key: getattr(named, key) for key in FIXED if key in hints(family.config)}
    tiny = [
        family.config(name=size, **{**family.sizes[size], **keys, **fixed})
        for size, keys in family.tiny.items()
    ]
    model = next(one for one in tiny if family.guidance(one) == family.guidance(named))
    folder = folder_of(place, model, scheduler, whole=True)
    geometry = "dataset.mock_samples=[{frames: 1, height: 4, width: 6, text_length: 3}]"
    words = ["model.name=custom", "model.precision=fp32", "model.recompute_granularity=none"]
    words += ["model.tensor_model_parallel_size=1", "model.sequence_parallel=false", geometry]
    words += ["dataset.task_encoder_seq_length=256", "train.global_batch_size=1"]
    words += ["checkpoint.save=null", "checkpoint.also_save_hf=false", "train.eval_interval=0"]
    words += BESIDE.get(name, [])
    return [f"checkpoint.load_hf={folder}", "dataset.mock=true", *words]


@pytest.mark.parametrize("name", TUNING)
def test_a_dry_run_says_what_holds(name: str, tmp_path: Path, capsys) -> None:
    words = tiny_run(name, tmp_path / "hf", "beta")
    words = [f"--config-file={CONF / name}.yaml", *words, "--dry-run"]
    assert main([*words, "objective.flow_shift=7"]) == 0
    out = capsys.readouterr().out
    assert f"other than {tmp_path / 'hf'} says: objective.flow_shift=7.0 here and 2.0 there" in out
    assert "use_beta_sigmas spaces the levels of samplers" in out
    assert yaml.safe_load(out)["objective"]["level_spacing"] == "beta"
    assert main(words) == 0
    assert "other than" not in capsys.readouterr().out.replace("model.", "")


def test_a_step_on_a_port_of_chroma(groups, tmp_path: Path) -> None:
    words = tiny_run("chroma_lora", tmp_path / "hf", "constant")
    config = load_config(
        dit_xl(), config_file=CONF / "chroma_lora.yaml", overrides=words, adapt=for_weights
    )
    (values,) = trainer.measure_steps(
        config, warm_up=0, steps=1, around=nullcontext(), read_folder=read_folder
    )
    assert 0 < values["loss"] < 100
    start = hf_start(config)
    assert start is not None and "objective of FlowMatchEulerDiscreteScheduler" in start.notes

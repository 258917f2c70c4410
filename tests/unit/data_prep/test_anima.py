"""Texts of Anima are its pipeline's, and levels of its samplers; adapters are those it loads."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.condition_embedders.condition_embedder_anima import AnimaTextConditioner
from diffusers.modular_pipelines.anima.before_denoise import AnimaTextConditioningStep
from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep
from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from transformers import AutoTokenizer, Qwen3Model

from dit.codecs import text, vae
from dit.config_loading import ConfigError, load_config
from dit.convert.diffusers_config import objective_config
from dit.convert.pipeline import copy_components
from dit.objectives.registry import sampling_path
from recipes.runs import dit_debug
from tests.families import pipeline_parts
from tests.families.dit import random_model

CAPTIONS = ["a red bird on a roof", "", "x" * 600]


def test_texts_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """A row of the conditioner for each token of T5, of its end alone for the empty caption."""
    folder = pipeline_parts.anima(tmp_path)
    given = {"model_name": str(folder), "precision": "float32", "max_sequence_length": None}
    given |= {"t5_cache_dir": None, "tokenizer_cache_dir": None}
    ours: Any = text.text_encoder_named("anima").from_arguments(Namespace(**given))
    assert (ours.width, ours.max_length) == (20, 512)
    steps = {"texts": AnimaTextEncoderStep(), "conditioning": AnimaTextConditioningStep()}
    pipe: Any = SequentialPipelineBlocks.from_blocks_dict(steps).init_pipeline()
    where: Any = {"pretrained_model_name_or_path": folder}
    pipe.update_components(
        text_encoder=Qwen3Model.from_pretrained(**where, subfolder="text_encoder").eval(),
        tokenizer=AutoTokenizer.from_pretrained(**where, subfolder="tokenizer"),
        t5_tokenizer=AutoTokenizer.from_pretrained(**where, subfolder="t5_tokenizer"),
        text_conditioner=AnimaTextConditioner.from_pretrained(
            **where, subfolder="text_conditioner"
        ),
        transformer=random_model(num_layers=1),  # whose type the texts get
    )
    names = ["prompt_embeds", "negative_prompt_embeds"]
    for caption in CAPTIONS:
        made = pipe(prompt=caption, negative_prompt=caption, output=names)
        own = ours.encode(caption)
        assert len(own) == min(ours.count(caption), 512) == min(len(caption) + 1, 512)
        for name, found in zip(names, (own, ours.encode_negative(caption)["text"]), strict=True):
            (rows,) = made[name]
            assert len(rows) == 512 and not rows[len(own) :].any()  # model.text_pad_to
            assert torch.equal(found, rows[: len(own)].bfloat16()) and found.any(-1).all()
        assert ours.is_cut(caption) == (caption == CAPTIONS[2])
    card = {"format_version": 1, "text_encoder": ours.settings}
    assert text.text_encoder_of_card(card) == ours
    assert vae.codec_named("anima").text_encoder == "anima"


@pytest.mark.parametrize("num_steps", [1, 4, 30])
@pytest.mark.parametrize("tokens", [1024, 4096, 7000])
def test_levels_are_those_of_the_pipeline(num_steps: int, tokens: int) -> None:
    words = ["model.name=anima", "dataset.task_encoder_seq_length=2048"]
    objective = load_config(dit_debug(), overrides=words).objective
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps))
    found = sampling_path(objective).schedule([tokens], num_steps=num_steps)[:, 0]
    torch.testing.assert_close(found.float(), scheduler.sigmas, rtol=1e-6, atol=1e-7)
    # The loop divides what its scheduler calls a timestep.
    told = scheduler.timesteps / scheduler.config["num_train_timesteps"]
    torch.testing.assert_close(told, found[:-1].float() * objective.timestep_scale)


def test_a_transformer_alone_has_the_objective_of_the_published_one() -> None:
    """Where a user says that its texts are the conditioner's, which no config.json tells."""
    named = load_config(dit_debug(), overrides=["model.name=anima"])
    found = objective_config(None, place="", model=named.model)
    assert found.objective == named.objective and found.note == "of AnimaModularPipeline"
    cosmos = load_config(dit_debug(), overrides=["model.name=cosmos_predict2_2b"]).model
    assert "the default, since" in objective_config(None, place="", model=cosmos).note


def test_an_export_shifts_levels_as_the_run(tmp_path: Path) -> None:
    """All else of the scheduler is the folder's, as its pipeline needs it."""
    pipeline, words = tmp_path / "pipeline", ["model.name=anima", "objective.flow_shift=5"]
    place = pipeline / "scheduler/scheduler_config.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps({"_class_name": "A", "shift": 3.0}))
    about = {"_class_name": "AnimaModularPipeline", "scheduler": ["diffusers", "A", {}]}
    (pipeline / "modular_model_index.json").write_text(json.dumps(about))
    (tmp_path / "out").mkdir()
    config = load_config(dit_debug(), overrides=words)
    copy_components(pipeline, tmp_path / "out", config, scheduler=None)
    made = json.loads((tmp_path / "out/scheduler/scheduler_config.json").read_text())
    assert made == {"_class_name": "A", "shift": 5.0}


def test_texts_of_two_networks_are_refused() -> None:
    words = ["model.name=anima", "model.crossattn_proj_size=1024"]
    with pytest.raises(ConfigError, match=r"text_conditioner=stored and crossattn_proj_size=1024"):
        load_config(dit_debug(), overrides=words)

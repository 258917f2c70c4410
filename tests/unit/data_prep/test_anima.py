"""Texts of Anima are its pipeline's, and levels of its samplers; adapters are those it loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

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

from dit.config_loading import ConfigError, load_config
from dit.convert.diffusers_config import objective_config
from dit.convert.pipeline import copy_components
from dit.data.cook import Expected, cook
from dit.data.mock import mock_record
from dit.data.preflight import card_faults
from dit.data.rejections import SampleRefused
from dit.models.registry import family_of
from dit.token_ids import TOKEN_IDS, as_ids
from recipes.runs import dit_debug
from tests.families import encoding, pipeline_parts
from tests.families.case import gap
from tests.families.dit import random_model

CAPTIONS = ["a red bird on a roof", "", "x" * 600]


def test_texts_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """A row of the conditioner for each token of T5, of its end alone for the empty caption."""
    folder = pipeline_parts.anima(tmp_path)
    ours = encoding.encoder("anima", folder)
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
    read = encoding.encoder("anima_states", folder)
    assert read.width == 16
    encoding.check_card(read)
    for caption in CAPTIONS[:2]:
        found = read.encode_all(caption)
        rows_1LE = pipe.text_conditioner(
            found["text"][None].float(), as_ids(found[TOKEN_IDS])[None]
        )
        own = ours.encode(caption)
        assert gap(rows_1LE[0, : len(own)].detach(), own.float()) <= 0.05  # bfloat16
    encoding.check_card(ours)


def test_the_network_is_told_timesteps_divided_as_the_pipeline_divides_them() -> None:
    words = ["model.name=anima", "dataset.task_encoder_seq_length=2048"]
    objective = load_config(dit_debug(), overrides=words).objective
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(30)
    told = scheduler.timesteps / scheduler.config["num_train_timesteps"]
    torch.testing.assert_close(told, scheduler.sigmas[:-1] * objective.timestep_scale)


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


@pytest.mark.parametrize(("key", "other"), [("stored", "anima_states"), ("trained", "anima")])
def test_texts_of_the_other_encoder_are_refused(key: str, other: str) -> None:
    """The published ones have the same width."""
    words = ["model.name=anima", f"model.text_conditioner={key}"]
    words += ["dataset.task_encoder_seq_length=2048"]
    config = load_config(dit_debug(), overrides=words)
    card: dict[str, Any] = {"text_encoder": {"name": other, "width": 1024}}
    (fault,) = card_faults(card, config)
    (one, *more) = family_of(config.model).inputs(config.model)
    assert f"pack the data with --processor {one.encoder}" in fault and one.encoder != other
    assert not [*card_faults({"text_encoder": {"name": one.encoder, "width": 1024}}, config)]
    assert [two.name for two in more] == [TOKEN_IDS] * (key == "trained")


def test_numbers_of_unknown_tokens_are_refused() -> None:
    words = ["model.name=custom", "model.text_conditioner=trained"]
    words += ["model.conditioner_vocabulary=700"]
    config = load_config(dit_debug(), overrides=words)
    parts, expected = mock_record(config, seed=1, index=0), Expected.of_training(config)
    ids_L = as_ids(cook(parts, expected, key="").others[TOKEN_IDS])
    known = replace(config.model, conditioner_vocabulary=int(ids_L.max()) + 1)
    assert cook(parts, Expected.of_training(replace(config, model=known)), key="")
    fewer = replace(config.model, conditioner_vocabulary=int(ids_L.max()))
    with pytest.raises(
        SampleRefused, match=r"`token_ids` has token ids that are not whole numbers from 0 to"
    ):
        cook(parts, Expected.of_training(replace(config, model=fewer)), key="")
    plain = mock_record(load_config(dit_debug(), overrides=[]), seed=1, index=0)
    with pytest.raises(SampleRefused, match=r"no `token_ids`.* --processor anima_states. makes"):
        cook(plain, expected, key="")


def test_texts_of_two_networks_are_refused() -> None:
    words = ["model.name=anima", "model.crossattn_proj_size=1024"]
    with pytest.raises(ConfigError, match=r"text_conditioner=stored and crossattn_proj_size=1024"):
        load_config(dit_debug(), overrides=words)

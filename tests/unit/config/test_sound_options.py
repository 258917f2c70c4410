"""Options of sound, and what networks of two streams do not take: refused by name at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from dit.config_loading import ConfigError, load_config
from dit.train.opening.checks import check_settings
from recipes.runs import dit_debug

DEBUG = Path(__file__).parents[3] / "conf/sound_dit_debug.yaml"


@pytest.mark.parametrize(
    "words",
    [
        "objective.preference=dpo lora.rank=4",
        "objective.cfg_target=3",
        "objective.drift_weight=0.1 lora.rank=4",
        "objective.second_level_rate=0.25",
        "objective.name=edm",
        "distill.method=opd distill.teacher=runs/teacher",
        "validation.fixed_levels=true",
        "lora.streams=video",
        "model.cp_comm_type=p2p model.context_parallel_size=2",
        "model.sound_attention_heads=6 model.tensor_model_parallel_size=4",
        "objective.sound_given=0.6 objective.video_given=0.6",
        "model.text_pad_to=16",
    ],
)
def test_what_takes_one_stream_alone_is_refused_by_name(words: str) -> None:
    key = words.partition("=")[0].rpartition(".")[2]
    with pytest.raises(ConfigError, match=key):
        load_config(dit_debug(), config_file=DEBUG, overrides=words.split())


@pytest.mark.parametrize(
    "setting", ["sound_levels=same", "sound_weight=2.0", "video_given=0.1", "sound_prefix=0.5"]
)
def test_networks_without_sound_take_none_of_its_options(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"objective\.{setting}.*has no sound"):
        load_config(dit_debug(), overrides=["objective.name=flow", f"objective.{setting}"])


def test_networks_without_sound_have_no_streams_to_choose() -> None:
    with pytest.raises(ConfigError, match=r"lora\.streams=video.*has no sound"):
        load_config(dit_debug(), overrides=["lora.rank=4", "lora.streams=video"])


@pytest.mark.parametrize(
    "words",
    [
        ["lora.rank=4", "lora.streams=sound", "lora.dropout=0.1"],
        ["optimizer.kind=muon"],
        ["optimizer.groups=[{pattern: 'blocks.*.sound_attention.*', lr: 1e-4}]"],
        ["model.route_from=1", "model.route_to=2"],
    ],
)
def test_what_both_streams_take(words: list[str]) -> None:
    config = load_config(dit_debug(), config_file=DEBUG, overrides=words)
    check_settings(config)


def test_frames_at_the_beginning_may_be_given() -> None:
    words = ["objective.given_frames=[1, 1]", "objective.sound_levels=same"]
    config = load_config(dit_debug(), config_file=DEBUG, overrides=words)
    assert config.objective.given_frames == (1, 1) and config.objective.gives_sound

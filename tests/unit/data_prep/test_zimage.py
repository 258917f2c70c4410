"""Texts of Z-Image are its pipeline's; levels of its samplers, too; what runs on it are told."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from transformers import AutoTokenizer, Qwen3Model

from dit.codecs import text, vae
from dit.config_loading import ConfigError, load_config
from dit.objectives.registry import sampling_path
from recipes.runs import dit_debug
from tests.families import pipeline_parts

CAPTIONS = ["a red bird on a roof", "", "x" * 600]


def test_texts_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """All of them are a chat whose answer has begun, the empty caption, too."""
    folder = pipeline_parts.zimage(tmp_path)
    given = {"model_name": str(folder), "precision": "float32", "max_sequence_length": None}
    given |= {"t5_cache_dir": None, "tokenizer_cache_dir": None}
    ours = text.text_encoder_named("zimage").from_arguments(Namespace(**given))
    assert (ours.width, ours.max_length) == (16, 512)
    network = Qwen3Model.from_pretrained(folder, subfolder="text_encoder").eval()
    letters = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
    pipe = ZImagePipeline(None, None, network, letters, None)  # type: ignore[arg-type]
    for caption in CAPTIONS:
        with torch.no_grad():
            (rows,), (null,) = pipe.encode_prompt(caption, negative_prompt=caption)
        own = ours.encode(caption)
        assert torch.equal(own, rows.bfloat16()) and len(own)
        assert torch.equal(ours.encode_negative(caption)["text"], null.bfloat16())
        assert min(ours.count(caption), 512) == len(own)
        assert ours.is_cut(caption) == (caption == CAPTIONS[2])
    card = {"format_version": 1, "text_encoder": ours.settings}
    assert text.text_encoder_of_card(card) == ours
    assert vae.codec_named("zimage").text_encoder == "zimage"


@pytest.mark.parametrize("num_steps", [1, 8, 30])
@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
def test_levels_are_those_of_the_pipeline(num_steps: int, tokens: int) -> None:
    for name, shift in (("zimage", 6.0), ("zimage_turbo", 3.0)):
        words = [f"model.name={name}", "dataset.task_encoder_seq_length=2048"]
        path = sampling_path(load_config(dit_debug(), overrides=words).objective)
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps))
        found = path.schedule([tokens], num_steps=num_steps)[:, 0]
        torch.testing.assert_close(found.float(), scheduler.sigmas, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["zimage_omni", "zimage_edit"])
def test_other_networks_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.name={name} is not .* SigLIP"):
        load_config(dit_debug(), overrides=[f"model.name={name}"])

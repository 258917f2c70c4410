"""Anima in Diffusers: its modular pipeline with tiny random parts, and what it makes of a noise."""

# L text tokens, C channels, H rows, W columns

from __future__ import annotations

from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch
from diffusers.guiders.classifier_free_guidance import ClassifierFreeGuidance
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.condition_embedders.condition_embedder_anima import AnimaTextConditioner
from diffusers.models.transformers import transformer_cosmos
from diffusers.modular_pipelines.anima.modular_blocks_anima import (
    AnimaAutoBlocks,
    AnimaCoreDenoiseStep,
)
from diffusers.modular_pipelines.anima.modular_pipeline import AnimaModularPipeline
from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Model

from tests.families import case, pipeline_parts
from tests.families.dit import NETWORKS, NearestResize, random_model

SHIFT = 2.5
ROWS = 512
"""Of a text, with zeros."""
CONDITIONER: dict[str, Any] = {
    **{"source_dim": 16, "target_dim": 20, "model_dim": 24, "num_layers": 2},
    **{"num_attention_heads": 2, "target_vocab_size": 700, "min_sequence_length": 12},
}


def random_conditioner(**changes: Any) -> Any:
    """A tiny one with random weights, in float32."""
    conditioner = AnimaTextConditioner(**(CONDITIONER | changes))
    case.fill_random(conditioner, seed=1)
    return conditioner


class Whole:
    """A modular pipeline with all of its parts, opened as other pipelines are."""

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.scheduler, self.transformer = pipe.scheduler, pipe.transformer

    @classmethod
    def from_pretrained(cls, folder: Path, torch_dtype: torch.dtype) -> Self:
        pipe: Any = AnimaModularPipeline.from_pretrained(str(folder))
        pipe.load_components(torch_dtype=torch_dtype)
        return cls(pipe)


def pipeline(folder: Path) -> Whole:
    """The pipeline with random weights, saved in `folder`/pipeline; texts in bfloat16."""
    parts = pipeline_parts.anima(folder / "parts")
    kinds = {"text_encoder": Qwen3Model, "tokenizer": AutoTokenizer, "t5_tokenizer": AutoTokenizer}
    conditioner: Any = AnimaTextConditioner.from_pretrained(parts / "text_conditioner")
    pipe = AnimaAutoBlocks().init_pipeline()
    pipe.update_components(
        transformer=random_model(**NETWORKS["images"]),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        text_conditioner=conditioner.bfloat16(),
        **case.parts_of(parts, vae=AutoencoderKLQwenImage, **kinds),
    )
    pipe.save_pretrained(str(folder / "pipeline"), overwrite_modular_index=True)
    return Whole(pipe)


def made_by(whole: Whole, noise_CFHW: Tensor, texts: case.Texts, *, guidance: float) -> Tensor:
    """Latent [C, 1, H, W] of the pipeline from `noise_CFHW` and texts as our encoder has them."""
    steps = AnimaCoreDenoiseStep()
    blocks = {name: one for name, one in steps.sub_blocks.items() if name != "text_conditioning"}
    pipe: Any = SequentialPipelineBlocks.from_blocks_dict(blocks).init_pipeline()
    guider = ClassifierFreeGuidance(guidance_scale=guidance)
    pipe.update_components(transformer=whole.transformer, scheduler=whole.scheduler, guider=guider)
    pipe.set_progress_bar_config(disable=True)
    embeds = {
        f"{name}_embeds": torch.nn.functional.pad(rows, (0, 0, 0, ROWS - len(rows)))[None].float()
        for name, rows in ((name, text["text"]) for name, text in texts.items())
    }
    told = {**embeds, **case.sides_of(noise_CFHW, 8), "num_inference_steps": case.STEPS}
    with patch.object(transformer_cosmos, "transforms", NearestResize, create=True):
        return pipe(latents=noise_CFHW[None], **told, output="latents")[0]


def _encoded(whole: Whole, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    from diffusers.modular_pipelines.anima.before_denoise import AnimaTextConditioningStep
    from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep

    steps = {"texts": AnimaTextEncoderStep(), "conditioning": AnimaTextConditioningStep()}
    pipe: Any = SequentialPipelineBlocks.from_blocks_dict(steps).init_pipeline()
    pipe.update_components(**{name: getattr(whole.pipe, name) for name in pipe.component_names})
    made = pipe(
        prompt=case.PROMPT,
        negative_prompt=case.NEGATIVE,
        output=["prompt_embeds", "negative_prompt_embeds"],
    )
    pairs = ((texts[name]["text"], made[f"{name}_embeds"][0]) for name in texts)
    return [(rows, found[: len(rows)]) for rows, found in pairs]


GENERATIONS = {
    "anima": case.Generation(
        pipeline=pipeline,
        made_by=made_by,
        size=(1, 6, 10),
        objective={
            **{"name": "flow", "sampling_levels": "even", "flow_shift": SHIFT},
            "timestep_scale": 1.0,
        },
        encoded=_encoded,
        calls=[({"guidance": scale}, {"guidance": scale}) for scale in (4.0, 1.0, 2.5)],
        slow=False,
    )
}

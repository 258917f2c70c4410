"""FLUX.3 klein in Diffusers: tiny random networks, and what they make of a noise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from diffusers.guiders.classifier_free_guidance import ClassifierFreeGuidance
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.transformers.transformer_flux3 import Flux3Transformer2DModel
from diffusers.modular_pipelines.flux3.before_denoise import (
    Flux3TextRoPEInputsStep,
    _prepare_image_ids,
)
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep
from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import (
    Flux3AutoBlocks,
    Flux3CoreDenoiseStep,
    Flux3ImageConditionedCoreDenoiseStep,
)
from diffusers.modular_pipelines.flux3.modular_blocks_flux3_distilled import (
    Flux3DistilledAutoBlocks,
    Flux3DistilledCoreDenoiseStep,
    Flux3DistilledImageConditionedCoreDenoiseStep,
)
from diffusers.modular_pipelines.modular_pipeline import ModularPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from dit.batch import PackedBatch, StepEnd
from dit.config import ModelConfig
from tests.families import case
from tests.families.flux2_parts import QWEN3_CHAT, chat_tokenizer, flux2_vae, qwen3_vl
from tests.families.pipeline_parts import randomized, save
from tests.packs import random_pack

TINY = {
    "in_channels": 16,
    "cond_in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "axes_dims_rope": (2, 4, 4, 2),
}
"""Keys of a tiny config.json."""
AXES = [(4, 4, 4, 4), (2, 6, 4, 8), (2, 2, 4, 2), (8, 4, 2, 2), (16, 6, 8, 2)]
HALF = 0.5
"""Step of rows and columns."""
SHIFT = 6.93
"""Shift of the noise levels, a constant of the pipelines."""
STRIDE = 16
"""Pixels of a latent cell, as the steps without a VAE count them."""


def _configuration(number: int) -> dict[str, Any]:
    """A random config.json for each `number`; every third one is a flow map."""
    draw = random.Random(number)
    rope, channels = AXES[number % len(AXES)], draw.choice([3, 8, 16])
    return {
        "num_attention_heads": draw.choice([1, 2, 3, 5]),
        "attention_head_dim": sum(rope),
        "axes_dims_rope": rope,
        "mlp_ratio": draw.choice([1.0, 2.0, 3.0]),
        "in_channels": channels,
        "cond_in_channels": channels,
        "joint_attention_dim": draw.choice([8, 20]),
        "flow_map": number % 3 == 1,
        "num_layers": draw.choice([1, 2]),
        "num_single_layers": draw.choice([1, 2, 3]),
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Pictures of unequal odd sides, captions of a row or more, two samples with references."""
    draw, references = random.Random(number), (2, 0, 3, 1)[number % 4]
    grids = [(1, draw.randint(1, 5), draw.randint(1, 5)) for _ in range(4)] + [(1, 5, 3)]
    texts = ([7, 1, 12, 3, 20], [1, 1, 5, 2, 1])[number % 2]
    packed: Any = replace(model, reference_latents=references)  # type: ignore[call-arg]
    batch = random_pack(grids, texts, model=packed)
    assert [len(r) for r in batch.references] == [0, references, 0, references, 0]
    return batch


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """Rows and positions of tokens are those of the modular pipeline."""
    start, (_, height, width) = batch.starts[index], batch.grids[index]
    own = height * width
    text, inputs = case.text_of(batch, index), dict[str, Any]()
    end = start + own
    if references := batch.references[index]:
        sizes = [rows * columns for _, rows, columns in references]
        ids = [
            _prepare_image_ids(rows, columns, HALF, l_coord=-1 - number)
            for number, (_, rows, columns) in enumerate(references)
        ]
        inputs["image_cond_hidden_states"] = batch.latent_TC[end : end + sum(sizes)][None]
        inputs["image_cond_ids"] = torch.cat(ids)
    if model.flow_map:
        ends = batch.method(StepEnd)
        told = level if ends is None else float(ends.level_N[index])
        inputs["target_timestep"] = torch.tensor([told / 1000])
    made = network(
        batch.latent_TC[start:end][None],
        encoder_hidden_states=text,
        timestep=torch.tensor([level / 1000]),
        img_ids=_prepare_image_ids(height, width, HALF),
        txt_ids=Flux3TextRoPEInputsStep._prepare_text_ids(text),
        **inputs,
    ).sample
    return made[0]


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    tokens = frames * rows * columns
    return {
        "hidden_states": torch.zeros(1, tokens, model.patch_features),
        "encoder_hidden_states": torch.zeros(1, case.COUNTED_TEXT, model.crossattn_emb_size),
        "img_ids": torch.zeros(tokens, 4),
        "txt_ids": torch.zeros(case.COUNTED_TEXT, 4),
        "target_timestep": torch.zeros(1) if model.flow_map else None,
    }


def _repeated(model: Any) -> int:
    """Modulations that Diffusers computes for each token, of one embedding for all of a kind."""
    frames, rows, columns = case.COUNTED
    vectors = 8 * (frames * rows * columns - 1) + 6 * (case.COUNTED_TEXT - 1)
    return 2 * vectors * model.hidden_size**2


def _unread(_: Any, name: str, batch: PackedBatch) -> bool:
    """What sees references alone, where no sample has any."""
    return "image_cond" in name and not any(batch.references)


def _their_operations(model: Any, tokens: int, _: int) -> int:
    """It embeds no pictures as references that are none, as ours does with their level."""
    return -2 * model.hidden_size * (tokens * model.patch_features + 6 * model.hidden_size)


CASE = case.Case(
    network=Flux3Transformer2DModel,
    tiny=TINY,
    parameters={"flux3_klein_base": 5_538_458_368, "flux3_klein": 5_548_681_984},
    configuration=_configuration,
    cases=12,
    quick=3,
    pack=_pack,
    theirs=_theirs,
    compares_given=False,
    unread=_unread,
    adapted_by={"flux3": (Flux3AutoBlocks, {})},
    unread_comfyui=True,
    published_levels=dict.fromkeys(
        ("flux3_klein_base", "flux3_klein"), case.levels_of(shift=SHIFT)
    ),
    page=case.Page(
        model="FLUX.3-klein-base",
        keys=("model.num_layers=2", "model.num_single_layers=2"),
        edits=True,
    ),
    their_operations=_their_operations,
    counted=[("flux3_klein_base", {}), ("flux3_klein", {})],
    arguments=_arguments,
    repeated=_repeated,
    refused=[
        ({"rope_axes": (4, 4, 2, 2)}, "must add up to 128, .*hidden_size=3072 .* sum is 12"),
        ({"rope_axes": (3, 5, 4, 2)}, "must be even"),
        ({"reference_latents": 11}, "reference_latents=11 must be at most 10"),
        ({"reference_latents": -1}, "must not be negative"),
        ({"num_single_layers": 0}, "num_single_layers=0 must be at least 1"),
        (
            {"route_from": 14, "route_to": 20},
            "=14 must be 15 or more: the first 15 layers",
        ),
    ],
    training=("model.reference_latents=2",),
    comfyui=True,
    adapted=(
        *("linear_in", "linear_out", "norm_out.linear", "x_embedders.image_cond"),
        *("early_stream_modulations.txt.linear", "single_stream_modulations.image_cond.linear"),
    ),
)
random_flux3 = CASE.random


class Whole:
    """A modular pipeline with its network and scheduler, opened as other pipelines are."""

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.scheduler, self.transformer = pipe.scheduler, pipe.transformer

    @classmethod
    def from_pretrained(cls, folder: Path, torch_dtype: torch.dtype) -> Self:
        pipe: Any = ModularPipeline.from_pretrained(str(folder))
        pipe.load_components(["transformer", "scheduler"], torch_dtype=torch_dtype)
        return cls(pipe)


def encoders(root: Path) -> Path:
    """Encoders of FLUX.3 klein: FLUX.2's VAE, and Qwen3-VL with 33 layers and a tokenizer alone."""
    network = Qwen3VLForConditionalGeneration(qwen3_vl(layers=33))
    parts = {"text_encoder": randomized(network), "vae": flux2_vae()}
    return save(root, parts | {"tokenizer": chat_tokenizer(QWEN3_CHAT, "right")})


def pipeline(folder: Path, *, flow_map: bool = False) -> Whole:
    """The pipeline with random weights, saved in `folder`/pipeline; texts in bfloat16."""
    blocks = Flux3DistilledAutoBlocks if flow_map else Flux3AutoBlocks
    kinds: dict[str, Any] = {"tokenizer": AutoTokenizer, "vae": AutoencoderKLFlux2}
    kinds["text_encoder"] = Qwen3VLForConditionalGeneration
    pipe: Any = blocks().init_pipeline()
    pipe.update_components(
        transformer=random_flux3(joint_attention_dim=128, flow_map=flow_map),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        **case.parts_of(encoders(folder / "parts"), **kinds),
    )
    pipe.save_pretrained(str(folder / "pipeline"), overwrite_modular_index=True)
    return Whole(pipe)


def made_by(
    whole: Whole,
    noise_CFHW: Tensor,
    texts: case.Texts,
    *,
    guidance: float = 1.0,
    steps: int = case.STEPS,
    references: Sequence[Tensor] = (),
) -> Tensor:
    """Latent [C, 1, H, W] of the pipeline from `noise_CFHW` and texts as our encoder has them."""
    flow_map = whole.transformer.config.flow_map
    kinds = (Flux3CoreDenoiseStep, Flux3ImageConditionedCoreDenoiseStep)
    if flow_map:
        kinds = (Flux3DistilledCoreDenoiseStep, Flux3DistilledImageConditionedCoreDenoiseStep)
    pipe: Any = kinds[bool(references)]().init_pipeline()
    guider = {} if flow_map else {"guider": ClassifierFreeGuidance(guidance_scale=guidance)}
    parts = {"transformer": whole.transformer, "scheduler": whole.scheduler}
    pipe.update_components(**parts, **guider)
    pipe.set_progress_bar_config(disable=True)
    told: dict[str, Any] = {
        f"{name}_embeds": text["text"][None].float()
        for name, text in texts.items()
        if name == "prompt" or not flow_map
    }
    told |= {"image_cond_latents": [one[:, 0][None] for one in references]} if references else {}
    told |= {**case.sides_of(noise_CFHW, STRIDE), "num_inference_steps": steps}
    return pipe(latents=noise_CFHW[:, 0][None], **told, output="latents")[0][:, None]


def _encoded(whole: Whole, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    letters, network = whole.pipe.tokenizer, whole.pipe.text_encoder
    reads: Any = SimpleNamespace(tokenizer=letters, apply_chat_template=letters.apply_chat_template)
    words = {"prompt": case.PROMPT, "negative_prompt": case.NEGATIVE}
    with torch.no_grad():
        made = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds
        return [(texts[n]["text"], made(network, reads, words[n])[0]) for n in texts]


_OBJECTIVE: dict[str, Any] = {"name": "flow", "sampling_levels": "even", "flow_shift": SHIFT}
GENERATIONS = {
    "flux3_klein_base": case.Generation(
        pipeline=pipeline,
        made_by=made_by,
        size=(1, 5, 7),
        channels=16,
        objective=_OBJECTIVE,
        encoded=_encoded,
        calls=[({"guidance": scale}, {"guidance": scale}) for scale in (3.5, 1.0)],
        slow=False,
    ),
    "flux3_klein": case.Generation(
        pipeline=partial(pipeline, flow_map=True),
        made_by=made_by,
        size=(1, 5, 7),
        channels=16,
        objective=_OBJECTIVE,
        encoded=_encoded,
        calls=[({"steps": steps}, {"num_steps": steps}) for steps in (4, 2)],
    ),
}

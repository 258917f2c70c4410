"""Qwen-Image-2.1 in Diffusers: tiny random networks, and what they make of a noise."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import AutoencoderKLQwenImage21
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Transformer2DModel
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import (
    QwenImage21Pipeline,
    calculate_shift,
)
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from tokenizers import processors
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from dit.batch import Grid, PackedBatch
from dit.config import ModelConfig
from tests.families import case, stand_ins
from tests.families.pipeline_parts import IMAGE_TOKEN, qwen_vl_text, randomized, save, tokenizer
from tests.packs import random_pack

TINY = {
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "context_in_dim": 16,
    "mlp_ratio": 2,
    "axes_dims_rope": (4, 4, 8),
}
"""Keys of a tiny config.json."""
SLOT = 4
"""Tokens of a picture for a slot of the text encoder."""


def _configuration(number: int) -> dict[str, Any]:
    """Of config.json; every fourth one tells text and references the level of the sample."""
    draw, channels = random.Random(number), (3, 8, 16)[number % 3]
    return {
        **case.shape_of(number, draw),
        "axes_dims_rope": case.AXES[number % len(case.AXES)],
        "in_channels": channels,
        "out_channels": channels,
        "context_in_dim": draw.choice([8, 20]),
        "mlp_ratio": draw.choice([1, 2, 3]),
        "causal_condition": number % 4 != 2,
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Pictures of unequal sides, texts of a row or more, two samples with references."""
    draw, references = random.Random(number), (2, 0, 3, 1)[number % 4]
    grids = [(1, 2 * draw.randint(1, 3), 2 * draw.randint(1, 3)) for _ in range(4)] + [(1, 6, 2)]
    texts = ([7, 1, 12, 3, 20], [1, 1, 5, 2, 1])[number % 2]
    packed: Any = replace(model, reference_latents=references)  # type: ignore[call-arg]
    batch = random_pack(grids, texts, model=packed)
    assert [len(r) for r in batch.references] == [0, references, 0, references, 0]
    if references > 1:  # the first two of the fourth sample stand side by side
        name = "text_before_1"
        first, *_, a, b, last = batch.text_offsets[name]
        offsets = (*batch.text_offsets[name][:4], a, last - (b - a))
        rows = batch.texts[name]
        batch = batch.with_text(name, torch.cat((rows[:a], rows[b:])), offsets)
        assert first == 0 and offsets[3] == offsets[4]
    return batch


def _sequence(batch: PackedBatch, index: int) -> tuple[Tensor, Tensor, list[tuple[Tensor, Grid]]]:
    """Text with states at slots of pictures [1, L, E], where slots are, and pictures [n, C]."""
    start, grid = batch.starts[index], batch.grids[index]
    end = start + grid[1] * grid[2]
    target, pictures = batch.latent_TC[start:end], list[tuple[Tensor, Grid]]()
    for one in batch.references[index]:
        start, end = end, end + one[1] * one[2]
        pictures.append((batch.latent_TC[start:end], one))
    pictures.append((target, grid))
    names = sorted(name for name in batch.texts if name != "text")
    texts = [case.text_of(batch, index, name)[0] for name in (*names, "text")]
    parts, slots = list[Tensor](), list[bool]()
    for number, text in enumerate(texts):
        parts.append(text)
        slots += [False] * len(text)
        if number < len(pictures) - 1:
            count = len(pictures[number][0]) // SLOT
            parts.append(torch.full((count, text.shape[1]), 3.0))
            slots += [True] * count
    slots += [True] * (len(target) // SLOT)
    return torch.cat(parts)[None], torch.tensor([slots]), pictures


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    text, is_slot, pictures = _sequence(batch, index)
    rows, grids = zip(*pictures, strict=True)
    (made,) = network(
        torch.cat(rows)[None],
        text,
        torch.tensor([level / 1000]),
        [list(grids)],
        is_slot,
        return_dict=False,
    )
    return made[0, -len(rows[-1]) :]


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    tokens, text = frames * rows * columns, case.COUNTED_TEXT
    is_slot = pad(torch.zeros(1, text, dtype=torch.bool), (0, tokens // SLOT), value=True)
    return {
        "hidden_states": torch.zeros(1, tokens, model.patch_features),
        "encoder_hidden_states": torch.zeros(1, text, model.crossattn_emb_size),
        "img_shapes": [[(1, frames * rows, columns)]],
        "img_mask": is_slot,
    }


def _levels(num_steps: int, tokens: int) -> Tensor:
    return case.even_levels(num_steps, use_dynamic_shifting=True, mu=calculate_shift(tokens))


CASE = case.Case(
    network=QwenImage21Transformer2DModel,
    tiny=TINY,
    parameters=dict.fromkeys(("qwen_image21", "qwen_image21_turbo"), 7_115_124_736),
    configuration=_configuration,
    cases=12,
    quick=3,
    pack=_pack,
    theirs=_theirs,
    compares_given=False,
    adapted_by={"qwen_image21": (QwenImage21Pipeline, {})},
    published_levels={"qwen_image21": _levels},
    page=case.Page(model="Qwen-Image-2.1", options={"halvings": 2}),
    their_operations=case.head_of_text,
    counted=[("qwen_image21", {}), ("qwen_image21_turbo", {"mlp_ratio": 2.0})],
    arguments=_arguments,
    refused=[
        ({"rope_axes": (4, 4, 2)}, "must add up to 128, .* sum is 10"),
        ({"rope_axes": (3, 5, 4)}, "must be even"),
        ({"reference_latents": 11}, "reference_latents=11 must be at most 10"),
        ({"patch_temporal": 2}, "Qwen-Image-2.1 is a network of images"),
        ({"text_pad_to": 8}, "must be null: Qwen-Image-2.1 does not attend"),
        (
            {"reference_latents": 1, "route_from": 1, "route_to": 4},
            "route_from=1 must be null.* texts after a reference .* set reference_latents=0",
        ),
    ],
    grids=((1, 4, 6), (1, 2, 4), (1, 4, 2)),
    training=("model.reference_latents=2",),
    comfyui=True,
    adapted=(
        *("gate_layer", "img_mlp.proj", "img_mlp.out", "norm_out.linear", "img_in"),
        *("txt_in.in_layer", "modulation.1", "timestep_embedder.linear_1"),
    ),
)
random_qwen_image21 = CASE.random


class Opened(QwenImage21Pipeline):
    """The pipeline with a stand-in for its processor, whose picture half needs torchvision."""

    @classmethod
    def from_pretrained(cls, folder: Path, *, torch_dtype: torch.dtype) -> Self:  # type: ignore[override]
        kinds: dict[str, Any] = {
            "vae": AutoencoderKLQwenImage21,
            "transformer": QwenImage21Transformer2DModel,
            "text_encoder": Qwen3VLForConditionalGeneration,
        }
        types = {"text_encoder": torch.bfloat16}  # that of shards
        parts = {
            name: kind.from_pretrained(folder / name, torch_dtype=types.get(name, torch_dtype))
            for name, kind in kinds.items()
        }
        letters = AutoTokenizer.from_pretrained(folder / "processor")
        parts["scheduler"] = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
        processor: Any = stand_ins.StandInChatProcessor(letters)
        pipe = cls(processor=processor, **parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe


_CLASSES = {
    "vae": ["diffusers", "AutoencoderKLQwenImage21"],
    "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
    "processor": ["transformers", "Qwen3VLProcessor"],
}


CHAT_OF_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
    "{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
)


def encoders(root: Path, *, halvings: int = 4) -> Path:
    """Qwen3-VL with a tower that sees pictures, the tokenizer of its processor, the RGBA VAE.

    `halvings` are the VAE's, whose stride the pipeline takes to be 16.
    """
    letters = tokenizer(4096)
    letters.backend_tokenizer.post_processor = processors.Sequence([])
    letters.add_tokens(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"], special_tokens=True)
    letters.add_tokens(["<|im_start|>", "<|im_end|>", "\n"], special_tokens=True)
    letters.chat_template = CHAT_OF_PARTS
    text = qwen_vl_text(104) | {"head_dim": 8}
    tower = {
        "depth": 2, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16,
        "intermediate_size": 16, "patch_size": 4, "temporal_patch_size": 2,
        "spatial_merge_size": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=tower, image_token_id=IMAGE_TOKEN,
        vision_start_token_id=98, vision_end_token_id=99, video_token_id=97,
    )  # fmt: skip
    vae = AutoencoderKLQwenImage21(
        base_dim=4, decoder_base_dim=4, z_dim=16, num_res_blocks=1, dim_mult=[1] * (halvings + 1),
        temperal_downsample=[False] * halvings, scale_factor_spatial=2**halvings,
        latents_mean=torch.linspace(-0.5, 0.5, 16).tolist(),
        latents_std=torch.linspace(0.5, 2, 16).tolist(),
    )  # fmt: skip
    parts = {"vae": randomized(vae), "processor": letters}
    parts["text_encoder"] = randomized(Qwen3VLForConditionalGeneration(config))
    return save(root, parts)


def pipeline(folder: Path, *, halvings: int = 4) -> Opened:
    """The pipeline with random weights, in `folder`/pipeline; `halvings` are those of the VAE."""
    source = encoders(folder / "pipeline", halvings=halvings)
    random_qwen_image21().save_pretrained(source / "transformer")
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
    )
    scheduler.save_pretrained(source / "scheduler")
    index = {"_class_name": "QwenImage21Pipeline", "_diffusers_version": "0.42.1", **_CLASSES}
    (source / "model_index.json").write_text(json.dumps(index))
    return Opened.from_pretrained(source, torch_dtype=torch.float32)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of the pipeline from `noise_CFHW` and texts as our encoder has them."""
    # Its network takes one layout for a batch; each text has a call of its own in the pipeline.
    call |= {f"{name}_embeds": text["text"][None].float() for name, text in texts.items()}
    packed = noise_CFHW[:, 0].flatten(1).transpose(0, 1)[None]
    call |= case.sides_of(noise_CFHW, pipe.vae_scale_factor)
    found = case.latents_made(pipe, packed, **call)
    return found[0].transpose(0, 1).reshape(noise_CFHW.shape)


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    prompts = {"prompt": case.PROMPT, "negative_prompt": case.NEGATIVE}
    with torch.no_grad():
        return [(texts[n]["text"], pipe.encode_prompt(one)[0][0]) for n, one in prompts.items()]


GENERATIONS = {
    "qwen_image21": case.Generation(
        pipeline=pipeline,
        made_by=made_by,
        size=(1, 6, 10),
        channels=16,
        objective={
            **{"name": "flow", "sampling_levels": "even", "time_shift_type": "exponential"},
            **{"base_shift": 0.5, "max_shift": 1.15},
        },
        encoded=_encoded,
        calls=[({"true_cfg_scale": scale}, {"guidance": scale}) for scale in (4.0, 1.0, 2.5)],
        slow=False,
    )
}

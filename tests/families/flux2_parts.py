"""Folders of encoders and of FLUX.2's VAE, tiny, random, in the layout of Diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
)

from tests.families.pipeline_parts import randomized, save, tokenizer

MISTRAL_CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{% for part in m['content'] %}"
    "{{ part['text'] }}{% endfor %}[/]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
QWEN3_CHAT = (
    "{% for m in messages %}({{ m['role'] }}){{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}(answer){% if not enable_thinking %}!{% endif %}{% endif %}"
)


def chat_tokenizer(template: str, side: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a chat template that pads at a side."""
    made = tokenizer(512)
    made.add_special_tokens({"bos_token": "<s>"})
    made.chat_template, made.padding_side = template, side
    return made


def flux2_vae() -> Any:
    """FLUX.2's VAE: 4 channels, a stride of 2, and statistics of its 16 that differ."""
    from diffusers import AutoencoderKLFlux2

    vae = AutoencoderKLFlux2(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
    )
    vae.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, 16))
    vae.bn.running_var.copy_(torch.linspace(0.3, 2, 16))
    return randomized(vae)


def flux2(root: Path, *, side: str = "left") -> Path:
    """Mistral3 of 30 layers and a tokenizer that pads at a side; a latent cell is 4 x 4 pixels."""
    text = {
        "model_type": "mistral", "vocab_size": 99, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 30, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    tower = {
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "image_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
    }  # fmt: skip
    config = Mistral3Config(text_config=text, vision_config=tower, image_token_index=3)
    parts = {"text_encoder": randomized(Mistral3ForConditionalGeneration(config))}
    parts |= {"tokenizer": chat_tokenizer(MISTRAL_CHAT, side), "vae": flux2_vae()}
    return save(root, parts)


def flux2_klein(root: Path, *, side: str = "right") -> Path:
    """Encoders of FLUX.2 klein: FLUX.2's VAE, and Qwen3 with 27 layers."""
    config = Qwen3Config(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=27,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    parts = {"text_encoder": randomized(Qwen3ForCausalLM(config)), "vae": flux2_vae()}
    return save(root, parts | {"tokenizer": chat_tokenizer(QWEN3_CHAT, side)})


def qwen3_vl(*, layers: int) -> Qwen3VLConfig:
    """The configuration of a Qwen3-VL."""
    text: Any = {
        "vocab_size": 99, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    tower = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": 16, "deepstack_visual_indexes": [], "num_position_embeddings": 16,
    }  # fmt: skip
    return Qwen3VLConfig(text_config=text, vision_config=tower)

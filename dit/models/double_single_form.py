"""Diffusers' networks of double-stream layers, then single-stream ones: config.json, running one.

What `FluxTransformer2DModel` and `ChromaTransformer2DModel` have in common.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from dit.batch import LatentSample
from dit.config import ModelConfig
from dit.models.diffusers_names import StrictKeys
from dit.models.joint_family import DoubleSingleConfig
from dit.models.patches import patchify, unpatchify
from dit.models.positions import GridPositions

PATCH = 2
"""Rows and columns of a token in the pipelines of FLUX and Chroma."""


class DoubleSingleKeys(StrictKeys):
    """What `FluxTransformer2DModel` and `ChromaTransformer2DModel` have in config.json."""

    patch_size: PositiveInt = 1
    in_channels: PositiveInt = 64
    out_channels: PositiveInt | None = None
    num_layers: PositiveInt = 19
    num_single_layers: PositiveInt = 38
    attention_head_dim: PositiveInt = 128
    num_attention_heads: PositiveInt = 24
    joint_attention_dim: PositiveInt = 4096
    axes_dims_rope: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 56, 56)


class PatchKeys(StrictKeys):
    """What an export keeps in config.json that these have no place for."""

    patch_spatial: PositiveInt
    patch_temporal: PositiveInt


def unsupported_keys(t: DoubleSingleKeys) -> list[str]:
    """What of a config.json our network has no counterpart for."""
    rules = [
        (t.patch_size == 1, f"patch_size={t.patch_size}; patches are cut before the network"),
        (
            t.out_channels in (None, t.in_channels),
            f"out_channels={t.out_channels} with in_channels={t.in_channels}",
        ),
    ]
    return [message for holds, message in rules if not holds]


def network_settings(t: DoubleSingleKeys, private: PatchKeys | None) -> dict[str, Any]:
    """Settings of our network, of a config.json.

    Raises:
        ValueError: its tokens are no patches.
    """
    rows, frames = (private.patch_spatial, private.patch_temporal) if private else (PATCH, 1)
    channels, rest = divmod(t.in_channels, frames * rows**2)
    if rest:
        raise ValueError(
            f"in_channels={t.in_channels} are no patches of {frames} frames x {rows} x {rows}"
        )
    return {
        "num_layers": t.num_layers,
        "num_single_layers": t.num_single_layers,
        "hidden_size": t.num_attention_heads * t.attention_head_dim,
        "num_attention_heads": t.num_attention_heads,
        "in_channels": channels,
        "patch_spatial": rows,
        "patch_temporal": frames,
        "crossattn_emb_size": t.joint_attention_dim,
        "rope_axes": t.axes_dims_rope,
    }


def network_keys(m: DoubleSingleConfig) -> dict[str, Any]:
    """The inverse: `DoubleSingleKeys` of a network."""
    return {
        "patch_size": 1,
        "in_channels": m.patch_features,
        "out_channels": None,
        "num_layers": m.num_layers,
        "num_single_layers": m.num_single_layers,
        "attention_head_dim": m.hidden_size // m.num_attention_heads,
        "num_attention_heads": m.num_attention_heads,
        "joint_attention_dim": m.crossattn_emb_size,
        "axes_dims_rope": m.rope_axes,
    }


def mlp_misfit(model: ModelConfig, class_name: str) -> list[str]:
    """What of a network Diffusers' class has no counterpart for."""
    if model.ffn_hidden_size == 4 * model.hidden_size:
        return []
    return [f"model.mlp_ratio={model.mlp_ratio:g} cannot be exported: {class_name} has 4"]


def patch_misfit(model: DoubleSingleConfig) -> list[str]:
    """What the pipelines feed otherwise than in training."""
    patch = (model.patch_temporal, model.patch_spatial)
    if patch == (1, PATCH):
        return []
    return [
        f"model.patch_temporal={patch[0]} and model.patch_spatial={patch[1]}, and it cuts"
        f" patches of 1 frame x {PATCH} x {PATCH}"
    ]


def run_on_sample(
    network: nn.Module,
    sample: LatentSample,
    level: float,
    model: DoubleSingleConfig,
    *,
    references: tuple[Tensor, ...] = (),
    **inputs: Any,
) -> Tensor:
    """What Diffusers' network makes of one sample; `inputs` are those of its class alone."""
    patch = (model.patch_temporal, model.patch_spatial)
    latents = (sample.latent_CFHW, *references)
    grids, rows = zip(*(patchify(latent, *patch) for latent in latents), strict=True)
    (made,) = network(
        hidden_states=torch.cat(rows)[None],
        encoder_hidden_states=sample.text_LE[None],
        timestep=torch.tensor([level / 1000]),  # it multiplies by 1000 itself
        img_ids=GridPositions()(grids, fps=sample.fps),
        txt_ids=torch.zeros(len(sample.text_LE), 3),
        return_dict=False,
        **inputs,
    )
    return unpatchify(made[0], grids[0], *patch)


_DOUBLE, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"


def _together(block: str, *names: str) -> str:
    return " ".join(f"{block}.{name}" for name in names)


ORIGINAL_NAMES: dict[str, str] = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "double_blocks.*.img_attn.qkv": _together(_DOUBLE, "attn.to_q", "attn.to_k", "attn.to_v"),
    "double_blocks.*.txt_attn.qkv": _together(
        _DOUBLE, "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"
    ),
    "double_blocks.*.img_attn.proj": f"{_DOUBLE}.attn.to_out.0",
    "double_blocks.*.txt_attn.proj": f"{_DOUBLE}.attn.to_add_out",
    "double_blocks.*.img_mlp.0": f"{_DOUBLE}.ff.net.0.proj",
    "double_blocks.*.img_mlp.2": f"{_DOUBLE}.ff.net.2",
    "double_blocks.*.txt_mlp.0": f"{_DOUBLE}.ff_context.net.0.proj",
    "double_blocks.*.txt_mlp.2": f"{_DOUBLE}.ff_context.net.2",
    "single_blocks.*.linear1": _together(
        _SINGLE, "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"
    ),
    "single_blocks.*.linear2": f"{_SINGLE}.proj_out",
}
"""Linears of patches, text and layers as FLUX's own code names them, and Chroma's, and Diffusers'.

`*` stands for the number of a block. Where one linear of theirs is several of Diffusers', these
stand side by side with spaces: all have as many outputs as it has inputs, and the last one the
rest.
"""

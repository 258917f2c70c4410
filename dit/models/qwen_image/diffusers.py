"""Qwen-Image in Diffusers: names of tensors, config.json, pipelines, and how its network is run.

Its class is `QwenImageTransformer2DModel`.
"""

# D model width, F width of the MLP, W cosines and sines of the level, E text width, K head width
# C numbers in a token

from __future__ import annotations

from typing import Any

import torch
from pydantic import ConfigDict, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import pad

from dit.batch import LatentSample
from dit.config import RunConfig
from dit.models.diffusers_form import DiffusersForm
from dit.models.diffusers_names import (
    NameTable,
    Row,
    StrictKeys,
    TensorSplit,
    linear_rows,
)
from dit.models.joint.tensor_names import HEAD_ROWS, double_stream_rows, stream_sizes
from dit.models.patches import patchify, unpatchify
from dit.models.qwen_image.config import MOST_REFERENCES, QwenImageConfig
from dit.models.qwen_image.family import REFERENCE, SCALE

CLASS = "QwenImageTransformer2DModel"
_LONGEST_SIDE = 2 * 4096  # in patches: its table of angles has 4096 rows for either sign


_ROWS = (
    *linear_rows("patches", "img_in", "D", "C"),
    *linear_rows("level_in", "time_text_embed.timestep_embedder.linear_1", "D", "W"),
    *linear_rows("level_out", "time_text_embed.timestep_embedder.linear_2", "D", "D"),
    Row("text_norm.weight", ("txt_norm.weight",), TensorSplit.REPLICATED, ("E",)),
    *linear_rows("text_in", "txt_in", "D", "E"),
    *double_stream_rows(
        "blocks.layers.*",
        "transformer_blocks.*",
        modulations=("img_mod.1", "txt_mod.1"),
        mlps=("img_mlp", "txt_mlp"),
    ),
    *HEAD_ROWS,
)
# ComfyUI and diffusion-pipe name linears as Diffusers does, musubi-tuner with underscores for dots.
_matrices = [name for row in _ROWS if len(row.shape) == 2 for name in row.theirs]
LINEARS = {name.removesuffix(".weight"): name.removesuffix(".weight") for name in _matrices}


def _sizes(model: QwenImageConfig) -> dict[str, int]:
    return stream_sizes(model)


class QwenImagePrivateKeys(StrictKeys):
    """What an export keeps in config.json that Diffusers has no place for."""

    reference_latents: int


class QwenImageTransformer(StrictKeys):
    """config.json of `QwenImageTransformer2DModel`; keys that it does not have are kept apart."""

    model_config = ConfigDict(extra="allow")

    patch_size: PositiveInt = 2
    in_channels: PositiveInt = 64
    out_channels: PositiveInt | None = 16
    num_layers: PositiveInt = 60
    attention_head_dim: PositiveInt = 128
    num_attention_heads: PositiveInt = 24
    joint_attention_dim: PositiveInt = 3584
    guidance_embeds: bool = False
    axes_dims_rope: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 56, 56)
    zero_cond_t: bool = False
    use_additional_t_cond: bool = False
    use_layer3d_rope: bool = False

    @property
    def latent_channels(self) -> int:
        return self.out_channels or self.in_channels


def _unsupported(t: QwenImageTransformer) -> list[str]:
    """What of a config.json our network has no counterpart for."""
    features = t.patch_size**2 * t.latent_channels
    rules = [
        (
            t.in_channels == features,
            f"in_channels={t.in_channels}, and patch_size={t.patch_size} with"
            f" out_channels={t.latent_channels} goes with {features}",
        ),
        (not t.guidance_embeds, "guidance_embeds=true"),
        (not t.use_additional_t_cond, "use_additional_t_cond=true (Qwen-Image-Layered)"),
        (not t.use_layer3d_rope, "use_layer3d_rope=true (Qwen-Image-Layered)"),
    ]
    return [message for holds, message in rules if not holds]


def _settings(
    t: QwenImageTransformer,
    private: QwenImagePrivateKeys | None,
    text_pad_to: int | None,  # noqa: ARG001  # no padding is attended to
) -> dict[str, Any]:
    """Settings of our network, of a config.json.

    Nothing in it tells Qwen-Image from Qwen-Image-Edit, whose samples may, but need not, bring a
    picture. Of those of 2511 `zero_cond_t` tells.
    """
    references = MOST_REFERENCES if t.zero_cond_t else 0
    return {
        "num_layers": t.num_layers,
        "hidden_size": t.num_attention_heads * t.attention_head_dim,
        "num_attention_heads": t.num_attention_heads,
        "mlp_ratio": 4.0,
        "in_channels": t.latent_channels,
        "patch_temporal": 1,
        "patch_spatial": t.patch_size,
        "crossattn_emb_size": t.joint_attention_dim,
        "rope_axes": t.axes_dims_rope,
        "reference_latents": private.reference_latents if private else references,
        "clean_references": t.zero_cond_t,
    }


def _inexpressible(config: RunConfig) -> list[str]:
    """What of a run Diffusers' network has no counterpart for."""
    m = config.model
    if m.ffn_hidden_size == 4 * m.hidden_size:
        return []
    return [
        f"model.mlp_ratio={m.mlp_ratio} cannot be exported: Diffusers' {CLASS} has MLPs of 4 times"
        " the hidden size"
    ]


def _content(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's network."""
    m = config.model
    assert isinstance(m, QwenImageConfig)
    return {
        "patch_size": m.patch_spatial,
        "in_channels": m.patch_features,
        "out_channels": m.in_channels,
        "num_layers": m.num_layers,
        "attention_head_dim": m.hidden_size // m.num_attention_heads,
        "num_attention_heads": m.num_attention_heads,
        "joint_attention_dim": m.crossattn_emb_size,
        "guidance_embeds": False,
        "axes_dims_rope": m.rope_axes,
        "zero_cond_t": m.clean_references,
    }


def _pipeline_misfits(model: QwenImageConfig, pipeline: str) -> list[str]:
    """What of a network the pipeline would run on other inputs than it was trained on."""
    shows = pipeline != "QwenImagePipeline"
    if shows == (model.reference_latents > 0):
        return []
    return [
        f"model.reference_latents={model.reference_latents}, and {pipeline} shows"
        f" {'pictures' if shows else 'no picture'}"
    ]


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, config: RunConfig
) -> Tensor:
    """What Diffusers' network makes of one sample."""
    latents = [sample.latent_CFHW]
    latents += [x for name, x in sample.others.items() if name.startswith(REFERENCE)]
    patch = (1, config.model.patch_spatial)
    grids, rows = zip(*(patchify(x, *patch) for x in latents), strict=True)
    # Diffusers' network needs a row of text; one that is masked is none.
    is_text_L = torch.ones(max(len(sample.text_LE), 1), dtype=torch.bool)
    text_LE = pad(sample.text_LE, (0, 0, 0, len(is_text_L) - len(sample.text_LE)))
    is_text_L[len(sample.text_LE) :] = False
    (made,) = network(
        hidden_states=torch.cat(rows)[None],
        timestep=torch.tensor([level / SCALE]),
        encoder_hidden_states=text_LE[None],
        encoder_hidden_states_mask=is_text_L[None],
        img_shapes=[list(grids)],
        return_dict=False,
    )
    return unpatchify(made[0], grids[0], *patch)


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(
        rows=_ROWS,
        sizes=_sizes,
        layers=lambda model: {"blocks": model.num_layers},
    ),
    config_keys=QwenImageTransformer,
    private_keys=QwenImagePrivateKeys,
    unsupported=_unsupported,
    settings=_settings,
    inexpressible=_inexpressible,
    content=_content,
    original_names=(LINEARS,),
    comfyui_names=lambda _: LINEARS,
    pipelines={
        "QwenImagePipeline": "flow",
        "QwenImageEditPipeline": "flow",
        "QwenImageEditPlusPipeline": "flow",
    },
    settings_of_pipelines={
        "QwenImageEditPipeline": {"reference_latents": 1},
        "QwenImageEditPlusPipeline": {"reference_latents": MOST_REFERENCES},
    },
    pipeline_misfits=_pipeline_misfits,
    largest_latent=lambda model: (4096, *(_LONGEST_SIDE * model.patch_spatial,) * 2),
    run_network=_run_network,
)

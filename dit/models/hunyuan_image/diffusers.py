"""HunyuanImage 2.1 in Diffusers: names of tensors, config.json, pipeline, running its network.

Its class is `HunyuanImageTransformer2DModel`.
"""

# D model width, F width of the MLP, R that of the refiner's, W cosines and sines of the level
# E text width, G width of words in quotation marks, S width inside their layers
# K head width, C numbers in a token

from __future__ import annotations

from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from dit.batch import LatentSample
from dit.config import RunConfig
from dit.models.diffusers_form import DiffusersForm
from dit.models.diffusers_names import Convolution, NameTable, Row, linear_rows
from dit.models.hunyuan_image.config import HunyuanImageConfig
from dit.models.hunyuan_image.family import GLYPHS
from dit.models.hunyuan_image.original_names import COMFYUI_NAMES, HUNYUAN_IMAGE_NAMES, KOHYA_NAMES
from dit.models.joint.hunyuan_form import (
    GLYPH_HIDDEN,
    HunyuanKeys,
    NoPrivateKeys,
    glyph_misfit,
    network_keys,
    network_settings,
    text_inputs,
    unsupported_keys,
)
from dit.models.joint.tensor_names import (
    HEAD_ROWS,
    glyph_rows,
    refiner_rows,
    stack_layers,
    stack_rows,
    stream_sizes,
    two_linears,
)

CLASS = "HunyuanImageTransformer2DModel"
_TOLD = "time_guidance_embed"

_ROWS: tuple[Row, ...] = (
    *linear_rows("patches", "x_embedder.proj", "D", "C", arrangement=Convolution(axes=2)),
    *two_linears("told.level", f"{_TOLD}.timestep_embedder", "W"),
    *two_linears(
        "told.step_end",
        f"{_TOLD}.timestep_embedder_r",
        "W",
        exists=lambda model: model.use_meanflow,
    ),
    *two_linears(
        "told.guidance",
        f"{_TOLD}.guidance_embedder",
        "W",
        exists=lambda model: model.guidance_embed,
    ),
    *refiner_rows("refiner"),
    *glyph_rows("glyphs"),
    *stack_rows(),
    *HEAD_ROWS,
)


def _sizes(model: HunyuanImageConfig) -> dict[str, int]:
    return stream_sizes(model) | {"G": model.glyph_embed_size, "S": model.glyph_hidden_size}


class HunyuanImageTransformer(HunyuanKeys):
    """config.json of `HunyuanImageTransformer2DModel`."""

    in_channels: PositiveInt = 64
    out_channels: PositiveInt | None = 64
    num_attention_heads: PositiveInt = 28
    num_layers: PositiveInt = 20
    num_single_layers: PositiveInt = 40
    patch_size: tuple[PositiveInt, ...] = (1, 1)
    guidance_embeds: bool = False
    text_embed_dim: PositiveInt = 3584
    text_embed_2_dim: PositiveInt | None = None
    rope_axes_dim: tuple[PositiveInt, ...] = (64, 64)
    use_meanflow: bool = False


def _unsupported(t: HunyuanImageTransformer) -> list[str]:
    """What of a config.json our network has no counterpart for."""
    patch, axes = list(t.patch_size), list(t.rope_axes_dim)
    return unsupported_keys(
        t,
        (
            t.out_channels in (None, t.in_channels),
            f"out_channels={t.out_channels} with in_channels={t.in_channels}",
        ),
        (
            len(patch) == 2 and patch[0] == patch[1],
            f"patch_size={patch}; patches are squares of pictures",
        ),
        (len(axes) == 2, f"rope_axes_dim={axes}; positions are rows and columns"),
        (
            t.text_embed_2_dim is not None,
            "text_embed_2_dim=null; words in quotation marks are read",
        ),
    )


def _settings(t: HunyuanImageTransformer, *_: Any) -> dict[str, Any]:
    """Settings of our network, of a config.json."""
    return network_settings(t) | {
        "num_single_layers": t.num_single_layers,
        "in_channels": t.in_channels,
        "patch_spatial": t.patch_size[0],
        "patch_temporal": 1,
        "glyph_embed_size": t.text_embed_2_dim,
        "glyph_hidden_size": GLYPH_HIDDEN,
        "guidance_embed": t.guidance_embeds,
        "use_meanflow": t.use_meanflow,
    }


def _content(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's network."""
    m = config.model
    assert isinstance(m, HunyuanImageConfig)
    return network_keys(m) | {
        "in_channels": m.in_channels,
        "out_channels": m.in_channels,
        "num_single_layers": m.num_single_layers,
        "patch_size": (m.patch_spatial,) * 2,
        "guidance_embeds": m.guidance_embed,
        "text_embed_2_dim": m.glyph_embed_size,
        "use_meanflow": m.use_meanflow,
    }


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, config: RunConfig
) -> Tensor:
    """What Diffusers' network makes of one sample."""
    model, guidance = config.model, config.objective.guidance
    assert isinstance(model, HunyuanImageConfig)
    (made,) = network(
        hidden_states=sample.latent_CFHW[None, :, 0],
        timestep=torch.tensor([level]),
        **text_inputs(model, sample.text_LE, sample.others.get(GLYPHS)),
        # It is told 1000 times the scale, and of samples that are compared a step ends at the data.
        guidance=None if guidance is None else 1000 * torch.tensor([guidance]),
        timestep_r=torch.zeros(1) if model.use_meanflow else None,
        return_dict=False,
    )
    return made[0, :, None]


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(
        rows=_ROWS,
        sizes=_sizes,
        layers=stack_layers,
    ),
    config_keys=HunyuanImageTransformer,
    private_keys=NoPrivateKeys,
    unsupported=_unsupported,
    settings=_settings,
    inexpressible=lambda config: glyph_misfit(config, CLASS),
    content=_content,
    original_names=(HUNYUAN_IMAGE_NAMES, KOHYA_NAMES, COMFYUI_NAMES),
    comfyui_names=lambda _: COMFYUI_NAMES,
    pipelines={"HunyuanImagePipeline": "flow"},
    largest_latent=lambda model: model.largest_latent,
    run_network=_run_network,
)

"""HunyuanImage 2.1 in Diffusers: names of tensors, config.json, pipeline, running its network.

Its class is `HunyuanImageTransformer2DModel`.
"""

# D model width, F width of the MLP, R that of the refiner's, W cosines and sines of the level
# E text width, G width of words in quotation marks, S width inside their layers
# K head width, C numbers in a token

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from torch import Tensor, nn

from dit.batch import LatentSample
from dit.config import RunConfig
from dit.models.diffusers_names import Convolution, NameTable, Row, StrictKeys, linear_rows
from dit.models.family import DiffusersForm
from dit.models.hunyuan_image.config import HunyuanImageConfig
from dit.models.hunyuan_image.family import GLYPHS
from dit.models.layer_spec import LEVEL_WAVES, MOST_REFINER_LAYERS, REFINER_RATIO
from dit.models.stream_names import (
    HEAD_ROWS,
    double_stream_rows,
    glyph_rows,
    refiner_rows,
    single_stream_rows,
    stream_sizes,
    two_linears,
)

CLASS = "HunyuanImageTransformer2DModel"
_GLYPH_HIDDEN = 2048  # fixed in Diffusers
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
    *double_stream_rows("double_blocks.layers.*", "transformer_blocks.*"),
    *single_stream_rows("single_blocks.layers.*", "single_transformer_blocks.*"),
    *HEAD_ROWS,
)


def _sizes(model: HunyuanImageConfig) -> dict[str, int]:
    return stream_sizes(model) | {
        "R": REFINER_RATIO * model.hidden_size,
        "W": LEVEL_WAVES,
        "E": model.crossattn_emb_size,
        "G": model.glyph_embed_size,
        "S": model.glyph_hidden_size,
        "C": model.patch_features,
    }


class HunyuanImagePrivateKeys(StrictKeys):
    """What an export keeps in config.json that Diffusers has no place for: nothing."""


class HunyuanImageTransformer(StrictKeys):
    """config.json of `HunyuanImageTransformer2DModel`; keys that it does not have stay apart."""

    model_config = ConfigDict(extra="allow")

    in_channels: PositiveInt = 64
    out_channels: PositiveInt | None = 64
    num_attention_heads: PositiveInt = 28
    attention_head_dim: PositiveInt = 128
    num_layers: PositiveInt = 20
    num_single_layers: PositiveInt = 40
    num_refiner_layers: PositiveInt = 2
    mlp_ratio: PositiveFloat = 4.0
    patch_size: tuple[PositiveInt, ...] = (1, 1)
    qk_norm: str | None = "rms_norm"
    guidance_embeds: bool = False
    text_embed_dim: PositiveInt = 3584
    text_embed_2_dim: PositiveInt | None = None
    rope_theta: PositiveFloat = 256.0
    rope_axes_dim: tuple[PositiveInt, ...] = (64, 64)
    use_meanflow: bool = False


def _unsupported(t: HunyuanImageTransformer) -> list[str]:
    """What of a config.json our network has no counterpart for."""
    patch, axes = list(t.patch_size), list(t.rope_axes_dim)
    rules = [
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
        (t.qk_norm == "rms_norm", f"qk_norm={t.qk_norm!r}, not rms_norm"),
        (t.rope_theta == 256.0, f"rope_theta={t.rope_theta:g}, not 256"),
        (
            t.num_refiner_layers <= MOST_REFINER_LAYERS,
            f"num_refiner_layers={t.num_refiner_layers}, more than {MOST_REFINER_LAYERS}",
        ),
    ]
    return [message for holds, message in rules if not holds]


def _settings(
    t: HunyuanImageTransformer,
    private: HunyuanImagePrivateKeys | None,  # noqa: ARG001  # there are none
    text_pad_to: int | None,  # noqa: ARG001  # no padding is attended to
) -> dict[str, Any]:
    """Settings of our network, of a config.json."""
    return {
        "num_layers": t.num_layers,
        "num_single_layers": t.num_single_layers,
        "hidden_size": t.num_attention_heads * t.attention_head_dim,
        "num_attention_heads": t.num_attention_heads,
        "mlp_ratio": t.mlp_ratio,
        "in_channels": t.in_channels,
        "patch_spatial": t.patch_size[0],
        "patch_temporal": 1,
        "crossattn_emb_size": t.text_embed_dim,
        "glyph_embed_size": t.text_embed_2_dim,
        "glyph_hidden_size": _GLYPH_HIDDEN,
        "num_refiner_layers": t.num_refiner_layers,
        "rope_axes": t.rope_axes_dim,
        "guidance_embed": t.guidance_embeds,
        "use_meanflow": t.use_meanflow,
    }


def _inexpressible(config: RunConfig) -> list[str]:
    """What of a run Diffusers' network has no counterpart for."""
    model: Any = config.model
    if model.glyph_hidden_size == _GLYPH_HIDDEN:
        return []
    return [
        f"model.glyph_hidden_size={model.glyph_hidden_size} cannot be exported: Diffusers' {CLASS}"
        f" has {_GLYPH_HIDDEN}"
    ]


def _content(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's network."""
    m = config.model
    assert isinstance(m, HunyuanImageConfig)
    return {
        "in_channels": m.in_channels,
        "out_channels": m.in_channels,
        "num_attention_heads": m.num_attention_heads,
        "attention_head_dim": m.hidden_size // m.num_attention_heads,
        "num_layers": m.num_layers,
        "num_single_layers": m.num_single_layers,
        "num_refiner_layers": m.num_refiner_layers,
        "mlp_ratio": m.mlp_ratio,
        "patch_size": (m.patch_spatial,) * 2,
        "qk_norm": "rms_norm",
        "guidance_embeds": m.guidance_embed,
        "text_embed_dim": m.crossattn_emb_size,
        "text_embed_2_dim": m.glyph_embed_size,
        "rope_theta": 256.0,
        "rope_axes_dim": m.rope_axes,
        "use_meanflow": m.use_meanflow,
    }


def _open_network(folder: Path) -> nn.Module:
    """Diffusers' network in float32.

    Raises:
        ImportError: Diffusers is not installed.
    """
    from diffusers.models.transformers import transformer_hunyuanimage as theirs

    return theirs.HunyuanImageTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float32)


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, config: RunConfig
) -> Tensor:
    """What Diffusers' network makes of one sample."""
    model, guidance, text = config.model, config.objective.guidance, sample.text_LE[None]
    assert isinstance(model, HunyuanImageConfig)
    glyphs = sample.others.get(GLYPHS)
    if glyphs is None:
        glyphs = text.new_zeros(0, model.glyph_embed_size)
    (made,) = network(
        hidden_states=sample.latent_CFHW[None, :, 0],
        timestep=torch.tensor([level]),
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        encoder_hidden_states_2=glyphs[None],
        encoder_attention_mask_2=torch.ones(1, len(glyphs)),
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
        layers=lambda model: {
            "double_blocks": model.num_layers,
            "single_blocks": model.num_single_layers,
        },
    ),
    config_keys=HunyuanImageTransformer,
    private_keys=HunyuanImagePrivateKeys,
    unsupported=_unsupported,
    settings=_settings,
    inexpressible=_inexpressible,
    content=_content,
    private=lambda _: {},
    text_pad_to=lambda _: None,
    pipelines={"HunyuanImagePipeline": "flow"},
    pipeline_misfits=lambda *_: [],
    largest_latent=lambda model: model.largest_latent,
    open_network=_open_network,
    run_network=_run_network,
)

"""HunyuanVideo 1.5 in Diffusers: names of tensors, config.json, pipelines, running its network.

Its class is `HunyuanVideo15Transformer3DModel`.
"""

# D model width, F width of the MLP, R that of the refiner's, W cosines and sines of the level
# E text width, G width of words in quotation marks, S width inside their layers, I image width
# K head width, P numbers in a token that is fed, C of one that is predicted

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from torch import Tensor, nn

from dit.batch import LatentSample
from dit.config import RunConfig
from dit.models.diffusers_names import (
    Convolution,
    NameTable,
    Row,
    StrictKeys,
    TensorSplit,
    linear_rows,
)
from dit.models.family import DiffusersForm
from dit.models.hunyuan_video_15.config import HunyuanVideo15Config
from dit.models.hunyuan_video_15.family import FIRST_FRAME, GLYPHS, IMAGE
from dit.models.hunyuan_video_15.original_names import COMFYUI_NAMES, HUNYUAN_NAMES
from dit.models.layer_spec import LEVEL_WAVES, MOST_REFINER_LAYERS, REFINER_RATIO
from dit.models.stream_names import (
    HEAD_ROWS,
    double_stream_rows,
    glyph_rows,
    layer_norm_rows,
    refiner_rows,
    stream_sizes,
    two_linears,
)

CLASS = "HunyuanVideo15Transformer3DModel"
_GLYPH_HIDDEN = 2048  # fixed in Diffusers
_WHOLE = TensorSplit.REPLICATED


_ROWS: tuple[Row, ...] = (
    *linear_rows("patches", "x_embedder.proj", "D", "P", arrangement=Convolution()),
    *linear_rows("level_in", "time_embed.timestep_embedder.linear_1", "D", "W"),
    *linear_rows("level_out", "time_embed.timestep_embedder.linear_2", "D", "D"),
    *two_linears(
        "step_end",
        "time_embed.timestep_embedder_r",
        "W",
        exists=lambda model: model.use_meanflow,
    ),
    *refiner_rows("text.refiner"),
    *glyph_rows("text.glyphs"),
    *layer_norm_rows("text.image.norm_in", "image_embedder.norm_in", "I"),
    *linear_rows("text.image.linear_1", "image_embedder.linear_1", "I", "I"),
    *linear_rows("text.image.linear_2", "image_embedder.linear_2", "D", "I"),
    *layer_norm_rows("text.image.norm_out", "image_embedder.norm_out", "D"),
    Row("text.kind", ("cond_type_embed.weight",), _WHOLE, ("3", "D")),
    *double_stream_rows("blocks.layers.*", "transformer_blocks.*"),
    *HEAD_ROWS,
)


def _sizes(model: HunyuanVideo15Config) -> dict[str, int]:
    return stream_sizes(model) | {
        "3": 3,
        "R": REFINER_RATIO * model.hidden_size,
        "W": LEVEL_WAVES,
        "E": model.crossattn_emb_size,
        "G": model.glyph_embed_size,
        "S": model.glyph_hidden_size,
        "I": model.image_embed_size,
        "P": model.input_features,
        "C": model.output_features,
    }


class HunyuanVideo15PrivateKeys(StrictKeys):
    """What an export keeps in config.json that Diffusers has no place for: nothing."""


class HunyuanVideo15Transformer(StrictKeys):
    """config.json of `HunyuanVideo15Transformer3DModel`; keys that it does not have stay apart."""

    model_config = ConfigDict(extra="allow")

    in_channels: PositiveInt = 65
    out_channels: PositiveInt = 32
    num_attention_heads: PositiveInt = 16
    attention_head_dim: PositiveInt = 128
    num_layers: PositiveInt = 54
    num_refiner_layers: PositiveInt = 2
    mlp_ratio: PositiveFloat = 4.0
    patch_size: PositiveInt = 1
    patch_size_t: PositiveInt = 1
    qk_norm: str | None = "rms_norm"
    text_embed_dim: PositiveInt = 3584
    text_embed_2_dim: PositiveInt = 1472
    image_embed_dim: PositiveInt = 1152
    rope_theta: PositiveFloat = 256.0
    rope_axes_dim: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 56, 56)
    target_size: PositiveInt = 640
    task_type: str = "i2v"
    use_meanflow: bool = False


def _unsupported(t: HunyuanVideo15Transformer) -> list[str]:
    """What of a config.json our network has no counterpart for."""
    rules = [
        (
            t.in_channels == 2 * t.out_channels + 1,
            f"in_channels={t.in_channels}, and out_channels={t.out_channels} goes with"
            f" {2 * t.out_channels + 1}",
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
    t: HunyuanVideo15Transformer,
    private: HunyuanVideo15PrivateKeys | None,  # noqa: ARG001  # there are none
    text_pad_to: int | None,  # noqa: ARG001  # no padding is attended to
) -> dict[str, Any]:
    """Settings of our network, of a config.json."""
    return {
        "num_layers": t.num_layers,
        "hidden_size": t.num_attention_heads * t.attention_head_dim,
        "num_attention_heads": t.num_attention_heads,
        "mlp_ratio": t.mlp_ratio,
        "in_channels": t.out_channels,
        "patch_temporal": t.patch_size_t,
        "patch_spatial": t.patch_size,
        "crossattn_emb_size": t.text_embed_dim,
        "glyph_embed_size": t.text_embed_2_dim,
        "glyph_hidden_size": _GLYPH_HIDDEN,
        "image_embed_size": t.image_embed_dim,
        "num_refiner_layers": t.num_refiner_layers,
        "rope_axes": t.rope_axes_dim,
        "use_meanflow": t.use_meanflow,
        "target_size": t.target_size,
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
    assert isinstance(m, HunyuanVideo15Config)
    return {
        "in_channels": m.in_channels + m.condition_channels,
        "out_channels": m.in_channels,
        "num_attention_heads": m.num_attention_heads,
        "attention_head_dim": m.hidden_size // m.num_attention_heads,
        "num_layers": m.num_layers,
        "num_refiner_layers": m.num_refiner_layers,
        "mlp_ratio": m.mlp_ratio,
        "patch_size": m.patch_spatial,
        "patch_size_t": m.patch_temporal,
        "qk_norm": "rms_norm",
        "text_embed_dim": m.crossattn_emb_size,
        "text_embed_2_dim": m.glyph_embed_size,
        "image_embed_dim": m.image_embed_size,
        "rope_theta": 256.0,
        "rope_axes_dim": m.rope_axes,
        "use_meanflow": m.use_meanflow,
        "target_size": m.target_size,
    }


def _open_network(folder: Path) -> nn.Module:
    """Diffusers' network in float32.

    Raises:
        ImportError: Diffusers is not installed.
    """
    from diffusers.models.transformers import transformer_hunyuan_video15 as theirs

    return theirs.HunyuanVideo15Transformer3DModel.from_pretrained(
        folder, torch_dtype=torch.float32
    )


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, config: RunConfig
) -> Tensor:
    """What Diffusers' network makes of one sample.

    Without a picture it is given rows of zeros, as by the pipeline for text-to-video.
    """
    model, latent, inputs = config.model, sample.latent_CFHW, sample.inputs
    assert isinstance(model, HunyuanVideo15Config)
    condition = latent.new_zeros(model.condition_channels, *latent.shape[1:])
    given = inputs.get(FIRST_FRAME)
    if given is not None and given.shape[1] < latent.shape[1]:
        condition[:-1, : given.shape[1]] = given
        condition[-1, : given.shape[1]] = 1
    text = inputs["text"][None]
    glyphs, image = inputs.get(GLYPHS), inputs.get(IMAGE)
    if glyphs is None:
        glyphs = text.new_zeros(0, model.glyph_embed_size)
    if image is None or not len(image):
        image = text.new_zeros(1, model.image_embed_size)
    (made,) = network(
        hidden_states=torch.cat([latent, condition])[None],
        timestep=torch.tensor([level]),
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        encoder_hidden_states_2=glyphs[None],
        encoder_attention_mask_2=torch.ones(1, len(glyphs)),
        image_embeds=image[None],
        # Of samples that are compared a step ends at the data.
        timestep_r=torch.zeros(1) if model.use_meanflow else None,
        return_dict=False,
    )
    return made[0]


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(
        rows=_ROWS,
        sizes=_sizes,
        layers=lambda model: {"blocks": model.num_layers},
    ),
    config_keys=HunyuanVideo15Transformer,
    private_keys=HunyuanVideo15PrivateKeys,
    unsupported=_unsupported,
    settings=_settings,
    inexpressible=_inexpressible,
    content=_content,
    private=lambda _: {},
    text_pad_to=lambda _: None,
    original_names=(HUNYUAN_NAMES, COMFYUI_NAMES),
    comfyui_names=lambda _: COMFYUI_NAMES,
    pipelines={
        "HunyuanVideo15Pipeline": "flow",
        "HunyuanVideo15ImageToVideoPipeline": "flow",
    },
    pipeline_misfits=lambda *_: [],
    largest_latent=lambda model: (
        4096 * model.patch_temporal,
        *(4096 * model.patch_spatial,) * 2,
    ),
    open_network=_open_network,
    run_network=_run_network,
)

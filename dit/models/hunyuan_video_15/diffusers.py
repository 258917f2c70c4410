"""HunyuanVideo 1.5 in Diffusers: names of tensors, config.json, pipelines, running its network.

Its class is `HunyuanVideo15Transformer3DModel`.
"""

# D model width, F width of the MLP, R that of the refiner's, W cosines and sines of the level
# E text width, G width of words in quotation marks, S width inside their layers, I image width
# K head width, P numbers in a token that is fed, C of one that is predicted

from __future__ import annotations

from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from dit.batch import LatentSample
from dit.config import RunConfig
from dit.models.diffusers_form import DiffusersForm
from dit.models.diffusers_names import (
    Convolution,
    NameTable,
    Row,
    TensorSplit,
    linear_rows,
)
from dit.models.hunyuan_video_15.config import HunyuanVideo15Config
from dit.models.hunyuan_video_15.family import FIRST_FRAME, GLYPHS, IMAGE
from dit.models.hunyuan_video_15.original_names import COMFYUI_NAMES, HUNYUAN_NAMES
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
    double_stream_rows,
    glyph_rows,
    layer_norm_rows,
    refiner_rows,
    stream_sizes,
    two_linears,
)

CLASS = "HunyuanVideo15Transformer3DModel"
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
        "G": model.glyph_embed_size,
        "S": model.glyph_hidden_size,
        "I": model.image_embed_size,
        "P": model.input_features,
    }


class HunyuanVideo15Transformer(HunyuanKeys):
    """config.json of `HunyuanVideo15Transformer3DModel`."""

    in_channels: PositiveInt = 65
    out_channels: PositiveInt = 32
    num_attention_heads: PositiveInt = 16
    num_layers: PositiveInt = 54
    patch_size: PositiveInt = 1
    patch_size_t: PositiveInt = 1
    text_embed_dim: PositiveInt = 3584
    text_embed_2_dim: PositiveInt = 1472
    image_embed_dim: PositiveInt = 1152
    rope_axes_dim: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 56, 56)
    target_size: PositiveInt = 640
    task_type: str = "i2v"
    use_meanflow: bool = False


def _unsupported(t: HunyuanVideo15Transformer) -> list[str]:
    """What of a config.json our network has no counterpart for."""
    fed = 2 * t.out_channels + 1
    return unsupported_keys(
        t,
        (
            t.in_channels == fed,
            f"in_channels={t.in_channels}, and out_channels={t.out_channels} goes with {fed}",
        ),
    )


def _settings(t: HunyuanVideo15Transformer, *_: Any) -> dict[str, Any]:
    """Settings of our network, of a config.json."""
    return network_settings(t) | {
        "in_channels": t.out_channels,
        "patch_temporal": t.patch_size_t,
        "patch_spatial": t.patch_size,
        "glyph_embed_size": t.text_embed_2_dim,
        "glyph_hidden_size": GLYPH_HIDDEN,
        "image_embed_size": t.image_embed_dim,
        "use_meanflow": t.use_meanflow,
        "target_size": t.target_size,
    }


def _content(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's network."""
    m = config.model
    assert isinstance(m, HunyuanVideo15Config)
    return network_keys(m) | {
        "in_channels": m.in_channels + m.condition_channels,
        "out_channels": m.in_channels,
        "patch_size": m.patch_spatial,
        "patch_size_t": m.patch_temporal,
        "text_embed_2_dim": m.glyph_embed_size,
        "image_embed_dim": m.image_embed_size,
        "use_meanflow": m.use_meanflow,
        "target_size": m.target_size,
    }


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
    text_LE, image = inputs["text"], inputs.get(IMAGE)
    if image is None or not len(image):
        image = text_LE.new_zeros(1, model.image_embed_size)
    (made,) = network(
        hidden_states=torch.cat([latent, condition])[None],
        timestep=torch.tensor([level]),
        **text_inputs(model, text_LE, inputs.get(GLYPHS)),
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
    private_keys=NoPrivateKeys,
    unsupported=_unsupported,
    settings=_settings,
    inexpressible=lambda config: glyph_misfit(config, CLASS),
    content=_content,
    original_names=(HUNYUAN_NAMES, COMFYUI_NAMES),
    comfyui_names=lambda _: COMFYUI_NAMES,
    pipelines={
        "HunyuanVideo15Pipeline": "flow",
        "HunyuanVideo15ImageToVideoPipeline": "flow",
    },
    largest_latent=lambda model: (
        4096 * model.patch_temporal,
        *(4096 * model.patch_spatial,) * 2,
    ),
    run_network=_run_network,
)

"""HunyuanVideo 1.5 in Diffusers, `HunyuanVideo15Transformer3DModel`: names, config.json, calls."""

# D model width, F and R widths of MLPs of layers and refiner, W width of the sinusoidal embedding
# E text width, G width of ByT5's states of quoted words, S hidden width of their embedding
# I width of SigLIP's states of a picture
# K head width, P input channels of a token, C output channels
# L text tokens

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dit.config.checks import Rule
from dit.models.diffusers.arrangements import Convolution
from dit.models.diffusers.form import ConfigKeys, DiffusersForm, Key, Pipeline, never, same
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows
from dit.models.hunyuan_video_15.family import FIRST_FRAME, IMAGE, HunyuanVideo15Config
from dit.models.joint.diffusers import (
    first_frame,
    glyph_misfit,
    hunyuan_keys,
    hunyuan_rules,
    text_inputs,
)
from dit.models.joint.family import GLYPHS
from dit.models.joint.linear_names import FLUX, GLYPH_LINEARS, HUNYUAN, Words, hunyuan_names
from dit.models.joint.tensor_names import (
    HEAD_ROWS,
    double_stream_rows,
    glyph_rows,
    layer_norm_rows,
    refiner_rows,
    stream_sizes,
    two_linears,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

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


def _names(words: Words) -> dict[str, str]:
    return {
        **hunyuan_names(words, {"time_in": "time_embed.timestep_embedder"}, single=False),
        **GLYPH_LINEARS,
        "vision_in.proj.1": "image_embedder.linear_1",
        "vision_in.proj.3": "image_embedder.linear_2",
    }


HUNYUAN_NAMES = _names(replace(HUNYUAN, fused=False))
"""Diffusers' names of linears by their names in the original project."""
COMFYUI_NAMES = _names(FLUX)
"""Diffusers' names of linears by their names in ComfyUI and diffusion-pipe."""


def _rules(t: Any) -> list[Rule]:
    fed = 2 * t.out_channels + 1
    return [
        (
            t.in_channels == fed,
            f"in_channels={t.in_channels} must be {fed} for out_channels={t.out_channels}",
        ),
        *hunyuan_rules(t),
    ]


KEYS = ConfigKeys(
    keys=(
        *hunyuan_keys(
            heads=16, layers=54, text=3584, axes=Key("rope_axes_dim", "rope_axes", (16, 56, 56))
        ),
        Key("in_channels", default=65, write=lambda m: m.in_channels + m.condition_channels),
        Key("out_channels", "in_channels", 32),
        Key("patch_size", "patch_spatial", 1),
        Key("patch_size_t", "patch_temporal", 1),
        Key("text_embed_2_dim", "glyph_embed_size", 1472),
        Key("image_embed_dim", "image_embed_size", 1152),
        same("use_meanflow", False),
        same("target_size", 640),
        Key("task_type", default="i2v", written=never),
    ),
    rules=_rules,
)


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, model: HunyuanVideo15Config
) -> Tensor:
    """The output [C, F, H, W] of Diffusers' network for one sample at the timestep `level`.

    For a sample without a picture, the network gets zeros as image states, as in the pipeline for
    text-to-video.
    """
    import torch

    latent, inputs = sample.latent_CFHW, sample.inputs
    _, condition = first_frame(latent, inputs.get(FIRST_FRAME))
    text_LE, image = inputs["text"], inputs.get(IMAGE)
    if image is None or not len(image):
        image = text_LE.new_zeros(1, model.image_embed_size)
    (made,) = network(
        hidden_states=torch.cat([latent, condition])[None],
        timestep=torch.tensor([level]),
        **text_inputs(model, text_LE, inputs.get(GLYPHS)),
        image_embeds=image[None],
        # In comparisons a step ends at the data.
        timestep_r=torch.zeros(1) if model.use_meanflow else None,
        return_dict=False,
    )
    return made[0]


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(rows=_ROWS, sizes=_sizes, layers=lambda model: {"blocks": model.num_layers}),
    keys=KEYS,
    inexpressible=lambda model: glyph_misfit(model, CLASS),
    original_names=(HUNYUAN_NAMES, COMFYUI_NAMES),
    comfyui_names=lambda _: COMFYUI_NAMES,
    pipelines={
        "HunyuanVideo15Pipeline": Pipeline(),
        "HunyuanVideo15ImageToVideoPipeline": Pipeline(),
    },
    largest_latent=lambda m: (4096 * m.patch_temporal, *(4096 * m.patch_spatial,) * 2),
    run_network=_run_network,
)

"""HunyuanImage 2.1 in Diffusers, `HunyuanImageTransformer2DModel`: names, config.json, calls."""

# D model width, F and R widths of MLPs of layers and refiner, W width of the sinusoidal embedding
# E text width, G width of ByT5's states of quoted words, S hidden width of their embedding
# K head width, C numbers in a token

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from dit.config.checks import Rule
from dit.models.diffusers.arrangements import Convolution
from dit.models.diffusers.form import ConfigKeys, DiffusersForm, Key, Pipeline, same
from dit.models.diffusers.names import NameTable, Row, linear_rows
from dit.models.hunyuan_image.family import HunyuanImageConfig
from dit.models.joint.diffusers import (
    glyph_misfit,
    hunyuan_keys,
    hunyuan_rules,
    outputs_as_inputs,
    text_inputs,
)
from dit.models.joint.family import GLYPHS
from dit.models.joint.linear_names import FLUX, GLYPH_LINEARS, HUNYUAN, Words, hunyuan_names
from dit.models.joint.tensor_names import (
    HEAD_ROWS,
    glyph_rows,
    refiner_rows,
    stack_layers,
    stack_rows,
    stream_sizes,
    two_linears,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

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


def _names(words: Words) -> dict[str, str]:
    told = {
        "time_in": f"{_TOLD}.timestep_embedder",
        "time_r_in": f"{_TOLD}.timestep_embedder_r",
        "guidance_in": f"{_TOLD}.guidance_embedder",
    }
    return {**hunyuan_names(words, told), **GLYPH_LINEARS}


HUNYUAN_IMAGE_NAMES = _names(replace(HUNYUAN, fused=False))
"""Diffusers' names of linears by their names in the original code, in which linears are split."""
KOHYA_NAMES = _names(HUNYUAN)
"""Diffusers' names of linears by their names in original checkpoints and in kohya's scripts."""
COMFYUI_NAMES = _names(FLUX)
"""Diffusers' names of linears by their names in ComfyUI."""


def _rules(t: Any) -> list[Rule]:
    patch, axes = list(t.patch_size), list(t.rope_axes_dim)
    return [
        outputs_as_inputs(t),
        (
            len(patch) == 2 and patch[0] == patch[1],
            f"patch_size={patch} must be two equal numbers",
        ),
        (len(axes) == 2, f"rope_axes_dim={axes} must be two numbers, for rows and columns"),
        (
            t.text_embed_2_dim is not None,
            "text_embed_2_dim=null must be a number: our network needs ByT5's states",
        ),
        *hunyuan_rules(t),
    ]


_SIDES = tuple[PositiveInt, ...]
KEYS = ConfigKeys(
    keys=(
        *hunyuan_keys(
            heads=28,
            layers=20,
            text=3584,
            axes=Key("rope_axes_dim", "rope_axes", (64, 64), _SIDES),
        ),
        same("in_channels", 64),
        Key("out_channels", default=64, type=PositiveInt | None, write=lambda m: m.in_channels),
        same("num_single_layers", 40),
        Key(
            "patch_size",
            "patch_spatial",
            (1, 1),
            _SIDES,
            read=lambda t: t.patch_size[0],
            write=lambda m: (m.patch_spatial,) * 2,
        ),
        Key("guidance_embeds", "guidance_embed", False),
        Key("text_embed_2_dim", "glyph_embed_size", type=PositiveInt | None),
        same("use_meanflow", False),
    ),
    rules=_rules,
)


def _run_network(
    network: nn.Module,
    sample: LatentSample,
    level: float,
    model: HunyuanImageConfig,
    guidance: float | None = None,
) -> Tensor:
    import torch

    (made,) = network(
        hidden_states=sample.latent_CFHW[None, :, 0],
        timestep=torch.tensor([level]),
        **text_inputs(model, sample.text_LE, sample.others.get(GLYPHS)),
        # The network gets 1000 times the scale. In comparisons a step ends at the data.
        guidance=None if guidance is None else 1000 * torch.tensor([guidance]),
        timestep_r=torch.zeros(1) if model.use_meanflow else None,
        return_dict=False,
    )
    return made[0, :, None]


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(rows=_ROWS, sizes=_sizes, layers=stack_layers),
    keys=KEYS,
    inexpressible=lambda model: glyph_misfit(model, CLASS),
    original_names=(HUNYUAN_IMAGE_NAMES, KOHYA_NAMES, COMFYUI_NAMES),
    comfyui_names=lambda _: COMFYUI_NAMES,
    pipelines={"HunyuanImagePipeline": Pipeline()},
    largest_latent=lambda model: model.largest_latent,
    run_network=_run_network,
)

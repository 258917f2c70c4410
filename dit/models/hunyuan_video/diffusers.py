"""HunyuanVideo in Diffusers, `HunyuanVideoTransformer3DModel`: names, config.json, calls."""

# D model width, F and R widths of MLPs of layers and refiner, W width of the sinusoidal embedding
# E text width, P width of pooled text, I inputs of a token, C outputs of a token
# K head width

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from dit.config.checks import Rule
from dit.models.diffusers.arrangements import Convolution
from dit.models.diffusers.form import ConfigKeys, DiffusersForm, Key, Pipeline, same
from dit.models.diffusers.names import NameTable, Row, linear_rows
from dit.models.family import POOLED
from dit.models.hunyuan_video.family import FIRST_FRAME, FirstFrame, HunyuanVideoConfig
from dit.models.joint.diffusers import first_frame, hunyuan_keys, hunyuan_rules
from dit.models.joint.linear_names import FLUX, HUNYUAN, embedding_names, hunyuan_names
from dit.models.joint.tensor_names import (
    HEAD_ROWS,
    condition_rows,
    refiner_rows,
    stack_layers,
    stack_rows,
    stream_sizes,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "HunyuanVideoTransformer3DModel"

_ROWS: tuple[Row, ...] = (
    *linear_rows("patches", "x_embedder.proj", "D", "I", arrangement=Convolution()),
    *refiner_rows("refiner"),
    *condition_rows(guidance=lambda model: model.guidance_embed),
    *stack_rows(),
    *HEAD_ROWS,
)


def _sizes(model: HunyuanVideoConfig) -> dict[str, int]:
    return stream_sizes(model) | {"P": model.pooled_size, "I": model.input_features}


_TOLD = "time_text_embed"
_EMBEDDINGS = {
    "time_in": f"{_TOLD}.timestep_embedder",
    "guidance_in": f"{_TOLD}.guidance_embedder",
}
# Linears of pooled text; both projects use FLUX's names for them.
_POOLED = embedding_names(FLUX, {"vector_in": f"{_TOLD}.text_embedder"})

HUNYUAN_VIDEO_NAMES = {**hunyuan_names(HUNYUAN, _EMBEDDINGS), **_POOLED}
"""Diffusers' names of linears by their names in the original project and diffusion-pipe."""
COMFYUI_NAMES = {**hunyuan_names(FLUX, _EMBEDDINGS), **_POOLED}
"""Diffusers' names of linears by their names in ComfyUI."""


def _rules(t: Any) -> list[Rule]:
    shown = t.image_condition_type == FirstFrame.LATENT_CONCAT
    fed = 2 * t.out_channels + 1 if shown else t.out_channels
    return [
        (
            t.in_channels == fed,
            f"in_channels={t.in_channels} must be {fed} for out_channels={t.out_channels} and"
            f" image_condition_type={t.image_condition_type}",
        ),
        *hunyuan_rules(t),
    ]


KEYS = ConfigKeys(
    keys=(
        *hunyuan_keys(
            heads=24, layers=20, text=4096, axes=Key("rope_axes_dim", "rope_axes", (16, 56, 56))
        ),
        Key("in_channels", default=16, write=lambda m: m.in_channels + m.condition_channels),
        Key("out_channels", "in_channels", 16),
        same("num_single_layers", 40),
        Key("patch_size", "patch_spatial", 2),
        Key("patch_size_t", "patch_temporal", 1),
        Key("guidance_embeds", "guidance_embed", True),
        Key("pooled_projection_dim", "pooled_size", 768),
        Key(
            "image_condition_type",
            "image_condition",
            type=Literal["latent_concat", "token_replace"] | None,
            read=lambda t: FirstFrame(t.image_condition_type or "none"),
            write=lambda m: None if m.image_condition == "none" else str(m.image_condition),
        ),
    ),
    rules=_rules,
)


def _pipeline(*, of_image: bool) -> Pipeline:
    fed = "a first frame" if of_image else "no first frame"

    def rules(model: HunyuanVideoConfig) -> list[Rule]:
        shown = model.image_condition
        fits = of_image == (shown is not FirstFrame.NONE)
        return [(fits, f"model.image_condition={shown}, but the pipeline passes {fed}")]

    return Pipeline(rules=rules)


def without_first_frame(network: Any) -> nn.Module:
    """A network with the weights of `network` that treats no frame as given.

    Diffusers' class with `token_replace` uses timestep 0 for the first frame of every video.
    """
    import torch

    with torch.device("meta"):
        plain = type(network).from_config({**network.config, "image_condition_type": None})
    plain.load_state_dict(network.state_dict(), assign=True)
    return plain.eval()


def _run_network(
    network: nn.Module,
    sample: LatentSample,
    level: float,
    model: HunyuanVideoConfig,
    guidance: float | None = None,
) -> Tensor:
    """The output [C, F, H, W] of Diffusers' network for one sample, called as by a pipeline."""
    import torch

    latent, inputs = sample.latent_CFHW, sample.inputs
    given = inputs.get(FIRST_FRAME)
    frames, shown = first_frame(latent, given)
    match model.image_condition:
        case FirstFrame.LATENT_CONCAT:
            latent = torch.cat([latent, shown])
        case FirstFrame.TOKEN_REPLACE if frames:
            latent = torch.cat([shown[:-1, :frames], latent[:, frames:]], dim=1)
        case FirstFrame.TOKEN_REPLACE:
            network = without_first_frame(network)
    text = inputs["text"][None]
    (made,) = network(
        hidden_states=latent[None],
        timestep=torch.tensor([level]),
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        pooled_projections=inputs[POOLED][None],
        # The network gets 1000 times the scale.
        guidance=None if guidance is None else 1000 * torch.tensor([guidance]),
        return_dict=False,
    )
    return made[0]


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(rows=_ROWS, sizes=_sizes, layers=stack_layers),
    keys=KEYS,
    original_names=(HUNYUAN_VIDEO_NAMES, COMFYUI_NAMES),
    comfyui_names=lambda _: COMFYUI_NAMES,
    pipelines={
        "HunyuanVideoPipeline": _pipeline(of_image=False),
        "HunyuanVideoImageToVideoPipeline": _pipeline(of_image=True),
    },
    run_network=_run_network,
)

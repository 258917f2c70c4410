"""HunyuanVideo in Diffusers: names of tensors, config.json, pipelines, running its network.

Its class is `HunyuanVideoTransformer3DModel`.
"""

# D model width, F width of the MLP, R that of the refiner's, W cosines and sines of the level
# E text width, P width of pooled text, I numbers in a token that is fed, C of one that is predicted
# K head width

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from dit.batch import LatentSample
from dit.config import RunConfig
from dit.models.diffusers_form import DiffusersForm
from dit.models.diffusers_names import Convolution, NameTable, Row, linear_rows
from dit.models.hunyuan_video.config import FirstFrame, HunyuanVideoConfig
from dit.models.hunyuan_video.family import FIRST_FRAME, POOLED
from dit.models.hunyuan_video.original_names import COMFYUI_NAMES, HUNYUAN_VIDEO_NAMES
from dit.models.joint.hunyuan_form import (
    HunyuanKeys,
    NoPrivateKeys,
    network_keys,
    network_settings,
    unsupported_keys,
)
from dit.models.joint.tensor_names import (
    HEAD_ROWS,
    condition_rows,
    refiner_rows,
    stack_layers,
    stack_rows,
    stream_sizes,
)

CLASS = "HunyuanVideoTransformer3DModel"
IMAGE_TO_VIDEO = "HunyuanVideoImageToVideoPipeline"

_ROWS: tuple[Row, ...] = (
    *linear_rows("patches", "x_embedder.proj", "D", "I", arrangement=Convolution()),
    *refiner_rows("refiner"),
    *condition_rows(guidance=lambda model: model.guidance_embed),
    *stack_rows(),
    *HEAD_ROWS,
)


def _sizes(model: HunyuanVideoConfig) -> dict[str, int]:
    return stream_sizes(model) | {"P": model.pooled_size, "I": model.input_features}


class HunyuanVideoTransformer(HunyuanKeys):
    """config.json of `HunyuanVideoTransformer3DModel`."""

    in_channels: PositiveInt = 16
    out_channels: PositiveInt = 16
    num_attention_heads: PositiveInt = 24
    num_layers: PositiveInt = 20
    num_single_layers: PositiveInt = 40
    patch_size: PositiveInt = 2
    patch_size_t: PositiveInt = 1
    guidance_embeds: bool = True
    text_embed_dim: PositiveInt = 4096
    pooled_projection_dim: PositiveInt = 768
    rope_axes_dim: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 56, 56)
    image_condition_type: Literal["latent_concat", "token_replace"] | None = None


def _unsupported(t: HunyuanVideoTransformer) -> list[str]:
    """What of a config.json our network has no counterpart for."""
    shown = t.image_condition_type == FirstFrame.LATENT_CONCAT
    fed = 2 * t.out_channels + 1 if shown else t.out_channels
    return unsupported_keys(
        t,
        (
            t.in_channels == fed,
            f"in_channels={t.in_channels}, and out_channels={t.out_channels} with"
            f" image_condition_type={t.image_condition_type} goes with {fed}",
        ),
    )


def _settings(t: HunyuanVideoTransformer, *_: Any) -> dict[str, Any]:
    """Settings of our network, of a config.json."""
    return network_settings(t) | {
        "num_single_layers": t.num_single_layers,
        "in_channels": t.out_channels,
        "patch_temporal": t.patch_size_t,
        "patch_spatial": t.patch_size,
        "pooled_size": t.pooled_projection_dim,
        "guidance_embed": t.guidance_embeds,
        "image_condition": FirstFrame(t.image_condition_type or "none"),
    }


def _content(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's network."""
    m = config.model
    assert isinstance(m, HunyuanVideoConfig)
    shown = m.image_condition
    return network_keys(m) | {
        "in_channels": m.in_channels + m.condition_channels,
        "out_channels": m.in_channels,
        "num_single_layers": m.num_single_layers,
        "patch_size": m.patch_spatial,
        "patch_size_t": m.patch_temporal,
        "guidance_embeds": m.guidance_embed,
        "pooled_projection_dim": m.pooled_size,
        "image_condition_type": None if shown is FirstFrame.NONE else str(shown),
    }


def _pipeline_misfits(model: HunyuanVideoConfig, pipeline: str) -> list[str]:
    """What the pipeline feeds otherwise than in training."""
    shown, of_image = model.image_condition, pipeline == IMAGE_TO_VIDEO
    if of_image == (shown is not FirstFrame.NONE):
        return []
    fed = "a first frame" if of_image else "no first frame"
    return [f"model.image_condition={shown}, and it feeds {fed}"]


def without_first_frame(network: Any) -> nn.Module:
    """The network of the same weights that takes no frame for given.

    Diffusers' class tells tokens of the first frame level 0 in any video, given or not.
    """
    with torch.device("meta"):
        plain = type(network).from_config({**network.config, "image_condition_type": None})
    plain.load_state_dict(network.state_dict(), assign=True)
    return plain.eval()


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, config: RunConfig
) -> Tensor:
    """What Diffusers' network makes of one sample, by the pipeline for what it has."""
    model, latent, inputs = config.model, sample.latent_CFHW, sample.inputs
    assert isinstance(model, HunyuanVideoConfig)
    given, guidance = inputs.get(FIRST_FRAME), config.objective.guidance
    frames = 0 if given is None or given.shape[1] >= latent.shape[1] else given.shape[1]
    shown = latent.new_zeros(latent.shape[0] + 1, *latent.shape[1:])
    if given is not None and frames:
        shown[:-1, :frames], shown[-1, :frames] = given, 1
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
        # It is told 1000 times the scale.
        guidance=None if guidance is None else 1000 * torch.tensor([guidance]),
        return_dict=False,
    )
    return made[0]


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(
        rows=_ROWS,
        sizes=_sizes,
        layers=stack_layers,
    ),
    config_keys=HunyuanVideoTransformer,
    private_keys=NoPrivateKeys,
    unsupported=_unsupported,
    settings=_settings,
    content=_content,
    original_names=(HUNYUAN_VIDEO_NAMES, COMFYUI_NAMES),
    comfyui_names=lambda _: COMFYUI_NAMES,
    pipelines={"HunyuanVideoPipeline": "flow", IMAGE_TO_VIDEO: "flow"},
    pipeline_misfits=_pipeline_misfits,
    run_network=_run_network,
)

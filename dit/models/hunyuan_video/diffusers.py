"""HunyuanVideo in Diffusers: names of tensors, config.json, pipelines, running its network.

Its class is `HunyuanVideoTransformer3DModel`.
"""

# D model width, F width of the MLP, R that of the refiner's, W cosines and sines of the level
# E text width, P width of pooled text, I numbers in a token that is fed, C of one that is predicted
# K head width

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from torch import Tensor, nn

from dit.batch import LatentSample
from dit.config import RunConfig
from dit.models.diffusers_names import Convolution, NameTable, Row, StrictKeys, linear_rows
from dit.models.family import DiffusersForm
from dit.models.hunyuan_video.config import FirstFrame, HunyuanVideoConfig
from dit.models.hunyuan_video.family import FIRST_FRAME, POOLED
from dit.models.hunyuan_video.original_names import COMFYUI_NAMES, HUNYUAN_VIDEO_NAMES
from dit.models.layer_spec import LEVEL_WAVES, MOST_REFINER_LAYERS, REFINER_RATIO
from dit.models.stream_names import (
    HEAD_ROWS,
    condition_rows,
    double_stream_rows,
    refiner_rows,
    single_stream_rows,
    stream_sizes,
)

CLASS = "HunyuanVideoTransformer3DModel"
IMAGE_TO_VIDEO = "HunyuanVideoImageToVideoPipeline"

_ROWS: tuple[Row, ...] = (
    *linear_rows("patches", "x_embedder.proj", "D", "I", arrangement=Convolution()),
    *refiner_rows("refiner"),
    *condition_rows(guidance=lambda model: model.guidance_embed),
    *double_stream_rows("double_blocks.layers.*", "transformer_blocks.*"),
    *single_stream_rows("single_blocks.layers.*", "single_transformer_blocks.*"),
    *HEAD_ROWS,
)


def _sizes(model: HunyuanVideoConfig) -> dict[str, int]:
    return stream_sizes(model) | {
        "R": REFINER_RATIO * model.hidden_size,
        "W": LEVEL_WAVES,
        "E": model.crossattn_emb_size,
        "P": model.pooled_size,
        "I": model.input_features,
        "C": model.output_features,
    }


class HunyuanVideoPrivateKeys(StrictKeys):
    """What an export keeps in config.json that Diffusers has no place for: nothing."""


class HunyuanVideoTransformer(StrictKeys):
    """config.json of `HunyuanVideoTransformer3DModel`; keys that it does not have stay apart."""

    model_config = ConfigDict(extra="allow")

    in_channels: PositiveInt = 16
    out_channels: PositiveInt = 16
    num_attention_heads: PositiveInt = 24
    attention_head_dim: PositiveInt = 128
    num_layers: PositiveInt = 20
    num_single_layers: PositiveInt = 40
    num_refiner_layers: PositiveInt = 2
    mlp_ratio: PositiveFloat = 4.0
    patch_size: PositiveInt = 2
    patch_size_t: PositiveInt = 1
    qk_norm: str | None = "rms_norm"
    guidance_embeds: bool = True
    text_embed_dim: PositiveInt = 4096
    pooled_projection_dim: PositiveInt = 768
    rope_theta: PositiveFloat = 256.0
    rope_axes_dim: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 56, 56)
    image_condition_type: Literal["latent_concat", "token_replace"] | None = None


def _unsupported(t: HunyuanVideoTransformer) -> list[str]:
    """What of a config.json our network has no counterpart for."""
    shown = t.image_condition_type == FirstFrame.LATENT_CONCAT
    fed = 2 * t.out_channels + 1 if shown else t.out_channels
    rules = [
        (
            t.in_channels == fed,
            f"in_channels={t.in_channels}, and out_channels={t.out_channels} with"
            f" image_condition_type={t.image_condition_type} goes with {fed}",
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
    t: HunyuanVideoTransformer,
    private: HunyuanVideoPrivateKeys | None,  # noqa: ARG001  # there are none
    text_pad_to: int | None,  # noqa: ARG001  # no padding is attended to
) -> dict[str, Any]:
    """Settings of our network, of a config.json."""
    return {
        "num_layers": t.num_layers,
        "num_single_layers": t.num_single_layers,
        "hidden_size": t.num_attention_heads * t.attention_head_dim,
        "num_attention_heads": t.num_attention_heads,
        "mlp_ratio": t.mlp_ratio,
        "in_channels": t.out_channels,
        "patch_temporal": t.patch_size_t,
        "patch_spatial": t.patch_size,
        "crossattn_emb_size": t.text_embed_dim,
        "num_refiner_layers": t.num_refiner_layers,
        "pooled_size": t.pooled_projection_dim,
        "guidance_embed": t.guidance_embeds,
        "rope_axes": t.rope_axes_dim,
        "image_condition": FirstFrame(t.image_condition_type or "none"),
    }


def _content(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's network."""
    m = config.model
    assert isinstance(m, HunyuanVideoConfig)
    shown = m.image_condition
    return {
        "in_channels": m.in_channels + m.condition_channels,
        "out_channels": m.in_channels,
        "num_attention_heads": m.num_attention_heads,
        "attention_head_dim": m.hidden_size // m.num_attention_heads,
        "num_layers": m.num_layers,
        "num_single_layers": m.num_single_layers,
        "num_refiner_layers": m.num_refiner_layers,
        "mlp_ratio": m.mlp_ratio,
        "patch_size": m.patch_spatial,
        "patch_size_t": m.patch_temporal,
        "qk_norm": "rms_norm",
        "guidance_embeds": m.guidance_embed,
        "text_embed_dim": m.crossattn_emb_size,
        "pooled_projection_dim": m.pooled_size,
        "rope_theta": 256.0,
        "rope_axes_dim": m.rope_axes,
        "image_condition_type": None if shown is FirstFrame.NONE else str(shown),
    }


def _pipeline_misfits(model: HunyuanVideoConfig, pipeline: str) -> list[str]:
    """What the pipeline feeds otherwise than in training."""
    shown, of_image = model.image_condition, pipeline == IMAGE_TO_VIDEO
    if of_image == (shown is not FirstFrame.NONE):
        return []
    fed = "a first frame" if of_image else "no first frame"
    return [f"model.image_condition={shown}, and it feeds {fed}"]


def _open_network(folder: Path) -> nn.Module:
    """Diffusers' network in float32.

    Raises:
        ImportError: Diffusers is not installed.
    """
    from diffusers.models.transformers import transformer_hunyuan_video as theirs

    return theirs.HunyuanVideoTransformer3DModel.from_pretrained(folder, torch_dtype=torch.float32)


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
        layers=lambda model: {
            "double_blocks": model.num_layers,
            "single_blocks": model.num_single_layers,
        },
    ),
    config_keys=HunyuanVideoTransformer,
    private_keys=HunyuanVideoPrivateKeys,
    unsupported=_unsupported,
    settings=_settings,
    inexpressible=lambda _: [],
    content=_content,
    private=lambda _: {},
    text_pad_to=lambda _: None,
    original_names=(HUNYUAN_VIDEO_NAMES, COMFYUI_NAMES),
    comfyui_names=lambda _: COMFYUI_NAMES,
    pipelines={"HunyuanVideoPipeline": "flow", IMAGE_TO_VIDEO: "flow"},
    pipeline_misfits=_pipeline_misfits,
    largest_latent=lambda _: (2**20, 2**20, 2**20),  # positions are computed
    open_network=_open_network,
    run_network=_run_network,
)

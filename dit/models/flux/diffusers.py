"""FLUX.1 in Diffusers: names of tensors, config.json, pipelines, and how its network is run.

Its class is `FluxTransformer2DModel`.
"""

# D model width, F width of the MLP, W cosines and sines of a number that is told, E text width
# P width of pooled text, K head width, C numbers in a token
# T tokens, L text tokens; f h w frames, rows and columns in patches

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, PositiveInt
from torch import Tensor, nn

from dit.batch import TEXT, LatentSample
from dit.config import RunConfig, TextPadding
from dit.models.diffusers_names import (
    ByHead,
    NameTable,
    Row,
    StrictKeys,
    TensorSplit,
    linear_rows,
)
from dit.models.family import DiffusersForm, StackedSamples
from dit.models.flux.conditions import WAVES
from dit.models.flux.config import FluxConfig
from dit.models.flux.family import POOLED
from dit.models.flux.original_names import FLUX_NAMES
from dit.models.patches import patchify, unpatchify
from dit.models.positions import GridPositions
from dit.models.stream_names import (
    HEAD_ROWS,
    double_stream_rows,
    single_stream_rows,
    stream_sizes,
)

CLASS = "FluxTransformer2DModel"
_PATCH = 2  # rows and columns of a token in Diffusers' pipelines
_DOUBLE, _BLOCK = "double_blocks.layers.*", "transformer_blocks.*"
_SINGLE, _SINGLE_BLOCK = "single_blocks.layers.*", "single_transformer_blocks.*"
_REPLICATED, _COLUMN, _ROW = TensorSplit.REPLICATED, TensorSplit.COLUMN, TensorSplit.ROW
# Neighbours are rotated together there, and halves of a head here.
_BYHEAD_ROWS = ByHead(rotated=(0, 1))


def _two_linears(ours: str, theirs: str, inputs: str, **options: Any) -> tuple[Row, ...]:
    first, second = (f"{theirs}.linear_{n}" for n in (1, 2))
    return (
        *linear_rows(f"{ours}.linear_1", first, "D", inputs, **options),
        *linear_rows(f"{ours}.linear_2", second, "D", "D", **options),
    )


_TOLD = "time_text_embed"
_EMBEDDERS: tuple[Row, ...] = (
    *linear_rows("patches", "x_embedder", "D", "C"),
    *linear_rows("text_embedder", "context_embedder", "D", "E"),
    *_two_linears("told.level", f"{_TOLD}.timestep_embedder", "W"),
    *_two_linears(
        "told.guidance",
        f"{_TOLD}.guidance_embedder",
        "W",
        exists=lambda model: model.guidance_embed,
    ),
    *_two_linears("told.pooled", f"{_TOLD}.text_embedder", "P"),
)


_LAYERS: tuple[Row, ...] = (
    *double_stream_rows("double_blocks.layers.*", "transformer_blocks.*"),
    *single_stream_rows("single_blocks.layers.*", "single_transformer_blocks.*"),
)


def _sizes(model: FluxConfig) -> dict[str, int]:
    return stream_sizes(model) | {
        "W": WAVES,
        "E": model.crossattn_emb_size,
        "P": model.pooled_size,
        "C": model.patch_features,
    }


class FluxPrivateKeys(StrictKeys):
    """What an export keeps in config.json that Diffusers has no place for."""

    patch_spatial: PositiveInt
    patch_temporal: PositiveInt
    text_pad_to: Literal["stored"] | None
    reference_latents: int


class FluxTransformer(StrictKeys):
    """config.json of `FluxTransformer2DModel`; keys that it does not have are kept apart."""

    model_config = ConfigDict(extra="allow")

    patch_size: PositiveInt = 1
    in_channels: PositiveInt = 64
    out_channels: PositiveInt | None = None
    num_layers: PositiveInt = 19
    num_single_layers: PositiveInt = 38
    attention_head_dim: PositiveInt = 128
    num_attention_heads: PositiveInt = 24
    joint_attention_dim: PositiveInt = 4096
    pooled_projection_dim: PositiveInt = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 56, 56)


def _unsupported(t: FluxTransformer) -> list[str]:
    """What of a config.json our network has no counterpart for."""
    rules = [
        (t.patch_size == 1, f"patch_size={t.patch_size}; patches are cut before the network"),
        (
            t.out_channels in (None, t.in_channels),
            f"out_channels={t.out_channels} with in_channels={t.in_channels}",
        ),
    ]
    return [message for holds, message in rules if not holds]


def _settings(
    t: FluxTransformer, private: FluxPrivateKeys | None, text_pad_to: Any
) -> dict[str, Any]:
    """Settings of our network, of a config.json."""
    rows, frames = (private.patch_spatial, private.patch_temporal) if private else (_PATCH, 1)
    padding = private.text_pad_to if private else text_pad_to
    channels, rest = divmod(t.in_channels, frames * rows**2)
    if rest:
        raise ValueError(
            f"in_channels={t.in_channels} are no patches of {frames} frames x {rows} x {rows}"
        )
    return {
        "num_layers": t.num_layers,
        "num_single_layers": t.num_single_layers,
        "hidden_size": t.num_attention_heads * t.attention_head_dim,
        "num_attention_heads": t.num_attention_heads,
        "in_channels": channels,
        "patch_spatial": rows,
        "patch_temporal": frames,
        "crossattn_emb_size": t.joint_attention_dim,
        "pooled_size": t.pooled_projection_dim,
        "guidance_embed": t.guidance_embeds,
        "rope_axes": t.axes_dims_rope,
        "reference_latents": private.reference_latents if private else 0,
        "text_pad_to": TextPadding(padding) if padding else None,
    }


def _inexpressible(config: RunConfig) -> list[str]:
    """What of a run Diffusers' network has no counterpart for."""
    model = config.model
    if model.ffn_hidden_size == 4 * model.hidden_size:
        return []
    return [f"model.mlp_ratio={model.mlp_ratio:g} cannot be exported: {CLASS} has 4"]


def _content(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's network."""
    m = config.model
    assert isinstance(m, FluxConfig)
    return {
        "patch_size": 1,
        "in_channels": m.patch_features,
        "out_channels": None,
        "num_layers": m.num_layers,
        "num_single_layers": m.num_single_layers,
        "attention_head_dim": m.hidden_size // m.num_attention_heads,
        "num_attention_heads": m.num_attention_heads,
        "joint_attention_dim": m.crossattn_emb_size,
        "pooled_projection_dim": m.pooled_size,
        "guidance_embeds": m.guidance_embed,
        "axes_dims_rope": m.rope_axes,
    }


def _private(model: FluxConfig) -> dict[str, Any]:
    names = ("patch_spatial", "patch_temporal", "text_pad_to", "reference_latents")
    return {name: getattr(model, name) for name in names}


def _pipeline_misfits(model: FluxConfig, pipeline: str) -> list[str]:
    """What the pipeline feeds otherwise than in training."""
    patch = (model.patch_temporal, model.patch_spatial)
    rules = [
        (
            patch == (1, _PATCH),
            f"model.patch_temporal={patch[0]} and model.patch_spatial={patch[1]}, and it cuts"
            f" patches of 1 frame x {_PATCH} x {_PATCH}",
        ),
        (
            pipeline != KONTEXT or model.reference_latents > 0,
            "model.reference_latents=0, and it feeds a reference picture",
        ),
    ]
    return [message for holds, message in rules if not holds]


def _open_network(folder: Path) -> nn.Module:
    """Diffusers' network in float32.

    Raises:
        ImportError: Diffusers is not installed.
    """
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    return FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float32)


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, config: RunConfig
) -> Tensor:
    """What Diffusers' network makes of one sample."""
    model, guidance = config.model, config.objective.guidance
    latents = [sample.latent_CFHW, *_references(sample)]
    patch = (model.patch_temporal, model.patch_spatial)
    grids, rows = zip(*(patchify(latent, *patch) for latent in latents), strict=True)
    (made,) = network(
        hidden_states=torch.cat(rows)[None],
        encoder_hidden_states=sample.text_LE[None],
        pooled_projections=sample.others[POOLED][None],
        timestep=torch.tensor([level / 1000]),  # it multiplies by 1000 itself
        img_ids=GridPositions()(grids, fps=sample.fps),
        txt_ids=torch.zeros(len(sample.text_LE), 3),
        guidance=None if guidance is None else torch.tensor([guidance]),
        return_dict=False,
    )
    return unpatchify(made[0], grids[0], *patch)


def _run_stacked(network: nn.Module, samples: StackedSamples, config: RunConfig) -> Tensor:
    """What Diffusers' network makes of samples side by side, without references.

    It has no mask, so that it attends to the padding of shorter samples and captions.
    """
    model, guidance = config.model, config.objective.guidance
    text_BLE = samples.inputs[TEXT]
    latents = samples.latent_BCFHW.unbind()
    patch = (model.patch_temporal, model.patch_spatial)
    grids, rows = zip(*(patchify(latent, *patch) for latent in latents), strict=True)
    device = text_BLE.device
    (made,) = network(
        hidden_states=torch.stack(rows),
        encoder_hidden_states=text_BLE,
        pooled_projections=samples.inputs[POOLED],
        timestep=samples.level_B / 1000,  # it multiplies by 1000 itself
        img_ids=GridPositions()(grids[:1], fps=samples.fps).to(device),
        txt_ids=torch.zeros(text_BLE.shape[1], 3, device=device),
        guidance=None if guidance is None else samples.level_B.new_full((len(rows),), guidance),
        return_dict=False,
    )
    return torch.stack([unpatchify(one, grids[0], *patch) for one in made])


def _references(sample: LatentSample) -> list[Tensor]:
    return [value for name, value in sample.others.items() if name != POOLED]


KONTEXT = "FluxKontextPipeline"

FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(
        rows=(*_EMBEDDERS, *_LAYERS, *HEAD_ROWS),
        sizes=_sizes,
        layers=lambda model: {
            "double_blocks": model.num_layers,
            "single_blocks": model.num_single_layers,
        },
    ),
    config_keys=FluxTransformer,
    private_keys=FluxPrivateKeys,
    unsupported=_unsupported,
    settings=_settings,
    inexpressible=_inexpressible,
    content=_content,
    private=_private,
    text_pad_to=lambda _: TextPadding.STORED,
    original_names=(FLUX_NAMES,),
    pipelines={"FluxPipeline": "flow", KONTEXT: "flow"},
    settings_of_pipelines={KONTEXT: {"reference_latents": 1}},
    pipeline_misfits=_pipeline_misfits,
    largest_latent=lambda _: (2**20, 2**20, 2**20),  # positions are computed
    open_network=_open_network,
    run_network=_run_network,
    run_stacked=_run_stacked,
)

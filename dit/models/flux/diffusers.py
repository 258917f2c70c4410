"""FLUX.1 in Diffusers: names of tensors, config.json, pipelines, and how its network is run.

Its class is `FluxTransformer2DModel`.
"""

# D model width, F width of the MLP, W cosines and sines of a number that is told, E text width
# P width of pooled text, K head width, C numbers in a token
# T tokens, L text tokens; f h w frames, rows and columns in patches

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import ConfigDict, PositiveInt
from torch import Tensor, nn

from dit.batch import TEXT, LatentSample
from dit.config import RunConfig, TextPadding
from dit.models.diffusers_form import DiffusersForm, StackedSamples
from dit.models.diffusers_names import NameTable
from dit.models.flux.config import FluxConfig
from dit.models.flux.family import POOLED
from dit.models.flux.original_names import FLUX_NAMES, XLABS_NAMES
from dit.models.joint.flux_form import (
    DoubleSingleKeys,
    PatchKeys,
    mlp_misfit,
    network_keys,
    network_settings,
    patch_misfit,
    run_on_sample,
    unsupported_keys,
)
from dit.models.joint.tensor_names import (
    EMBEDDER_ROWS,
    HEAD_ROWS,
    condition_rows,
    stack_layers,
    stack_rows,
    stream_sizes,
)
from dit.models.patches import patchify, unpatchify
from dit.models.positions import GridPositions

CLASS = "FluxTransformer2DModel"


def _sizes(model: FluxConfig) -> dict[str, int]:
    return stream_sizes(model) | {"P": model.pooled_size}


class FluxPrivateKeys(PatchKeys):
    """What an export keeps in config.json that Diffusers has no place for."""

    text_pad_to: Literal["stored"] | None
    reference_latents: int


class FluxTransformer(DoubleSingleKeys):
    """config.json of `FluxTransformer2DModel`; keys that it does not have are kept apart."""

    model_config = ConfigDict(extra="allow")

    pooled_projection_dim: PositiveInt = 768
    guidance_embeds: bool = False


def _settings(
    t: FluxTransformer, private: FluxPrivateKeys | None, text_pad_to: Any
) -> dict[str, Any]:
    """Settings of our network, of a config.json."""
    padding = private.text_pad_to if private else text_pad_to
    return network_settings(t, private) | {
        "pooled_size": t.pooled_projection_dim,
        "guidance_embed": t.guidance_embeds,
        "reference_latents": private.reference_latents if private else 0,
        "text_pad_to": TextPadding(padding) if padding else None,
    }


def _content(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's network."""
    m = config.model
    assert isinstance(m, FluxConfig)
    return network_keys(m) | {
        "pooled_projection_dim": m.pooled_size,
        "guidance_embeds": m.guidance_embed,
    }


def _pipeline_misfits(model: FluxConfig, pipeline: str) -> list[str]:
    """What the pipeline feeds otherwise than in training."""
    blind = pipeline == KONTEXT and not model.reference_latents
    told = ["model.reference_latents=0, and it feeds a reference picture"] if blind else []
    return [*patch_misfit(model), *told]


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, config: RunConfig
) -> Tensor:
    """What Diffusers' network makes of one sample."""
    guidance, others = config.objective.guidance, dict(sample.others)
    told: dict[str, Any] = {"pooled_projections": others.pop(POOLED)[None]}
    told["guidance"] = None if guidance is None else torch.tensor([guidance])
    model: Any = config.model
    return run_on_sample(network, sample, level, model, references=(*others.values(),), **told)


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


KONTEXT = "FluxKontextPipeline"

_CALL = """\
h, w = (side // {patch} for side in state.shape[3:])
rows = state[:, :, 0].unflatten(3, (w, {patch})).unflatten(2, (h, {patch}))
made = network(
    rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2),
    encoder_hidden_states=caption,
    pooled_projections=texts["pooled_text"][None].float(),
    timestep=t.expand(1) / 1000,
    img_ids=torch.cartesian_prod(torch.arange(1), torch.arange(h), torch.arange(w)).float(),
    txt_ids=torch.zeros(caption.shape[1], 3),
    guidance={guidance},
).sample
made = made.unflatten(1, (h, w)).unflatten(3, (-1, {patch}, {patch})).permute(0, 3, 1, 4, 2, 5)
made = made.flatten(4).flatten(2, 3)[:, :, None]"""


def _call(model: FluxConfig) -> str | None:
    """Of pictures without references."""
    if model.reference_latents or model.patch_temporal > 1:
        return None
    guidance = "torch.ones(1)" if model.guidance_embed else "None"
    return _CALL.format(patch=model.patch_spatial, guidance=guidance)


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(
        rows=(
            *EMBEDDER_ROWS,
            *condition_rows(guidance=lambda model: model.guidance_embed),
            *stack_rows(),
            *HEAD_ROWS,
        ),
        sizes=_sizes,
        layers=stack_layers,
    ),
    config_keys=FluxTransformer,
    private_keys=FluxPrivateKeys,
    unsupported=unsupported_keys,
    settings=_settings,
    inexpressible=lambda config: mlp_misfit(config.model, CLASS),
    content=_content,
    text_pad_to=lambda _: TextPadding.STORED,
    original_names=(FLUX_NAMES, XLABS_NAMES),
    pipelines={"FluxPipeline": "flow", KONTEXT: "flow"},
    settings_of_pipelines={KONTEXT: {"reference_latents": 1}},
    pipeline_misfits=_pipeline_misfits,
    call=_call,
    run_network=_run_network,
    run_stacked=_run_stacked,
)

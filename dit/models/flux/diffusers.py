"""FLUX.1 in Diffusers, `FluxTransformer2DModel`: tensor names, config.json, pipelines, calls."""

# D model width, F width of the MLP, W width of a sinusoidal embedding, E text width
# P width of pooled text, K head width, C numbers in a token
# T tokens, L text tokens, B samples; f h w frames, rows and columns in patches

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dit.config import TextPadding
from dit.config.checks import Rule
from dit.models.diffusers.form import (
    ConfigKeys,
    DiffusersForm,
    Key,
    OwnKey,
    Pipeline,
    StackedSamples,
)
from dit.models.diffusers.names import NameTable
from dit.models.family import POOLED
from dit.models.flux.family import FluxConfig
from dit.models.joint.diffusers import (
    DOUBLE_SINGLE_KEYS,
    KEPT_PATCH,
    double_single_rules,
    mlp_misfit,
    patch_rules,
    run_on_patches,
    run_on_sample,
)
from dit.models.joint.linear_names import (
    EMBEDDERS,
    FLUX,
    HEAD,
    double_block_names,
    embedding_names,
    single_block_names,
)
from dit.models.joint.tensor_names import (
    EMBEDDER_ROWS,
    HEAD_ROWS,
    condition_rows,
    stack_layers,
    stack_rows,
    stream_sizes,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "FluxTransformer2DModel"


def _sizes(model: FluxConfig) -> dict[str, int]:
    return stream_sizes(model) | {"P": model.pooled_size}


_TOLD = "time_text_embed"
_EMBEDDINGS = {
    "time_in": f"{_TOLD}.timestep_embedder",
    "guidance_in": f"{_TOLD}.guidance_embedder",
    "vector_in": f"{_TOLD}.text_embedder",
}

FLUX_NAMES = {
    **EMBEDDERS,
    **embedding_names(FLUX, _EMBEDDINGS),
    **double_block_names(FLUX),
    **single_block_names(FLUX),
    **HEAD,
}

_DOUBLE, _SINGLE = "transformer_blocks.*.attn", "single_transformer_blocks.*"
_PROCESSOR = "double_blocks.*.processor"
XLABS_NAMES = {
    f"{_PROCESSOR}.qkv_lora1": f"{_DOUBLE}.to_q {_DOUBLE}.to_k {_DOUBLE}.to_v",
    f"{_PROCESSOR}.qkv_lora2": f"{_DOUBLE}.add_q_proj {_DOUBLE}.add_k_proj {_DOUBLE}.add_v_proj",
    f"{_PROCESSOR}.proj_lora1": f"{_DOUBLE}.to_out.0",
    f"{_PROCESSOR}.proj_lora2": f"{_DOUBLE}.to_add_out",
    # Without the first linear of the MLP, which the original linear1 also fuses.
    "single_blocks.*.processor.qkv_lora": " ".join(f"{_SINGLE}.attn.to_{x}" for x in "qkv"),
    "single_blocks.*.processor.proj_lora": f"{_SINGLE}.proj_out",
}
"""Diffusers' names of linears by their names in adapters of XLabs' trainer."""

KEYS = ConfigKeys(
    keys=(
        *DOUBLE_SINGLE_KEYS,
        Key("pooled_projection_dim", "pooled_size", 768),
        Key("guidance_embeds", "guidance_embed", False),
    ),
    kept=(
        *KEPT_PATCH,
        OwnKey("text_pad_to", TextPadding | None, published=lambda _: TextPadding.STORED),
        OwnKey("reference_latents", int, published=lambda _: 0),
    ),
    rules=double_single_rules,
)


def _kontext_rules(model: FluxConfig) -> list[Rule]:
    shown = model.reference_latents > 0
    return [
        *patch_rules(model),
        (shown, "model.reference_latents=0, but the pipeline passes a reference picture"),
    ]


def _run_network(
    network: nn.Module,
    sample: LatentSample,
    level: float,
    model: FluxConfig,
    guidance: float | None = None,
) -> Tensor:
    import torch

    others = dict(sample.others)
    told: dict[str, Any] = {"pooled_projections": others.pop(POOLED)[None]}
    told["guidance"] = None if guidance is None else torch.tensor([guidance])
    return run_on_sample(network, sample, level, model, references=(*others.values(),), **told)


def _run_stacked(
    network: nn.Module,
    samples: StackedSamples,
    model: FluxConfig,
    guidance: float | None = None,
) -> Tensor:
    """The outputs [B, C, F, H, W] of Diffusers' network for a padded batch without references.

    The network has no attention mask, so it attends to the padding of shorter captions.
    """
    import torch

    from dit.batch import TEXT

    level_B = samples.level_B
    return run_on_patches(
        network,
        [(latent,) for latent in samples.latent_BCFHW],
        samples.inputs[TEXT],
        model,
        fps=samples.fps,
        pooled_projections=samples.inputs[POOLED],
        timestep=level_B / 1000,  # the network multiplies by 1000
        guidance=None if guidance is None else torch.full_like(level_B, guidance),
    )


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
    """Python code for a model card that calls Diffusers' network (`DiffusersForm.call`).

    Returns None for networks with references or of videos.
    """
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
    keys=KEYS,
    inexpressible=lambda model: mlp_misfit(model, CLASS),
    original_names=(FLUX_NAMES, XLABS_NAMES),
    pipelines={
        "FluxPipeline": Pipeline(rules=patch_rules),
        "FluxKontextPipeline": Pipeline(settings={"reference_latents": 1}, rules=_kontext_rules),
    },
    call=_call,
    run_network=_run_network,
    run_stacked=_run_stacked,
)

"""Qwen-Image in Diffusers, `QwenImageTransformer2DModel`: names, config.json, pipelines, calls."""

# D model width, F width of the MLP, W width of the sinusoidal timestep embedding, E text width
# K head width, C numbers in a token, L text tokens

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from dit.config.checks import Rule
from dit.models.diffusers.form import (
    ConfigKeys,
    DiffusersForm,
    Key,
    OwnKey,
    Pipeline,
    heads_of,
    never,
    same,
)
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows
from dit.models.family import REFERENCE
from dit.models.joint.tensor_names import HEAD_ROWS, double_stream_rows, stream_sizes
from dit.models.qwen_image.family import MOST_REFERENCES, SCALE, QwenImageConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "QwenImageTransformer2DModel"
_LONGEST_SIDE = 2 * 4096  # in patches: Diffusers' table has 4096 positive and 4096 negative rows


_ROWS = (
    *linear_rows("patches", "img_in", "D", "C"),
    *linear_rows("level_in", "time_text_embed.timestep_embedder.linear_1", "D", "W"),
    *linear_rows("level_out", "time_text_embed.timestep_embedder.linear_2", "D", "D"),
    Row("text_norm.weight", ("txt_norm.weight",), TensorSplit.REPLICATED, ("E",)),
    *linear_rows("text_in", "txt_in", "D", "E"),
    *double_stream_rows(
        "blocks.layers.*",
        "transformer_blocks.*",
        modulations=("img_mod.1", "txt_mod.1"),
        mlps=("img_mlp", "txt_mlp"),
    ),
    *HEAD_ROWS,
)
# ComfyUI and diffusion-pipe have Diffusers' names; musubi-tuner has underscores instead of dots.
_matrices = [name for row in _ROWS if len(row.shape) == 2 for name in row.theirs]
LINEARS = {name.removesuffix(".weight"): name.removesuffix(".weight") for name in _matrices}


def _latent_channels(t: Any) -> int:
    return t.out_channels or t.in_channels


def _rules(t: Any) -> list[Rule]:
    channels = _latent_channels(t)
    features = t.patch_size**2 * channels
    return [
        (
            t.in_channels == features,
            f"in_channels={t.in_channels} must be {features} for patch_size={t.patch_size} and"
            f" out_channels={channels}",
        ),
        (not t.guidance_embeds, "guidance_embeds=true must be false"),
        (
            not t.use_additional_t_cond,
            "use_additional_t_cond=true must be false (Qwen-Image-Layered is not supported)",
        ),
        (
            not t.use_layer3d_rope,
            "use_layer3d_rope=true must be false (Qwen-Image-Layered is not supported)",
        ),
    ]


def _references(t: Any) -> int:
    """`model.reference_latents` of published weights with the config.json `t`.

    Only `zero_cond_t`, the mark of Edit-2511, tells a network with references. The files of
    Qwen-Image and Qwen-Image-Edit are equal, so for them it is 0.
    """
    return MOST_REFERENCES if t.zero_cond_t else 0


KEYS = ConfigKeys(
    keys=(
        Key("patch_size", "patch_spatial", 2),
        Key("in_channels", default=64, write=lambda m: m.patch_features),
        Key("out_channels", "in_channels", 16, PositiveInt | None, read=_latent_channels),
        same("num_layers", 60),
        heads_of(128),
        same("num_attention_heads", 24),
        Key("joint_attention_dim", "crossattn_emb_size", 3584),
        Key("guidance_embeds", default=False),
        Key("axes_dims_rope", "rope_axes", (16, 56, 56)),
        Key("zero_cond_t", "clean_references", False),
        Key("use_additional_t_cond", default=False, written=never),
        Key("use_layer3d_rope", default=False, written=never),
    ),
    kept=(OwnKey("reference_latents", int, published=_references),),
    rules=_rules,
)


def _inexpressible(model: QwenImageConfig) -> list[str]:
    if model.ffn_hidden_size == 4 * model.hidden_size:
        return []
    return [
        f"model.mlp_ratio={model.mlp_ratio:g} cannot be exported: 4 is fixed in Diffusers' {CLASS}."
        " Train with model.mlp_ratio=4 to export"
    ]


_PICTURES = {
    "QwenImagePipeline": 0,
    "QwenImageEditPipeline": 1,
    "QwenImageEditPlusPipeline": MOST_REFERENCES,
}
"""Largest number of pictures to edit in each pipeline."""


def _pipeline(name: str) -> Pipeline:
    count = _PICTURES[name]

    def rules(model: QwenImageConfig) -> list[Rule]:
        fits = (count > 0) == (model.reference_latents > 0)
        shows = "pictures" if count else "no picture"
        return [
            (
                fits,
                f"model.reference_latents={model.reference_latents}, but {name} passes {shows} to"
                " edit",
            )
        ]

    return Pipeline(settings={"reference_latents": count} if count else {}, rules=rules)


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, model: QwenImageConfig
) -> Tensor:
    import torch
    from torch.nn.functional import pad

    from dit.models.positions import patchify, unpatchify

    latents = [sample.latent_CFHW]
    latents += [x for name, x in sample.others.items() if name.startswith(REFERENCE)]
    patch = (1, model.patch_spatial)
    grids, rows = zip(*(patchify(x, *patch) for x in latents), strict=True)
    # Diffusers' network needs at least one text token; for an empty text it is masked.
    is_text_L = torch.ones(max(len(sample.text_LE), 1), dtype=torch.bool)
    text_LE = pad(sample.text_LE, (0, 0, 0, len(is_text_L) - len(sample.text_LE)))
    is_text_L[len(sample.text_LE) :] = False
    (made,) = network(
        hidden_states=torch.cat(rows)[None],
        timestep=torch.tensor([level / SCALE]),
        encoder_hidden_states=text_LE[None],
        encoder_hidden_states_mask=is_text_L[None],
        img_shapes=[list(grids)],
        return_dict=False,
    )
    return unpatchify(made[0], grids[0], *patch)


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(
        rows=_ROWS, sizes=stream_sizes, layers=lambda model: {"blocks": model.num_layers}
    ),
    keys=KEYS,
    inexpressible=_inexpressible,
    original_names=(LINEARS,),
    comfyui_names=lambda _: LINEARS,
    pipelines={name: _pipeline(name) for name in _PICTURES},
    largest_latent=lambda model: (4096, *(_LONGEST_SIDE * model.patch_spatial,) * 2),
    run_network=_run_network,
)

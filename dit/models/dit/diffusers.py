"""The DiT in Diffusers, `CosmosTransformer3DModel`: tensor names, config.json, pipelines, calls."""

# D model width, R rank of a modulation, F width of the MLP, E width of the text in the layers,
# I width of the text in the shards, K head width, C numbers in a token of the latent (P with the
# masks), frames rows columns: learnable positions; B samples, F H W sides of a latent

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import PositiveFloat, PositiveInt

from dit.config.checks import Rule
from dit.models.diffusers.arrangements import ByHead, Features
from dit.models.diffusers.form import (
    VIDEO_PATCH,
    ConfigKeys,
    DiffusersForm,
    FrozenTextProjection,
    Key,
    OwnKey,
    StackedSamples,
    heads_of,
    never,
    same,
)
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows
from dit.models.dit import conditioner_form
from dit.models.dit.family import CLEAN_LEVEL, DitConfig, ExtraPosition, TextConditioner
from dit.models.dit.pipelines import PIPELINES
from dit.models.family import InputKind
from dit.models.registry import family_of
from dit.token_ids import TOKEN_IDS, as_ids

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "CosmosTransformer3DModel"
_BASE_FPS = 24.0  # fixed in Diffusers
_LAYER, _BLOCK = "decoder.layers.*", "transformer_blocks.*"
_SELF, _CROSS, _MLP = (f"{_LAYER}.{part}" for part in ("self_attention", "cross_attention", "mlp"))
_REPLICATED, _COLUMN, _ROW = TensorSplit.REPLICATED, TensorSplit.COLUMN, TensorSplit.ROW


def _same(
    ours: str, theirs: str, *shape: str, split: TensorSplit = _REPLICATED, **options: Any
) -> Row:
    return Row(ours, (theirs,), split, shape, **options)


def _by_head(ours: str, theirs: str, letters: str, *shape: str) -> Row:
    names = tuple(f"{theirs}.to_{letter}.weight" for letter in letters)
    return Row(ours, names, _COLUMN, shape, ByHead())


def _modulation(ours: str, theirs: str, parts: str) -> tuple[Row, ...]:
    return (
        _same(f"{ours}.linear_1.weight", f"{theirs}.linear_1.weight", "R", "D"),
        _same(f"{ours}.linear_2.weight", f"{theirs}.linear_2.weight", parts, "R"),
    )


def _attention(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        _same(f"{ours}.linear_proj.weight", f"{theirs}.to_out.0.weight", "D", "D", split=_ROW),
        _same(f"{ours}.q_layernorm.weight", f"{theirs}.norm_q.weight", "K"),
        _same(f"{ours}.k_layernorm.weight", f"{theirs}.norm_k.weight", "K"),
    )


def _positions() -> Iterator[Row]:
    learnt: Any = {"exists": lambda model: model.learnable_positions}
    for axis, size in zip("thw", ("frames", "rows", "columns"), strict=True):
        theirs = f"learnable_pos_embed.pos_emb_{axis}"
        yield _same(f"positions.pos_emb_{axis}", theirs, size, "D", **learnt)


_ROWS: tuple[Row, ...] = (
    _same("patches.weight", "patch_embed.proj.weight", "D", "P"),
    _same("level.linear_1.weight", "time_embed.t_embedder.linear_1.weight", "D", "D"),
    _same("level.linear_2.weight", "time_embed.t_embedder.linear_2.weight", "3D", "D"),
    _same("level.norm.weight", "time_embed.norm.weight", "D"),
    *_positions(),
    *linear_rows("text_proj", "crossattn_proj.0", "E", "I", exists=lambda m: m.projects_text),
    *_modulation(f"{_LAYER}.modulate_self", f"{_BLOCK}.norm1", "3D"),
    _by_head(f"{_SELF}.linear_qkv.weight", f"{_BLOCK}.attn1", "qkv", "3D", "D"),
    *_attention(_SELF, f"{_BLOCK}.attn1"),
    *_modulation(f"{_LAYER}.modulate_cross", f"{_BLOCK}.norm2", "3D"),
    _same(f"{_CROSS}.linear_q.weight", f"{_BLOCK}.attn2.to_q.weight", "D", "D", split=_COLUMN),
    _by_head(f"{_CROSS}.linear_kv.weight", f"{_BLOCK}.attn2", "kv", "2D", "E"),
    *_attention(_CROSS, f"{_BLOCK}.attn2"),
    *_modulation(f"{_LAYER}.modulate_mlp", f"{_BLOCK}.norm3", "3D"),
    _same(f"{_MLP}.linear_fc1.weight", f"{_BLOCK}.ff.net.0.proj.weight", "F", "D", split=_COLUMN),
    _same(f"{_MLP}.linear_fc2.weight", f"{_BLOCK}.ff.net.2.weight", "D", "F", split=_ROW),
    *_modulation("modulate_out", "norm_out", "2D"),
    _same("proj_out.weight", "proj_out.weight", "C", "D", arrangement=Features("hwtc")),
    *conditioner_form.ROWS,
)


def _sizes(model: DitConfig) -> dict[str, int]:
    width = model.hidden_size
    frames, rows, columns = model.max_size
    return {
        "D": width,
        "2D": 2 * width,
        "3D": 3 * width,
        "R": model.adaln_lora_dim,
        "F": model.ffn_hidden_size,
        "E": model.text_width,
        "I": model.crossattn_emb_size,
        "K": width // model.num_attention_heads,
        "C": model.output_features,
        "P": model.patch_features + model.mask_features,
        "frames": frames // model.patch_temporal,
        "rows": rows // model.patch_spatial,
        "columns": columns // model.patch_spatial,
        **conditioner_form.sizes(model),
    }


_OUTER = {
    "final_layer.linear": "proj_out",
    "t_embedder.1.linear_1": "time_embed.t_embedder.linear_1",
    "t_embedder.1.linear_2": "time_embed.t_embedder.linear_2",
    "x_embedder.proj.1": "patch_embed.proj",
}


def _names(
    modulations: list[str], attentions: list[str], linears: list[str], mlp: str, last: str
) -> dict[str, str]:
    names = dict(_OUTER)
    for n, one in enumerate(modulations, start=1):
        names |= {f"{one}.{linear}": f"{_BLOCK}.norm{n}.linear_{linear}" for linear in (1, 2)}
    ours = ("to_q", "to_k", "to_v", "to_out.0")
    for n, one in enumerate(attentions, start=1):
        both = zip(linears, ours, strict=True)
        names |= {f"{one}.{theirs}": f"{_BLOCK}.attn{n}.{name}" for theirs, name in both}
    names |= {f"{mlp}.layer1": f"{_BLOCK}.ff.net.0.proj", f"{mlp}.layer2": f"{_BLOCK}.ff.net.2"}
    return names | {f"{last}.{linear}": f"norm_out.linear_{linear}" for linear in (1, 2)}


PREDICT2_NAMES = {
    "crossattn_proj.0": "crossattn_proj.0",
    **_names(
        [f"blocks.*.adaln_modulation_{part}" for part in ("self_attn", "cross_attn", "mlp")],
        ["blocks.*.self_attn", "blocks.*.cross_attn"],
        ["q_proj", "k_proj", "v_proj", "output_proj"],
        mlp="blocks.*.mlp",
        last="final_layer.adaln_modulation",
    ),
    **conditioner_form.ORIGINAL_NAMES,
}
COSMOS1_NAMES = _names(
    [f"blocks.block*.blocks.{part}.adaLN_modulation" for part in range(3)],
    [f"blocks.block*.blocks.{part}.block.attn" for part in range(2)],
    ["to_q.0", "to_k.0", "to_v.0", "to_out.0"],
    mlp="blocks.block*.blocks.2.block",
    last="final_layer.adaLN_modulation",
)
"""Diffusers' names of linears by their names in the code of Cosmos 1."""


def _rules(t: Any) -> list[Rule]:
    return [
        (
            t.in_channels in (t.out_channels, t.out_channels + 1),
            f"in_channels={t.in_channels} must be out_channels={t.out_channels}, or one more for a"
            " condition mask",
        ),
        (
            t.patch_size[1] == t.patch_size[2],
            (f"patch_size={list(t.patch_size)} must have as many rows as columns"),
        ),
        (
            t.extra_pos_embed_type in (None, "learnable"),
            f'extra_pos_embed_type={t.extra_pos_embed_type!r} must be null or "learnable"',
        ),
        (
            not t.use_crossattn_projection or t.encoder_hidden_states_channels == t.text_embed_dim,
            f"encoder_hidden_states_channels={t.encoder_hidden_states_channels} must be equal to"
            f" text_embed_dim={t.text_embed_dim}",
        ),
        (
            not t.img_context_dim_in,
            f"img_context_dim_in={t.img_context_dim_in}, but our network takes no image context",
        ),
        (
            t.controlnet_block_every_n is None,
            f"controlnet_block_every_n={t.controlnet_block_every_n}, but our network has no"
            " ControlNet inputs",
        ),
    ]


def _of_projection(name: str, default: Any, write: Callable[[Any], Any]) -> Key:
    return Key(name, default=default, write=write, written=lambda m: m.projects_text)


def _text_widths(t: Any) -> tuple[int, int | None]:
    """(width of the text in shards, width after the projection or None if there is none)."""
    if t.use_crossattn_projection:
        return t.crossattn_proj_in_channels, t.text_embed_dim
    return t.text_embed_dim, None


def _largest(m: DitConfig, longest: int | None) -> tuple[int, ...]:
    """The value of Diffusers' `max_size`: latent frames, rows and columns.

    It is `model.max_size` if positions are learnable, or if `longest` is None. Otherwise each axis
    has at least `longest` tokens, the length of the longest pack: Diffusers looks rotary positions
    up in a table of this size, while our network computes them.
    """
    if m.learnable_positions or longest is None:
        return m.max_size
    patch = (m.patch_temporal, m.patch_spatial, m.patch_spatial)
    return tuple(max(side, longest * p) for side, p in zip(m.max_size, patch, strict=True))


KEYS = ConfigKeys(
    keys=(
        Key(
            "in_channels",
            "condition_mask",
            16,
            read=lambda t: t.in_channels > t.out_channels,
            write=lambda m: m.in_channels + m.condition_mask,
        ),
        Key("out_channels", "in_channels", 16),
        same("num_attention_heads", 32),
        heads_of(128),
        same("num_layers", 28),
        same("mlp_ratio", 4.0),
        Key(
            "text_embed_dim",
            ("crossattn_emb_size", "crossattn_proj_size"),
            1024,
            read=_text_widths,
            write=lambda m: m.text_width,
        ),
        same("adaln_lora_dim", 256),
        Key("max_size", default=(128, 240, 240), write_trained=_largest),
        VIDEO_PATCH,
        same("rope_scale", (2.0, 1.0, 1.0)),
        same("concat_padding_mask", True),
        Key(
            "extra_pos_embed_type",
            "extra_pos_embed",
            "learnable",
            str | None,
            read=lambda t: ExtraPosition(t.extra_pos_embed_type or "none"),
            write=lambda m: "learnable" if m.learnable_positions else None,
        ),
        _of_projection("use_crossattn_projection", False, lambda m: m.projects_text),
        _of_projection("crossattn_proj_in_channels", 1024, lambda m: m.crossattn_emb_size),
        _of_projection("encoder_hidden_states_channels", 1024, lambda m: m.text_width),
        Key("controlnet_block_every_n", type=int | None, written=never),
        Key("img_context_dim_in", type=int | None, written=never),
        Key("img_context_num_tokens", default=256, type=int | None, written=never),
        Key("img_context_dim_out", default=2048, type=int | None, written=never),
    ),
    kept=(
        # The published weights attend to the caption and zeros up to this many tokens; those of 2.5
        # to the encoder's states of padding instead, which the shards contain.
        OwnKey(
            "text_pad_to",
            PositiveInt | None,
            published=lambda t: None if t.use_crossattn_projection else 512,
        ),
        OwnKey("max_size", tuple[(PositiveInt,) * 3], published=lambda t: t.max_size),
        # Pipelines of networks with a text projection pass no frame rate to the network. Older
        # exports, without this key, have 24.
        OwnKey(
            "base_fps",
            PositiveFloat | None,
            published=lambda t: None if t.use_crossattn_projection else _BASE_FPS,
            default=_BASE_FPS,
        ),
        OwnKey(
            "text_conditioner",
            TextConditioner,
            published=lambda _: TextConditioner.NONE,
            read=TextConditioner,
            default=TextConditioner.NONE,
            may_be_told=True,
        ),
    ),
    rules=_rules,
)


def _inexpressible(model: DitConfig) -> list[str]:
    fps = model.base_fps
    if fps in (_BASE_FPS, None):
        return []
    return [
        f"model.base_fps={fps:g} cannot be exported: {_BASE_FPS:g} is fixed in Diffusers' {CLASS}."
        f" Train with model.base_fps={_BASE_FPS:g} or null to export"
    ]


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, model: DitConfig
) -> Tensor:
    import torch
    from torch import nn

    text = sample.text_LE
    if model.trains_conditioner:
        conditioner: Any = network.get_submodule(conditioner_form.FOLDER)
        ids_L = as_ids(sample.others[TOKEN_IDS])
        (text,) = conditioner(source_hidden_states=text[None], target_input_ids=ids_L[None])
    elif model.text_pad_to is not None:
        text = nn.functional.pad(text, (0, 0, 0, model.text_pad_to - len(text)))
    # The padding mask is passed as a channel of zeros: Diffusers would resize it with torchvision,
    # which may not be installed.
    network.register_to_config(concat_padding_mask=False)  # type: ignore[attr-defined]
    latent_CFHW = sample.latent_CFHW
    given = _given_frames(sample, model)
    is_given_1F11 = (torch.arange(latent_CFHW.shape[1]) < given.shape[1]).view(1, -1, 1, 1)
    masks = is_given_1F11.to(latent_CFHW).expand(1, *latent_CFHW.shape[1:])
    parts = [torch.cat([given, latent_CFHW[:, given.shape[1] :]], dim=1)]
    parts += [masks] * model.condition_mask + [torch.zeros_like(masks)] * model.concat_padding_mask
    told = torch.where(is_given_1F11, CLEAN_LEVEL, level)[None]
    (latent,) = network(
        hidden_states=torch.cat(parts)[None],
        timestep=told if model.condition_mask else torch.tensor([level]),
        encoder_hidden_states=text[None],
        fps=None if math.isnan(sample.fps) or model.base_fps is None else sample.fps,
        return_dict=False,
    )
    return latent[0]


def _run_stacked(network: nn.Module, samples: StackedSamples, model: DitConfig) -> Tensor:
    """The outputs [B, C, F, H, W] of Diffusers' network for a padded batch without given frames.

    Raises:
        ValueError: the network has inputs that this function does not supply.
    """
    from dit.batch import TEXT

    if model.trains_conditioner:
        raise ValueError(
            "model.text_conditioner=trained cannot be compared with Diffusers in padded batches;"
            " set model.text_conditioner=stored"
        )
    if model.concat_padding_mask or model.condition_mask or model.text_pad_to is not None:
        raise ValueError(
            "networks with masks or padded captions cannot be compared with Diffusers in padded"
            " batches; set model.concat_padding_mask=false, model.condition_mask=false and"
            " model.text_pad_to=null"
        )
    (made_BCFHW,) = network(
        hidden_states=samples.latent_BCFHW,
        timestep=samples.level_B,
        encoder_hidden_states=samples.inputs[TEXT],
        attention_mask=samples.is_text_BL,
        fps=None if math.isnan(samples.fps) else int(samples.fps),
        return_dict=False,
    )
    return made_BCFHW


def _given_frames(sample: LatentSample, model: DitConfig) -> Tensor:
    """The given clean frames of a sample, [C, f, H, W]; f may be 0."""
    inputs = family_of(model).inputs(model)
    names = [one.name for one in inputs if one.kind is InputKind.FRAMES]
    found = [sample.others[name] for name in names if name in sample.others]
    return found[0] if found else sample.latent_CFHW[:, :0]


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(rows=_ROWS, sizes=_sizes, layers=lambda model: {"decoder": model.num_layers}),
    keys=KEYS,
    inexpressible=_inexpressible,
    companion=conditioner_form.COMPANION,
    text_projection=FrozenTextProjection(
        tensors=("crossattn_proj.0.weight", "crossattn_proj.0.bias"),
        is_part=lambda m: m.projects_text,
        added=lambda model, width: replace(
            model, crossattn_emb_size=width, crossattn_proj_size=model.crossattn_emb_size
        ),
        removed=lambda model: replace(
            model, crossattn_emb_size=model.crossattn_proj_size, crossattn_proj_size=None
        ),
    ),
    original_names=(PREDICT2_NAMES, COSMOS1_NAMES),
    # Cosmos 1 has learnable positions; no published Predict2 has.
    comfyui_names=lambda model: COSMOS1_NAMES if model.learnable_positions else PREDICT2_NAMES,
    pipelines=PIPELINES,
    largest_latent=lambda model: model.max_size,
    call=lambda model: (
        None
        if model.condition_mask or model.concat_padding_mask or model.trains_conditioner
        else "made = network(state, t.expand(1), caption, fps=None).sample"
    ),
    run_network=_run_network,
    run_stacked=_run_stacked,
)

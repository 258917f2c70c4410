"""The DiT in Diffusers: names of tensors, config.json, pipelines, and how its network is run.

Its class is `CosmosTransformer3DModel`.
"""

# D model width, R rank of a modulation, F width of the MLP, E width of the text that layers see,
# I width of the text in the shards, K head width, C numbers in a token of the latent (P with the
# masks), frames rows columns: learnable positions

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from torch import Tensor, nn

from dit.batch import TEXT, LatentSample
from dit.config import RunConfig
from dit.models.diffusers_form import DiffusersForm, FrozenTextProjection, StackedSamples
from dit.models.diffusers_names import (
    ByHead,
    Features,
    NameTable,
    Row,
    StrictKeys,
    TensorSplit,
)
from dit.models.dit.config import CLEAN_LEVEL, DitConfig, ExtraPosition
from dit.models.dit.original_names import COSMOS1_NAMES, PREDICT2_NAMES
from dit.models.dit.pipelines import (
    OBJECTIVES,
    PIPELINES,
    pipeline_misfits,
    sampling_settings,
)
from dit.models.family import InputKind
from dit.models.registry import family_of

CLASS = "CosmosTransformer3DModel"
_BASE_FPS = 24.0  # fixed in Diffusers
_LAYER, _BLOCK = "decoder.layers.*", "transformer_blocks.*"
_SELF, _CROSS = f"{_LAYER}.self_attention", f"{_LAYER}.cross_attention"
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


def _positions(axis: str, size: str) -> Row:
    name = f"pos_emb_{axis}"
    return _same(
        f"positions.{name}",
        f"learnable_pos_embed.{name}",
        *(size, "D"),
        exists=lambda model: model.learnable_positions,
    )


def _projection(name: str, *shape: str) -> Row:
    return _same(
        f"text_proj.{name}",
        f"crossattn_proj.0.{name}",
        *shape,
        exists=lambda model: model.crossattn_proj_size is not None,
    )


_ROWS: tuple[Row, ...] = (
    _same("patches.weight", "patch_embed.proj.weight", "D", "P"),
    _same("level.linear_1.weight", "time_embed.t_embedder.linear_1.weight", "D", "D"),
    _same("level.linear_2.weight", "time_embed.t_embedder.linear_2.weight", "3D", "D"),
    _same("level.norm.weight", "time_embed.norm.weight", "D"),
    _positions("t", "frames"),
    _positions("h", "rows"),
    _positions("w", "columns"),
    _projection("weight", "E", "I"),
    _projection("bias", "E"),
    *_modulation(f"{_LAYER}.modulate_self", f"{_BLOCK}.norm1", "3D"),
    _by_head(f"{_SELF}.linear_qkv.weight", f"{_BLOCK}.attn1", "qkv", "3D", "D"),
    *_attention(_SELF, f"{_BLOCK}.attn1"),
    *_modulation(f"{_LAYER}.modulate_cross", f"{_BLOCK}.norm2", "3D"),
    _same(f"{_CROSS}.linear_q.weight", f"{_BLOCK}.attn2.to_q.weight", "D", "D", split=_COLUMN),
    _by_head(f"{_CROSS}.linear_kv.weight", f"{_BLOCK}.attn2", "kv", "2D", "E"),
    *_attention(_CROSS, f"{_BLOCK}.attn2"),
    *_modulation(f"{_LAYER}.modulate_mlp", f"{_BLOCK}.norm3", "3D"),
    _same(
        f"{_LAYER}.mlp.linear_fc1.weight",
        f"{_BLOCK}.ff.net.0.proj.weight",
        *("F", "D"),
        split=_COLUMN,
    ),
    _same(f"{_LAYER}.mlp.linear_fc2.weight", f"{_BLOCK}.ff.net.2.weight", "D", "F", split=_ROW),
    *_modulation("modulate_out", "norm_out", "2D"),
    _same("proj_out.weight", "proj_out.weight", "C", "D", arrangement=Features("hwtc")),
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
    }


class DitPrivateKeys(StrictKeys):
    """What an export keeps in config.json that Diffusers has no place for."""

    text_pad_to: PositiveInt | None
    max_size: tuple[PositiveInt, PositiveInt, PositiveInt]
    base_fps: PositiveFloat | None = _BASE_FPS  # exports without this key were of models with 24


class CosmosTransformer(StrictKeys):
    """config.json of `CosmosTransformer3DModel`; keys that it does not have are kept apart."""

    model_config = ConfigDict(extra="allow")

    in_channels: PositiveInt = 16
    out_channels: PositiveInt = 16
    num_attention_heads: PositiveInt = 32
    attention_head_dim: PositiveInt = 128
    num_layers: PositiveInt = 28
    mlp_ratio: PositiveFloat = 4.0
    text_embed_dim: PositiveInt = 1024
    adaln_lora_dim: PositiveInt = 256
    max_size: tuple[PositiveInt, PositiveInt, PositiveInt] = (128, 240, 240)
    patch_size: tuple[PositiveInt, PositiveInt, PositiveInt] = (1, 2, 2)
    rope_scale: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (2.0, 1.0, 1.0)
    concat_padding_mask: bool = True
    extra_pos_embed_type: str | None = "learnable"
    use_crossattn_projection: bool = False
    crossattn_proj_in_channels: PositiveInt = 1024
    encoder_hidden_states_channels: PositiveInt = 1024
    controlnet_block_every_n: int | None = None
    img_context_dim_in: int | None = None
    img_context_num_tokens: int | None = 256
    img_context_dim_out: int | None = 2048


def _unsupported(t: CosmosTransformer) -> list[str]:
    """What of a config.json our network has no counterpart for."""
    rules = [
        (
            t.in_channels in (t.out_channels, t.out_channels + 1),
            f"in_channels={t.in_channels} are not out_channels={t.out_channels}, alone or with a"
            " condition mask",
        ),
        (
            t.patch_size[1] == t.patch_size[2],
            f"patch_size={list(t.patch_size)} is not square",
        ),
        (
            t.extra_pos_embed_type in (None, "learnable"),
            f"extra_pos_embed_type={t.extra_pos_embed_type!r}",
        ),
        (
            not t.use_crossattn_projection or t.encoder_hidden_states_channels == t.text_embed_dim,
            f"encoder_hidden_states_channels={t.encoder_hidden_states_channels} is not"
            f" text_embed_dim={t.text_embed_dim}",
        ),
        (not t.img_context_dim_in, f"img_context_dim_in={t.img_context_dim_in}"),
        (
            t.controlnet_block_every_n is None,
            f"controlnet_block_every_n={t.controlnet_block_every_n}",
        ),
    ]
    return [message for holds, message in rules if not holds]


def _settings(
    t: CosmosTransformer, private: DitPrivateKeys | None, text_pad_to: int | None
) -> dict[str, Any]:
    """Settings of our network, of a config.json."""
    projected = t.use_crossattn_projection
    # The pipelines that run networks with a text projection tell no frames per second.
    base_fps = None if projected else _BASE_FPS
    return {
        "num_layers": t.num_layers,
        "hidden_size": t.num_attention_heads * t.attention_head_dim,
        "num_attention_heads": t.num_attention_heads,
        "mlp_ratio": t.mlp_ratio,
        "adaln_lora_dim": t.adaln_lora_dim,
        "in_channels": t.out_channels,
        "patch_temporal": t.patch_size[0],
        "patch_spatial": t.patch_size[1],
        "crossattn_emb_size": t.crossattn_proj_in_channels if projected else t.text_embed_dim,
        "crossattn_proj_size": t.text_embed_dim if projected else None,
        "text_pad_to": private.text_pad_to if private else text_pad_to,
        "rope_scale": t.rope_scale,
        "base_fps": private.base_fps if private else base_fps,
        "extra_pos_embed": ExtraPosition(t.extra_pos_embed_type or "none"),
        "max_size": private.max_size if private else t.max_size,
        "concat_padding_mask": t.concat_padding_mask,
        "condition_mask": t.in_channels > t.out_channels,
    }


def _inexpressible(config: RunConfig) -> list[str]:
    """What of a run Diffusers' network has no counterpart for."""
    fps = config.model.base_fps  # type: ignore[attr-defined]
    if fps in (_BASE_FPS, None):
        return []
    return [
        f"model.base_fps={fps:g} cannot be exported: Diffusers' {CLASS} has {_BASE_FPS:g} built in"
    ]


def _content(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's network."""
    m = config.model
    assert isinstance(m, DitConfig)
    patch = (m.patch_temporal, m.patch_spatial, m.patch_spatial)
    projected = {
        "use_crossattn_projection": True,
        "crossattn_proj_in_channels": m.crossattn_emb_size,
        "encoder_hidden_states_channels": m.text_width,
    }
    return {
        "in_channels": m.in_channels + m.condition_mask,
        "out_channels": m.in_channels,
        "num_attention_heads": m.num_attention_heads,
        "attention_head_dim": m.hidden_size // m.num_attention_heads,
        "num_layers": m.num_layers,
        "mlp_ratio": m.mlp_ratio,
        "text_embed_dim": m.text_width,
        "adaln_lora_dim": m.adaln_lora_dim,
        "max_size": m.max_size if m.learnable_positions else _covering(config, m, patch),
        "patch_size": patch,
        "rope_scale": m.rope_scale,
        "concat_padding_mask": m.concat_padding_mask,
        "extra_pos_embed_type": "learnable" if m.learnable_positions else None,
        # Older versions of Diffusers do not know these.
        **(projected if m.crossattn_proj_size else {}),
    }


def _covering(config: RunConfig, model: DitConfig, patch: tuple[int, ...]) -> tuple[int, ...]:
    """A `max_size` that covers every grid trained on.

    Diffusers looks rotary positions up in a table of the longest side; ours are computed. No side
    was longer than a pack.
    """
    d, size = config.dataset, model.max_size
    if not (d.path or d.blend or d.mock):
        return size
    return tuple(max(s, d.task_encoder_seq_length * p) for s, p in zip(size, patch, strict=True))


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, config: RunConfig
) -> Tensor:
    """What Diffusers' network makes of one sample."""
    model: Any = config.model
    text = sample.text_LE
    if model.text_pad_to is not None:
        text = nn.functional.pad(text, (0, 0, 0, model.text_pad_to - len(text)))
    # The mask is handed over as a channel of zeros: Diffusers would resize it with torchvision,
    # which few environments have.
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


def _run_stacked(network: nn.Module, samples: StackedSamples, config: RunConfig) -> Tensor:
    """What Diffusers' network makes of samples side by side, without given frames.

    Raises:
        ValueError: it has inputs that are not fed here.
    """
    model: Any = config.model
    if model.concat_padding_mask or model.condition_mask or model.text_pad_to is not None:
        raise ValueError(
            "model.concat_padding_mask, model.condition_mask and model.text_pad_to are not"
            " compared; use false, false and null"
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
    """The clean frames of a sample, [C, f, H, W]; f may be 0."""
    inputs = family_of(model).inputs(model)
    names = [one.name for one in inputs if one.kind is InputKind.FRAMES]
    found = [sample.others[name] for name in names if name in sample.others]
    return found[0] if found else sample.latent_CFHW[:, :0]


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(rows=_ROWS, sizes=_sizes, layers=lambda model: {"decoder": model.num_layers}),
    config_keys=CosmosTransformer,
    private_keys=DitPrivateKeys,
    unsupported=_unsupported,
    settings=_settings,
    inexpressible=_inexpressible,
    content=_content,
    # What the published weights attend to: the caption, and zeros up to this many tokens; those of
    # 2.5 to the encoder's own states of padding, which the shards hold.
    text_pad_to=lambda keys: None if keys.use_crossattn_projection else 512,
    text_projection=FrozenTextProjection(
        tensors=("crossattn_proj.0.weight", "crossattn_proj.0.bias"),
        is_part=lambda model: model.crossattn_proj_size is not None,
        added=lambda model, width: replace(
            model, crossattn_emb_size=width, crossattn_proj_size=model.crossattn_emb_size
        ),
        removed=lambda model: replace(
            model, crossattn_emb_size=model.crossattn_proj_size, crossattn_proj_size=None
        ),
    ),
    original_names=(PREDICT2_NAMES, COSMOS1_NAMES),
    # Learnable positions are Cosmos 1's, and of no published Predict2.
    comfyui_names=lambda model: COSMOS1_NAMES if model.learnable_positions else PREDICT2_NAMES,
    pipelines=PIPELINES,
    pipeline_objectives=OBJECTIVES,
    sampling_settings=sampling_settings,
    pipeline_misfits=pipeline_misfits,
    largest_latent=lambda model: model.max_size,
    call=lambda model: (
        None
        if model.condition_mask or model.concat_padding_mask
        else "made = network(state, t.expand(1), caption, fps=None).sample"
    ),
    run_network=_run_network,
    run_stacked=_run_stacked,
)

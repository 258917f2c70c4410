"""Wan in Diffusers: names of tensors, config.json, pipelines, and how its network is run.

Its class is `WanTransformer3DModel`.
"""

# D model width, F width of the MLP, W cosines and sines of the level, E text width, I image width
# S rows of an image, C numbers in a token of the prediction, P of what the network is fed

from __future__ import annotations

from typing import Any

import torch
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from torch import Tensor, nn

from dit.batch import LatentSample
from dit.config import RunConfig
from dit.models.diffusers_form import DiffusersForm
from dit.models.diffusers_names import (
    ByHead,
    Convolution,
    Features,
    LeadingOne,
    NameTable,
    RotaryPairs,
    Row,
    StrictKeys,
    TensorSplit,
    linear_rows,
)
from dit.models.wan.config import MASK_CHANNELS, ImageCondition, WanConfig
from dit.models.wan.family import CONDITION, FIRST_FRAME, IMAGE
from dit.models.wan.original_names import WAN_NAMES

CLASS = "WanTransformer3DModel"
_TEXT_ROWS = 512  # of the published weights; fixed in Diffusers where there are images
_CHANNELS_OF_VAE_2_2 = 48
_ROTARY_LENGTH = 1024  # patches along an axis
_LAYER, _BLOCK = "blocks.layers.*", "blocks.*"
_SELF, _CROSS = f"{_LAYER}.self_attention", f"{_LAYER}.cross_attention"
_REPLICATED, _COLUMN, _ROW = TensorSplit.REPLICATED, TensorSplit.COLUMN, TensorSplit.ROW


def _has_image(model: WanConfig) -> bool:
    return model.image_embed_size is not None


def _norm(ours: str, theirs: str, width: str, **options: Any) -> tuple[Row, Row]:
    return (
        Row(f"{ours}.weight", (f"{theirs}.weight",), _REPLICATED, (width,), **options),
        Row(f"{ours}.bias", (f"{theirs}.bias",), _REPLICATED, (width,), **options),
    )


def _heads_norm(ours: str, theirs: str, **options: Any) -> Row:
    """RMSNorm across heads, which tensor ranks share."""
    return Row(f"{ours}_scale", (f"{theirs}.weight",), _COLUMN, ("D",), **options)


def _table(ours: str, theirs: str, rows: str) -> Row:
    return Row(f"{ours}.table", (theirs,), _REPLICATED, (rows, "D"), LeadingOne())


_EMBEDDERS: tuple[Row, ...] = (
    *linear_rows("patches", "patch_embedding", "D", "P", arrangement=Convolution()),
    *linear_rows("level.linear_1", "condition_embedder.time_embedder.linear_1", "D", "W"),
    *linear_rows("level.linear_2", "condition_embedder.time_embedder.linear_2", "D", "D"),
    *linear_rows("level.linear_out", "condition_embedder.time_proj", "6D", "D"),
    *linear_rows("text_embedder.linear_1", "condition_embedder.text_embedder.linear_1", "D", "E"),
    *linear_rows("text_embedder.linear_2", "condition_embedder.text_embedder.linear_2", "D", "D"),
)
_THEIR_IMAGE = "condition_embedder.image_embedder"
_IMAGE_EMBEDDER: tuple[Row, ...] = (
    Row(
        "image_embedder.positions",
        (f"{_THEIR_IMAGE}.pos_embed",),
        _REPLICATED,
        ("S", "I"),
        LeadingOne(),
        exists=lambda model: model.image_embed_positions,
    ),
    *_norm("image_embedder.norm_in", f"{_THEIR_IMAGE}.norm1", "I", exists=_has_image),
    *linear_rows(
        "image_embedder.linear_1", f"{_THEIR_IMAGE}.ff.net.0.proj", "I", "I", exists=_has_image
    ),
    *linear_rows(
        "image_embedder.linear_2", f"{_THEIR_IMAGE}.ff.net.2", "D", "I", exists=_has_image
    ),
    *_norm("image_embedder.norm_out", f"{_THEIR_IMAGE}.norm2", "D", exists=_has_image),
)


def _parts(block: str, letters: str) -> tuple[str, ...]:
    return tuple(f"{block}.to_{letter}" for letter in letters)


_LAYERS: tuple[Row, ...] = (
    _table(f"{_LAYER}.modulation", f"{_BLOCK}.scale_shift_table", "6"),
    *linear_rows(
        f"{_SELF}.linear_qkv",
        _parts(f"{_BLOCK}.attn1", "qkv"),
        *("3D", "D"),
        split=_COLUMN,
        # Neighbours are rotated together there, and halves of a head here.
        arrangement=ByHead(rotated=(0, 1)),
    ),
    _heads_norm(f"{_SELF}.across_heads.query", f"{_BLOCK}.attn1.norm_q", arrangement=RotaryPairs()),
    _heads_norm(f"{_SELF}.across_heads.key", f"{_BLOCK}.attn1.norm_k", arrangement=RotaryPairs()),
    *linear_rows(f"{_SELF}.linear_proj", f"{_BLOCK}.attn1.to_out.0", "D", "D", split=_ROW),
    *_norm(f"{_LAYER}.norm_cross", f"{_BLOCK}.norm2", "D"),
    *linear_rows(f"{_CROSS}.linear_q", f"{_BLOCK}.attn2.to_q", "D", "D", split=_COLUMN),
    *linear_rows(
        f"{_CROSS}.linear_kv",
        _parts(f"{_BLOCK}.attn2", "kv"),
        *("2D", "D"),
        split=_COLUMN,
        arrangement=ByHead(),
    ),
    *linear_rows(
        f"{_CROSS}.linear_image_kv",
        (f"{_BLOCK}.attn2.add_k_proj", f"{_BLOCK}.attn2.add_v_proj"),
        *("2D", "D"),
        split=_COLUMN,
        arrangement=ByHead(),
        exists=_has_image,
    ),
    _heads_norm(f"{_CROSS}.across_heads.query", f"{_BLOCK}.attn2.norm_q"),
    _heads_norm(f"{_CROSS}.across_heads.key", f"{_BLOCK}.attn2.norm_k"),
    _heads_norm(
        f"{_CROSS}.across_heads.image_key", f"{_BLOCK}.attn2.norm_added_k", exists=_has_image
    ),
    *linear_rows(f"{_CROSS}.linear_proj", f"{_BLOCK}.attn2.to_out.0", "D", "D", split=_ROW),
    *linear_rows(f"{_LAYER}.mlp.linear_fc1", f"{_BLOCK}.ffn.net.0.proj", "F", "D", split=_COLUMN),
    *linear_rows(f"{_LAYER}.mlp.linear_fc2", f"{_BLOCK}.ffn.net.2", "D", "F", split=_ROW),
)
_HEAD: tuple[Row, ...] = (
    _table("modulate_out", "scale_shift_table", "2"),
    *linear_rows("proj_out", "proj_out", "C", "D", arrangement=Features("thwc")),
)


def _sizes(model: WanConfig) -> dict[str, int]:
    width = model.hidden_size
    return {
        "2": 2,
        "6": 6,
        "D": width,
        "2D": 2 * width,
        "3D": 3 * width,
        "6D": 6 * width,
        "F": model.ffn_hidden_size,
        "W": model.freq_dim,
        "E": model.crossattn_emb_size,
        "I": model.image_embed_size or 0,
        "S": model.image_embed_length,
        "C": model.output_features,
        "P": model.input_features,
    }


class WanPrivateKeys(StrictKeys):
    """What an export keeps in config.json that Diffusers has no place for."""

    text_pad_to: PositiveInt | None
    image_condition: str
    image_embed_length: PositiveInt


class WanTransformer(StrictKeys):
    """config.json of `WanTransformer3DModel`; keys that it does not have are kept apart."""

    model_config = ConfigDict(extra="allow")

    patch_size: tuple[PositiveInt, PositiveInt, PositiveInt] = (1, 2, 2)
    num_attention_heads: PositiveInt = 40
    attention_head_dim: PositiveInt = 128
    in_channels: PositiveInt = 16
    out_channels: PositiveInt | None = 16
    text_dim: PositiveInt = 4096
    freq_dim: PositiveInt = 256
    ffn_dim: PositiveInt = 13824
    num_layers: PositiveInt = 40
    cross_attn_norm: bool = True
    qk_norm: str | None = "rms_norm_across_heads"
    eps: PositiveFloat = 1e-6
    image_dim: PositiveInt | None = None
    added_kv_proj_dim: PositiveInt | None = None
    rope_max_seq_len: PositiveInt = _ROTARY_LENGTH
    pos_embed_seq_len: PositiveInt | None = None

    @property
    def latent_channels(self) -> int:
        return self.out_channels or self.in_channels

    @property
    def shows_channels(self) -> bool:
        """Whether mask and condition stand beside the noisy channels."""
        return self.in_channels == 2 * self.latent_channels + MASK_CHANNELS


def _unsupported(t: WanTransformer) -> list[str]:
    """What of a config.json our network has no counterpart for."""
    width, image = t.num_attention_heads * t.attention_head_dim, t.image_dim is not None
    rules = [
        (
            t.shows_channels or t.in_channels == t.latent_channels,
            f"in_channels={t.in_channels}, and out_channels={t.latent_channels} goes with"
            f" {t.latent_channels} or {2 * t.latent_channels + MASK_CHANNELS}",
        ),
        (t.patch_size[1] == t.patch_size[2], f"patch_size={list(t.patch_size)} is not square"),
        (t.cross_attn_norm, "cross_attn_norm=false"),
        (t.qk_norm == "rms_norm_across_heads", f"qk_norm={t.qk_norm!r}"),
        (t.eps == 1e-6, f"eps={t.eps:g}"),
        (
            t.added_kv_proj_dim == (width if image else None),
            f"added_kv_proj_dim={t.added_kv_proj_dim} with image_dim={t.image_dim} and a width of"
            f" {width}",
        ),
        (
            image or t.pos_embed_seq_len is None,
            f"pos_embed_seq_len={t.pos_embed_seq_len} without image_dim",
        ),
    ]
    return [message for holds, message in rules if not holds]


def _condition(t: WanTransformer) -> ImageCondition:
    """Of published weights: nothing else in their config.json tells."""
    if t.shows_channels:
        two = t.pos_embed_seq_len is not None
        return ImageCondition.FIRST_AND_LAST_FRAME if two else ImageCondition.FIRST_FRAME
    clean = t.latent_channels == _CHANNELS_OF_VAE_2_2
    return ImageCondition.CLEAN_FIRST_FRAME if clean else ImageCondition.NONE


def _settings(
    t: WanTransformer, private: WanPrivateKeys | None, text_pad_to: int | None
) -> dict[str, Any]:
    """Settings of our network, of a config.json."""
    width = t.num_attention_heads * t.attention_head_dim
    rows = t.pos_embed_seq_len or WanConfig().image_embed_length
    return {
        "num_layers": t.num_layers,
        "hidden_size": width,
        "num_attention_heads": t.num_attention_heads,
        "mlp_ratio": t.ffn_dim / width,
        "in_channels": t.latent_channels,
        "patch_temporal": t.patch_size[0],
        "patch_spatial": t.patch_size[1],
        "crossattn_emb_size": t.text_dim,
        "text_pad_to": private.text_pad_to if private else text_pad_to,
        "freq_dim": t.freq_dim,
        "image_condition": ImageCondition(private.image_condition) if private else _condition(t),
        "image_embed_size": t.image_dim,
        "image_embed_length": private.image_embed_length if private else rows,
        "image_embed_positions": t.pos_embed_seq_len is not None,
    }


def _inexpressible(config: RunConfig) -> list[str]:
    """What of a run Diffusers' network has no counterpart for."""
    model: Any = config.model
    if not _has_image(model) or model.text_pad_to == _TEXT_ROWS:
        return []
    return [
        f"model.text_pad_to={model.text_pad_to} cannot be exported with image_embed_size:"
        f" Diffusers' {CLASS} takes the last {_TEXT_ROWS} of all rows for the caption"
    ]


def _content(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's network."""
    m = config.model
    assert isinstance(m, WanConfig)
    return {
        "patch_size": (m.patch_temporal, m.patch_spatial, m.patch_spatial),
        "num_attention_heads": m.num_attention_heads,
        "attention_head_dim": m.hidden_size // m.num_attention_heads,
        "in_channels": m.in_channels + m.condition_channels,
        "out_channels": m.in_channels,
        "text_dim": m.crossattn_emb_size,
        "freq_dim": m.freq_dim,
        "ffn_dim": m.ffn_hidden_size,
        "num_layers": m.num_layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": m.image_embed_size,
        "added_kv_proj_dim": m.hidden_size if _has_image(m) else None,
        "rope_max_seq_len": _ROTARY_LENGTH,
        "pos_embed_seq_len": m.image_embed_length if m.image_embed_positions else None,
    }


def _pipeline_misfits(model: WanConfig, pipeline: str) -> list[str]:
    """What of a network the pipeline would run on other inputs than it was trained on."""
    shows, condition = pipeline == "WanImageToVideoPipeline", model.image_condition
    fits = condition is ImageCondition.CLEAN_FIRST_FRAME
    fits = fits or shows == (condition is not ImageCondition.NONE)
    rules = [
        (
            model.text_pad_to == _TEXT_ROWS,
            f"model.text_pad_to={model.text_pad_to}, and {pipeline} fills captions up with zeros"
            f" to {_TEXT_ROWS}",
        ),
        (
            fits,
            f"model.image_condition={condition}, and {pipeline} shows"
            f" {'a picture' if shows else 'no picture'}",
        ),
    ]
    return [message for holds, message in rules if not holds]


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, config: RunConfig
) -> Tensor:
    """What Diffusers' network makes of one sample."""
    model: Any = config.model
    text, latent, image = sample.text_LE, sample.latent_CFHW, sample.others.get(IMAGE)
    if model.text_pad_to is not None:
        text = nn.functional.pad(text, (0, 0, 0, model.text_pad_to - len(text)))
    given, told = sample.others.get(FIRST_FRAME), torch.tensor([level])
    if given is not None:
        latent = torch.cat([given, latent[:, given.shape[1] :]], dim=1)
        patch = (model.patch_temporal, *[model.patch_spatial] * 2)
        shape = [side // p for side, p in zip(latent.shape[1:], patch, strict=True)]
        count = given.shape[1] // model.patch_temporal
        is_given_F11 = (torch.arange(shape[0]) < count).view(-1, 1, 1)
        told = torch.where(is_given_F11, 0.0, level).expand(shape).reshape(1, -1)
    if model.condition_channels:
        mask = latent.new_zeros(MASK_CHANNELS, *latent.shape[1:])
        mask[:, 0] = 1
        if model.image_condition is ImageCondition.FIRST_AND_LAST_FRAME:
            mask[-1, -1] = 1
        latent = torch.cat([latent, mask, sample.others[CONDITION]])
    if image is not None and model.image_embed_positions:
        image = image.unflatten(0, (2, -1))  # of two pictures
    elif image is not None:
        image = image[None]
    (made,) = network(
        hidden_states=latent[None],
        timestep=told,
        encoder_hidden_states=text[None],
        encoder_hidden_states_image=image,
        return_dict=False,
    )
    return made[0]


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(
        rows=(*_EMBEDDERS, *_IMAGE_EMBEDDER, *_LAYERS, *_HEAD),
        sizes=_sizes,
        layers=lambda model: {"blocks": model.num_layers},
    ),
    config_keys=WanTransformer,
    private_keys=WanPrivateKeys,
    unsupported=_unsupported,
    settings=_settings,
    inexpressible=_inexpressible,
    content=_content,
    text_pad_to=lambda _: _TEXT_ROWS,
    # Published weights of Wan 2.1's image-to-video have it, and nothing reads it.
    ignored=("blocks.*.attn2.norm_added_q.weight",),
    original_names=(WAN_NAMES,),
    comfyui_names=lambda _: WAN_NAMES,
    pipelines={"WanPipeline": "flow", "WanImageToVideoPipeline": "flow"},
    pipeline_misfits=_pipeline_misfits,
    largest_latent=lambda model: (
        _ROTARY_LENGTH * model.patch_temporal,
        *(_ROTARY_LENGTH * model.patch_spatial,) * 2,
    ),
    call=lambda model: (
        "made = network(state, t.expand(1), caption).sample"
        if model.image_condition is ImageCondition.NONE
        else None
    ),
    run_network=_run_network,
)

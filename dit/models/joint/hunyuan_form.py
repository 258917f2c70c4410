"""What the Hunyuan models' networks have in common in Diffusers: config.json, rows of ByT5.

They are `HunyuanVideoTransformer3DModel`, `HunyuanVideo15Transformer3DModel` and
`HunyuanImageTransformer2DModel`.
"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from torch import Tensor

from dit.config import RunConfig
from dit.config.checks import Rule
from dit.models.diffusers_names import StrictKeys
from dit.models.layer_spec import MOST_REFINER_LAYERS

GLYPH_HIDDEN = 2048
"""Width inside the embedding of ByT5's rows; fixed in Diffusers."""
_NORM, _THETA = "rms_norm", 256.0


class NoPrivateKeys(StrictKeys):
    """What an export keeps in config.json that Diffusers has no place for: nothing."""


class HunyuanKeys(StrictKeys):
    """What all have in config.json; keys that Diffusers' class does not have stay apart."""

    model_config = ConfigDict(extra="allow")

    num_attention_heads: PositiveInt
    attention_head_dim: PositiveInt = 128
    num_layers: PositiveInt
    num_refiner_layers: PositiveInt = 2
    mlp_ratio: PositiveFloat = 4.0
    qk_norm: str | None = _NORM
    text_embed_dim: PositiveInt
    rope_theta: PositiveFloat = _THETA
    rope_axes_dim: tuple[PositiveInt, ...]


def unsupported_keys(t: HunyuanKeys, *own: Rule) -> list[str]:
    """What of a config.json our network has no counterpart for; `own` are rules of the family."""
    rules = [
        *own,
        (t.qk_norm == _NORM, f"qk_norm={t.qk_norm!r}, not {_NORM}"),
        (t.rope_theta == _THETA, f"rope_theta={t.rope_theta:g}, not {_THETA:g}"),
        (
            t.num_refiner_layers <= MOST_REFINER_LAYERS,
            f"num_refiner_layers={t.num_refiner_layers}, more than {MOST_REFINER_LAYERS}",
        ),
    ]
    return [message for holds, message in rules if not holds]


def network_settings(t: HunyuanKeys) -> dict[str, Any]:
    """Settings of our network, of a config.json."""
    return {
        "num_layers": t.num_layers,
        "hidden_size": t.num_attention_heads * t.attention_head_dim,
        "num_attention_heads": t.num_attention_heads,
        "mlp_ratio": t.mlp_ratio,
        "crossattn_emb_size": t.text_embed_dim,
        "num_refiner_layers": t.num_refiner_layers,
        "rope_axes": t.rope_axes_dim,
    }


def network_keys(m: Any) -> dict[str, Any]:
    """The inverse: `HunyuanKeys` of a network."""
    return {
        "num_attention_heads": m.num_attention_heads,
        "attention_head_dim": m.hidden_size // m.num_attention_heads,
        "num_layers": m.num_layers,
        "num_refiner_layers": m.num_refiner_layers,
        "mlp_ratio": m.mlp_ratio,
        "qk_norm": _NORM,
        "text_embed_dim": m.crossattn_emb_size,
        "rope_theta": _THETA,
        "rope_axes_dim": m.rope_axes,
    }


def glyph_misfit(config: RunConfig, class_name: str) -> list[str]:
    """What of a run with ByT5's rows Diffusers' network has no counterpart for."""
    model: Any = config.model
    if model.glyph_hidden_size == GLYPH_HIDDEN:
        return []
    return [
        f"model.glyph_hidden_size={model.glyph_hidden_size} cannot be exported: Diffusers'"
        f" {class_name} has {GLYPH_HIDDEN}"
    ]


def text_inputs(model: Any, text_LE: Tensor, glyph_GE: Tensor | None) -> dict[str, Tensor]:
    """What Diffusers' network is told of one caption and of the words that it quotes."""
    if glyph_GE is None:
        glyph_GE = text_LE.new_zeros(0, model.glyph_embed_size)
    return {
        "encoder_hidden_states": text_LE[None],
        "encoder_attention_mask": text_LE.new_ones(1, len(text_LE)),
        "encoder_hidden_states_2": glyph_GE[None],
        "encoder_attention_mask_2": text_LE.new_ones(1, len(glyph_GE)),
    }

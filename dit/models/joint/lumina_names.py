"""Tensor names and keys of config.json in Diffusers of Lumina Image 2.0 and OmniGen2.

OmniGen2's public code has the same names as Lumina's, for more layers.
"""

# D model width, K head width, Q queries, keys and values of a token, F width of the MLP
# W width of the sinusoidal timestep embedding, T width of the timestep embedding after its linears
# E text width, C numbers in a token

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from dit.config import ModelConfig
from dit.config.checks import Rule
from dit.models.diffusers.arrangements import THWC, ByKeyHead, Features
from dit.models.diffusers.form import Key, same
from dit.models.diffusers.names import Row, TensorSplit, linear_rows
from dit.models.joint.diffusers import mlp_ratio, outputs_as_inputs
from dit.models.joint.refined import GroupedRefinedConfig
from dit.models.joint.sequential_names import SequentialNames, sequential_rows, weight_row
from dit.models.layer_spec import LEVEL_WAVES, MOST_REFINER_LAYERS

LUMINA_STACKS = {
    "noise_refiner": "noise_refiner",
    "context_refiner": "context_refiner",
    "blocks": "layers",
}
"""Diffusers' names of our stacks."""
LEVEL, TEXT = (f"time_caption_embed.{kind}_embedder" for kind in ("timestep", "caption"))
_HEADS = ByKeyHead(rotated=(0, 1))
_MULTIPLE = 256  # default of `multiple_of`: MLP widths are rounded up to a multiple of it


def _names(stack: str) -> SequentialNames:
    """Diffusers' names of the modules in a layer of our stack `stack`.

    Layers of the text refiner have no modulation.
    """
    told = stack != "context_refiner"
    return SequentialNames(
        norms=("norm1.norm" if told else "norm1", "norm2", "ffn_norm1", "ffn_norm2"),
        modulation="norm1.linear" if told else None,
        attention="attn",
        mlp=("feed_forward.linear_1", "feed_forward.linear_3", "feed_forward.linear_2"),
    )


def patch_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    """Lines of the name table for a patch embedding, called `ours` and in Diffusers `theirs`."""
    return linear_rows(ours, theirs, "D", "C", arrangement=Features(THWC, axis=1))


def lumina_rows(stacks: Mapping[str, str]) -> tuple[Row, ...]:
    """Lines of the name table for a whole network; `stacks` maps our stacks to Diffusers' names."""
    column = TensorSplit.COLUMN
    return (
        *patch_rows("patches", "x_embedder"),
        weight_row("text_norm", f"{TEXT}.0", "E"),
        *linear_rows("text_embedder", f"{TEXT}.1", "D", "E"),
        *linear_rows("told.linear_1", f"{LEVEL}.linear_1", "T", "W"),
        *linear_rows("told.linear_2", f"{LEVEL}.linear_2", "T", "T"),
        *(
            row
            for ours, theirs in stacks.items()
            for row in sequential_rows(ours, theirs, _names(ours), heads=_HEADS)
        ),
        *linear_rows("modulate_out.linear", "norm_out.linear_1", "D", "T", split=column),
        *linear_rows("proj_out", "norm_out.linear_2", "C", "D", arrangement=Features(THWC)),
    )


def lumina_sizes(model: GroupedRefinedConfig) -> dict[str, int]:
    width, hidden = model.hidden_size, model.ffn_hidden_size
    head = width // model.num_attention_heads
    return {
        **{"D": width, "4D": 4 * width, "K": head, "Q": width + 2 * model.num_kv_heads * head},
        **{"F": hidden, "2F": 2 * hidden, "W": LEVEL_WAVES, "T": model.told_width},
        **{"E": model.crossattn_emb_size, "C": model.patch_features},
    }


def _hidden(t: Any) -> int:
    width = 4 * t.hidden_size
    if t.ffn_dim_multiplier is not None:
        width = int(t.ffn_dim_multiplier * width)
    return -(-width // t.multiple_of) * t.multiple_of


def _usual(model: ModelConfig) -> bool:
    """Whether the MLP width is Diffusers' default, so config.json needs no `ffn_dim_multiplier`."""
    return model.ffn_hidden_size in (4 * model.hidden_size, _up(4 * model.hidden_size))


def _up(width: int) -> int:
    return -(-width // _MULTIPLE) * _MULTIPLE


def _multiplier(model: ModelConfig) -> float | None:
    """The `ffn_dim_multiplier` for which Diffusers' MLP has our width; None for the default."""
    if _usual(model):
        return None
    width, wanted = 4 * model.hidden_size, model.ffn_hidden_size
    return next(x for x in (wanted / width, (wanted + 0.5) / width) if int(x * width) == wanted)


def _multiple(model: ModelConfig) -> int:
    return _MULTIPLE if _usual(model) and model.ffn_hidden_size % _MULTIPLE == 0 else 1


def lumina_keys(*, layers: tuple[int, int], largest: tuple[int, ...]) -> tuple[Key, ...]:
    """The keys of config.json that Lumina Image 2.0 and OmniGen2 share.

    `layers` are the class's default numbers of joint layers and of layers of a refiner. `largest`
    are the lengths of the tables of rotary angles that exports write.
    """
    return (
        Key("patch_size", "patch_spatial", 2),
        same("in_channels", 16),
        Key("out_channels", type=PositiveInt | None),
        same("hidden_size", 2304),
        same("num_layers", layers[0]),
        same("num_refiner_layers", layers[1]),
        same("num_attention_heads", 24),
        same("num_kv_heads", 8),
        Key(
            "multiple_of",
            "mlp_ratio",
            _MULTIPLE,
            read=lambda t: mlp_ratio(_hidden(t), t.hidden_size),
            write=_multiple,
        ),
        Key("ffn_dim_multiplier", type=PositiveFloat | None, write=_multiplier),
        Key("axes_dim_rope", "rope_axes", (32, 32, 32)),
        Key("axes_lens", default=(300, 512, 512), write=lambda _: largest),
    )


def lumina_rules(t: Any, *, eps: float) -> list[Rule]:
    """Rules for a config.json `t`; `eps` is the epsilon of our network's norms."""
    return [
        outputs_as_inputs(t),
        (t.norm_eps == eps, f"norm_eps={t.norm_eps:g} must be {eps:g}"),
        (
            t.num_refiner_layers <= MOST_REFINER_LAYERS,
            f"num_refiner_layers={t.num_refiner_layers} must be at most {MOST_REFINER_LAYERS}",
        ),
    ]

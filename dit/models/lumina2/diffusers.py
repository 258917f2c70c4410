"""Lumina Image 2.0 in Diffusers: names of tensors, config.json, pipelines, running its network.

Its class is `Lumina2Transformer2DModel`.
"""

# D model width, K head width, Q queries, keys and values of a token, F width of the MLP
# W cosines and sines of the level, T width of its embedding, E text width, C numbers in a token

from __future__ import annotations

from typing import Any

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from dit.batch import LatentSample
from dit.config import RunConfig
from dit.config.checks import Rule
from dit.models.diffusers_form import ConfigKeys, DiffusersForm, Key, OwnKey, Pipeline, same
from dit.models.diffusers_names import (
    ByKeyHead,
    Features,
    NameTable,
    Row,
    TensorSplit,
    linear_rows,
)
from dit.models.joint.sequential_names import SequentialNames, sequential_rows, weight_row
from dit.models.layer_spec import LEVEL_WAVES, MOST_REFINER_LAYERS
from dit.models.lumina2.family import EPS, Lumina2Config
from dit.models.stacks.stacked_transformer import ALL_NOISE

CLASS = "Lumina2Transformer2DModel"
_HEADS = ByKeyHead(rotated=(0, 1))
_LEVEL, _TEXT = "time_caption_embed.timestep_embedder", "time_caption_embed.caption_embedder"
_STACKS = {"noise_refiner": "noise_refiner", "context_refiner": "context_refiner"}
_STACKS |= {"blocks": "layers"}
_PIECES = "thwc"  # order of the numbers in a token


def _names(stack: str) -> SequentialNames:
    """Of the layers of one stack; the text's have no modulation."""
    told = stack != "context_refiner"
    return SequentialNames(
        norms=("norm1.norm" if told else "norm1", "norm2", "ffn_norm1", "ffn_norm2"),
        modulation="norm1.linear" if told else None,
        attention="attn",
        mlp=("feed_forward.linear_1", "feed_forward.linear_3", "feed_forward.linear_2"),
    )


_PATCHES = linear_rows("patches", "x_embedder", "D", "C", arrangement=Features(_PIECES, axis=1))
_TABLE = NameTable(
    rows=(
        _PATCHES[0],
        Row("patches.bias", ("x_embedder.bias",), TensorSplit.REPLICATED, ("D",)),
        weight_row("text_norm", f"{_TEXT}.0", "E"),
        *linear_rows("text_embedder", f"{_TEXT}.1", "D", "E"),
        *linear_rows("told.linear_1", f"{_LEVEL}.linear_1", "T", "W"),
        *linear_rows("told.linear_2", f"{_LEVEL}.linear_2", "T", "T"),
        *(
            row
            for ours, theirs in _STACKS.items()
            for row in sequential_rows(ours, theirs, _names(ours), heads=_HEADS)
        ),
        *linear_rows(
            "modulate_out.linear", "norm_out.linear_1", "D", "T", split=TensorSplit.COLUMN
        ),
        *linear_rows("proj_out", "norm_out.linear_2", "C", "D", arrangement=Features(_PIECES)),
    ),
    sizes=lambda model: _sizes(model),
    layers=lambda model: {
        "noise_refiner": model.num_refiner_layers,
        "context_refiner": model.num_refiner_layers,
        "blocks": model.num_layers,
    },
)


def _sizes(model: Lumina2Config) -> dict[str, int]:
    width, hidden = model.hidden_size, model.ffn_hidden_size
    head = width // model.num_attention_heads
    return {
        **{"D": width, "4D": 4 * width, "K": head, "Q": width + 2 * model.num_kv_heads * head},
        **{"F": hidden, "2F": 2 * hidden, "W": LEVEL_WAVES, "T": model.told_width},
        **{"E": model.crossattn_emb_size, "C": model.patch_features},
    }


def _linears(stack: str) -> dict[str, str]:
    """Of the original project: names of linears in one stack -> in Diffusers."""
    attention, mlp = f"{stack}.*.attention", f"{stack}.*.feed_forward"
    made = " ".join(f"{stack}.*.attn.to_{letter}" for letter in "qkv")
    names = {f"{attention}.qkv": made, f"{attention}.out": f"{stack}.*.attn.to_out.0"}
    names |= {f"{mlp}.w{n}": f"{mlp}.linear_{n}" for n in (1, 2, 3)}
    if stack == "context_refiner":
        return names
    return names | {f"{stack}.*.adaLN_modulation.1": f"{stack}.*.norm1.linear"}


LUMINA2_NAMES = {
    **{name: theirs for stack in _STACKS.values() for name, theirs in _linears(stack).items()},
    **{f"t_embedder.mlp.{at}": f"{_LEVEL}.linear_{n}" for n, at in enumerate((0, 2), 1)},
    "cap_embedder.1": f"{_TEXT}.1",
    "final_layer.adaLN_modulation.1": "norm_out.linear_1",
    "final_layer.linear": "norm_out.linear_2",
    "x_embedder": "x_embedder",
}
"""Of the original project, of ComfyUI and of diffusion-pipe."""


def _hidden(t: Any) -> int:
    """Width of the MLP, as `LuminaFeedForward` computes it."""
    width = 4 * t.hidden_size
    if t.ffn_dim_multiplier is not None:
        width = int(t.ffn_dim_multiplier * width)
    return -(-width // t.multiple_of) * t.multiple_of


def _usual_mlp(model: Lumina2Config) -> bool:
    return model.ffn_hidden_size == 4 * model.hidden_size


def _multiplier(model: Lumina2Config) -> float | None:
    """Of any width; half a unit more where rounding would make it one less."""
    if _usual_mlp(model):
        return None
    width, wanted = 4 * model.hidden_size, model.ffn_hidden_size
    return next(x for x in (wanted / width, (wanted + 0.5) / width) if int(x * width) == wanted)


def _rules(t: Any) -> list[Rule]:
    """What our network has a counterpart for."""
    return [
        (
            t.out_channels in (None, t.in_channels),
            f"out_channels={t.out_channels} with in_channels={t.in_channels}",
        ),
        (t.norm_eps == EPS, f"norm_eps={t.norm_eps:g}, not {EPS:g}"),
        (
            t.num_refiner_layers <= MOST_REFINER_LAYERS,
            f"num_refiner_layers={t.num_refiner_layers}, more than {MOST_REFINER_LAYERS}",
        ),
    ]


_LARGEST = (300, 512, 512)
"""Rows of Diffusers' tables of angles: for places in the text and behind it, rows, columns."""
KEYS = ConfigKeys(
    keys=(
        Key("sample_size", default=128),
        Key("patch_size", "patch_spatial", 2),
        same("in_channels", 16),
        Key("out_channels", type=PositiveInt | None),
        same("hidden_size", 2304),
        same("num_layers", 26),
        same("num_refiner_layers", 2),
        same("num_attention_heads", 24),
        same("num_kv_heads", 8),
        Key(
            "multiple_of",
            "mlp_ratio",
            256,
            read=lambda t: _hidden(t) / t.hidden_size,
            write=lambda m: 256 if _usual_mlp(m) and m.ffn_hidden_size % 256 == 0 else 1,
        ),
        Key("ffn_dim_multiplier", type=PositiveFloat | None, write=_multiplier),
        Key("norm_eps", default=EPS),
        Key("scaling_factor", default=1.0),  # nothing reads it
        Key("axes_dim_rope", "rope_axes", (32, 32, 32)),
        Key("axes_lens", default=_LARGEST),
        Key("cap_feat_dim", "crossattn_emb_size", 1024),
    ),
    kept=(OwnKey("patch_temporal", PositiveInt, published=lambda _: 1),),
    rules=_rules,
)


def _run_network(
    network: nn.Module,
    sample: LatentSample,
    level: float,
    config: RunConfig,  # noqa: ARG001
) -> Tensor:
    """What Diffusers' network makes of one sample, as its pipeline turns it round."""
    text_1LE = sample.text_LE[None]
    (made,) = network(
        hidden_states=sample.latent_CFHW[:, 0][None],
        timestep=torch.tensor([1 - level / ALL_NOISE]),
        encoder_hidden_states=text_1LE,
        encoder_attention_mask=torch.ones(text_1LE.shape[:2], dtype=torch.int64),
        return_dict=False,
    )
    return -made[0][:, None]


FORM = DiffusersForm(
    class_name=CLASS,
    table=_TABLE,
    keys=KEYS,
    original_names=(LUMINA2_NAMES,),
    comfyui_names=lambda _: LUMINA2_NAMES,
    pipelines={"Lumina2Pipeline": Pipeline()},
    largest_latent=lambda model: (1, *(side * model.patch_spatial for side in _LARGEST[1:])),
    run_network=_run_network,
)

"""Krea 2 in Diffusers, `Krea2Transformer2DModel`: tensor names, config.json, pipelines, calls."""

# D model width, K head width, Q queries, keys, values and gate of a token, F width of the MLP
# W width of the sinusoidal timestep embedding, C numbers in a token, S states of a text token
# tD, tK, ...: the same sizes in the layers over text; tD is the width of a hidden state

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from dit.config.checks import Rule
from dit.models.diffusers.arrangements import ByKeyHead, ScaleFirst, SwappedHalves
from dit.models.diffusers.form import (
    ConfigKeys,
    DiffusersForm,
    Key,
    Pipeline,
    heads_of,
    own_names,
    same,
)
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows, without_biases
from dit.models.joint.diffusers import (
    KEPT_PATCH,
    channels_of_patches,
    mlp_ratio,
    patch_rules,
)
from dit.models.joint.sequential_names import (
    SequentialNames,
    layer_rows,
    sequential_rows,
    weight_row,
)
from dit.models.krea2.family import EPS, SAME_FOR_ALL, THETA, Krea2Config
from dit.models.layer_spec import LEVEL_WAVES, MOST_REFINER_LAYERS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "Krea2Transformer2DModel"
_LAYERS = SequentialNames(
    norms=("norm1", "norm2"),
    modulation=None,
    attention="attn",
    mlp=("ff.gate", "ff.up", "ff.down"),
    gate="to_gate",
    of_norms="offset",
)
_FUSION = {
    "states": ("layerwise_blocks", "num_fusion_layers"),
    "tokens": ("refiner_blocks", "num_refiner_layers"),
}
"""For each kind of layers over text: our name -> (Diffusers' name, field with their number)."""
_TEXT_HEADS = ByKeyHead(heads="text_heads", key_heads="text_kv_heads", width="text_width")


def _fusion_rows(ours: str, theirs: str, count: str) -> tuple[Row, ...]:
    """Lines of the name table for one kind of layers over text.

    `count` is the field of the configuration with the number of these layers.
    """
    rows = []
    for number in range(MOST_REFINER_LAYERS):
        at = f"text_fusion.{ours}_{number}", f"text_fusion.{theirs}.{number}", _LAYERS
        of_text: Any = {"heads": _TEXT_HEADS, "rotated": False, "hidden": "text_mlp_size"}
        exists = partial(_counts, field=count, number=number)
        rows += [
            replace(row, shape=tuple(f"t{one}" for one in row.shape), exists=exists)
            for row in layer_rows(*at, **of_text)
        ]
    return tuple(rows)


def _counts(model: Krea2Config, *, field: str, number: int) -> bool:
    return number < getattr(model, field)


def _table(ours: str, theirs: str, rows: str, **options: Any) -> Row:
    names = f"{ours}.table", (f"{theirs}.scale_shift_table",)
    return Row(*names, TensorSplit.REPLICATED, (rows, "D"), **options)


def _sizes(model: Krea2Config) -> dict[str, int]:
    def of(width: int, heads: int, keys: int, hidden: int) -> dict[str, int]:
        each = width // heads
        made = {"D": width, "K": each, "Q": 2 * width + 2 * keys * each}
        return made | {"F": hidden, "2F": 2 * hidden}

    text = of(model.text_width, model.text_heads, model.text_kv_heads, model.text_mlp_size)
    heads = (model.num_attention_heads, model.num_kv_heads)
    return {
        **of(model.hidden_size, *heads, model.ffn_hidden_size),
        **{f"t{letter}": size for letter, size in text.items()},
        **{"6D": 6 * model.hidden_size, "W": LEVEL_WAVES, "C": model.output_features},
        **{"S": model.num_text_layers, "1": 1, "2": 2, "6": 6},
    }


_TABLE = NameTable(
    rows=(
        *linear_rows("patches", "img_in", "D", "C"),
        *linear_rows("told.linear_1", "time_embed.linear_1", "D", "W"),
        *linear_rows("told.linear_2", "time_embed.linear_2", "D", "D"),
        *linear_rows(
            "modulations.blocks",
            "time_mod_proj",
            *("6D", "D"),
            split=TensorSplit.COLUMN,
            arrangement=ScaleFirst(),
        ),
        *without_biases(linear_rows("text_fusion.projector", "text_fusion.projector", "1", "S")),
        *(row for ours, names in _FUSION.items() for row in _fusion_rows(ours, *names)),
        weight_row("text_norm", "txt_in.norm", "tD", kind="offset"),
        *linear_rows("text_embedder.linear_1", "txt_in.linear_1", "D", "tD"),
        *linear_rows("text_embedder.linear_2", "txt_in.linear_2", "D", "D"),
        _table("blocks.layers.*.modulation", "transformer_blocks.*", "6", arrangement=ScaleFirst()),
        *sequential_rows("blocks", "transformer_blocks", _LAYERS, heads=ByKeyHead(rotated=(0, 1))),
        _table("modulate_out", "final_layer", "2", arrangement=SwappedHalves()),
        weight_row("norm_out", "final_layer.norm", kind="offset"),
        *linear_rows("proj_out", "final_layer.linear", "C", "D"),
    ),
    sizes=_sizes,
    layers=lambda model: {"blocks": model.num_layers},
)


def _linears(theirs: str, ours: str) -> dict[str, str]:
    """Diffusers' names of the linears of a layer, by their names in the original project."""
    attention = {"wq": "to_q", "wk": "to_k", "wv": "to_v", "wo": "to_out.0", "gate": "to_gate"}
    return {
        **{f"{theirs}.attn.{name}": f"{ours}.attn.{one}" for name, one in attention.items()},
        **{f"{theirs}.mlp.{name}": f"{ours}.ff.{name}" for name in ("gate", "up", "down")},
    }


KREA2_NAMES = {
    **_linears("blocks.*", "transformer_blocks.*"),
    **_linears("txtfusion.layerwise_blocks.*", "text_fusion.layerwise_blocks.*"),
    **_linears("txtfusion.refiner_blocks.*", "text_fusion.refiner_blocks.*"),
    "first": "img_in",
    "last.linear": "final_layer.linear",
    "tmlp.0": "time_embed.linear_1",
    "tmlp.2": "time_embed.linear_2",
    "tproj.1": "time_mod_proj",
    "txtmlp.1": "txt_in.linear_1",
    "txtmlp.3": "txt_in.linear_2",
    "txtfusion.projector": "text_fusion.projector",
}
"""Diffusers' names of linears by their names in the original project, ComfyUI and ai-toolkit."""


def _rules(t: Any) -> list[Rule]:
    told = t.timestep_embed_dim
    return [
        (t.norm_eps == EPS, f"norm_eps={t.norm_eps:g} must be {EPS:g}"),
        (t.rope_theta == THETA, f"rope_theta={t.rope_theta:g} must be {THETA:g}"),
        (told == LEVEL_WAVES, f"timestep_embed_dim={told} must be {LEVEL_WAVES}"),
        *(
            (
                getattr(t, name) <= MOST_REFINER_LAYERS,
                f"{name}={getattr(t, name)} must be at most {MOST_REFINER_LAYERS}",
            )
            for name in ("num_layerwise_text_blocks", "num_refiner_text_blocks")
        ),
    ]


def _width(t: Any) -> int:
    return t.num_attention_heads * t.attention_head_dim


KEYS = ConfigKeys(
    keys=(
        Key(
            "in_channels",
            "in_channels",
            64,
            read=channels_of_patches,
            write=lambda m: m.patch_features,
        ),
        same("num_layers", 28),
        heads_of(128),
        same("num_attention_heads", 48),
        Key("num_key_value_heads", "num_kv_heads", 12),
        Key(
            "intermediate_size",
            "mlp_ratio",
            16384,
            read=lambda t: mlp_ratio(t.intermediate_size, _width(t)),
            write=lambda m: m.ffn_hidden_size,
        ),
        Key("timestep_embed_dim", default=LEVEL_WAVES),
        Key(
            "text_hidden_dim",
            "crossattn_emb_size",
            2560,
            read=lambda t: t.num_text_layers * t.text_hidden_dim,
            write=lambda m: m.text_width,
        ),
        same("num_text_layers", 12),
        Key("text_num_attention_heads", "text_heads", 20),
        Key("text_num_key_value_heads", "text_kv_heads", 20),
        Key("text_intermediate_size", "text_mlp_size", 6912),
        Key("num_layerwise_text_blocks", "num_fusion_layers", 2, PositiveInt),
        Key("num_refiner_text_blocks", "num_refiner_layers", 2, PositiveInt),
        Key("axes_dims_rope", "rope_axes", (32, 48, 48)),
        Key("rope_theta", default=THETA),
        Key("norm_eps", default=EPS),
    ),
    kept=KEPT_PATCH,
    rules=_rules,
)


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, model: Krea2Config
) -> Tensor:
    """The output [C, F, H, W] of Diffusers' network for one sample; text has position 0."""
    import torch
    from torch.nn.functional import pad

    from dit.models.positions import GridPositions, patchify, unpatchify

    patch = model.patch_temporal, model.patch_spatial
    grid, rows_TC = patchify(sample.latent_CFHW, *patch)
    text_1LX = sample.text_LE[None]
    places = GridPositions()((grid,), fps=sample.fps)
    (made,) = network(
        hidden_states=rows_TC[None],
        encoder_hidden_states=text_1LX.unflatten(-1, (model.num_text_layers, model.text_width)),
        timestep=torch.tensor([level / 1000]),  # the network multiplies by 1000
        position_ids=pad(places, (0, 0, text_1LX.shape[1], 0)),
        return_dict=False,
    )
    return unpatchify(made[0], grid, *patch)


FORM = DiffusersForm(
    class_name=CLASS,
    table=_TABLE,
    keys=KEYS,
    # Also Diffusers' names: `final_layer.linear` is an original name in other networks.
    original_names=(KREA2_NAMES, own_names(_TABLE)),
    comfyui_names=lambda _: KREA2_NAMES,
    pipelines={"Krea2Pipeline": Pipeline(rules=patch_rules, of_few_steps=SAME_FOR_ALL)},
    largest_latent=lambda _: (1, 2**20, 2**20),
    run_network=_run_network,
)

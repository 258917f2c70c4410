"""Diffusers' names for layers with joint attention, shared by several families."""

# D model width, F width of the MLP, K head width, C numbers in a token of the prediction
# W width of a sinusoidal embedding, P width of pooled text
# E text width, R width of a refiner's MLPs, G width of ByT5's states, S hidden width of their
# embedding

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dit.config import ModelConfig
from dit.models.diffusers.arrangements import (
    SAME,
    Arrangement,
    ByHead,
    HeadColumns,
    RotaryPairs,
    SwappedHalves,
)
from dit.models.diffusers.names import Row, TensorSplit, linear_rows
from dit.models.joint.family import DoubleSingleConfig
from dit.models.layer_spec import LEVEL_WAVES, MOST_REFINER_LAYERS, REFINER_RATIO

_COLUMN, _ROW = TensorSplit.COLUMN, TensorSplit.ROW
BY_HEAD = ByHead(rotated=(0, 1))
"""Arrangement of rotated q, k and v. Diffusers rotates adjacent numbers of q and k as a pair; our
networks rotate numbers that are half a head apart."""
Exists = Callable[[Any], bool]
"""Whether the network of a configuration has a tensor."""


def _always(_: Any) -> bool:
    return True


def norm_rows(
    ours: str,
    theirs: str,
    names: tuple[str, str],
    *,
    rotated: bool = True,
    exists: Exists = _always,
    kind: str = "weight",
) -> tuple[Row, ...]:
    """Lines of the name table for RMSNorms of queries and keys, with one weight for all heads.

    Our network calls the weight `kind`.
    """
    return tuple(
        Row(
            f"{ours}.{letter}_layernorm.{kind}",
            (f"{theirs}.{name}.weight",),
            TensorSplit.REPLICATED,
            ("K",),
            RotaryPairs() if rotated else SAME,
            exists=exists,
        )
        for letter, name in zip("qk", names, strict=True)
    )


LATENTS = (("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), "to_out.0")
TEXT = (
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("norm_added_q", "norm_added_k"),
    "to_add_out",
)
"""Diffusers' names in the attention of text: q, k and v; the norms of q and k; the output linear.
`LATENTS` are those in the attention of latents."""


def attention_rows(
    ours: str,
    theirs: str,
    names: tuple[tuple[str, str, str], tuple[str, str], str],
    *,
    rotated: bool = True,
    normed: Exists = _always,
    exists: Exists = _always,
    output: bool = True,
) -> tuple[Row, ...]:
    """Lines of the name table for the linears and norms of an attention.

    `names` are Diffusers' names, in the form of `LATENTS`. `exists` says which configurations have
    the attention, `normed` which have the norms, and `output` whether there is an output linear.
    """
    qkv, norms, out = names
    rows = (
        *linear_rows(
            f"{ours}.linear_qkv",
            tuple(f"{theirs}.{name}" for name in qkv),
            *("3D", "D"),
            split=_COLUMN,
            arrangement=BY_HEAD if rotated else ByHead(),
            exists=exists,
        ),
        *norm_rows(ours, theirs, norms, rotated=rotated, exists=lambda m: exists(m) and normed(m)),
    )
    if not output:
        return rows
    of_output: Any = {"split": _ROW, "exists": exists}
    return (*rows, *linear_rows(f"{ours}.linear_proj", f"{theirs}.{out}", "D", "D", **of_output))


def feed_forward_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    """Lines of the name table for the two linears of a feed-forward."""
    return (
        *linear_rows(f"{ours}.linear_fc1", f"{theirs}.net.0.proj", "F", "D", split=_COLUMN),
        *linear_rows(f"{ours}.linear_fc2", f"{theirs}.net.2", "D", "F", split=_ROW),
    )


def modulation_rows(
    ours: str, theirs: str, outputs: str, *, arrangement: Arrangement = SAME
) -> tuple[Row, ...]:
    """Lines of the name table for the linear of a modulation with `outputs` numbers."""
    return linear_rows(
        f"{ours}.linear", theirs, outputs, "D", split=_COLUMN, arrangement=arrangement
    )


def double_stream_rows(
    ours: str,
    theirs: str,
    *,
    modulations: tuple[str, str] | None = ("norm1.linear", "norm1_context.linear"),
    mlps: tuple[str, str] = ("ff", "ff_context"),
) -> tuple[Row, ...]:
    """Lines of the name table for double-stream layers, whose names begin with `ours` and `theirs`.

    `modulations` and `mlps` are Diffusers' names for latents, then for text; `modulations` is None
    if layers have no weights for modulations.
    """
    rows: list[Row] = []
    each = zip(("", "text_"), (LATENTS, TEXT), modulations or (None, None), mlps, strict=True)
    for prefix, names, modulation, mlp in each:
        if modulation is not None:
            rows += modulation_rows(f"{ours}.{prefix}modulation", f"{theirs}.{modulation}", "6D")
        rows += [
            *attention_rows(f"{ours}.{prefix}attention", f"{theirs}.attn", names),
            *feed_forward_rows(f"{ours}.{prefix}mlp", f"{theirs}.{mlp}"),
        ]
    return tuple(rows)


def single_stream_rows(ours: str, theirs: str, *, modulated: bool = True) -> tuple[Row, ...]:
    """Lines of the name table for single-stream layers, whose names begin with `ours` and `theirs`.

    `modulated` says whether layers have weights for their modulation.
    """
    made = (*(f"{theirs}.attn.to_{letter}" for letter in "qkv"), f"{theirs}.proj_mlp")
    whole: Any = {"split": _COLUMN}
    modulation = modulation_rows(f"{ours}.modulation", f"{theirs}.norm.linear", "3D")
    return (
        *(modulation if modulated else ()),
        *norm_rows(f"{ours}.attention", f"{theirs}.attn", ("norm_q", "norm_k")),
        *linear_rows(f"{ours}.linear_in", made, "3D+F", "D", arrangement=BY_HEAD, **whole),
        *linear_rows(
            f"{ours}.linear_out",
            f"{theirs}.proj_out",
            *("D", "D+F"),
            split=_ROW,
            arrangement=HeadColumns(),
        ),
    )


def condition_rows(*, guidance: Exists | None = None) -> tuple[Row, ...]:
    """Lines of the name table for the embeddings of timestep, pooled text and guidance.

    `guidance` says whether a configuration has a guidance embedding; None: none has.
    """
    told = "time_text_embed"
    rows = (
        *two_linears("told.level", f"{told}.timestep_embedder", "W"),
        *two_linears("told.pooled", f"{told}.text_embedder", "P"),
    )
    if guidance is None:
        return rows
    return (
        *rows,
        *two_linears("told.guidance", f"{told}.guidance_embedder", "W", exists=guidance),
    )


def two_linears(ours: str, theirs: str, inputs: str, **options: Any) -> tuple[Row, ...]:
    """Lines of the name table for an embedding of two linears; `inputs` is its input width."""
    first, second = (f"{theirs}.linear_{n}" for n in (1, 2))
    return (
        *linear_rows(f"{ours}.linear_1", first, "D", inputs, **options),
        *linear_rows(f"{ours}.linear_2", second, "D", "D", **options),
    )


def layer_norm_rows(ours: str, theirs: str, width: str, **options: Any) -> tuple[Row, Row]:
    """Lines of the name table for the weight and the bias of a LayerNorm."""
    weight, bias = (
        Row(f"{ours}.{name}", (f"{theirs}.{name}",), TensorSplit.REPLICATED, (width,), **options)
        for name in ("weight", "bias")
    )
    return weight, bias


def refiner_rows(ours: str) -> tuple[Row, ...]:
    """Lines of the name table for the token refiner of the Hunyuan models, which we call `ours`.

    There are lines for the largest number of layers that a configuration may have.
    """
    theirs = "context_embedder"
    layers = (_refiner_layer(ours, theirs, number) for number in range(MOST_REFINER_LAYERS))
    return (
        *two_linears(f"{ours}.level", f"{theirs}.time_text_embed.timestep_embedder", "W"),
        *two_linears(f"{ours}.pooled", f"{theirs}.time_text_embed.text_embedder", "E"),
        *linear_rows(f"{ours}.linear_in", f"{theirs}.proj_in", "D", "E"),
        *(row for rows in layers for row in rows),
    )


def _refiner_layer(ours: str, theirs: str, number: int) -> tuple[Row, ...]:
    ours, theirs = f"{ours}.blocks.{number}", f"{theirs}.token_refiner.refiner_blocks.{number}"
    exists: Any = {"exists": lambda model: number < model.num_refiner_layers}
    qkv = tuple(f"{theirs}.attn.to_{letter}" for letter in "qkv")
    return (
        *layer_norm_rows(f"{ours}.norm_1", f"{theirs}.norm1", "D", **exists),
        *linear_rows(f"{ours}.linear_qkv", qkv, "3D", "D", arrangement=ByHead(), **exists),
        *linear_rows(f"{ours}.linear_proj", f"{theirs}.attn.to_out.0", "D", "D", **exists),
        *layer_norm_rows(f"{ours}.norm_2", f"{theirs}.norm2", "D", **exists),
        *linear_rows(f"{ours}.linear_fc1", f"{theirs}.ff.net.0.proj", "R", "D", **exists),
        *linear_rows(f"{ours}.linear_fc2", f"{theirs}.ff.net.2", "D", "R", **exists),
        *linear_rows(f"{ours}.gates", f"{theirs}.norm_out.linear", "2D", "D", **exists),
    )


def glyph_rows(ours: str) -> tuple[Row, ...]:
    """Lines of the name table for the embedding of ByT5's states, which we call `ours`.

    HunyuanVideo 1.5 and HunyuanImage have this embedding.
    """
    linears = (("S", "G"), ("S", "S"), ("D", "S"))
    names = ((f"linear_{number}", shape) for number, shape in enumerate(linears, 1))
    return (
        *layer_norm_rows(f"{ours}.norm", "context_embedder_2.norm", "G"),
        *(
            row
            for name, shape in names
            for row in linear_rows(f"{ours}.{name}", f"context_embedder_2.{name}", *shape)
        ),
    )


def head_rows(*, features: Arrangement = SAME) -> tuple[Row, ...]:
    """Lines of the name table for the last modulated norm and the output linear.

    `features` arranges the features of a token.
    """
    return (
        *modulation_rows("modulate_out", "norm_out.linear", "2D", arrangement=SwappedHalves()),
        *linear_rows("proj_out", "proj_out", "C", "D", arrangement=features),
    )


HEAD_ROWS = head_rows()
EMBEDDER_ROWS: tuple[Row, ...] = (
    *linear_rows("patches", "x_embedder", "D", "C"),
    *linear_rows("text_embedder", "context_embedder", "D", "E"),
)


def stack_rows(*, modulated: bool = True) -> tuple[Row, ...]:
    """Lines of the name table for double-stream and single-stream layers (FLUX, Chroma).

    `modulated` says whether layers have weights for their modulations.
    """
    double: Any = {} if modulated else {"modulations": None}
    return (
        *double_stream_rows("double_blocks.layers.*", "transformer_blocks.*", **double),
        *single_stream_rows(
            "single_blocks.layers.*", "single_transformer_blocks.*", modulated=modulated
        ),
    )


def stack_layers(model: DoubleSingleConfig) -> dict[str, int]:
    """Number of double-stream and single-stream layers, by the names of their stacks."""
    return {"double_blocks": model.num_layers, "single_blocks": model.num_single_layers}


def stream_sizes(model: ModelConfig) -> dict[str, int]:
    """The size for each letter in the shapes of this module's lines, except P, G and S."""
    width, hidden = model.hidden_size, model.ffn_hidden_size
    return {
        **{f"{count}D": count * width for count in (2, 3, 6, 9)},
        "D": width,
        "F": hidden,
        "3D+F": 3 * width + hidden,
        "D+F": width + hidden,
        "K": width // model.num_attention_heads,
        "W": LEVEL_WAVES,
        "E": model.crossattn_emb_size,
        "R": REFINER_RATIO * width,
        "C": model.output_features,
    }

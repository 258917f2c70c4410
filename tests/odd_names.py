"""The odd family in Diffusers: a table with every kind of row."""

from __future__ import annotations

from dit.models.diffusers.arrangements import (
    ByHead,
    Convolution,
    Features,
    HeadColumns,
    RotaryPairs,
    SwappedHalves,
)
from dit.models.diffusers.form import ConfigKeys, DiffusersForm
from dit.models.diffusers.names import NameTable, Row, TensorSplit

_LAYER, _BLOCK = "single.layers.*", "single_blocks.*"
ROTATED = ByHead(rotated=(0, 1))


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"{_BLOCK}.attn.to_{letter}.{kind}" for letter in "qkv")


def _wide(kind: str) -> tuple[str, ...]:
    parts = ("attn2.to_q", "attn2.to_k", "attn2.to_v", "proj_mlp")
    return tuple(f"{_BLOCK}.{part}.{kind}" for part in parts)


ROWS = (
    Row("patches.weight", ("x.weight",), TensorSplit.REPLICATED, ("D", "C"), Convolution()),
    Row("patches.bias", ("x.bias",), TensorSplit.REPLICATED, ("D",)),
    Row(f"{_LAYER}.qkv.weight", _qkv("weight"), TensorSplit.COLUMN, ("3D", "D"), ROTATED),
    Row(f"{_LAYER}.qkv.bias", _qkv("bias"), TensorSplit.COLUMN, ("3D",), ROTATED),
    Row(f"{_LAYER}.norm", (f"{_BLOCK}.norm",), TensorSplit.REPLICATED, ("K",), RotaryPairs()),
    Row(f"{_LAYER}.wide.weight", _wide("weight"), TensorSplit.COLUMN, ("3D+F", "D"), ROTATED),
    Row(f"{_LAYER}.wide.bias", _wide("bias"), TensorSplit.COLUMN, ("3D+F",), ROTATED),
    Row(
        f"{_LAYER}.linear_out.weight",
        (f"{_BLOCK}.proj_out.weight",),
        TensorSplit.ROW,
        ("D", "D+F"),
        HeadColumns(),
    ),
    Row("norm_q", ("norm_q",), TensorSplit.COLUMN, ("D",), RotaryPairs()),
    Row("out.weight", ("n.weight",), TensorSplit.REPLICATED, ("2D", "D"), SwappedHalves()),
    Row("last.weight", ("p.weight",), TensorSplit.REPLICATED, ("C", "D"), Features("thwc")),
    Row("last.bias", ("p.bias",), TensorSplit.REPLICATED, ("C",), Features("thwc")),
    Row("first.weight", ("f.weight",), TensorSplit.REPLICATED, ("D", "C"), Features("hwtc", 1)),
)


def _sizes(model) -> dict[str, int]:
    width, hidden = model.hidden_size, model.ffn_hidden_size
    return {
        "C": model.patch_features,
        "D": width,
        "2D": 2 * width,
        "3D": 3 * width,
        "3D+F": 3 * width + hidden,
        "D+F": width + hidden,
        "K": width // model.num_attention_heads,
    }


FORM = DiffusersForm(
    class_name="OddTransformer2DModel",
    table=NameTable(
        rows=ROWS, sizes=_sizes, layers=lambda model: {"single": model.num_single_layers}
    ),
    keys=ConfigKeys(keys=()),
    inexpressible=lambda _: [],
    pipelines={},
    largest_latent=lambda _: (1, 1, 1),
    run_network=None,  # type: ignore[arg-type]
)

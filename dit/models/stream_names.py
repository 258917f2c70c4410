"""Names in Diffusers of the layers with joint attention, which several families share."""

# D model width, F width of the MLP, K head width, C numbers in a token of the prediction
# W cosines and sines of a number that is told, P width of pooled text

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from dit.batch import LatentSample
from dit.config import ModelConfig
from dit.models.diffusers_names import (
    Arrangement,
    ByHead,
    HeadColumns,
    RotaryPairs,
    Row,
    Same,
    StrictKeys,
    SwappedHalves,
    TensorSplit,
    linear_rows,
)
from dit.models.patches import patchify, unpatchify
from dit.models.positions import GridPositions
from dit.models.stream_config import DoubleSingleConfig

_COLUMN, _ROW = TensorSplit.COLUMN, TensorSplit.ROW
_SAME = Same()
BY_HEAD = ByHead(rotated=(0, 1))
"""Neighbours are rotated together there, and halves of a head here."""
Exists = Callable[[Any], bool]
"""Whether a network has a tensor."""


def _always(_: Any) -> bool:
    return True


def norm_rows(
    ours: str,
    theirs: str,
    names: tuple[str, str],
    *,
    rotated: bool = True,
    exists: Exists = _always,
) -> tuple[Row, ...]:
    """RMSNorm of queries and of keys, with one weight for all heads."""
    return tuple(
        Row(
            f"{ours}.{letter}_layernorm.weight",
            (f"{theirs}.{name}.weight",),
            TensorSplit.REPLICATED,
            ("K",),
            RotaryPairs() if rotated else _SAME,
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
"""Queries, keys and values; their norms; output: of latents and of text."""


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
    """Of one attention; `normed`: whether there are norms, `output`: a linear behind it."""
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
    """Of one feed-forward."""
    return (
        *linear_rows(f"{ours}.linear_fc1", f"{theirs}.net.0.proj", "F", "D", split=_COLUMN),
        *linear_rows(f"{ours}.linear_fc2", f"{theirs}.net.2", "D", "F", split=_ROW),
    )


def modulation_rows(
    ours: str, theirs: str, outputs: str, *, arrangement: Arrangement = _SAME
) -> tuple[Row, ...]:
    """Of the linear of one modulation."""
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
    """Of double-stream layers, which begin with `ours` and `theirs`; latents, then text.

    `modulations` is None where layers have no weights of them.
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
    """Of single-stream layers, which begin with `ours` and `theirs`.

    `modulated`: whether layers have weights of their modulation.
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
    """Of embeddings of level, guidance and pooled text; `guidance`: whether there is one."""
    told = "time_text_embed"
    rows = (
        *_two_linears("told.level", f"{told}.timestep_embedder", "W"),
        *_two_linears("told.pooled", f"{told}.text_embedder", "P"),
    )
    if guidance is None:
        return rows
    return (
        *rows,
        *_two_linears("told.guidance", f"{told}.guidance_embedder", "W", exists=guidance),
    )


def _two_linears(ours: str, theirs: str, inputs: str, **options: Any) -> tuple[Row, ...]:
    first, second = (f"{theirs}.linear_{n}" for n in (1, 2))
    return (
        *linear_rows(f"{ours}.linear_1", first, "D", inputs, **options),
        *linear_rows(f"{ours}.linear_2", second, "D", "D", **options),
    )


def head_rows(*, features: Arrangement = _SAME) -> tuple[Row, ...]:
    """Of what follows the layers; `features` is the order of numbers in a token."""
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
    """Of double-stream layers and the single-stream ones after them (FLUX, Chroma)."""
    double: Any = {} if modulated else {"modulations": None}
    return (
        *double_stream_rows("double_blocks.layers.*", "transformer_blocks.*", **double),
        *single_stream_rows(
            "single_blocks.layers.*", "single_transformer_blocks.*", modulated=modulated
        ),
    )


def stack_layers(model: DoubleSingleConfig) -> dict[str, int]:
    """`NameTable.layers` of the same."""
    return {"double_blocks": model.num_layers, "single_blocks": model.num_single_layers}


def stream_sizes(model: ModelConfig) -> dict[str, int]:
    """The numbers of the letters of all these lines, but C, W and P."""
    width, hidden = model.hidden_size, model.ffn_hidden_size
    return {
        **{f"{count}D": count * width for count in (2, 3, 6, 9)},
        "D": width,
        "F": hidden,
        "3D+F": 3 * width + hidden,
        "D+F": width + hidden,
        "K": width // model.num_attention_heads,
    }


PATCH = 2
"""Rows and columns of a token in the pipelines of FLUX and Chroma."""


class DoubleSingleKeys(StrictKeys):
    """What `FluxTransformer2DModel` and `ChromaTransformer2DModel` have in config.json."""

    patch_size: PositiveInt = 1
    in_channels: PositiveInt = 64
    out_channels: PositiveInt | None = None
    num_layers: PositiveInt = 19
    num_single_layers: PositiveInt = 38
    attention_head_dim: PositiveInt = 128
    num_attention_heads: PositiveInt = 24
    joint_attention_dim: PositiveInt = 4096
    axes_dims_rope: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 56, 56)


class PatchKeys(StrictKeys):
    """What an export keeps in config.json that these have no place for."""

    patch_spatial: PositiveInt
    patch_temporal: PositiveInt


def unsupported_keys(t: DoubleSingleKeys) -> list[str]:
    """What of a config.json our network has no counterpart for."""
    rules = [
        (t.patch_size == 1, f"patch_size={t.patch_size}; patches are cut before the network"),
        (
            t.out_channels in (None, t.in_channels),
            f"out_channels={t.out_channels} with in_channels={t.in_channels}",
        ),
    ]
    return [message for holds, message in rules if not holds]


def network_settings(t: DoubleSingleKeys, private: PatchKeys | None) -> dict[str, Any]:
    """Settings of our network, of a config.json.

    Raises:
        ValueError: its tokens are no patches.
    """
    rows, frames = (private.patch_spatial, private.patch_temporal) if private else (PATCH, 1)
    channels, rest = divmod(t.in_channels, frames * rows**2)
    if rest:
        raise ValueError(
            f"in_channels={t.in_channels} are no patches of {frames} frames x {rows} x {rows}"
        )
    return {
        "num_layers": t.num_layers,
        "num_single_layers": t.num_single_layers,
        "hidden_size": t.num_attention_heads * t.attention_head_dim,
        "num_attention_heads": t.num_attention_heads,
        "in_channels": channels,
        "patch_spatial": rows,
        "patch_temporal": frames,
        "crossattn_emb_size": t.joint_attention_dim,
        "rope_axes": t.axes_dims_rope,
    }


def network_keys(m: DoubleSingleConfig) -> dict[str, Any]:
    """The inverse: `DoubleSingleKeys` of a network."""
    return {
        "patch_size": 1,
        "in_channels": m.patch_features,
        "out_channels": None,
        "num_layers": m.num_layers,
        "num_single_layers": m.num_single_layers,
        "attention_head_dim": m.hidden_size // m.num_attention_heads,
        "num_attention_heads": m.num_attention_heads,
        "joint_attention_dim": m.crossattn_emb_size,
        "axes_dims_rope": m.rope_axes,
    }


def mlp_misfit(model: DoubleSingleConfig, class_name: str) -> list[str]:
    """What of a network Diffusers' class has no counterpart for."""
    if model.ffn_hidden_size == 4 * model.hidden_size:
        return []
    return [f"model.mlp_ratio={model.mlp_ratio:g} cannot be exported: {class_name} has 4"]


def patch_misfit(model: DoubleSingleConfig) -> list[str]:
    """What the pipelines feed otherwise than in training."""
    patch = (model.patch_temporal, model.patch_spatial)
    if patch == (1, PATCH):
        return []
    return [
        f"model.patch_temporal={patch[0]} and model.patch_spatial={patch[1]}, and it cuts"
        f" patches of 1 frame x {PATCH} x {PATCH}"
    ]


def run_on_sample(
    network: nn.Module,
    sample: LatentSample,
    level: float,
    model: DoubleSingleConfig,
    *,
    references: tuple[Tensor, ...] = (),
    **inputs: Any,
) -> Tensor:
    """What Diffusers' network makes of one sample; `inputs` are those of its class alone."""
    patch = (model.patch_temporal, model.patch_spatial)
    latents = (sample.latent_CFHW, *references)
    grids, rows = zip(*(patchify(latent, *patch) for latent in latents), strict=True)
    (made,) = network(
        hidden_states=torch.cat(rows)[None],
        encoder_hidden_states=sample.text_LE[None],
        timestep=torch.tensor([level / 1000]),  # it multiplies by 1000 itself
        img_ids=GridPositions()(grids, fps=sample.fps),
        txt_ids=torch.zeros(len(sample.text_LE), 3),
        return_dict=False,
        **inputs,
    )
    return unpatchify(made[0], grids[0], *patch)


_DOUBLE, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"


def _together(block: str, *names: str) -> str:
    return " ".join(f"{block}.{name}" for name in names)


ORIGINAL_BLOCK_NAMES: dict[str, str] = {
    "double_blocks.*.img_attn.qkv": _together(_DOUBLE, "attn.to_q", "attn.to_k", "attn.to_v"),
    "double_blocks.*.txt_attn.qkv": _together(
        _DOUBLE, "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"
    ),
    "double_blocks.*.img_attn.proj": f"{_DOUBLE}.attn.to_out.0",
    "double_blocks.*.txt_attn.proj": f"{_DOUBLE}.attn.to_add_out",
    "double_blocks.*.img_mlp.0": f"{_DOUBLE}.ff.net.0.proj",
    "double_blocks.*.img_mlp.2": f"{_DOUBLE}.ff.net.2",
    "double_blocks.*.txt_mlp.0": f"{_DOUBLE}.ff_context.net.0.proj",
    "double_blocks.*.txt_mlp.2": f"{_DOUBLE}.ff_context.net.2",
    "single_blocks.*.linear1": _together(
        _SINGLE, "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"
    ),
    "single_blocks.*.linear2": f"{_SINGLE}.proj_out",
}
"""Linears of the layers as FLUX's own code names them, and Chroma's, and as Diffusers does.

`*` stands for the number of a block. Where one linear of theirs is several of Diffusers', these
stand side by side with spaces: all have as many outputs as it has inputs, and the last one the
rest.
"""

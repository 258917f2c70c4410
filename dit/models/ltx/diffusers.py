"""LTX-Video in Diffusers, `LTXVideoTransformer3DModel`: tensor names, config.json, calls."""

# D model width, F width of the MLP, W width of the sinusoidal timestep embedding, E text width
# C numbers in a token

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from dit.config.checks import Rule
from dit.models.diffusers.arrangements import ByHead, RotaryPairs
from dit.models.diffusers.form import (
    ConfigKeys,
    DiffusersForm,
    Key,
    OwnKey,
    Pipeline,
    heads_of,
    same,
)
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows
from dit.models.family import REFERENCE
from dit.models.joint.diffusers import mlp_misfit, outputs_as_inputs
from dit.models.layer_spec import LEVEL_WAVES
from dit.models.ltx.family import (
    FIRST_FRAME,
    TRAINED_SHIFT,
    FramePositions,
    LtxConfig,
    ltx_positions,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "LTXVideoTransformer3DModel"
_LAYER, _BLOCK = "blocks.layers.*", "transformer_blocks.*"
_SELF, _CROSS = f"{_LAYER}.self_attention", f"{_LAYER}.cross_attention"
_REPLICATED, _COLUMN, _ROW = TensorSplit.REPLICATED, TensorSplit.COLUMN, TensorSplit.ROW


def _heads_norms(ours: str, theirs: str, **options: Any) -> tuple[Row, ...]:
    """Lines of the name table for RMSNorms of queries and keys over all heads of a token."""
    names = {"query": "norm_q", "key": "norm_k"}
    return tuple(
        Row(f"{ours}.across_heads.{a}_scale", (f"{theirs}.{b}.weight",), _COLUMN, ("D",), **options)
        for a, b in names.items()
    )


def _parts(block: str, letters: str) -> tuple[str, ...]:
    return tuple(f"{block}.to_{letter}" for letter in letters)


_LEVEL = "time_embed.emb.timestep_embedder"
_ROWS: tuple[Row, ...] = (
    *linear_rows("patches", "proj_in", "D", "C"),
    *linear_rows("level.linear_1", f"{_LEVEL}.linear_1", "D", "W"),
    *linear_rows("level.linear_2", f"{_LEVEL}.linear_2", "D", "D"),
    *linear_rows("shared", "time_embed.linear", "6D", "D"),
    *linear_rows("text_embedder.linear_1", "caption_projection.linear_1", "D", "E"),
    *linear_rows("text_embedder.linear_2", "caption_projection.linear_2", "D", "D"),
    Row(f"{_LAYER}.modulation.table", (f"{_BLOCK}.scale_shift_table",), _REPLICATED, ("6", "D")),
    *linear_rows(
        f"{_SELF}.linear_qkv",
        _parts(f"{_BLOCK}.attn1", "qkv"),
        *("3D", "D"),
        split=_COLUMN,
        # Diffusers rotates adjacent numbers as a pair, our network numbers half a head apart.
        arrangement=ByHead(rotated=(0, 1)),
    ),
    *_heads_norms(_SELF, f"{_BLOCK}.attn1", arrangement=RotaryPairs()),
    *linear_rows(f"{_SELF}.linear_proj", f"{_BLOCK}.attn1.to_out.0", "D", "D", split=_ROW),
    *linear_rows(f"{_CROSS}.linear_q", f"{_BLOCK}.attn2.to_q", "D", "D", split=_COLUMN),
    *linear_rows(
        f"{_CROSS}.linear_kv",
        _parts(f"{_BLOCK}.attn2", "kv"),
        *("2D", "D"),
        split=_COLUMN,
        arrangement=ByHead(),
    ),
    *_heads_norms(_CROSS, f"{_BLOCK}.attn2"),
    *linear_rows(f"{_CROSS}.linear_proj", f"{_BLOCK}.attn2.to_out.0", "D", "D", split=_ROW),
    *linear_rows(f"{_LAYER}.mlp.linear_fc1", f"{_BLOCK}.ff.net.0.proj", "F", "D", split=_COLUMN),
    *linear_rows(f"{_LAYER}.mlp.linear_fc2", f"{_BLOCK}.ff.net.2", "D", "F", split=_ROW),
    Row("modulate_out.table", ("scale_shift_table",), _REPLICATED, ("2", "D")),
    *linear_rows("proj_out", "proj_out", "C", "D"),
)


def _sizes(model: LtxConfig) -> dict[str, int]:
    width = model.hidden_size
    return {
        "2": 2,
        "6": 6,
        "D": width,
        "2D": 2 * width,
        "3D": 3 * width,
        "6D": 6 * width,
        "F": model.ffn_hidden_size,
        "W": LEVEL_WAVES,
        "E": model.crossattn_emb_size,
        "C": model.patch_features,
    }


_SAME = (
    *(f"{_BLOCK}.attn{n}.{to}" for n in (1, 2) for to in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"{_BLOCK}.ff.net.0.proj", f"{_BLOCK}.ff.net.2"),
    *("caption_projection.linear_1", "caption_projection.linear_2", "proj_out"),
)
LTX_NAMES: dict[str, str] = {
    "patchify_proj": "proj_in",
    "adaln_single.emb.timestep_embedder.linear_1": f"{_LEVEL}.linear_1",
    "adaln_single.emb.timestep_embedder.linear_2": f"{_LEVEL}.linear_2",
    "adaln_single.linear": "time_embed.linear",
    **{name: name for name in _SAME},
}
"""Diffusers' names of linears by their names in Lightricks' code and in ComfyUI."""


def _width(t: Any) -> int:
    return t.num_attention_heads * t.attention_head_dim


def _rules(t: Any) -> list[Rule]:
    fixed = {
        "activation_fn": "gelu-approximate",
        "qk_norm": "rms_norm_across_heads",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "attention_bias": True,
        "attention_out_bias": True,
    }
    found = {key: getattr(t, key) for key in fixed}
    return [
        *(
            (found[key] == value, f"{key}={found[key]!r} must be {value!r}")
            for key, value in fixed.items()
        ),
        outputs_as_inputs(t),
        (
            t.in_channels % _patch_volume(t) == 0,
            f"in_channels={t.in_channels} must be a multiple of {_patch_volume(t)}, the number of"
            " latent pixels in a patch (patch_size_t * patch_size * patch_size)",
        ),
        (
            t.cross_attention_dim == _width(t),
            f"cross_attention_dim={t.cross_attention_dim} must be {_width(t)}"
            " (num_attention_heads * attention_head_dim)",
        ),
    ]


def _patch_volume(t: Any) -> int:
    return t.patch_size_t * t.patch_size**2


KEYS = ConfigKeys(
    keys=(
        Key(
            "in_channels",
            "in_channels",
            128,
            read=lambda t: t.in_channels // _patch_volume(t),
            write=lambda m: m.patch_features,
        ),
        Key("out_channels", default=128, type=PositiveInt | None, write=lambda m: m.patch_features),
        Key("patch_size", "patch_spatial", 1),
        Key("patch_size_t", "patch_temporal", 1),
        same("num_attention_heads", 32),
        heads_of(64),
        Key("cross_attention_dim", default=2048, write=lambda m: m.hidden_size),
        same("num_layers", 28),
        Key("activation_fn", default="gelu-approximate"),
        Key("qk_norm", default="rms_norm_across_heads"),
        Key("norm_elementwise_affine", default=False),
        Key("norm_eps", default=1e-6),
        Key("caption_channels", "crossattn_emb_size", 4096),
        Key("attention_bias", default=True),
        Key("attention_out_bias", default=True),
    ),
    kept=(
        # Set by the pipeline's class or the user: it differs between networks with the same
        # config.json.
        OwnKey("frame_positions", str, published=None, read=FramePositions),
        OwnKey("reference_latents", int, published=lambda _: 0, read=int, may_be_told=True),
    ),
    rules=_rules,
)


def _pipeline(name: str, positions: FramePositions, **options: Any) -> Pipeline:
    def rules(model: LtxConfig) -> list[Rule]:
        return [
            (
                model.frame_positions is positions,
                f"model.frame_positions={model.frame_positions}, but {name} has {positions}"
                " positions",
            )
        ]

    return Pipeline(settings={"frame_positions": positions}, rules=rules, **options)


_EVEN, _CAUSAL = FramePositions.EVEN, FramePositions.CAUSAL
_PIPELINES = {
    **{name: _pipeline(name, _EVEN) for name in ("LTXPipeline", "LTXImageToVideoPipeline")},
    "LTXConditionPipeline": _pipeline(
        "LTXConditionPipeline",
        _CAUSAL,
        # The pipeline computes noise levels without its scheduler; the shift is that of training.
        objective={"name": "flow", "sampling_levels": "linear_quadratic"},
        sampling=lambda _: dict(TRAINED_SHIFT),
    ),
}


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, model: LtxConfig
) -> Tensor:
    """The output [C, F, H, W] of Diffusers' network for one sample, with references after it."""
    import torch

    from dit.models.positions import patchify, unpatchify

    patch = model.patch_temporal, model.patch_spatial
    latent, given = sample.latent_CFHW, sample.others.get(FIRST_FRAME)
    if given is not None and given.shape[1] < latent.shape[1]:
        latent = torch.cat([given, latent[:, given.shape[1] :]], dim=1)
    names = [name for name in sample.others if name.startswith(REFERENCE)]
    cut = [patchify(one, *patch) for one in (latent, *(sample.others[name] for name in names))]
    grids, rows_TC = tuple(grid for grid, _ in cut), torch.cat([rows for _, rows in cut])
    own = len(cut[0][1])
    told_T = torch.zeros(len(rows_TC))
    clean = 0 if latent is sample.latent_CFHW else given.shape[1] // patch[0]  # type: ignore[union-attr]
    told_T[clean * own // grids[0][0] : own] = level
    corner_TA = ltx_positions(model).corners(grids, fps=sample.fps)
    (made,) = network(
        hidden_states=rows_TC[None],
        encoder_hidden_states=sample.text_LE[None],
        timestep=told_T[None],
        encoder_attention_mask=torch.ones(1, len(sample.text_LE)),
        video_coords=corner_TA.T[None],
        return_dict=False,
    )
    return unpatchify(made[0], grids[0], *patch)


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(rows=_ROWS, sizes=_sizes, layers=lambda model: {"blocks": model.num_layers}),
    keys=KEYS,
    inexpressible=lambda model: mlp_misfit(model, CLASS),
    original_names=(LTX_NAMES,),
    comfyui_names=lambda _: LTX_NAMES,
    pipelines=_PIPELINES,
    run_network=_run_network,
)

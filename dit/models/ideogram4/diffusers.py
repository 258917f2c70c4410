"""Ideogram 4 in Diffusers, `Ideogram4Transformer2DModel`: names, config.json, pipelines, calls."""

# D model width, K head width, Q queries, keys and values of a token, F width of the MLP
# T width of the timestep embedding of modulations, E text width, C numbers in a token

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dit.config.checks import Rule
from dit.models.diffusers.arrangements import ByHead, SwappedHalves
from dit.models.diffusers.form import (
    ConfigKeys,
    DiffusersForm,
    Key,
    Pipeline,
    heads_of,
    own_names,
    same,
)
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows
from dit.models.ideogram4.family import EPS, LEVELS, THETA, Ideogram4Config
from dit.models.joint.diffusers import channels_of_patches, kept_patch, mlp_ratio, patch_rules
from dit.models.joint.sequential_names import SequentialNames, sequential_rows, weight_row
from dit.models.joint.tensor_names import stream_sizes
from dit.models.layer_spec import ALL_NOISE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "Ideogram4Transformer2DModel"
PATCH = 1
"""Side of a patch in latent pixels: 1, because the codec already moves patches to channels."""
TEXT, PICTURE = 3, 2
"""Values of `indicator`, by which Diffusers' network distinguishes text and picture tokens."""
KINDS = "embed_image_indicator"
"""Diffusers' name of the embedding of a token's kind (text or picture)."""
_LAYERS = SequentialNames(
    norms=("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"),
    modulation="adaln_modulation",
    attention="attention",
    mlp=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
)


def _sizes(model: Ideogram4Config) -> dict[str, int]:
    width = model.hidden_size
    return stream_sizes(model) | {
        **{"4D": 4 * width, "Q": 3 * width, "2F": 2 * model.ffn_hidden_size},
        **{"T": model.adaln_width, "2": 2},
    }


_TABLE = NameTable(
    rows=(
        *linear_rows("patches", "input_proj", "D", "C"),
        weight_row("text_norm", "llm_cond_norm", "E"),
        *linear_rows("text_embedder", "llm_cond_proj", "D", "E"),
        # In Diffusers its inputs are sines, then cosines.
        *linear_rows(
            "told.linear_1", "t_embedding.mlp_in", "D", "D", arrangement=SwappedHalves(axis=1)
        ),
        *linear_rows("told.linear_2", "t_embedding.mlp_out", "D", "D"),
        *linear_rows("narrow", "adaln_proj", "T", "D"),
        Row(
            "row_kind.weight",
            (f"{KINDS}.weight",),
            *(TensorSplit.REPLICATED, ("2", "D")),
        ),
        *sequential_rows("blocks", "layers", _LAYERS, heads=ByHead(), rotated=False),
        *linear_rows(
            "modulate_out.linear",
            "final_layer.adaln_modulation",
            *("D", "T"),
            split=TensorSplit.COLUMN,
        ),
        *linear_rows("proj_out", "final_layer.linear", "C", "D"),
    ),
    sizes=_sizes,
    layers=lambda model: {"blocks": model.num_layers},
)
_QKV = " ".join(f"layers.*.attention.to_{letter}" for letter in "qkv")
_OWN_NAMES = {name: one for name, one in own_names(_TABLE).items() if name != KINDS}
_STORED_NAMES = {
    "layers.*.attention.qkv": _QKV,
    "layers.*.attention.o": "layers.*.attention.to_out.0",
}
IDEOGRAM4_NAMES = {
    **{name: one for name, one in _OWN_NAMES.items() if ".attention.to_" not in name},
    **_STORED_NAMES,
}
"""Diffusers' names of linears by their names in the original project, ComfyUI and trainers."""


def _rules(t: Any) -> list[Rule]:
    return [
        (t.norm_eps == EPS, f"norm_eps={t.norm_eps:g} must be {EPS:g}"),
        (t.rope_theta == THETA, f"rope_theta={t.rope_theta:g} must be {THETA:g}"),
    ]


KEYS = ConfigKeys(
    keys=(
        Key(
            "in_channels",
            "in_channels",
            128,
            read=channels_of_patches,
            write=lambda m: m.patch_features,
        ),
        same("num_layers", 34),
        heads_of(256),
        same("num_attention_heads", 18),
        Key(
            "intermediate_size",
            "mlp_ratio",
            12288,
            read=lambda t: mlp_ratio(
                t.intermediate_size, t.num_attention_heads * t.attention_head_dim
            ),
            write=lambda m: m.ffn_hidden_size,
        ),
        Key("adaln_dim", "adaln_width", 512),
        Key("llm_features_dim", "crossattn_emb_size", 53248),
        Key("rope_theta", default=int(THETA)),
        same("mrope_section", (24, 20, 20)),
        Key("norm_eps", default=EPS),
    ),
    kept=kept_patch(PATCH),
    rules=_rules,
)


def network_inputs(
    rows_TC: Tensor, positions_TA: Tensor, text_LE: Tensor, level: float
) -> dict[str, Any]:
    """The arguments of Diffusers' network for one sample: its text, followed by its picture.

    `rows_TC` are the tokens of the picture and `positions_TA` their positions. `level` is the
    timestep in [0, 1000].
    """
    import torch
    from torch.nn.functional import pad

    from dit.models.positions import FarPicturePositions

    tokens, text = len(rows_TC), len(text_LE)
    kinds = torch.tensor([TEXT] * text + [PICTURE] * tokens)
    places = (FarPicturePositions.of_text([text]), positions_TA)
    return {
        "hidden_states": pad(rows_TC, (0, 0, text, 0))[None],
        "timestep": 1 - torch.tensor([level]) / ALL_NOISE,
        "encoder_hidden_states": pad(text_LE, (0, 0, 0, tokens))[None],
        "position_ids": torch.cat(places)[None],
        "segment_ids": torch.ones_like(kinds)[None],
        "indicator": kinds[None],
    }


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, model: Ideogram4Config
) -> Tensor:
    from dit.models.positions import FarPicturePositions, patchify, unpatchify

    patch = model.patch_temporal, model.patch_spatial
    grid, rows_TC = patchify(sample.latent_CFHW, *patch)
    places = FarPicturePositions()((grid,), fps=sample.fps)
    given = network_inputs(rows_TC, places, sample.text_LE, level)
    (made,) = network(**given, return_dict=False)
    return -unpatchify(made[0, len(sample.text_LE) :], grid, *patch)


FORM = DiffusersForm(
    class_name=CLASS,
    table=_TABLE,
    keys=KEYS,
    original_names=(IDEOGRAM4_NAMES, _OWN_NAMES),
    stored_names=_STORED_NAMES,  # in the published weights in 8-bit floats
    comfyui_names=lambda _: IDEOGRAM4_NAMES,
    pipelines={
        "Ideogram4Pipeline": Pipeline(
            objective={"name": "flow", "sampling_levels": "quantiles"},  # whatever scheduler it has
            sampling=lambda _: dict(LEVELS),
            rules=partial(patch_rules, rows=PATCH),
        )
    },
    largest_latent=lambda _: (1, 2**20, 2**20),
    run_network=_run_network,
)

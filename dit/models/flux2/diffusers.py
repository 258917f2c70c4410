"""FLUX.2 in Diffusers, `Flux2Transformer2DModel`: tensor names, config.json, pipelines, calls."""

# D model width, F width of the MLP, W width of a sinusoidal embedding, E text width
# C numbers in a token

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dit.config import TextPadding
from dit.config.checks import Rule
from dit.models.diffusers.arrangements import (
    FusedHeads,
    GatesThenValues,
    HeadColumns,
    SwappedHalves,
)
from dit.models.diffusers.form import ConfigKeys, DiffusersForm, Key, OwnKey, Pipeline, same
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows, without_biases
from dit.models.flux2.family import OWN_MASK, THETA, VECTORS, Flux2Config
from dit.models.joint.diffusers import (
    double_single_keys,
    double_single_rules,
    kept_patch,
    patch_rules,
    run_on_sample,
)
from dit.models.joint.linear_names import EMBEDDERS, FLUX, HEAD, double_block_names, embedding_names
from dit.models.joint.tensor_names import (
    EMBEDDER_ROWS,
    LATENTS,
    TEXT,
    attention_rows,
    norm_rows,
    stack_layers,
    stream_sizes,
    two_linears,
)
from dit.models.layer_spec import LEVEL_WAVES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "Flux2Transformer2DModel"
PATCH = 1
"""Side of a patch in latent pixels: 1, because the codec already moves patches to channels."""
_COLUMN, _ROW = TensorSplit.COLUMN, TensorSplit.ROW
_MLP, _SINGLE = ("linear_in", "linear_out"), "single_transformer_blocks.*.attn"


def _sizes(model: Flux2Config) -> dict[str, int]:
    width, hidden = model.hidden_size, model.ffn_hidden_size
    made = {f"{count}D": count * width for count in VECTORS.values()}
    return stream_sizes(model) | made | {"2F": 2 * hidden, "3D+2F": 3 * width + 2 * hidden}


_TOLD = "time_guidance_embed"
_MODULATIONS = {
    "latents": "double_stream_modulation_img",
    "text": "double_stream_modulation_txt",
    "single": "single_stream_modulation",
    "out": "norm_out",
}


def _modulation_rows(name: str, theirs: str) -> tuple[Row, ...]:
    swapped: Any = {"arrangement": SwappedHalves()} if name == "out" else {}
    ours, outputs = f"modulations.{name}", f"{VECTORS[name]}D"
    return linear_rows(ours, f"{theirs}.linear", outputs, "D", split=_COLUMN, **swapped)


def _double_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    """Lines of the name table for double-stream layers: first of the latents, then of the text."""
    rows: list[Row] = []
    for prefix, names, mlp in (("", LATENTS, "ff"), ("text_", TEXT, "ff_context")):
        first, second = (f"{ours}.{prefix}mlp.linear_fc{n}" for n in (1, 2))
        inner: Any = {"split": _COLUMN, "arrangement": GatesThenValues()}
        rows += [
            *attention_rows(f"{ours}.{prefix}attention", f"{theirs}.attn", names),
            *linear_rows(first, f"{theirs}.{mlp}.{_MLP[0]}", "2F", "D", **inner),
            *linear_rows(second, f"{theirs}.{mlp}.{_MLP[1]}", "D", "F", split=_ROW),
        ]
    return tuple(rows)


def _single_rows(ours: str) -> tuple[Row, ...]:
    """Lines of the name table for single-stream layers."""
    made: Any = {"split": _COLUMN, "arrangement": FusedHeads()}
    out: Any = {"split": _ROW, "arrangement": HeadColumns()}
    return (
        *norm_rows(f"{ours}.attention", _SINGLE, ("norm_q", "norm_k")),
        *linear_rows(f"{ours}.linear_in", f"{_SINGLE}.to_qkv_mlp_proj", "3D+2F", "D", **made),
        *linear_rows(f"{ours}.linear_out", f"{_SINGLE}.to_out", "D", "D+F", **out),
    )


_TABLE = NameTable(
    rows=without_biases(
        (
            *EMBEDDER_ROWS,
            *two_linears("told.level", f"{_TOLD}.timestep_embedder", "W"),
            *two_linears(
                "told.guidance",
                f"{_TOLD}.guidance_embedder",
                "W",
                exists=lambda model: model.guidance_embed,
            ),
            *(row for names in _MODULATIONS.items() for row in _modulation_rows(*names)),
            *_double_rows("double_blocks.layers.*", "transformer_blocks.*"),
            *_single_rows("single_blocks.layers.*"),
            *linear_rows("proj_out", "proj_out", "C", "D"),
        )
    ),
    sizes=_sizes,
    layers=stack_layers,
)

_EMBEDDINGS = {
    "time_in": f"{_TOLD}.timestep_embedder",
    "guidance_in": f"{_TOLD}.guidance_embedder",
}
FLUX2_NAMES = {
    **EMBEDDERS,
    **embedding_names(FLUX, _EMBEDDINGS),
    **double_block_names(FLUX, modulated=False, mlp=_MLP),
    "single_blocks.*.linear1": f"{_SINGLE}.to_qkv_mlp_proj",
    "single_blocks.*.linear2": f"{_SINGLE}.to_out",
    **{f"{one}.lin": f"{one}.linear" for one in _MODULATIONS.values() if "modulation" in one},
    **HEAD,
}


_FIXED = {"timestep_guidance_channels": LEVEL_WAVES, "rope_theta": int(THETA), "eps": 1e-6}


def _rules(t: Any) -> list[Rule]:
    told = ((name, getattr(t, name), value) for name, value in _FIXED.items())
    same = ((one == value, f"{name}={one:g} must be {value:g}") for name, one, value in told)
    return [*double_single_rules(t), *same]


KEYS = ConfigKeys(
    keys=(
        *double_single_keys(
            channels=128, layers=(8, 48), heads=48, text=15360, axes=(32, 32, 32, 32)
        ),
        *(Key(name, default=value) for name, value in _FIXED.items()),
        same("mlp_ratio", 3.0),
        Key("guidance_embeds", "guidance_embed", True),
    ),
    kept=(
        *kept_patch(PATCH),
        OwnKey("text_pad_to", TextPadding | None, published=lambda _: TextPadding.STORED),
        OwnKey("reference_latents", int, published=lambda _: 0, read=int, may_be_told=True),
    ),
    rules=_rules,
)


def _run_network(
    network: nn.Module,
    sample: LatentSample,
    level: float,
    model: Flux2Config,
    guidance: float | None = None,
) -> Tensor:
    import torch

    from dit.models.positions import TimeOffsetPositions

    references = (*sample.others.values(),)
    told: dict[str, Any] = {"txt_ids": TimeOffsetPositions.of_text([len(sample.text_LE)])}
    told["guidance"] = None if guidance is None else torch.tensor([guidance])
    told |= {"positions": TimeOffsetPositions(), "references": references}
    return run_on_sample(network, sample, level, model, **told)


FORM = DiffusersForm(
    class_name=CLASS,
    table=_TABLE,
    keys=KEYS,
    original_names=(FLUX2_NAMES,),
    comfyui_names=lambda _: FLUX2_NAMES,
    pipelines=dict.fromkeys(
        ("Flux2Pipeline", "Flux2KleinPipeline"), Pipeline(rules=partial(patch_rules, rows=PATCH))
    ),
    refused_pipelines={"Flux2KleinKVPipeline": OWN_MASK},
    run_network=_run_network,
)

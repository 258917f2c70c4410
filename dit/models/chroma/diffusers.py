"""Chroma in Diffusers, `ChromaTransformer2DModel`: tensor names, config.json, pipeline, calls."""

# D model width, H width of the approximator, A its inputs, E text width
# C numbers in a token

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dit.config.checks import Rule
from dit.models.chroma.family import MOST_APPROXIMATOR_LAYERS, ChromaConfig
from dit.models.diffusers.form import ConfigKeys, DiffusersForm, Key, Pipeline, same
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows
from dit.models.joint.diffusers import (
    DOUBLE_SINGLE_KEYS,
    KEPT_PATCH,
    double_single_rules,
    mlp_misfit,
    patch_rules,
    run_on_sample,
)
from dit.models.joint.linear_names import EMBEDDERS, FLUX, double_block_names, single_block_names
from dit.models.joint.tensor_names import EMBEDDER_ROWS, stack_layers, stack_rows, stream_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "ChromaTransformer2DModel"
_THEIRS = "distilled_guidance_layer"


def _approximator_layer(number: int) -> tuple[Row, ...]:
    ours, theirs = f"told.blocks.{number}", f"{_THEIRS}.layers.{number}"
    exists: Any = {"exists": lambda model: number < model.approximator_layers}
    norm = (f"{_THEIRS}.norms.{number}.weight",)
    return (
        Row(f"{ours}.norm.weight", norm, TensorSplit.REPLICATED, ("H",), **exists),
        *linear_rows(f"{ours}.linear_1", f"{theirs}.linear_1", "H", "H", **exists),
        *linear_rows(f"{ours}.linear_2", f"{theirs}.linear_2", "H", "H", **exists),
    )


_APPROXIMATOR: tuple[Row, ...] = (
    *linear_rows("told.linear_in", f"{_THEIRS}.in_proj", "H", "A"),
    *(row for number in range(MOST_APPROXIMATOR_LAYERS) for row in _approximator_layer(number)),
    *linear_rows("told.linear_out", f"{_THEIRS}.out_proj", "D", "H"),
)


def _sizes(model: ChromaConfig) -> dict[str, int]:
    return stream_sizes(model) | {
        "A": model.approximator_channels,
        "H": model.approximator_hidden_size,
    }


_ORIGINAL_NAMES = {
    **EMBEDDERS,
    **double_block_names(FLUX, modulated=False),
    **single_block_names(FLUX, modulated=False),
    f"{_THEIRS}.in_proj": f"{_THEIRS}.in_proj",
    f"{_THEIRS}.layers.*.in_layer": f"{_THEIRS}.layers.*.linear_1",
    f"{_THEIRS}.layers.*.out_layer": f"{_THEIRS}.layers.*.linear_2",
    f"{_THEIRS}.out_proj": f"{_THEIRS}.out_proj",
    "final_layer.linear": "proj_out",
}


def _rules(t: Any) -> list[Rule]:
    layers, most = t.approximator_layers, MOST_APPROXIMATOR_LAYERS
    return [
        *double_single_rules(t),
        (
            layers <= most,
            (
                f"approximator_layers={layers} is more than {most}, the largest number that can be"
                " imported"
            ),
        ),
    ]


KEYS = ConfigKeys(
    keys=(
        *DOUBLE_SINGLE_KEYS,
        Key("approximator_num_channels", "approximator_channels", 64),
        Key("approximator_hidden_dim", "approximator_hidden_size", 5120),
        same("approximator_layers", 5),
    ),
    kept=KEPT_PATCH,
    rules=_rules,
)


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, model: ChromaConfig
) -> Tensor:
    return run_on_sample(network, sample, level, model)


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(
        rows=(
            *EMBEDDER_ROWS,
            *_APPROXIMATOR,
            *stack_rows(modulated=False),
            *linear_rows("proj_out", "proj_out", "C", "D"),
        ),
        sizes=_sizes,
        layers=stack_layers,
    ),
    keys=KEYS,
    inexpressible=lambda model: mlp_misfit(model, CLASS),
    original_names=(_ORIGINAL_NAMES,),
    pipelines={"ChromaPipeline": Pipeline(rules=patch_rules)},
    run_network=_run_network,
)

"""Chroma in Diffusers: names of tensors, config.json, the pipeline, and how its network is run.

Its class is `ChromaTransformer2DModel`.
"""

# D model width, H width of the approximator, A numbers that it is told, E text width
# C numbers in a token

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, PositiveInt
from torch import Tensor, nn

from dit.batch import LatentSample
from dit.config import RunConfig
from dit.models.chroma.config import MOST_APPROXIMATOR_LAYERS, ChromaConfig
from dit.models.diffusers_names import NameTable, Row, TensorSplit, linear_rows
from dit.models.double_single_form import (
    ORIGINAL_NAMES,
    DoubleSingleKeys,
    PatchKeys,
    mlp_misfit,
    network_keys,
    network_settings,
    patch_misfit,
    run_on_sample,
    unsupported_keys,
)
from dit.models.family import DiffusersForm
from dit.models.stream_names import (
    EMBEDDER_ROWS,
    stack_layers,
    stack_rows,
    stream_sizes,
)

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
_ORIGINAL_NAMES = ORIGINAL_NAMES | {
    f"{_THEIRS}.in_proj": f"{_THEIRS}.in_proj",
    f"{_THEIRS}.layers.*.in_layer": f"{_THEIRS}.layers.*.linear_1",
    f"{_THEIRS}.layers.*.out_layer": f"{_THEIRS}.layers.*.linear_2",
    f"{_THEIRS}.out_proj": f"{_THEIRS}.out_proj",
}


def _sizes(model: ChromaConfig) -> dict[str, int]:
    return stream_sizes(model) | {
        "E": model.crossattn_emb_size,
        "C": model.patch_features,
        "A": model.approximator_channels,
        "H": model.approximator_hidden_size,
    }


class ChromaTransformer(DoubleSingleKeys):
    """config.json of `ChromaTransformer2DModel`; keys that it does not have are kept apart."""

    model_config = ConfigDict(extra="allow")

    approximator_num_channels: PositiveInt = 64
    approximator_hidden_dim: PositiveInt = 5120
    approximator_layers: PositiveInt = 5


def _unsupported(t: ChromaTransformer) -> list[str]:
    layers, most = t.approximator_layers, MOST_APPROXIMATOR_LAYERS
    told = [f"approximator_layers={layers}, more than {most}"] if layers > most else []
    return [*unsupported_keys(t), *told]


def _settings(t: ChromaTransformer, private: PatchKeys | None, _: Any) -> dict[str, Any]:
    """Settings of our network, of a config.json."""
    return network_settings(t, private) | {
        "approximator_channels": t.approximator_num_channels,
        "approximator_hidden_size": t.approximator_hidden_dim,
        "approximator_layers": t.approximator_layers,
    }


def _content(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's network."""
    m = config.model
    assert isinstance(m, ChromaConfig)
    return network_keys(m) | {
        "approximator_num_channels": m.approximator_channels,
        "approximator_hidden_dim": m.approximator_hidden_size,
        "approximator_layers": m.approximator_layers,
    }


def _open_network(folder: Path) -> nn.Module:
    """Diffusers' network in float32.

    Raises:
        ImportError: Diffusers is not installed.
    """
    from diffusers.models.transformers.transformer_chroma import ChromaTransformer2DModel

    return ChromaTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float32)


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, config: RunConfig
) -> Tensor:
    """What Diffusers' network makes of one sample, whose text has no padding to mask."""
    model: Any = config.model
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
    config_keys=ChromaTransformer,
    private_keys=PatchKeys,
    unsupported=_unsupported,
    settings=_settings,
    inexpressible=lambda config: mlp_misfit(config.model, CLASS),
    content=_content,
    private=lambda model: {name: getattr(model, name) for name in PatchKeys.model_fields},
    text_pad_to=lambda _: None,
    original_names=(_ORIGINAL_NAMES,),
    pipelines={"ChromaPipeline": "flow"},
    pipeline_misfits=lambda model, _: patch_misfit(model),
    largest_latent=lambda _: (2**20, 2**20, 2**20),  # positions are computed
    open_network=_open_network,
    run_network=_run_network,
)

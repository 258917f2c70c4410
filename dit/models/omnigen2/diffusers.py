"""OmniGen2 in its public code, `OmniGen2Transformer2DModel`: names, config.json, pipeline, calls.

Diffusers has no class for OmniGen2; in this module, "Diffusers" stands for the public code.
"""

# D model width, N embeddings of the index of a reference

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from dit.config.checks import Rule
from dit.models.diffusers.form import ConfigKeys, DiffusersForm, Key, OwnKey, Pipeline, own_names
from dit.models.diffusers.names import NameTable, Row, TensorSplit
from dit.models.joint.lumina_names import (
    LUMINA_STACKS,
    lumina_keys,
    lumina_rows,
    lumina_rules,
    lumina_sizes,
    patch_rows,
)
from dit.models.joint.sequential_names import refined_layers
from dit.models.layer_spec import ALL_NOISE
from dit.models.omnigen2.family import EPS, LEVELS, MOST_REFERENCES, OmniGen2Config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "OmniGen2Transformer2DModel"
_STACKS = {**LUMINA_STACKS, "reference_refiner": "ref_image_refiner"}


def _sizes(model: OmniGen2Config) -> dict[str, int]:
    return lumina_sizes(model) | {"N": MOST_REFERENCES}


_TABLE = NameTable(
    rows=(
        *lumina_rows(_STACKS),
        *patch_rows("reference_patches", "ref_image_patch_embedder"),
        Row(
            "picture_number.weight",
            ("image_index_embedding",),
            TensorSplit.REPLICATED,
            ("N", "D"),
        ),
    ),
    sizes=_sizes,
    layers=refined_layers(_STACKS),
)


def _rules(t: Any) -> list[Rule]:
    scale = t.timestep_scale
    told = (scale == ALL_NOISE, f"timestep_scale={scale:g} must be {ALL_NOISE:g}")
    return [*lumina_rules(t, eps=EPS), told]


_LARGEST = (10_000, 10_000, 10_000)
"""Lengths of the published rotary tables, for index in the sequence, row and column."""
KEYS = ConfigKeys(
    keys=(
        *lumina_keys(layers=(26, 2), largest=_LARGEST),
        Key("norm_eps", default=EPS),
        Key("text_feat_dim", "crossattn_emb_size", 1024),
        Key("timestep_scale", default=1.0, write=lambda _: ALL_NOISE),
    ),
    kept=(
        OwnKey("patch_temporal", PositiveInt, published=lambda _: 1),
        OwnKey("reference_latents", int, published=lambda _: 0, read=int, may_be_told=True),
    ),
    rules=_rules,
)


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, _: OmniGen2Config
) -> Tensor:
    """The output [C, 1, H, W] of the public code's network, negated as by its pipeline."""
    import torch
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    text_1LE = sample.text_LE[None]
    told: Any = network.config
    sizes = zip(told.axes_dim_rope, told.axes_lens, strict=True)
    angles = [
        get_1d_rotary_pos_embed(width, rows, theta=10_000, freqs_dtype=torch.float64)
        for width, rows in sizes
    ]
    references = [latent_CFHW[:, 0] for latent_CFHW in sample.others.values()]
    (made,) = network(
        hidden_states=[sample.latent_CFHW[:, 0]],
        timestep=torch.tensor([1 - level / ALL_NOISE]),
        text_hidden_states=text_1LE,
        freqs_cis=angles,
        text_attention_mask=torch.ones(text_1LE.shape[:2], dtype=torch.int64),
        ref_image_hidden_states=[references] if references else None,
    )
    return -made[:, None]


def _sampling(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options from `scheduler`, the content of scheduler_config.json.

    The file may switch off the shift by the number of tokens.
    """
    return {} if scheduler.get("dynamic_time_shift", True) else {"shift_base_tokens": None}


FORM = DiffusersForm(
    class_name=CLASS,
    module="omnigen2.models.transformers.transformer_omnigen2",
    table=_TABLE,
    keys=KEYS,
    original_names=(own_names(_TABLE),),
    pipelines={
        "OmniGen2Pipeline": Pipeline(
            objective={**LEVELS, "flow_shift": 1.0},
            sampling=_sampling,
            module="omnigen2.pipelines.omnigen2.pipeline_omnigen2",
        )
    },
    largest_latent=lambda model: (1, *(side * model.patch_spatial for side in _LARGEST[1:])),
    run_network=_run_network,
)

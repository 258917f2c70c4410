"""A family that exists for tests of the seam alone: its settings, its layers, its table of names.

`$DIT_FAMILIES=odd=tests.odd_family:FAMILY` registers it, in spawned processes too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config import ModelConfig
from dit.config.checks import Rule, at_least_one
from dit.models.diffusers.form import DiffusersForm
from dit.models.family import (
    Family,
    InputKind,
    NullInput,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
)
from dit.models.joint.family import double_layer, single_layer
from dit.models.layer_spec import (
    AttentionSpec,
    FeedForwardSpec,
    NetworkSpec,
    StackSpec,
)

PLACE = "odd=tests.odd_family:FAMILY"


@dataclass(frozen=True, kw_only=True, slots=True)
class OddConfig(ModelConfig):
    """A double stack, then a single stack."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "odd_s": {"num_single_layers": 3},
        "odd_expert": {"num_single_layers": 4},
    }
    shown_before: ClassVar[Mapping[str, str]] = {"num_single_layers": "hidden_size"}

    name: str = "odd_s"
    family: str = "odd"
    num_layers: int = 2
    hidden_size: int = 32
    num_attention_heads: int = 4
    num_single_layers: int = 2
    """Layers with one joint row, after those with two."""
    pooled_size: int = 8
    """Width of the pooled text."""

    def own_sizes(self) -> list[Rule]:
        return at_least_one(self, "num_single_layers", "pooled_size")


def _spec(model: OddConfig) -> NetworkSpec:
    width, heads = model.hidden_size, model.num_attention_heads
    parts = {
        "attention": AttentionSpec(width=width, heads=heads, bias=True),
        "feed_forward": FeedForwardSpec(width=width, hidden=model.ffn_hidden_size, bias=True),
    }
    return NetworkSpec(
        stacks=(
            StackSpec(name="double", count=model.num_layers, layer=double_layer(**parts)),
            StackSpec(name="single", count=model.num_single_layers, layer=single_layer(**parts)),
        ),
    )


def _inputs(model: OddConfig) -> tuple[SampleInput, ...]:
    width = model.crossattn_emb_size
    return (
        SampleInput(name="text", kind=InputKind.TEXT, width=width, may_be_empty=True),
        SampleInput(
            name="pooled_text",
            kind=InputKind.VECTOR,
            width=model.pooled_size,
            null=NullInput.ENCODED,
        ),
    )


def _nothing(*_: Any) -> Any:
    raise NotImplementedError


def _diffusers() -> DiffusersForm:
    from tests.odd_names import FORM

    return FORM


_network: Callable[[], Callable[..., Any]] = _nothing
FAMILY = Family(
    name="odd",
    config=OddConfig,
    network=_network,
    spec=_spec,
    parts={"double": "double", "single": "single"},
    diffusers=_diffusers,
    inputs=_inputs,
    positions=_nothing,
    weights=WeightRules(),
    objective=ObjectiveConventions(
        settings={"name": "flow", "flow_shift": 3.0},
        of_size={"odd_expert": {"level_range": (0.875, 1.0), "flow_shift": 5.0}},
    ),
    vae=lambda _: "flux",
)

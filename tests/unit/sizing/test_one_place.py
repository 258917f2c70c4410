"""A linear that a network gains is written once: every size of a run follows from the module."""

# T tokens, D model width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from torch import Tensor

from dit.config import LoraConfig, LoraTargets, Precision, RunConfig
from dit.lora.targets import attach_adapters, chosen_adapters
from dit.models.diffusers.form import ConfigKeys, DiffusersForm
from dit.models.diffusers.names import NameTable, Row, TensorSplit
from dit.models.layer_spec import FeedForwardSpec
from dit.models.layers.parallel_linear import BuildContext, FeedForward, split_linear
from dit.models.registry import family_named, family_of
from dit.sizing.activations import activation_bytes
from dit.sizing.flops import forward_flops
from dit.sizing.kept import kept_by_layer
from dit.sizing.memory import memory, parameter_count, trained_count
from tests.packs import run_config
from tests.toy_family import FAMILY as TOY
from tests.toy_family import PLACE, ToyConfig, ToyNetwork

GATED_PLACE = "gated_toy=tests.unit.sizing.test_one_place:FAMILY"
LAYERS, TOKENS = 2, 1024


class GatedFeedForward(FeedForward):
    """The feed-forward with one linear more, a gate of its hidden units."""

    def __init__(self, context: BuildContext, spec: FeedForwardSpec):
        super().__init__(context, spec)
        self.linear_gate = split_linear(spec.width, spec.hidden, axis=0, context=context)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x_TD)) * self.linear_gate(x_TD))


class GatedToyNetwork(ToyNetwork):
    """The toy network with it in the latents of its double-stream layers; nothing else is said."""

    def build_stacks(self) -> None:
        super().build_stacks()
        context = BuildContext(model=self.model, config=self.config, groups=self.groups)
        (stack, *_) = self.stack_specs
        _, feed, _ = stack.layer.parts
        spec: Any = feed
        for layer in self.stacks[stack.name].layers:
            layer.mlp = GatedFeedForward(context, spec.feed_forward)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedToyConfig(ToyConfig):
    """The toy family's configuration under another name."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {"gated_toy": {}}
    name: str = "gated_toy"
    family: str = "gated_toy"


GATE = Row(
    "double_blocks.layers.*.mlp.linear_gate.weight",
    ("blocks.*.gate.weight",),
    TensorSplit.COLUMN,
    ("F", "D"),
)
FORM = DiffusersForm(
    class_name="GatedToy",
    table=NameTable(
        rows=(GATE,),
        sizes=lambda model: {"D": model.hidden_size, "F": model.ffn_hidden_size},
        layers=lambda model: {"double_blocks": model.num_layers},
    ),
    keys=ConfigKeys(keys=()),
    pipelines={},
    run_network=lambda network, *inputs: network(*inputs),
)
FAMILY = replace(
    TOY,
    name="gated_toy",
    config=GatedToyConfig,
    network=lambda: GatedToyNetwork,
    diffusers=lambda: FORM,
    tiny={},
)


@pytest.fixture(autouse=True)
def _families(monkeypatch) -> None:
    monkeypatch.setenv("DIT_FAMILIES", f"{PLACE},{GATED_PLACE}")


def runs(**changes: Any) -> list[RunConfig]:
    """A run of the toy network, and the same of the one with a linear more."""
    sizes: Any = {"precision": Precision.BF16, "num_layers": LAYERS, **changes}
    models = (family_named(name).config(**sizes) for name in ("toy", "gated_toy"))
    found = [run_config(model=model) for model in models]
    return [
        replace(one, dataset=replace(one.dataset, task_encoder_seq_length=TOKENS)) for one in found
    ]


def added(figure: Any, **changes: Any) -> float:
    """What the linear adds to a figure of a run."""
    before, after = (figure(run) for run in runs(**changes))
    return after - before


def test_parameters_operations_and_kept_bytes_follow() -> None:
    plain = runs()[0].model
    width, hidden = plain.hidden_size, plain.ffn_hidden_size
    weights = LAYERS * width * hidden
    assert added(lambda run: parameter_count(run.model)) == weights
    shape: Any = {"tokens": [TOKENS], "text": [0]}
    assert added(lambda run: forward_flops(run.model, **shape)) == 2 * weights * TOKENS
    # The gate, and what it makes of the hidden units, in bfloat16; half on each of two ranks.
    kept = 2 * 2 * hidden * LAYERS / plain.all_layers
    for ranks in (1, 2):
        more = added(lambda run: kept_by_layer(run.model).token, tensor_model_parallel_size=ranks)
        assert more == pytest.approx(kept / ranks)
    assert added(lambda run: activation_bytes(run, accumulation=1)) == pytest.approx(
        kept * plain.all_layers * TOKENS, rel=1e-6
    )


def test_memory_follows() -> None:
    (plain, _), weights = runs(), added(lambda run: parameter_count(run.model))
    need = {
        name: added(lambda run, n=name: getattr(memory(run, world_size=1), n))
        for name in ("weights", "gradients", "optimizer")
    }
    assert need["weights"] == 2 * weights and need["gradients"] == 4 * weights
    assert need["optimizer"] == (plain.optimizer.states.bytes + 4) * weights


def test_adapters_follow() -> None:
    model = runs()[0].model

    def numbers(run: RunConfig) -> int:
        return trained_count(replace(run, lora=LoraConfig(rank=3)))

    assert added(numbers) == LAYERS * 3 * (model.hidden_size + model.ffn_hidden_size)


def test_targets_of_adapters_follow(groups) -> None:
    """The name that the published network has for it is all that is said besides the module."""
    (_, gated), rank = runs(precision=Precision.FP32), 3
    targets = chosen_adapters(gated.model, LoraConfig(rank=rank, targets=(LoraTargets.MLP,)))
    assert [*targets] == [f"blocks.{n}.gate" for n in range(LAYERS)]
    network: Any = family_of(gated.model).network()(gated.model, groups)
    attach_adapters(network, targets, precision=gated.model.precision)
    trained = {name: w.numel() for name, w in network.named_parameters() if w.requires_grad}
    assert all(".mlp.linear_gate.lora." in name for name in trained)
    ends = gated.model.hidden_size + gated.model.ffn_hidden_size
    assert sum(trained.values()) == LAYERS * rank * ends


def test_checkpoints_follow(groups) -> None:
    stored = []
    for run in runs(precision=Precision.FP32):
        build: Any = family_of(run.model).network()
        network = build(run.model, groups)
        stored.append({key for key in network.sharded_state_dict() if key.endswith(".weight")})
    mlp = "double_blocks.layers.{}.mlp.linear_gate.weight"
    assert stored[1] - stored[0] == {mlp.format(n) for n in range(LAYERS)}
    assert not stored[0] - stored[1]

"""The cut of a list of layers into pipeline stages; layers are described without torch."""

from __future__ import annotations

import itertools
import random
import sys

import pytest

from dit.models.dit.family import dit_stack
from dit.models.joint.family import double_layer, single_layer
from dit.models.layer_spec import (
    AttentionSpec,
    FeedForwardSpec,
    StackSpec,
)
from dit.models.stacks.stack import StageLayers, _balanced, pipeline_stages
from tests.packs import tiny_model


def _flux(double: int, single: int) -> list[StackSpec]:
    attention = AttentionSpec(width=64, heads=4, bias=True)
    feed_forward = FeedForwardSpec(width=64, hidden=256, bias=True)
    return [
        StackSpec(name="blocks", count=double, layer=double_layer(attention, feed_forward)),
        StackSpec(name="single_blocks", count=single, layer=single_layer(attention, feed_forward)),
    ]


def _work(stack: StackSpec) -> int:
    """Work of a layer: a double-stream layer has as much for each latent token as a single one."""
    return 12


def test_stages_cut_the_list_of_layers_and_may_lack_a_stack():
    plan = pipeline_stages(_flux(19, 38), 3, _work)
    assert [s["blocks"] for s in plan] == [
        StageLayers(0, 19),
        StageLayers(19, 0),
        StageLayers(19, 0),
    ]
    counts = [s["single_blocks"] for s in plan]
    assert counts == [StageLayers(0, 0), StageLayers(0, 19), StageLayers(19, 19)]
    uneven = pipeline_stages(_flux(3, 4), 4, _work)
    assert [s["blocks"].count + s["single_blocks"].count for s in uneven] == [1, 2, 2, 2]
    assert uneven[1] == {"blocks": StageLayers(1, 2), "single_blocks": StageLayers(0, 0)}


@pytest.mark.parametrize(("layers", "stages"), [(28, 4), (36, 12), (8, 8), (12, 1)])
def test_equal_layers_are_cut_evenly(layers, stages):
    each = layers // stages
    plan = pipeline_stages([dit_stack(tiny_model(num_layers=layers))], stages, _work)
    assert [s["decoder"] for s in plan] == [StageLayers(i * each, each) for i in range(stages)]


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ValueError, match="has 3 layers, fewer than its 4 pipeline stages"):
        pipeline_stages(_flux(1, 2), 4, _work)


def test_the_slowest_stage_is_as_fast_as_it_can_be():
    generator = random.Random(0)
    for _ in range(100):
        costs = [generator.randint(1, 9) for _ in range(8)]
        parts = generator.randint(1, 5)
        found = _balanced(costs, parts)
        assert [first for first, _ in found[1:]] == [last for _, last in found[:-1]]
        cuts = itertools.combinations(range(1, 8), parts - 1)
        every = (max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *c, 8))) for c in cuts)
        assert max(sum(costs[a:b]) for a, b in found) == min(every)


def test_a_description_needs_no_torch(repo_root):
    for file in (repo_root / "dit/models/layer_spec").glob("*.py"):
        lines = [x for x in file.read_text().splitlines() if x.startswith(("import", "from"))]
        foreign = [x for x in lines if not x.startswith("from dit.models.layer_spec.")]
        assert all(x.split()[1].split(".")[0] in sys.stdlib_module_names for x in foreign), file

"""Names of layouts, of which one call of the check has several."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dit.config import LoraConfig, OptimizerKind, Problems, RunConfig
from dit.layout_check.names import ONE, WORDS, NamedLayout, parse_layout
from dit.layout_check.program import STEPS, reading
from recipes.check_layouts import layout_check

BASE = layout_check()
_SIZED = st.sampled_from(("tp2", "tp4", "cp2", "pp2", "pp2+vpp2", "dp2", "packs2", "packs8"))
_METHODS = st.sampled_from(("", "muon", "lora", "dpo+lora", "drift+frozenlora", "cfg", "levels"))
_OTHERS = st.sampled_from([word for word in WORDS if not word.endswith("N")])
_NAMES = st.tuples(_SIZED, _METHODS, st.one_of(st.just(""), _OTHERS)).map(
    lambda words: "+".join(filter(None, words))
)


def _alone(name: str) -> tuple[NamedLayout, RunConfig]:
    layout = parse_layout(name)
    try:
        return layout, layout.of(BASE)
    except Problems:
        assume(False)
        raise


@given(st.lists(_NAMES, min_size=2, max_size=3))
def test_layouts_of_one_call_are_as_each_by_itself(names: list[str]) -> None:
    every = [_alone(name) for name in names]
    layouts = [parse_layout(ONE), *(layout for layout, _ in every)]
    for layout, alone in every:
        reader, count = reading(BASE, layout, steps_of=layouts)
        assert reader.dataset == alone.dataset
        assert reader == reading(BASE, layout, steps_of=[layout])[0]
        most = max(c.train.global_batch_size for c in (BASE, *(c for _, c in every)))
        assert count == STEPS * most


@pytest.mark.parametrize("before", ["lora", "dpo+lora", "frozenlora+drop", "lastlora+fp8base"])
def test_muon_follows_adapters(before: str) -> None:
    """The groups of a run change at once: adapters and Muon are refused beside each other."""
    adapted = parse_layout(before).of(BASE)
    config = parse_layout("tp2+muon").of(adapted)
    assert config.lora == LoraConfig() and config.optimizer.kind is OptimizerKind.MUON

"""Python's garbage collection at fixed steps."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from dit.config import Precision, Recompute, TrainConfig
from dit.train.memory import collect_after, manual_gc
from dit.train.model_and_optimizer import build_model_and_optimizer
from tests.learning import tiny_run, train


class _Cycle:
    def __init__(self) -> None:
        self.me = self


def _dead_cycle() -> weakref.ref[_Cycle]:
    return weakref.ref(_Cycle())


def test_garbage_goes_at_the_steps_of_the_interval_and_at_no_other():
    config = TrainConfig(manual_gc_interval=3)
    with manual_gc(config):
        assert not gc.isenabled()
        dead = _dead_cycle()
        for step in (1, 2):
            collect_after(step, config)
            assert dead() is not None
        collect_after(3, config)
        assert dead() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    "config", [TrainConfig(manual_gc_interval=0), TrainConfig(manual_gc=False)], ids=["0", "off"]
)
def test_nothing_is_collected_where_none_is_asked_for(config):
    with manual_gc(config):
        assert gc.isenabled() != config.manual_gc
        gc.disable()
        dead = _dead_cycle()
        for step in range(1, 201):
            collect_after(step, config)
        assert dead() is not None
        gc.enable()


def test_collection_goes_on_by_itself_after_an_error():
    with pytest.raises(KeyError), manual_gc(TrainConfig()):
        raise KeyError
    assert gc.isenabled()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute_granularity": Recompute.FULL},
        {"recompute_granularity": Recompute.SELECTIVE, "precision": Precision.BF16},
        {"cpu_offloading_num_layers": 2},
    ],
    ids=["plain", "full", "selective", "offloaded"],
)
def test_a_step_leaves_no_tensor_to_the_collector(groups, changes):
    """Activations in a cycle would stay in memory until the next collection."""
    config = tiny_run(**changes)
    model = build_model_and_optimizer(config, groups)
    train(model, config, 1, 2)  # what is made once
    with manual_gc(replace(config.train, manual_gc_interval=0)):
        gc.set_debug(gc.DEBUG_SAVEALL)
        train(model, config, 3, 4)
        gc.collect()
        gc.set_debug(0)
    left = [one for one in gc.garbage if isinstance(one, torch.Tensor)]
    gc.garbage.clear()
    assert left == []

"""What every test may rely on."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.warm_python import name_tests

# Before torch is imported, here and in every process that a test starts: tests run side by side and
# start processes of their own, and none of them may reach for the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
# A shell's background job ignores Ctrl-C, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples each time; `--hypothesis-profile=thorough` looks for new ones.
_anywhere = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("ci", _anywhere, max_examples=100, derandomize=True, database=None)
settings.register_profile("thorough", _anywhere, max_examples=2000)
settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the first process of this run of tests
        name_tests()


def pytest_collection() -> None:
    """Importing makes no garbage worth a look: 2 CPU seconds of each pytest process."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported lives as long as this process; what a test makes is soon looked through.

    Else every ten collections walk over all modules until the second file of tests begins, and
    Python looks for garbage after each 700 objects: a fifth of the CPU seconds of a file of tests.
    """
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _freeze_imports() -> None:
    """Keeps what the test modules imported out of garbage collection, here and in forked loaders.

    A worker of Energon collects, freezes and, at its end, thaws and collects again: millions of
    objects each time, whose pages a forked process copies as it looks at them. (The oldest
    generation is counted, since `get_freeze_count` visits all that is frozen: 0.1 s. Either costs
    milliseconds, and so each module is asked, not each test.)
    """
    if len(gc.get_objects(generation=2)) > 300_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _no_fitted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packings in this process fit no run, which takes some seconds of training."""
    if "data_prep.cli.parser" in sys.modules:  # which imports the commands when one is called
        monkeypatch.setattr("data_prep.cli.commands.fit_run", lambda *_, **__: [])


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or extension modules report at exit that their objects leaked


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout under test."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def groups() -> Any:
    """One process group for all tests of a pytest process that ask for it."""
    from dit.config_loading import default_config
    from dit.distributed.process_groups import process_groups, start_processes

    start_processes(seed=1, model=default_config().model)
    return process_groups()


@pytest.fixture
def resize(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's part in Diffusers' forward pass of Cosmos, where there is no torchvision."""
    from diffusers.models.transformers import transformer_cosmos

    from tests.families.dit import NearestResize

    monkeypatch.setattr(transformer_cosmos, "transforms", NearestResize, raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; there is none here"))

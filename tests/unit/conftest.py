"""One process group for all tests of a pytest process."""

import pytest

from dit.config import ModelConfig
from dit.distributed.process_groups import process_groups, start_processes


@pytest.fixture(scope="session")
def groups():
    start_processes(seed=1, model=ModelConfig())
    return process_groups()

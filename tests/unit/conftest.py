"""One process group for all tests of a pytest process."""

import pytest

from dit.distributed.process_groups import process_groups, start_processes
from dit.models.dit.config import DitConfig


@pytest.fixture(scope="session")
def groups():
    start_processes(seed=1, model=DitConfig())
    return process_groups()

"""A round of samples leaves the memory of the device as it was."""

from __future__ import annotations

import pytest

from tests.visits import rounds_of_a_run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_memory_of_the_device_returns_to_its_value(tmp_path):
    pytest.importorskip("av")  # the processes that `run` forks import it
    _, rounds = rounds_of_a_run(tmp_path)
    assert [doings for _, doings, _ in rounds] == [["cuda", *["decode"] * 3, "cpu"]] * 2
    # The first round may make workspaces of cuBLAS and cuDNN, which stay.
    before, _, after = rounds[-1]
    assert 0 < after <= before

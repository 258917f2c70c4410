"""The decoder is on the device of the model while it decodes, and not otherwise."""

from __future__ import annotations

import pytest

from tests.visits import rounds_of_a_run


@pytest.mark.slow
def test_the_decoder_leaves_after_each_round(tmp_path):
    opening, rounds = rounds_of_a_run(tmp_path)
    assert set(opening) == {"cpu"}
    assert [doings for _, doings, _ in rounds] == [["cuda", *["decode"] * 3, "cpu"]] * 2

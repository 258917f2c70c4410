"""The network that OmniGen2 is held against makes what the public code makes."""

from __future__ import annotations

import pytest
import torch

from tests.families import omnigen2


@pytest.mark.parametrize("number", omnigen2.JUDGED)
def test_outputs_and_gradients_are_those_of_the_public_code(number: int) -> None:
    """Of no reference, of one and of three; a table has more rows than these have pictures."""
    network = omnigen2.OmniGen2Transformer2DModel(
        **{**omnigen2.TINY, **omnigen2.configuration(number)}
    )
    found, stored = omnigen2.judged(network, number), omnigen2.stored()
    assert found.keys() == {name for name in stored if name.startswith(f"{number}.")}
    for name, value in found.items():
        torch.testing.assert_close(value, stored[name], rtol=1e-5, atol=5e-6)

"""Requests -> latents, apart from any checkpoint."""

from __future__ import annotations

from torch import nn

from dit.sampling.generate import SamplingSettings, generate_latents
from tests.packs import run_config


def test_a_process_without_a_request_makes_none():
    """Of two processes that share one prompt, the second has nothing to do."""
    made = generate_latents(nn.Identity(), [], config=run_config(), settings=SamplingSettings())
    assert made == []

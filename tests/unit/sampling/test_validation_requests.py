"""Which held-out samples lend a round of samples their captions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from dit.batch import LatentSample
from dit.config import ValidationConfig
from dit.data.pack import pack_samples
from dit.models.patch_layout import PatchLayout
from dit.models.qwen_image.family import TINY, QwenImageConfig
from dit.sampling.validation.requests import _request_of_caption, round_robin
from tests.packs import run_config


def test_every_caption_comes_once_before_any_is_repeated():
    captions = ["one", "one", "two", "one", "three", "two"]
    samples = [((i // 4, i % 4), f"key {i}", caption) for i, caption in enumerate(captions)]
    order = round_robin(reversed(samples))
    assert [captions[4 * pack + index] for pack, index in order] == [
        *("one", "two", "three"),
        *("one", "two"),
        "one",
    ]
    assert sorted(order) == [spot for spot, _, _ in samples]


def test_a_sample_that_is_read_again_counts_once():
    samples = [((0, 0), "a", "cat"), ((0, 1), "b", "cat"), ((1, 0), "a", "cat")]
    assert round_robin(samples) == [(0, 0), (0, 1)]


def test_guidance_leads_away_from_a_samples_own_null_text() -> None:
    """Where there is no negative prompt; a sample without such rows has the common ones."""
    size: Any = {"name": "custom", "clean_references": True}
    model = QwenImageConfig(**(TINY["qwen_image_edit_2511"] | size))
    config, rng = run_config(model=model), torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    others = {"reference_latent_0": drawn(4, 1, 2, 2), "null_text": drawn(3, 24)}
    samples = [
        LatentSample(
            key=key, latent_CFHW=drawn(4, 1, 4, 2), text_LE=drawn(5, 24), fps=24.0, others=own
        )
        for key, own in (("edited", others), ("bare", {}))
    ]
    pack = pack_samples(samples, PatchLayout.of(config))
    common = {"": {"text": torch.zeros(1, 24)}, "blurry": {"text": torch.ones(2, 24)}}
    found: Any = SimpleNamespace(inputs=common)

    def negative_of(index: int, prompt: str) -> torch.Tensor:
        of = replace(config, validation=ValidationConfig(negative_prompt=prompt))
        run: Any = SimpleNamespace(config=of)
        told = _request_of_caption(run, pack, index, found=found, features=None)
        return told.request.negative["text"]

    assert torch.equal(negative_of(0, ""), others["null_text"])
    assert torch.equal(negative_of(0, "blurry"), common["blurry"]["text"])
    assert torch.equal(negative_of(1, ""), common[""]["text"])

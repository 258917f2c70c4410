"""Editing pipelines of Qwen-Image whose encoders see small pictures."""

from __future__ import annotations

import pytest

from dit.codecs.text.qwen_image import QwenImageEditText
from tests.families import pipeline_parts


@pytest.fixture
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 64th of the pixels that the pipelines and our encoders scale pictures to; no torchvision.

    `test_published_sizes_are_those_of_the_pipelines` compares the sizes themselves.
    """
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        whole = module.calculate_dimensions

        def small(area: float, ratio: float, whole=whole) -> tuple[int, ...]:
            return whole(area / 64, ratio)

        monkeypatch.setattr(module, "calculate_dimensions", small)

    def processor(encoder: QwenImageEditText) -> pipeline_parts.StandInProcessor:
        return pipeline_parts.StandInProcessor(encoder.load_tokenizer("tokenizer"))

    monkeypatch.setattr(QwenImageEditText, "load_processor", processor)

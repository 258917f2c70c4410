"""Editing pipelines whose encoders see small pictures."""

from __future__ import annotations

import pytest

from dit.codecs.text.longcat import LongCatEditText
from dit.codecs.text.qwen_image import QwenImage21Text, QwenImageEditText
from tests.families import stand_ins


@pytest.fixture
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 64th or less of the pixels that pipelines and our encoders scale to; no torchvision.

    `test_published_sizes_are_those_of_the_pipelines` compares the sizes themselves.
    """
    from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
    from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21

    parts = {pipeline_qwenimage_edit: 64, pipeline_qwenimage_edit_plus: 64}
    parts[pipeline_qwenimage21] = 64
    for module, part in (parts | {pipeline_longcat_image_edit: 512}).items():
        whole = module.calculate_dimensions

        def small(area: float, ratio: float, whole=whole, part=part) -> tuple[int, ...]:
            return whole(area / part, ratio)

        monkeypatch.setattr(module, "calculate_dimensions", small)

    def processor(encoder: QwenImageEditText) -> stand_ins.StandInProcessor:
        return stand_ins.StandInProcessor(encoder.load_tokenizer("tokenizer"))

    def pictures(encoder: LongCatEditText) -> stand_ins.StandInPictures:
        return stand_ins.StandInPictures(encoder.load_tokenizer("tokenizer"))

    def chats(encoder: QwenImage21Text) -> stand_ins.StandInProcessor:
        return stand_ins.StandInChatProcessor(encoder.load_tokenizer("processor"))

    monkeypatch.setattr(QwenImageEditText, "load_processor", processor)
    monkeypatch.setattr(QwenImage21Text, "load_processor", chats)
    monkeypatch.setattr(LongCatEditText, "load_processor", pictures)

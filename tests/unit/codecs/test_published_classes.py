"""Classes that an installed Diffusers lacks are named, with its version, and no ImportError."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import pytest

from dit.codecs.dataset_card import CodecError
from dit.codecs.pretrained import PipelineComponent, model_config_of, published
from dit.codecs.text import text_encoder_named
from dit.codecs.vae import codec_named


def test_a_class_of_a_newer_version_is_named() -> None:
    known = f"^diffusers {version('diffusers')} has no "
    for place in ("diffusers:LaterTransformer", "diffusers.pipelines.later:LaterPipeline"):
        name = place.partition(":")[2]
        with pytest.raises(CodecError, match=rf"{known}{name} .* 'megatron-dit\[prep\]'$"):
            published(place)
    part = PipelineComponent(library="diffusers", kind="LaterVae", model="models", subfolder="vae")
    with pytest.raises(CodecError, match=f"{known}LaterVae"):
        model_config_of(part)
    with pytest.raises(CodecError, match=r"^Pipeline needs the package no_such_package; install"):
        published("no_such_package.pipelines:Pipeline")


@pytest.mark.parametrize(
    ("name", "module", "lacking"),
    [
        ("krea2", "pipelines.krea2.pipeline_krea2", "Krea2Pipeline"),
        ("ideogram4", "pipelines.ideogram4.pipeline_ideogram4", "QWEN3_VL_ACTIVATION_LAYERS"),
    ],
)
def test_an_encoder_says_what_its_pipeline_needs(
    name: str, module: str, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"diffusers.{module}", None)
    kind: Any = text_encoder_named(name)
    encoder = kind(model_name="models", max_length=9)
    with pytest.raises(CodecError, match=f" has no {lacking} "):
        assert encoder.width if name == "ideogram4" else encoder.pipeline


def test_a_codec_says_what_its_pipeline_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "diffusers.pipelines.qwenimage21.pipeline_qwenimage21"
    monkeypatch.setitem(sys.modules, module, None)
    kind: Any = codec_named("qwen_image21")
    with pytest.raises(CodecError, match=" has no calculate_dimensions "):
        kind.reference_size(640, 480)

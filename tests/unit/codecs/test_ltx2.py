"""LTX-2's sound codec and text encoders next to the parts of Diffusers' pipeline."""

# C channels of sound, S samples, K channels of a latent, A frames of a latent, L rows of a caption

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLLTX2Audio, LTX2Pipeline
from diffusers.pipelines.ltx2 import vocoder
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from torch import Tensor
from transformers import AutoModelForImageTextToText

from dit.codecs.dataset_card import CodecError
from dit.codecs.pretrained import ModelLocation
from dit.codecs.sound import SOUND_CODECS, sound_codec_of_card
from dit.codecs.sound.ltx2 import Ltx2Sound
from dit.codecs.text import text_encoder_of_card
from dit.codecs.text.encoder import TextEncoder
from tests.families import encoding, pipeline_parts

VERSIONS = ("2.0", "2.3")
CAPTIONS = ("", "a bell rings twice", "  a dog barks behind the door of a house \n", "x" * 90)
LENGTH = 32


@pytest.fixture(scope="module", params=VERSIONS)
def folder(request: Any, tmp_path_factory: Any) -> Path:
    return pipeline_parts.ltx2(tmp_path_factory.mktemp("ltx2"), version=request.param)


def sound_of(folder: Path) -> Any:
    arguments = Namespace(model_name=str(folder), vae_cache_folder=None)
    return SOUND_CODECS.named("ltx2").from_arguments(arguments)


def waveform(samples: int) -> Tensor:
    return torch.randn(2, samples, generator=torch.Generator().manual_seed(samples)) * 0.1


def vocoder_of(folder: Path) -> Any:
    name = json.loads((folder / "vocoder" / "config.json").read_text())["_class_name"]
    return getattr(vocoder, name).from_pretrained(folder / "vocoder").eval()


def slaney_filters(rate: int, bins: int) -> Tensor:
    """Filters [F, B] of Slaney's Auditory Toolbox: linear to 1 kHz, then 27 steps to 6.4 kHz."""
    step, knee = 200 / 3, 1000.0

    def mels(hertz: float) -> float:
        return hertz / step if hertz < knee else knee / step + 27 * math.log(hertz / knee, 6.4)

    def hertz(mels: float) -> float:
        return mels * step if mels < knee / step else knee * 6.4 ** ((mels - knee / step) / 27)

    edges = [hertz(n * mels(rate / 2) / (bins + 1)) for n in range(bins + 2)]
    found = torch.zeros(513, bins, dtype=torch.float64)
    for line in range(513):
        at = line * rate / 1024
        for one in range(bins):
            low, middle, high = edges[one : one + 3]
            height = min((at - low) / (middle - low), (high - at) / (high - middle))
            found[line, one] = max(0.0, height) * 2 / (high - low)
    return found


def test_spectrogram_is_that_of_its_definition(folder: Path) -> None:
    codec, samples_CS = sound_of(folder), waveform(2000)
    found_CTB = codec.spectrogram(samples_CS).double()
    assert found_CTB.shape == (2, 1 + 2000 // 160, 16)
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * torch.arange(1024, dtype=torch.float64) / 1024)
    reflected = torch.nn.functional.pad(samples_CS.double(), (512, 512), mode="reflect")
    for frame in (0, 5, 12):
        piece_CS = reflected[:, frame * 160 : frame * 160 + 1024] * window
        amplitude_CF = torch.fft.rfft(piece_CS).abs()
        wanted_CB = (amplitude_CF @ slaney_filters(16000, 16)).clamp(min=1e-5).log()
        torch.testing.assert_close(found_CTB[:, frame], wanted_CB, rtol=0, atol=1e-4)


@pytest.mark.parametrize("samples", [100, 5000, 16000])
def test_sound_latents_are_those_of_the_pipeline(folder: Path, samples: int) -> None:
    codec, model = sound_of(folder), AutoencoderKLLTX2Audio.from_pretrained(folder / "audio_vae")
    samples_CS = waveform(samples)
    found_KA = codec.encode(samples_CS)
    with torch.no_grad():
        raw = model.encode(codec.spectrogram(samples_CS)[None]).latent_dist.mode()
        packed_1AK = LTX2Pipeline._pack_audio_latents(raw)
        whole = LTX2Pipeline._normalize_audio_latents(
            packed_1AK, model.latents_mean, model.latents_std
        )
        frames = max(1, round(samples / 16000 * 25))
        torch.testing.assert_close(found_KA.T, whole[0, :frames], rtol=1e-5, atol=1e-6)
        packed_1AK = LTX2Pipeline._denormalize_audio_latents(
            found_KA.T[None], model.latents_mean, model.latents_std
        )
        raw = LTX2Pipeline._unpack_audio_latents(packed_1AK, frames, num_mel_bins=4)
        heard_CS = vocoder_of(folder)(model.decode(raw).sample)[0]
    torch.testing.assert_close(codec.decode(found_KA), heard_CS, rtol=1e-4, atol=1e-5)
    cut = round(samples * codec.decoded_rate / 16000)
    assert codec.decode(found_KA, samples).shape[1] == min(cut, heard_CS.shape[1])


def test_every_length_has_the_frames_that_pipelines_generate(folder: Path) -> None:
    codec = sound_of(folder)
    for samples in range(1, 4000, 37):
        mel_frames = 1 + max(samples, 513) // 160
        assert codec.frames_of(samples) <= -(-mel_frames // 4)
    assert codec.frames_of(round(121 / 24 * 16000)) == 126


def test_the_card_makes_the_same_sound_codec(folder: Path) -> None:
    codec = sound_of(folder)
    assert codec.decoded_rate == vocoder_of(folder).config.output_sampling_rate
    card = {
        "format_version": 1,
        "audio_processor": {"name": codec.name, **codec.settings},
        "sound_latent": {"channels": codec.channels, "dtype": "float32", "scale": codec.scale},
    }
    assert sound_codec_of_card(card) == codec


@pytest.mark.parametrize("caption", CAPTIONS)
def test_connected_texts_are_those_of_the_pipeline(folder: Path, caption: str) -> None:
    encoder = encoding.encoder("ltx2_connected", folder, max_sequence_length=LENGTH)
    encoding.check_card(encoder)
    found = encoder.encode_all(caption)
    assert encoder.rows_of(caption) == LENGTH
    for name, rows_LE in theirs(encoder, folder, caption).items():
        torch.testing.assert_close(found[name], rows_LE.bfloat16())


def pipeline_of(encoder: Any, folder: Path) -> Any:
    connectors = LTX2TextConnectors.from_pretrained(folder / "connectors")
    parts = {"audio_vae": None, "vocoder": None, "connectors": connectors}
    return encoder.pipeline_of(LTX2Pipeline, **parts)


def theirs(encoder: Any, folder: Path, caption: str) -> dict[str, Tensor]:
    """What the network of Diffusers' pipeline is given."""
    pipeline = pipeline_of(encoder, folder)
    with torch.no_grad():
        states, mask, *_ = pipeline.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=LENGTH, device="cpu"
        )
        video, sound, _ = pipeline.connectors(states, mask)
    return {"text": video[0], "sound_text": sound[0]}


@pytest.mark.parametrize("caption", CAPTIONS)
def test_rows_before_the_connectors_lead_to_the_same_texts(folder: Path, caption: str) -> None:
    encoder = encoding.encoder("ltx2", folder, max_sequence_length=LENGTH)
    encoding.check_card(encoder)
    with torch.no_grad():
        found = encoder.embed(caption)  # in float32
    rows = min(encoder.count(caption), LENGTH)
    assert all(len(rows_LE) == rows for rows_LE in found.values())
    found.setdefault("sound_text", found["text"])  # of 2.0
    connectors = LTX2TextConnectors.from_pretrained(folder / "connectors")
    beside = torch.full((1, 1, 1, LENGTH), -torch.finfo(torch.float32).max)
    beside[..., LENGTH - rows :] = 0
    for (name, wanted_LE), one in zip(
        theirs(encoder, folder, caption).items(),
        (connectors.video_connector, connectors.audio_connector),
        strict=True,
    ):
        padded = torch.nn.functional.pad(found[name], (0, 0, LENGTH - rows, 0))
        with torch.no_grad():
            made, _ = one(padded[None], beside)
        torch.testing.assert_close(made[0], wanted_LE, rtol=1e-4, atol=1e-5)


def test_texts_of_another_gemma_are_refused_by_its_checksum(folder: Path, tmp_path: Path) -> None:
    """A card refuses other weights, as of a stock Gemma 4, whose configuration is the same."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "text_encoder")
    cards = {}
    for name, size in (("pieces", "20KB"), ("tuned", "5GB")):
        (tmp_path / name).mkdir()
        for part in ("connectors", "tokenizer"):
            (tmp_path / name / part).symlink_to(folder / part)
        if name == "tuned":
            for weight in model.parameters():
                weight.data *= 1.001
        model.save_pretrained(tmp_path / name / "text_encoder", max_shard_size=size)
        cards[name] = encoding.encoder("ltx2", tmp_path / name).settings
    assert len([*(tmp_path / "pieces/text_encoder").glob("*.safetensors")]) > 1
    own = encoding.encoder("ltx2", folder).settings
    assert own == cards["pieces"] | {"model_name": str(folder)}
    here = ModelLocation(cache=str(folder))
    for name in ("ltx2", "ltx2_connected"):
        card: Any = {"format_version": 1, "text_encoder": cards["tuned"] | {"name": name}}
        with pytest.raises(CodecError, match=r"has other weights .* than the text encoder that m"):
            text_encoder_of_card(card, here)
        del card["text_encoder"]["weights_checksum"]
        text_encoder_of_card(card, here)
    card["text_encoder"] = cards["pieces"]
    text_encoder_of_card(card, here)


def test_other_models_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("audio_vae", "connectors", "tokenizer"):
        (other / name).symlink_to(folder / name)
    for name, key, value in (
        ("vocoder", "_class_name", "AutoencoderKL"),
        ("text_encoder", "architectures", ["Gemma2Model"]),
    ):
        (other / name).mkdir()
        config = json.loads((folder / name / "config.json").read_text()) | {key: value}
        (other / name / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CodecError, match=r"vocoder/ is of class AutoencoderKL, but .* LTX2Vocoder or"
    ):
        _ = sound_of(other).decoded_rate
    encoder: TextEncoder = encoding.encoder("ltx2", other)
    with pytest.raises(
        CodecError, match=r"text_encoder/ is of class \['Gemma2Model'\], but LTX-2 reads"
    ):
        encoder.encode("a bell")
    assert isinstance(sound_of(folder), Ltx2Sound)

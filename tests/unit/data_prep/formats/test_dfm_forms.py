"""`--output_format dfm`: what the task encoders of NVIDIA DFM do with its files.

Their accesses and shapes are those of `encode_sample` in dfm/src/megatron/data (7cb7634).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from torch import Tensor
from torch.nn.functional import pad

from data_prep.cli.parser import main
from dit.codecs.dataset_card import read_card
from dit.codecs.vae import codec_of_card
from tests.families import pipeline_parts
from tests.media_files import image, video


def wan_encoder(pth: Tensor, pickle: Any) -> tuple[Tensor, Tensor]:
    """WanTaskEncoder: a latent [C, F, H, W] in patches, a text padded to 512 rows."""
    channels, frames, height, width = pth.shape
    text = pad(pickle, (0, 0, 0, 512 - pickle.shape[0]))
    assert text.shape == (512, 16)
    patches = pth.reshape(channels, frames, height // 2, 2, width // 2, 2)
    return patches.reshape(channels, frames, height, width), text


def flux_encoder(pth: Tensor, pickle: Any) -> tuple[Tensor, Tensor]:
    """FluxTaskEncoder: a latent [C, H, W], texts in a dict."""
    channels, height, width = pth.shape
    text, pooled = pickle["prompt_embeds"], pickle["pooled_prompt_embeds"]
    assert text.shape == (512, 16) and pooled.ndim == 1
    assert pth.dtype == text.dtype == pooled.dtype == torch.float32
    return pth.reshape(channels, 1, height, width), text


def dit_encoder(pth: Tensor, pickle: Any) -> tuple[Tensor, Tensor]:
    """DiTTaskEncoder: both with a batch axis."""
    assert pth.dtype == pickle.dtype == torch.bfloat16
    assert pth.shape[0] == pickle.shape[0] == 1 and pickle.shape[1] == 512
    channels, frames, height, width = pth.squeeze(0).shape
    return pth.reshape(channels, frames, height, width).float(), pickle[0].float()


ENCODERS: dict[str, tuple[Callable[[Path], Path], Any, bool]] = {
    "wan": (pipeline_parts.wan, wan_encoder, False),
    "flux": (pipeline_parts.flux, flux_encoder, True),
    "cosmos": (pipeline_parts.cosmos, dit_encoder, True),
    "hunyuan_video": (pipeline_parts.hunyuan_video, dit_encoder, False),
}


def packed(folder: Path, model: Path, processor: str, *options: object) -> Path:
    out = folder / "out"
    is_flux = processor == "flux"
    for index in range(3):
        if is_flux:
            image(folder / f"in/picture_{index}.png", 32, 48, seed=index)
        else:
            video(folder / f"in/clip_{index}.mp4", 9)
    kind = "image" if is_flux else "video"
    words = [kind, f"--{kind}_dir", folder / "in", "--output_dir", out, "--processor", processor]
    words += ["--model_name", model, "--num_workers", 0, "--split", "1,0,0", *options]
    assert main([str(word) for word in [*words, "--output_format", "dfm"]]) == 0
    return out


def decoded(folder: Path) -> Iterator[dict[str, Any]]:
    """Samples as webdataset decodes them, which DFM reads by."""
    for shard in sorted((folder / "dfm_shards").glob("*.tar")):
        yield from webdataset.WebDataset(str(shard), shardshuffle=False).decode()


@pytest.mark.parametrize("name", ENCODERS)
def test_each_network_reads_its_own_form(name: str, tmp_path: Path, read_samples) -> None:
    make, encoder, raw = ENCODERS[name]
    model, processor = make(tmp_path / "model"), name.replace("_", "")
    out = packed(tmp_path, model, processor)
    ours = {sample["key"]: sample for sample in read_samples(out).values()}
    whitening = codec_of_card(read_card(out)).whitening
    found = list(decoded(out))
    assert {one["__key__"] for one in found} == ours.keys() and len(found) == 3
    for one in found:
        sample = ours[one["__key__"]]
        latent, text = encoder(one["pth"], one["pickle"])
        wanted = whitening.undo(sample["latent"]) if raw else sample["latent"].float()
        torch.testing.assert_close(latent.float(), wanted, rtol=2**-8, atol=1e-6)
        rows = len(sample["text"])
        assert torch.equal(text[:rows].bfloat16(), sample["text"]) and not text[rows:].any()
        assert one["json"]["caption"] == sample["caption"]
        # No file brings more than what it holds.
        assert one["pth"].untyped_storage().nbytes() == one["pth"].numel() * one["pth"].itemsize


@pytest.mark.parametrize("name", ["flux", "cosmos"])
def test_raw_latents_come_back_normalised(name: str, tmp_path: Path, read_samples, capsys) -> None:
    model = ENCODERS[name][0](tmp_path / "model")
    out = packed(tmp_path, model, name)
    words = ["convert", str(out / "dfm_shards"), "--output_dir", str(tmp_path / "back")]
    words += ["--split", "1,0,0"]
    if name == "flux":
        assert main(words) == 1  # the normalisation that its latents lack is that of a codec
        assert "DFM's shards of FLUX" in capsys.readouterr().err
    assert main([*words, "--processor", name, "--model_name", str(model)]) == 0
    before, after = (read_samples(folder) for folder in (out, tmp_path / "back"))
    assert before.keys() == after.keys()
    for source, sample in after.items():
        torch.testing.assert_close(sample["latent"], before[source]["latent"], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("form", ["dfm", "parquet", "meta"])
def test_what_a_format_has_no_place_for_is_said(form: str, tmp_path: Path, capsys) -> None:
    """Image-to-video of Wan has inputs that DFM's lacks; masks are in no format."""
    for index in range(2):
        video(tmp_path / f"in/{index}.mp4", 9)
        image(tmp_path / f"masks/{index}.png", 64, 48)
    words = ["video", "--video_dir", tmp_path / "in", "--output_dir", tmp_path / "out"]
    words += ["--processor", "wan", "--model_name", pipeline_parts.wan(tmp_path / "model")]
    words += ["--workload_type", "i2v", "--mask_dir", tmp_path / "masks", "--num_workers", 0]
    assert main([str(word) for word in [*words, "--output_format", form]]) == 0
    (line,) = (one for one in capsys.readouterr().out.splitlines() if "has no place for" in one)
    lost = {"dfm": {"condition_latent", "first_frame_latent", "image_embed"}}.get(form, set())
    assert line.startswith(f"{form} has no place for ")
    assert {word for word in line.split() if "_" in word} == lost | {"loss_mask"}
    assert "loss_mask of 2" in line

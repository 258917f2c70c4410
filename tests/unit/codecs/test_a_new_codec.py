"""A codec that is defined elsewhere packs pictures and is rebuilt from the dataset card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import safetensors.torch
import torch
import webdataset
from PIL import Image
from torch import Tensor

from data_prep.cli.parser import main
from dit.codecs.dataset_card import read_card
from dit.codecs.vae import CODECS, Codec, Pixel


@dataclass(frozen=True, kw_only=True)
class Negative(Pixel):
    """The pixels of the negative."""

    name: ClassVar[str] = "negative"

    def encode_raw(self, video_CFHW: Tensor) -> Tensor:
        return super().encode_raw(-video_CFHW)

    def decode_raw(self, latent_CFHW: Tensor) -> Tensor:
        return -super().decode_raw(latent_CFHW)


def packed(pictures: Path, folder: Path, name: str) -> tuple[Codec, Tensor]:
    """The codec as the dataset card tells it, and the latent of the one picture."""
    options = ["--processor", name, "--pixel_block", "4", "--text_width", "16"]
    places = ["--image_dir", str(pictures), "--output_dir", str(folder)]
    assert main(["image", *places, *options, "--num_workers", "0"]) == 0
    (shard,) = folder.rglob("*.tar")
    (record,) = webdataset.WebDataset(str(shard), shardshuffle=False)
    return CODECS.of_card(read_card(folder)), safetensors.torch.load(record["safetensors"])[
        "latent"
    ]


def test_it_packs_and_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "negative", Negative)
    (tmp_path / "in").mkdir()
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels_HWC).save(tmp_path / "in" / "a.png")
    codec, latent_CFHW = packed(tmp_path / "in", tmp_path / "negative", "negative")
    plain, positive_CFHW = packed(tmp_path / "in", tmp_path / "plain", "pixel")
    assert isinstance(codec, Negative) and type(plain) is Pixel
    assert torch.equal(codec.decode(latent_CFHW), plain.decode(positive_CFHW))
    assert torch.allclose(latent_CFHW.float(), -positive_CFHW.float(), atol=2e-3)

"""Digits that are scaled up: as many cells, each of more pixels, of pictures that read the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from data_prep.cli.parser import main
from dit.codecs import vae
from dit.codecs.dataset_card import read_card
from examples.digits.judges import DigitJudge

COUNT = 60


@pytest.mark.parametrize(("side", "channels"), [(16, 16), (32, 64)])
def test_they_have_as_many_cells_and_read_the_same(
    side: int, channels: int, tmp_path: Path, read_samples, capsys
) -> None:
    words = ["digits", "--side", str(side), "--num_samples", str(COUNT), "--output_dir"]
    assert main([*words, str(tmp_path)]) == 0
    assert f"model.in_channels={channels}" in capsys.readouterr().out
    codec, samples = vae.codec_of_card(read_card(tmp_path)), read_samples(tmp_path)
    pictures = []
    for index in range(COUNT):
        latent_CFHW = samples[f"load_digits/{index}"]["latent"]
        assert latent_CFHW.shape == (channels, 1, 4, 4)
        pictures.append(codec.decode(latent_CFHW).numpy().astype("uint8"))
        assert pictures[-1].shape == (1, side, side, 3)
    assert np.mean(DigitJudge.trained().read(pictures) == load_digits().target[:COUNT]) > 0.97

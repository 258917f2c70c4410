"""Pairs of a digit and what it is after an edit: pixels, splits, and what is packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_prep.cli.parser import main
from data_prep.sources.digits import EDITS, Digits, EditedDigits
from dit.codecs import vae
from dit.codecs.dataset_card import read_card


def test_a_digit_gets_a_frame_or_is_mirrored() -> None:
    still, pairs = Digits(num_samples=20), EditedDigits(num_samples=20)
    assert [entry.caption for entry in pairs.entries] == list(EDITS) * 20
    for number, entry in enumerate(pairs.entries):
        clip, digit_HW = pairs.read(entry), still.picture(number // 2)
        (reference_C1HW,) = clip.references
        assert torch.equal(reference_C1HW[0, 0], digit_HW)
        made_HW = clip.video_CFHW[0, 0]
        if entry.caption == "mirrored":
            assert torch.equal(made_HW, torch.from_numpy(digit_HW.numpy()[:, ::-1].copy()))
        else:
            assert torch.equal(made_HW[1:-1, 1:-1], digit_HW[1:-1, 1:-1])
            assert made_HW.sum() - made_HW[1:-1, 1:-1].sum() == 28  # the outermost of 64, all ink
    dark = EditedDigits(num_samples=1, inverted=True)
    for bright, entry in zip(pairs.entries, dark.entries, strict=False):
        assert torch.equal(dark.read(entry).video_CFHW, -pairs.read(bright).video_CFHW)


def test_pairs_are_packed_with_the_digit_as_reference(
    tmp_path: Path, read_samples, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    splits: dict[str, set[str]] = {}
    words = ["digits", "--edits", "--pooled_text", "--num_samples", "30"]
    assert main([*words, "--output_dir", str(folder)]) == 0
    assert "--config-file conf/flux_digits_edit.yaml" in capsys.readouterr().out
    codec, source = vae.codec_of_card(read_card(folder)), EditedDigits(num_samples=30)
    samples = read_samples(folder)
    assert len(samples) == 60 == len(source.entries)
    for entry in source.entries:
        sample, clip = samples[entry.source], source.read(entry)
        assert sample["caption"] == clip.caption and sample["pooled_text"].shape == (256,)
        for name, video_CFHW in (
            ("latent", clip.video_CFHW),
            ("reference_latent_0", clip.references[0]),
        ):
            shown_FHW = codec.decode(sample[name])[..., 0]
            assert ((shown_FHW - (video_CFHW[0] + 1) * 127.5).abs() < 1).all()
        digit = entry.source.rpartition("/")[0]
        splits.setdefault(digit, set()).add(sample["shard"].parent.name)
    assert all(len(found) == 1 for found in splits.values())
    assert set.union(*splits.values()) == {"train", "val"}

"""Digits move as their captions say, from one common first frame; packing repeats exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from data_prep.cli.parser import main
from data_prep.sources.digits import (
    CANVAS,
    DIRECTIONS,
    FRAMES,
    SIDE,
    Digits,
    MirroredClips,
    MovingDigits,
)
from dit.codecs import vae
from dit.codecs.dataset_card import read_card


def clips(source: MovingDigits) -> dict[str, Tensor]:
    """Frames [9, 16, 16] by source."""
    return {entry.source: source.read(entry).video_CFHW[0] for entry in source.entries}


def centre(frame_HW: Tensor) -> Tensor:
    """Row and column of the ink's centre of gravity."""
    ink_HW = frame_HW.double() + 1
    along = torch.arange(CANVAS, dtype=torch.double)
    return torch.stack([ink_HW.sum(1) @ along, ink_HW.sum(0) @ along]) / ink_HW.sum()


def test_the_ink_moves_as_the_caption_says() -> None:
    source, step = MovingDigits(num_samples=30), {"up": (-1, 0), "down": (1, 0)}
    step |= {"left": (0, -1), "right": (0, 1)}
    for entry in source.entries:
        frames = source.read(entry).video_CFHW[0]
        path = torch.stack([centre(frame) for frame in frames])
        way = torch.tensor(step[entry.caption.split()[-1]], dtype=torch.double)
        moved = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4], dtype=torch.double)
        torch.testing.assert_close(path - path[0], moved[:, None] * way)


def test_the_digit_stays_whole_and_the_same() -> None:
    still, source = Digits(num_samples=20), MovingDigits(num_samples=20)
    found = clips(source)
    for entry in still.entries:
        picture_HW = still.read(entry).video_CFHW[0, 0]
        for direction in DIRECTIONS:
            frames = found[f"{entry.source}/{direction}"]
            assert frames.shape == (FRAMES, CANVAS, CANVAS)
            for frame in frames:
                cut = [frame.unfold(0, SIDE, 1).unfold(1, SIDE, 1).flatten(0, 1)]
                assert (torch.cat(cut) == picture_HW).all((1, 2)).any()
                assert (frame + 1).sum() == (picture_HW + 1).sum()  # and nothing else


def test_the_first_frame_does_not_tell_the_direction() -> None:
    found = clips(MovingDigits(num_samples=5))
    for index in range(5):
        firsts = [found[f"load_digits/{index}/{direction}"][0] for direction in DIRECTIONS]
        lasts = [found[f"load_digits/{index}/{direction}"][-1] for direction in DIRECTIONS]
        assert all(torch.equal(first, firsts[0]) for first in firsts)
        assert not any(torch.equal(lasts[i], lasts[j]) for i in range(4) for j in range(i))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("moving") / "data"
    assert main(["digits", "--moving", "--output_dir", str(out), "--num_samples", "60"]) == 0
    return out


def test_clips_are_packed_with_what_image_to_video_reads(folder: Path, read_samples) -> None:
    samples, source = read_samples(folder), MovingDigits(num_samples=60)
    assert len(samples) == 240 == len(source.entries)
    codec = vae.codec_of_card(read_card(folder))
    for entry in source.entries:
        sample, video_FHW = samples[entry.source], source.read(entry).video_CFHW[0]
        expected_FHW = (video_FHW + 1) * 127.5
        found_FHW = codec.decode(sample["latent"])[..., 0]
        assert ((found_FHW - expected_FHW).abs() < 1).all()  # a level of 16 is 16 of 255
        condition = codec.decode(sample["condition_latent"])[..., 0]
        assert torch.equal(condition[0], found_FHW[0])
        assert ((condition[1:].int() - 127.5).abs() < 1).all()  # mid grey
        assert torch.equal(sample["first_frame_latent"], sample["condition_latent"][:, :1])
        assert sample["fps"] == 8.0 and sample["caption"] == entry.caption
        made = codec.image_inputs(video_FHW[None, :1], None, frames=FRAMES)[0]
        assert torch.equal(made["condition_latent"].half(), sample["condition_latent"])


def test_all_clips_of_a_digit_are_in_one_split(folder: Path, read_samples) -> None:
    splits: dict[str, set[str]] = {}
    for source, sample in read_samples(folder).items():
        splits.setdefault(source.rpartition("/")[0], set()).add(sample["shard"].parent.name)
    assert len(splits) == 60 and all(len(found) == 1 for found in splits.values())
    assert {split for found in splits.values() for split in found} == {"train", "val"}


def test_packed_again_it_is_the_same(
    folder: Path, tmp_path: Path, content_of, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["digits", "--output_dir", str(tmp_path / "out"), "--num_samples", "60"]
    assert main([*words, "--moving"]) == 0
    assert "--config-file conf/wan_moving_digits.yaml" in capsys.readouterr().out
    assert content_of(tmp_path / "out") == content_of(folder)
    assert main(words) == 1  # digits that stand do not go on from it
    assert "--overwrite" in capsys.readouterr().err


def test_a_mirrored_digit_goes_the_other_way_than_its_reference(
    tmp_path: Path, read_samples, content_of, capsys: pytest.CaptureFixture[str]
) -> None:
    source, plain = MirroredClips(num_samples=30), MovingDigits(num_samples=30)
    given, out = clips(plain), tmp_path / "out"
    words = ["digits", "--moving", "--edits", "--num_samples", "30", "--output_dir"]
    assert main([*words, str(out)]) == 0
    assert "--config-file conf/ltx_digits_edit.yaml" in capsys.readouterr().out
    codec, samples = vae.codec_of_card(read_card(out)), read_samples(out)
    assert len(samples) == 120 == len(source.entries)
    splits: dict[str, set[str]] = {}
    for entry in source.entries:
        sample, clip = samples[entry.source], source.read(entry)
        assert sample["caption"] == clip.caption == "mirrored" and sample["fps"] == 8.0
        # Only the reference shows what is wanted.
        assert "first_frame_latent" not in sample and "condition_latent" not in sample
        wanted_FHW = torch.from_numpy(given[entry.source].numpy()[:, :, ::-1].copy())
        for name, video_FHW in (
            ("latent", wanted_FHW),
            ("reference_latent_0", given[entry.source]),
        ):
            shown_FHW = codec.decode(sample[name])[..., 0]
            assert ((shown_FHW - (video_FHW + 1) * 127.5).abs() < 1).all()
        if entry.source.endswith("left"):
            path = [float(centre(frame)[1]) for frame in clip.video_CFHW[0]]
            assert path[-1] - path[0] == pytest.approx(4)
        digit = entry.source.rpartition("/")[0]
        splits.setdefault(digit, set()).add(sample["shard"].parent.name)
    assert all(len(found) == 1 for found in splits.values())
    assert main([*words, str(tmp_path / "again")]) == 0
    assert content_of(tmp_path / "again") == content_of(out)


@pytest.mark.parametrize("kind", [["--moving"], ["--edits"], ["--moving", "--edits"]])
def test_other_sides_are_of_digits_that_stand(
    kind: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["digits", *kind, "--side", "16", "--output_dir", str(tmp_path / "out")]
    assert main(words) == 1
    assert f"--side 16: digits of {kind[0]} always have 8 pixels" in capsys.readouterr().err

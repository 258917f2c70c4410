"""Inverted digits: dark on white, in the units of the dataset that a network was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_prep.cli.parser import main
from data_prep.sources.digits import Digits, MovingDigits
from dit.codecs import vae
from dit.codecs.dataset_card import read_card
from examples.digits.judges import MIDDLE, grey_levels, part_light
from tests.media_files import image


def units(folder: Path) -> list[list[float]]:
    """Mean and deviation of the latents by the card."""
    latent = read_card(folder)["latent"]
    return [latent["mean"], latent["std"]]


FEW = ("--num_samples", "60")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`plain` digits, and `inverted` ones that are whitened as these are."""
    out = tmp_path_factory.mktemp("inverted")
    assert main(["digits", "--output_dir", str(out / "plain"), *FEW]) == 0
    like = ("--invert", "--whitening_from", str(out / "plain"))
    assert main(["digits", "--output_dir", str(out / "inverted"), *FEW, *like]) == 0
    return out


def test_they_are_read_in_the_units_of_the_other_dataset(folder: Path, read_samples) -> None:
    assert units(folder / "plain") == units(folder / "inverted")
    codec = vae.codec_of_card(read_card(folder / "inverted"))
    plain, inverted = (read_samples(folder / name) for name in ("plain", "inverted"))
    assert len(plain) == len(inverted) == 60 and plain.keys() == inverted.keys()
    pictures = []
    for source, one in plain.items():
        other = inverted[source]
        shown, turned = (codec.decode(sample["latent"]).int() for sample in (one, other))
        assert (turned + shown - 255).abs().max() <= 1  # half a level is rounded to even
        assert one["caption"] == other["caption"]
        assert one["shard"].parent.name == other["shard"].parent.name  # train or val
        pictures.append(turned.numpy().astype("uint8"))
    assert part_light(pictures) == 1 and part_light([255 - one for one in pictures]) == 0
    assert part_light([*pictures[:3], 255 - pictures[3]]) == 0.75


def test_every_real_digit_is_on_one_side_of_the_middle() -> None:
    digits = Digits()
    means = torch.stack([digits.picture(index).mean() for index in range(1797)])
    grey = (means + 1) * MIDDLE
    assert grey.max() < MIDDLE < (2 * MIDDLE - grey).min()
    frames = torch.full((1, 8, 8, 3), 200, dtype=torch.uint8).numpy()
    assert grey_levels(frames).mean() == pytest.approx(200 / 255 * 2 * MIDDLE)


def test_moving_ones_are_inverted_whole() -> None:
    plain, inverted = MovingDigits(num_samples=4), MovingDigits(num_samples=4, inverted=True)
    assert {entry.key for entry in plain.entries}.isdisjoint(e.key for e in inverted.entries)
    for one, other in zip(plain.entries, inverted.entries, strict=True):
        assert one.group == other.group and one.caption == other.caption
        assert torch.equal(inverted.read(other).video_CFHW, -plain.read(one).video_CFHW)


def test_without_it_they_have_units_of_their_own(folder: Path, tmp_path: Path, capsys) -> None:
    words = ["digits", "--invert", *FEW, "--output_dir"]
    assert main([*words, str(tmp_path)]) == 0
    assert "--config-file conf/dit_digits_lora.yaml" in capsys.readouterr().out
    own, plain = (units(one)[0] for one in (tmp_path, folder / "plain"))
    assert own == pytest.approx([-mean for mean in plain])
    # A folder goes on with the same units alone.
    like = ["--whitening_from", str(folder / "plain")]
    assert main([*words, str(tmp_path), *like]) == 1
    assert "other options (whitening" in capsys.readouterr().err
    assert main([*words, str(folder / "inverted"), *like]) == 0


def test_pictures_of_anybody_take_them_as_well(tmp_path: Path, capsys) -> None:
    sides = {}
    for name, seed in (("first", 0), ("second", 1)):
        for number in range(3):
            image(tmp_path / name / f"{number}.png", 16, 16, seed=10 * seed + number)
    pack = ["image", "--split", "1,0,0", "--num_workers", "0", "--text_width", "16"]
    for name, more in (
        ("first", ()),
        ("second", ("--whitening_from", str(tmp_path / "first_out"))),
    ):
        places = [
            "--image_dir",
            str(tmp_path / name),
            "--output_dir",
            str(tmp_path / f"{name}_out"),
        ]
        assert main([*pack, *places, *more]) == 0
        sides[name] = units(tmp_path / f"{name}_out")
    assert sides["first"] == sides["second"]
    capsys.readouterr()
    places = ["--image_dir", str(tmp_path / "second"), "--output_dir", str(tmp_path / "grey")]
    grey = ["--pixel_channels", "1", "--whitening_from", str(tmp_path / "first_out")]
    assert main([*pack, *places, *grey]) == 1
    said = capsys.readouterr().err
    first = "48 channels (block 4, pixel_channels 3, basis dct), and this command makes those"
    assert f"{first} of 'pixel' with 16" in said
    pixels = ["--pixel_basis", "pixels", "--whitening_from", str(tmp_path / "first_out")]
    assert main([*pack, *places, *pixels]) == 1
    said = capsys.readouterr().err
    assert "basis dct), and this command makes those of 'pixel' with 48" in said
    assert main(["digits", "--output_dir", str(tmp_path / "x"), *grey[2:3], str(tmp_path)]) == 1
    assert "dataset_card.json" in capsys.readouterr().err

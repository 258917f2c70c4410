"""Samples that cannot be packed are counted, named, and at some point too many."""

import json
from pathlib import Path

import pytest
import torch

from data_prep.cli.parser import main
from data_prep.media.clips import Entry
from data_prep.refusals import PrepError, Reason, Refusals, RefusedError
from data_prep.sources.digits import Digits
from dit.codecs.vae import Pixel
from tests.media_files import image


class Poisoned(Digits):
    """Some samples are refused, some become NaN."""

    def read(self, entry: Entry):
        index, clip = int(entry.key[-4:]), super().read(entry)
        if index % 10 == 3:
            raise RefusedError(Reason.DAMAGED, "on purpose")
        if index % 50 == 7:
            clip.video_CFHW[0, 0, 1, 1] = torch.nan
        return clip


class Unfitted(Pixel):
    """Does not look at the dataset first, as most processors."""

    whitens_by_dataset = False


def test_refused_samples_are_counted_and_named(tmp_path: Path, read_samples, pack_digits) -> None:
    codec = Unfitted.of(block=2, colours=1)
    source, out = Poisoned(num_samples=150), tmp_path / "out"
    summary = pack_digits(out, source, codec, max_bad_fraction=0.12)
    assert summary.refused == {Reason.DAMAGED: 15, Reason.NOT_FINITE: 3}
    lines = (tmp_path / "out/refused.jsonl").read_text().splitlines()
    refused = {line["source"]: line["reason"] for line in map(json.loads, lines)}
    assert refused["load_digits/7"] == Reason.NOT_FINITE
    assert refused["load_digits/13"] == Reason.DAMAGED
    packed = read_samples(tmp_path / "out")
    assert len(refused) == 18 and len(packed) == 132 and not set(refused) & set(packed)
    card = json.loads((tmp_path / "out/dataset_card.json").read_text())
    assert card["refused"] == summary.refused


def test_few_refused_files_are_named_and_of_many_the_first() -> None:
    refusals = Refusals()
    for number in (2, 0, 1):
        refusals.add(f"{number}.png", Reason.DAMAGED, "cut")
    refusals.add("b.png", Reason.EMPTY, "0 bytes")
    assert refusals.lines == [
        "3 x image is damaged or cut short: 0.png (cut), 1.png (cut), 2.png (cut)",
        "1 x file is empty: b.png (0 bytes)",
    ]
    with pytest.raises(PrepError, match=r"4 of 9 files .*0.png .*b.png \(0 bytes\)\), more than"):
        refusals.check(total=9, max_fraction=0.1)
    for number in range(5, 7):
        refusals.add(f"{number}.png", Reason.EMPTY, "0 bytes")
    assert refusals.lines == [
        "3 x image is damaged or cut short, such as 0.png (cut)",
        "3 x file is empty, such as 5.png (0 bytes)",
    ]


def test_a_plan_and_a_packing_name_the_refused_file(tmp_path: Path, capsys) -> None:
    for name in ("a.png", "b.png"):
        image(tmp_path / "in" / name)
    (tmp_path / "in/page.png").write_bytes(b"<html>404 not found</html>")
    given = ["image", "--image_dir", str(tmp_path / "in"), "--output_dir", str(tmp_path / "out")]
    given += ["--processor", "pixel", "--num_workers", "0", "--max_bad_fraction", "0.5"]
    said = "refused: 1 x file is no image of a known format: page.png (it is an HTML page,"
    assert main([*given, "--plan"]) == 0 and said in capsys.readouterr().out
    assert main(given) == 0 and said in capsys.readouterr().out


def test_too_many_refusals_publish_nothing(tmp_path: Path, pack_digits) -> None:
    with pytest.raises(
        PrepError, match=r"15 of 150 files.*15 x image is damaged.*is packed is kept"
    ):
        pack_digits(tmp_path / "out", Poisoned(num_samples=150), max_bad_fraction=0.05)
    assert not (tmp_path / "out/.nv-meta").exists()
    assert len((tmp_path / "out/refused.jsonl").read_text().splitlines()) == 15


def test_a_split_emptied_by_refusals_publishes_nothing(
    tmp_path: Path, options, pack_digits
) -> None:
    wanted = options().split

    class NoVal(Digits):
        def read(self, entry: Entry):
            if wanted.split_of(entry.key) == "val":
                raise RefusedError(Reason.DAMAGED, "on purpose")
            return super().read(entry)

    with pytest.raises(PrepError, match="samples in val, but none"):
        pack_digits(tmp_path / "out", NoVal(num_samples=150), max_bad_fraction=1)
    assert not (tmp_path / "out/.nv-meta").exists()

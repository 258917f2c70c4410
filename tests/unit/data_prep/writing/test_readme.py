"""The card of a dataset says what was packed and how, and leaves its use to the user."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.cli.parser import main


def pack(source: Path, out: Path, *more: str) -> None:
    words = ["image", "--image_dir", str(source), "--output_dir", str(out), "--num_workers", "0"]
    words += ["--processor", "pixel", "--pixel_block", "2", "--split", "0.6,0.4,0"]
    assert main([*words, "--license", "CC-BY-4.0", "--max_bad_fraction", "0.5", *more]) == 0


def test_a_card_with_pictures_and_the_words_of_the_user(
    tmp_path: Path, picture_folder, image_of
) -> None:
    source, out = picture_folder(20), tmp_path / "out"
    (source / "part0" / "broken.png").write_bytes(b"\x89PNG")
    pack(source, out)
    page = (out / "README.md").read_text()
    card = json.loads((out / "dataset_card.json").read_text())
    assert page.startswith('---\nlicense: "CC-BY-4.0"\n') and "| licence | CC-BY-4.0 |" in page
    for split, counts in card["splits"].items():
        assert f"| samples in `{split}` | {counts['samples']} in 1 shard |" in page
    assert "refused: image is damaged" in page or "refused: file is no image" in page
    assert "```\npython -m data_prep image --split 0.6,0.4,0 " in page
    assert " --pixel_block 2\n```" in page and "--num_workers" not in page
    assert "name=pixel, block=2" in page and "| version of torch |" in page
    assert str(tmp_path) not in page  # paths are nobody else's business
    shown = [np.asarray(Image.open(out / f"samples/{number}.png")) for number in range(4)]
    assert page.count("](samples/") == 4 == len(list((out / "samples").iterdir()))
    whole = [np.asarray(image_of(n, 16 + 8 * (n % 4), 16 + 4 * (n % 5))) for n in range(20)]
    for picture in shown:  # the codec crops sides to multiples of 4
        height, width = picture.shape[:2]
        corners = [((one.shape[0] - height) // 2, (one.shape[1] - width) // 2) for one in whole]
        crops = [one[y:, x:] for one, (y, x) in zip(whole, corners, strict=True) if y >= 0 <= x]
        assert any(np.array_equal(one[:height, :width], picture) for one in crops)

    own = "## What it may be used for\n\nOnly for research.\n\n"
    before, _, rest = page.partition("## What it may be used for\n")
    (out / "README.md").write_text(before + own + rest[rest.index("## How") :])
    image_of(99, 16, 16).save(source / "one_more.png")
    pack(source, out)
    again = (out / "README.md").read_text()
    assert own in again and "To be filled in" not in again
    assert json.loads((out / "dataset_card.json").read_text())["splits"] != card["splits"]
    pack(source, out, "--overwrite")  # the card and its pictures are ours to remove
    assert "To be filled in" in (out / "README.md").read_text()

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.sources.digits import Digits
from examples.digits.preferred_digits import is_inverted, judge, main


def test_inverted_digits_are_told_from_all_others() -> None:
    digits = Digits()
    for index in range(len(digits.entries)):
        grey_HW = np.asarray((digits.picture(index) + 1) * 127.5).round().astype(np.uint8)
        picture_FHW3 = np.repeat(grey_HW[None, :, :, None], 3, axis=3)
        assert not is_inverted(picture_FHW3) and is_inverted(255 - picture_FHW3)


def test_what_is_drawn_is_judged(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    assert main(["draw", str(folder), "--digits", "40", "--prompts", "12"]) == 0
    rows = list(map(json.loads, (folder / "mixed/captions.jsonl").read_text().splitlines()))
    assert len(rows) == 80 and len((folder / "prompts.jsonl").read_text().splitlines()) == 12
    for name in ("0000.png", "0039.png"):
        pair = [np.asarray(Image.open(folder / part / name)) for part in ("preferred", "rejected")]
        assert np.array_equal(pair[0], 255 - pair[1])
    samples = [{"prompt": row["caption"], "file": row["file_name"]} for row in rows]
    (folder / "mixed/samples.json").write_text(json.dumps(samples))
    preferred, read = judge(folder / "mixed")
    assert preferred == 0.5 and read > 0.95

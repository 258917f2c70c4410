from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from data_prep.cli import parser as data_prep
from examples.drawings.coloured_shapes import CAPTIONS, PICTURES, caption_of, main, picture_of


def test_pictures_are_read_as_they_were_drawn() -> None:
    random, noise = Random(1), np.random.default_rng(1)
    for caption in CAPTIONS * 4:
        picture = picture_of(caption, random, anywhere=random.random() < 0.5)
        assert caption_of(picture) == caption
        # Samples are never quite clean.
        noisy_HW3 = np.asarray(picture) + noise.normal(0, 12, np.asarray(picture).shape)
        assert caption_of(Image.fromarray(noisy_HW3.clip(0, 255).astype(np.uint8))) == caption


def test_a_picture_without_ink_has_no_kind() -> None:
    assert caption_of(Image.new("RGB", PICTURES[0], "white")) not in CAPTIONS


def test_captions_reach_data_prep_with_their_pictures(tmp_path: Path) -> None:
    assert main(["draw", f"{tmp_path / 'shapes'}", "--pictures", "40", "--prompts", "120"]) == 0
    media, data = tmp_path / "shapes" / "pictures", tmp_path / "data"
    data_prep.main(["image", "--image_dir", str(media), "--output_dir", str(data), "--plan=quick"])
    planned = [json.loads(line) for line in (data / "plan.jsonl").read_text().splitlines()]
    found = {row["source"]: row["caption"] for row in planned}
    assert len(found) == 40
    for name, caption in found.items():
        assert caption_of(Image.open(media / Path(name).name)) == caption
    lines = (tmp_path / "shapes" / "prompts.jsonl").read_text().splitlines()
    asked = [tuple(json.loads(line).values()) for line in lines]
    assert set(Counter(caption for caption, *_ in asked).values()) == {2}


@pytest.mark.parametrize(("right", "exit_code"), [(19, 0), (18, 1)])
def test_exit_code_follows_what_is_read(tmp_path: Path, right: int, exit_code: int) -> None:
    random, samples = Random(0), []
    for number in range(20):
        asked, shown = ("a small red ring", "a small red cross")
        picture_of(asked if number < right else shown, random).save(tmp_path / f"{number}.png")
        samples.append({"file": f"{number}.png", "prompt": asked})
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    assert main(["read", str(tmp_path)]) == exit_code

"""Pictures that LongCat-Image-Edit's pipeline edits."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from dit.codecs.vae.flux import LongCatEdit
from dit.config import Weights
from dit.convert.verify import compare_forward
from tests.families.case import NEGATIVE, PROMPT, gap
from tests.families.generation import noise_of, opened, ours
from tests.families.longcat import made_by, pipeline
from tests.media_files import image


@pytest.mark.usefixtures("small_pictures")
def test_pictures_are_edited(groups, tmp_path: Path) -> None:
    """From a file, which text encoder and VAE see at sizes of their own; its ratio is kept."""
    pipe, file = pipeline(tmp_path, edits=True), image(tmp_path / "shown.png", 50, 22)
    run = opened(tmp_path)
    assert run.config.model.reference_latents == 1 and run.encoder.name == "longcat_edit"
    verified = compare_forward(tmp_path / "pipeline", run.path, Weights.MODEL)
    assert verified.largest <= 1e-4 * verified.scale
    picture = Image.open(file).convert("RGB")
    width, height = LongCatEdit.reference_size(*picture.size)
    rows = {
        name: run.encoder.encode_beside(words, [picture])["text"]
        for name, words in (("prompt", PROMPT), ("negative_prompt", NEGATIVE))
    }
    texts, start = (
        {name: {"text": text} for name, text in rows.items()},
        noise_of((1, height // 2, width // 2), 16),
    )
    given, made = {"reference": (str(file),), "reference_size": "published"}, []
    for scale in (1.0, 4.5):
        theirs = made_by(pipe, start, texts, image=picture, guidance_scale=scale)
        made.append(ours(run, start, guidance=scale, negative_prompt=NEGATIVE, **given))
        assert gap(made[-1], theirs) <= 1e-4
    assert gap(made[0], made[1]) > 1e-2

"""What FLUX.2's pipelines have of their own: references, a told scale, distilled ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from dit.config import TextPadding
from tests.families.case import gap
from tests.families.flux2 import made_by, pipeline
from tests.families.generation import noise_of, opened, ours, texts_of
from tests.media_files import image

PICTURE = (1, 5, 7)
"""Of 4 x 4 pixels each."""


@pytest.mark.parametrize("kind", ["dev", "klein"])
def test_pictures_are_changed(groups, tmp_path: Path, kind: str) -> None:
    """With references of other, odd sizes, with and without guidance, from the files themselves."""
    pipe = pipeline(tmp_path, kind)
    run = opened(tmp_path, "model.reference_latents=2")
    assert run.config.model.text_pad_to is TextPadding.STORED
    files = [image(tmp_path / f"{n}.png", 67 + 9 * n, 70, seed=n) for n in range(2)]
    shown = [Image.open(file).convert("RGB") for file in files]
    texts, start, made = texts_of(run, negative=""), noise_of(PICTURE, 16), []
    ours_of_scale = "distilled_guidance" if kind == "dev" else "guidance"
    for scale, count in ((4.0, 2), (1.0, 2), (4.0, 1), (4.0, 0)):
        theirs = made_by(pipe, start, texts, guidance_scale=scale, image=shown[:count] or None)
        told = {ours_of_scale: scale, "negative_prompt": "", "reference_size": "published"}
        made.append(ours(run, start, reference=tuple(map(str, files[:count])), **told))
        assert gap(made[-1], theirs) <= 1e-4
    assert min(gap(one, made[0]) for one in made[1:]) > 1e-2


def test_networks_are_told_a_scale_or_guided(groups, tmp_path: Path) -> None:
    """dev is told what training told it, klein guided; a distilled one is neither."""
    pipeline(tmp_path / "dev", "dev")
    dev, start = opened(tmp_path / "dev"), noise_of(PICTURE, 16)
    assert torch.equal(ours(dev, start), ours(dev, start, guidance=1.0, distilled_guidance=1.0))
    pipe = pipeline(tmp_path / "klein", "klein", is_distilled=True)
    klein = opened(tmp_path / "klein")
    with pytest.raises(ValueError, match=r"--distilled_guidance 4.0: .* told no guidance"):
        ours(klein, start, distilled_guidance=4.0)
    theirs = made_by(pipe, start, texts_of(klein, negative=""), guidance_scale=4.0)
    assert gap(ours(klein, start), theirs) <= 1e-4

"""What the pipelines of FLUX.2 and FLUX.3 have of their own: references, scales, distilled ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from dit.config import TextPadding
from dit.config_loading import ConfigError, load_config
from dit.convert.import_ import import_weights
from dit.models.registry import family_of
from dit.sampling.given_pictures import GivenPictures
from recipes.runs import dit_debug
from tests.families import encoding, flux3
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
    with pytest.raises(ValueError, match=r"--distilled_guidance 4.0: .* takes no guidance"):
        ours(klein, start, distilled_guidance=4.0)
    theirs = made_by(pipe, start, texts_of(klein, negative=""), guidance_scale=4.0)
    assert gap(ours(klein, start), theirs) <= 1e-4


@pytest.mark.parametrize("flow_map", [False, True])
def test_flux3_changes_pictures(groups, tmp_path: Path, flow_map: bool) -> None:
    """Each reference is encoded alone; all of a sample see each other in layers of their own."""
    whole = flux3.pipeline(tmp_path, flow_map=flow_map)
    run = opened(tmp_path, "model.reference_latents=2")
    files = [image(tmp_path / f"{n}.png", 20 + 8 * n, 24, seed=n) for n in range(2)]
    wanted = family_of(run.config.model).inputs(run.config.model)
    given = GivenPictures(references=tuple(map(str, files)), reference_size="published")
    codec = encoding.codec("flux3_klein", tmp_path / "pipeline")
    found = given.inputs(codec, wanted, size=(1, 20, 28), multiple=4)
    latents = [found[f"reference_latent_{n}"].float() for n in range(2)]
    start, made = noise_of(PICTURE, 16), []
    for scale, count in ((1.0 if flow_map else 3.5, 2), (1.0, 1), (1.0, 0)):
        texts = texts_of(run, negative="")
        theirs = flux3.made_by(whole, start, texts, guidance=scale, references=latents[:count])
        told = {"guidance": scale, "negative_prompt": "", "reference_size": "published"}
        made.append(ours(run, start, reference=tuple(map(str, files[:count])), **told))
        assert gap(made[-1], theirs) <= 1e-4
    assert min(gap(one, made[0]) for one in made[1:]) > 1e-2


def test_the_distilled_flux3_is_not_guided(groups, tmp_path: Path) -> None:
    flux3.pipeline(tmp_path, flow_map=True)
    (notice,) = import_weights(tmp_path / "pipeline", tmp_path / "again").notices
    assert "was distilled to few steps, which plain tuning undoes" in notice
    run, start = opened(tmp_path), noise_of(PICTURE, 16)
    assert run.config.guidance == 1
    with pytest.raises(
        ValueError, match=r"guidance 3.5: .* steps without guidance .*flow_map=true"
    ):
        ours(run, start, guidance=3.5)
    with pytest.raises(ValueError, match=r"sampler heun: .* use --sampler euler"):
        ours(run, start, guidance=1.0, sampler="heun")
    words = ["model.name=flux3_klein", "dataset.task_encoder_seq_length=9216"]
    assert load_config(dit_debug(), overrides=words).guidance == 1
    with pytest.raises(ConfigError, match=r"validation.guidance=4.*without guidance.*set it to 1"):
        load_config(dit_debug(), overrides=[*words, "validation.guidance=4"])

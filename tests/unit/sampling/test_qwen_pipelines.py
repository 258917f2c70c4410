"""Pictures that Qwen-Image's pipelines edit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from dit.config import Weights
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.verify import compare_forward
from tests.families.case import PICTURE, PROMPT, gap
from tests.families.generation import noise_of, opened, ours
from tests.families.qwen_image import made_by, pipeline
from tests.media_files import image


@pytest.mark.slow
@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize(("size", "most"), [("qwen_image_edit", 1), ("qwen_image_edit_2511", 3)])
def test_pictures_are_edited(groups, tmp_path: Path, size: str, most: int) -> None:
    """From files, which text encoder and VAE see at sizes of their own."""
    pipe = pipeline(tmp_path, size)
    for part in ("text_encoder", "tokenizer"):
        shutil.copytree(tmp_path / "parts" / part, tmp_path / "pipeline" / part)
    run = opened(tmp_path)
    assert run.config.model.reference_latents == most and run.encoder.name == size
    verified = compare_forward(tmp_path / "pipeline", run.path, Weights.MODEL)
    assert verified.largest <= 1e-4 * verified.scale  # one of three samples has pictures
    files = [image(tmp_path / f"{n}.png", 50 + 9 * n, 22, seed=n) for n in range(min(most, 2))]
    pictures = [Image.open(file) for file in files]
    found = run.encoder.encode_beside(PROMPT, pictures)
    rows = {"prompt": found["text"], "negative_prompt": found["null_text"]}
    texts, start = {name: {"text": text} for name, text in rows.items()}, noise_of(PICTURE, 16)
    shown = {"image": pictures if most > 1 else pictures[0]}
    given = {"reference": tuple(map(str, files)), "reference_size": "published"}
    made = []
    for scale in (1.0, 4.0):
        theirs = made_by(pipe, start, texts, **shown, true_cfg_scale=scale)
        made.append(ours(run, start, guidance=scale, negative_prompt="", **given))
        assert gap(made[-1], theirs) <= 1e-4
    assert gap(made[0], made[1]) > 1e-2
    with pytest.raises(ValueError, match=r"sees the pictures .*: give --reference FILE"):
        ours(run, start)
    pipeline(tmp_path / "text", "qwen_image")
    of_text = opened(tmp_path / "text")
    with pytest.raises(
        ConvertError, match=rf"reference_latents=0, and {type(pipe).__name__} shows"
    ):
        options = ExportOptions(pipeline_from=tmp_path / "pipeline")
        export_weights(of_text.path, tmp_path / "wrong", options)

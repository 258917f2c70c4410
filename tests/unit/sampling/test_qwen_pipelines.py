"""Pictures that Qwen-Image's pipelines edit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dit.config import Weights
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward
from tests.families import qwen_image21
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
    with pytest.raises(ValueError, match=r"needs the pictures .*: give --reference FILE"):
        ours(run, start)
    pipeline(tmp_path / "text", "qwen_image")
    of_text = opened(tmp_path / "text")
    with pytest.raises(
        ConvertError, match=rf"reference_latents=0, but {type(pipe).__name__} passes"
    ):
        options = ExportOptions(pipeline_from=tmp_path / "pipeline")
        export_weights(of_text.path, tmp_path / "wrong", options)


@pytest.mark.usefixtures("small_pictures")
def test_qwen_image_21_edits_and_draws_with_one_network(groups, tmp_path: Path) -> None:
    """From files with transparency: two references, one, and none; with and without guidance."""
    pipe: Any = qwen_image21.pipeline(tmp_path)
    run = opened(tmp_path, "model.reference_latents=2")
    start, made = noise_of((1, 4, 6), 16), []
    files, pictures = [], []
    for n in range(2):
        pixels = np.random.default_rng(n).integers(0, 256, (40 + 30 * n, 70, 4), dtype=np.uint8)
        pictures.append(Image.fromarray(pixels))
        files.append(str(tmp_path / f"{n}.png"))
        pictures[-1].save(files[-1])
    encode = pipe._get_qwen_prompt_embeds

    def wide(*given: Any) -> Any:
        """Texts in the type of the network; the encoder's is that of shards."""
        rows, *others = encode(*given)
        return rows.float(), *others

    pipe._get_qwen_prompt_embeds = wide
    for scale, count in ((4.0, 2), (1.0, 2), (4.0, 1), (4.0, 0)):
        asked = {"prompt": PROMPT, "negative_prompt": "", "image": pictures[:count] or None}
        theirs = qwen_image21.made_by(pipe, start, {}, **asked, true_cfg_scale=scale)
        told = {"guidance": scale, "negative_prompt": "", "reference_size": "published"}
        made.append(ours(run, start, reference=tuple(files[:count]), **told))
        assert gap(made[-1], theirs) <= 1e-4
    assert min(gap(one, made[0]) for one in made[1:]) > 1e-2
    with pytest.raises(ValueError, match="reference"):
        ours(run, start, reference=tuple(files[:1] * 3))
    index = tmp_path / "pipeline" / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"sample_sigmas": [1.0, 0.7]}))
    (notice,) = import_weights(tmp_path / "pipeline", tmp_path / "turbo").notices
    assert "was distilled to few steps" in notice

"""We generate what Qwen-Image's pipelines of Diffusers do, from folders and noise of theirs."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image
from torch import Tensor

from dit.config import Weights
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward, compare_tensors
from dit.sampling.commands.generate_media import generate_opened
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.open_checkpoint import LoadOptions, OpenCheckpoint, open_checkpoint
from dit.sampling.prompts import Prompt
from tests.families.case import gap
from tests.families.qwen_image import SCHEDULER, STEPS, made_by, pipeline
from tests.given_noise import from_noise

PROMPT, NEGATIVE = "a red fox & a hen", "blurry"
ROWS, COLUMNS = 6, 4  # of a latent


def noise() -> Tensor:
    return torch.randn(16, ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))


def opened(folder: Path) -> OpenCheckpoint:
    """The pipeline's network, imported, with its text encoder and VAE."""
    done = import_weights(folder / "pipeline", folder / "ours")
    options = LoadOptions(t5_cache_dir=str(folder / "pipeline"))
    return open_checkpoint(done.path, weights="model", options=options)


def ours(run: OpenCheckpoint, **options) -> Tensor:
    """Our latents from the same noise."""
    _, height, width = run.latent_stride.pixels((1, ROWS, COLUMNS))
    size = {"height": height, "width": width, "num_video_frames": 1}
    asked = GenerationOptions(num_steps=STEPS, sampler="euler", **size, **options)
    with from_noise(run.config, noise()[:, None]):
        (made,) = generate_opened(run, [Prompt(text=PROMPT)], seed=0, options=asked, latents=True)
    assert made.latent_CFHW is not None
    return made.latent_CFHW[:, 0]


@pytest.mark.slow
def test_text_to_image_and_the_way_back(groups, tmp_path: Path) -> None:
    """With guidance, whose tokens keep their norms, and without; then import, verify, export."""
    pipe, source = pipeline(tmp_path, "qwen_image"), tmp_path / "pipeline"
    run = opened(tmp_path)
    flow = run.config.objective.flow
    told = {key: getattr(flow, key) for key in SCHEDULER if hasattr(flow, key)}
    assert told == {key: SCHEDULER[key] for key in told} and len(told) == 6
    assert (flow.sampling_levels, flow.timestep_scale) == ("even", 1000)
    words = {"prompt": PROMPT, "negative_prompt": NEGATIVE}
    texts = {name: run.encoder.encode_all(text)["text"] for name, text in words.items()}
    states, _ = pipe.encode_prompt(prompt=PROMPT)
    assert gap(texts["prompt"].float(), states[0].float()) <= 0.05  # bfloat16
    made = []
    for scale in (1.0, 4.0):
        theirs = made_by(pipe, noise(), **texts, true_cfg_scale=scale)
        made.append(ours(run, guidance=scale, negative_prompt=NEGATIVE))
        assert gap(made[-1], theirs) <= 1e-4
    assert gap(made[0], made[1]) > 1e-2

    tensors, _ = compare_tensors(source, run.path, Weights.MODEL)
    assert tensors.different == 0
    export_weights(run.path, tmp_path / "out", ExportOptions(pipeline_from=source))
    again = QwenImagePipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.float32)
    again.set_progress_bar_config(disable=True)
    assert {key: again.scheduler.config[key] for key in SCHEDULER} == SCHEDULER
    assert gap(made_by(again, noise(), **texts, true_cfg_scale=4.0), theirs) <= 1e-5
    pipeline(tmp_path / "edit", "qwen_image_edit")
    with pytest.raises(ConvertError, match=r"reference_latents=0, and QwenImageEditPipeline shows"):
        options = ExportOptions(pipeline_from=tmp_path / "edit" / "pipeline")
        export_weights(run.path, tmp_path / "wrong", options)


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
    files = [tmp_path / f"{n}.png" for n in range(min(most, 2))]
    rng = np.random.default_rng(3)
    for number, file in enumerate(files):
        shape = (22, 50 + 9 * number, 3)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(file)
    pictures = [Image.open(file) for file in files]
    found = run.encoder.encode_beside(PROMPT, pictures)
    texts = {"prompt": found["text"], "negative_prompt": found["null_text"]}
    shown = {"image": pictures if most > 1 else pictures[0]}
    given = {"reference": tuple(map(str, files)), "reference_size": "published"}
    made = []
    for scale in (1.0, 4.0):
        theirs = made_by(pipe, noise(), **texts, **shown, true_cfg_scale=scale)
        made.append(ours(run, guidance=scale, **given))
        assert gap(made[-1], theirs) <= 1e-4
    assert gap(made[0], made[1]) > 1e-2
    with pytest.raises(ValueError, match=r"sees the pictures .*: give --reference FILE"):
        ours(run)

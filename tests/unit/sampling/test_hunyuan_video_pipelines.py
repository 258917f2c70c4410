"""We generate what HunyuanVideo's pipelines of Diffusers do, from their folders and noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import HunyuanVideoPipeline
from PIL import Image
from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.config import Weights
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward, compare_tensors
from dit.sampling.commands.generate_media import generate_opened
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.open_checkpoint import LoadOptions, OpenCheckpoint, open_checkpoint
from dit.sampling.pipeline_card import card_of_pipeline
from dit.sampling.prompts import Prompt
from tests.families.case import gap
from tests.families.hunyuan_video import SHIFT, STEPS, latents_of, made_by, pipeline
from tests.given_noise import from_noise

PROMPT, NEGATIVE = "a red fox & a hen", "blurry"
FRAMES, ROWS, COLUMNS = 3, 4, 6  # of a latent


def noise() -> Tensor:
    return torch.randn(4, FRAMES, ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))


def opened(folder: Path) -> OpenCheckpoint:
    """The pipeline's network, imported, with its encoders and its VAE."""
    done = import_weights(folder / "pipeline", folder / "ours")
    options = LoadOptions(t5_cache_dir=str(folder / "pipeline"))
    return open_checkpoint(done.path, weights="model", options=options)


def texts_of(run: OpenCheckpoint) -> dict[str, Any]:
    prompts = {"prompt": PROMPT, "negative_prompt": NEGATIVE}
    return {name: run.encoder.encode_all(text) for name, text in prompts.items()}


def ours(run: OpenCheckpoint, start: Tensor, image: Path | None = None, **options) -> Tensor:
    """Our latents from the same beginning."""
    _, height, width = run.latent_stride.pixels((FRAMES, ROWS, COLUMNS))
    size = {"height": height, "width": width, "num_video_frames": 4 * FRAMES - 3}
    options = {"num_steps": STEPS, "sampler": "euler", "negative_prompt": NEGATIVE} | options
    asked, prompt = (
        GenerationOptions(**size, **options),
        Prompt(text=PROMPT, image=image and str(image)),
    )
    with from_noise(run.config, start):
        (made,) = generate_opened(run, [prompt], seed=0, options=asked, latents=True)
    assert made.latent_CFHW is not None
    return made.latent_CFHW


@pytest.mark.slow
def test_text_to_video_and_the_way_back(groups, tmp_path: Path) -> None:
    """Told several scales, with and without classifier-free guidance beside."""
    pipe, source = pipeline(tmp_path), tmp_path / "pipeline"
    run = opened(tmp_path)
    objective = run.config.objective
    assert (objective.name, objective.guidance) == ("flow", 1.0)
    assert (objective.flow.flow_shift, objective.flow.sampling_levels) == (SHIFT, "even")
    texts, made = texts_of(run), []
    for told, scale in ((6.0, 1.0), (1.0, 1.0), (6.0, 2.5)):
        theirs = made_by(pipe, noise(), **texts, guidance_scale=told, true_cfg_scale=scale)
        made.append(ours(run, noise(), guidance=scale, distilled_guidance=told))
        assert gap(made[-1], theirs) <= 1e-4
    assert min(gap(made[0], one) for one in made[1:]) > 1e-2
    done = tmp_path / "out"
    export_weights(run.path, done, ExportOptions(pipeline_from=source))
    weights = HunyuanVideoPipeline.from_pretrained(done).transformer.state_dict()
    assert all(torch.equal(weights[n], x) for n, x in pipe.transformer.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("shown", ["latent_concat", "token_replace"])
def test_image_to_video(groups, tmp_path: Path, shown: str) -> None:
    """Of prompts and a picture, from where the pipeline begins: a thousandth of it in the noise.

    Both pipelines show a black picture with a negative prompt.
    """
    pipe = pipeline(tmp_path, shown)
    run, file = opened(tmp_path), tmp_path / "first.png"
    assert run.config.objective.guidance == (None if shown == "latent_concat" else 1.0)
    levels = np.random.default_rng(3).integers(0, 256, (8 * ROWS, 8 * COLUMNS, 3), dtype=np.uint8)
    Image.fromarray(levels).save(file)
    image = Image.open(file)
    assert run.encoder.settings["image_embed_interleave"] == (2 if "concat" in shown else 4)
    with torch.no_grad():
        start, _ = pipe.prepare_latents(
            pipe.video_processor.preprocess(image, 8 * ROWS, 8 * COLUMNS), 1, 4, 8 * ROWS,
            8 * COLUMNS, 4 * FRAMES - 3, latents=noise()[None], image_condition_type=shown,
        )  # fmt: skip
    told = {} if shown == "latent_concat" else {"distilled_guidance": 6.0}
    asked = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "image": image, "guidance_scale": 6.0}
    for scale in (1.0, 3.0):
        theirs = latents_of(pipe, noise(), **asked, true_cfg_scale=scale)
        found = ours(run, start[0], file, guidance=scale, **told)
        # The pipeline leaves the frame of the picture out where it stands beside the noise.
        assert gap(found[:, -theirs.shape[1] :], theirs) <= 1e-4
    more = latents_of(pipe, noise(), **asked, true_cfg_scale=scale, image_embed_interleave=1)
    assert gap(more, theirs) > 1e-3  # the rows of the picture are felt
    with pytest.raises(ValueError, match="sees the first frame beside a prompt: give --image"):
        ours(run, start[0], guidance=scale, **told)
    source = tmp_path / "pipeline"
    assert compare_tensors(source, run.path, Weights.MODEL)[0].different == 0
    verified = compare_forward(source, run.path, Weights.MODEL)
    assert verified.largest <= 1e-4 * verified.scale
    pipeline(tmp_path / "text")
    with pytest.raises(CodecError, match="is that of hunyuanvideo, which does not see a first fr"):
        place = LoadOptions(t5_cache_dir=str(tmp_path / "text/pipeline"))
        open_checkpoint(run.path, weights="model", options=place)
    with pytest.raises(CodecError, match=r"which sees a first frame, .* texts of hunyuanvideo;"):
        card_of_pipeline(source, processor="hunyuanvideo")
    with pytest.raises(ConvertError, match=f"image_condition={shown}, and it feeds no first"):
        to = ExportOptions(pipeline_from=tmp_path / "text/pipeline")
        export_weights(run.path, tmp_path / "out", to)

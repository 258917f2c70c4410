"""HunyuanVideo's pipelines of a first frame, from their folders and noise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from dit.codecs.dataset_card import CodecError
from dit.config import Weights
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.verify import compare_forward, compare_tensors
from dit.sampling.cards import card_of_pipeline
from dit.sampling.commands.load_options import LoadOptions
from dit.sampling.open_checkpoint import open_checkpoint
from dit.sampling.prompts import Prompt
from tests.families.case import NEGATIVE, PROMPT, VIDEO, gap
from tests.families.generation import noise_of, opened, ours
from tests.families.hunyuan_video import latents_of, pipeline
from tests.media_files import image


@pytest.mark.slow
@pytest.mark.parametrize("shown", ["latent_concat", "token_replace"])
def test_image_to_video(groups, tmp_path: Path, shown: str) -> None:
    """Of prompts and a picture, from where the pipeline begins: a thousandth of it in the noise.

    Both pipelines show a black picture with a negative prompt.
    """
    pipe = pipeline(tmp_path, shown)
    run, noise = opened(tmp_path), noise_of(VIDEO)
    frames, rows, columns = VIDEO
    assert run.config.objective.guidance == (None if shown == "latent_concat" else 1.0)
    file = image(tmp_path / "first.png", 8 * columns, 8 * rows)
    first = Image.open(file)
    assert run.encoder.settings["image_embed_interleave"] == (2 if "concat" in shown else 4)
    with torch.no_grad():
        start, _ = pipe.prepare_latents(
            pipe.video_processor.preprocess(first, 8 * rows, 8 * columns), 1, 4, 8 * rows,
            8 * columns, 4 * frames - 3, latents=noise[None], image_condition_type=shown,
        )  # fmt: skip
    told = {} if shown == "latent_concat" else {"distilled_guidance": 6.0}
    asked = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "image": first, "guidance_scale": 6.0}
    for scale in (1.0, 3.0):
        theirs = latents_of(pipe, noise, **asked, true_cfg_scale=scale)
        found = ours(run, start[0], Prompt(text=PROMPT, image=str(file)), guidance=scale, **told)
        # The pipeline leaves the frame of the picture out where it stands beside the noise.
        assert gap(found[:, -theirs.shape[1] :], theirs) <= 1e-4
    more = latents_of(pipe, noise, **asked, true_cfg_scale=scale, image_embed_interleave=1)
    assert gap(more, theirs) > 1e-3  # the rows of the picture are felt
    with pytest.raises(ValueError, match="needs the first frame beside a prompt: give --image"):
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
    with pytest.raises(
        ConvertError, match=f"image_condition={shown}, but the pipeline passes no first"
    ):
        to = ExportOptions(pipeline_from=tmp_path / "text/pipeline")
        export_weights(run.path, tmp_path / "out", to)

"""We generate what HunyuanVideo 1.5's pipelines of Diffusers do, from their folders and noise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from diffusers.guiders import AdaptiveProjectedGuidance, ClassifierFreeGuidance
from PIL import Image

from dit.config import Problems, Weights
from dit.config_loading.validate import check_trainable
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward
from dit.sampling.guiders import open_guider
from dit.sampling.prompts import Prompt
from tests.families.case import NEGATIVE, VIDEO, gap
from tests.families.generation import noise_of, opened, ours
from tests.families.hunyuan_video_15 import QUOTED, made_by, pipeline
from tests.media_files import image

GUIDER = {
    "guidance_scale": 3.0,
    "guidance_rescale": 0.7,
    "start": 0.25,
    "use_original_formulation": True,
}
GUIDERS = {
    "rescaled": lambda: ClassifierFreeGuidance(**GUIDER),
    "projected": lambda: AdaptiveProjectedGuidance(
        guidance_scale=4.0, adaptive_projected_guidance_momentum=-0.5
    ),
}


@pytest.mark.slow
def test_guiders_of_pipelines(groups, tmp_path: Path) -> None:
    """Its own, at another scale, and those that other pipelines have."""
    pipe, folder = pipeline(tmp_path), str(tmp_path / "pipeline")
    run, prompt, start = opened(tmp_path), Prompt(text=QUOTED), noise_of(VIDEO)
    assert len(run.encoder.encode_all(QUOTED)["text_2"]) and not len(run.null["text_2"])
    texts = {"prompt": QUOTED, "negative_prompt": NEGATIVE}
    guided = ours(run, start, prompt, guider=folder)
    assert gap(guided, made_by(pipe, start, **texts)) <= 1e-4
    pipe.guider = pipe.guider.new(guidance_scale=1.0)
    without = ours(run, start, prompt, guidance=1.0, guider=folder)
    assert gap(without, made_by(pipe, start, **texts)) <= 1e-4
    for name, made in GUIDERS.items():
        pipe.guider = made()
        pipe.guider.save_pretrained(tmp_path / name)
        theirs = made_by(pipe, start, **texts)
        # Other prompts in the pack: each sample has a guider, and a running mean, of its own.
        found = ours(run, start, prompt, Prompt(text="a hen"), guider=str(tmp_path / name))
        assert gap(found, theirs) <= 1e-4 and gap(found, guided) > 1e-2
    with pytest.raises(ValueError, match=r"leave out --guidance_rescale"):
        ours(run, start, prompt, guider=folder, guidance_rescale=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("use_meanflow", [False, True])
def test_image_to_video(groups, tmp_path: Path, use_meanflow: bool) -> None:
    """A distilled network is told where a step ends, generates, and is not trained."""
    pipe = pipeline(tmp_path, image=True, use_meanflow=use_meanflow)
    run, start = opened(tmp_path), noise_of(VIDEO)
    # Of the size that the pipeline gives it: its own resizing is not ours.
    file = image(tmp_path / "first.png", 4 * VIDEO[2], 4 * VIDEO[1])
    shown, prompt = Image.open(file), Prompt(text=QUOTED, image=str(file))
    folder, texts = str(tmp_path / "pipeline"), {"prompt": QUOTED, "negative_prompt": NEGATIVE}
    guided = ours(run, start, prompt, guider=folder)
    assert gap(guided, made_by(pipe, start, image=shown, **texts)) <= 1e-4
    pipe.guider = pipe.guider.new(guidance_scale=1.0)
    theirs = made_by(pipe, start, image=shown, **texts)
    # One of text alone beside it: a list of zeros for a batch is none of ours.
    without = ours(run, start, prompt, Prompt(text=QUOTED), guidance=1.0)
    assert gap(without, theirs) <= 1e-4 and gap(without, guided) > 1e-2
    alone = ours(run, start, Prompt(text=QUOTED), guidance=1.0)
    assert gap(alone, without) > 1e-2
    verified = compare_forward(tmp_path / "pipeline", run.path, Weights.MODEL)
    assert verified.largest <= 1e-4 * verified.scale
    if use_meanflow:
        with pytest.raises(ValueError, match=r"sampler heun: .*whole steps \(mean flow\)"):
            ours(run, start, prompt, sampler="heun")
        with pytest.raises(Problems, match=r"model.use_meanflow=true: .*no objective here teaches"):
            check_trainable(run.config.model)
        return
    check_trainable(run.config.model)
    parts = {n: p for n, p in pipe.components.items() if n[:5] not in ("image", "featu")}
    of_text = HunyuanVideo15Pipeline(**parts)
    of_text.set_progress_bar_config(disable=True)
    assert gap(alone, made_by(of_text, start, **texts)) <= 1e-4


def test_a_pipeline_goes_through_our_checkpoint(groups, tmp_path: Path) -> None:
    """Import, verify, export with the other parts: the videos stay, and so does the guider."""
    pipe = pipeline(tmp_path, guider=GUIDERS["rescaled"]())
    source, start = tmp_path / "pipeline", noise_of(VIDEO)
    done = import_weights(source, tmp_path / "ours")
    export_weights(done.path, tmp_path / "out", ExportOptions(pipeline_from=source))
    again = HunyuanVideo15Pipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.float32)
    again.set_progress_bar_config(disable=True)
    for name in ("text_encoder", "text_encoder_2"):  # in the precision of theirs
        setattr(again, name, getattr(pipe, name))
    names = GUIDER.keys()
    for guider in (again.guider, open_guider(tmp_path / "out")):
        assert {name: guider.config[name] for name in names} == GUIDER
    assert again.target_size == pipe.target_size != 640
    texts = {"prompt": QUOTED, "negative_prompt": NEGATIVE}
    assert gap(made_by(again, start, **texts), made_by(pipe, start, **texts)) <= 1e-4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"guider_config.json cannot be read"),
        (
            '{"_class_name": "SkipLayerGuidance"}',
            r"'SkipLayerGuidance', which is not supported .Classifier",
        ),
        ("[]", r"is of class None, which is not supported"),
        (
            '{"_class_name": "ClassifierFreeGuidance", "start": 7}',
            r"not a valid configuration of Classifier",
        ),
        (
            '{"_class_name": "ClassifierFreeGuidance", "guidance_scale": 1e39}',
            r"has guidance_scale=1e\+39, which is beyond 1000",
        ),
    ],
)
def test_what_is_no_guider(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "guider_config.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        open_guider(tmp_path)

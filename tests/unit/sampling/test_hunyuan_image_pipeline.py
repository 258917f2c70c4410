"""HunyuanImage 2.1's two guiders, and its distilled network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import HunyuanImagePipeline

from dit.config import Problems, Weights
from dit.config_loading.validate import check_trainable
from dit.convert.export import ExportOptions, export_weights
from dit.convert.verify import compare_forward
from dit.sampling.guiders import open_guiders
from tests.families.case import NEGATIVE, PICTURE, PROMPT, gap
from tests.families.generation import all_of_ours, noise_of, opened, ours
from tests.families.hunyuan_image import GUIDER, OF_QUOTED, QUOTED, made_by, pipeline


@pytest.mark.slow
def test_guiders_of_quoted_and_other_prompts_in_one_pack(groups, tmp_path: Path) -> None:
    """Each prompt has its own, and exports keep both."""
    pipe, source, start = pipeline(tmp_path), tmp_path / "pipeline", noise_of(PICTURE)
    run = opened(tmp_path)
    for text in (QUOTED, PROMPT):
        assert len(run.encoder.encode_all(text)["text"]) == run.encoder.count(text)
    assert len(run.encoder.encode_all(QUOTED)["text_2"]) and not len(run.null["text_2"])
    both = [
        made_by(pipe, start, prompt=text, negative_prompt=NEGATIVE) for text in (QUOTED, PROMPT)
    ]
    guided = all_of_ours(run, start, QUOTED, PROMPT, guider=str(source))
    assert max(map(gap, guided, both)) <= 1e-4
    # One scale for both, where it is asked for.
    pipe.guider, pipe.ocr_guider = (one.new(guidance_scale=1.0) for one in (pipe.guider,) * 2)
    without = ours(run, start, QUOTED, guidance=1.0, guider=str(source))
    assert gap(without, made_by(pipe, start, prompt=QUOTED)) <= 1e-4
    export_weights(run.path, tmp_path / "out", ExportOptions(pipeline_from=source))
    again = HunyuanImagePipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.float32)
    ours_too = open_guiders(tmp_path / "out")
    for usual, quoted in ((again.guider, again.ocr_guider), (ours_too.usual, ours_too.of_quoted)):
        assert {name: usual.config[name] for name in GUIDER} == GUIDER
        assert {name: quoted.config[name] for name in OF_QUOTED} == OF_QUOTED


def test_the_distilled_network_generates_alone(groups, tmp_path: Path) -> None:
    """It is told a scale and where a step ends, in one pass, and is not trained."""
    pipe = pipeline(tmp_path, distilled=True)
    run = opened(tmp_path)
    assert run.config.objective.guidance == 3.25
    made = []
    for told in (None, 1.0):
        options = {} if told is None else {"distilled_guidance_scale": told}
        theirs = made_by(pipe, noise_of(PICTURE), prompt=QUOTED, **options)
        made.append(ours(run, noise_of(PICTURE), QUOTED, distilled_guidance=told))
        assert gap(made[-1], theirs) <= 1e-4
    assert gap(*made) > 1e-2
    verified = compare_forward(tmp_path / "pipeline", run.path, Weights.MODEL)
    assert verified.largest <= 1e-4 * verified.scale
    with pytest.raises(ValueError, match=r"sampler heun: .*whole steps \(mean flow\)"):
        ours(run, noise_of(PICTURE), QUOTED, sampler="heun")
    with pytest.raises(Problems, match=r"model.use_meanflow=true: .*no objective here teaches"):
        check_trainable(run.config.model)

"""Pictures of OmniGen2 are those of its public code, with references and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dit.config import RunConfig
from dit.config_loading import ConfigError, load_config
from dit.convert.import_ import import_weights
from dit.models.omnigen2.family import TINY, OmniGen2Config
from dit.models.registry import family_of
from dit.sampling.commands.generate_media import options_of_network
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.generate import Request, generate_latents
from dit.sampling.ode_solvers import Guidance, guided
from dit.sampling.reference_guidance import guided_by_references
from dit.sampling.validation.samples import settings_of
from dit.train.checkpoint.state_dict import load_weights
from tests.families import omnigen2
from tests.families.case import gap
from tests.packs import random_pack


def test_latents_are_those_of_the_public_code(groups, tmp_path: Path) -> None:
    """All in one pack for each pair of scales; the third and fourth ask for three predictions."""
    omnigen2.random_omnigen2().save_pretrained(tmp_path / "hf")
    told = ["model.reference_latents=2"]
    run = import_weights(tmp_path / "hf", tmp_path / "ours", objective=told)
    network = family_of(run.config.model).network()(run.config.model, groups).eval()
    load_weights(run.path, [network], groups, averaged=False)
    stored, made = omnigen2.stored(), []
    for number, (references, scale, of_references, end) in enumerate(omnigen2.CALLS):
        inputs, negative, _ = omnigen2.given(references)
        size: dict = {"latent_FHW": omnigen2.SIZE, "fps": float("nan"), "seed": omnigen2.SEED}
        keys = {"sampling_steps": omnigen2.STEPS, "sampler": "euler", "guidance": scale}
        keys |= {"reference_guidance": of_references}
        asked_of_run = [f"validation.{key}={value}" for key, value in keys.items()]
        settings = settings_of(load_config(run.config, overrides=asked_of_run))
        settings = replace(settings, guidance_steps=min(end + 1 / omnigen2.STEPS, 1))
        asked = [Request(inputs=inputs, negative=negative, **size)]
        others = omnigen2.given(0)
        asked.append(Request(inputs=others[0], negative=others[1], **{**size, "seed": 1}))
        found, _ = generate_latents(network, asked, config=run.config, settings=settings)
        made.append(found[:, 0])
        assert gap(made[-1], stored[f"call.{number}"]) <= 1e-4, number
    assert min(gap(one, other) for one, other in zip(made[1:], made, strict=False)) > 1e-2


@pytest.mark.parametrize("of_references", [1.0, 2.0])
def test_rescaling_and_levels_are_those_of_other_guidance(of_references: float) -> None:
    """Where references change nothing; the last sample lies outside of the interval."""
    model = OmniGen2Config(name="custom", **TINY["omnigen2"])
    batch = random_pack([(1, 3, 5), (1, 2, 4), (1, 2, 2)], [3, 1, 2], model=model)
    assert any(batch.references)
    input_TC, level_N = torch.randn(2, *batch.latent_TC.shape), torch.tensor([500.0, 300.0, 900.0])
    given = Guidance(scale=4, between=(0, 600), of_references=of_references, rescale=0.7)

    def both(x_TC: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x_TC[0] * batch.is_real_T[:, None]

    def none(x_TC: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x_TC[1] * batch.is_real_T[:, None]

    wanted = guided(both, none, given, batch)(input_TC, level_N)
    found = guided_by_references(both, none, none, given, batch)(input_TC, level_N)
    torch.testing.assert_close(found, wanted)
    assert gap(wanted, both(input_TC, level_N)) > 1e-2


def _run(*tokens: str, references: int = 1) -> RunConfig:
    sizes = {**TINY["omnigen2"], "reference_latents": references}
    return load_config(RunConfig(model=OmniGen2Config(name="custom", **sizes)), overrides=tokens)


def test_the_scale_is_that_of_the_run_unless_given() -> None:
    run: Any = SimpleNamespace(config=_run("validation.reference_guidance=2"), path=Path("run"))
    for asked, used in ((None, 2), (1.5, 1.5), (1.0, 1)):
        options = options_of_network(GenerationOptions(reference_guidance=asked), run)
        assert options.reference_guidance == used
    with pytest.raises(ConfigError, match=r"validation: reference_guidance=2000.* 1000"):
        _run("validation.reference_guidance=2000")


def test_a_scale_without_references_is_refused() -> None:
    words = (
        r"eference_guidance.2(\.0)?: .*model.family=omnigen2 .*model.reference_latents=0.; leave"
    )
    with pytest.raises(ConfigError, match=words):
        _run("validation.reference_guidance=2", references=0)
    run: Any = SimpleNamespace(config=_run(references=0), path=Path("run"))
    with pytest.raises(ValueError, match=words):
        options_of_network(GenerationOptions(reference_guidance=2.0), run)


def test_a_scale_of_references_needs_guidance() -> None:
    run: Any = SimpleNamespace(config=_run(), path=Path("run"))
    with pytest.raises(
        ValueError, match=r"--reference_guidance 2.0 .* without guidance .* --guidance"
    ):
        options_of_network(GenerationOptions(reference_guidance=2.0, guidance=1.0), run)

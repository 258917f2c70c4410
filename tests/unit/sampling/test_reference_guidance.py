"""Pictures of OmniGen2 are those of its public code, with references and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dit.config import Sampler
from dit.convert.import_ import import_weights
from dit.models.omnigen2.family import TINY, OmniGen2Config
from dit.models.registry import family_of
from dit.sampling.generate import Request, SamplingSettings, generate_latents
from dit.sampling.ode_solvers import Guidance, guided
from dit.sampling.reference_guidance import guided_by_references
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
        settings = SamplingSettings(
            num_steps=omnigen2.STEPS,
            guidance=scale,
            reference_guidance=of_references,
            guidance_steps=min(end + 1 / omnigen2.STEPS, 1),
            sampler=Sampler.EULER,
        )
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

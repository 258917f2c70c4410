"""Pictures of OmniGen2 are those of its public code, with references and without."""

from __future__ import annotations

from pathlib import Path

from dit.config import Sampler
from dit.convert.import_ import import_weights
from dit.models.registry import family_of
from dit.sampling.generate import Request, SamplingSettings, generate_latents
from dit.train.checkpoint.state_dict import load_weights
from tests.families import omnigen2
from tests.families.case import gap


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

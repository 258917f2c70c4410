"""A sample trains from its first frame or from its text alone, where a network may do both."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from dit.batch import AdapterDropout, LatentSample, PackedBatch, PictureTexts
from dit.config import ObjectiveConfig, Problems, RunConfig
from dit.config_loading.validate import check_objective_inputs
from dit.data.pack import pack_samples
from dit.models.hunyuan_video_15.family import TINY
from dit.models.patch_layout import PatchLayout
from dit.models.registry import family_of, named_model
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem, validation_pack

MODEL = family_of(named_model("hunyuanvideo_15")).config(name="custom", **TINY["hunyuanvideo_15"])
COUNT = 200
NULL = {"text": torch.full((1, 24), 9.0), "text_2": torch.zeros(0, 20)}
PICTURE = ("image_embed", "first_frame_latent")


def config(**objective: Any) -> RunConfig:
    told = ObjectiveConfig(name="flow", text_dropout=0.0, flow_shift=5.0)
    return RunConfig(model=MODEL, objective=replace(told, **objective))


def samples() -> list[LatentSample]:
    """Every third has no picture, and every second no words in quotation marks."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"text_2": (3, 20), "image_embed": (5, 12), "first_frame_latent": (4, 1, 4, 2)}
    found = []
    for number in range(COUNT):
        others = {n: torch.randn(size, generator=rng) for n, size in shapes.items()}
        left_out = (*PICTURE * (number % 3 == 0), *("text_2",) * (number % 2))
        found.append(
            LatentSample(
                key=str(number),
                latent_CFHW=torch.randn(4, 3, 4, 2, generator=rng),
                text_LE=torch.randn(4, 24, generator=rng),
                fps=24.0,
                others={n: x for n, x in others.items() if n not in left_out},
            )
        )
    return found


LAYOUT = PatchLayout.of(config())


def trained(pack: PackedBatch, step: int = 0, **options: Any) -> PackedBatch:
    objective = config(**options).objective
    made = {"seed": 3, "step": step, "null": NULL, "options": objective}
    batch, _ = training_problem(training_objective(objective), pack, **made)
    return batch.without(AdapterDropout)


def without(every: list[LatentSample], kept: list[bool]) -> PackedBatch:
    """The pack of samples that never had a picture where it is not kept."""
    pairs = zip(every, kept, strict=True)
    return pack_samples(
        [
            one
            if keep
            else replace(one, others={n: x for n, x in one.others.items() if n not in PICTURE})
            for one, keep in pairs
        ],
        LAYOUT,
    )


@pytest.mark.parametrize(
    ("key", "value", "rate"),
    [("image_condition_probability", 0.3, 0.3), ("image_dropout", 0.6, 0.4)],
)
def test_each_sample_is_of_text_or_of_a_picture(key: str, value: float, rate: float) -> None:
    """A pack with dropped pictures is the pack of samples that never had them."""
    every = samples()
    pack = pack_samples(every, LAYOUT)
    assert pack.method(PictureTexts) == PictureTexts(names=("image_embed",))
    rates, seen = [], []
    for step in range(3):
        batch = trained(pack, step, **{key: value})
        kept = [b > a for a, b in pairwise(batch.text_offsets["image_embed"])]
        wanted = trained(without(every, kept), step)
        assert batch.text_offsets == wanted.text_offsets
        for name, tensor in wanted.tensors.items():
            assert torch.equal(batch.tensors[name], tensor), name
        had = [keep for n, keep in enumerate(kept) if n % 3]
        assert not any(keep for n, keep in enumerate(kept) if n % 3 == 0)
        rates.append(sum(had) / len(had))
        seen.append(kept)
    mean = sum(rates) / len(rates)
    assert abs(mean - rate) < 4 * (0.25 / (2 * COUNT)) ** 0.5
    assert seen[0] != seen[1]
    untouched = pack_samples(every, LAYOUT)
    assert all(torch.equal(pack.tensors[n], x) for n, x in untouched.tensors.items())


def test_validation_draws_the_same_pictures_each_time() -> None:
    pack, told = pack_samples(samples(), LAYOUT), config(image_condition_probability=0.5).objective
    first, again = (validation_pack(pack, seed=1, options=told) for _ in range(2))
    other = validation_pack(pack, seed=2, options=told)
    assert first.text_offsets == again.text_offsets != other.text_offsets
    assert validation_pack(pack, seed=1, options=config().objective) is pack


def test_a_dropped_caption_keeps_the_picture() -> None:
    pack = pack_samples(samples(), LAYOUT)
    batch = trained(pack, text_dropout=1.0)
    assert batch.text_LE.eq(9).all() and not len(batch.texts["text_2"])
    for name in ("condition_TC", "texts.image_embed"):
        assert torch.equal(batch.tensors[name], pack.tensors[name])


def test_what_the_network_takes() -> None:
    for legal in ({"image_condition_probability": 0.3}, {"image_dropout": 0.2}):
        check_objective_inputs(config(**legal))
    with pytest.raises(Problems, match=r"given_frames=\[1, 1\].* takes no given frames"):
        check_objective_inputs(config(given_frames=(1, 1)))

"""`check_layouts.py` on packs with a sound, which it gives some samples; `test_ltx2.py` starts it.

Nothing reads sounds of shards yet: here each pack gets a stream, whose lengths, levels and noise
follow from its identity, so that all layouts see the same.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dit.batch import WHOLE, CleanTokens, PackedBatch, TokenStream
from dit.layout_check import program
from dit.objectives import training_target
from dit.train import reference_passes
from recipes.check_layouts import layout_check

MULTIPLE, WIDTH = 8, 3
LONGEST = 11

_drawn = reference_passes.training_problem


def sound_of(batch: PackedBatch, rng: torch.Generator) -> TokenStream:
    """Every second sample has one, of 1 to 11 latents, of which some begin with given ones."""
    samples, device = batch.num_samples, batch.latent_TC.device
    lengths = [
        0 if (n + batch.pack_id) % 2 else int(torch.randint(1, LONGEST + 1, (), generator=rng))
        for n in range(samples)
    ]
    given = [length // 3 for length in lengths]
    sizes = [-(-length // MULTIPLE) * MULTIPLE for length in lengths]
    place_T = torch.cat([torch.arange(size) for size in sizes])
    segment_T = torch.arange(samples).repeat_interleave(torch.tensor(sizes))
    is_real_T = place_T < torch.tensor(lengths)[segment_T]
    is_given_T = place_T < torch.tensor(given)[segment_T]
    latent_TC = torch.randn(len(place_T), WIDTH, generator=rng)
    stream = TokenStream(
        latent_TC=latent_TC,
        position_TA=place_T[:, None].float() / 500,
        segment_T=segment_T,
        is_real_T=is_real_T,
        is_target_T=is_real_T & ~is_given_T,
        level_row_T=segment_T + samples * is_given_T,
        grids=tuple((length, 1, 1) for length in lengths),
        starts=tuple(accumulate(sizes, initial=0)),
        share=WHOLE,
        methods={CleanTokens: CleanTokens(level=0.0, counts=tuple(given))} if any(given) else {},
    )
    return stream.with_tensors({name: x.to(device) for name, x in stream.tensors.items()})


def with_sound(objective: Any, batch: PackedBatch, **told: Any) -> Any:
    """The problem of a pack, and that of its sound, whose levels and noise are its own."""
    batch, problem = _drawn(objective, batch, **told)
    rng = torch.Generator().manual_seed(batch.pack_id % 2**31 + told["step"])
    sound = sound_of(batch, rng)
    noise_TC = torch.randn(sound.latent_TC.shape, generator=rng).to(sound.latent_TC)
    level_N = torch.rand(batch.num_samples, generator=rng)
    own = training_target._problem_at(objective, sound, level_N, noise_TC)
    real_T1 = sound.is_real_T[:, None]
    own = replace(own, input_TC=own.input_TC.masked_fill(~real_T1, 0))
    others = {"sound": sound}
    return replace(batch, others=others), replace(problem, others={"sound": own})


if __name__ == "__main__":
    program.STEPS = 2
    with patch.object(reference_passes, "training_problem", with_sound):
        script = Path(__file__).resolve()
        sys.exit(program.check_layouts(sys.argv[1:], base=layout_check(), script=script))

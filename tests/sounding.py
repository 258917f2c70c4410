"""Packs of a network with sound: six mixed samples, and each of them alone."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dit.batch import LATENTS, SOUND, WHOLE, LatentSample, PackedBatch, Problem, Route
from dit.config import ModelConfig, ObjectiveConfig, Precision
from dit.data.pack import pack_samples
from dit.distributed.model_parallel import split_tokens
from dit.models.patch_layout import PatchLayout
from dit.models.registry import family_of
from dit.models.sound_dit.family import FAMILY, SoundDitConfig
from dit.models.stacks.token_routing import kept_pack
from dit.objectives.pack_draws import with_clean_tokens
from dit.objectives.registry import training_objective
from dit.objectives.token_draws import draw_route
from dit.objectives.training_target import problem_of_streams
from dit.train.loss import Loss, loss_of

# A video with sound; one without; all frames given; the sound given; a prefix of the sound; a
# picture without sound.
GRIDS = [(3, 2, 3), (2, 2, 2), (2, 3, 2), (3, 2, 2), (2, 2, 4), (1, 4, 4)]
TEXTS = [5, 0, 7, 3, 9, 4]
SOUNDS = [7, 0, 5, 9, 11, 0]
GIVEN_TOKENS = [6, 0, 12, 0, 0, 0]
GIVEN_SOUND = [0, 0, 0, 9, 4, 0]
FLOW = ObjectiveConfig(name="flow", sound_weight=0.5)
ROUTED = {"num_layers": 4, "route_from": 1, "route_to": 2}
"""Fields of a network whose layers in the middle see a part of the latents."""


def sound_model(**changes: Any) -> SoundDitConfig:
    """A tiny float32 network of `sound_dit`, with `changes`."""
    tiny = {"name": "custom", **FAMILY.tiny["sound_dit_s"], "num_layers": 2}
    return SoundDitConfig(**(tiny | {"precision": Precision.FP32} | changes))


def sound_layout(model: ModelConfig, *, multiple: int = 4) -> PatchLayout:
    family = family_of(model)
    return PatchLayout(
        patch_temporal=model.patch_temporal,
        patch_spatial=model.patch_spatial,
        sample_multiple=multiple,
        positions=family.positions(model),
        inputs=family.inputs(model),
        draws_given_frames=True,
        clean_sound_level=0.0,
    )


def sound_samples(model: Any) -> list[LatentSample]:
    rng = torch.Generator().manual_seed(0)
    made = []
    for n, ((f, h, w), text, frames) in enumerate(zip(GRIDS, TEXTS, SOUNDS, strict=True)):
        p = model.patch_spatial
        heard = torch.randn(model.sound_channels, frames, generator=rng)
        made.append(
            LatentSample(
                key=f"k{n}",
                latent_CFHW=torch.randn(model.in_channels, f, h * p, w * p, generator=rng),
                text_LE=torch.randn(text, model.crossattn_emb_size, generator=rng),
                fps=24.0 if f == 1 else 8.0,
                others={SOUND: heard} if frames else {},
            )
        )
    return made


class Mixed:
    """The pack of some of the six samples, whose levels and noise are those of the pack of all."""

    def __init__(self, model: ModelConfig, chosen: list[int] | None = None):
        every = range(len(GRIDS)) if chosen is None else chosen
        samples = sound_samples(model)
        layout = sound_layout(model)
        batch = pack_samples([samples[n] for n in every], layout)
        batch = with_clean_tokens(batch, [GIVEN_TOKENS[n] for n in every])
        sound = with_clean_tokens(batch.others[SOUND], [GIVEN_SOUND[n] for n in every])
        self.batch: PackedBatch = replace(batch, others={SOUND: sound})
        levels = {
            LATENTS: torch.linspace(0.1, 0.9, len(GRIDS))[list(every)],
            SOUND: torch.linspace(0.8, 0.2, len(GRIDS))[list(every)],
        }
        noise = {name: self._noise(name, every) for name in levels}
        objective = training_objective(FLOW)
        self.problem: Problem = problem_of_streams(objective, self.batch, levels, noise)

    def _noise(self, name: str, every: Any) -> Tensor:
        stream = self.batch.streams[name]
        noise_TC = torch.zeros(stream.latent_TC.shape)
        for sample, number in enumerate(every):
            rng = torch.Generator().manual_seed(100 + number + 50 * (name == SOUND))
            first, count = stream.starts[sample], stream.num_tokens[sample]
            noise_TC[first : first + count] = torch.randn(
                count, stream.latent_TC.shape[1], generator=rng
            )
        return noise_TC

    def on_one_rank(self, multiple: int = 4) -> tuple[PackedBatch, Problem]:
        return split_tokens(self.batch, self.problem, share=WHOLE, multiple=multiple)


def trained(
    network: nn.Module, mixed: Mixed, options: ObjectiveConfig = FLOW
) -> tuple[dict[str, Tensor], dict[str, Tensor], Loss]:
    """Outputs of both streams, and gradients of the summed loss."""
    batch, problem = mixed.on_one_rank()
    network.zero_grad()
    made = network(problem.input_TC, problem.level_M, batch)
    loss = loss_of(batch, problem, made, options)
    loss.total.backward()
    gradients = {name: p.grad.clone() for name, p in network.named_parameters()}
    return {name: x.detach() for name, x in made.items()}, gradients, loss


def assert_each_as_alone(network: Any, options: ObjectiveConfig = FLOW) -> None:
    """Asserts that outputs, losses and gradients of the six samples are those of each alone.

    Every weight of `network` that any pack trains has a gradient. If it has a route, layers inside
    see all of the sound.
    """
    model = network.model
    whole = Mixed(model)
    if (route := model.token_route) is not None:
        whole.batch = draw_route(whole.batch, route, torch.Generator().manual_seed(5))
        assert kept_pack(whole.batch, route).others[SOUND] is whole.batch.others[SOUND]
    made, gradients, loss = trained(network, whole, options)
    idle = network.parameters_without_gradient()
    for name, gradient in gradients.items():
        assert gradient.any() != any(fnmatchcase(name, pattern) for pattern in idle), name
    sums, total, count = {}, 0.0, 0
    for number in range(len(GRIDS)):
        alone = Mixed(model, [number])
        if (draw := whole.batch.method(Route)) is not None:
            span = slice(*whole.batch.starts[number : number + 2])
            alone.batch = alone.batch.with_method(Route(move_T=draw.move_T[span]))
        own, own_gradients, own_loss = trained(network, alone, options)
        for name, stream in alone.batch.streams.items():
            real = stream.num_tokens[0]
            first = whole.batch.streams[name].starts[number]
            torch.testing.assert_close(
                own[name][:real], made[name][first : first + real], rtol=1e-5, atol=1e-5
            )
        sums = {n: sums.get(n, 0) + g for n, g in own_gradients.items()}
        total, count = total + own_loss.total.item(), count + int(own_loss.count)
    assert loss.total.item() == pytest.approx(total, rel=1e-5) and int(loss.count) == count
    for name, gradient in gradients.items():
        assert (sums[name] - gradient).norm() <= 3e-5 * gradient.norm(), name

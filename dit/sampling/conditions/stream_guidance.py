"""Guidance of networks with sound: up to four predictions, and scales for each stream.

With the scales g, s and m of a stream (frames, or sound) its clean latent is

    own + (g - 1) (own - negative) + s (own - values) + (m - 1) (own - alone)

`own` is predicted for the prompt, `negative` for the negative prompt, `values` with self-attention
in some layers replaced by its values (spatio-temporal guidance, arXiv:2411.18664), and `alone` by
streams that do not attend to each other. Then guidance rescale restores the standard deviation of
`own`. Source: Diffusers' `LTX2Pipeline`.
"""

# C patch features, T tokens of all streams, N samples

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dit.batch import Perturbation
from dit.objectives.objective import SamplingPath, per_token
from dit.objectives.training_target import with_given_tokens
from dit.sampling.conditions.sound import JointStreams
from dit.sampling.conditions.stream_scales import StreamGuidance, pair
from dit.sampling.ode_solvers import Guidance, Network, StepLevels, deviations


class _Term(NamedTuple):
    """A prediction from which guidance moves away."""

    streams: JointStreams
    weights: Sequence[float]
    """Factors of (own - prediction), of frames and of sound."""

    @property
    def acts(self) -> bool:
        return any(self.weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPredictions:
    """The streams of a pack with prompts and with negative prompts, and what predicts for them."""

    own: JointStreams
    negative: JointStreams
    model: Any
    path: SamplingPath
    steps: StepLevels
    noise_SN: Tensor
    """Noise levels of the schedule for each of the S steps and N samples."""

    def guided(self, guide: Guidance, more: StreamGuidance) -> Network:
        """The network with guidance; `guide` has the scales of frames and the levels with guidance.

        A prediction that no scale uses is not computed.
        """
        text, others = pair(guide.scale, more.audio_guidance), self.own
        layers = Perturbation(value_layers=more.stg_blocks)
        terms = [
            _Term(self.negative, [scale - 1 for scale in text]),
            _Term(others.perturbed(layers), pair(more.stg_scale, more.audio_stg_scale)),
            _Term(
                others.perturbed(Perturbation(isolated=True)),
                [scale - 1 for scale in pair(more.modality_scale, more.audio_modality_scale)],
            ),
        ]
        own = self.own.network(self.model, self.path)
        weaker = [
            (one.streams.network(self.model, self.path), one.weights) for one in terms if one.acts
        ]
        rescale = pair(guide.rescale, more.audio_guidance_rescale)

        def network(input_TC: Tensor, level_N: Tensor) -> Tensor:
            own_TC = own(input_TC, level_N).float()
            acts_N = guide.acts(level_N)
            if not weaker or not bool(acts_N.any()):
                return own_TC
            mixed_TC, acts_T1 = own_TC, per_token(acts_N, self.own.row)
            for predicted, weights in weaker:
                away_TC = own_TC - predicted(input_TC, level_N).float()
                mixed_TC = mixed_TC + acts_T1 * self.own.per_token(weights).to(own_TC) * away_TC
            return self._rescaled(mixed_TC, own_TC, input_TC, level_N, rescale)

        return network

    def _rescaled(
        self,
        mixed_TC: Tensor,
        own_TC: Tensor,
        input_TC: Tensor,
        level_N: Tensor,
        rescale: Sequence[float],
    ) -> Tensor:
        """The guided output, with standard deviations of clean latents moved to those of `own_TC`.

        `rescale` has phi of frames and of sound.
        """
        if not any(rescale):
            return mixed_TC
        row, path = self.own.row, self.path
        noise_N = self.noise_SN[self.steps.number(level_N)].to(input_TC.device)
        noise_T1 = per_token(noise_N, row)
        state_TC = with_given_tokens(input_TC, row).double()
        state_TC = state_TC / path.network_input(torch.ones_like(noise_T1), noise_T1)

        def latents(raw_TC: Tensor) -> Tensor:
            return path.predict(state_TC, raw_TC.double(), noise_T1).latent_TC

        own_latent_TC, latent_TC = latents(own_TC), latents(mixed_TC)
        before, after = (self.own.apart(x_TC) for x_TC in (own_latent_TC, latent_TC))
        factors = [
            per_token(1 + phi * (deviations(before[name], one) / deviations(x_TC, one) - 1), one)
            for phi, (name, x_TC), one in zip(
                rescale, after.items(), self.own.pack.streams.values(), strict=False
            )
        ]
        # `predict` is affine, so an output that leads to another latent follows from its slope.
        slope_TC = latents(mixed_TC + 1) - latent_TC
        change_TC = latent_TC * (torch.cat(factors).double() - 1)
        return (mixed_TC + change_TC / slope_TC).float()

"""Generates latents from requests, many at once through packing.

1. group    requests -> packs that fit
2. sample   noise from each request's own seed -> latents, with guidance
"""

# C latent channels; F H W frames, rows, columns of a latent; L text tokens, E text width
# T packed tokens, N samples

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dit.batch import LATENTS, TEXT, LatentSample, PackedBatch, StepEnd
from dit.bin_packing import best_fit_decreasing
from dit.config import ModelConfig, ObjectiveConfig, RunConfig, Sampler
from dit.data.cook import Expected, check_inputs
from dit.data.pack import SampleSize, pack_samples
from dit.data.rejections import SampleRefused
from dit.models.family import InputKind, NullInput
from dit.models.patch_layout import PatchLayout
from dit.models.positions import unpack_latents
from dit.models.registry import family_of, has_sound
from dit.objectives.objective import SamplingPath
from dit.objectives.registry import sampling_path
from dit.objectives.training_target import with_clean_level, with_given_tokens
from dit.pack_wire import pack_to
from dit.progress import Track, no_progress
from dit.sampling.conditions.sound import (
    JointStreams,
    SoundRequest,
    check_sound,
    layout_with_given,
    with_given,
)
from dit.sampling.conditions.stream_guidance import StreamPredictions
from dit.sampling.conditions.stream_scales import StreamGuidance
from dit.sampling.conditions.tokens import (
    Condition,
    ConditionedSteps,
    ConditionTokens,
    layout_with_room,
    own_latents,
    placed,
    step_noise,
)
from dit.sampling.experts import GuidedPair
from dit.sampling.guiders import Guiders, guided_by
from dit.sampling.ode_solvers import (
    Guidance,
    Network,
    StepLevels,
    guided,
    guided_at_first,
    initial_noise,
    sample,
)
from dit.sampling.reference_guidance import guided_by_references, without_references

Watch = Callable[[list[Tensor]], None]
"""A function that gets the predicted clean latents [C, F, H, W] of a pack's samples at each step.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One picture or video to generate."""

    inputs: Mapping[str, Tensor]  # inputs of the network besides the latent, by name
    # Inputs of the prediction that guidance moves away from: those of an empty caption or of a
    # negative prompt. Inputs that are missing here are taken from `inputs`.
    negative: Mapping[str, Tensor]
    latent_FHW: tuple[int, int, int]  # size in latent cells
    fps: float  # NaN for a picture
    seed: int  # of its noise, which depends neither on other requests nor on the layout
    conditions: tuple[Condition, ...] = ()  # pictures and clips that it shows
    sound: SoundRequest | None = None  # the sound to generate; None: no sound
    # Latents that get noise of the first level in place of pure noise, for networks with sound.
    # Either all requests of a call have them, or none.
    start: Generated | None = None


class Generated(NamedTuple):
    """The latents that were generated for a request, whitened, float32."""

    latent_CFHW: Tensor
    sound_KA: Tensor | None
    """The latent of the sound, [K, A]; None for a sample without sound."""

    def on_host(self) -> Generated:
        """A copy in host memory."""
        return Generated(
            self.latent_CFHW.cpu(), None if self.sound_KA is None else self.sound_KA.cpu()
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    """Settings of the sampler and of guidance."""

    num_steps: int = 35
    guidance: float = 1.0
    """Guidance scale g in uncond + g * (cond - uncond); 1: no guidance, and half the work."""
    reference_guidance: float = 1.0
    """Scale i of guidance by references (`dit.sampling.reference_guidance`); 1 saves a network
    call."""
    sampler: Sampler = Sampler.HEUN
    guidance_interval: tuple[float, float] | None = None
    """Lowest and highest noise level (sigma of EDM, t of flow matching) with guidance."""
    guidance_rescale: float = 0.0
    """Guidance rescale phi, 0 to 1: 1 restores the standard deviation without guidance."""
    guidance_steps: float = 1.0
    """Fraction of the steps, from the first on, that have guidance with scale `guidance`."""
    guidance_after: float = 1.0
    """Guidance scale of the other steps; 1: no guidance."""
    guidance_least_norm: float = 0.0
    """Least fraction of the guided norm (`Guidance.least_norm`), for families that restore
    norms."""
    condition_noise: float = 0.0
    """At each step conditions of strength 1 get noise of this factor times the square of the step's
    level."""
    guiders: Guiders | None = None
    """Guiders of a Diffusers pipeline (`guiders.open_guiders`), which replace the guidance above.
    """
    of_streams: StreamGuidance = field(default_factory=StreamGuidance)
    """Further guidance of networks with sound; the scales above are then those of the frames."""

    def guide(self, path: SamplingPath, model: ModelConfig) -> Guidance:
        """The guidance for `model`; its interval is converted from noise levels to timesteps."""
        between = None
        if self.guidance_interval is not None:
            levels = torch.tensor(self.guidance_interval, dtype=torch.float64)
            low, high = path.network_level(levels).float().tolist()
            between = low, high
        return Guidance(
            scale=self.guidance,
            between=between,
            of_references=self.reference_guidance,
            rescale=self.guidance_rescale,
            keeps_norm=family_of(model).objective.keeps_norm(model),
            least_norm=self.guidance_least_norm,
            patch=(model.patch_temporal, model.patch_spatial),
        )


def generate_latents(
    model: nn.Module,
    requests: Sequence[Request],
    *,
    config: RunConfig,
    settings: SamplingSettings,
    track: Track = no_progress,
    watch: Watch | None = None,
) -> list[Tensor]:
    """Latents [C, F, H, W], whitened, float32, one for each of `requests`, in their order.

    The arguments and errors are those of `generate_streams`; generated sound is dropped.
    """
    told: Any = {"config": config, "settings": settings, "track": track, "watch": watch}
    return [one.latent_CFHW for one in generate_streams(model, requests, **told)]


def generate_streams(
    model: nn.Module,
    requests: Sequence[Request],
    *,
    config: RunConfig,
    settings: SamplingSettings,
    track: Track = no_progress,
    watch: Watch | None = None,
) -> list[Generated]:
    """Generates a latent, and that of its sound if any, for each of `requests`, in their order.

    `track` shows progress in steps of the sampler, summed over all packs. At each step `watch` gets
    the predicted clean latents of the samples in its pack.

    Raises:
        ValueError: a request lacks an input that the network needs, or patches do not divide its
            size; the network was distilled for other steps than the sampler's; or the network or
            sampler takes no conditions.
    """
    _check_settings(requests, config, settings)
    samples = check_requests(requests, config)
    layout = layout_with_room(config, [one.conditions for one in requests])
    layout = layout_with_given(layout, [one.sound for one in requests])
    lengths = [SampleSize.of(sample, layout).tokens for sample in samples]
    # A sample that is longer than the packs of training has a pack of its own.
    capacity = max([config.dataset.task_encoder_seq_length, *lengths])
    latents: dict[int, Generated] = {}
    groups = best_fit_decreasing(lengths, capacity=capacity)
    with track("sampling steps", len(groups) * settings.num_steps, 0) as advance:

        def after_step(predicted: Callable[[], list[Tensor]]) -> None:
            advance(1)
            if watch is not None:
                watch(predicted())

        for members in groups:
            chosen = {i: requests[i] for i in members}
            against = [
                _blank(i, r, config.model, {**r.inputs, **_of_captions(r.negative, layout)})
                for i, r in chosen.items()
            ]
            own = pack_samples([samples[i] for i in members], layout)
            negative = pack_samples(against, layout)
            conditions = [one.conditions for one in chosen.values()]
            own, negative, tokens = placed(own, negative, conditions, config.model, layout)
            heard = [one.sound for one in chosen.values()]
            own, negative = (with_given(pack, heard, layout) for pack in (own, negative))
            bare = None
            if family_of(config.model).objective.guides_by_references and any(own.references):
                bare = pack_samples([_without_references(one, layout) for one in against], layout)
            pack = _Pack(own=own, negative=negative, tokens=tokens, bare=bare)
            told: Any = {"config": config, "settings": settings, "after_step": after_step}
            told |= {"seeds": [one.seed for one in chosen.values()]}
            if has_sound(config.model):
                starts = any(one.start is not None for one in chosen.values())
                made = _sample_streams(model, pack, **told, starts=starts)
            else:
                made = [Generated(one, None) for one in _sample_pack(model, pack, **told)]
            latents |= dict(zip(members, made, strict=True))
    return [latents[i] for i in range(len(requests))]


def _check_settings(
    requests: Sequence[Request], config: RunConfig, settings: SamplingSettings
) -> None:
    _check_sampler(config.model, config.objective, settings)
    _check_conditions(requests, config.model, settings)
    settings.of_streams.check_guidance(config.model)
    check_sound(
        [one.sound for one in requests],
        config.model,
        sampler=settings.sampler,
        guider=settings.guiders is not None,
    )


def _check_sampler(
    model: ModelConfig, objective: ObjectiveConfig, settings: SamplingSettings
) -> None:
    if family_of(model).tells_step_end(model) and settings.sampler != Sampler.EULER:
        raise ValueError(
            f"sampler {settings.sampler}: the network was distilled to predict whole steps (mean"
            " flow); use --sampler euler (in training validation.sampler=euler)"
        )
    unguided = model.unguided_by
    scale = settings.guidance_after if settings.guidance == 1 else settings.guidance
    if unguided is not None and scale != 1:
        raise ValueError(
            f"guidance {scale:g}: the network was distilled to steps without guidance"
            f" ({unguided}); set --guidance, or validation.guidance in training, to 1"
        )
    steps = objective.sampling_timesteps
    if steps is not None and len(steps) != settings.num_steps:
        raise ValueError(
            f"num_steps={settings.num_steps}: objective.sampling_timesteps has {len(steps)}"
            f" timesteps, one for each step; set --num_steps {len(steps)} (in training"
            f" validation.sampling_steps={len(steps)})"
        )


def _check_conditions(
    requests: Sequence[Request], model: ModelConfig, settings: SamplingSettings
) -> None:
    if not any(one.conditions for one in requests):
        return
    if family_of(model).conditions(model) is None:
        raise ValueError(
            f"model.family={model.family} takes no pictures or clips at frames of a video; leave"
            " --at_frame, --strength and --video out"
        )
    if settings.sampler is not Sampler.EULER:
        raise ValueError(
            f"sampler {settings.sampler} cannot keep given pictures of a video at noise levels of"
            " their own; use --sampler euler"
        )
    if settings.guiders is not None:
        raise ValueError(
            "--guider cannot be used with pictures or clips at frames of a video (--at_frame,"
            " --video); leave out --guider"
        )


def check_requests(requests: Sequence[Request], config: RunConfig) -> list[LatentSample]:
    """The requests as samples, which are checked like training data.

    Their latents are zeros, except known frames of requests that have them.

    Raises:
        ValueError: a request lacks an input that the network needs, or patches do not divide its
            size.
    """
    samples, expected = [], Expected.of(config)
    for index, request in enumerate(requests):
        samples.append(_blank(index, request, config.model, request.inputs))
        try:
            check_inputs(samples[-1], expected)
        except SampleRefused as refusal:
            raise ValueError(
                f"{refusal.detail}; use the text encoder that the data of the run were packed with"
            ) from refusal
    return samples


def _of_captions(inputs: Mapping[str, Tensor], layout: PatchLayout) -> dict[str, Tensor]:
    """Inputs that depend on the caption: rows [L, E] and vectors [E], by name.

    Inputs of kind `NullInput.KEPT` are left out, because a sample keeps them with every caption.
    """
    kept = [one.name for one in layout.inputs if one.null is NullInput.KEPT]
    return {name: value for name, value in inputs.items() if name not in kept}


def _without_references(sample: LatentSample, layout: PatchLayout) -> LatentSample:
    names = layout.named(InputKind.REFERENCE)
    kept = {name: value for name, value in sample.others.items() if name not in names}
    return replace(sample, others=kept)


def _blank(
    index: int, request: Request, model: ModelConfig, inputs: Mapping[str, Tensor]
) -> LatentSample:
    patch = (model.patch_temporal, *[model.patch_spatial] * 2)
    if any(size % p or size < 1 for size, p in zip(request.latent_FHW, patch, strict=True)):
        raise ValueError(
            f"a latent of {request.latent_FHW} (frames, rows, columns) does not divide into patches"
            f" of {patch}; choose another height, width or number of frames"
        )
    rules = family_of(model).conditions(model)
    inputs = {**inputs, **(own_latents(request.conditions, rules) if rules else {})}
    start, latent_CFHW = request.start, torch.zeros(model.in_channels, *request.latent_FHW)
    if start is not None:
        latent_CFHW = start.latent_CFHW.cpu()
    if request.sound is not None:
        heard_KA = None if start is None or start.sound_KA is None else start.sound_KA.cpu()
        inputs |= request.sound.inputs(model, heard_KA)
        latent_CFHW = request.sound.video(latent_CFHW)
    text_LE = inputs.get(TEXT, torch.empty(0, model.crossattn_emb_size))
    return LatentSample(
        key=str(index),
        latent_CFHW=latent_CFHW,
        text_LE=text_LE,
        others={name: value for name, value in inputs.items() if name != TEXT},
        fps=request.fps,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pack:
    """Samples of one pack, with their prompts and with their negative prompts."""

    own: PackedBatch
    negative: PackedBatch
    tokens: ConditionTokens | None
    bare: PackedBatch | None
    """`negative` without references, if guidance also moves away from samples without these."""


@torch.no_grad()
def _sample_pack(
    model: nn.Module,
    pack: _Pack,
    *,
    seeds: Sequence[int],
    config: RunConfig,
    settings: SamplingSettings,
    after_step: Callable[[Callable[[], list[Tensor]]], None],
) -> list[Tensor]:
    """Generates the latents [C, F, H, W] of one pack.

    At each step `after_step` gets a function that returns the predicted latents; it may call it.
    """
    device = getattr(model, "device", None) or next(model.parameters()).device
    batch, negative = pack_to(pack.own, device), pack_to(pack.negative, device)
    path = sampling_path(config.objective)
    steps = StepLevels.of(path, batch, num_steps=settings.num_steps)
    tells_end = family_of(config.model).tells_step_end(config.model)
    given = None
    if pack.tokens is not None:
        given = ConditionedSteps(
            tokens=pack.tokens.to(device),
            batch=batch,
            seeds=seeds,
            noise=settings.condition_noise,
            steps=steps,
            noise_SN=path.schedule(batch.latent_tokens, num_steps=settings.num_steps).to(device),
        )

    def network(pack: PackedBatch, model: Callable[..., Tensor] = model) -> Network:
        def run(input_TC: Tensor, level_N: Tensor) -> Tensor:
            if pack.has_given_tokens:
                input_TC = with_given_tokens(input_TC, pack)
            told = pack
            if tells_end:
                told = pack.with_method(StepEnd(level_N=steps.end(level_N)))
            level_M = with_clean_level(level_N, pack, path)
            if given is not None:
                level_M = torch.cat([level_M, given.tokens.told(level_N, path)])
            return model(input_TC, level_M, told)

        return run

    def unpacked(latent_TC: Tensor) -> list[Tensor]:
        if batch.has_given_tokens:
            latent_TC = with_given_tokens(latent_TC, batch)
        patch = {"patch_temporal": config.model.patch_temporal}
        return unpack_latents(latent_TC, batch, patch_spatial=config.model.patch_spatial, **patch)

    other = model.away if isinstance(model, GuidedPair) else model
    away, predictions = network(negative, other), (network(batch),)
    if pack.bare is not None:
        predictions = (network(batch), away)
        away = without_references(network, batch, pack_to(pack.bare, device))
    combined = _guided(predictions, away, settings, config, batch, steps)
    noise_TC = initial_noise(batch, seeds)
    latent_TC = sample(
        path,
        combined if given is None else partial(_conditioned, combined, given),
        noise_TC if given is None else given.start(noise_TC),
        batch,
        num_steps=settings.num_steps,
        sampler=settings.sampler,
        each_step=lambda latent_TC: after_step(lambda: unpacked(latent_TC)),
        step_noise=partial(step_noise, batch, seeds),
    )
    return unpacked(latent_TC if given is None else given.end(latent_TC))


@torch.no_grad()
def _sample_streams(
    model: nn.Module,
    pack: _Pack,
    *,
    seeds: Sequence[int],
    config: RunConfig,
    settings: SamplingSettings,
    after_step: Callable[[Callable[[], list[Tensor]]], None],
    starts: bool,
) -> list[Generated]:
    """Generates latents and sounds of one pack of a network with several streams.

    At each step `after_step` gets a function that returns the predicted latents; it may call it.
    With `starts` the latents of the pack get noise of the first level in place of pure noise.
    """
    device = getattr(model, "device", None) or next(model.parameters()).device
    batch, path = pack_to(pack.own, device), sampling_path(config.objective)
    joint, away = JointStreams.of(batch), JointStreams.of(pack_to(pack.negative, device))
    predictions = StreamPredictions(
        own=joint,
        negative=away,
        model=model,
        path=path,
        steps=StepLevels.of(path, batch, num_steps=settings.num_steps),
        noise_SN=path.schedule(batch.latent_tokens, num_steps=settings.num_steps),
    )
    guide = settings.guide(path, config.model)

    def unpacked(state_TC: Tensor) -> list[Tensor]:
        latent_TC = with_given_tokens(joint.apart(state_TC)[LATENTS], batch)
        patch = {"patch_temporal": config.model.patch_temporal}
        return unpack_latents(latent_TC, batch, patch_spatial=config.model.patch_spatial, **patch)

    after = replace(guide, scale=settings.guidance_after)
    start_TC = joint.noise(initial_noise(batch, seeds), seeds)
    if starts:
        start_TC = joint.started(start_TC, path, predictions.noise_SN[0].to(device))
    state_TC = sample(
        path,
        guided_at_first(
            predictions.guided(guide, settings.of_streams),
            predictions.guided(after, StreamGuidance()),
            num_steps=settings.num_steps,
            part=settings.guidance_steps,
            sampler=settings.sampler,
        ),
        start_TC,
        joint.row,
        num_steps=settings.num_steps,
        sampler=settings.sampler,
        each_step=lambda state_TC: after_step(lambda: unpacked(state_TC)),
    )
    made = zip(unpacked(state_TC), joint.sounds(state_TC), strict=True)
    return [Generated(*both) for both in made]


def _guided(
    predictions: Sequence[Network],
    unconditional: Network,
    settings: SamplingSettings,
    config: RunConfig,
    batch: PackedBatch,
    steps: StepLevels,
) -> Network:
    """A network that combines predictions by guidance, as `settings` say.

    `predictions` are the network with prompts and, only if guidance also uses references, the
    network with references and negative prompts. `unconditional` is the network with negative
    prompts, in the latter case without references.
    """
    conditional, *others = predictions
    if settings.guiders is not None:
        return guided_by(settings.guiders, conditional, unconditional, batch, steps)
    first = settings.guide(sampling_path(config.objective), config.model)

    def combined(guide: Guidance) -> Network:
        if others:
            return guided_by_references(conditional, others[0], unconditional, guide, batch)
        return guided(conditional, unconditional, guide, batch)

    return guided_at_first(
        combined(first),
        combined(replace(first, scale=settings.guidance_after)),
        num_steps=settings.num_steps,
        part=settings.guidance_steps,
        sampler=settings.sampler,
    )


def _conditioned(
    network: Network, given: ConditionedSteps, input_TC: Tensor, level_N: Tensor
) -> Tensor:
    """The network's output at a step of a video with conditions (`ConditionedSteps`)."""
    step = given.steps.number(level_N)
    return given.stepped(network(given.seen(input_TC, step), level_N), step)

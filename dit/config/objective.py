"""Objective of training: distribution of noise levels, preconditioning and loss weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import get_annotations
from itertools import pairwise

from dit.config.checks import Rule, at_least_one, check, numbers, positive, within
from dit.config.choices import (
    FlowPrediction,
    LevelDensity,
    LevelSpacing,
    LossKind,
    LossMean,
    ObjectiveName,
    Preference,
    SamplingLevels,
    SoundLevels,
    TargetSchedule,
    TimeShift,
    Weighting,
)
from dit.config.resume import Live, Refused
from dit.config.sparsity import TokenShare

_WITH_SHIFTS = (SamplingLevels.LINEAR_QUADRATIC, SamplingLevels.QUANTILES)
"""Values of `sampling_levels` that, like even steps, allow any dependence of the shift on
tokens."""
MODE_SCALES = (-1.0, 2 / (math.pi - 2))
"""Values of s for which the `mode` map is monotone (arXiv:2403.03206, Sec. 3.1)."""


@dataclass(frozen=True, kw_only=True)
class EdmConfig:
    """Options of EDM; symbols as in arXiv:2206.00364."""

    sigma_data: Refused[float] = 0.5
    """EDM: standard deviation that latents are scaled to."""
    p_mean: Live[float] = 0.0
    """EDM: mean of ln(sigma) in training."""
    p_std: Live[float] = 1.0
    """EDM: standard deviation of ln(sigma) in training."""
    sigma_min: Live[float] = 0.002
    """EDM, and flow with Karras's levels: smallest level of the samplers."""
    sigma_max: Live[float] = 80.0
    """EDM, and flow with Karras's levels: largest level of the samplers."""
    rho: Live[float] = 7.0
    """EDM, and flow with Karras's levels: exponent of the samplers' levels (Eq. 5)."""

    def __post_init__(self) -> None:
        check(*self._of_edm(), *numbers(self))

    def _of_edm(self) -> list[Rule]:
        low, high = self.sigma_min, self.sigma_max
        return [
            (
                0 < low < high,
                f"sigma_min={low} must be positive and below sigma_max={high}",
            ),
            *positive(self, "sigma_data", "p_std", "rho"),
            # Limits within which e^x and powers are finite and not zero in float32.
            within(self, "p_mean", -50, 50),
            within(self, "p_std", 1e-6, 50),
            *(within(self, name, 1e-6, 1e6) for name in ("sigma_data", "sigma_min", "sigma_max")),
            within(self, "rho", 0.1, 1000),
        ]

    @property
    def summary_of_edm(self) -> str:
        """Density of sigma and `sigma_data` in one line."""
        return f"ln sigma ~ N({self.p_mean:g}, {self.p_std:g}²), sigma_data {self.sigma_data:g}"


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """Options of flow matching; symbols as in arXiv:2403.03206."""

    prediction: Refused[FlowPrediction] = FlowPrediction.VELOCITY
    """Flow: quantity that the network predicts: velocity, or latent (x) with the loss of its
    velocity (arXiv:2511.13720)."""
    density: Live[LevelDensity] = LevelDensity.LOGIT_NORMAL
    """Flow: density from which t is drawn."""
    logit_mean: Live[float] = 0.0
    """Flow: mean of logit(t)."""
    logit_std: Live[float] = 1.0
    """Flow: standard deviation of logit(t)."""
    mode_scale: Live[float] = 1.29
    """Flow: s of the `mode` density."""
    flow_shift: Live[float] = 1.0
    """Flow: t becomes s t / (1 + (s - 1) t), in training and sampling; above 1 means more noise."""
    shift_base_tokens: Live[int | None] = None
    """Flow: with a number, the shift of a sample of T tokens is flow_shift * sqrt(T / number)."""
    time_shift_type: Live[TimeShift | None] = None
    """Flow: source of the time shift: flow_shift and shift_base_tokens (null), or mu from the
    number of tokens, as exp(mu) (exponential) or mu itself (linear)."""
    base_shift: Live[float] = 0.5
    """Flow: mu of a sample of base_image_seq_len tokens, if time_shift_type is set."""
    max_shift: Live[float] = 1.15
    """Flow: mu of a sample of max_image_seq_len tokens; mu is linear in tokens, also beyond."""
    base_image_seq_len: Live[int] = 256
    """Flow: number of tokens for base_shift; references and text do not count."""
    max_image_seq_len: Live[int] = 4096
    """Flow: number of tokens for max_shift."""
    timestep_scale: Refused[float] = 1000.0
    """Flow: the timestep input of the network is timestep_scale * t."""
    sampling_levels: Live[SamplingLevels] = SamplingLevels.LINEAR
    """Flow: noise levels of samplers: linear, even (FLUX.1), empirical (FLUX.2), unipc (Wan),
    linear_quadratic (LTX-Video), karras, karras_to_sigma_min, lcm (HiDream-I1 Dev), or quantiles
    of the density."""
    sampling_timesteps: Live[tuple[float, ...] | None] = None
    """Flow: falling timesteps of a distilled network's steps, in place of sampling_levels."""
    level_spacing: Live[LevelSpacing | None] = None
    """Flow: respacing of even sampling levels: karras, exponential, beta; null: none."""
    shift_terminal: Live[float | None] = None
    """Flow: last sampling level above 0, to which the levels are stretched; null: no stretching."""
    weighting: Live[Weighting] = Weighting.NONE
    """Flow: loss weight, none or 1 + flow_shift * t (linear)."""
    level_range: Refused[tuple[float, float] | None] = None
    """Flow: lowest and highest t, after the shift, to train on (an expert); null: all."""

    def __post_init__(self) -> None:
        check(*self._of_flow(), *numbers(self))

    def _of_flow(self) -> list[Rule]:
        low, high = MODE_SCALES
        first, last = self.level_range or (0.0, 1.0)
        return [
            *positive(self, "logit_std", "flow_shift", "timestep_scale"),
            (
                low <= self.mode_scale <= high,
                f"mode_scale={self.mode_scale} must lie in [{low}, {high:.4f}]:"
                " beyond, the mode density is not defined",
            ),
            (
                0 <= first < last <= 1,
                f"level_range=[{first:g}, {last:g}] must be two rising levels t in [0, 1], such as"
                " [0.875, 1]",
            ),
            (
                self.sampling_levels is not SamplingLevels.UNIPC or self.timestep_scale == 1000,
                f"sampling_levels=unipc gives the network whole timesteps up to 1000, and"
                f" timestep_scale={self.timestep_scale:g}; set sampling_levels=linear or"
                " timestep_scale=1000",
            ),
            *at_least_one(self, "shift_base_tokens", "base_image_seq_len"),
            *self._shift_by_tokens(),
            *self._last_level(),
            *self._listed_steps(),
            # Limits within which e^x and powers are finite and not zero in float32.
            within(self, "logit_mean", -50, 50),
            within(self, "logit_std", 1e-6, 50),
            within(self, "timestep_scale", 1e-6, 1e6),
            within(self, "flow_shift", 1e-3, 1000),
            within(self, "base_shift", -50, 50),
            within(self, "max_shift", -50, 50),
        ]

    def _shift_by_tokens(self) -> list[Rule]:
        base, most = self.base_image_seq_len, self.max_image_seq_len
        rules: list[Rule] = [
            (
                base < most,
                f"base_image_seq_len={base} must be below max_image_seq_len={most}",
            )
        ]
        if self.time_shift_type is None or base >= most:
            return rules
        said = f"time_shift_type={self.time_shift_type}"
        slope = (self.max_shift - self.base_shift) / (most - base)
        mu_of_one = self.base_shift - slope * (base - 1)
        return [
            *rules,
            (
                self.flow_shift == 1,
                f"flow_shift={self.flow_shift:g} has no effect with {said}, whose shift follows"
                " from the tokens; set flow_shift=1, or time_shift_type=null",
            ),
            (
                self.shift_base_tokens is None,
                f"shift_base_tokens={self.shift_base_tokens} and {said} are two laws of the shift;"
                " set one of them to null",
            ),
            (
                self.steps_evenly or self.sampling_levels in _WITH_SHIFTS,
                f"{said} does not go with sampling_levels={self.sampling_levels}; set"
                " sampling_levels to linear, even or quantiles, which it shifts, or to"
                " linear_quadratic or empirical, which it leaves alone",
            ),
            (
                self.time_shift_type is not TimeShift.LINEAR or (mu_of_one > 0 and slope >= 0),
                f"{said} shifts by mu itself, which must be above 0 and must not fall with the"
                f" tokens: base_shift={self.base_shift:g} and max_shift={self.max_shift:g} make"
                f" mu {mu_of_one:g} for one token; choose others, or time_shift_type=exponential",
            ),
        ]

    def _last_level(self) -> list[Rule]:
        last = self.shift_terminal
        return [
            (
                last is None or 0 < last < 1,
                f"shift_terminal={last} must be above 0 and below 1, such as 0.02; null stretches"
                " nothing",
            ),
            (
                last is None or self.steps_evenly,
                f"shift_terminal={last} needs sampling_levels=linear or even, and not"
                f" {self.sampling_levels}; set it to null",
            ),
            (
                self.level_spacing is None or self.steps_evenly,
                f"level_spacing={self.level_spacing} respaces sampling_levels=linear or even, and"
                f" not {self.sampling_levels}; set it to null",
            ),
        ]

    def _listed_steps(self) -> list[Rule]:
        steps, most = self.sampling_timesteps, self.timestep_scale
        if steps is None:
            return []
        said = f"sampling_timesteps={list(steps)}"
        falling = all(a > b for a, b in pairwise((*steps, 0)))
        fixed = {"shift_terminal": self.shift_terminal, "level_spacing": self.level_spacing}
        return [
            (
                len(steps) > 0 and falling and steps[0] <= most,
                f"{said} must be falling timesteps above 0, the first at most"
                f" timestep_scale={most:g}, such as [1000, 750, 500, 250]",
            ),
            (
                self.steps_evenly or self.sampling_levels is SamplingLevels.LINEAR_QUADRATIC,
                f"{said} takes the place of sampling_levels=linear, even or linear_quadratic, and"
                f" not of {self.sampling_levels}; set sampling_levels=linear",
            ),
            *(
                (value is None, f"{key}={value} has no effect on {said}; set {key}=null")
                for key, value in fixed.items()
            ),
        ]

    @property
    def steps_evenly(self) -> bool:
        """Whether a sampler's noise levels are evenly spaced steps that are then shifted."""
        evenly = (SamplingLevels.LINEAR, SamplingLevels.LCM)
        return self.sampling_levels in evenly or self.ends_at_one_step

    @property
    def ends_at_one_step(self) -> bool:
        """Whether a sampler's levels, before the last 0, run from 1 to 1 / number of steps."""
        return self.sampling_levels in (SamplingLevels.EVEN, SamplingLevels.EMPIRICAL)

    @property
    def covers_all_levels(self) -> bool:
        """Whether the network covers all levels, so that it can generate alone."""
        first, last = self.level_range or (0.0, 1.0)
        return first <= 1e-3 and last == 1

    @property
    def summary_of_flow(self) -> str:
        """Density of t, shift, weighting and other options that are set, in one line."""
        text = f"t {self.density}, shift {self._shift_in_words}, weight {self.weighting}"
        if self.prediction is not FlowPrediction.VELOCITY:
            text += f", the network predicts {self.prediction}"
        if self.level_spacing is not None:
            text += f", {self.level_spacing} levels of samplers"
        if self.level_range is None:
            return text
        return f"{text}, levels {self.level_range[0]:g} to {self.level_range[1]:g}"

    @property
    def _shift_in_words(self) -> str:
        if self.time_shift_type is None:
            return f"{self.flow_shift:g}"
        return (
            f"{self.time_shift_type} in mu = {self.base_shift:g} at {self.base_image_seq_len}"
            f" tokens to {self.max_shift:g} at {self.max_image_seq_len}"
        )


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(EdmConfig, FlowConfig):
    """Noise levels, preconditioning and weights; symbols as in the papers."""

    name: Refused[str] = ObjectiveName.EDM
    """Regression that the network learns: edm (arXiv:2206.00364) or flow (arXiv:2403.03206)."""
    loss: Refused[LossKind] = LossKind.MSE
    """Error of each number: mse, e²; or huber, sqrt(e² + huber_c²) - huber_c (arXiv:2310.14189)."""
    huber_c: Refused[float] = 0.1
    """Scale c of the Huber loss: errors far below c count as e² / (2 c), errors far above c as
    |e|."""
    loss_mean: Live[LossMean] = LossMean.TOKEN
    """Unit with equal weight in the mean loss: a real token, or a sample."""
    text_dropout: Live[float] = 0.1
    """Probability, per sample, that training replaces the caption by the null text (for
    classifier-free guidance)."""
    image_dropout: Live[float] = 0.0
    """Probability, per sample, that training drops the inputs from pictures: zeros take their
    place, or they are left out if they are optional."""
    image_condition_probability: Live[float] = 1.0
    """Probability that a sample whose first frame is stored as a condition (image to video) is
    trained with it; otherwise all its frames are noisy."""
    given_frames: Live[tuple[float, ...] | None] = None
    """Relative frequencies with which the first 0, 1, 2, ... frames of a sample are conditions,
    without noise and loss; null: the number in its shard."""
    sound_levels: Refused[SoundLevels] = SoundLevels.OWN
    """Networks with sound: own draws the noise level of a sample's sound separately from that of
    its frames; same takes the level at the same quantile."""
    sound_weight: Refused[float] = 1.0
    """Networks with sound: weight of the sound's mean loss; the frames' mean loss has weight 1."""
    sound_given: Refused[float] = 0.0
    """Probability that a sample's sound is a condition (no noise, no loss), so that the network
    learns frames from sound."""
    video_given: Refused[float] = 0.0
    """Probability that all frames of a sample with sound are conditions (no noise, no loss), so
    that the network learns sound from frames."""
    sound_prefix: Refused[float] = 0.0
    """Probability that the beginning of a sample's sound, of random length, is a condition, if
    neither its whole sound nor all its frames are."""
    given_text_dropout: Refused[float | None] = None
    """text_dropout of samples whose whole sound or all frames are conditions; null:
    `text_dropout`."""
    second_level_rate: Refused[float] = 0.0
    """Fraction of a sample's tokens with a second noise level; tokens of different levels do not
    attend to each other (arXiv:2607.02508); 0: one level."""
    guidance: Refused[float | None] = None
    """Guidance scale for the guidance embedding in training (FLUX.1 dev: 1); null: the network has
    none."""
    cfg_target: Refused[float | None] = None
    """Guidance scale w that a guidance-distilled network keeps in training: the target becomes u +
    w (target - u), where u is the network's prediction without caption; null: the plain target."""
    cfg_target_schedule: Refused[TargetSchedule] = TargetSchedule.CONSTANT
    """Dependence of cfg_target on t: constant, or level: 1 + (cfg_target - 1) t, for flow
    matching."""
    drift_weight: Refused[float] = 0.0
    """Adapters: weight of the squared distance between the predictions with and without
    adapters."""
    preference: Refused[Preference | None] = None
    """Adapters: dpo trains on pairs, in which `latent` is preferred over `rejected_latent`; null:
    on `latent` alone."""
    dpo_beta: Refused[float] = 100.0
    """Factor of the margin in dpo's sigmoid; a larger one stays closer to the network without
    adapters."""

    @classmethod
    def field_order(cls) -> list[str]:
        """Names of the fields in the order of files: shared ones, EDM's, then flow matching's."""
        return [name for kind in cls.__mro__ for name in get_annotations(kind)]

    def __post_init__(self) -> None:
        check(
            *self._of_edm(),
            *self._of_flow(),
            (
                self.name in OBJECTIVES,
                f"name={self.name} is not a known objective; use {', '.join(OBJECTIVES)}",
            ),
            # Limits within which squares are finite and not zero in float32.
            within(self, "huber_c", 1e-6, 1e6),
            within(self, "text_dropout", 0, 1),
            within(self, "image_dropout", 0, 1),
            within(self, "second_level_rate", 0, 0.5),
            within(self, "image_condition_probability", 0, 1),
            within(self, "sound_weight", 0, 1000),
            within(self, "sound_given", 0, 1),
            within(self, "video_given", 0, 1),
            within(self, "sound_prefix", 0, 1),
            within(self, "given_text_dropout", 0, 1),
            (
                self.sound_given + self.video_given <= 1,
                f"sound_given={self.sound_given:g} and video_given={self.video_given:g} are"
                " shares of different samples; together they must be at most 1",
            ),
            within(self, "guidance", 0, 1000),
            within(self, "drift_weight", 0, 1000),
            within(self, "dpo_beta", 1e-6, 1e6),
            *self._cfg_target(),
            *self._preference(),
            *self._given_frames(),
            (
                self.level_range is None or self.name == ObjectiveName.FLOW,
                f"level_range={list(self.level_range or ())} needs flow matching, and name is"
                f" {self.name}: set name=flow, or leave level_range out",
            ),
            (
                self.prediction is FlowPrediction.VELOCITY or self.name == ObjectiveName.FLOW,
                f"prediction={self.prediction} needs flow matching, and name is {self.name}: set"
                " name=flow, or prediction=velocity",
            ),
            *numbers(self),
        )

    def _cfg_target(self) -> list[Rule]:
        w, schedule = self.cfg_target, self.cfg_target_schedule
        return [
            (
                w is None or 0 < w <= 100,
                f"cfg_target={w} must lie in (0, 100]: the guidance that the network was distilled"
                " with, such as 3; null leaves targets as they are",
            ),
            (
                schedule is TargetSchedule.CONSTANT
                or (w is not None and self.name == ObjectiveName.FLOW),
                f"cfg_target_schedule={schedule} needs name=flow and a cfg_target; leave it out",
            ),
        ]

    def _preference(self) -> list[Rule]:
        said = f"preference={self.preference}"
        return [
            (
                self.preference is None or self.loss is LossKind.MSE,
                f"{said} compares squared errors, and loss={self.loss}; leave one of them out",
            ),
            (
                self.preference is None or self.cfg_target is None,
                f"{said} compares errors to the data, and cfg_target={self.cfg_target} moves the"
                " targets away from them; leave one of them out",
            ),
            (
                self.preference is None or self.drift_weight == 0,
                f"{said} already stays close to the network without adapters, by dpo_beta; leave"
                f" drift_weight={self.drift_weight:g} out",
            ),
        ]

    @property
    def passes_without_gradient(self) -> int:
        """Number of passes without gradient over each pack before the pass with gradients."""
        return self.predictions_kept + (self.preference is not None)

    @property
    def predictions_kept(self) -> int:
        """Number of passes without gradient whose predictions the loss uses."""
        return (self.cfg_target is not None) + (self.drift_weight > 0)

    @property
    def gives_sound(self) -> bool:
        """Whether a sample's sound, or its beginning, may be a condition in training."""
        return self.sound_given > 0 or self.sound_prefix > 0

    @property
    def level_share(self) -> TokenShare | None:
        """The tokens of a sample that have the first of its two noise levels; None: one level."""
        return TokenShare.of_rate(self.second_level_rate) if self.second_level_rate else None

    @property
    def levels_a_sample(self) -> int:
        """Number of noise levels in each sample."""
        return 1 if self.level_share is None else 2

    def _given_frames(self) -> list[Rule]:
        weights = self.given_frames
        if weights is None:
            return []
        return [
            (
                all(weight >= 0 for weight in weights) and 0 < sum(weights) < math.inf,
                f"given_frames={list(weights)} must be frequencies of 0, 1, 2, ... given frames:"
                " at least one, none negative, not all 0",
            ),
            (
                self.image_condition_probability == 1,
                f"given_frames={list(weights)} and"
                f" image_condition_probability={self.image_condition_probability} both say how"
                " often a first frame is given; set one of them",
            ),
        ]

    @property
    def summary(self) -> str:
        """The objective and its most important options in one line, for `--dry-run`."""
        text = f"{self.name}, {OBJECTIVES[self.name](self)}"
        if self.preference is not None:
            text += f", pairs by {self.preference} with beta {self.dpo_beta:g}"
        if self.second_level_rate:
            text += f", a second level for {self.second_level_rate:.0%} of a sample's tokens"
        if self.loss is LossKind.HUBER:
            text += f", pseudo-Huber loss with c {self.huber_c:g}"
        if self.given_frames is not None:
            counts = ":".join(f"{weight:g}" for weight in self.given_frames)
            return f"{text}, 0 to {len(self.given_frames) - 1} given frames as {counts}"
        if self.image_condition_probability < 1:
            return f"{text}, first frame given to {self.image_condition_probability:g} of samples"
        return text


OBJECTIVES: dict[str, Callable[[ObjectiveConfig], str]] = {
    "edm": lambda config: config.summary_of_edm,
    "flow": lambda config: config.summary_of_flow,
}
"""`objective.name` -> function that summarises the options of this objective for `--dry-run`.

`dit.objectives.registry.REGISTRY` has the same names with the code that needs torch; its function
`register` adds to both."""

"""Groups runs whose losses are comparable.

Such runs have equal measures of error and equal distributions of noise levels. Of two runs with
different noise levels, the one with the lower loss may have learned less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dit.config_loading.dependencies import NEEDS, has
from dit.report.reading import RunRecord, default_settings

_OBJECTIVE = "objective."
MEASURES = (
    *("name", "loss", "huber_c", "loss_mean", "cfg_target", "cfg_target_schedule"),
    *("drift_weight", "preference", "dpo_beta", "given_frames", "second_level_rate"),
    *("sound_levels", "sound_weight", "sound_given", "video_given", "sound_prefix"),
    *("image_condition_probability", "sigma_data", "p_mean", "p_std"),
    *("density", "logit_mean", "logit_std", "mode_scale", "uniform_share", "weighting"),
    *(
        "prediction",
        "level_range",
        "time_shift_type",
        "flow_shift",
        "shift_base_tokens",
        "base_shift",
    ),
    *("max_shift", "base_image_seq_len", "max_image_seq_len"),
    *(f"distill.{key}" for key in ("method", "steps", "teacher_guidance", "teacher_steps")),
    *(f"distill.{key}" for key in ("rollout", "student_sampler", "levels")),
)
"""Keys that decide what a loss measures, as far as they have an effect (`NEEDS`): keys of
`objective` without their group, and keys of a distillation."""
# Keys that do not decide what a loss measures: of samplers, of inputs of the network, and of
# dropout. The latter two are choices of a run, like its width, so losses can be compared.
OTHERS = {
    *("sigma_min", "sigma_max", "rho", "timestep_scale"),
    *("sampling_levels", "sampling_timesteps", "level_spacing", "shift_terminal"),
}
OTHERS |= {"guidance", "text_dropout", "image_dropout", "given_text_dropout"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LossGroup:
    """Runs whose losses are comparable, by number, and what distinguishes them from others."""

    runs: list[int]  # numbers of the runs
    label: str  # settings that differ from those of other groups; empty for a single group


def loss_settings(run: RunRecord) -> dict[str, Any]:
    """The settings in effect that decide what the loss of `run` measures; empty if unknown."""
    # A run of an earlier version lacks later keys, whose defaults change nothing.
    settings = default_settings() | run.settings if run.settings else {}
    named = {key: _whole(key) for key in MEASURES}
    return {
        key: settings[name]
        for key, name in named.items()
        if name in settings
        and all(has(settings.get(other), wanted) for other, wanted in NEEDS.get(name, {}).items())
    }


def _whole(key: str) -> str:
    return key if "." in key else f"{_OBJECTIVE}{key}"


def loss_groups(runs: Sequence[RunRecord]) -> list[LossGroup]:
    """The runs in groups with comparable losses, in the order of the first run of each group."""
    each = [loss_settings(run) for run in runs]
    distinct = [one for number, one in enumerate(each) if one not in each[:number]]
    if len(distinct) == 1:
        return [LossGroup(runs=list(range(len(runs))), label="")]
    names = _telling(distinct)
    return [
        LossGroup(
            runs=[number for number, other in enumerate(each) if other == one],
            label=", ".join(f"{name} {shown(one[name])}" for name in names if name in one)
            or "unknown",
        )
        for one in distinct
    ]


def shown(value: Any) -> str:
    """The value of a setting as YAML writes it."""
    return "null" if value is None else str(value)


def _telling(distinct: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of settings that together tell all of `distinct` apart.

    `MEASURES` are tried in their order; a name is taken if it tells more of `distinct` apart.
    """
    names = list[str]()
    for name in MEASURES:
        if _count(distinct, [*names, name]) > _count(distinct, names):
            names.append(name)
    return names


def _count(distinct: Sequence[Mapping[str, Any]], names: Sequence[str]) -> int:
    return len({tuple(repr(one.get(name, ...)) for name in names) for one in distinct})


def loss_note(runs: Sequence[RunRecord]) -> str:
    """A sentence on why the losses of these runs cannot be compared; empty if they can."""
    each = [loss_settings(run) for run in runs]
    differ = [key for key in MEASURES if len({repr(one.get(key, ...)) for one in each}) > 1]
    if not differ:
        return ""
    parts = list[str]()
    for key in differ:
        of_value: dict[str, list[str]] = {}
        for run, one in zip(runs, each, strict=True):
            if key in one:
                of_value.setdefault(shown(one[key]), []).append(run.name)
        values = ", ".join(f"{value} in {' and '.join(names)}" for value, names in of_value.items())
        parts.append(f"{_whole(key)} is {values}")
    return (
        f"losses of these runs do not compare, and have separate charts: {'; '.join(parts)}. A loss"
        " is an error at the noise levels that training draws: a lower one does not mean better"
        " samples. Compare the samples, or val_fid and val_clip_score"
    )

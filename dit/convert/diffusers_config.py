"""Converts Diffusers' config.json and scheduler_config.json from and to a run's configuration.

A setting that the other side cannot express raises an error with its name. Settings that Diffusers
neither has nor needs are stored in config.json under a private key, which Diffusers ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from dit.config import (
    CUSTOM_SIZE,
    OTHER_NETWORKS,
    ModelConfig,
    ObjectiveConfig,
    Precision,
    RunConfig,
    SamplingLevels,
    TextPadding,
)
from dit.config_loading import default_config, load_config
from dit.config_loading.schema import as_typed
from dit.convert.diffusers_checkpoint import OUR_KEY, PrivateKeys, checked_json
from dit.convert.errors import ConvertError, listed
from dit.models.registry import diffusers_classes, diffusers_form, family_named, family_of
from dit.objectives.registry import REGISTRY

if TYPE_CHECKING:
    from dit.models.diffusers.form import Companion, DiffusersForm
    from dit.models.family import Family
    from dit.objectives.diffusers_schedulers import SchedulerFile


class Unsaid(Enum):
    """Value of an option that the user did not set; the family then decides."""

    UNSAID = "unsaid"


def model_config(
    content: dict[str, Any],
    *,
    precision: Precision,
    text_pad_to: int | TextPadding | Unsaid | None = Unsaid.UNSAID,
    pipeline: str | None = None,
    given: Mapping[str, Any] | None = None,
    second: Callable[[Companion], dict[str, Any] | None] = lambda _: None,
    place: object,
) -> ModelConfig:
    """The model configuration for the config.json `content`.

    `pipeline` is the class of the pipeline around it, if known. `text_pad_to` applies to weights
    that this project did not export. `given` are fields set by a user, used if neither file nor
    pipeline determines them. `second` reads the config.json of a companion network.

    Raises:
        ConvertError: the class is unknown, or keys describe a model that is not supported.
    """
    family = _family(content, place)
    form = diffusers_form(family.default())
    if quantized := content.get("quantization_config"):
        raise ConvertError(
            f"{place} says quantization_config={quantized!s:.60}: give the folder of the original"
            " weights in bfloat16, float16 or float32"
        )
    if needs := form.refused_pipelines.get(pipeline or ""):
        raise ConvertError(
            f"{place} cannot be imported: a {pipeline} needs {needs}. {OTHER_NETWORKS}"
        )
    private = checked_json(PrivateKeys, content, place=place)
    unused = private.use_default_values
    stated = {k: v for k, v in content.items() if not k.startswith("_") and k not in unused}
    keys = checked_json(form.keys.file, stated, place=place)
    unknown = [f"unknown keys {listed(keys.model_extra)}"] if keys.model_extra else []
    if wrong := [*unknown, *form.keys.unsupported(keys)]:
        raise ConvertError(f"{place} cannot be imported: {'; '.join(wrong)}. {OTHER_NETWORKS}")
    ours = None
    if private.ours is not None:
        ours = checked_json(form.keys.kept_file, private.ours, place=place, within=OUR_KEY)
    if ours is None and isinstance(text_pad_to, int) and family.config.takes_stored_padding:
        raise ConvertError(
            f"--text-pad-to {text_pad_to} must be `{TextPadding.STORED}` or `none`: the network of"
            f" {place} takes no captions that are padded with zeros"
        )
    told = {} if isinstance(text_pad_to, Unsaid) else {"text_pad_to": text_pad_to}
    known, given = form.pipelines.get(pipeline or ""), given or {}
    of_pipeline = known.settings if known else {}
    if ours is None:
        _check_told(form, {**given, **of_pipeline}, place)
    of_user = _told(form, given)
    try:
        settings = form.keys.settings(keys, ours, told)
        if ours is None:
            settings = {**settings, **of_user, **of_pipeline}
        if form.companion is not None:
            settings |= _of_companion(form, settings, of_user, second, place)
        return family.config(name=CUSTOM_SIZE, precision=precision, **settings)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConvertError(f"{place} cannot be trained: {error}; download it again") from error


def _told(form: DiffusersForm, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields `given` by a user, parsed; ConvertError names a wrong one."""
    try:
        return form.keys.told(given)
    except ValueError as error:
        raise ConvertError(str(error)) from None


def _of_companion(
    form: DiffusersForm,
    settings: Mapping[str, Any],
    of_user: Mapping[str, Any],
    second: Callable[[Companion], dict[str, Any] | None],
    place: object,
) -> dict[str, Any]:
    """Fields of the model that the config.json of its companion network determines.

    `settings` are the fields from the model's own config.json, `of_user` those that a user set, and
    `second` reads the companion's config.json. A user may choose shards that hold the companion's
    output instead: then only the field with that choice is returned.

    Raises:
        ConvertError: the companion is missing, or describes a model that is not supported.
    """
    one = form.companion
    assert one is not None
    found, told = settings[one.field], of_user.get(one.field)
    if told is not None and {told, found} == {one.value, one.instead}:
        found = told
    if found != one.value:
        return {one.field: found}
    content = second(one)
    if content is None:
        raise ConvertError(
            f"{place} has no folder {one.folder} beside it, which is a part of the network with"
            f" model.{one.field}={one.value}: give the folder of the whole pipeline, or set"
            f" model.{one.field}={one.instead}, with shards that hold its outputs"
        )
    where = f"{one.folder}/config.json beside {place}"
    stated = {key: value for key, value in content.items() if not key.startswith("_")}
    keys = checked_json(one.keys.file, stated, place=where)
    unknown = [f"unknown keys {listed(keys.model_extra)}"] if keys.model_extra else []
    if wrong := [*unknown, *one.keys.unsupported(keys)]:
        raise ConvertError(
            f"{where} describes a model that cannot be imported: {'; '.join(wrong)}. Set"
            f" model.{one.field}={one.instead}, with shards that hold its outputs"
        )
    return {**one.keys.settings(keys, None, {}), one.field: found}


def _family(content: Mapping[str, Any], place: object) -> Family:
    """The family of the config.json `content`; raises ConvertError if its class is unknown."""
    known = diffusers_classes()
    name = known.get(str(content.get("_class_name")))
    if name is None:
        raise ConvertError(
            f"{place} is of class {content.get('_class_name')!r}; only {listed(known)} can be"
            f" imported. {OTHER_NETWORKS}"
        )
    return family_named(name)


def tellable_fields(content: Mapping[str, Any], place: object) -> tuple[str, ...]:
    """Fields of `model` that a user may set for the config.json `content`.

    They matter only for a file that this project did not write.

    Raises:
        ConvertError: the class is unknown.
    """
    return diffusers_form(_family(content, place).default()).keys.tellable


def _check_told(form: DiffusersForm, settings: Mapping[str, Any], place: object) -> None:
    """Raises ConvertError if a field that no config.json has is missing from `settings`."""
    for key in form.keys.untold:
        if settings.get(key) is None:
            raise ConvertError(
                f"{place} does not determine model.{key}, but the class of its pipeline does: give"
                f" the folder of the pipeline ({listed(form.pipelines)}), or set model.{key} in the"
                " import or the run"
            )


def diffusers_transformer_config(config: RunConfig) -> dict[str, Any]:
    """config.json for the model of a run.

    Raises:
        ConvertError: Diffusers cannot express the model.
    """
    form, d = diffusers_form(config.model), config.dataset
    longest = d.task_encoder_seq_length if d.path or d.blend or d.mock else None
    if wrong := form.inexpressible(config.model):
        raise ConvertError("; ".join(wrong))
    return {
        "_class_name": form.class_name,
        "_diffusers_version": "0.35.0",
        OUR_KEY: form.keys.private(config.model),
        **form.keys.content(config.model, longest=longest),
    }


def scheduler_config(objective: ObjectiveConfig) -> dict[str, Any]:
    """scheduler_config.json with the noise range of `objective` and its sampler's noise levels.

    Raises:
        ConvertError: Diffusers' schedulers cannot express the objective.
    """
    opened = REGISTRY[objective.name].scheduler
    remedy = "--no-scheduler exports the weights alone"
    if opened is None:
        raise ConvertError(
            f"objective.name={objective.name}: this objective has no Diffusers scheduler; {remedy}"
        )
    scheduler = opened()
    if option := scheduler.inexpressible(objective):
        raise ConvertError(f"{option}: {scheduler.class_names[0]} cannot express it; {remedy}")
    return scheduler.content(objective)


def check_also_saved(config: RunConfig) -> None:
    """Checks that Diffusers can express a run with `checkpoint.also_save_hf`.

    Raises:
        ConvertError: Diffusers cannot; the message names the setting and `checkpoint.also_save_hf`.
    """
    try:
        diffusers_transformer_config(config)
        scheduler_config(config.objective)
    except ConvertError as error:
        raise ConvertError(
            f"checkpoint.also_save_hf=true: {error}. Set it to false, and export afterwards"
        ) from error


@dataclass(frozen=True, slots=True)
class FoundObjective:
    """The objective that a scheduler_config.json describes, with a log line."""

    objective: ObjectiveConfig
    note: str
    stated: tuple[str, ...] = ()
    """Keys of `objective` that the scheduler, or the pipeline around it, determines."""


def objective_config(
    content: dict[str, Any] | None,
    *,
    place: object,
    given: Sequence[str] = (),
    pipeline: str | None = None,
    of_family: Mapping[str, Any] | None = None,
    model: ModelConfig | None = None,
) -> FoundObjective:
    """The objective of the scheduler_config.json `content`, with the user's settings `given`.

    Without `content` it is the objective of the pipeline that the fields of `model` imply, else the
    default one with the keys `of_family`. A `pipeline` that computes noise levels itself overrides
    the scheduler. `model` is the network, which must support the objective and determines
    `objective.guidance`.

    `given` are settings such as `objective.name=flow`. If `objective.name` is among them, a
    scheduler that determines no objective is accepted too.

    Raises:
        ConvertError: the scheduler does not determine what the network was trained for, or no known
            objective matches it; names the file and the remedy.
        ConfigError: `given` is not understood.
    """
    if other := [word for word in given if not word.lstrip("+-~").startswith("objective.")]:
        raise ConvertError(f"{other[0]!r} is not understood; only objective.KEY=VALUE can be set")
    told = any(word.lstrip("+-").startswith("objective.name") for word in given)
    if pipeline is None and content is None and model is not None:
        pipeline = _told_pipeline(model)
    fixed = _fixed_by(pipeline, content or {}, model) if pipeline and model else {}
    if fixed:
        found = FoundObjective(_with_keys(fixed), f"of {pipeline}", tuple(fixed))
    elif content is None:
        found = FoundObjective(
            _with_keys(of_family or {}),
            "the default, since there is no scheduler_config.json; set objective.* as in the"
            " training of these weights",
        )
    else:
        found = _of_scheduler(content, place, told=told, model=model)
        found = replace(found, objective=_stepping(found.objective, of_family or {}))
    if model is not None and (usual := family_of(model).guidance(model)) is not None:
        found = replace(found, objective=replace(found.objective, guidance=usual))
    if not given:
        return found
    base = default_config() if model is None else RunConfig(model=model)
    config = load_config(replace(base, objective=found.objective), overrides=given)
    note = f"{found.note}; " if found.stated else ""
    return replace(
        found, objective=config.objective, note=f"{note}with {' '.join(given)}, as given"
    )


def _with_keys(keys: Mapping[str, Any]) -> ObjectiveConfig:
    words = [f"objective.{key}={as_typed(value)}" for key, value in keys.items()]
    return load_config(default_config(), overrides=words).objective


def _told_pipeline(model: ModelConfig) -> str | None:
    """Name of the only pipeline whose settings agree with `model`; None if none or several do."""
    form = diffusers_form(model)
    if (second := form.written_companion(model)) is not None:
        model = replace(model, **{second.field: second.instead, "crossattn_proj_size": None})
    fitting = [
        name
        for name, one in form.pipelines.items()
        if all(getattr(model, key) == value for key, value in one.settings.items())
    ]
    return fitting[0] if len(fitting) == 1 else None


def _fixed_by(pipeline: str, scheduler: Mapping[str, Any], model: ModelConfig) -> Mapping[str, Any]:
    """Keys of `objective` that the code of `pipeline` sets itself, with values; none for most."""
    known = diffusers_form(model).pipelines.get(pipeline)
    if known is None or not known.objective:
        return {}
    return {**known.objective, **known.sampling(scheduler)}


def _of_scheduler(
    content: dict[str, Any], place: object, *, told: bool, model: ModelConfig | None
) -> FoundObjective:
    """The objective that the scheduler `content` determines.

    `told` says that the user has set an objective. Then a scheduler that determines none gives the
    default one, and a scheduler may have steps that no sampler here has.

    Raises:
        ConvertError: the scheduler determines none, and `told` is false.
    """
    name, kinds = content.get("_class_name"), (one.scheduler for one in REGISTRY.values())
    readers = (kind().reader(name) for kind in kinds if kind is not None)
    kind = next(filter(None, readers), None)
    known = " or ".join(f"objective.name={one}" for one in REGISTRY)
    ask = f"say what the weights were trained for: {known}"
    if kind is not None:
        file = checked_json(kind, content, place=place)
        why, doubt = file.undecided(), file.lacking() or _of_a_pipeline(file, model)
        if why is None and (doubt is None or told):
            notes = filter(None, (f"of {name}", doubt, file.of_sampling()))
            return FoundObjective(_objective(file, place), "; ".join(notes), file.states)
        ask = f"{why or doubt}; {ask}"
    if not told:
        raise ConvertError(
            f"{place} is of class {name!r}, from which the objective does not follow; {ask}"
        )
    return FoundObjective(ObjectiveConfig(), "")


def _of_a_pipeline(file: SchedulerFile, model: ModelConfig | None) -> str | None:
    """Why a scheduler outside a pipeline does not determine noise levels; None if it does."""
    said = file.of_sampling() or ""
    if model is None or "use_karras" not in said:
        return None
    if not any(one.objective for one in diffusers_form(model).pipelines.values()):
        return None
    return (
        "its use_karras_sigmas=true belongs to pipelines that compute the levels of this network"
        " themselves, and no index of a pipeline is beside it"
    )


def _stepping(objective: ObjectiveConfig, of_family: Mapping[str, Any]) -> ObjectiveConfig:
    """`objective` with the sampling levels (even or empirical) of the family's pipelines.

    The pipelines pass them to the scheduler, so scheduler_config.json lacks the setting.
    `objective` stays as it is if its levels are not the default ones.
    """
    steps = of_family.get("sampling_levels")
    is_linear = objective.sampling_levels is SamplingLevels.LINEAR
    if not is_linear or steps not in (SamplingLevels.EVEN, SamplingLevels.EMPIRICAL):
        return objective
    return replace(objective, sampling_levels=SamplingLevels(steps))


def _objective(file: SchedulerFile, place: object) -> ObjectiveConfig:
    try:
        return file.objective()
    except ValueError as error:
        raise ConvertError(
            f"{place} describes no objective: {error}. Download the file again"
        ) from error

"""Network and objective of a Diffusers folder, which the user's keys override."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dit.checkpoint_paths import find_checkpoint, saved_config
from dit.config import (
    ModelConfig,
    ObjectiveConfig,
    ObjectiveName,
    Precision,
    RunConfig,
    TextPadding,
)
from dit.config.resume import weight_settings
from dit.config_loading.load import ForWeights
from dit.config_loading.schema import hints
from dit.convert.diffusers_checkpoint import CONFIG, DiffusersFolder, open_folder
from dit.convert.diffusers_config import (
    FoundObjective,
    Unsaid,
    model_config,
    objective_config,
    tellable_fields,
)
from dit.convert.errors import ConvertError, listed
from dit.models.diffusers.names import Pair
from dit.models.registry import diffusers_form, family_of, network_spec, pairs

LOAD_HF = "checkpoint.load_hf"


def settings_of_folder(recipe: RunConfig, given: Callable[..., Any]) -> ForWeights | None:
    """Network and objective of `checkpoint.load_hf`, in the recipe's layout; None if unset.

    `given(key, default)` returns the user's value for a key, or the default. A run that resumes has
    the settings of its own checkpoint and does not need the folder again.

    Raises:
        ConvertError: no run can start from the folder.
        CheckpointError: the run's own checkpoint is damaged.
    """
    place, save = given(LOAD_HF), given("checkpoint.save", recipe.checkpoint.save)
    if not isinstance(place, str):
        return None  # what is wrong with it is said where all keys are checked
    if own := find_checkpoint(Path(save)) if isinstance(save, str) else None:
        saved = saved_config(own)
        every = frozenset(hints(ObjectiveConfig))
        return ForWeights(_in_layout(saved.model, recipe.model), saved.objective, every, str(own))
    source = open_folder(Path(place), option=LOAD_HF)
    tellable = tellable_fields(source.config, source.path / CONFIG)
    fields = {key: given(f"model.{key}") for key in tellable}
    model = found_model(source, precision=recipe.model.precision, given=fields)
    name = given("objective.name")
    told = [f"objective.name={name}"] if isinstance(name, str) else []
    found = found_objective(source, model, told)
    stated, where = frozenset(found.stated), f"{LOAD_HF}={place}"
    return ForWeights(_in_layout(model, recipe.model), found.objective, stated, where)


def _in_layout(model: ModelConfig, recipe: ModelConfig) -> ModelConfig:
    """`model` with layout and precision of `recipe`, or with defaults if the families differ."""
    if recipe.family == model.family:
        return replace(recipe, name=model.name, **weight_settings(model))
    return family_of(model).config(name=model.name, **weight_settings(model))


@dataclass(frozen=True, kw_only=True, slots=True)
class HfWeights:
    """A Diffusers folder whose weights fit the network of a run, with its name table."""

    source: DiffusersFolder
    table: list[Pair]
    notes: list[str]  # what differs between its settings and those of the run


def open_hf_weights(path: Path, model: ModelConfig) -> HfWeights:
    """Opens the Diffusers folder `path` for `model`; reads only JSON and tensor headers.

    Raises:
        ConvertError: the folder is damaged, or holds the weights of another network; names the keys
            with both values.
    """
    source = open_folder(path, option=LOAD_HF)
    told = found_model(source, precision=model.precision, given=weight_settings(model))
    theirs = checked_table(source, told)
    if told.family != model.family:
        raise ConvertError(
            f"{LOAD_HF} {source.path} holds the weights of model.family={told.family}, but the run"
            f" has model.family={model.family}; leave model.family and model.name out"
        )
    here, there = weight_settings(model), weight_settings(told)
    lines = [f"model.{k}={here[k]} here and {there[k]} there" for k in here if here[k] != there[k]]
    table = _fitting(source, model, told) if lines else theirs
    if table is None:
        raise ConvertError(
            f"{LOAD_HF} {source.path / CONFIG} describes another network: {'; '.join(lines)}. Leave"
            " these keys out, and model.name where it implies them"
        )
    notes = [*lines, *filter(None, [source.multiplied_out])]
    return HfWeights(source=source, table=table, notes=notes)


def weights_of_run(config: RunConfig) -> HfWeights | None:
    """The opened folder of `checkpoint.load_hf`; None if unset, or if the run resumes.

    Raises:
        ConvertError: the folder is damaged, or holds the weights of another network.
        CheckpointError: the run's own checkpoint is not complete.
    """
    c = config.checkpoint
    if c.load_hf is None or (c.save is not None and find_checkpoint(Path(c.save)) is not None):
        return None
    return open_hf_weights(Path(c.load_hf), config.model)


def objective_notes(source: DiffusersFolder, model: ModelConfig, run: ObjectiveConfig) -> list[str]:
    """Log lines: where the objective comes from, and which of its keys `run` changes.

    Raises:
        ConvertError: the folder's scheduler is damaged.
    """
    told = found_model(source, precision=model.precision, given=weight_settings(model))
    try:
        found = found_objective(source, told, ())
    except ConvertError:  # the scheduler determines no objective, so the run has to name one
        found = found_objective(source, told, [f"objective.name={run.name}"])
    each = [(key, getattr(run, key), getattr(found.objective, key)) for key in found.stated]
    other = [
        f"objective.{key}={mine} here and {its} there" for key, mine, its in each if mine != its
    ]
    return [f"objective {found.note}", *(f"other than {source.path} says: {one}" for one in other)]


def _fitting(source: DiffusersFolder, model: ModelConfig, told: ModelConfig) -> list[Pair] | None:
    """Name table of `model`; None if the folder, whose own network is `told`, does not fit it."""
    if model.num_attention_heads != told.num_attention_heads:
        return None  # the shapes are the same, but not what the numbers mean
    try:
        return checked_table(source, model)
    except ConvertError:
        return None


def found_model(
    source: DiffusersFolder,
    *,
    precision: Precision,
    text_pad_to: int | TextPadding | Unsaid | None = Unsaid.UNSAID,
    given: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """The network of the folder `source`.

    `given` are fields that neither config.json nor the pipeline determines.

    Raises:
        ConvertError: config.json describes a model that is not supported.
    """
    place = source.path / CONFIG
    told: Any = {"precision": precision, "text_pad_to": text_pad_to, "given": given}
    told["second"] = source.companion_config
    return model_config(source.config, **told, pipeline=source.pipeline, place=place)


def found_objective(
    source: DiffusersFolder, model: ModelConfig, given: Sequence[str]
) -> FoundObjective:
    """The objective that the network of `source` was trained for.

    Raises:
        ConvertError: the folder does not determine the objective, or its scheduler is damaged.
        ConfigError: a setting in `given` is not understood.
    """
    found = objective_config(
        source.scheduler,
        place=source.scheduler_file,
        given=given,
        pipeline=source.pipeline,
        of_family=family_of(model).objective.settings,
        model=model,
    )
    return _of_expert(_of_few_steps(found, source, model, given), source, given)


def _of_few_steps(
    found: FoundObjective, source: DiffusersFolder, model: ModelConfig, given: Sequence[str]
) -> FoundObjective:
    """`found` with the settings of the few-step pipeline of `source`, except those in `given`.

    If `source` is not of such a pipeline, `found` is returned unchanged.
    """
    runs = diffusers_form(model).pipelines.get(source.pipeline or "")
    if runs is None or not source.is_distilled:
        return found
    told = {word.lstrip("+-").removeprefix("objective.").partition("=")[0] for word in given}
    keys = {key: value for key, value in runs.of_few_steps.items() if key not in told}
    if not keys:
        return found
    objective = replace(found.objective, **keys)
    words = ", ".join(f"{key}={value}" for key, value in keys.items())
    note = f"{found.note}; {words} of the distilled pipeline"
    return FoundObjective(objective, note, (*found.stated, *keys))


def _of_expert(
    found: FoundObjective, source: DiffusersFolder, given: Sequence[str]
) -> FoundObjective:
    """`found` with the noise levels of `source`, if it is one of a pipeline's two transformers.

    Otherwise, or if `given` sets the levels, `found` is returned unchanged.
    """
    of_flow = found.objective.name == ObjectiveName.FLOW
    if source.level_range is None or not of_flow or any("level_range" in word for word in given):
        return found
    objective = replace(found.objective, level_range=source.level_range)
    low, high = source.level_range
    note = f"{found.note}; level_range=[{low:g}, {high:g}] of the pipeline's boundary_ratio"
    return FoundObjective(objective, note, (*found.stated, "level_range"))


def checked_table(
    source: DiffusersFolder, model: ModelConfig, *, left_out: tuple[str, ...] = ()
) -> list[Pair]:
    """The name table of `model`, after a check that the folder has exactly its tensors.

    The headers of `source` get the tensors of a companion network, and zeros for tensors that the
    family may add. The folder may also have the tensors `left_out`.

    Raises:
        ConvertError: the folder holds other tensors.
    """
    # Checked before the table gets as many lines.
    if network_spec(model).layers > len(source.headers):
        raise ConvertError(
            f"{source.path / CONFIG} says num_layers={model.num_layers}, but there are only"
            f" {len(source.headers)} tensors beside it; download it again"
        )
    table, form = pairs(model), diffusers_form(model)
    ignored = form.ignored
    if (second := form.companion_of(model)) is not None:
        source.join(second)
    elif form.companion is not None:  # it may have been joined for another network
        ignored = (*ignored, f"{form.companion.folder}.*")
    source.fill_up(table, added=form.added)
    others = source.headers.keys() - {name for pair in table for name in pair.theirs}
    for pattern, setting in form.added.items():
        if names := [name for name in others if fnmatchcase(name, pattern)]:
            raise ConvertError(
                f"{source.path} has {listed(names)}: set {setting}, of the import or of the run, to"
                " have them in the network"
            )
    source.check(table, ignored=(*ignored, *left_out))
    return table

"""Exports a checkpoint to a folder that Diffusers' `from_pretrained` opens."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from dit.checkpoint_paths import (
    has_adapters,
    saved_card,
    saved_checkpoints,
    saved_config,
    verify,
)
from dit.config import ModelConfig, RunConfig, Weights
from dit.convert.atomic_folder import new_folder, split_work
from dit.convert.cards import DATA_CARD, HUB, NetworkCard, PictureCode, RunFacts, write_card
from dit.convert.diffusers_checkpoint import (
    CONFIG,
    INDEX,
    SCHEDULER_CONFIG,
    DiffusersFolder,
    FilePlan,
    open_folder,
    plan_files,
    write_json,
)
from dit.convert.diffusers_config import (
    check_also_saved,
    diffusers_transformer_config,
    scheduler_config,
)
from dit.convert.errors import ConvertError
from dit.convert.lora import export_lora, open_merged
from dit.convert.megatron_checkpoint import StoredWeights, WithTextProjection
from dit.convert.pipeline import (
    SCHEDULER,
    check_pipeline,
    copy_components,
    keeps_scheduler,
    network_folder,
)
from dit.distributed.collective_errors import on_first_rank
from dit.distributed.watchdog import heartbeat
from dit.models.diffusers.names import Pair, their_tensors
from dit.models.registry import diffusers_form, pairs
from dit.progress import Track, no_progress
from dit.sizing.memory import parameter_count
from dit.train.checkpoint.starting_point import named_checkpoint
from dit.train.checkpoint.state_dict import saved_step

MAX_SHARD_SIZE = 5 * 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Options of an export."""

    weights: Weights | None = None  # None: the EMA if the run kept one, else the weights
    dtype: torch.dtype | None = None  # None: the type in which each tensor is stored
    max_shard_size: int = MAX_SHARD_SIZE  # bytes of a file
    scheduler: bool = True  # whether to write a scheduler, with the noise range of the run
    pipeline_from: Path | None = None  # pipeline folder whose other components are copied
    text_projection: Path | None = None  # transformer whose text projection made the stored texts
    merged: bool = False  # whether adapters are added to the weights beside them
    critic: bool = False  # whether to export a distillation's critic instead of its student


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export has written."""

    path: Path
    weights: Weights
    tensors: int
    files: int
    bytes: int
    beyond: str | None  # what Diffusers leaves out of it (`DiffusersForm.beyond`)


def check_whole_checkpoint(checkpoint: str | Path) -> Path:
    """Folder of the checkpoint that a path or run folder names, with every file checked.

    Files are compared with the manifest, if there is one. Collective: all processes call it and
    share the reading.

    Raises:
        CheckpointError: there is no checkpoint, or a file is missing or damaged.
    """
    path = _named(checkpoint)
    verify(path)
    return path


def _named(checkpoint: str | Path) -> Path:
    return named_checkpoint(checkpoint, named=f"--megatron-path {checkpoint}")


def open_stored(
    checkpoint: Path,
    weights: Weights | None,
    *,
    text_projection: Path | None = None,
    critic: bool = False,
) -> tuple[StoredWeights, RunConfig, Weights]:
    """(weights, configuration, kind of weights) of a checkpoint or run folder.

    The kind is EMA or MODEL; `weights=None` takes the EMA if there is one. Weights are read only
    later, one by one. If the run trained on projected texts, weights and configuration include the
    projection, which is read from `text_projection` or from the path in the dataset card.

    Raises:
        ConvertError: the checkpoint has no such weights, or the projection is missing.
        CheckpointError: there is no checkpoint, or it is incomplete.
    """
    path = _named(checkpoint)
    if has_adapters(path):
        raise ConvertError(
            f"{path} holds only adapters; export them with `python -m dit.convert export-lora`, or"
            " merged into the weights with `python -m dit.convert export --merged`"
        )
    has_average = StoredWeights(path, averaged=False, critic=critic).has_average
    if weights is Weights.EMA and not has_average:
        raise ConvertError(f"{path} holds no average of the weights; use --weights model")
    chosen = weights or (Weights.EMA if has_average else Weights.MODEL)
    stored = StoredWeights(path, averaged=chosen is Weights.EMA, critic=critic)
    config = saved_config(path).of_network(critic=critic)
    stored.check(pairs(config.model))
    source = _projection_folder(path, config.model, text_projection)
    if source is None:
        return stored, config, chosen
    return *_with_projection(stored, config, source), chosen


def _projection_folder(
    path: Path, model: ModelConfig, given: Path | None
) -> DiffusersFolder | None:
    """The transformer folder with the text projection by which a run's data were made.

    The result is None if the texts were not projected, or if the network projects them itself.
    `given` is a path from the user; without it the dataset card names the folder.

    Raises:
        ConvertError: the projection is needed and cannot be opened, or is `given` and not needed.
    """
    form, about = diffusers_form(model), (saved_card(path) or {}).get("text_encoder", {})
    part = form.text_projection
    if part is None or part.is_part(model):
        if given is not None:
            raise ConvertError(
                f"--text-projection {given}: the network of {path} needs no text projection from"
                " another folder; leave the option out"
            )
        return None
    place = given or about.get("text_projection")
    if place is None:
        return None
    try:
        where = "--text-projection" if given else "the dataset card: --text_projection"
        return open_folder(Path(place), option=where)
    except ConvertError as error:
        raise ConvertError(
            f"{path} was trained on projected texts, and the export needs the weights of that"
            f" projection, which cannot be read: {error}. Give --text-projection DIR, the folder"
            " transformer of the pipeline that the data were packed with"
        ) from error


def _with_projection(
    stored: StoredWeights, config: RunConfig, source: DiffusersFolder
) -> tuple[StoredWeights, RunConfig]:
    part = diffusers_form(config.model).text_projection
    assert part is not None
    weight, width = part.tensors[0], config.model.crossattn_emb_size
    shape: tuple[int, ...] = source.headers[weight].shape if weight in source.headers else ()
    if (
        len(shape) != 2
        or shape[0] != width
        or any(name not in source.headers for name in part.tensors)
    ):
        raise ConvertError(
            f"--text-projection {source.path} has no {' and '.join(part.tensors)} that make rows of"
            f" {width} numbers, as model.crossattn_emb_size says; give the folder transformer of"
            " the pipeline that the data were packed with"
        )
    tensors = {name: source.read(name) for name in part.tensors}
    averaged = stored.prefix != stored.network
    of = {"averaged": averaged, "critic": bool(stored.network)}
    whole = WithTextProjection(stored.path, tensors=tensors, **of)
    return whole, replace(config, model=part.added(config.model, shape[1]))


def check_expressible(config: RunConfig, options: ExportOptions) -> None:
    """Checks that Diffusers can express a run; reads only the run's configuration.

    Raises:
        ConvertError: Diffusers cannot; the message names the setting.
    """
    diffusers_transformer_config(config)
    if options.scheduler and not keeps_scheduler(options.pipeline_from, config.model):
        scheduler_config(config.objective)
    if options.pipeline_from is not None:
        check_pipeline(options.pipeline_from, config)


def export_weights(
    checkpoint: Path,
    target: Path,
    options: ExportOptions | None = None,
    *,
    track: Track = no_progress,
) -> Exported:
    """Exports a checkpoint to the folder `target`.

    Collective: all processes share the files. `track` counts the tensors of this process.

    Raises:
        ConvertError: Diffusers cannot express the run, there are no such weights, or `target`
            exists or cannot be written.
        CheckpointError: there is no checkpoint, or it is incomplete.
    """
    options = options or ExportOptions()
    if options.merged:
        stored, config, chosen = open_merged(checkpoint, options.weights, critic=options.critic)
    else:
        told = {"text_projection": options.text_projection, "critic": options.critic}
        stored, config, chosen = open_stored(checkpoint, options.weights, **told)
    if step := saved_step(_named(checkpoint)):
        config = replace(config, model=config.model.at_step(step))
    check_expressible(config, options)
    form = diffusers_form(config.model)
    table = [pair for pair in pairs(config.model) if form.is_written(pair, config.model)]
    kinds = [options.dtype or stored.dtype(pair) for pair in table]
    sizes = [torch.Size(p.shape).numel() * k.itemsize for p, k in zip(table, kinds, strict=True)]
    plans = _plans(table, sizes, config, options)
    every = [(place, plan, n) for place, plan in plans.items() for n in range(len(plan.files))]
    with new_folder(target, option="--hf-path") as folder:
        on_first_rank(lambda: _describe(folder, config, plans, options))
        on_first_rank(lambda: _write_card(folder, config, chosen, _named(checkpoint), options))
        mine = every[dist.get_rank() :: dist.get_world_size()]
        count = sum(len(plan.pairs[n]) for _, plan, n in mine)
        with track("exporting tensors", count, 0) as advance:

            def read(pair: Pair) -> torch.Tensor:
                advance(1)
                return stored.read(pair)

            def write(number: int) -> None:
                place, plan, file = every[number]
                _write(folder / place, plan, file, read, options.dtype)

            split_work(write, len(every))
    beyond = diffusers_form(config.model).beyond(config.model)
    tensors = sum(len(plan.weight_map) for plan in plans.values())
    size = sum(plan.total_bytes for plan in plans.values())
    return Exported(target, chosen, tensors, len(every), size, beyond)


def _plans(
    table: list[Pair], sizes: list[int], config: RunConfig, options: ExportOptions
) -> dict[str, FilePlan]:
    """Folder in the export -> plan of its files, for the tensors of `table`.

    The tensors of a companion network are in a folder of their own.
    """
    pipeline, most = options.pipeline_from, options.max_shard_size
    own = "." if pipeline is None else network_folder(pipeline, config.objective)
    second = diffusers_form(config.model).written_companion(config.model)

    def plan(*, of_second: bool) -> FilePlan:
        folder = second.folder if second is not None and of_second else ""
        each = zip(table, sizes, strict=True)
        mine = [one for one in each if bool(second and second.has(one[0])) == of_second]
        pairs, bytes_of = [pair for pair, _ in mine], [size for _, size in mine]
        return plan_files(pairs, bytes_of, max_shard_size=most, folder=folder)

    plans = {own: plan(of_second=False)}
    return plans if second is None else plans | {second.folder: plan(of_second=True)}


def _describe(
    folder: Path, config: RunConfig, plans: dict[str, FilePlan], options: ExportOptions
) -> None:
    """Writes all files but the weights and the card; in a pipeline, those of each component."""
    inner = outer = folder
    scheduler = None
    if options.scheduler and not keeps_scheduler(options.pipeline_from, config.model):
        scheduler = scheduler_config(config.objective)
    if options.pipeline_from is not None:
        copy_components(options.pipeline_from, folder, config, scheduler=scheduler)
        inner, outer = (
            folder / network_folder(options.pipeline_from, config.objective),
            folder / SCHEDULER,
        )
        inner.mkdir(exist_ok=True)
        outer.mkdir(exist_ok=True)
    write_json(inner / CONFIG, diffusers_transformer_config(config))
    if scheduler is not None:
        write_json(outer / SCHEDULER_CONFIG, scheduler)
    if (second := diffusers_form(config.model).written_companion(config.model)) is not None:
        (folder / second.folder).mkdir()
        write_json(folder / second.folder / CONFIG, second.content(config.model))
    for place, plan in plans.items():
        if len(plan.files) > 1:
            (folder / place / INDEX).write_text(plan.index())


def _write_card(
    folder: Path, config: RunConfig, weights: Weights, checkpoint: Path, options: ExportOptions
) -> None:
    facts, about = RunFacts.of(checkpoint, config), saved_card(checkpoint) or {}
    hub = str(about.get("processor", {}).get("model_name", ""))
    code = PictureCode(
        config=config,
        card=about,
        prompt=facts.prompt,
        base=hub if HUB.fullmatch(hub) and not Path(hub).exists() else "BASE",
        whole=options.pipeline_from is not None,
    )
    if code.loops:
        (folder / DATA_CARD).write_bytes(code.data_card())
    card = NetworkCard(
        network=diffusers_form(config.model).class_name,
        beyond=diffusers_form(config.model).beyond(config.model),
        weights=weights,
        numbers=parameter_count(config.model),
        code=code.text,
        run=facts,
    )
    write_card(folder, card.text(), facts)


def _write(
    folder: Path,
    plan: FilePlan,
    number: int,
    read: Callable[[Pair], torch.Tensor],
    dtype: torch.dtype | None,
) -> None:
    heartbeat(f"export of {plan.files[number]}")
    whole = their_tensors(plan.pairs[number], read)
    tensors = {
        plan.stored_name(name): part.to(dtype or part.dtype).contiguous()
        for name, part in whole.items()
    }
    file = folder / plan.files[number]
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # for example, the disk is full
        raise OSError(str(error)) from error
    shutil.copymode(folder / CONFIG, file)  # `save_file` makes files that only the owner can read


def exporter(config: RunConfig) -> Callable[[Path], Path]:
    """Returns a function for `checkpoint.also_save_hf`, which exports the checkpoint at a path.

    The function returns the folder of the export, in `diffusers` in the run folder. Before that it
    removes exports of checkpoints that no longer exist, and an older export of the same step. In a
    run with adapters only the adapters are exported. Collective: all processes call it.

    Raises:
        ConvertError: Diffusers cannot express the run.
    """
    check_also_saved(config)
    assert config.checkpoint.save is not None
    place = Path(config.checkpoint.save) / "diffusers"

    def tidy(checkpoint: Path) -> None:
        for old in saved_checkpoints(place):
            # An older export of the same step is from a run that was resumed at an earlier step.
            if old.name == checkpoint.name or not checkpoint.with_name(old.name).exists():
                shutil.rmtree(old)

    def export(checkpoint: Path) -> Path:
        on_first_rank(lambda: tidy(checkpoint))
        if config.lora.enabled:
            export_lora(checkpoint, place / checkpoint.name)
            return place / checkpoint.name
        return export_weights(checkpoint, place / checkpoint.name).path

    return export

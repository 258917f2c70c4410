"""A run and its folder: where it starts from, and when it is saved.

1. run_folder     the folder is made and locked
2. resume         the run continues from a checkpoint, starts from its weights, or starts at step 0
3. save           a checkpoint is begun
   finish_save    its files are complete, and exported and copied where configured
4. next_commands  what can be done with a finished run: generate, report, export
"""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import torch.distributed as dist

from dit.checkpoint_paths import (
    CheckpointError,
    find_checkpoint,
    has_adapters,
    manifest_of,
    saved_card,
    saved_config,
)
from dit.command_line import python
from dit.config import EmaKind, RunConfig, Weights
from dit.config.resume import Resume
from dit.config_loading import changes
from dit.config_loading.schema import schema_of
from dit.data import DataError, LoaderLayout, PackLoader, dataset_sizes
from dit.data.preflight import made_otherwise
from dit.distributed.collective_errors import on_all_ranks, on_first_rank
from dit.distributed.entry import at_stake, say_below
from dit.distributed.watchdog import heartbeat
from dit.models.registry import family_of
from dit.objectives.registry import REGISTRY
from dit.safe_writing import FolderInUseError, only_writer
from dit.system_errors import explained
from dit.train.checkpoint.data_position import Position, data_positions, restore_position
from dit.train.checkpoint.starting_point import Origin, check_writable, saved_origin, unwritable
from dit.train.checkpoint.state_dict import DataState, interval_sums, load_checkpoint, start_from
from dit.train.metrics.run_logger import RunLogger
from dit.train.train_state import TrainState


@contextmanager
def run_folder(config: RunConfig) -> Iterator[Path | None]:
    """Makes `checkpoint.save` and locks it against other runs; all ranks call it.

    Yields None where nothing is to be written.

    Raises:
        FolderInUseError: another run writes to it.
        ValueError: it cannot be written, or holds shards.
    """
    if not config.checkpoint.save:
        yield None
        return
    folder = Path(config.checkpoint.save)
    _make_run_folder(folder)
    with ExitStack() as held:
        refusal = _lock(folder, held) if dist.get_rank() == 0 else ""
        refusals: list[str] = [refusal]
        dist.broadcast_object_list(refusals, src=0)
        if refusals[0]:  # raised on all ranks
            raise FolderInUseError(refusals[0])
        yield folder


def _make_run_folder(folder: Path) -> None:
    check_writable(folder)
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise unwritable(folder, explained(error)) from error


def _lock(folder: Path, held: ExitStack) -> str:
    """Locks the folder until `held` closes; returns the reason if it cannot."""
    try:
        held.enter_context(only_writer(folder, named=f"checkpoint.save={folder}"))
    except (FolderInUseError, OSError) as error:
        return explained(error)
    return ""


def resume(run: TrainState) -> None:
    """Continues from the `starting_point`: in checkpoint.save, else in checkpoint.load.

    With checkpoint.finetune, a run without a checkpoint of its own starts from the weights of the
    latter; with checkpoint.load_hf, from those that the model has been filled with. Frozen weights
    beside adapters are there already.

    Raises:
        CheckpointError: there are no weights to start from, or the checkpoint cannot be used.
    """
    c = run.config.checkpoint
    if c.save and (own := find_checkpoint(Path(c.save))):
        _continue_from(run, own, own=True)
    elif c.load and (other := find_checkpoint(Path(c.load))):
        if c.finetune:
            if run.model.adapters is None or has_adapters(other):
                run.progress = start_from(other, run.model, config=run.config)
            run.notes += _finetune_notes(other, run.config)
            if run.progress.updates_before:
                run.notes.append(
                    f"the average goes on from there, with {run.progress.updates_before} updates"
                    " behind it"
                )
        else:
            _continue_from(run, other, own=False)
    elif run.start is not None:
        run.notes += run.start.notes
        if run.model.adapters is None:  # else `lora.json` has it
            _keep_origin(run, run.start.origin())


_MEASURE = ("objective.", "ema.kind", "dataset.use_train_split_for_val", "train.eval_iters")
_MEASURE += ("validation.quantiles",)
"""Keys, or beginnings of them, with which validation losses do not compare with former ones."""


def _continue_from(run: TrainState, path: Path, *, own: bool) -> None:
    """Continues from a checkpoint, which is one of this run if it is its `own`."""
    run.progress = load_checkpoint(path, run.model, config=run.config)
    run.saved_step = run.progress.step
    _keep_origin(run, saved_origin(path))
    changed = changes(saved_config(path), run.config)
    run.notes.append(f"continuing after step {run.progress.step}")
    run.notes += _change_notes(path, run.config, changed, own=own)
    measured_otherwise = any(key.startswith(_MEASURE) for key in changed)
    if measured_otherwise and run.progress.lowest_val_loss < math.inf:
        run.progress = replace(run.progress, lowest_val_loss=math.inf)
        run.notes.append("validation measures otherwise: the lowest loss is sought anew")
    if other := run.interval_metrics.load_state_dict(interval_sums(path)):
        run.notes.append(
            f"{' and '.join(other)} have other parts than in the checkpoint (validation.quantiles,"
            " dataset.task_encoder_seq_length): at the next log step they are of the steps from"
            f" {run.progress.step + 1} on"
        )
    if other := made_otherwise(saved_card(path) or {}, run.card or {}):
        run.notes.append(
            f"WARNING: the data were prepared otherwise when the checkpoint was saved ({other}):"
            " the network has learned those latents and texts"
        )
    if run.folder is not None:
        run.notes += disk_space_notes(path, run.folder)
    if _restarts_data(run, path, own=own):
        run.progress = run.progress.with_other_data()
        run.notes.append(
            "the data begin anew, since checkpoint.load_data_position=false; weights, optimizer,"
            " schedule and average go on"
        )
    else:
        _load_data_position(run, path)
        _take_new_names(run)


def _keep_origin(run: TrainState, origin: Origin | None) -> None:
    """Every checkpoint of the run says where its first weights came from."""
    if run.saver is not None:
        run.saver.origin = origin


def _load_data_position(run: TrainState, path: Path) -> None:
    """Loads the position in the data of a checkpoint; all ranks call it.

    Raises:
        CheckpointError: it is one in other data, or cannot be divided among these ranks.
    """
    states, loader = _data_positions(run, path), run.loader
    if loader is None:
        return
    restore_position(loader, states, path)
    run.notes += [loader.resharded] if loader.resharded else []


def _take_new_names(run: TrainState) -> None:
    """Renamed folders of a blend keep their counts; their samples have other keys."""
    then, now = run.progress.of_datasets, [*dataset_sizes(run.config)]
    renamed = [f"{old} -> {new}" for old, new in zip(then, now, strict=False) if old != new]
    if renamed and len(then) == len(now):
        counts = dict(zip(now, then.values(), strict=True))
        run.progress = replace(run.progress, of_datasets=counts)
        run.notes.append(
            "WARNING: folders of the blend have other names than in the checkpoint"
            f" ({', '.join(renamed)}): the same samples come, with other noise, which follows from"
            " their keys; rename the folders back for the same numbers"
        )


def _data_positions(run: TrainState, path: Path) -> list[Position]:
    ranks = run.data_ranks
    layout = LoaderLayout(ranks=ranks.size(), workers=run.config.dataset.num_workers)
    return data_positions(path, layout, rank=ranks.rank() if run.loader is not None else None)


def _restarts_data(run: TrainState, path: Path, *, own: bool) -> bool:
    """Whether the run starts its data again from the beginning; all ranks call it.

    A run that has done so continues in these data when it is started again.
    """
    if run.config.checkpoint.load_data_position:
        return False
    if not own or saved_config(path).checkpoint.load_data_position:
        return True
    try:
        states = _data_positions(run, path)
    except CheckpointError:
        return True
    return not on_all_ranks(lambda: run.loader is None or _fits(run.loader, states))[0]


def _fits(loader: PackLoader, states: list[Position]) -> bool:
    try:
        return loader.fits(states)
    except DataError:  # of another version, so of other data
        return False


def _change_notes(
    path: Path, config: RunConfig, changed: Mapping[str, str], *, own: bool
) -> list[str]:
    """Lines about settings that may differ from the checkpoint's and do."""
    saved, lines, schema = saved_config(path), [], schema_of(config)
    idle = [key for key in changed if schema.resume_class(key) is Resume.AT_START]
    if not own and "checkpoint.load" in idle:
        idle.remove("checkpoint.load")  # it is what the run continues from
    if live := [text for key, text in changed.items() if key not in idle]:
        lines.append(f"changed since then: {', '.join(live)}")
    if idle:
        said = ", ".join(changed[key] for key in idle)
        lines.append(f"changed without effect, for only the start of a run reads it: {said}")
    if saved.ema.kind is EmaKind.NONE and config.ema.kind is not EmaKind.NONE:
        lines.append("the checkpoint has no average of the weights: it starts from them")
    if manifest_of(path) is None:
        lines.append("the checkpoint is of an earlier version, without checksums: not verified")
    return lines


def disk_space_notes(path: Path, folder: Path) -> list[str]:
    """A warning if there is no space for another checkpoint of this size."""
    manifest, free = manifest_of(path), shutil.disk_usage(folder).free
    needed = sum(digest.bytes for digest in manifest.files.values()) if manifest else 0
    if free >= needed:
        return []
    return [
        f"checkpoint.save={folder} has {free / 1e6:,.1f} MB free, and a checkpoint takes about"
        f" {needed / 1e6:,.1f} MB: free space before the next one"
    ]


def _finetune_notes(path: Path, config: RunConfig) -> list[str]:
    averaged = config.checkpoint.finetune_weights is Weights.EMA
    kind = "average of the weights" if averaged else "weights"
    return [
        f"starting at step 0 from the {kind} of {path}",
        f"other than there: {', '.join(changes(saved_config(path), config).values())}",
    ]


def save(run: TrainState, logger: RunLogger, *, val_loss: float = math.inf) -> None:
    """Begins to save this step unless it is saved; the next step may begin when it returns.

    `val_loss` is that of this step, infinite if there is none.
    """
    if run.saver is None or run.saved_step == run.progress.step:
        return
    finish_save(run, logger)
    heartbeat("save of a checkpoint")
    began = time.perf_counter()
    data = DataState(
        position=run.loader.state_dict() if run.loader else None,
        card=run.card,
        null={name: value.cpu() for name, value in run.null.items()},
        interval=run.interval_metrics.state_dict(),
    )
    best = val_loss < run.progress.lowest_val_loss
    if best:
        run.progress = replace(run.progress, lowest_val_loss=val_loss)
    run.saver.begin(run.model, progress=run.progress, data=data, best=best)
    run.saved_step = run.progress.step
    if run.config.checkpoint.async_save:
        seconds = time.perf_counter() - began
        logger.info(
            f"step {run.saved_step}: gathered and copied in {seconds:.1f} s; writing in the"
            " background"
        )
    else:
        finish_save(run, logger)


def finish_save(run: TrainState, logger: RunLogger) -> None:
    """Waits for the pending save, if there is one, and exports it; all ranks call it."""
    if run.saver is None:
        return
    heartbeat("end of a save")
    saved = run.saver.finish()
    if saved is not None:
        logger.info(f"saved {saved.path} in {saved.seconds:.1f} s")
        _export(run, logger, saved.path)
    if run.mirror is not None:
        if saved is not None:
            run.mirror.start()
        for line in run.mirror.lines():
            logger.info(line)


def finish_all(run: TrainState, logger: RunLogger) -> None:
    """`finish_save`, and waits until the mirror has what was saved; all ranks call it."""
    finish_save(run, logger)
    if run.config.checkpoint.mirror is None:
        return
    logger.info(f"waiting until {run.config.checkpoint.mirror} has all checkpoints")
    # Less than the watchdog's, which would end the run.
    patience_s = 0.9 * 60 * run.config.dist.distributed_timeout_minutes
    on_first_rank(lambda: run.mirror and run.mirror.finish(patience_s=patience_s))
    finish_save(run, logger)


def _export(run: TrainState, logger: RunLogger, path: Path) -> None:
    if run.export is not None:
        began = time.perf_counter()
        heartbeat("export of a checkpoint")
        place = run.export(path)
        logger.info(f"exported to {place} in {time.perf_counter() - began:.1f} s")


def close_saver(run: TrainState, logger: RunLogger) -> None:
    """Ends the saver's threads; a save that an error has interrupted is finished, or named as lost.

    With several ranks it is lost: all of them would have to finish it, and one has failed.
    """
    if run.saver is None:
        return
    name = run.saver.pending
    if name is not None and dist.get_world_size() == 1:
        with at_stake(f"{name}, which was being written,", say=say_below):
            saved = run.saver.finish()
            assert saved is not None
            logger.info(f"saved {saved.path} in {saved.seconds:.1f} s")
            with at_stake(f"the export of {name}", say=say_below):
                _export(run, logger, saved.path)
    elif name is not None:
        say_below(f"{name}, which was being written, is lost; earlier checkpoints are whole")
    run.saver.close()


def next_commands(config: RunConfig) -> str:
    """One line for each command that this run can be used with, with its own paths.

    A run on mock data gets a report alone: its network has learned nothing to share.
    """
    if not config.checkpoint.save:
        return ""
    folder = Path(config.checkpoint.save)
    checkpoint = find_checkpoint(folder)
    commands = {}
    if checkpoint is not None and (checkpoint / "dataset_card.json").is_file():
        of = ("--checkpoint_path", folder)
        of += ("--weights", "model") if config.ema.kind is EmaKind.NONE else ()
        out = ("--output_dir", folder / "generated", "--prompt", "what it is to show")
        commands["pictures"] = ("recipes.generate_dit", *of, *out, *_pictures_needed(config))
    commands["report"] = ("dit.report", folder)
    if checkpoint is not None and not config.dataset.mock and exportable(config):
        export, name = ("export-lora", "lora") if config.lora.enabled else ("export", "diffusers")
        of = ("--megatron-path", folder, "--hf-path", folder / name)
        commands["Diffusers"] = ("dit.convert", export, *of)
    lines = [f"  {what:<11}{_command(words)}" for what, words in commands.items()]
    return "\n".join(["what can be done with it:", *lines, ""])


def _pictures_needed(config: RunConfig) -> tuple[str, ...]:
    """Options of the pictures that the network makes nothing without."""
    inputs = family_of(config.model).inputs(config.model)
    needed = max((one.pictures for one in inputs if one.required), default=0)
    return ("--image", "first.png", "--last_image", "last.png")[: 2 * needed]


def exportable(config: RunConfig) -> bool:
    """Whether `dit.convert export`, or `export-lora` of a run with adapters, accepts the run.

    The same rules as `dit.convert.export.check_expressible`, without loading the converter.
    """
    if config.lora.enabled:  # adapters have no scheduler beside them
        return family_of(config.model).diffusers is not None
    scheduler = REGISTRY[config.objective.name].scheduler
    if scheduler is None or scheduler().inexpressible(config.objective):
        return False
    form = family_of(config.model).diffusers
    return form is not None and not form().inexpressible(config)


def _command(words: tuple[str | Path, ...]) -> str:
    return shlex.join([python(), "-m", *map(str, words)])

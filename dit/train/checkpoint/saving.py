"""Saves a run, and prints the commands that can follow a finished run.

1. save           starts a checkpoint
   finish_save    completes its files, and exports and copies it if configured
2. next_commands  commands for a finished run: generate, report, export
"""

from __future__ import annotations

import math
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from dit.checkpoint_paths import (
    find_checkpoint,
    manifest_of,
)
from dit.command_line import python
from dit.config import EmaKind, ModelConfig, RunConfig
from dit.distributed.collective_errors import on_first_rank
from dit.distributed.entry import at_stake, say_below
from dit.distributed.watchdog import heartbeat
from dit.models.registry import family_of
from dit.objectives.registry import REGISTRY
from dit.train.checkpoint.state_dict import DataState
from dit.train.metrics.run_logger import RunLogger
from dit.train.train_state import TrainState


def save(run: TrainState, logger: RunLogger, *, val_loss: float = math.inf) -> None:
    """Saves this step, unless it is saved already; all ranks call it.

    It first completes the previous save. With `checkpoint.async_save` it returns once the state is
    copied, otherwise when the checkpoint is complete. `val_loss` is the validation loss of this
    step; infinite if the step was not validated.
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
    told = {"progress": run.progress, "data": data, "best": best, "critic": run.critic}
    run.saver.begin(run.model, **told)
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
    """Completes the pending save, if any: exports it and starts its copy to the mirror.

    All ranks call it. New messages of the mirror are logged.
    """
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
    """Calls `finish_save`, and waits until the mirror has all checkpoints; all ranks call it."""
    finish_save(run, logger)
    if run.config.checkpoint.mirror is None:
        return
    logger.info(f"waiting until {run.config.checkpoint.mirror} has all checkpoints")
    # Less than the time limit of the watchdog, which would end the run.
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
    """Ends the threads of the saver; finishes an interrupted save, or reports it as lost.

    With several ranks the save is lost, because all ranks would have to finish it together.
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


def disk_space_notes(path: Path, folder: Path) -> list[str]:
    """A warning if the disk of `folder` has no room for another checkpoint as large as `path`."""
    manifest, free = manifest_of(path), shutil.disk_usage(folder).free
    needed = sum(digest.bytes for digest in manifest.files.values()) if manifest else 0
    if free >= needed:
        return []
    return [
        f"checkpoint.save={folder} has {free / 1e6:,.1f} MB free, and a checkpoint takes about"
        f" {needed / 1e6:,.1f} MB: free space before the next one"
    ]


def next_commands(config: RunConfig) -> str:
    """Text for the end of a run: a line for each command that can follow, with the run's paths.

    After a run on mock data the report is the only one, because the network has learned nothing.
    The text is empty if the run has no folder.
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
        commands["pictures"] = ("recipes.generate_dit", *of, *out, *_pictures_needed(config.model))
    commands["report"] = ("dit.report", folder)
    if checkpoint is not None and not config.dataset.mock and exportable(config):
        export, name = ("export-lora", "lora") if config.lora.enabled else ("export", "diffusers")
        of = ("--megatron-path", folder, "--hf-path", folder / name)
        commands["Diffusers"] = ("dit.convert", export, *of)
    lines = [f"  {what:<11}{_command(words)}" for what, words in commands.items()]
    return "\n".join(["what can be done with it:", *lines, ""])


def _pictures_needed(model: ModelConfig) -> tuple[str, ...]:
    """Options of `generate_dit.py` for the pictures that `model` needs as inputs."""
    inputs = family_of(model).inputs(model)
    needed = max((one.pictures for one in inputs if one.required), default=0)
    return ("--image", "first.png", "--last_image", "last.png")[: 2 * needed]


def exportable(config: RunConfig) -> bool:
    """Whether `dit.convert export` (with adapters, `export-lora`) accepts the run.

    The rules are those of `dit.convert.export.check_expressible`, which would import the converter.
    """
    if config.lora.enabled:  # adapters are exported without a scheduler
        return family_of(config.model).diffusers is not None
    scheduler = REGISTRY[config.objective.name].scheduler
    if scheduler is None or scheduler().inexpressible(config.objective):
        return False
    form = family_of(config.model).diffusers
    return form is not None and not form().inexpressible(config.model)


def _command(words: tuple[str | Path, ...]) -> str:
    return shlex.join([python(), "-m", *map(str, words)])

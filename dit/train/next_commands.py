"""The commands that continue from a finished run, with its own paths: generate, report, export."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dit.config import RunConfig


def next_commands(config: RunConfig) -> str:
    """One line for each command that this run can be used with."""
    from dit.train.checkpoint.paths import find_checkpoint

    if not config.checkpoint.save:
        return ""
    folder = Path(config.checkpoint.save)
    checkpoint = find_checkpoint(folder)
    commands = {}
    if checkpoint is not None and (checkpoint / "dataset_card.json").is_file():
        out = ("--output_dir", folder / "generated", "--prompt", "what it is to show")
        commands["pictures"] = ("recipes.generate_dit", "--checkpoint_path", folder, *out)
    commands["report"] = ("dit.report", folder)
    if checkpoint is not None and exportable(config):
        out = ("--hf-path", folder / "diffusers")
        commands["Diffusers"] = ("dit.convert", "export", "--megatron-path", folder, *out)
    lines = [f"  {what:<11}{_line(words)}" for what, words in commands.items()]
    return "\n".join(["what can be done with it:", *lines, ""])


def exportable(config: RunConfig) -> bool:
    """Whether `dit.convert export` accepts the run.

    The same rules as `dit.convert.export.check_expressible`, without loading the converter.
    """
    from dit.models.family import family_of
    from dit.objectives import REGISTRY

    scheduler = REGISTRY[config.objective.name].scheduler
    if scheduler is None or scheduler.inexpressible(config.objective):
        return False
    return not family_of(config.model).diffusers().inexpressible(config)


def _line(words: tuple[str | Path, ...]) -> str:
    return shlex.join(["python", "-m", *map(str, words)])

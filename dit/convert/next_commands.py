"""What can be done with a run that is done, as commands with its own paths."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dit.config import RunConfig


def next_commands(config: RunConfig) -> str:
    """One line for each thing; those that this run is not fit for are left out."""
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
    if checkpoint is not None and _is_expressible(config):
        out = ("--hf-path", folder / "diffusers")
        commands["Diffusers"] = ("dit.convert", "export", "--megatron-path", folder, *out)
    lines = [f"  {what:<11}{_line(words)}" for what, words in commands.items()]
    return "\n".join(["what can be done with it:", *lines, ""])


def _line(words: tuple[str | Path, ...]) -> str:
    return shlex.join(["python", "-m", *map(str, words)])


def _is_expressible(config: RunConfig) -> bool:
    from dit.convert.diffusers_config import diffusers_transformer_config, scheduler_config
    from dit.convert.errors import ConvertError

    try:
        diffusers_transformer_config(config)
        scheduler_config(config.objective)
    except ConvertError:
        return False
    return True

"""Files of other tools, by their keys, as the runs that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dit.config import RunConfig
from dit.config_loading import load_config
from dit.config_loading.settings import Level, read_tokens
from dit.foreign.translate import fitted, translate
from tests.packs import run_config


def run_of(theirs: Sequence[str], *ours: str) -> RunConfig:
    """The run of a file that holds these `KEY=VALUE`, with our keys on the command line."""
    return run_and_notes(theirs, *ours)[0]


def run_and_notes(theirs: Sequence[str], *ours: str) -> tuple[RunConfig, list[str]]:
    """The run, and what is said of their keys."""
    settings, wrong = read_tokens(theirs)
    assert not wrong
    written = translate([replace(one, origin="F", level=Level.FILE) for one in settings])
    config, translation = fitted(
        written, lambda found: load_config(run_config(), settings=found, overrides=ours)
    )
    return config, translation.notes

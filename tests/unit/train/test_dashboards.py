"""Where a run is logged to."""

from __future__ import annotations

from pathlib import Path

import pytest

from dit.config import LoggerConfig, RunConfig, WandbMode
from dit.train.metrics import Dashboards


@pytest.mark.parametrize("mode", [WandbMode.OFFLINE, WandbMode.DISABLED])
def test_a_project_is_logged_unless_it_is_disabled(
    tmp_path: Path, mode: WandbMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "disabled")  # the configuration is stronger
    logger = LoggerConfig(wandb_project="x", wandb_mode=mode)
    boards = Dashboards(RunConfig(logger=logger), tmp_path, start=0)
    boards.close()
    assert (boards.wandb is not None) == (mode is WandbMode.OFFLINE)
    assert bool(list(tmp_path.glob("wandb/offline-run-*"))) == (mode is WandbMode.OFFLINE)

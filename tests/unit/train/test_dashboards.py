"""Where a run is logged to; what TensorBoard and W&B cannot show ends no run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dit.config import LoggerConfig, WandbMode
from dit.train.metrics.writers import Dashboards
from dit.train.train_state import DrawnSamples
from tests.packs import run_config


class Unreachable:
    """W&B's run on a machine that has lost its network."""

    def log(self, values: dict[str, Any], *, step: int) -> None:
        raise ConnectionError("no route to api.wandb.ai")

    def finish(self) -> None: ...


def _drawn(folder: Path, *, grid: bytes | None = None) -> DrawnSamples:
    file = folder / "grid.png"
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 4), np.uint8)
    Image.fromarray(noise * np.uint8([1, 1, 1, 0])).save(file)  # all of it transparent
    if grid is not None:
        file.write_bytes(grid)
    return DrawnSamples(grid=file, videos=[(folder / "gone.mp4", "a $x$")], quality={})


@pytest.mark.parametrize("cut", [0, 20, 900])
def test_a_grid_that_is_cut_short_is_said(tmp_path, cut):
    boards = Dashboards(run_config(), tmp_path, start=0)
    content = _drawn(tmp_path).grid.read_bytes()[:cut]
    (said,) = boards.add_samples(_drawn(tmp_path, grid=content), step=1)
    assert str(said).startswith("TensorBoard's image of the samples: ")
    assert boards.add_samples(DrawnSamples(grid=None, videos=[], quality={}), step=1) == []
    assert boards.add_samples(_drawn(tmp_path), step=2) == []
    boards.close()


def test_what_has_no_background_is_white_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    boards = Dashboards(run_config(), tmp_path, start=0)
    boards.add_samples(_drawn(tmp_path), step=1)
    boards.close()
    events = EventAccumulator(boards.place).Reload()
    (shown,) = events.Images("samples")
    pixels = np.asarray(Image.open(io.BytesIO(shown.encoded_image_string)))
    assert pixels.shape == (32, 32, 3) and (pixels == 255).all()


def test_samples_that_do_not_reach_wandb_are_said(tmp_path):
    pytest.importorskip("wandb")
    boards = Dashboards(run_config(), tmp_path, start=0)
    boards.wandb = Unreachable()
    said = {one.what for one in boards.add_samples(_drawn(tmp_path, grid=b"no png"), step=1)}
    assert said >= {"W&B's image of the samples", "W&B's videos", "W&B's samples"}
    boards.close()


@pytest.mark.parametrize("mode", [WandbMode.OFFLINE, WandbMode.DISABLED])
def test_a_project_is_logged_unless_it_is_disabled(
    tmp_path: Path, mode: WandbMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "disabled")  # the configuration is stronger
    logger = LoggerConfig(wandb_project="x", wandb_mode=mode)
    boards = Dashboards(run_config(logger=logger), tmp_path, start=0)
    boards.close()
    assert (boards.wandb is not None) == (mode is WandbMode.OFFLINE)
    assert bool(list(tmp_path.glob("wandb/offline-run-*"))) == (mode is WandbMode.OFFLINE)

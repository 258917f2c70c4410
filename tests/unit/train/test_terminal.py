"""Where a run is logged to: steps and pictures in a terminal, TensorBoard and W&B."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dit.config import LoggerConfig, WandbMode
from dit.console import Console
from dit.train.metrics import writers
from dit.train.metrics.writers import Dashboards, Terminal, half_blocks
from dit.train.train_state import DrawnSamples
from tests.packs import run_config


@pytest.mark.parametrize("name", ["xterm", "dumb"])
def test_narrow_and_simple_terminals_show_steps_and_the_time_left(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 columns are usual, and too few for all values of a step; `dumb` moves no cursor."""
    file = io.StringIO()
    console = Console(
        file=file,
        force_terminal=True,
        width=80,
        color_system=None,
        _environ={"TERM": name},
    )
    monkeypatch.setattr(writers, "Console", lambda **_: console)
    shown = writers.Terminal(total=12_000, start=0, every=10)
    values = {"loss": 0.5, "grad_norm": 1.5, "lr": 2e-3, "tokens_per_s": 4321.0, "pack_fill": 1.0}
    shown.busy("validating")
    if shown.bar is not None:
        shown.bar.refresh()
    for step in range(1, 41):
        shown.step(values | {"step": step, "refused": 3, "skipped_steps": 0})
    shown.close()
    assert ("validating" in file.getvalue()) == (name == "xterm")
    last = re.split(r"\r|\n|\x1b\[2K", file.getvalue().removesuffix("\x1b[?25h").strip())[-1]
    assert re.search(r"step +40/12000.* \d:\d\d:\d\d", last)
    assert "loss 0.5000" in last
    assert len(last) <= 80 or name == "dumb"


CELL = re.compile(r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m(\u2580+)")


def drawn(*pictures: np.ndarray, columns: int = 80) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=columns)
    console.print(half_blocks(pictures, columns=columns))
    return file.getvalue()


def pixels(text: str) -> np.ndarray:
    """What a terminal shows of a picture, [16, W, 3]: the colours of its escape sequences."""
    rows = []
    for line in text.splitlines():
        cells = [[int(n) for n in m[:6]] for m in CELL.findall(line) for _ in m[6]]
        rows += [[cell[:3] for cell in cells], [cell[3:] for cell in cells]]
    return np.array(rows, np.uint8)


def test_each_character_is_two_pixels() -> None:
    rng = np.random.default_rng(0)
    digit_HW3 = rng.integers(0, 256, (8, 8, 3), np.uint8)
    assert (pixels(drawn(digit_HW3)) == digit_HW3.repeat(2, 0).repeat(2, 1)).all()
    wide_HW3 = rng.integers(0, 256, (32, 64, 3), np.uint8)
    mean = wide_HW3.reshape(16, 2, 32, 2, 3).mean((1, 3))
    assert np.abs(pixels(drawn(wide_HW3)).astype(float) - mean).max() <= 1  # it rounds


def test_pictures_stand_side_by_side_as_many_as_fit() -> None:
    grey = [np.full((8, 8, 3), 10 * n, np.uint8) for n in range(1, 6)]
    shown = pixels(drawn(*grey, columns=52))  # 16 + 1 + 16 + 1 + 16
    assert shown.shape == (16, 48, 3)
    assert shown[0, ::16, 0].tolist() == [10, 20, 30]
    assert pixels(drawn(np.zeros((8, 800, 3), np.uint8), columns=40)).shape == (16, 40, 3)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_file_gets_no_pictures(terminal: bool) -> None:
    file = io.StringIO()
    shown = Terminal(total=3, start=0, every=1)
    colours: Any = {"color_system": "truecolor"} if terminal else {}
    shown.console = Console(file=file, force_terminal=terminal, width=80, **colours)
    shown.show([np.zeros((8, 8, 3), np.uint8)])
    shown.close()
    assert ("\u2580" in file.getvalue()) == terminal


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


def test_a_server_of_wandb_that_is_not_reached_is_named_and_not_the_login(tmp_path, monkeypatch):
    errors = pytest.importorskip("wandb.errors")
    config = run_config(logger=LoggerConfig(wandb_project="x"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    for error, named, other in (
        (errors.CommError("timed out\nits settings"), "http://127.0.0.1:9 did not", "wandb login"),
        (errors.AuthenticationError("not logged in"), "wandb login", "127.0.0.1"),
        (errors.UsageError("no API key"), "wandb login", "127.0.0.1"),
    ):

        def refuse(error: Exception = error, **_: Any) -> None:
            raise error

        monkeypatch.setattr("wandb.init", refuse)
        with pytest.raises(ValueError, match=r"^logger\.wandb_project=x: ") as caught:
            Dashboards(config, tmp_path, start=0)
        said = str(caught.value)
        assert named in said and other not in said and "wandb_mode=offline" in said
        assert str(error).partition("\n")[0] in said and "its settings" not in said

"""Each way of watching a run fails with each error: it is said twice, and the run goes on."""

from __future__ import annotations

import errno
import io
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dit.config import CheckpointConfig, DatasetConfig, LoggerConfig, MockGeometry, ValidationConfig
from dit.config_loading import load_config
from dit.console import Console
from dit.data.rejections import RefusedSample
from dit.train.metrics import run_logger
from dit.train.metrics.jsonl import JsonlWriter, LogFileError
from dit.train.metrics.mlperf_log import MlperfLog
from dit.train.metrics.run_logger import RunLogger
from dit.train.metrics.step_metrics import SkippedStep
from dit.train.train_state import DrawnSamples
from dit.train.trainer import pretrain
from tests.launching import metrics
from tests.learning import tiny_run
from tests.packs import run_config

VALUES = {"loss": 0.5, "grad_norm": 1.5, "lr": 2e-3, "tokens_per_s": 4e3, "pack_fill": 1.0}
VALUES |= {"refused": 0, "skipped_steps": 0}
AT_TARGET = {"val_loss": 0.5, "target_samples": 16}
ERRORS = ("EPIPE", "ENOSPC", "ENOENT", "EROFS", "EMFILE", "ECONNRESET")
ONCE = " (said once; training goes on)"
Watcher = Callable[[RunLogger, Any, Exception], None]


def an_error(name: str) -> OSError:
    number = getattr(errno, name)
    return OSError(number, os.strerror(number))


class Failing(io.StringIO):
    """A file, a dashboard or a server that answers every call with an error."""

    def __init__(self, error: Exception):
        super().__init__()
        self.error = error

    def fail(self, *_: object, **__: object) -> Any:
        raise self.error

    write = log = finish = add_scalar = add_image = fail


def _at_open(name: str) -> Watcher:
    def fail(logger: RunLogger, patch: Any, error: Exception) -> None:
        opened = Path.open

        def refuse(path: Path, *how: Any, **more: Any) -> Any:
            if path.name == name:
                raise error
            return opened(path, *how, **more)

        patch.setattr(Path, "open", refuse)

    return fail


def _at_write(name: str) -> Watcher:
    def fail(logger: RunLogger, patch: Any, error: Exception) -> None:
        lines = {"metrics": logger.metrics, "skipped_samples": logger.skipped}
        lines["refused_samples"] = logger.refused_file and logger.refused_file._lines
        lines[name.partition(".")[0]].file = Failing(error)

    return fail


def _tensorboard(logger: RunLogger, patch: Any, error: Exception) -> None:
    patch.setattr(logger.dashboards.board, "add_scalar", Failing(error).fail)


def _tensorboard_file(logger: RunLogger, patch: Any, error: Exception) -> None:
    """Its thread ends, which later calls hear of."""
    events = logger.dashboards.board.file_writer.event_writer._async_writer
    patch.setattr(events._writer, "write", Failing(error).fail)
    patch.setattr(events._writer, "flush", Failing(error).fail)


def _wandb(logger: RunLogger, patch: Any, error: Exception) -> None:
    patch.setattr(logger.dashboards, "wandb", Failing(error))


def _target(logger: RunLogger, patch: Any, error: Exception) -> None:
    """Seconds until the target are read from the lines of all steps."""
    patch.setattr(JsonlWriter, "sum_of", Failing(error).fail)


def _cost(logger: RunLogger, patch: Any, error: Exception) -> None:
    """Of the process it asks the system, by a file."""
    patch.setattr(run_logger.psutil, "Process", Failing(error).fail)


LINES = ("metrics.jsonl", "skipped_samples.jsonl", "refused_samples.jsonl")
WATCHERS: dict[str, tuple[str, Watcher]] = {
    **{f"{name} at open": (name, _at_open(name)) for name in LINES},
    **{f"{name} at write": (name, _at_write(name)) for name in LINES},
    "seconds to the target": ("metrics.jsonl", _target),
    "MLPerf's log": ("mlperf.log", _at_open("mlperf.log")),
    "TensorBoard": ("TensorBoard", _tensorboard),
    "TensorBoard's file": ("TensorBoard", _tensorboard_file),
    "W&B": ("W&B", _wandb),
    "cost": ("the cost of the run", _cost),
}


def _progress(step: int) -> Any:
    return SimpleNamespace(step=step, consumed_samples=8 * step, lowest_val_loss=math.inf)


def a_logger(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunLogger, io.StringIO]:
    """That of a run which has just begun, and what its terminal shows."""
    monkeypatch.setattr(run_logger, "_first_lines", lambda _: [])
    monkeypatch.setattr(run_logger, "_layout", lambda _: "")
    config = run_config(
        checkpoint=CheckpointConfig(save=str(folder)),
        logger=LoggerConfig(log_interval=1, price_per_gpu_hour=1.0),
        validation=ValidationConfig(target=1.0),
    )
    run: Any = SimpleNamespace(
        config=config,
        folder=folder,
        loader=None,
        validation={},
        data_ranks=SimpleNamespace(size=lambda: 1),
        progress=_progress(0),
    )
    logger, said = RunLogger(run), io.StringIO()
    logger.mlperf = MlperfLog(folder / "mlperf.log", samples=0)
    assert logger.terminal is not None
    logger.terminal.console = Console(file=said)
    return logger, said


def watched(logger: RunLogger) -> None:
    """Two steps, each with all that a run has to say, and the end."""
    sample = {"shard": "a.tar", "dataset": "d", "reason": "TOO_LONG", "detail": ""}
    for step in (1, 2):
        logger.run.progress = _progress(step)
        skipped = SkippedStep(step=step, because="loss", keys=("a",))
        values = VALUES | {"step": step}
        logger.validating()
        logger.log_step(values if step == 1 else values | AT_TARGET, skipped)
        logger._write_refused([RefusedSample(key=str(step), **sample)])
        logger.log_samples(DrawnSamples(grid=None, videos=[], quality={}, firsts=[]))
    logger.info_cost()
    logger.close()


@pytest.mark.usefixtures("groups")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("watcher", WATCHERS)
def test_what_fails_is_said_twice_and_all_else_is_written(
    watcher: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fail = WATCHERS[watcher]
    logger, said = a_logger(tmp_path, monkeypatch)
    with monkeypatch.context() as patch:
        fail(logger, patch, an_error(error))
        watched(logger)
    lines = said.getvalue().splitlines()
    once = [line for line in lines if line.endswith(ONCE)]
    assert once and all(f", {name}" in line for line in once)
    assert all(an_error(error).strerror in line for line in once)
    again = [f"output of the run is missing: {line.removesuffix(ONCE)}" for line in once]
    assert lines[-len(again) :] == again
    for other in {*LINES} - {name}:
        assert len((tmp_path / other).read_text().splitlines()) == 2


@pytest.mark.usefixtures("groups")
def test_a_disk_that_has_space_again_gets_whole_lines(tmp_path, monkeypatch):
    logger, _ = a_logger(tmp_path, monkeypatch)
    assert logger.metrics is not None
    logger.metrics.write({"step": 1})
    raw: Any = logger.metrics.file
    kept, full = os.dup(raw.fileno()), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, raw.fileno())
    for step in (2, 3):
        logger._write({"step": step}, dashboards=False)
    os.dup2(kept, raw.fileno())
    logger._write({"step": 4}, dashboards=False)
    logger.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert [*map(str, text.splitlines())] == [f'{{"step": {n}}}' for n in range(1, 5)]
    os.close(kept)
    os.close(full)


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("name", ["environment.jsonl", "config.yaml.tmp"])
def test_an_error_at_the_start_stays_one(name, tmp_path, monkeypatch):
    _at_open(name)(None, monkeypatch, an_error("ENOSPC"))  # type: ignore[arg-type]
    with pytest.raises(LogFileError, match=f"{name.removesuffix('.tmp')} cannot be written"):
        a_logger(tmp_path, monkeypatch)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.usefixtures("groups")
def test_a_run_without_any_log_is_complete_and_its_resume_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = (MockGeometry(height=8, width=8, text_length=1),)
    run = replace(tiny_run(num_layers=1), dataset=DatasetConfig(mock=True, mock_samples=sample))
    keys = ("train.global_batch_size=1", "train.eval_interval=0", "logger.log_interval=1")
    keys += ("dataset.task_encoder_seq_length=64", f"checkpoint.save={tmp_path}")
    keys += ("dataset.num_workers=0", "scheduler.lr_decay_iters=9")
    begin = RunLogger.log_step

    def log_step(logger: RunLogger, values: Any, skipped: Any) -> None:
        if values["step"] == 3:
            for _, fail in WATCHERS.values():
                fail(logger, patch, an_error("ENOSPC"))
        begin(logger, values, skipped)

    with monkeypatch.context() as patch:
        patch.setattr(RunLogger, "log_step", log_step)
        assert pretrain(load_config(run, overrides=[*keys, "train.train_iters=4"])) == 0
    said = capsys.readouterr().out
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    assert said.count("output of the run is missing: at step 3, metrics.jsonl: ") == 1
    assert pretrain(load_config(run, overrides=[*keys, "train.train_iters=5"])) == 0
    said = capsys.readouterr().out
    assert "metrics.jsonl has lost the lines of 2 steps up to step 4 (the first is step 3)" in said
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 5]

"""MLPerf's own checker accepts the log of a whole run, and names each line that is missing."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from dit.config.groups import MlperfDivision
from dit.config_loading import load_config
from dit.train.metrics.mlperf_log import MlperfLog, mlperf_facts
from recipes.runs import dit_xl

CONF = Path(__file__).parents[3] / "conf"
FREQUENCY, BATCH = 262_144, 512
LOSSES = (0.714, 0.664, 0.640, 0.624, 0.610, 0.5859)
OPTIONAL = {
    *("seed", "target_accuracy", "averaged_validation_loss", "eval_start", "eval_stop"),
    *("lowest_numerical_precision_in_linear", "lowest_numerical_precision_in_attn"),
    *("lowest_numerical_precision_in_comm", "tensor_parallelism", "pipeline_parallelism"),
    *("context_parallelism", "expert_parallelism", "micro_batch_size", "config_filename"),
}
"""Keys that ruleset 6.0.0 does not ask for in the closed division."""


def _config(name="mlperf_flux1", division=MlperfDivision.CLOSED):
    config = load_config(dit_xl(), config_file=CONF / f"{name}.yaml")
    return replace(config, logger=replace(config.logger, mlperf_division=division))


def _clock():
    seconds = count(1_800_000_000, 60)
    return lambda: float(next(seconds))


def _evaluate(log, config, losses, *, batch, samples=0):
    """What a run logs: a first step, then validations, the last of which reaches the target."""
    every = batch * config.train.eval_interval
    for number, loss in enumerate(losses, start=1):
        if not samples:  # the first step of the run
            log.stepped(config.train, samples=batch, data_ranks=8 if batch == BATCH else 1)
        samples += every
        log.validating(samples)
        ends = "success" if loss <= config.validation.target else None
        log.validated(loss, samples=samples, ends=ends)
        assert (ends is None) == (number < len(losses))


def _whole_log(path, config, *, batch=BATCH, losses=LOSSES):
    log = MlperfLog(path, samples=0, clock=_clock())
    sizes = {"train_samples": 1_099_776, "eval_samples": 29_696}
    facts = mlperf_facts(config, devices="8 x NVIDIA H100", **sizes)
    log.begin(facts, loading_since=1_799_999_900.0, samples=0)
    _evaluate(log, config, losses, batch=batch)
    return path.read_text().splitlines(keepends=True)


def _complaints(path):
    """What the checker refuses; it runs in this process, since 30 starts of it take long."""
    from mlperf_logging.compliance_checker import mlp_compliance as checking

    checker = checking.make_checker("training", "6.0.0", quiet=True, werror=False)
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
        checking.main(str(path), "training_6.0.0/common.yaml", checker)
    logging.disable(logging.NOTSET)
    return [*checker.overwritable.values(), *checker.not_overwritable]


def test_the_log_of_a_whole_run_passes_and_each_line_is_needed(tmp_path):
    path = tmp_path / "mlperf.log"
    lines = _whole_log(path, _config())
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training"]
    command += ["--ruleset", "6.0.0", "--log_output", str(tmp_path / "checked.log"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "SUCCESS" in done.stdout + done.stderr, done
    assert _complaints(path) == []

    keys = {line.split('"key": "')[1].split('"')[0] for line in lines}
    spared = set()
    for key in sorted(keys):
        path.write_text("".join(line for line in lines if f'"key": "{key}"' not in line))
        if not _complaints(path):
            spared.add(key)
    assert spared == OPTIONAL


def test_the_small_twin_is_refused_as_closed_for_its_evaluation_frequency_alone(tmp_path):
    twin, losses = _config("mlperf_digits"), (0.9, 0.1)
    _whole_log(tmp_path / "closed.log", twin, batch=16, losses=losses)
    (only,) = _complaints(tmp_path / "closed.log")
    assert "evaluation_frequency" in only and "262144" in only
    # The open division of 6.0.0 asks for no frequency.
    twin = _config("mlperf_digits", MlperfDivision.OPEN)
    lines = _whole_log(tmp_path / "open.log", twin, batch=16, losses=losses)
    assert _complaints(tmp_path / "open.log") == []
    less = [line for line in lines if "averaged_validation_loss" not in line]
    (tmp_path / "open.log").write_text("".join(less))
    assert "averaged_validation_loss" in " ".join(_complaints(tmp_path / "open.log"))


def test_a_resumed_run_goes_on_in_the_log_without_what_came_after_its_checkpoint(tmp_path):
    config, path = _config(), tmp_path / "mlperf.log"
    whole = _whole_log(path, config)
    torn = [*whole[:-4], whole[-4][:40]]
    path.write_text("".join(torn))
    samples = 3 * FREQUENCY  # of the checkpoint
    log = MlperfLog(path, samples=samples, clock=_clock())
    kept = path.read_text().splitlines(keepends=True)
    assert 0 < len(kept) < len(torn) and kept == whole[: len(kept)]
    _evaluate(log, config, LOSSES[3:], batch=BATCH, samples=samples)
    assert len(path.read_text().splitlines()) == len(whole)
    assert _complaints(path) == []


@pytest.mark.parametrize("step", [0, 1])
def test_a_run_that_stops_short_says_so(tmp_path, step):
    log = MlperfLog(tmp_path / "mlperf.log", samples=0, clock=_clock())
    log.validated(0.7, samples=FREQUENCY, ends="aborted" if step else None)
    assert ('"status": "aborted"' in (tmp_path / "mlperf.log").read_text()) == bool(step)

"""RUN/mlperf.log: a log in the form of MLPerf Training, for FLUX.1 (`logger.mlperf_division`).

The package mlperf-logging (extra `mlperf`) checks it; writing it needs no package:

    python -m mlperf_logging.compliance_checker --usage training --ruleset 6.0.0 RUN/mlperf.log

`run_start` is written when everything is loaded, and `run_stop` after the last validation; a
resumed run continues the file, so its seconds include those between its starts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dit.config import Precision, RunConfig, TrainConfig
from dit.config.groups import MlperfDivision
from dit.parsing import parse_json
from dit.safe_writing import write_atomically

_TOKEN = ":::MLLOG "


class MlperfLog:
    """Writer of `mlperf.log`, on the first rank only; raises OSError if it cannot be written."""

    def __init__(self, path: Path, *, samples: int, clock: Callable[[], float] = time.time):
        """Continues the log of a run after `samples` samples; drops the lines after these."""
        self._path, self._clock = path, clock
        lines = (
            path.read_text(errors="replace").splitlines(True) if samples and path.exists() else ()
        )
        write_atomically(path, "".join(one for one in lines if _is_kept(one, samples)).encode())

    def begin(self, facts: Mapping[str, Any], *, loading_since: float, samples: int) -> None:
        """Writes the lines before the first step; `loading_since` is in seconds since 1970."""
        self._write("cache_clear", False)
        self._write("init_start", at=loading_since)
        for key, value in facts.items():
            self._write(key, value)
        self._write("init_stop")
        self._write("run_start")
        self._write("block_start", samples_count=samples)

    def stepped(self, train: TrainConfig, *, samples: int, data_ranks: int) -> None:
        """Writes the lines that are known after the first step: the batch sizes."""
        packs = train.global_batch_size
        self._write("global_batch_size", samples)
        self._write("micro_batch_size", max(1, samples // packs))
        self._write("gradient_accumulation_steps", packs // data_ranks)
        self._write("evaluation_frequency", samples * train.eval_interval)

    def validating(self, samples: int) -> None:
        """Writes the lines before a validation, after `samples` samples."""
        self._write("block_stop", samples_count=samples)
        self._write("eval_start", samples_count=samples)

    def validated(self, loss: float, *, samples: int, ends: str | None) -> None:
        """Writes the lines after a validation; `ends` is the status of a run that ends with it."""
        for key in ("eval_accuracy", "averaged_validation_loss"):
            self._write(key, loss, samples_count=samples)
        self._write("eval_stop", samples_count=samples)
        if ends is None:
            self._write("block_start", samples_count=samples)
        else:
            self._write("run_stop", samples_count=samples, status=ends)

    def _write(self, key: str, value: Any = None, at: float | None = None, **about: Any) -> None:
        """Appends the line of an event `key`; its time is `at`, in seconds since 1970, or now.

        Keys that end in `_start` and `_stop` are the ends of an interval.
        """
        kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
        line = {
            "namespace": "",
            "time_ms": int(1000 * (self._clock() if at is None else at)),
            "event_type": kinds.get(key.rpartition("_")[2], "POINT_IN_TIME"),
            "key": key,
            "value": value,
            "metadata": {"file": "mlperf_log.py", "lineno": 1, **about},
        }
        with self._path.open("a") as file:
            file.write(f"{_TOKEN}{json.dumps(line)}\n")


def _is_kept(line: str, samples: int) -> bool:
    """Whether a run that continues after `samples` samples keeps `line`, which may be torn."""
    try:
        found = parse_json(line.removeprefix(_TOKEN).encode())
        return found["key"] != "run_stop" and found["metadata"].get("samples_count", 0) <= samples
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def mlperf_facts(
    config: RunConfig, *, devices: str, train_samples: int, eval_samples: int
) -> dict[str, Any]:
    """Facts about a run for the first lines of its log, under MLPerf's names.

    `train_samples` and `eval_samples` are the numbers of samples of the two splits.
    """
    model, optimizer, division = config.model, config.optimizer, config.logger.mlperf_division
    narrowest = "bfloat16" if model.precision is Precision.BF16 else "fp32"
    return {
        "submission_benchmark": "flux1",
        "submission_division": str(division or MlperfDivision.OPEN),
        "submission_org": config.logger.mlperf_org,
        "submission_platform": devices,
        "seed": config.rng.seed,
        "target_accuracy": config.validation.target,
        "train_samples": train_samples,
        "eval_samples": eval_samples,
        "opt_name": str(optimizer.kind),
        "opt_adamw_beta_1": optimizer.adam_beta1,
        "opt_adamw_beta_2": optimizer.adam_beta2,
        "opt_adamw_epsilon": optimizer.adam_eps,
        "opt_adamw_weight_decay": optimizer.weight_decay,
        "opt_base_learning_rate": optimizer.lr,
        "opt_learning_rate_warmup_steps": config.scheduler.lr_warmup_iters,
        "opt_gradient_clip_norm": optimizer.clip_grad,
        "lowest_numerical_precision_in_linear": "fp8" if model.fp8 else narrowest,
        "lowest_numerical_precision_in_attn": narrowest,
        "lowest_numerical_precision_in_comm": narrowest,
        "tensor_parallelism": model.tensor_model_parallel_size,
        "pipeline_parallelism": model.pipeline_model_parallel_size,
        "context_parallelism": model.context_parallel_size,
        "expert_parallelism": 1,
        "config_filename": "config.yaml",
    }

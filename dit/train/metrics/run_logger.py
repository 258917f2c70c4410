"""The log of a run: which values are written where, and when.

Logging errors do not end a run: what cannot be written is reported once, and again in the last
lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from dit.batch import REJECTED_LATENT
from dit.config import RunConfig
from dit.config_loading import to_yaml
from dit.data import Reject, RejectCounts, dataset_sizes, sum_counts
from dit.data.rejections import RefusedSample
from dit.distributed.cuda_environment import settings_made
from dit.distributed.data_parallel import main_param_shards, types_of
from dit.distributed.full_sharding import ShardedChunk
from dit.distributed.process_groups import device
from dit.distributed.watchdog import heartbeat
from dit.progress import brief
from dit.safe_writing import write_atomically
from dit.sizing.memory import parameter_count
from dit.train.metrics.interval_metrics import drift_of, silent_corpus
from dit.train.metrics.jsonl import (
    ENVIRONMENT_FILE,
    JsonlWriter,
    RefusedFile,
    environment,
    explain_write_errors,
)
from dit.train.metrics.step_metrics import SKIPPED_FILE, SkippedStep
from dit.train.metrics.target import compared_loss, reached_line
from dit.train.metrics.writers import Dashboards, Terminal
from dit.train.train_state import DrawnSamples, TrainState
from dit.watching import NotShown, watching

if TYPE_CHECKING:
    from dit.train.metrics.mlperf_log import MlperfLog

MLPERF_FILE = "mlperf.log"


class RunLogger:
    """Writes the log of a run on the first rank; other ranks send it their values."""

    def __init__(self, run: TrainState):
        self.run = run
        self.refused_counts: dict[str, int] = {}
        self.unknown: set[str] = set()
        self.lost: dict[str, str] = {}  # output that was lost -> the line logged about it
        self.drifted: set[str] = set()  # "mean", "deviation": drifts that have been logged
        self.silent = False  # whether it was said that few samples have sound
        self.motionless = False  # whether a step without gradient has been logged
        self.terminal: Terminal | None = None
        self.metrics: JsonlWriter | None = None
        self.skipped: JsonlWriter | None = None
        self.refused_file: RefusedFile | None = None
        self.dashboards: Dashboards | None = None
        self.mlperf: MlperfLog | None = None
        if dist.get_rank() != 0:
            return
        c, start = run.config, run.progress.step
        self.terminal = Terminal(
            total=c.train.train_iters, start=start, every=c.logger.log_interval
        )
        for line in _first_lines(run):
            self.info(line)
        if run.folder is not None:
            with explain_write_errors(run.folder / "config.yaml"):
                write_atomically(run.folder / "config.yaml", to_yaml(c).encode())
            # A new run may validate before its first step, and so write a line of step 0.
            metrics = run.folder / "metrics.jsonl"
            self.metrics = JsonlWriter(metrics, start=start or -1, every_step=True)
            self.skipped = JsonlWriter(run.folder / SKIPPED_FILE, start=start)
            self.refused_file = RefusedFile(run.folder, start=start)
            with explain_write_errors(self.refused_file.path):
                for packs in run.validation.values():
                    self.refused_file.add(packs.refused, step=start)
            self.dashboards = Dashboards(c, run.folder, start=start)
            starts = JsonlWriter(run.folder / ENVIRONMENT_FILE, start=start or -1)
            with explain_write_errors(starts.path):
                starts.write(environment(step=start, layout=_layout(run)))
            starts.close()
            for note in (*self.metrics.notes, *self.skipped.notes, *starts.notes):
                self.info(note)
            reached = c.validation.is_reached_by(run.progress.lowest_val_loss)
            if c.logger.mlperf_division and not reached:
                with explain_write_errors(run.folder / MLPERF_FILE):
                    self.mlperf = _mlperf_log(run, run.folder / MLPERF_FILE)

    def info(self, text: str) -> None:
        """Prints a line on the first rank."""
        if self.terminal is not None:
            self.terminal.print(text)

    def validating(self) -> None:
        """Shows in the terminal that a validation runs, and starts its time in MLPerf's log."""
        if self.terminal is not None:
            self.terminal.busy("validating")
        if self.mlperf is not None:
            with self._watching(MLPERF_FILE):
                self.mlperf.validating(self.run.progress.consumed_samples)

    def info_cost(self) -> None:
        """Prints cost and energy of the device hours since this start, if their keys are set.

        Hours count from the start of the process, because devices cost money while a run loads.
        """
        c, count = self.run.config.logger, dist.get_world_size()
        hours = 0.0
        with self._watching("the cost of the run"):
            hours = count * (time.time() - psutil.Process().create_time()) / 3600
        told = []
        if (price := c.price_per_gpu_hour) is not None:
            told.append(f"{hours * price:,.2f} at logger.price_per_gpu_hour={price:g}")
        if (watts := c.watts_per_gpu) is not None:
            told.append(f"{brief(hours * watts / 1000)} kWh at logger.watts_per_gpu={watts:g}")
        if told:
            spent = f"{brief(hours)} hours of {count} x {device().type} together since this start"
            self.info(f"{spent}: {', '.join(told)}")

    def log_step(self, values: dict[str, Any], skipped: SkippedStep | None) -> None:
        """Logs the `values` of a step, and the step if it was `skipped`; all ranks call it.

        metrics.jsonl gets every step. Dashboards get every `log_interval`-th step and steps that
        validate. At log steps the samples refused on all ranks are gathered and added to `values`.
        """
        heartbeat("write of metrics")
        c, step = self.run.config, values["step"]
        if step % c.logger.log_interval == 0 or step == c.train.train_iters:
            self.gather_refused()
            counts = self.refused_counts.items()
            values |= {f"refused_{Reject(reason).name.lower()}": count for reason, count in counts}
        if self.terminal is None:
            return
        if skipped is not None:
            self.info(f"step {step} skipped: {skipped}")
            if self.skipped is not None:
                with self._watching(self.skipped.path.name):
                    self.skipped.write(asdict(skipped))
        if "target_samples" in values:
            values |= {"target_s": self._seconds(values)}
        self.terminal.step(values)
        if "target_samples" in values:
            self.info(reached_line(self.run, values))
        if values.get("grad_norm") == 0 and not self.motionless:
            self.motionless = True
            self.info(_no_gradient(step, c))
        if (drift := drift_of(values)) is not None and drift.split()[0] not in self.drifted:
            self.drifted.add(drift.split()[0])
            self.info(
                f"step {step}: the student's latents drift from the data's: {drift} (said once;"
                " docs/few_steps.md says what a collapse looks like)"
            )
        if (few := silent_corpus(values)) is not None and not self.silent:
            self.silent = True
            self.info(f"step {step}: {few} (said once)")
        due = step % c.logger.log_interval == 0 or "val_loss" in values
        self._write(values, dashboards=due)

    def log_start(self, losses: dict[str, float]) -> None:
        """Writes the `losses` of the validation before the first step."""
        heartbeat("write of metrics")
        shown = "  ".join(f"{name} {losses[name]:.4f}" for name in self.run.validation)
        self.info(f"step 0  {shown}")
        self._write({"step": 0, **losses}, dashboards=True)

    def _seconds(self, values: dict[str, Any]) -> float:
        """Seconds of all steps and validations of the run, including those in `values`."""
        before = 0.0
        if self.metrics is not None:
            with self._watching(self.metrics.path.name):
                before = self.metrics.sum_of(*_TIMES)
        return before + sum(values.get(name, 0.0) for name in _TIMES)

    def _write(self, values: dict[str, Any], *, dashboards: bool) -> None:
        if self.metrics is not None:
            with self._watching(self.metrics.path.name):
                self.metrics.write(values)
        if self.dashboards is not None and dashboards:
            self._log_lost(self.dashboards.write(values))
        if self.mlperf is not None:
            with self._watching(MLPERF_FILE):
                self._write_mlperf(self.mlperf, values)

    def _write_mlperf(self, log: MlperfLog, values: dict[str, Any]) -> None:
        run, samples = self.run, self.run.progress.consumed_samples
        if run.progress.step == 1:
            log.stepped(run.config, samples=samples, data_ranks=run.data_ranks.size())
        if "val_loss" in values:
            last = run.progress.step == run.config.train.train_iters
            ends = "success" if "target_samples" in values else "aborted" if last else None
            log.validated(compared_loss(values), samples=samples, ends=ends)

    @contextmanager
    def _watching(self, what: str) -> Iterator[None]:
        """A context that logs an error as the loss of the output `what`, instead of raising it."""
        lost: list[NotShown] = []
        with watching(what, lost):
            yield
        self._log_lost(lost)

    def _log_lost(self, lost: Iterable[NotShown]) -> None:
        """Logs each kind of value that could not be written, once per run."""
        for one in lost:
            if one.what not in self.lost:
                self.lost[one.what] = f"at step {self.run.progress.step}, {one}"
                self.info(f"{self.lost[one.what]} (said once; training goes on)")

    def log_samples(self, samples: DrawnSamples | None) -> None:
        """Shows the `samples` generated at this step; None on all ranks but the first."""
        if samples is None:
            return
        step, undrawn = self.run.progress.step, [*samples.undrawn]
        quality = "".join(f"  {name} {value:.4g}" for name, value in samples.quality.items())
        self.info(f"samples of step {step}: {samples.grid or 'no grid'}{quality}")
        with watching("the preview in the terminal", undrawn):
            if self.terminal is not None:
                self.terminal.show(samples.firsts)
        if self.dashboards is not None:
            undrawn += self.dashboards.add_samples(samples, step=step)
        self._log_lost(undrawn)

    def gather_refused(self) -> None:
        """Gathers the samples refused on all ranks since the last call. Collective.

        Changed counts are logged; a new reason is logged with one sample and a remedy. Each save
        calls it first, so that a resumed run knows every sample refused before.
        """
        loader = self.run.loader
        mine = (
            (loader.reject_counts(), loader.take_refused())
            if loader is not None
            else (RejectCounts(), ())
        )
        gathered = [mine] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        total = sum_counts(tally for tally, _ in gathered)
        self._write_refused(sample for _, samples in gathered for sample in samples)
        if total.refused != self.refused_counts:
            reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(total.refused.items()))
            where = (
                f"; {self.refused_file.path} names them" if self.refused_file is not None else ""
            )
            self.info(f"refused samples: {reasons}{where}")
        for reason in sorted(total.refused.keys() - self.refused_counts.keys()):
            self.info(f"  {total.line(reason)}")
        self.refused_counts = total.refused
        for name in sorted(total.unknown.keys() - self.unknown):
            reader = f"model.family={self.run.config.model.family} does not read"
            if name == REJECTED_LATENT:
                reader = "training without objective.preference leaves out"
            self.info(
                f"samples hold `{name}`, which {reader}"
                f" ({total.unknown[name]} of {total.read} so far; said once)"
            )
        self.unknown |= total.unknown.keys()

    def _write_refused(self, samples: Iterable[RefusedSample]) -> None:
        if self.refused_file is not None:
            with self._watching(self.refused_file.path.name):
                self.refused_file.add(samples, step=self.run.progress.step)

    def close(self) -> None:
        """Logs samples refused since the last call, closes files, and names lost output again."""
        if self.run.loader is not None and self.refused_file is not None:
            self._write_refused(self.run.loader.take_refused())
        for writer in (self.terminal, self.metrics, self.skipped, self.refused_file):
            if writer is not None:
                writer.close()
        if self.dashboards is not None:
            self._log_lost(self.dashboards.close())
        for said in self.lost.values():
            self.info(f"output of the run is missing: {said}")


def _mlperf_log(run: TrainState, path: Path) -> MlperfLog:
    """MLPerf's log of a loaded run; writes its first lines if the run is new."""
    from dit.train.metrics.mlperf_log import MlperfLog, mlperf_facts  # of few runs

    samples = run.progress.consumed_samples
    log = MlperfLog(path, samples=samples)
    if run.progress.step == 0:
        kind = torch.cuda.get_device_name() if device().type == "cuda" else "CPU"
        facts = mlperf_facts(
            run.config,
            devices=f"{dist.get_world_size()} x {kind}",
            train_samples=sum(dataset_sizes(run.config.dataset).values()),
            eval_samples=run.validation["val_loss"].samples,
        )
        log.begin(facts, loading_since=psutil.Process().create_time(), samples=samples)
    return log


_TIMES = ("step_time_s", "validation_s", "sampling_s")


def _first_lines(run: TrainState) -> list[str]:
    c = run.config
    packs = "1 pack" if c.train.global_batch_size == 1 else f"{c.train.global_batch_size} packs"
    lines = [
        f"{c.model.family} {c.model.name}: {parameter_count(c.model) / 1e6:.1f} M parameters,"
        f" {c.objective.name}, on {dist.get_world_size()} x {device().type} ({_layout(run)}),"
        f" {packs} of {c.dataset.task_encoder_seq_length} tokens a step",
        _precision(run),
    ]
    if run.folder is None:
        lines.append("checkpoint.save is not set: nothing will be written")
    else:
        lines.append(f"run folder {run.folder}")
    if c.samples and (warning := c.unlike_student(*c.validation_sampling)):
        lines.append(f"{warning} in validations")
    for name, packs in run.validation.items():
        if packs.counts.refused:
            lines.append(f"refused samples of {name}:{packs.counts.report()}")
    if made := settings_made():
        lines.append(f"set in the environment of CUDA: {', '.join(made)}")
    return lines + run.notes


def _no_gradient(step: int, config: RunConfig) -> str:
    """Explanation of a step without any gradient, and what to do."""
    groups = any(group.frozen for group in config.optimizer.groups)
    causes = ["every sample has a weight of 0 in the loss: check loss_weight and masks in the data"]
    if config.lora.enabled or groups:
        less = ", or freeze less (optimizer.groups)" if groups else ""
        causes = [
            "frozen weights are zero, as in the head of a new network, and let no gradient through:"
            " start from trained weights (checkpoint.load_hf, or checkpoint.finetune=true and"
            f" checkpoint.load){less}",
            *causes,
        ]
    if config.objective.preference is not None:
        causes.append("both latents of each pair are equal: pack pairs that differ")
    return (
        f"step {step}: every gradient is exactly zero, so the run learns nothing. Perhaps"
        f" {'; or '.join(causes)} (said once)"
    )


def _layout(run: TrainState) -> str:
    """The parallelism as a phrase, read from the process groups."""
    groups, stages = run.model.groups, len(run.model.chunks)
    copies = groups.dp_cp.size() // groups.intra_dp_cp.size()
    in_shares = any(isinstance(chunk, ShardedChunk) for chunk in run.model.chunks)
    ddp = run.config.ddp
    parts = [
        (f"tensor {groups.tp.size()}", groups.tp.size() > 1),
        ("sequence parallel", run.config.model.sequence_parallel),
        (f"context {groups.cp.size()} {run.config.model.cp_comm_type}", groups.cp.size() > 1),
        (f"pipeline {groups.pp.size()}", groups.pp.size() > 1),
        (f"{stages} virtual stages", stages > 1),
        (f"data {groups.dp.size()}", True),
        (f"{copies} copies of the optimizer state", copies > 1),
        ("weights in shares", in_shares),
        ("gradients summed once a step", not ddp.reduce_each_pack),
        ("layers kept gathered", not ddp.reshard_after_forward),
        (f"{ddp.prefetch_layers} layers fetched ahead", ddp.prefetch_layers != 1),
    ]
    return ", ".join(text for text, used in parts if used)


def _precision(run: TrainState) -> str:
    """The dtypes as a phrase, read from the model, its gradient buffers and its optimizer."""

    def names(types: Iterable[torch.dtype]) -> str:
        return " and ".join(sorted(str(one).removeprefix("torch.") for one in types))

    master = {shard.value.dtype for shard in main_param_shards(run.model.optimizer)}
    weights, gradients = types_of(run.model.chunks)
    return (
        f"{names(weights)} weights and matrix products, {names(gradients)} gradients and their"
        f" reduction, {names(master)} master weights"
    )

"""The record of a run: who writes what, and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dit.config.loading import to_yaml
from dit.data import Reject, RejectCounts, sum_counts
from dit.distributed.process_groups import device
from dit.distributed.watchdog.monitor import heartbeat
from dit.drawing import Undrawn
from dit.models.cost import parameter_count
from dit.train.main_params import main_param_shards
from dit.train.metrics import environment
from dit.train.metrics.jsonl import JsonlWriter, replace_whole, writing
from dit.train.metrics.refused_samples import RefusedFile
from dit.train.metrics.skipped_steps import FILE, Skip
from dit.train.metrics.writers import Dashboards, Terminal
from dit.train.train_state import DrawnSamples, TrainState


class RunLogger:
    """Everything that is written down, by the first rank; the others gather what it needs."""

    def __init__(self, run: TrainState):
        self.run = run
        self.refused: dict[str, int] = {}
        self.undrawn: set[str] = set()  # kinds that were said
        self.terminal: Terminal | None = None
        self.file: JsonlWriter | None = None
        self.skips: JsonlWriter | None = None
        self.named: RefusedFile | None = None
        self.boards: Dashboards | None = None
        if dist.get_rank() != 0:
            return
        c, start = run.config, run.progress.step
        self.terminal = Terminal(
            total=c.train.train_iters, start=start, every=c.logger.log_interval
        )
        for line in _opening(run):
            self.say(line)
        if run.folder is not None:
            with writing(run.folder / "config.yaml"):
                replace_whole(run.folder / "config.yaml", to_yaml(c).encode())
            # A run without checkpoint evaluates again before its first step.
            metrics = run.folder / "metrics.jsonl"
            self.file = JsonlWriter(metrics, start=start or -1, every_step=True)
            self.skips = JsonlWriter(run.folder / FILE, start=start)
            self.named = RefusedFile(run.folder, start=start)
            for packs in run.validation.values():
                self.named.add(packs.refused, step=start)
            self.boards = Dashboards(c, run.folder, start=start)
            starts = JsonlWriter(run.folder / environment.FILE, start=start or -1)
            starts.write(environment.environment(step=start, layout=_layout(run)))
            starts.close()
            for note in (*self.file.notes, *self.skips.notes, *starts.notes):
                self.say(note)

    def say(self, text: str) -> None:
        if self.terminal is not None:
            self.terminal.say(text)

    def step(self, values: dict[str, Any], skipped: Skip | None) -> None:
        """Every step goes to the file, every `log_interval`-th to the dashboards."""
        heartbeat("write of metrics")
        c, step = self.run.config, values["step"]
        if step % c.logger.log_interval == 0 or step == c.train.train_iters:
            self.refusals()
            values |= {_metric_of(reason): count for reason, count in self.refused.items()}
        if self.terminal is None:
            return
        if skipped is not None:
            self.say(f"step {step} skipped: {skipped}")
            if self.skips is not None:
                self.skips.write(asdict(skipped))
        self.terminal.step(values)
        due = step % c.logger.log_interval == 0 or "val_loss" in values
        if self.file is not None:
            self.file.write(values)
        if self.boards is not None and due:
            self.boards.write(values)

    def start(self, losses: dict[str, float]) -> None:
        """What was evaluated before the first step."""
        heartbeat("write of metrics")
        shown = "  ".join(f"{name} {losses[name]:.4f}" for name in self.run.validation)
        self.say(f"step 0  {shown}")
        values = {"step": 0, **losses}
        if self.file is not None:
            self.file.write(values)
        if self.boards is not None:
            self.boards.write(values)

    def samples(self, drawn: DrawnSamples | None) -> None:
        """What was sampled now; only the first rank knows where it is."""
        if drawn is None:
            return
        step, undrawn = self.run.progress.step, [*drawn.undrawn]
        quality = "".join(f"  {name} {value:.4g}" for name, value in drawn.quality.items())
        self.say(f"samples of step {step}: {drawn.grid or 'no grid'}{quality}")
        if self.boards is not None:
            undrawn += self.boards.samples(drawn, step=step)
        self._say_undrawn(undrawn, step=step)

    def _say_undrawn(self, undrawn: Iterable[Undrawn], *, step: int) -> None:
        """Each kind once in a run."""
        for one in undrawn:
            if one.what not in self.undrawn:
                self.undrawn.add(one.what)
                self.say(f"at step {step}, {one} (said once; training goes on)")

    def refusals(self) -> None:
        """Gathers what was refused since the last call, on all ranks. Collective.

        It is said when it has changed; the first time that a reason is met, also where, and what to
        do. Called before each save as well, so that a resume finds all that went before it.
        """
        loader = self.run.loader
        mine = (
            (loader.tally(), loader.take_refused()) if loader is not None else (RejectCounts(), ())
        )
        gathered = [mine] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        total = sum_counts(tally for tally, _ in gathered)
        if self.named is not None:
            for _, samples in gathered:
                self.named.add(samples, step=self.run.progress.step)
        if total.refused != self.refused:
            reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(total.refused.items()))
            where = f"; {self.named.path} names them" if self.named is not None else ""
            self.say(f"refused samples: {reasons}{where}")
        for reason in sorted(total.refused.keys() - self.refused.keys()):
            self.say(f"  {total.line(reason)}")
        self.refused = total.refused

    def close(self) -> None:
        """Ends the files; the refusals that ended the run are named first."""
        if self.named is not None and self.run.loader is not None:
            self.named.add(self.run.loader.take_refused(), step=self.run.progress.step)
        for writer in (self.terminal, self.file, self.skips, self.named, self.boards):
            if writer is not None:
                writer.close()


def _metric_of(reason: str) -> str:
    return f"refused_{Reject(reason).name.lower()}"


def _opening(run: TrainState) -> list[str]:
    c = run.config
    packs = "1 pack" if c.train.global_batch_size == 1 else f"{c.train.global_batch_size} packs"
    lines = [
        f"DiT {c.model.name}: {parameter_count(c.model) / 1e6:.1f} M parameters,"
        f" {c.objective.name}, on {dist.get_world_size()} x {device().type} ({_layout(run)}),"
        f" {packs} of {c.dataset.task_encoder_seq_length} tokens a step",
        _precision(run),
    ]
    if run.folder is None:
        lines.append("checkpoint.save is not set: nothing will be written")
    else:
        lines.append(f"run folder {run.folder}")
    for name, packs in run.validation.items():
        if packs.tally.refused:
            lines.append(f"refused samples of {name}:{packs.tally.report()}")
    return lines + run.notes


def _layout(run: TrainState) -> str:
    """What the process groups say, as they were made."""
    groups, stages = run.learner.groups, len(run.learner.chunks)
    parts = [
        (f"tensor {groups.tp.size()}", groups.tp.size() > 1),
        ("sequence parallel", run.config.model.sequence_parallel),
        (f"context {groups.cp.size()} {run.config.model.cp_comm_type}", groups.cp.size() > 1),
        (f"pipeline {groups.pp.size()}", groups.pp.size() > 1),
        (f"{stages} virtual stages", stages > 1),
        (f"data {groups.dp.size()}", True),
    ]
    return ", ".join(text for text, used in parts if used)


def _precision(run: TrainState) -> str:
    """Types in effect, read from the model, its gradient buffers and its optimizer."""

    def names(tensors: Iterable[Tensor]) -> str:
        return " and ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))

    chunks: list[Any] = [*run.learner.chunks]
    shards = main_param_shards(run.learner.optimizer)
    weights = [p for chunk in chunks for p in chunk.parameters()]
    buffers = [buffer.grad_data for chunk in chunks for buffer in chunk.buffers]
    return (
        f"{names(weights)} weights and matrix products, {names(buffers)} gradients and their"
        f" reduction, {names(shard.value for shard in shards)} master weights"
    )

"""Writers of values: metrics.jsonl, TensorBoard, W&B, and lines in the terminal.

RUN/metrics.jsonl has one JSON object for each step; floats are written with all their digits.

    step              optimizer step, from 1
    loss              mean over the global batch, before the update
    grad_norm         norm of the whole gradient, before clipping
    lr                learning rate of this step; counts updates, not skipped steps
    lr_lora_B         learning rate of adapters' B, with lora.plus_ratio; lr is that of A
    critic_loss, critic_grad_norm, critic_lr    values of DMD's critic; loss, grad_norm and lr are
                      then the student's, and exist only in steps that train it
    consumed_samples  samples seen since the start of the run
    real_tokens       tokens of the step's global batch, without padding
    pack_fill         tokens that attention computes, divided by the packs' capacity
    refused           samples refused since the start of the run, over all ranks
    step_time_s       seconds of the step
    data_s            wait for packs; this and the next four are parts of the step, on rank 0
    forward_s         model and loss
    backward_s        the rest of the schedule, with its waits for other pipeline stages
    communication_s   sums over ranks that no computation hides
    optimizer_s       update and average; on GPUs only benchmarks/benchmark.py writes these five
    tokens_per_s      real tokens a second, all ranks together
    samples_per_s     samples a second, all ranks together
    model_tflops      model TFLOP/s of one device, from the true geometry of the packs
    mfu               model_tflops divided by the data sheet's bfloat16 peak; for known GPUs
    peak_memory_gb    on rank 0 since its start: tensors of a GPU, else the whole process
    skipped           true if loss or gradient was not finite and nothing was updated
    skipped_steps     skipped steps since the start; skipped_samples.jsonl has their samples
    sparse_share      with model.sparse_attention: fraction of cubes that a cube attends to fully

Every logger.log_interval steps:

    refused_too_long, ...    refused samples by reason
    grad_norm_mlp, weight_norm, update_ratio, ema_distance, ...    interval_metrics.py
    preference_margin, preferred_drift, rejected_drift,
    preference_accuracy                                            interval_metrics.py
    student_mean, student_std, data_mean, data_std                 interval_metrics.py
    loss_q10, tokens_per_sample, samples_NAME, epoch, ...          interval_metrics.py

At the steps that validate:

    val_loss, val_loss_ema, ...    validation.py
    target_samples, target_s       validation.py
    validation_s, sampling_s       seconds of all losses; of all samples with their files
"""

# H W 3 rows, columns, colours

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.color import Color
from rich.progress import Progress, TextColumn
from rich.style import Style
from rich.text import Text

from dit.config import LoggerConfig, RunConfig, WandbMode
from dit.console import Console
from dit.progress import DONE_AND_LEFT, Shortened, in_words, one_line
from dit.train.metrics.interval_metrics import edges_and_counts
from dit.train.metrics.jsonl import explain_write_errors
from dit.train.train_state import DrawnSamples
from dit.watching import NotShown, watching

Values = Mapping[str, Any]  # numbers, and histograms as lists of pairs (interval_metrics.py)
MOST_VIDEOS = 32
"""Largest number of videos from one validation that go to W&B."""
_FINISH_S = 60.0
"""Seconds that W&B gets at the end to send its records; `wandb sync` sends what remains."""


class Dashboards:
    """Writer for TensorBoard, and for W&B if a project is set."""

    def __init__(self, config: RunConfig, folder: Path, *, start: int):
        from torch.utils.tensorboard import SummaryWriter

        self.place = config.logger.tensorboard_dir or str(folder / "tensorboard")
        what = f"the folder logger.tensorboard_dir={self.place}"
        with explain_write_errors(what, otherwise="choose another logger.tensorboard_dir"):
            self.board = SummaryWriter(self.place, purge_step=start + 1 if start else None)
        wanted = config.logger.wandb_project and config.logger.wandb_mode is not WandbMode.DISABLED
        check_wandb(config.logger)
        self.wandb = _wandb_run(config, folder) if wanted else None

    def write(self, values: Values) -> list[NotShown]:
        """Shows the `values` of a step; returns a notice for each dashboard that failed."""
        step, lost = int(values["step"]), list[NotShown]()
        shown = {k: v for k, v in values.items() if k != "step"}
        bins = {k: edges_and_counts(v) for k, v in shown.items() if isinstance(v, list)}
        with watching("TensorBoard", lost):
            for name, value in shown.items():
                if name not in bins:
                    self.board.add_scalar(name, value, step)
            for name, (edges, counts) in bins.items():
                _add_histogram(self.board, name, edges, counts, step=step)
        if self.wandb is not None:
            with watching("W&B", lost):
                import wandb

                made = {
                    name: wandb.Histogram(np_histogram=(np.array(counts), np.array(edges)))
                    for name, (edges, counts) in bins.items()
                }
                self.wandb.log(shown | made, step=step)
        return lost

    def add_samples(self, samples: DrawnSamples, *, step: int) -> list[NotShown]:
        """Shows the grid of `samples`, and in W&B the first videos.

        TensorBoard would need moviepy for videos. Returns a notice for each kind of output that
        could not be shown.
        """
        undrawn: list[NotShown] = []
        if samples.grid is not None:
            with watching("TensorBoard's image of the samples", undrawn):
                pixels_HW3 = _on_white(samples.grid)
                self.board.add_image("samples", pixels_HW3, step, dataformats="HWC")
        if self.wandb is not None:
            import wandb

            shown: dict[str, Any] = {}
            if samples.grid is not None:
                with watching("W&B's image of the samples", undrawn):
                    shown["samples"] = wandb.Image(str(samples.grid))
            with watching("W&B's videos", undrawn):
                made = [
                    wandb.Video(str(f), caption=text) for f, text in samples.videos[:MOST_VIDEOS]
                ]
                shown |= {"videos": made} if made else {}
            with watching("W&B's samples", undrawn):
                self.wandb.log(shown, step=step)
        return undrawn

    def close(self) -> list[NotShown]:
        """Writes what is left, and closes; returns a notice for each dashboard that failed."""
        lost: list[NotShown] = []
        with watching("TensorBoard", lost):
            self.board.close()
        if self.wandb is not None:
            with watching("W&B", lost):
                self.wandb.finish()
        return lost


def _on_white(grid: Path) -> np.ndarray:
    """The transparent picture `grid` on white, uint8 [H, W, 3]."""
    with Image.open(grid) as image:
        drawn = image.convert("RGBA")
    return np.asarray(Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn))[..., :3]


def _add_histogram(
    board: Any, name: str, edges: Sequence[float], counts: Sequence[int], *, step: int
) -> None:
    """Adds a histogram with `counts` between `edges` to TensorBoard, under `name`.

    The sums that TensorBoard wants are computed from the upper ends of the bins.
    """
    each = list(zip(edges[1:], counts, strict=True))
    board.add_histogram_raw(
        name,
        min=edges[0],
        max=edges[-1],
        num=sum(counts),
        sum=sum(edge * count for edge, count in each),
        sum_squares=sum(edge**2 * count for edge, count in each),
        bucket_limits=edges,
        bucket_counts=[0, *counts],
        global_step=step,
    )


def _wandb_run(config: RunConfig, folder: Path) -> Any:
    import wandb

    mode: Any = config.logger.wandb_mode  # a StrEnum with the names of W&B
    # By default a run waits at its end for a server that does not answer. Older versions of wandb
    # have no time limit.
    limit = {"finish_timeout": _FINISH_S, "finish_timeout_raises": True}
    known = {name: value for name, value in limit.items() if name in wandb.Settings.model_fields}
    try:
        return wandb.init(
            project=config.logger.wandb_project,
            name=config.logger.wandb_exp_name,
            entity=config.logger.wandb_entity,
            mode=mode,
            dir=str(folder),
            id=_wandb_id(folder),
            resume="allow",
            config=asdict(config),
            settings=wandb.Settings(**known),
        )
    except wandb.Error as error:
        raise ValueError(
            f"logger.wandb_project={config.logger.wandb_project}: {_of_wandb(error)}, set"
            " logger.wandb_mode=offline to keep the record in the run folder, or leave"
            " logger.wandb_project unset"
        ) from error


def _of_wandb(error: Exception) -> str:
    """W&B's error and a remedy, as a phrase for a message."""
    from wandb.errors import AuthenticationError, CommError

    said = str(error).partition("\n")[0]  # W&B's own settings follow in later lines
    if isinstance(error, CommError) and not isinstance(error, AuthenticationError):
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        return (
            f"the W&B server {server} did not take the run ({said}); check whether this machine"
            " reaches it (WANDB_BASE_URL, proxies)"
        )
    return f"{said}; run `wandb login`"


def _wandb_id(folder: Path) -> str:
    """Id of the W&B run, stored in the run folder so that a resume continues its curves."""
    import secrets

    file = folder / "wandb_id"
    if not file.exists():
        with explain_write_errors(file):
            file.write_text(secrets.token_hex(4))
    found = file.read_text(errors="replace").strip()
    if not re.fullmatch(r"[\w-]{1,64}", found, re.ASCII):
        raise ValueError(
            f"{file} holds {found[:64]!r}, which names no run of W&B; write the id of the run into"
            " it, or remove it to begin new curves"
        )
    return found


class Terminal:
    """Output of a run in the terminal: a progress bar, or plain lines in a file."""

    def __init__(self, *, total: int, start: int, every: int):
        self.console = Console()
        self.every = every
        self.total = total
        self.first: tuple[int, float] | None = None  # first step of this process, and its time
        self.bar: Progress | None = None
        if self.console.is_interactive:
            self.bar = one_line(self.console, TextColumn("step"), *DONE_AND_LEFT, Shortened())
            self.task = self.bar.add_task("", total=total, completed=start)
            self.bar.start()

    def print(self, text: str) -> None:
        """Prints one line, above the bar."""
        self.console.print(text)

    def show(self, pictures: Sequence[np.ndarray]) -> None:
        """Shows `pictures`, each uint8 [H, W, 3], as coloured half blocks, but not in a file."""
        # A file, or a terminal without colours (NO_COLOR), could not show the picture.
        if self.console.is_terminal and self.console.color_system is not None and pictures:
            self.console.print(half_blocks(pictures, columns=self.console.width))

    def busy(self, activity: str) -> None:
        """Shows `activity`, the work between two steps, in place of the last values."""
        if self.bar is not None:
            self.bar.update(self.task, description=activity)

    def step(self, values: Values) -> None:
        step = int(values["step"])
        self.first = self.first or (step, time.monotonic())
        shown = _line(values)
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=shown)
        if "val_loss" in values or (self.bar is None and step % self.every == 0):
            self.print(f"step {step}/{self.total}  {shown}{self._time_left(step)}")

    def _time_left(self, step: int) -> str:
        """Time left after `step`, at the mean speed of all steps but the first, which is slower."""
        assert self.first is not None
        done, seconds = step - self.first[0], time.monotonic() - self.first[1]
        if not done or step == self.total:
            return ""
        return f"  {in_words(seconds / done * (self.total - step))}"

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def _line(values: Values) -> str:
    shown = (
        ("loss", "loss"),
        ("critic", "critic_loss"),
        ("val", "val_loss"),
        ("ema", "val_loss_ema"),
    )
    parts = [f"{label} {values[name]:.4f}" for label, name in shown if name in values]
    if "preference_accuracy" in values:
        parts.append(f"pairs right {values['preference_accuracy']:.1%}")
    of_network = "" if "loss" in values else "critic_"  # a step that trains only the critic
    parts += [
        f"grad {values[f'{of_network}grad_norm']:.3f}",
        f"lr {values[f'{of_network}lr']:.2e}",
        f"{values['tokens_per_s']:,.0f} tokens/s",
        f"fill {values['pack_fill']:.1%}",
    ]
    parts += [
        f"{label} {values[name]}"
        for label, name in (("refused", "refused"), ("skipped", "skipped_steps"))
        if values[name]
    ]
    return "  ".join(parts)


def check_wandb(logger: LoggerConfig) -> None:
    """Refuses a run that logs to W&B if the package wandb is missing.

    Raises:
        ValueError: the package is not installed.
    """
    c = logger
    if c.wandb_project and c.wandb_mode is not WandbMode.DISABLED and find_spec("wandb") is None:
        raise ValueError(
            f"logger.wandb_project={c.wandb_project} needs the package wandb: install the extra"
            " `log`, or leave logger.wandb_project unset"
        )


_HEIGHT = 16  # pixels: 8 lines
_UPPER_HALF = "\u2580"  # its ink is the upper pixel, its background the lower one


def half_blocks(pictures: Sequence[np.ndarray], *, columns: int) -> Text:
    """Pictures, each uint8 [H, W, 3], in half blocks side by side: as many as fit `columns`."""
    lines = [Text() for _ in range(_HEIGHT // 2)]
    for picture_HW3 in pictures:
        small_HW3 = _small(picture_HW3, columns)
        if len(lines[0]) + bool(lines[0]) + small_HW3.shape[1] > columns:
            break
        for line, upper_W3, lower_W3 in zip(lines, small_HW3[::2], small_HW3[1::2], strict=True):
            line.append(" " if line else "")
            for upper, lower in zip(upper_W3.tolist(), lower_W3.tolist(), strict=True):
                line.append(_UPPER_HALF, Style(color=_rgb(upper), bgcolor=_rgb(lower)))
    return Text("\n").join(lines)


def _small(picture_HW3: np.ndarray, columns: int) -> np.ndarray:
    """The picture at the preview's height, at most `columns` wide; enlarged pixels stay square."""
    height, width, _ = picture_HW3.shape
    how = Image.Resampling.NEAREST if height <= _HEIGHT else Image.Resampling.BOX
    wide = min(max(1, round(width * _HEIGHT / height)), columns)
    return np.asarray(Image.fromarray(picture_HW3).resize((wide, _HEIGHT), how))


def _rgb(colour: Sequence[int]) -> Color:
    return Color.from_rgb(*colour)

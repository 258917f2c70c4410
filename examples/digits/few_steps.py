"""Students of few steps, beside their teacher: a study of small digits.

    python examples/digits/few_steps.py runs/few --seeds 1 2 3

1. teacher   conf/dit_digits_flow.yaml from scratch, and two sets of its pictures in 70 evaluations
2. students  average velocity and DMD2 in four steps and in one, and average velocity with one step
             of the teacher, which must fail
3. judge     as recipes/evaluate_digits.py does: students, and the teacher in as many steps
4. tuning    the first seed's student of four steps goes on as a plain network, in three ways

What is finished in the folder is not done again. FOLDER/study.json has the figures, study.png shows
them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dit.command_line import OptionParser
from dit.distributed.entry import run
from dit.planner.tables import table_of, wide_console

sys.path.append(str(Path(__file__).resolve().parents[2]))  # examples/ is not installed

from examples.digits.accuracy import main as evaluate
from examples.digits.study import ROOT, cpu_seconds, start_python, train_once

CONFIG = ROOT / "conf/dit_digits_flow.yaml"
GUIDANCE = 1.5  # of the teacher, which students learn
OPD = ["distill.method=opd", "objective.sampling_levels=even", "optimizer.lr=1e-3"]
DMD = ["distill.method=dmd", "objective.sampling_levels=lcm", "distill.student_every=2"]
DMD += ["optimizer.lr=3e-4", "distill.critic_lr=1e-3"]
STUDENTS: Mapping[str, tuple[int, Sequence[str]]] = {
    "opd_4": (4, OPD),
    "opd_4_one": (4, [*OPD, "distill.teacher_steps=1"]),
    "opd_1": (1, OPD),
    "dmd_4": (4, DMD),
    "dmd_1": (1, DMD),
}
"""(sampling steps, overrides of the training) of each student, by name."""
TUNINGS: Mapping[str, Sequence[str]] = {
    "plain": [],
    "cfg_target": [f"objective.cfg_target={GUIDANCE:g}"],
    "drift": ["objective.drift_weight=0.25"],
}
"""Overrides of the training for each way in which a student is tuned, by name."""
UNDISTILLED = (8, 4, 2, 1)
"""Numbers of sampling steps in which the teacher itself is judged, too."""
CURVES: Mapping[str, tuple[Sequence[str], str]] = {
    "undistilled": (
        ("undistilled_1", "undistilled_2", "undistilled_4", "undistilled_8"),
        "#666666",
    ),
    "average velocity": (("opd_1", "opd_4"), "#1f6fb4"),
    "the same, one teacher step": (("opd_4_one",), "#c77700"),
    "DMD2": (("dmd_1", "dmd_4"), "#2a8a3e"),
}
"""(names of rows, colour) of each curve of the figure, by its label."""
SMALL_PACKS = ["dataset.task_encoder_seq_length=512", "dataset.packing_buffer_size=64"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Does the unfinished parts of the study, prints its table and draws its figure; returns 0."""
    options = _parse(arguments)
    folder: Path = options.folder.resolve()
    rows = []
    if not (folder / "data" / "dataset_card.json").exists():
        start_python("-m", "data_prep", "digits", "--output_dir", folder / "data")
    for seed in options.seeds:
        rows += compared(folder / str(seed), seed, options)
    if options.tuned:
        rows += tuned(folder / str(options.seeds[0]), options.seeds[0], options)
    (folder / "study.json").write_text(json.dumps(rows, indent=1) + "\n")
    wide_console().print(table_of("mean of the seeds, lowest to highest", summary(rows)))
    draw(rows, folder / "study.png")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="of data, runs and results")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(1 2 3)")
    add("--students", nargs="*", choices=STUDENTS, default=[*STUDENTS], help="(all)")
    add("--teacher_steps", type=int, default=500, help="of the teacher's training (500)")
    add("--opd_steps", type=int, default=200, help="of average velocity (200)")
    add("--dmd_steps", type=int, default=200, help="of DMD2 (200)")
    tuning = "after which the first student is judged; none: no tuning (50 200)"
    add("--tuned", type=int, nargs="*", default=[50, 200], help=tuning)
    add("--per_prompt", type=int, default=200, help="pictures of each digit in each set (200)")
    add("--keys", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of all trainings")
    return parser.parse_args(arguments)


def compared(folder: Path, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains the teacher and the students of one seed, and judges them.

    Returns a row for each student and for each number of steps in which the teacher is judged: all
    of UNDISTILLED for the first seed, 4 and 1 for the others.
    """
    teacher = folder / "teacher"
    # even levels: of four linear steps the last begins at t = 0.001
    _train(teacher, seed, options.teacher_steps, ["objective.sampling_levels=even"], options)
    rows = []
    for steps in UNDISTILLED if seed == options.seeds[0] else (4, 1):
        words = ["--sampler", "euler", "--guidance", GUIDANCE]
        made = _judge(folder / f"undistilled_{steps}", teacher, teacher, steps, words, options)
        rows.append({"row": f"undistilled_{steps}", "seed": seed, "steps": steps} | made)
    for name in options.students:
        steps, keys = STUDENTS[name]
        student = folder / name
        keys = [*keys, *_from(teacher), *SMALL_PACKS, f"distill.teacher={teacher}"]
        keys += [f"distill.teacher_guidance={GUIDANCE:g}", f"distill.steps={steps}"]
        length = options.dmd_steps if "dmd" in name else options.opd_steps
        _train(student, seed, length, [*keys, "objective.text_dropout=0"], options)
        sampler = ["--sampler", "lcm" if "dmd" in name else "euler"]  # else it were heun
        made = _judge(student / "judged", student, teacher, steps, sampler, options)
        rows.append({"row": name, "seed": seed, "steps": steps} | made)
    for row in rows:
        undistilled = next(one for one in rows if one["row"] == f"undistilled_{row['steps']}")
        row["distance_ratio"] = row["distance"] / undistilled["distance"]
        row["teacher_cpu_s"] = cpu_seconds(teacher)
        row["cpu_s"] = cpu_seconds(folder / row["row"])
    return rows


def tuned(folder: Path, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tunes adapters of the student of four steps, without guidance, and judges each saved step.

    Returns a row for each way of tuning and each step.
    """
    student, rows = folder / "opd_4", []
    for name, keys in TUNINGS.items():
        run = folder / f"tuned_{name}"
        keys = [*keys, *_from(student), *SMALL_PACKS, "lora.rank=8", "lora.alpha=16"]
        keys += ["optimizer.lr=3e-3", "scheduler.lr_decay_style=constant"]
        keys += ["objective.sampling_levels=even", "optimizer.weight_decay=0"]
        keys += [f"checkpoint.save_interval={min(options.tuned)}"]
        keys += [f"checkpoint.keep_last={max(options.tuned)}"]
        _train(run, seed, max(options.tuned), keys, options)
        for step in options.tuned:
            saved = run / "checkpoints" / f"step_{step:08d}"
            words = ["--sampler", "euler", "--guidance", 1, "--teacher_guidance", GUIDANCE]
            made = _judge(run / f"judged_{step}", saved, folder / "teacher", 4, words, options)
            row = {"row": f"{name}_{step}", "seed": seed, "steps": 4, "cpu_s": cpu_seconds(run)}
            rows.append(row | made)
    return rows


def _from(run: Path) -> list[str]:
    keys = {"load": run, "finetune": "true", "finetune_weights": "ema"}
    return [f"checkpoint.{name}={value}" for name, value in keys.items()]


def _train(
    run: Path, seed: int, steps: int, keys: Sequence[str], options: argparse.Namespace
) -> None:
    words = [f"dataset.path={options.folder.resolve() / 'data'}", f"rng.seed={seed}"]
    words += [f"train.train_iters={steps}", f"train.eval_interval={steps}"]
    words += ["validation.num_captions=0", f"checkpoint.save_interval={steps}"]
    train_once(run, CONFIG, [*words, *keys, *options.keys])


def _judge(
    folder: Path,
    run: Path,
    teacher: Path,
    steps: int,
    words: Sequence[object],
    options: argparse.Namespace,
) -> dict[str, float]:
    """Judges pictures of `run` in `steps` sampling steps; a finished evaluation is read instead.

    Returns the fraction that is read as asked, and the spread and distance beside two sets of the
    teacher's pictures.
    """
    if not (kept := folder / "evaluation.json").exists():
        words = ["--num_steps", steps, "--teacher", teacher, "--min_accuracy", 0, *words]
        words += ["--per_prompt", options.per_prompt, "--teacher_per_prompt", options.per_prompt]
        words += ["--checkpoint_path", run, "--output_dir", folder]
        evaluate([*map(str, words)])
    found = json.loads(kept.read_text())
    names = ("accuracy", "spread", "distance", "spread_teacher", "distance_of_teacher")
    return {name: found[name] for name in names} | {
        "spread_ratio": found["spread"] / found["spread_teacher"]
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A line of the table for each name of a row: means over the seeds, with their ranges."""
    shown = {
        "read, %": ("accuracy", 100),
        "spread, % of the teacher's": ("spread_ratio", 100),
        "distance": ("distance", 1),
        "distance, of the undistilled": ("distance_ratio", 1),
        "CPU s": ("cpu_s", 1),
    }
    lines = []
    for name in dict.fromkeys(row["row"] for row in rows):
        of_one = [row for row in rows if row["row"] == name]
        line = {"": name, "seeds": str(len(of_one))}
        for head, (figure, scale) in shown.items():
            found = [scale * row[figure] for row in of_one if row.get(figure) is not None]
            line[head] = f"{fmean(found):.3g}" if found else ""
            if len(found) > 1:
                line[head] += f" ({min(found):.3g} to {max(found):.3g})"
        lines.append(line)
    return lines


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draws two panels into `file`: distance and spread of the pictures against sampling steps.

    Lines are means of the seeds, and each seed is a point.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained", dpi=80)
    away, within = figure.subplots(1, 2)
    for label, (names, colour) in CURVES.items():
        of_one = [row for row in rows if row["row"] in names]
        steps = sorted({row["steps"] for row in of_one})
        for panel, value in ((away, _far), (within, lambda row: 100 * row["spread_ratio"])):
            means = [fmean(value(row) for row in of_one if row["steps"] == k) for k in steps]
            panel.plot(steps, means, color=colour, label=label)
            panel.plot([row["steps"] for row in of_one], [*map(value, of_one)], ".", color=colour)
    between = fmean(row["distance_of_teacher"] for row in rows)
    away.axhline(between, color="#999999", linestyle="--", label="two sets of the teacher")
    away.set(title="distance to the teacher's pictures", yscale="log")
    within.axhline(100, color="#999999", linestyle="--")
    within.set(title="spread, % of the teacher's", ylim=(0, None))
    ticks = sorted({row["steps"] for row in rows})
    for panel in (away, within):
        panel.set(xlabel="steps", xscale="log", xticks=ticks, xticklabels=ticks)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.legend(*away.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(file)


def _far(row: Mapping[str, Any]) -> float:
    """Distance of a row's pictures to one set of the teacher's pictures; never negative.

    The row stores this distance minus the distance between two sets of the teacher.
    """
    return row["distance"] + row["distance_of_teacher"]


if __name__ == "__main__":
    sys.exit(run(main))

"""Students of few steps, beside their teacher: a study of small digits, or of clips.

    python examples/digits/few_steps.py runs/few --seeds 1 2 3
    python examples/digits/few_steps.py runs/few_clips --clips

1. teacher   conf/dit_digits_flow.yaml from scratch, and two sets of its pictures in 70 evaluations
2. students  average velocity and DMD2 in four steps and in one, and average velocity with one step
             of the teacher, which must fail
3. judge     as recipes/evaluate_digits.py does: students, and the teacher in as many steps
4. tuning    the first seed's student of four steps goes on as a plain network, in three ways

With --clips, the teacher is that of conf/wan_moving_digits.yaml, and is judged in 70 evaluations,
too; there is one student, of average velocity in four steps, and no tuning.

What is finished in the folder is not done again. FOLDER/study.json has the figures, study.png shows
those of digits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from dit.command_line import OptionParser
from dit.distributed.entry import run
from dit.planner.tables import table_of, wide_console

sys.path.append(str(Path(__file__).resolve().parents[2]))  # examples/ is not installed

from examples.digits.accuracy import main as evaluate
from examples.digits.study import ROOT, cpu_seconds, start_python, train_once

OPD = ["distill.method=opd", "objective.sampling_levels=even", "optimizer.lr=1e-3"]
DMD = ["distill.method=dmd", "objective.sampling_levels=lcm", "distill.student_every=2"]
DMD += ["optimizer.lr=3e-4", "distill.critic_lr=1e-3"]
STUDENTS: Mapping[str, tuple[int, Sequence[str]]] = {
    "opd_4": (4, OPD),
    "opd_4_one": (4, [*OPD, "distill.teacher_steps=1"]),
    "opd_1": (1, OPD),
    "opd_1_16": (1, [*OPD, "distill.teacher_steps=16"]),
    "dmd_4": (4, DMD),
    "dmd_1": (1, DMD),
}
"""(sampling steps, overrides of the training) of each student, by name."""
CURVES: Mapping[str, tuple[Sequence[str], str]] = {
    "undistilled": (
        ("undistilled_1", "undistilled_2", "undistilled_4", "undistilled_8"),
        "#666666",
    ),
    "average velocity": (("opd_1", "opd_4"), "#1f6fb4"),
    "the same, one teacher step": (("opd_4_one",), "#c77700"),
    "the same, 16 teacher steps": (("opd_1_16",), "#7a4fb5"),
    "DMD2": (("dmd_1", "dmd_4"), "#2a8a3e"),
}
"""(names of rows, colour) of each curve of the figure, by its label."""


@dataclass(frozen=True, kw_only=True)
class Material:
    """What a study is about: digits or clips, with the defaults of its options."""

    config: Path  # of the teacher's training
    words: Sequence[str] = ()  # for data_prep and for the judge
    guidance: float  # of the teacher, which students learn
    pack: int  # tokens in a pack of 32 digits or clips, in which students are trained
    read: Sequence[str]  # fractions in evaluation.json that are read as asked
    undistilled: Sequence[int]  # steps in which the first seed's teacher is judged, too
    judges_teacher: bool = False  # in 70 evaluations, with other noise than its two sets
    defaults: Mapping[str, Any] = field(default_factory=dict)


DIGITS = Material(
    config=ROOT / "conf/dit_digits_flow.yaml",
    guidance=1.5,
    pack=512,
    read=("accuracy",),
    undistilled=(8, 4, 2, 1),
)
CLIPS = Material(
    config=ROOT / "conf/wan_moving_digits.yaml",
    words=("--moving",),
    guidance=2.5,  # that of docs/wan.md
    pack=1536,
    read=("digit", "direction"),
    undistilled=(4,),
    judges_teacher=True,
    defaults={
        "seeds": [1],
        "students": ["opd_4"],
        "teacher_steps": 2500,
        "tuned": [],
        "per_prompt": 40,  # clips of each of 40 captions: 10 know their spread to 11% alone
    },
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Does the unfinished parts of the study, prints its table and draws its figure; returns 0."""
    options = _parse(arguments)
    folder: Path = options.folder.resolve()
    rows = []
    if not (folder / "data" / "dataset_card.json").exists():
        words = ["digits", *options.material.words, "--output_dir", folder / "data"]
        start_python("-m", "data_prep", *words)
    for seed in options.seeds:
        rows += compared(folder / str(seed), seed, options)
    if options.tuned:
        rows += tuned(folder / str(options.seeds[0]), options.seeds[0], options)
    (folder / "study.json").write_text(json.dumps(rows, indent=1) + "\n")
    wide_console().print(table_of("mean of the seeds, lowest to highest", summary(rows)))
    if not options.clips:
        draw(rows, folder / "study.png")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line, and as `material` what the study is about."""
    parser = OptionParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="of data, runs and results")
    add("--clips", action="store_true", help="moving digits by Wan, instead of pictures")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(1 2 3; of clips 1)")
    students = "(all; of clips opd_4)"
    add("--students", nargs="*", choices=STUDENTS, default=[*STUDENTS], help=students)
    length = "of the teacher's training (500; of clips 2500)"
    add("--teacher_steps", type=int, default=500, help=length)
    add("--opd_steps", type=int, default=200, help="of average velocity (200)")
    add("--dmd_steps", type=int, default=200, help="of DMD2 (200)")
    tuning = "after which the first student is judged; none: no tuning (50 200; of clips none)"
    add("--tuned", type=int, nargs="*", default=[50, 200], help=tuning)
    each = "pictures of each digit in each set (200); clips of each caption (40)"
    add("--per_prompt", type=int, default=200, help=each)
    add("--keys", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of all trainings")
    material = CLIPS if parser.parse_args(arguments).clips else DIGITS
    parser.set_defaults(**material.defaults, material=material)
    return parser.parse_args(arguments)


def compared(folder: Path, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains the teacher and the students of one seed, and judges them.

    Returns a row for each student and for each number of steps in which the teacher is judged: all
    of `Material.undistilled` for the first seed; for the others, those in which students are.
    """
    teacher, material = folder / "teacher", options.material
    # even levels: of four linear steps the last begins at t = 0.001
    _train(teacher, seed, options.teacher_steps, ["objective.sampling_levels=even"], options)
    rows = _of_teacher(folder, seed, options)
    for name in options.students:
        steps, keys = STUDENTS[name]
        student = folder / name
        keys = [*keys, *_from(teacher), *_small_packs(material), f"distill.teacher={teacher}"]
        keys += [f"distill.teacher_guidance={material.guidance:g}", f"distill.steps={steps}"]
        length = options.dmd_steps if "dmd" in name else options.opd_steps
        _train(student, seed, length, [*keys, "objective.text_dropout=0"], options)
        made = _judge(student / "judged", student, teacher, steps, [], options)
        rows.append({"row": name, "seed": seed, "steps": steps} | made)
    distances = {row["row"]: row["distance"] for row in rows}
    for row in rows:
        if (undistilled := f"undistilled_{row['steps']}") in distances:
            row["distance_ratio"] = row["distance"] / distances[undistilled]
        row["teacher_cpu_s"] = cpu_seconds(teacher)
        row["cpu_s"] = cpu_seconds(folder / row["row"])
    return rows


def _of_teacher(folder: Path, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Judges the trained teacher; returns a row for each number of its sampling steps."""
    teacher, material = folder / "teacher", options.material
    asked = [("teacher", 35, "heun")] if material.judges_teacher else []
    learned = sorted({STUDENTS[name][0] for name in options.students}, reverse=True)
    counts = material.undistilled if seed == options.seeds[0] else learned
    asked += [(f"undistilled_{steps}", steps, "euler") for steps in counts]
    rows = []
    for name, steps, sampler in asked:
        words = ["--sampler", sampler, "--guidance", material.guidance]
        made = _judge(folder / name, teacher, teacher, steps, words, options)
        rows.append({"row": name, "seed": seed, "steps": steps} | made)
    return rows


def tuned(folder: Path, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tunes adapters of the student of four steps, without guidance, and judges each saved step.

    Returns a row for each way of tuning and each step.
    """
    student, guidance, rows = folder / "opd_4", options.material.guidance, []
    ways = {
        "plain": [],
        "cfg_target": [f"objective.cfg_target={guidance:g}"],
        "drift": ["objective.drift_weight=0.25"],
    }
    for name, keys in ways.items():
        run = folder / f"tuned_{name}"
        keys = [*keys, *_from(student), *_small_packs(options.material)]
        keys += ["lora.rank=8", "lora.alpha=16"]
        keys += ["optimizer.lr=3e-3", "scheduler.lr_decay_style=constant"]
        keys += ["objective.sampling_levels=even", "optimizer.weight_decay=0"]
        keys += [f"checkpoint.save_interval={min(options.tuned)}"]
        keys += [f"checkpoint.keep_last={max(options.tuned)}"]
        _train(run, seed, max(options.tuned), keys, options)
        for step in options.tuned:
            saved = run / "checkpoints" / f"step_{step:08d}"
            words = ["--sampler", "euler", "--guidance", 1, "--teacher_guidance", guidance]
            made = _judge(run / f"judged_{step}", saved, folder / "teacher", 4, words, options)
            row = {"row": f"{name}_{step}", "seed": seed, "steps": 4, "cpu_s": cpu_seconds(run)}
            rows.append(row | made)
    return rows


def _from(run: Path) -> list[str]:
    keys = {"load": run, "finetune": "true", "finetune_weights": "ema"}
    return [f"checkpoint.{name}={value}" for name, value in keys.items()]


def _small_packs(material: Material) -> list[str]:
    return [f"dataset.task_encoder_seq_length={material.pack}", "dataset.packing_buffer_size=64"]


def _train(
    run: Path, seed: int, steps: int, keys: Sequence[str], options: argparse.Namespace
) -> None:
    words = [f"dataset.path={options.folder.resolve() / 'data'}", f"rng.seed={seed}"]
    words += [f"train.train_iters={steps}", f"train.eval_interval={steps}"]
    words += ["validation.num_captions=0", f"checkpoint.save_interval={steps}"]
    train_once(run, options.material.config, [*words, *keys, *options.keys])


def _judge(
    folder: Path,
    run: Path,
    teacher: Path,
    steps: int,
    words: Sequence[object],
    options: argparse.Namespace,
) -> dict[str, float]:
    """Judges pictures of `run` in `steps` sampling steps; a finished evaluation is read instead.

    Returns the fractions that are read as asked, and the spread and distance beside two sets of
    the teacher's pictures.
    """
    if not (kept := folder / "evaluation.json").exists():
        words = ["--num_steps", steps, "--teacher", teacher, "--min_accuracy", 0, *words]
        words += ["--per_prompt", options.per_prompt, "--teacher_per_prompt", options.per_prompt]
        words += ["--checkpoint_path", run, "--output_dir", folder, *options.material.words]
        evaluate([*map(str, words)])
    found = json.loads(kept.read_text())
    names = ("spread", "distance", "spread_teacher", "distance_of_teacher")
    return {name: found[name] for name in (*options.material.read, *names)} | {
        "spread_ratio": found["spread"] / found["spread_teacher"]
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A line of the table for each name of a row: means over the seeds, with their ranges.

    Figures that no row has are left out.
    """
    known = {
        "read, %": ("accuracy", 100),
        "digit, %": ("digit", 100),
        "direction, %": ("direction", 100),
        "spread, % of the teacher's": ("spread_ratio", 100),
        "distance": ("distance", 1),
        "distance, of the undistilled": ("distance_ratio", 1),
        "CPU s": ("cpu_s", 1),
    }
    shown = {head: one for head, one in known.items() if any(one[0] in row for row in rows)}
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

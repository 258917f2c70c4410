"""Measures how much guidance is left after tuning a network with distilled guidance in 4 ways.

    python examples/digits/distilled_digits.py runs/distilled

In this file, "old" digits are those of scikit-learn, light on dark, with the prompts of the base
network. "New" digits are the same ones inverted, dark on white, with prompts that the base has
never seen. An "arm" of the study is one of the four ways of tuning.

1. base       trains a network on old digits from scratch (conf/flux_digits.yaml)
2. distilled  trains the base on with `objective.cfg_target` 3, so that it predicts at guidance
              scale 1 what the base predicts at scale 3
3. unguided   tunes the base on new digits with plain adapters: a network without guidance for them
4. adapter    tunes plain adapters on the distilled network's own samples, to remove its guidance
5. arms       tunes the distilled network on new digits with adapters, in each of the four ways
6. judge      samples each saved step of each arm at guidance scale 1: how many digits are read as
              their prompts say, and how much guidance is left

The guidance left is w = sum <f - u, v - u> / sum |v - u|² over held-out digits and noise levels,
where f are predictions of the tuned network with captions, and v and u are predictions of a network
without guidance, with and without captions: of the base for old digits, of `unguided` for new ones.
At w = 1 no guidance is left, at w = 3 all of it.

What is finished in the folder is not done again. FOLDER/study.json has the figures, study.png shows
them. With --checkpoint_path it judges one run, as recipes/compare_trainings.py asks for it.
"""

# N samples, T packed tokens, C patch features; F H W 3 frames, rows, columns, colours of a picture

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from dit.command_line import OptionParser
from dit.console import Console
from dit.distributed.entry import run

sys.path.append(str(Path(__file__).resolve().parents[2]))  # examples/ is not installed

from examples.digits.judges import CAPTIONS, NAMES, DigitJudge
from examples.digits.study import ROOT, cpu_seconds, start_python, train_once

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = ROOT / "conf/flux_digits.yaml"
GUIDANCE = 3.0  # that is distilled
NEW = tuple(f"an inverted {name}" for name in NAMES)
"""Prompts of new digits, which the distilled network has never seen."""
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the levels at which guidance is measured
STEPS = 10  # of the sampler, Heun's
TARGETS = "[attention,mlp,modulation,x_embedder,context_embedder,proj_out]"
UNGUIDED = {"old": "base", "new": "unguided"}
"""The network without guidance that was trained on a dataset, by the name of the dataset."""
LABELS = {
    "new": "new prompts read as asked, %",
    "old": "old prompts read as asked, %",
    "left_new": "guidance left, new prompts",
    "left_old": "guidance left, old prompts",
}
"""What is measured, by the beginning of its name in evaluation.json."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Does the parts of the study that are not done yet; with --checkpoint_path judges one run.

    Returns 0.
    """
    options = _parse(arguments)
    folder: Path = options.folder.resolve()
    if options.checkpoint_path is not None:
        found = judged(options.checkpoint_path, folder, options)
        (options.checkpoint_path / "evaluation.json").write_text(json.dumps(found) + "\n")
        return 0
    prepare(folder, options)
    compare(folder, options)
    rows = json.loads((folder / "arms" / "comparison.json").read_text())
    networks = {name: judged_network(folder, name, options) for name in ("base", "distilled")}
    if (adapter := folder / "adapter" / "lora").exists():
        networks["distilled"]["left_old_beside_adapter"] = left_beside(adapter, folder)
    (folder / "study.json").write_text(
        json.dumps({"networks": networks, "arms": rows}, indent=1) + "\n"
    )
    draw(rows, options.steps, folder / "study.png")
    Console().print(f"written: {folder / 'study.json'} and study.png")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="of data, runs and results")
    add("--checkpoint_path", type=Path, help="judge this run alone")
    add("--base_steps", type=int, default=450, help="of the network before distillation (450)")
    add("--distil_steps", type=int, default=150, help="of the distillation (150)")
    steps = {"type": int, "nargs": "+", "default": [50, 100, 200]}
    add("--steps", **steps, help="of the arms, after which they are judged (50 100 200)")
    add("--seeds", type=int, nargs="+", default=[1, 2], help="of the arms (1 2)")
    add("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="(all)")
    add("--per_prompt", type=int, default=10, help="pictures of each prompt that are read (10)")
    add("--own", type=int, default=100, help="own samples of each prompt for the adapter (100)")
    add("--keys", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of all trainings")
    return parser.parse_args(arguments)


ARMS = ("plain", "drift", "cfg_target", "frozen_adapter")


def keys_of(arm: str, folder: Path) -> list[str]:
    """Overrides (KEY=VALUE) by which the training of `arm` differs from the other arms."""
    return {
        "plain": [],
        "drift": ["objective.drift_weight=0.25"],
        "cfg_target": [f"objective.cfg_target={GUIDANCE:g}"],
        "frozen_adapter": [f"lora.frozen_adapter={folder / 'adapter' / 'lora'}"],
    }[arm]


def prepare(folder: Path, options: argparse.Namespace) -> None:
    """Makes both datasets, and trains the base, the distilled and the unguided network.

    If the arm `frozen_adapter` is asked for, it also trains and exports the adapter that the arm
    freezes. What is there already is not made again.
    """
    old, base, distilled = folder / "old", folder / "base", folder / "distilled"
    if not _packed(old):
        start_python("-m", "data_prep", "digits", "--pooled_text", "--output_dir", old)
    _train(base, [f"dataset.path={old}", *_length(options.base_steps)], options)
    keys = [*_length(options.distil_steps), *_from(base), "optimizer.lr=1e-3"]
    keys += [f"dataset.path={old}", f"objective.cfg_target={GUIDANCE:g}"]
    keys += ["dataset.task_encoder_seq_length=2304", "validation.num_captions=0"]
    _train(distilled, keys, options)
    if not _packed(folder / "new"):
        _pack(folder, "new", inverted(old))
    keys = [f"dataset.path={folder / 'new'}", *_tuning(base, options.steps)]
    _train(folder / UNGUIDED["new"], keys, options)
    if "frozen_adapter" in options.arms:
        if not _packed(folder / "own"):
            _pack(folder, "own", own_samples(distilled, options.own))
        keys = [f"dataset.path={folder / 'own'}", *_tuning(distilled, options.steps)]
        _train(folder / "adapter", keys, options)
        if not (made := folder / "adapter" / "lora").exists():
            words = ["--megatron-path", folder / "adapter", "--hf-path", made]
            words += ["--base-model", "distilled-digits"]
            start_python("-m", "dit.convert", "export-lora", *words)


def compare(folder: Path, options: argparse.Namespace) -> None:
    """Trains all arms with all seeds, and judges each run."""
    script = [Path(__file__).resolve(), folder, "--per_prompt", options.per_prompt]
    script += ["--steps", *options.steps]
    words = ["--output", folder / "arms", "--config_file", CONFIG, "--seeds", *options.seeds]
    words += ["--judge", shlex.join(map(str, script)), "--keys", f"dataset.path={folder / 'new'}"]
    words += [*_tuning(folder / "distilled", options.steps), *options.keys]
    for arm in options.arms:
        words += ["--variant", arm, *keys_of(arm, folder)]
    start_python(ROOT / "recipes/compare_trainings.py", *words)


def _length(steps: int) -> list[str]:
    return [f"train.train_iters={steps}", f"checkpoint.save_interval={steps}"]


def _from(run: Path) -> list[str]:
    keys = {"load": run, "finetune": "true", "finetune_weights": "ema"}
    return [f"checkpoint.{name}={value}" for name, value in keys.items()]


def _tuning(start: Path, steps: Sequence[int]) -> list[str]:
    """Overrides for tuning adapters of the network in `start`.

    The learning rate is constant, so that each saved step equals the end of a run of that length.
    """
    keys = ["lora.rank=8", "lora.alpha=16", f"lora.targets={TARGETS}", "optimizer.lr=3e-3"]
    keys += ["optimizer.weight_decay=0", "scheduler.lr_decay_style=constant"]
    keys += ["scheduler.lr_warmup_iters=10", "dataset.task_encoder_seq_length=800"]
    keys += ["dataset.packing_buffer_size=80", "validation.num_captions=0"]
    keys += [f"train.train_iters={max(steps)}", f"train.eval_interval={max(steps)}"]
    keys += [f"checkpoint.save_interval={min(steps)}", f"checkpoint.keep_last={max(steps)}"]
    return [*_from(start), *keys]


def _train(run: Path, keys: Sequence[str], options: argparse.Namespace) -> None:
    train_once(run, CONFIG, [*keys, *options.keys])


def _packed(folder: Path) -> bool:
    from data_prep.writing.dataset_folder import META

    return (folder / META).exists()


def _pack(folder: Path, name: str, pictures: Iterator[tuple[np.ndarray, str]]) -> None:
    """Writes grey uint8 pictures [H, W] with captions, and packs them as the dataset `name`.

    Latents are whitened as those of old digits.
    """
    media = folder / f"{name}_pictures"
    media.mkdir(exist_ok=True)
    rows = []
    for number, (picture_HW, caption) in enumerate(pictures):
        rows.append({"file_name": f"{number:05d}.png", "caption": caption})
        Image.fromarray(picture_HW).save(media / rows[-1]["file_name"])
    (media / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--image_dir", media, "--output_dir", folder / name, "--processor", "pixel"]
    words += ["--pixel_block", 2, "--pixel_channels", 1, "--whitening_from", folder / "old"]
    words += ["--text_encoder", "words", "--text_width", 256, "--pooled_text"]
    words += ["--pixel_basis", "pixels", "--minutes", 0]
    start_python("-m", "data_prep", "image", *words)


def inverted(old: Path) -> Iterator[tuple[np.ndarray, str]]:
    """Yields (grey picture [H, W], caption) of the new digits: training digits, dark on white."""
    from dit.codecs.pretrained import ModelLocation
    from dit.codecs.vae import codec_of_card
    from examples.digits.judges import decoded

    card = json.loads((old / "dataset_card.json").read_text())
    codec = codec_of_card(card, ModelLocation())
    for picture_FHW3, caption in decoded(old, "train", CAPTIONS, option="", decoder=codec):
        yield 255 - picture_FHW3[0, ..., 0], NEW[CAPTIONS.index(caption)]


def own_samples(distilled: Path, each: int) -> Iterator[tuple[np.ndarray, str]]:
    """Yields (grey picture [H, W], caption) that the distilled network makes at guidance scale 1.

    There are `each` samples for every old prompt.
    """
    from dit.sampling.open_checkpoint import open_checkpoint

    captions = [caption for caption in CAPTIONS for _ in range(each)]
    opened = open_checkpoint(distilled, weights="ema")
    for picture_FHW3, caption in zip(_made(opened, captions, seed=10_000), captions, strict=True):
        yield picture_FHW3[0, ..., 0], caption


def _made(opened: Any, captions: Sequence[str], *, seed: int, scale: float = 1) -> list[np.ndarray]:
    from dit.sampling.commands.generate_media import generate_opened
    from dit.sampling.commands.options import GenerationOptions
    from dit.sampling.prompts import Prompt

    options = GenerationOptions(num_steps=STEPS, guidance=scale)
    prompts = [Prompt(text=caption) for caption in captions]
    made = generate_opened(opened, prompts, seed=seed, options=options)
    return [picture.frames_FHW3 for picture in made]


def read_as_asked(
    opened: Any, each: int, *, new: bool = False, scale: float = 1.0
) -> tuple[float, float]:
    """Percentages of generated digits that are read as their prompt says: (as they are, inverted).

    There are `each` pictures for every prompt; `new` selects the prompts of new digits, and `scale`
    is the guidance scale.
    """
    captions = [caption for caption in (NEW if new else CAPTIONS) for _ in range(each)]
    pictures, judge = _made(opened, captions, seed=0, scale=scale), DigitJudge.trained()
    asked_N = np.repeat(np.arange(len(NAMES)), each)
    seen = (pictures, [255 - picture for picture in pictures])
    plain, inverted = (100 * float(np.mean(judge.read(one) == asked_N)) for one in seen)
    return plain, inverted


def judged(run: Path, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Figures of the tuned network in `run`, by name, for each STEP of --steps.

    new_STEP           percentage of new prompts whose picture, inverted back, is read right
    old_STEP           percentage of old prompts whose picture is read right
    old_inverted_STEP  the same, with the picture inverted
    left_new_STEP, left_old_STEP  guidance left on new and on old digits
    """
    from dit.sampling.open_checkpoint import open_checkpoint

    found = {}
    for step in options.steps:
        opened = open_checkpoint(run / "checkpoints" / f"step_{step:08d}", weights="ema")
        each = options.per_prompt
        found[f"new_{step}"] = read_as_asked(opened, each, new=True)[1]
        found[f"old_{step}"], found[f"old_inverted_{step}"] = read_as_asked(opened, each)
        for data in UNGUIDED:
            found[f"left_{data}_{step}"] = guidance_left(opened, folder, data)
    return found


def judged_network(folder: Path, name: str, options: argparse.Namespace) -> dict[str, float | None]:
    """Figures of the network `name` before tuning, by name.

    They are the percentages of old prompts that are read right at guidance scale 1 and at GUIDANCE,
    the guidance left on old digits, and the CPU seconds of its training.
    """
    from dit.sampling.open_checkpoint import open_checkpoint

    opened = open_checkpoint(folder / name, weights="ema")
    scales = (1.0, GUIDANCE)
    each = options.per_prompt
    read = {f"old_{scale:g}": read_as_asked(opened, each, scale=scale)[0] for scale in scales}
    left = guidance_left(opened, folder, "old")
    return {**read, "left_old": left, "cpu_s": cpu_seconds(folder / name)}


def left_beside(adapter: Path, folder: Path) -> float:
    """The guidance left in the distilled network with `adapter`, which is to remove guidance."""
    from dit.sampling.commands.load_options import LoadOptions
    from dit.sampling.open_checkpoint import open_checkpoint

    loading = LoadOptions(lora=[str(adapter)])
    opened = open_checkpoint(folder / "distilled", weights="ema", options=loading)
    return guidance_left(opened, folder, "old")


def guidance_left(opened: Any, folder: Path, data: str) -> float:
    """The guidance left, w, in the network `opened`, over held-out digits of the dataset `data`.

    It is fitted over all `QUANTILES` of noise levels. The predictions of the network without
    guidance are stored in `folder`, and read the next time.
    """
    import torch  # late: --help answers without it

    from dit.sampling.open_checkpoint import open_checkpoint

    kept = folder / f"{UNGUIDED[data]}_{data}.pt"
    with torch.no_grad():
        found = _predictions(opened, folder, data, captions=True)
        if not kept.exists():
            network = open_checkpoint(folder / UNGUIDED[data], weights="ema")
            told = (True, False)
            pair = [_predictions(network, folder, data, captions=captions) for captions in told]
            torch.save(pair, kept)
    return fitted(found, *torch.load(kept, weights_only=True))


def fitted(f_TC: Sequence[Tensor], v_TC: Sequence[Tensor], u_TC: Sequence[Tensor]) -> float:
    """The w for which u + w (v - u) is nearest to f, over all packs."""
    along = sum(((f - u) * (v - u)).sum().item() for f, v, u in zip(f_TC, v_TC, u_TC, strict=True))
    return along / sum((v - u).square().sum().item() for v, u in zip(v_TC, u_TC, strict=True))


def _predictions(opened: Any, folder: Path, data: str, *, captions: bool) -> list[Tensor]:
    """Predictions [T, C] of `opened` for each pack of held-out digits and each of `QUANTILES`.

    The noise is always the same. If `captions` is False, the samples have the null text.
    """
    from dit.checkpoint_paths import saved_config
    from dit.data import validation_groups
    from dit.objectives.pack_draws import with_null_inputs
    from dit.objectives.registry import training_objective
    from dit.objectives.training_target import validation_problem
    from dit.train.checkpoint.starting_point import named_checkpoint

    config = saved_config(named_checkpoint(folder / "base", named=f"{folder / 'base'}"))
    config = replace(config, dataset=replace(config.dataset, path=str(folder / data)))
    objective, seed = training_objective(config.objective), config.rng.seed
    groups = validation_groups(config)
    found = []
    for pack in groups.read(groups.plan(1).of([0])):
        batch = with_null_inputs(pack, [not captions] * pack.num_samples, opened.null)
        for quantile in QUANTILES:
            problem = validation_problem(objective, pack, seed=seed, quantile=quantile)
            found.append(opened.model(problem.input_TC, problem.level_M, batch).float())
    return found


def draw(rows: Sequence[dict[str, Any]], steps: Sequence[int], file: Path) -> None:
    """Draws a panel for each of `LABELS` into `file`: a curve for each arm over the steps.

    The curve is the mean over the seeds; each seed is a point.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained", dpi=80)
    panels = figure.subplots(2, 2).flat
    colours = dict(zip(ARMS, ("#666666", "#c77700", "#1f6fb4", "#2a8a3e"), strict=True))
    for panel, (name, label) in zip(panels, LABELS.items(), strict=True):
        for arm in {row["variant"]: None for row in rows}:
            each = [row for row in rows if row["variant"] == arm and row["seed"] != "mean"]
            values = np.array([[row[f"{name}_{step}"] for step in steps] for row in each])
            panel.plot(steps, values.mean(0), color=colours[arm], label=arm)
            for line in values:
                panel.plot(steps, line, ".", color=colours[arm])
        panel.set(title=label, xlabel="steps", xscale="log", xticks=steps, xticklabels=steps)
        if "%" in label:
            panel.set_ylim(0, 105)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(file)


if __name__ == "__main__":
    sys.exit(run(main))

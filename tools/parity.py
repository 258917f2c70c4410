"""Runs two trees of this project on the same small problems and compares all numbers bit for bit.

    python -m tools.parity OLD_TREE NEW_TREE            records both in a temporary folder, compares
    python -m tools.parity --record TREE DIR            one of them; DIR is kept
    python -m tools.parity --compare DIR DIR            two recordings
    python -m tools.parity --list                       what each run covers

Run it when code is moved or renamed and no number may change. Each run consists of the commands
that users type, in the recording's folder, with the tree first on the module path; their output is
read by code that imports nothing of either tree. Commands, configuration keys and file names are
therefore taken to be the same in both trees. Only the packs come from the tree's own functions,
which parity_packs.py finds under their old and new names.

1. record    data, then each run's commands (parity_runs.py); their output becomes one JSON file
             for each run (parity_results.py)
2. compare   two folders of such files: one line for each run and kind, exit code 1 on a difference

Both recordings must come from one machine: other processors round differently.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tools.parity_data import damage, draw_media
from tools.parity_runs import RUNS

if TYPE_CHECKING:
    from tools.parity_results import Values

MAY_GAIN = {"configuration": r" model\.family$", "loader states": r"\.identity\."}
"""Patterns of names that the new tree may have and the old one lacks, by kind of number."""


def record(tree: Path, folder: Path, names: Sequence[str], *, jobs: int) -> None:
    """Records `tree` in `folder`: data, the runs `names`, and the results of each run.

    The results are results/NAME.json. `jobs` runs are recorded at a time.
    """
    tree, folder = tree.resolve(), folder.resolve()
    (folder / "results").mkdir(parents=True)
    found = ask(tree, folder, "import dit; print(dit.__file__)").strip()
    if not Path(found).is_relative_to(tree):
        raise SystemExit(
            f"{tree} has no package `dit`: Python finds {found}; give the folder of a checkout"
        )
    keep(folder, "packing", pack_data(tree, folder))
    with ThreadPoolExecutor(jobs) as pool:
        for name, seconds in pool.map(partial(record_run, tree, folder), names):
            say(f"recorded {name} in {seconds:.0f} s")
    add_packs(tree, folder, names)


def record_run(tree: Path, folder: Path, name: str) -> tuple[str, float]:
    from tools.parity_results import read_run  # late, as below: --help answers without torch

    began, run = time.monotonic(), RUNS[name]
    codes = {"train": train(tree, folder, name, run.changes, run.processes)}
    if run.resumed:
        changes = (*run.changes, *run.resumed)
        codes["resume"] = train(tree, folder, name, changes, run.processes)
    for number, options in enumerate(run.generations):
        target = f"{name}/generated_{number}"
        words = ("--checkpoint_path", name, "--output_dir", target, "--save_latents", *options)
        script = str(tree / "recipes/generate_dit.py")
        codes[f"generate {number}"] = call(tree, folder, name, script, *words)
    for number, options in enumerate(run.exports):
        target, again = f"{name}/exported_{number}", f"{name}/imported_{number}"
        words = ("--megatron-path", name, "--hf-path", target)
        codes[f"export {number}"] = convert(tree, folder, name, "export", *words, *options)
        if run.imports:
            words = ("--hf-path", target, "--megatron-path", again)
            codes[f"import {number}"] = convert(tree, folder, name, "import", *words)
    keep(folder, name, {"commands": codes} | read_run(folder / name))
    return name, time.monotonic() - began


def train(tree: Path, folder: Path, name: str, changes: Sequence[str], processes: int) -> int:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    script = str(tree / "recipes/pretrain_dit.py")
    conf = str(tree / f"conf/{RUNS[name].config}.yaml")
    # Else a slow machine takes snapshots of the loader at other packs.
    places = (f"checkpoint.save={name}", "dataset.checkpoint_every_sec=1e9")
    return call(tree, folder, name, *launcher, script, "--config-file", conf, *places, *changes)


def convert(tree: Path, folder: Path, name: str, *words: str) -> int:
    return call(tree, folder, name, "-m", "dit.convert", *words)


def add_packs(tree: Path, folder: Path, names: Sequence[str]) -> None:
    """Adds hashes of the first packs that each data-parallel rank reads to the runs' results."""
    from tools.parity_results import text_of

    script = str(Path(__file__).resolve().with_name("parity_packs.py"))
    trained = [name for name in names if any((folder / name).glob("checkpoints/*/config.yaml"))]
    call(tree, folder, "packs", "-P", script, *(f"{n}={RUNS[n].data_ranks}" for n in trained))
    for name in trained:
        packs = folder / f"{name}.packs"
        keep(folder, name, results(folder, name) | {"packs": json.loads(text_of(packs) or "{}")})
        packs.unlink(missing_ok=True)


def call(tree: Path, folder: Path, log: str, *words: str) -> int:
    """Runs Python with the arguments `words` in the folder of the recording; returns its exit code.

    Paths can then be relative, so that no stored text contains that folder. The output is appended
    to `log`.log.
    """
    with (folder / f"{log}.log").open("a") as stream:
        print("$ python", *words, file=stream, flush=True)
        done = subprocess.run(
            [sys.executable, *words],
            **{"cwd": folder, "env": environment(tree), "stdout": stream, "stderr": stream},
        )
    if done.returncode:
        say(f"exit code {done.returncode}, see {folder}/{log}.log: {' '.join(words)[:160]}")
    return done.returncode


def ask(tree: Path, folder: Path, code: str) -> str:
    command = [sys.executable, "-c", code]
    options = {"cwd": folder, "env": environment(tree), "check": True}
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, **options).stdout


def environment(tree: Path) -> dict[str, str]:
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    return kept | offline | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def keep(folder: Path, name: str, kinds: dict[str, Values]) -> None:
    (folder / f"results/{name}.json").write_text(json.dumps(kinds, indent=0))


def results(folder: Path, run: str) -> dict[str, Values]:
    """The results of a run by kind; the folder's path in messages is replaced by a fixed word."""
    from tools.parity_results import text_of

    text = text_of(folder / f"results/{run}.json") or "{}"
    return json.loads(text.replace(str(folder.resolve()), "RECORDING"))


def pack_data(tree: Path, folder: Path) -> Values:
    """Packs both datasets by the tree's own command.

    Returns the exit codes of the commands, and hashes of the files that runs read. After hashing,
    it damages some samples of the media, which training must skip.
    """
    from tools.parity_results import sha

    draw_media(folder / "drawn")
    codec = ("--pixel_channels", "1", "--pixel_block", "2", "--text_width", "32")
    media = ("--image_dir", "drawn", "--video_dir", "drawn", "--num_workers", "0", *codec)
    codes = {
        "digits": call(tree, folder, "packing", "-m", "data_prep", "digits", "--num_samples=240",
                       "--output_dir=digits"),
        "media": call(tree, folder, "packing", "-m", "data_prep", "image", *media,
                      "--output_dir=media"),
    }  # fmt: skip
    files = [
        file
        for name in codes
        for pattern in (".nv-meta/*", "*/*.tar", "*/*.idx", "null_text.*", "dataset_card.json")
        for file in sorted((folder / name).glob(pattern))
    ]
    hashes = {str(file.relative_to(folder)): sha(file.read_bytes()) for file in files}
    for shard in sorted((folder / "media/train").glob("*.tar")):
        damage(shard)
    return {"commands": codes, "shards": hashes}


def compare(old: Path, new: Path, names: Sequence[str] | None) -> int:
    """Prints for each run and kind whether all values are equal.

    Returns 1 if a value differs, if a run is not recorded in both folders, or if nothing was
    compared; else 0.
    """
    recorded = sorted({f.stem for d in (old, new) for f in (d / "results").glob("*.json")})
    counts = {"equal": 0, "different": 0, "values": 0}
    for run in recorded if names is None else names:
        one, two = (results(d, run) for d in (old, new))
        if not one or not two:
            say(f"{run:<22}NOT RECORDED in {new if one else old}")
            counts["different"] += 1
            continue
        for kind in dict.fromkeys([*one, *two]):
            before, after = one.get(kind, {}), two.get(kind, {})
            fault = difference(kind, before, after)
            counts["different" if fault else "equal"] += 1
            counts["values"] += len(before)
            say(f"{run:<22}{kind:<16}{fault or f'equal ({len(before)} values)'}")
    equal, different, values = counts.values()
    say(f"{equal} kinds equal, {different} different, {values} values")
    return 1 if different or not equal else 0


def difference(kind: str, before: Values, after: Values) -> str:
    """A text about the values of a kind that differ, were lost or gained; empty if all are equal.

    It names the first of each and their number. Commands that failed are named even if they failed
    in both trees.
    """
    gained = [name for name in after if name not in before]
    gained = [n for n in gained if not re.search(MAY_GAIN.get(kind, "$^"), n)]
    lost = [name for name in before if name not in after]
    other = [n for n in before if n in after and before[n] != after[n]]
    failed = [n for n, code in after.items() if kind == "commands" and code != 0]
    parts = [
        f"DIFFERENT {len(other)} of {len(before)}, first {_both(other[0], before, after)}"
        if other
        else "",
        f"LOST {len(lost)}, first {lost[0]}" if lost else "",
        f"GAINED {len(gained)}, first {gained[0]}" if gained else "",
        f"FAILED {', '.join(failed)}" if failed else "",
    ]
    return "; ".join(filter(None, parts))


def _both(name: str, before: Values, after: Values) -> str:
    one, two = before[name], after[name]
    try:
        x, y = float.fromhex(one), float.fromhex(two)
    except (TypeError, ValueError):
        return f"{name}: {one} -> {two}"
    return f"{name}: {x!r} -> {y!r} (relative {abs(x - y) / max(abs(x), 1e-300):.1e})"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("places", nargs="*", type=Path, metavar="PLACE")
    parser.add_argument("--record", action="store_true", help="PLACEs are a tree and a new folder")
    parser.add_argument("--compare", action="store_true", help="PLACEs are two recordings")
    parser.add_argument("--list", action="store_true", help="say what each run covers")
    parser.add_argument("--runs", nargs="+", choices=RUNS, metavar="NAME", help="default: all")
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep both recordings here")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side (default: 1)")
    args = parser.parse_args()
    if args.list:
        for name, run in RUNS.items():
            say(f"{name:<22}{run.processes} x {run.covers}")
        return 0
    if len(args.places) != 2:
        parser.error("give two PLACEs: two trees, or two recordings with --compare")
    first, second = args.places
    if args.record:
        record(first, second, args.runs or list(RUNS), jobs=args.jobs)
        return 0
    if args.compare:
        return compare(first, second, args.runs)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.output or Path(temporary)
        for tree, name in ((first, "old"), (second, "new")):
            record(tree, folder / name, args.runs or list(RUNS), jobs=args.jobs)
        return compare(folder / "old", folder / "new", None)


if __name__ == "__main__":
    sys.exit(main())

"""Folders with a colon in their names, from packing to conversion: no library takes them for more.

Megatron-Core, Energon, pyarrow, fsspec, FFmpeg and TensorBoard know addresses, and take what stands
before a colon for the name of a file system where they get a path as text.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.launching import ROOT, SMALL, metrics, run

CODE = """
import sys
from data_prep.cli.parser import main as pack
from dit.convert.cli import main as convert
from tests.entering import enter

def pretrain(save, *words):
    places = ("dataset.path=data:ok:1", f"checkpoint.save={save}", "logger.tensorboard_dir=tb:1")
    done = enter("pretrain_dit", "--config-file", *sys.argv[1:], *places, *words)
    assert done.code == 0, done.said

assert pack(["digits", "--num_samples", "120", "--output_dir", "data:ok:1"]) == 0
assert pack(["inspect", "data:ok:1", "--html", "in:1/page.html"]) == 0
pretrain("C:/runs/x", "train.train_iters=1")
pretrain("C:/runs/x", "train.train_iters=2")
made = ("--output_dir", "made:1", "--prompt", "x", "--num_steps", "1")
done = enter("generate_dit", "--checkpoint_path", "C:/runs/x", *made)
assert done.code == 0, done.said
paths = ["--megatron-path", "C:/runs/x", "--hf-path", "hf:1/out"]
assert convert(["export", *paths]) == 0
assert convert(["import", "--hf-path", "hf:1/out", "--megatron-path", "msc:1/x"]) == 0
new = ("checkpoint.finetune=true", "checkpoint.load=msc:1/x", "train.train_iters=1")
pretrain("wan:lora/run1", *new)
"""


def test_a_local_path_with_a_colon_works_everywhere(tmp_path: Path) -> None:
    config = (str(ROOT / "conf/dit_digits.yaml"), *SMALL, "dataset.num_workers=0")
    config += ("train.eval_interval=0", "scheduler.lr_warmup_iters=0", "checkpoint.save_interval=1")
    done = run([sys.executable, "-c", CODE, *config], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    made = {"C:", "data:ok:1", "hf:1", "in:1", "made:1", "msc:1", "tb:1", "wan:lora"}
    assert {file.name for file in tmp_path.iterdir()} == made
    assert [line["step"] for line in metrics(tmp_path / "C:/runs/x")] == [1, 2]

"""The same numbers on every parallel layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dit.config import OBJECTIVES
from dit.layout_check import program
from recipes import check_layouts
from tests.launching import ROOT, back_to_step_2, command, metrics, pretrain, run

IN_CI = (
    *("full", "tp2", "cp2+ag", "pp2+vpp2", "dp2+overlap"),
    *("pp2+vpp2+packs2", "dp2+cp2", "tp2+sp+cp2+pp2"),
)
TENSOR = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true")
CONTEXT = ("model.context_parallel_size=2",)
STAGES = ("model.pipeline_model_parallel_size=2",)
VIRTUAL = (*STAGES, "model.virtual_pipeline_model_parallel_size=2")


def check(
    output: Path, *arguments: str, nproc: int, timeout: float = 600
) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """Runs check_layouts.py as documented; its result and what it wrote to `output`."""
    script = str(ROOT / "recipes/check_layouts.py")
    flags = ["--nproc", str(nproc), "--output", str(output)]
    done = run([sys.executable, script, *flags, *arguments], timeout=timeout)
    return done, json.loads(output.read_text()) if output.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_layout_gives_the_numbers_of_one_process(tmp_path):
    done, found = check(
        tmp_path / "numbers.json",
        *("--layouts", *IN_CI, "cp2+bf16", "objective.name=edm"),
        nproc=8,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {c["layout"] for c in found} >= {*IN_CI}
    for c in found:
        assert len(c["losses"]) == len(c["grad_norms"]) == 5
        assert not c["faults"] and not c["torn"]
        weights = c["tensors"]["weight"]
        assert len(weights) == 4 * 17 + 7  # 17 tensors a layer, and 7 before and after
        assert all(kind.keys() == weights.keys() for kind in c["tensors"].values())
    assert "trainings agree with one process" in done.stdout


def test_a_dit_is_trained_with_each_objective_where_none_is_named(monkeypatch):
    """The layouts above are of one; test_stacks_on_layouts.py has a DiT with the other."""
    found = []
    monkeypatch.setattr(program, "_check", lambda trainings, *_: found.extend(trainings) or 0)
    five = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    five |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in five.items():
        monkeypatch.setenv(name, value)
    assert check_layouts.main(["--layouts", "tp2"]) == 0
    assert [config.objective.name for config in found] == [*OBJECTIVES]
    assert {config.model.family for config in found} == {"dit"}


MUTANT = """
import sys
import dit.models.stacks.cross_transformer
from recipes import check_layouts

def hangs_in_the_second_stage():
    import time
    import torch.distributed as dist
    plain = dit.models.stacks.cross_transformer.pad_text
    def sleepy(*arguments):
        time.sleep(600 * dist.get_rank())
        return plain(*arguments)
    dit.models.stacks.cross_transformer.pad_text = sleepy

def waits_for_what_never_comes():
    from dit.distributed.model_parallel import StageLink
    StageLink.send_backward = lambda self, *arguments: None

globals()[sys.argv.pop(1)]()
if __name__ == "__main__":
    sys.exit(check_layouts.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hangs_in_the_second_stage", "waits_for_what_never_comes"])
def test_a_layout_that_hangs_is_named_with_what_each_process_was_at(tmp_path, fault):
    script = tmp_path / "mutant.py"
    script.write_text(MUTANT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    wanted = ["--layouts", "pp2", "objective.name=edm", "dist.distributed_timeout_minutes=0.3"]
    done = run([sys.executable, *launcher, str(script), fault, *wanted])
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert error.startswith("error: layout pp2, edm: rank ")
    assert "made no progress for 18 s (dist.distributed_timeout_minutes=0.3)" in error
    assert "validation of step 0" in error or "forward and backward pass of step" in error
    assert "last checkpoint" not in error
    if fault == "hangs_in_the_second_stage":
        assert "layout pp2, edm: rank 1 (host " in error and "Meanwhile rank 0 at " in error
    lines = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(script) in line]


def test_a_layout_that_cannot_be_is_refused(tmp_path):
    done, _ = check(tmp_path / "none.json", "--layouts", "tp3", nproc=3)
    assert done.returncode == 1
    assert "num_attention_heads=8 does not divide by tensor_model_parallel_size=3" in done.stderr
    done, _ = check(tmp_path / "none.json", "--layouts", "tp2+xp2", nproc=2)
    assert "unknown word 'xp2'" in done.stderr
    done, _ = check(tmp_path / "none.json", "--layouts", "tp2+dp2", nproc=2)
    assert "needs 4 processes, and there are 2" in done.stderr
    done, _ = check(tmp_path / "none.json", "--family", "wan", "wan9", nproc=2)
    assert "--family wan9: unknown; use some of all, " in done.stderr
    assert "wan2.1_i2v_14b" in done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Four steps of one process, saved after two and four."""
    folder = tmp_path_factory.mktemp("alone")
    _train(folder)
    return folder


def _train(folder: Path, *layout: str, nproc: int = 1) -> str:
    return pretrain(
        folder,
        *("train.train_iters=4", "train.global_batch_size=4", "checkpoint.save_interval=2"),
        *("train.eval_interval=2", "train.eval_iters=3", "model.num_attention_heads=4"),
        *("dataset.task_encoder_seq_length=512", "model.num_layers=4", "ema.sigma_rel=0.2"),
        *layout,
        nproc=nproc,
        config="dit_debug.yaml",
    ).stdout


def _same(folder: Path, other: Path) -> None:
    for one, two in zip(metrics(folder), metrics(other), strict=True):
        assert two["consumed_samples"] == one["consumed_samples"]
        assert two["real_tokens"] == one["real_tokens"]
        for name in ("loss", "grad_norm", "val_loss", "val_loss_ema"):
            assert (name in one) == (name in two)
            assert two.get(name, 0) == pytest.approx(one.get(name, 0), rel=1e-5)


@pytest.mark.slow
def test_a_run_moves_between_layouts(alone, tmp_path):
    """Validation included; and a checkpoint of any layout goes on at any other."""
    said = _train(tmp_path / "all", *TENSOR, *VIRTUAL, nproc=4)
    assert "(tensor 2, sequence parallel, pipeline 2, 2 virtual stages, data 1)" in said
    _same(alone, tmp_path / "all")
    moves = [
        (alone, (*CONTEXT, *STAGES, "model.cp_comm_type=all_gather"), 4),
        (tmp_path / "all", (*CONTEXT, "model.precision=fp32"), 2),
    ]
    for number, (origin, layout, nproc) in enumerate(moves):
        folder = back_to_step_2(origin, tmp_path / str(number))
        assert "continuing after step 2" in _train(folder, *layout, nproc=nproc)
        _same(alone, folder)


RESAVE = """
import sys
from pathlib import Path
from dit.config_loading import load_config, read_config
from dit.data import null_inputs
from dit.distributed.process_groups import process_groups, start_processes
if __name__ == "__main__":
    source, target, *layout = sys.argv[1:]
    config = load_config(read_config(Path(source) / "config.yaml"), overrides=layout)
    copies = config.ddp.dp_replicate_size
    start_processes(seed=5, model=config.model, dp_replicate_size=copies)
    from dit.train.checkpoint.state_dict import DataState, load_checkpoint
    from dit.train.model_and_optimizer import build_model_and_optimizer
    from dit.train.checkpoint.async_save import save_checkpoint
    model = build_model_and_optimizer(config, process_groups())
    progress = load_checkpoint(Path(source), model, config=config)
    data = DataState(position=None, card=None, null=null_inputs(config))
    save_checkpoint(Path(target), model, progress=progress, config=config, data=data)
"""
COMPARE = """
import sys, torch
from dit.models.dit.family import DitConfig
from dit.distributed.process_groups import start_processes
if __name__ == "__main__":
    start_processes(seed=1, model=DitConfig())
    from megatron.core import dist_checkpointing
    loaded = (dist_checkpointing.load_plain_tensors(path) for path in sys.argv[1:3])
    a, b = ({k: v for k, v in state.items() if torch.is_tensor(v)} for state in loaded)
    assert a.keys() == b.keys()
    for part in ("ema.", "exp_avg_sq", "exp_avg", "patches.weight", "decoder.layers"):
        assert any(part in name for name in a), part
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "nproc"),
    [
        ((*TENSOR, *VIRTUAL), 4),
        ((*CONTEXT, *TENSOR[:1]), 4),
        (("ddp.dp_replicate_size=2", "train.global_batch_size=4"), 4),
    ],
)
def test_weights_optimizer_and_average_arrive_unchanged(alone, tmp_path, layout, nproc):
    """Saved by one process, loaded and saved again by four: not a bit is different."""
    source, script = alone / "checkpoints/step_00000004", tmp_path / "resave.py"
    script.write_text(RESAVE)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    target = tmp_path / "again"
    done = run([sys.executable, *launcher, str(script), str(source), str(target), *layout])
    assert done.returncode == 0, done.stdout + done.stderr
    again = str(target / "checkpoints/step_00000004")
    done = run([sys.executable, "-W", "ignore", "-c", COMPARE, str(source), again])
    assert done.returncode == 0, done.stdout + done.stderr


COUNTED = """
import os, sys
from pathlib import Path
opened = []
def note(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".tar"):
        opened.append(str(arguments[0]))
sys.addaudithook(note)
from recipes.pretrain_dit import main
if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    code = main(sys.argv[1:])
    (folder / os.environ["RANK"]).write_text(str(len(opened)))
    sys.exit(code)
"""


@pytest.mark.slow
def test_shards_are_read_once_whatever_the_layout(digits, tmp_path):
    """Tensor, context and pipeline ranks open no shard; one opens as many as a rank alone."""
    script, counts = tmp_path / "counted.py", []
    script.write_text(COUNTED)
    for name, layout, nproc in (("one", (), 1), ("four", (*TENSOR[:1], *STAGES), 4)):
        folder = tmp_path / name
        folder.mkdir()
        small = ("model.num_layers=2", "model.hidden_size=48", "model.num_attention_heads=2")
        arguments = ["--config-file", str(ROOT / "conf/dit_digits.yaml"), *small]
        arguments += [f"dataset.path={digits}", f"checkpoint.save={folder}/run", *layout]
        arguments += ["train.train_iters=2", "train.eval_iters=2", "train.eval_interval=2"]
        arguments += ["dataset.num_workers=0", "dataset.task_encoder_seq_length=256"]
        arguments += ["scheduler.lr_warmup_iters=0"]
        line = command("", nproc=nproc)[:-1]
        done = run([*line, str(script), str(folder), *arguments])
        assert done.returncode == 0, done.stdout + done.stderr
        counts.append([int((folder / str(rank)).read_text()) for rank in range(nproc)])
    (one,), four = counts
    assert one > 0
    assert four == [one, 0, 0, 0]

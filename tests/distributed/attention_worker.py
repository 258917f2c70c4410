"""Two processes choose a kernel of attention; `test_attention_backend.py` starts them.

They take themselves for Hopper GPUs with all packages, whose kernels compute on the CPU here. The
clock of the first rank finds FlashAttention 3 the fastest, that of the other one the fourth.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from dit.checkpoint_paths import saved_config
from dit.config import AttentionBackend, RunConfig
from dit.config_loading import load_config
from dit.distributed.process_groups import start_processes
from dit.models.attention import fit
from dit.models.attention.kernels import ATTEND, attend_by_runs
from dit.train import attention_choice, trainer
from dit.train.checkpoint.starting_point import named_checkpoint, starting_point
from dit.train.opening import model as opening_model
from tests.learning import tiny_run

FASTEST = AttentionBackend.FLASH_3, AttentionBackend.FLASH_4
"""By the clock of each rank."""
SETTINGS = (
    *("model.precision=bf16", "model.hidden_size=64", "train.global_batch_size=2"),
    *("dataset.task_encoder_seq_length=4096", "train.eval_interval=0", "train.train_iters=1"),
)
broken: set[AttentionBackend] = set()
"""On this rank."""
used: Counter[AttentionBackend] = Counter()
clocks: list[AttentionBackend] = []
"""Kernels that were timed."""


def kernel(backend: AttentionBackend) -> Callable[..., torch.Tensor]:
    def attend(*of: Any) -> torch.Tensor:
        if backend in broken:
            raise ImportError("undefined symbol: _ZN3c10")
        used[backend] += 1
        return attend_by_runs(*of)

    return attend


def clock(backend: AttentionBackend, calls: Any, *, budget_s: float) -> float:
    assert calls and budget_s < 1
    clocks.append(backend)
    return 1.0 if backend is FASTEST[dist.get_rank()] else 2.0


def chosen(config: RunConfig, *, timed: bool = True) -> dict[str, Any]:
    """What the run computes with, what it says, and what was timed, on this rank."""
    attention_choice.fault.cache_clear()
    clocks.clear()
    try:
        before = starting_point(config.checkpoint).continued
        found, said = attention_choice.with_attention(config, timed=timed, continued=before)
    except (ValueError, RuntimeError) as error:
        return {"error": str(error)}
    return {"backend": found.model.attention_backend, "said": said, "timed": list(clocks)}


def trained(config: RunConfig) -> dict[str, Any]:
    """A run to its end: what it said of attention, computed with and stored."""
    attention_choice.fault.cache_clear()
    said: list[str] = []

    def noted(config: RunConfig, **options: Any) -> tuple[RunConfig, list[str]]:
        found, lines = attention_choice.with_attention(config, **options)
        said.extend(lines)
        used.clear()
        return found, lines

    with patch.object(opening_model, "with_attention", noted):
        trainer.pretrain(config)
    dist.barrier()  # the first rank is the last one that writes
    assert config.checkpoint.save
    place = named_checkpoint(config.checkpoint.save, named="the run")
    stored = saved_config(place).model.attention_backend
    return {"said": said, "used": list(used), "stored": stored, "step": place.name}


def work(folder: Path) -> dict[str, Any]:
    def changed(*words: str) -> RunConfig:
        return load_config(run, overrides=list(words))

    run = load_config(tiny_run(), overrides=[*SETTINGS, f"checkpoint.save={folder / 'run'}"])
    new = replace(run, checkpoint=replace(run.checkpoint, save=str(folder / "new")))
    found = {"new": trained(run), "resumed": trained(changed("train.train_iters=2"))}
    found["without timing"] = chosen(new, timed=False)
    found["deterministic"] = chosen(replace(new, train=replace(new.train, deterministic=True)))
    found["named"] = chosen(changed("model.attention_backend=flash_4"))
    found["unfit"] = chosen(changed("model.attention_backend=cudnn", "train.deterministic=true"))
    loaded = load_config(new, overrides=[f"checkpoint.load={run.checkpoint.save}"])
    found["loaded"] = chosen(loaded)
    found["finetuned"] = chosen(load_config(loaded, overrides=["checkpoint.finetune=true"]))
    if dist.get_rank() == 1:
        broken.add(AttentionBackend.FLASH_3)
    found["gone"] = chosen(run)
    found["named and broken"] = chosen(changed("model.attention_backend=flash_3"))
    broken.update(set(AttentionBackend) if dist.get_rank() == 1 else ())
    found["nothing works"] = chosen(new)
    with patch.object(attention_choice, "_capability", lambda: None):
        found["on CPUs"] = chosen(new)
    return found


def main(folder: Path) -> None:
    start_processes(seed=1, model=tiny_run().model)
    kernels = {one: kernel(one) for one in AttentionBackend if one is not AttentionBackend.AUTO}
    with (
        patch.dict(ATTEND, kernels),
        patch.object(attention_choice, "_capability", lambda: (9, 0)),
        patch.object(attention_choice, "milliseconds", clock),
        patch.object(fit, "find_spec", lambda name: True),
        patch.object(fit, "version", lambda name: "4.0.0b36"),
    ):
        found = work(folder)
    (folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

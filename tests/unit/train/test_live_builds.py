"""Keys that may change at a resume and change how the same numbers are computed and kept."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from dit.checkpoint_paths import ADAPTERS
from dit.codecs import text, vae
from dit.config import RunConfig
from dit.config_loading import load_config
from dit.config_loading.load import default_config
from dit.data import build_train_loader
from dit.data.loader_state import LoaderState
from dit.distributed import process_groups
from dit.distributed.data_parallel import gradient_buffers
from dit.lora.checkpoint import DRAWN, AdapterRun, adapter_run
from dit.models.layers import per_sample
from dit.models.stacks import stacked_transformer
from dit.sampling.validation import prompt_requests
from dit.train import memory
from dit.train.optimizer import adamw
from dit.train.trainer import pretrain
from recipes import pretrain_dit
from tests import stand_in_engine
from tests.learning import tiny_run
from tests.resuming import STEPS, resumed, saved_run, step
from tests.unit.data.conftest import Shards

WIDE = {"hidden_size": 64, "num_attention_heads": 2}  # as 8-bit products take them
MEMORY = (
    (),
    ("model.recompute_granularity=selective",),
    ("model.recompute_granularity=full",),
    ("model.recompute_granularity=full", "model.recompute_method=block"),
    ("model.recompute_granularity=full", "model.recompute_num_layers=2"),
    ("model.cpu_offloading_num_layers=1",),
)
"""What autograd keeps between the passes differs from one to the next."""
ENGINE = (
    *("model.transformer_impl=transformer_engine", "model.fp8=hybrid"),
    *("model.fp8_recipe=blockwise", "model.gradient_accumulation_fusion=true"),
    *("optimizer.exp_avg_dtype=fp16", "optimizer.exp_avg_sq_dtype=bf16"),
)
COMPUTED = (
    *("ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true", "ddp.bucket_size=10000"),
    *("ddp.grad_reduce_in_fp32=false", "optimizer.optimizer_cpu_offload=true"),
    *("model.compile=true", "model.fused_kernels=false"),
)
SWAPPED = ("model.blocks_to_swap=1", "lora.base=elsewhere")
PROCESS = (
    *("train.deterministic=true", "train.manual_gc=false"),
    *("logger.wandb_project=project", "logger.wandb_exp_name=name", "logger.wandb_entity=team"),
    "logger.wandb_mode=offline",
)
COLLECTED = ("train.manual_gc_interval=1",)
READ = ("dataset.checkpoint_every_sec=1e-6",)
PLACES = (
    *("model.vae_cache_folder=vaes", "validation.t5_cache_dir=encoders"),
    "dist.distributed_timeout_minutes=3",
)


def _kept(place: Path, config: RunConfig, groups) -> int:
    """Numbers that autograd keeps on the device in a step after a resume."""
    sizes = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    model = resumed(place, config, groups)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        step(model, config, STEPS + 1)
    return sum(sizes)


def test_memory_is_kept_by_the_new_settings(groups, tmp_path, monkeypatch):
    monkeypatch.setattr("dit.models.stacks.offload._SMALL", 0)
    config = tiny_run(num_layers=3)
    place = saved_run(tmp_path, config, groups)
    found = [_kept(place, load_config(config, overrides=tokens), groups) for tokens in MEMORY]
    assert len(set(found)) == len(MEMORY), found


def test_products_and_moments_are_those_of_the_engine(groups, tmp_path, engine):
    config = load_config(tiny_run(**WIDE), overrides=["model.precision=bf16"])
    place = saved_run(tmp_path, config, groups)
    assert not engine.seen.recipes
    config = load_config(config, overrides=ENGINE)
    model = resumed(place, config, groups)
    step(model, config, STEPS + 1)
    hybrid = stand_in_engine.Float8BlockScaling(stand_in_engine.Format.HYBRID)
    assert set(engine.seen.recipes) == {hybrid} and engine.seen.fused
    (inner,) = model.optimizer.chained_optimizers
    kept = {
        name: state.dtype for one in inner.optimizer.state.values() for name, state in one.items()
    }
    assert kept == {"exp_avg": torch.float16, "exp_avg_sq": torch.bfloat16}


def test_gradients_are_reduced_and_weights_updated_by_the_new_settings(
    groups, tmp_path, monkeypatch
):
    config = load_config(tiny_run(), overrides=["model.precision=bf16"])
    place = saved_run(tmp_path, config, groups)
    asked, updated = [], []
    of, update = per_sample.PerSample.of, adamw._adamw

    def note_kernels(level_row_T, **kwargs):
        asked.append(kwargs)
        return of(level_row_T)

    def note_update(group, params, moments):
        updated.append(len(params))
        update(group, params, moments)

    monkeypatch.setattr(per_sample.PerSample, "of", note_kernels)
    monkeypatch.setattr(adamw, "_adamw", note_update)
    monkeypatch.setattr(stacked_transformer, "check_compiler", lambda: None)
    found = []
    for tokens in ((), COMPUTED):
        here = load_config(config, overrides=tokens)
        model = resumed(place, here, groups)
        (chunk,) = model.chunks
        step(model, here, STEPS + 1)
        (dtype,) = {buffer.dtype for buffer in gradient_buffers(model.chunks)}
        found.append(
            {
                "one by one": max(updated) == 1,
                "buckets": len(chunk.bucket_groups) > 1,
                "reduced in": dtype,
                "reduced while backward goes on": chunk.config.no_sync_func is not None,
                "gathered while forward goes on": bool(chunk.remove_forward_pre_hook_handles),
                **asked[-1],
            }
        )
        updated.clear()
    before, after = found
    assert before.keys() == after.keys()
    assert not [name for name, value in before.items() if value == after[name]], found
    assert after["reduced in"] is torch.bfloat16 and after["compiled"]


def test_frozen_weights_are_found_and_wait_where_the_new_settings_say(groups, tmp_path):
    config = load_config(tiny_run(), overrides=["lora.rank=2"])
    place = saved_run(tmp_path, config, groups)
    waiting = []
    for tokens in ((), SWAPPED[:1]):
        here = load_config(config, overrides=tokens)
        model = resumed(place, here, groups)
        step(model, here, STEPS + 1)
        (stack,) = model.modules[0].stacks.values()
        waiting.append(len(stack.turns.blocks) if stack.turns else 0)
    assert waiting[0] == 0 < waiting[1]
    base = replace(DRAWN, path=tmp_path / "gone", diffusers=True)
    run = AdapterRun(adapters={}, base=base)
    (tmp_path / ADAPTERS).write_text(run.as_json())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = adapter_run(load_config(config, overrides=[f"lora.base={elsewhere}"]), tmp_path)
    assert found is not None and found.base.path == elsewhere.resolve()


def test_the_process_and_its_records_are_set_up_by_the_new_settings(groups, tmp_path, monkeypatch):
    """Its way of computing, Python's garbage collection, and what W&B is told."""
    shared = ("train.global_batch_size=1", "train.eval_interval=0", "dataset.num_workers=0")
    shared += ("dataset.task_encoder_seq_length=1024", f"checkpoint.save={tmp_path}")
    config = load_config(tiny_run(num_layers=1), overrides=shared)
    said: dict[str, Any] = {}

    def start_record(**kwargs: Any) -> SimpleNamespace:
        said.update(kwargs)
        return SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

    fake = SimpleNamespace(
        init=start_record,
        Error=RuntimeError,
        Histogram=lambda **_: None,
        Settings=type("Settings", (SimpleNamespace,), {"model_fields": {}}),
        __spec__=ModuleSpec("wandb", None),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)

    def run(steps: int, *tokens: str) -> dict[str, Any]:
        seen = {"collected": 0}

        def export(checkpoint: Path) -> Path:
            seen["deterministic"] = torch.are_deterministic_algorithms_enabled()
            seen["python collects"] = gc.isenabled()
            return checkpoint

        def collect() -> None:
            seen["collected"] += 1

        monkeypatch.setattr(memory, "gc", Gc(collect))
        here = load_config(config, overrides=[*tokens, f"train.train_iters={steps}"])
        try:
            pretrain(here, export=export)
        finally:
            torch.use_deterministic_algorithms(False)
        return seen

    assert run(1) == {"collected": 1, "deterministic": False, "python collects": False}
    assert not said
    assert run(2, *PROCESS) == {"collected": 0, "deterministic": True, "python collects": True}
    assert said.items() >= {
        ("project", "project"),
        ("name", "name"),
        ("entity", "team"),
        ("mode", "offline"),
    }
    assert run(4, *COLLECTED)["collected"] == 1 + 2


def test_the_reader_is_saved_as_often_as_the_new_setting_says():
    """What is saved are old snapshots, and the packs since then."""
    config = Shards().config(mock=True, num_workers=1, checkpoint_every_sec=3600.0)
    state, since = None, []
    for tokens in ((), (), READ):
        here = load_config(config, overrides=tokens)
        with closing(build_train_loader(here, rank=0, world_size=1)) as loader:
            if state is not None:
                loader.load_state_dict([state])
            Shards().take(loader, 20)
            state = loader.state_dict()
        since.append(sum(len(worker.since) for worker in LoaderState.of(state).unpickled()))
    assert since[1] > 30 > 15 > since[2], since


class Gc(SimpleNamespace):
    """Python's module, in which a function takes the place of `collect`."""

    def __init__(self, collect: Callable[[], None]):
        others = {name: getattr(gc, name) for name in ("freeze", "unfreeze", "enable", "disable")}
        super().__init__(collect=collect, **others)


def test_places_and_limits_are_those_of_the_new_settings(monkeypatch):
    config = load_config(default_config(), overrides=[*PLACES, "validation.negative_prompt=x"])
    run: Any = SimpleNamespace(config=config, card={"processor": {"name": "x"}}, null={})
    places = []

    def nothing(_: Any, place: Any) -> None:
        places.append(place.cache)
        raise ValueError("not here")

    monkeypatch.setattr(vae, "codec_of_card", nothing)
    monkeypatch.setattr(text, "text_encoder_of_card", nothing)
    assert prompt_requests.find_decoder(run)[0] is None
    with pytest.raises(ValueError, match="not here"):
        prompt_requests.prepare_prompts(run, [])
    assert places == ["vaes", "encoders"]

    def start(*, limit_s: float, **_: Any) -> None:
        places.append(limit_s)
        raise InterruptedError

    monkeypatch.setattr(process_groups, "start_processes", start)
    with pytest.raises(InterruptedError):
        pretrain_dit.main(["--recipe", "dit_debug", "--mock", *PLACES[-1:]])
    assert places[-1] == 180

"""The planner against what NVIDIA publishes, and what must hold between layouts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dit.config import DatasetConfig, DdpConfig, Precision, Recompute, RunConfig, TrainConfig
from dit.device_specs import DEVICES
from dit.models.dit.family import DitConfig
from dit.models.registry import named_model
from dit.planner import layouts
from dit.planner.efficiency import FUSED, PUBLISHED
from dit.planner.layouts import batch_plans, plans
from dit.planner.times import PackLoad, expected_load, times
from recipes import plan_run
from tests.packs import run_config


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: f"{one.layers}x{one.tokens}")
def test_published_figures_are_met_within_a_quarter(published, repo_root):
    model = DitConfig(
        name="custom",
        num_layers=published.layers,
        hidden_size=published.hidden_size,
        num_attention_heads=published.heads,
        mlp_ratio=published.mlp_ratio,
        adaln_lora_dim=1,  # a small part of these networks
        fused_kernels=False,  # theirs are torch's, or parts that torch has compiled
        context_parallel_size=published.context,
        recompute_granularity=Recompute.FULL if published.recomputed else Recompute.NONE,
        precision=Precision.BF16,
    )
    config = RunConfig(
        model=model,
        train=TrainConfig(global_batch_size=published.packs),
        dataset=DatasetConfig(task_encoder_seq_length=published.tokens),
        ddp=DdpConfig(overlap_grad_reduce=True, overlap_param_gather=True),
    )
    load = PackLoad.of(model, [(published.tokens, 512)])
    spent = times(
        config,
        load,
        world_size=published.devices,
        device=DEVICES["h100"],
        efficiency=published.efficiency,
    )
    tflops = 3 * load.flops * published.packs / spent.step / published.devices / 1e12
    assert tflops == pytest.approx(published.tflops, rel=0.25)
    assert f"| {tflops:.0f} |" in (repo_root / "docs/throughput_figures.md").read_text()


def test_the_page_has_both_readings_of_a_figure_that_is_not_fitted(repo_root):
    """DFM's, for Wan 2.1 14B, one sample a device: of all operations, or as of a language model."""
    wan, tokens = named_model("wan2.1_t2v_14b"), 37_440
    width, hidden = wan.hidden_size, wan.mlp_ratio * wan.hidden_size
    whole = 3 * PackLoad.of(wan, [(tokens, 512)]).flops
    of_layer = (4 * width**2 + 2 * width * hidden) + tokens * width  # causal: half of all pairs
    causal = 6 * wan.num_layers * tokens * of_layer
    page = (repo_root / "docs/throughput_figures.md").read_text()
    for operations in (whole, causal):
        assert f"{operations / 325.77e12:.1f} s" in page


def found(config=None, gpus=16, **kwargs):
    config = config or run_config(train=TrainConfig(global_batch_size=64))
    device = replace(DEVICES["h100"], **kwargs)
    load = expected_load(config)
    return plans(config, load, world_size=gpus, device=device, efficiency=FUSED)


def test_every_layout_is_a_plan_or_has_a_reason():
    good, bad = found(memory=40e9)
    layouts = [one.layout for one in (*good, *bad)]
    assert len(set(layouts)) == len(layouts)
    assert all(x.tensor * x.context * x.pipeline * x.data == 16 for x in layouts)
    assert [p.times.step for p in good] == sorted(p.times.step for p in good)
    assert all(p.memory.total <= 36e9 and 0 < p.mfu < 1 for p in good)
    assert all(one.why for one in bad)
    broken = next(one for one in bad if one.layout.pipeline == 8)
    assert "num_layers=28 does not divide" in broken.why
    assert any("GB of 36 GB" in one.why for one in bad)


def test_less_memory_leaves_layouts_that_split_or_recompute_more():
    few = {plan.layout for plan in found(memory=12e9)[0]}
    assert few < {plan.layout for plan in found()[0]}
    assert {x.recompute for x in few if x.tensor * x.context == 1} == {Recompute.FULL}


def test_slower_links_and_more_stages_take_longer():
    by_layout = {plan.layout: plan for plan in found()[0]}
    slow = {plan.layout: plan for plan in found(link=9e9, network=1e9)[0]}
    split = [x for x in by_layout if x.tensor > 1]
    assert split
    assert all(slow[x].times.tensor > 10 * by_layout[x].times.tensor for x in split)
    staged = [plan for layout, plan in by_layout.items() if layout.pipeline == 4]
    assert all(plan.bubble > 0 and plan.traffic.pipeline > 0 for plan in staged)
    alone = [plan for layout, plan in by_layout.items() if layout.data == 16]
    assert all(plan.traffic.tensor == plan.traffic.context == 0 for plan in alone)


def test_virtual_stages_trade_bubbles_for_traffic_and_memory():
    by_layout = {plan.layout: plan for plan in found()[0]}
    pairs = [(by_layout[replace(x, virtual=1)], by_layout[x]) for x in by_layout if x.virtual == 2]
    assert {whole.layout.pipeline for whole, _ in pairs} == {2}  # 28 layers into 4 groups
    for whole, parted in pairs:
        assert parted.times.bubble == pytest.approx(whole.times.bubble / 2)
        assert parted.traffic.pipeline == 2 * whole.traffic.pipeline
        # arXiv:2205.05198, Sec. 4.2.3, with two stages of two groups.
        assert parted.memory.activations == pytest.approx(1.25 * whole.memory.activations)


def test_larger_batches_are_planned_as_runs_of_their_own(monkeypatch):
    monkeypatch.setattr(layouts, "BATCHES", (1, 4))
    config = run_config(train=TrainConfig(global_batch_size=2))
    load, machine = expected_load(config), {"device": DEVICES["h100"], "efficiency": FUSED}
    batches = batch_plans(config, load, world_size=8, **machine)
    assert [one.packs for one in batches] == [2, 8]
    for one in batches:
        other = replace(config, train=TrainConfig(global_batch_size=one.packs))
        assert one.best == plans(other, load, world_size=8, **machine)[0][0]
    # Two packs cannot keep 8 devices busy by data parallelism alone.
    assert batches[1].best.tokens_per_s > 1.1 * batches[0].best.tokens_per_s
    small = replace(DEVICES["h100"], memory=1e6)
    assert batch_plans(config, load, world_size=2, device=small, efficiency=FUSED) == []


def test_load_of_a_pack_adds_up():
    model = DitConfig()
    one, two = PackLoad.of(model, [(100, 7)]), PackLoad.of(model, [(50, 3), (60, 9)])
    both = PackLoad.of(model, [(100, 7), (50, 3), (60, 9)])
    assert both.flops == one.flops + two.flops
    assert both.attention == one.attention + two.attention
    assert (both.tokens, both.text) == (210, 19)
    assert 0 < both.attention < both.flops


def test_command_prints_a_table_and_writes_all_numbers(tmp_path, capsys):
    file = tmp_path / "plan.json"
    arguments = ["--recipe", "dit_xl", "--gpus", "8", "--json", str(file), "--refused"]
    assert plan_run.main([*arguments, "train.global_batch_size=32", "--tokens", "10"]) == 0
    said = capsys.readouterr().out
    assert "TP-CP-PP-DP" in said
    assert "does not divide" in said
    numbers = json.loads(file.read_text())
    best = numbers["plans"][0]
    assert best["step_s"] == min(plan["step_s"] for plan in numbers["plans"])
    assert sum(best["by_kind_s"].values()) == pytest.approx(best["step_s"])
    assert "matrix products" in said and "989 TFLOP/s of dense bfloat16" in said
    assert f"{1e3 * best['step_s']:.1f}" in said
    assert "What a larger batch" in said
    assert [one["packs"] for one in numbers["batches"]] == [32, 64, 128, 256]
    updates = round(10e9 / (best["tokens_per_s"] * best["step_s"]))
    assert f" {updates:,} " in said and f" {round(updates / 8):,} " in said

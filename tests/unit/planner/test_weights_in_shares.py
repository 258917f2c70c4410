"""Memory, traffic and layouts of `ddp.sharding=weights`, by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dit.config import (
    BaseType,
    DatasetConfig,
    DdpConfig,
    EmaConfig,
    EmaKind,
    LoraConfig,
    ModelConfig,
    Precision,
    Recompute,
    RunConfig,
    Sharding,
    TrainConfig,
)
from dit.device_specs import DEVICES
from dit.models.dit.family import DitConfig
from dit.models.registry import named_model, pairs
from dit.planner.efficiency import FUSED
from dit.planner.layouts import ParallelLayout, break_even, plan_of, plans, recommended
from dit.planner.times import PackLoad, Times, expected_load, times
from dit.planner.traffic import checkpoint_bytes, traffic
from dit.sizing.describe import describe
from dit.sizing.memory import inventory_of, memory, parameter_count, trained_count
from dit.sizing.pack_traffic import break_even_tokens, pack_traffic
from dit.sizing.recomputation import choose_recomputation

SHARES = DdpConfig(sharding=Sharding.WEIGHTS)
LOAD = PackLoad(tokens=1000.0, text=125.0, flops=70.0, attention=20.0)


def run(model: ModelConfig, ddp: DdpConfig = SHARES, **groups: Any) -> RunConfig:
    return RunConfig(
        model=replace(model, precision=Precision.BF16),
        dataset=DatasetConfig(mock=True, task_encoder_seq_length=32_768),
        train=TrainConfig(global_batch_size=8),
        ema=EmaConfig(kind=EmaKind.NONE),
        ddp=ddp,
        **groups,
    )


@pytest.mark.parametrize("name", ["wan2.1_t2v_14b", "qwen_image", "dit_xl"])
def test_bytes_of_a_rank_are_those_of_its_rows(name: str) -> None:
    """torch gives rank r the rows from r * ceil(n / 8) on; few weights do not divide by 8."""
    config = run(named_model(name))
    shapes = [pair.shape for pair in pairs(config.model)]
    rows = sum(-(-shape[0] // 8) * math.prod(shape[1:]) for shape in shapes)
    need = memory(config, world_size=8)
    assert need.weights == need.gradients == parameter_count(config.model) * 4 // 8
    assert need.weights <= 4 * rows <= 1.05 * need.weights
    assert need.optimizer == 2 * need.weights
    averaged = replace(config, ema=EmaConfig(kind=EmaKind.POWER))
    assert memory(averaged, world_size=8).ema == need.weights


@pytest.mark.parametrize(("name", "gb"), [("wan2.1_t2v_14b", 35), ("qwen_image", 47)])
def test_eight_ranks_without_activations(name: str, gb: int) -> None:
    need = memory(run(named_model(name)), world_size=8)
    assert round((need.weights + need.gradients + need.optimizer + need.gathered) / 1e9) == gb


def test_what_is_gathered_does_not_grow_with_the_layers() -> None:
    short, long = (run(DitConfig(num_layers=layers)) for layers in (14, 28))
    need, more = (memory(one, world_size=4) for one in (short, long))
    assert more.gathered == pytest.approx(need.gathered, rel=1e-6) and need.gathered > 0
    assert memory(run(DitConfig(), DdpConfig()), world_size=4).gathered == 0


def test_a_frozen_base_lies_in_shares_of_its_own_type() -> None:
    runs = [
        run(named_model("wan2.1_t2v_14b"), ddp, lora=LoraConfig(rank=32))
        for ddp in (SHARES, DdpConfig())
    ]
    base, whole = (memory(one, world_size=8) for one in runs)
    # Adapters are float32, the base is not.
    assert base.weights == (whole.weights + 2 * trained_count(runs[0])) // 8
    assert base.gathered < 0.2 * whole.weights


def test_a_base_in_8_bits_is_cut_and_sent_as_bytes() -> None:
    """Each row of a matrix is its numbers and 16 bytes with its factor; nothing else is rounded."""
    lora = LoraConfig(rank=32)
    plain, narrow = (
        run(named_model("wan2.1_t2v_14b"), lora=replace(lora, base_dtype=base))
        for base in (None, BaseType.FLOAT8_E4M3)
    )
    matrices = [p.shape for p in pairs(plain.model) if p.layer is not None and len(p.shape) == 2]
    matrices = [shape for shape in matrices if shape[0] > 6]  # not what shifts and scales
    saved = sum(rows * columns - 16 * rows for rows, columns in matrices)
    base, less = (memory(one, world_size=8) for one in (plain, narrow))
    assert base.weights - less.weights == pytest.approx(saved / 8, abs=1)
    sent, fewer = (pack_traffic(one, shards=8) for one in (plain, narrow))
    for name in ("forward", "backward"):
        assert getattr(sent, name) - getattr(fewer, name) == saved * 7 / 8
    assert fewer.gradients == sent.gradients
    # Two layers are gathered, and a part of the next is on its way.
    assert base.gathered - less.gathered == pytest.approx((2 + 2 / 8) * saved / 40, abs=1)


@pytest.mark.parametrize(("summed", "number"), [(True, 4), (False, 2)])
def test_traffic_of_a_pack(summed: bool, number: int) -> None:
    config = run(DitConfig(), replace(SHARES, grad_reduce_in_fp32=summed))
    count, sent = parameter_count(config.model), pack_traffic(config, shards=8)
    assert (sent.forward, sent.backward) == (2 * count * 7 / 8,) * 2
    assert sent.gradients == number * count * 7 / 8
    step = [traffic(config, tokens=1e3, accumulated=n, replicas=8).data for n in (1, 3)]
    assert step == [sent.total, 3 * sent.total]  # of each pack, and not of a step
    assert pack_traffic(config, shards=1).total == 0


def test_copies_sum_their_rows() -> None:
    config = run(DitConfig(), replace(SHARES, dp_replicate_size=2))
    sent = traffic(config, tokens=1e3, accumulated=3, replicas=8)
    assert sent.data == 3 * pack_traffic(config, shards=4).total
    # Once a step, however many packs.
    assert sent.copies == pytest.approx(parameter_count(config.model) / 4 * 2 * 4 / 2)


def test_gradients_summed_once_a_step_are_whole_until_then() -> None:
    each, once = (run(DitConfig(), replace(SHARES, reduce_each_pack=value)) for value in (1, 0))
    whole, sent = parameter_count(DitConfig()) * 4, pack_traffic(each, shards=2)
    assert memory(once, world_size=2).gradients == whole  # four packs a rank
    assert memory(once, world_size=8).gradients == whole // 8  # one
    steps = [traffic(one, tokens=1e3, accumulated=4, replicas=2).data for one in (each, once)]
    assert steps[0] - steps[1] == 3 * sent.gradients
    machine: dict[str, Any] = {"world_size": 2, "device": DEVICES["h100"], "efficiency": FUSED}
    waits = [times(one, LOAD, **machine).data for one in (each, once)]
    assert waits[0] > waits[1] > 0


def test_layers_that_stay_gathered_are_not_gathered_again() -> None:
    freed, kept = (
        run(named_model("wan2.1_t2v_14b"), replace(SHARES, reshard_after_forward=value))
        for value in (True, False)
    )
    sent = pack_traffic(kept, shards=8)
    assert (sent.forward, sent.backward) == (pack_traffic(freed, shards=8).forward, 0)
    need, more = memory(freed, world_size=8), memory(kept, world_size=8)
    whole = 2 * parameter_count(kept.model)
    assert 0.8 * whole < more.gathered - need.gathered < whole
    assert more.total - more.gathered == need.total - need.gathered


def test_what_is_fetched_ahead_takes_memory() -> None:
    one, three = (run(DitConfig(), replace(SHARES, prefetch_layers=count)) for count in (1, 3))
    layer = inventory_of(one.model).stacks[0][1].parameters
    more = memory(three, world_size=8).gathered - memory(one, world_size=8).gathered
    assert more == 2 * 2 * layer


def test_layouts_without_shares_have_none_of_their_keys() -> None:
    config = run(DitConfig(), replace(SHARES, reduce_each_pack=False, prefetch_layers=2))
    load = PackLoad.of(config.model, [(32_768, 512)])
    good, bad = plans(config, load, world_size=2, device=DEVICES["h100"], efficiency=FUSED)
    assert {one.layout.sharding for one in good} == {*Sharding}
    assert not any("reduce_each_pack" in one.why for one in bad)


@pytest.mark.parametrize(("rate", "tokens"), [(350e9, 1333), (50e9, 9333)])
def test_break_even(rate: float, tokens: int) -> None:
    """7/8 of 8 bytes a weight, against six operations a weight and token."""
    config = run(named_model("wan2.1_t2v_14b"))
    found = break_even_tokens(config, shards=8, flops=400e12, bytes_per_s=rate)
    assert found == pytest.approx(tokens, abs=1)
    two = replace(config, model=replace(config.model, context_parallel_size=2))
    shared = break_even_tokens(two, shards=8, flops=400e12, bytes_per_s=rate)
    assert shared == pytest.approx(2 * found)


def test_a_long_pack_hides_its_gathers() -> None:
    config, h100 = run(named_model("wan2.1_t2v_14b")), DEVICES["h100"]
    machine: dict[str, Any] = {"world_size": 8, "device": h100, "efficiency": FUSED}
    a_token = 2 * parameter_count(config.model)
    spent = {
        tokens: times(
            config, PackLoad(tokens=tokens, text=1, flops=a_token * tokens, attention=0), **machine
        ).data
        for tokens in (200, 20_000)
    }
    assert spent[20_000] == 0 < spent[200]


def test_passes_without_gradients_gather_the_weights_once_more() -> None:
    plain = run(DitConfig())
    guided = replace(plain, objective=replace(plain.objective, cfg_target=2.0))
    sent = [traffic(one, tokens=1e3, accumulated=3, replicas=8).data for one in (plain, guided)]
    forward = pack_traffic(plain, shards=8).forward
    assert sent[1] - sent[0] == 3 * forward
    # A link so slow that each pass hides as much of them as it computes.
    load = PackLoad(tokens=1e-9, text=0, flops=6e12, attention=0)
    slow = replace(DEVICES["h100"], link=1e9)
    for config in (plain, guided):
        found = times(config, load, world_size=8, device=slow, efficiency=FUSED)
        bytes_ = traffic(config, tokens=0, accumulated=1, replicas=8).data
        computed = found.matrices + found.attention + found.memory + found.launches
        assert found.data == pytest.approx(bytes_ / (1e9 * FUSED.links) - computed)


def test_a_long_pack_hides_the_sum_over_copies() -> None:
    """By the backward pass of its last pack: two thirds of what it computes."""
    config, h100 = run(DitConfig(), replace(SHARES, dp_replicate_size=2)), DEVICES["h100"]
    machine: dict[str, Any] = {"world_size": 16, "efficiency": FUSED}
    flops = 6e12

    def spent(network: float, packs: int = 1) -> Times:
        one = replace(config, train=TrainConfig(global_batch_size=16 * packs))
        load = PackLoad(tokens=1e-9, text=0, flops=flops, attention=0)
        return times(one, load, device=replace(h100, network=network), **machine)

    slow, slower, fast = spent(1e6), spent(5e5), spent(1e12)
    alone = slower.copies - slow.copies  # as long as the sum on the faster of the two
    bytes_ = traffic(config, tokens=0, accumulated=1, replicas=16).copies
    assert alone == pytest.approx(bytes_ / (1e6 * FUSED.links))
    computed = slow.matrices + slow.attention + slow.memory + slow.launches
    assert alone - slow.copies == pytest.approx(2 / 3 * computed) and fast.copies == 0
    assert spent(1e6, packs=3).copies == pytest.approx(slow.copies)  # beside the last one


def test_less_is_recomputed_where_weights_are_shared() -> None:
    auto = replace(named_model("wan2.1_t2v_14b"), recompute_granularity=Recompute.AUTO)
    shared, whole = (
        choose_recomputation(run(auto, ddp), world_size=8, device_memory=140e9)
        for ddp in (SHARES, DdpConfig())
    )
    assert "which fit" in shared.reason and "do not fit" in whole.reason


def test_the_description_says_what_a_pack_moves() -> None:
    said = describe(run(named_model("wan2.1_t2v_14b")), world_size=8)
    for part in (
        "sharded over 8 ranks",
        "25 GB in its forward pass",
        "50 GB of gradients",
        "weights and matrix products bf16, rows of weights float32",
        "h100: 2,565 tokens inside of a server, 23,086 between servers",
    ):
        assert part in said, said


def test_the_description_says_which_pack_sends_gradients() -> None:
    once = run(named_model("wan2.1_t2v_14b"), replace(SHARES, reduce_each_pack=False))
    assert "the last of a step 50 GB of gradients" in describe(once, world_size=8)


def test_a_rank_takes_its_rows_of_a_checkpoint() -> None:
    shared, whole = (
        checkpoint_bytes(run(DitConfig(), ddp), world_size=8) for ddp in (SHARES, DdpConfig())
    )
    count = parameter_count(DitConfig())
    assert (shared.whole, shared.share) == (whole.whole, whole.share)
    assert whole.received - shared.received == pytest.approx(2 * count * 7 / 8, abs=1)
    assert shared.sent - whole.sent == 2 * count / 8


def test_recommendations() -> None:
    """Eight H100 hold Wan 14B whole only in pipelines; beside adapters its base fits."""
    machine: dict[str, Any] = {"world_size": 8, "device": DEVICES["h100"], "efficiency": FUSED}
    full = run(named_model("wan2.1_t2v_14b"), DdpConfig())
    load = PackLoad.of(full.model, [(32_768, 512)])
    good, bad = plans(full, load, **machine)
    best = recommended(good)
    assert best.startswith("Recommended is ddp.sharding=weights: ") and "optimizer: " in best
    alone = [one for one in [*good, *bad] if one.layout.sharding is Sharding.OPTIMIZER]
    assert len(good) + len(bad) > len(alone) > 0
    beside = replace(full, lora=LoraConfig(rank=32))
    assert recommended(plans(beside, load, **machine)[0]).startswith(
        "Recommended is ddp.sharding=optimizer: "
    )
    assert "inside of a server" in break_even(full, **machine)
    machine["world_size"] = 64
    assert "between servers" in break_even(full, **machine)
    assert recommended([]) == ""


NETWORKS = {
    "Wan 14B": "wan2.1_t2v_14b",
    "FLUX 12B": "flux1_dev",
    "Qwen-Image 20B": "qwen_image",
}
CELL = re.compile(
    r"(\d+)-(\d+)-(\d+)(?:x(\d))?-(\d+) (\w+)(?:, (\d+)(?: x (\d+))?)?: (\d+) GB, ([\d.]+) s"
)


def test_the_page_has_these_figures(repo_root: Path) -> None:
    """Each layout of the table takes what it says; the faster of a row is recommended."""
    page = (repo_root / "docs/throughput_figures.md").read_text()
    part = page.partition("### Tensor parallelism, or weights in shares")[2].partition("\n###")[0]
    rows = re.findall(r"^\| ([^|,]+), (\d+) \|(.+)\|(.+)\| `(\w+)` \|$", part, re.MULTILINE)
    assert [name for name, *_ in rows] == [name for name in NETWORKS for _ in range(3)]
    for name, gpus, *cells, best in rows:
        config = run(named_model(NETWORKS[name]), DdpConfig())
        config = replace(config, train=TrainConfig(global_batch_size=64))
        machine: dict[str, Any] = {"world_size": int(gpus), "device": DEVICES["h100"]}
        spent = {}
        for kind, cell in zip(Sharding, cells, strict=True):
            (found,) = CELL.findall(cell)
            tensor, context, pipeline, virtual, data = (int(one or 1) for one in found[:5])
            sizes = {"tensor": tensor, "context": context, "pipeline": pipeline, "data": data}
            layout = ParallelLayout(
                **sizes,
                virtual=virtual,
                recompute=Recompute(found[5]),
                sharding=kind,
                copies=int(found[7] or 1),
            )
            load = expected_load(config, fill=1.0)
            plan = plan_of(config, layout, load, efficiency=FUSED, **machine)
            assert f"{plan.memory.total / 1e9:.0f}" == found[8], cell
            assert f"{plan.times.step:.1f}" == found[9], cell
            ranks = " x ".join(filter(None, found[6:8]))
            assert layout.shared == f"weights {ranks}" or kind is Sharding.OPTIMIZER
            spent[kind] = plan.times.step
        assert min(spent, key=lambda kind: spent[kind]) == best, name

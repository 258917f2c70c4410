"""What `ddp.sharding=weights` goes with, and what it refuses by name."""

from __future__ import annotations

import pytest

from dit.config import Problems, Sharding
from dit.config_loading import load_config
from recipes.check_layouts import layout_check

LEAVE_OUT = ""
REFUSED = {
    "use_distributed_optimizer": (
        *("ddp.use_distributed_optimizer=true", "ddp.use_distributed_optimizer=false"),
    ),
    "overlap_grad_reduce": (LEAVE_OUT, "ddp.overlap_grad_reduce=true"),
    "overlap_param_gather": (LEAVE_OUT, "ddp.overlap_param_gather=true"),
    "virtual_pipeline_model_parallel_size": (
        LEAVE_OUT,
        *("model.virtual_pipeline_model_parallel_size=2", "model.pipeline_model_parallel_size=2"),
    ),
    "gradient_accumulation_fusion": (LEAVE_OUT, "model.gradient_accumulation_fusion=true"),
    "blocks_to_swap": (LEAVE_OUT, "model.blocks_to_swap=1", "lora.rank=2"),
    "cpu_offloading_num_layers": (
        *("model.recompute_granularity=full", "model.cpu_offloading_num_layers=1"),
    ),
    "transformer_impl": (
        "model.transformer_impl=local",
        *("model.transformer_impl=transformer_engine", "model.precision=bf16"),
    ),
    "lora.dtype=bf16 below model.precision=fp32": (LEAVE_OUT, "lora.dtype=bf16", "lora.rank=2"),
    "exp_avg_dtype": ("optimizer.optimizer_cpu_offload=true", "optimizer.exp_avg_dtype=bf16"),
}
"""What to set instead, what is refused, and what else the run has, by a part of the error."""


@pytest.mark.parametrize("named", REFUSED)
def test_what_needs_whole_weights_is_refused_with_what_to_use_instead(named):
    instead, refused, *others = REFUSED[named]
    with pytest.raises(Problems, match=named) as raised:
        load_config(layout_check(), overrides=["ddp.sharding=weights", refused, *others])
    (line,) = (one for one in str(raised.value).splitlines() if "sharding=weights" in one)
    assert (instead.partition(".")[2] or "leave ") in line
    others += [instead] if instead else []
    assert load_config(layout_check(), overrides=["ddp.sharding=weights", *others])


@pytest.mark.parametrize(
    "keys",
    [
        ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"],
        ["model.context_parallel_size=2", "ddp.dp_replicate_size=2"],
        ["model.pipeline_model_parallel_size=2"],
        ["model.compile=true", "optimizer.optimizer_cpu_offload=true"],
        ["ddp.reduce_each_pack=false", "ddp.reshard_after_forward=false", "ddp.prefetch_layers=2"],
        ["model.precision=bf16", "model.recompute_granularity=full", "lora.rank=2"],
        ["lora.rank=2", "lora.base_dtype=float8_e4m3"],
    ],
)
def test_it_goes_with_the_other_ways_to_share_a_run(keys):
    config = load_config(layout_check(), overrides=["ddp.sharding=weights", *keys])
    assert config.ddp.sharding is Sharding.WEIGHTS


@pytest.mark.parametrize(
    "key", ["reduce_each_pack=false", "reshard_after_forward=false", "prefetch_layers=2"]
)
def test_its_own_keys_need_it(key):
    with pytest.raises(Problems, match=f"{key} has an effect only with sharding=weights"):
        load_config(layout_check(), overrides=[f"ddp.{key}"])

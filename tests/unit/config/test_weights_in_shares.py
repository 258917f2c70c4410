"""What `ddp.sharding=weights` goes with, and what it refuses by name."""

from __future__ import annotations

import pytest

from dit.config import Problems, Sharding
from dit.config_loading import load_config
from recipes.check_layouts import layout_check

REFUSED = {
    "use_distributed_optimizer": ["ddp.use_distributed_optimizer=false"],
    "overlap_grad_reduce": ["ddp.overlap_grad_reduce=true"],
    "overlap_param_gather": ["ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true"],
    "virtual_pipeline_model_parallel_size": [
        *("model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=2"),
    ],
    "gradient_accumulation_fusion": ["model.gradient_accumulation_fusion=true"],
    "blocks_to_swap": ["model.blocks_to_swap=1", "lora.rank=2"],
    "cpu_offloading_num_layers": ["model.cpu_offloading_num_layers=1"],
    "transformer_impl": ["model.transformer_impl=transformer_engine", "model.precision=bf16"],
    "lora.dtype=bf16 below model.precision=fp32": ["lora.rank=2", "lora.dtype=bf16"],
    "exp_avg_dtype": ["optimizer.exp_avg_dtype=bf16"],
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_needs_whole_weights_is_refused_by_name(named):
    with pytest.raises(Problems, match=named):
        load_config(layout_check(), overrides=["ddp.sharding=weights", *REFUSED[named]])


@pytest.mark.parametrize(
    "keys",
    [
        ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"],
        ["model.context_parallel_size=2", "ddp.dp_replicate_size=2"],
        ["model.pipeline_model_parallel_size=2"],
        ["model.compile=true", "optimizer.optimizer_cpu_offload=true"],
        ["model.precision=bf16", "model.recompute_granularity=full", "lora.rank=2"],
        ["lora.rank=2", "lora.base_dtype=float8_e4m3"],
    ],
)
def test_it_goes_with_the_other_ways_to_share_a_run(keys):
    config = load_config(layout_check(), overrides=["ddp.sharding=weights", *keys])
    assert config.ddp.sharding is Sharding.WEIGHTS

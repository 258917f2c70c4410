"""What other tools call fully sharded weights is `ddp.sharding=weights`, if a run can take it."""

from __future__ import annotations

import pytest

from dit.config import Problems, Sharding
from tests.their_files import run_and_notes, run_of

MEGATRON = ("ddp.use_megatron_fsdp=true", "ddp.data_parallel_sharding_strategy=optim_grads_params")
FULL = {
    "automodel": ("fsdp.dp_size=8", "fsdp.cp_size=1"),
    "fastvideo": ("hsdp_shard_dim=8",),
    "fastvideo, all ranks": ("training.distributed.hsdp_shard_dim=-1",),
    "fastvideo, said twice": ("training.distributed.hsdp_shard_dim=8", "hsdp_shard_dim=4"),
    "megatron": MEGATRON,
}
VIRTUAL = (
    "model.pipeline_model_parallel_size=2",
    "model.virtual_pipeline_model_parallel_size=3",
)


@pytest.mark.parametrize("tool", FULL)
def test_full_sharding_is_that_of_weights(tool: str) -> None:
    assert run_of(FULL[tool]).ddp.sharding is Sharding.WEIGHTS
    assert run_of(FULL[tool], "ddp.sharding=optimizer").ddp.sharding is Sharding.OPTIMIZER


@pytest.mark.parametrize(
    "tokens",
    [
        ("hsdp_shard_dim=1",),
        ("ddp.use_megatron_fsdp=true",),  # its default is no_shard
        *(
            (MEGATRON[0], f"ddp.data_parallel_sharding_strategy={one}")
            for one in ("optim", "no_shard")
        ),
        ("ddp.use_megatron_fsdp=false", MEGATRON[1]),
    ],
)
def test_all_else_is_that_of_the_optimizer(tokens: tuple[str, ...]) -> None:
    assert run_of(tokens).ddp.sharding is Sharding.OPTIMIZER


@pytest.mark.parametrize("tool", FULL)
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (VIRTUAL, "virtual_pipeline"),
        (("ddp.overlap_grad_reduce=true",), "over"),
    ],
)
def test_a_run_that_cannot_share_weights_keeps_them_and_says_why(
    tool: str, settings: tuple[str, ...], named: str
) -> None:
    theirs = ("flow_matching.i2v_prob=0.3", *FULL[tool])
    config, notes = run_and_notes(theirs, "model.name=wan2.2_ti2v_5b", *settings)
    assert config.ddp.sharding is Sharding.OPTIMIZER
    said = [note for note in notes if "ddp.sharding is not set" in note]
    assert said and all("read, not used" in line and named in line for line in said)
    # What else other tools ask for is not given up with it.
    assert config.objective.image_condition_probability == 0.3


def test_what_is_wrong_is_still_said() -> None:
    with pytest.raises(Problems) as caught:
        run_of(FULL["fastvideo"], *VIRTUAL, "train.train_iters=-1")
    assert [problem for problem in caught.value.problems if "train_iters" in problem]
    with pytest.raises(Problems, match="is a group"):
        run_of(["fsdp=8"])

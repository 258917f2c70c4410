"""Norms and losses by noise level do not depend on the layout."""

from __future__ import annotations

import pytest

from tests.launching import metrics, pretrain

SHARED = (
    *("train.train_iters=2", "train.eval_interval=0", "train.global_batch_size=2"),
    *("model.num_attention_heads=4", "dataset.task_encoder_seq_length=512"),
    *("optimizer.lr=1e-3", "scheduler.lr_warmup_iters=0"),
)
NAMES = ("loss_q", "grad_norm_", "weight_norm", "update_ratio", "ema_distance", "tokens_per_sample")


@pytest.mark.slow
def test_gauges_are_those_of_one_process(tmp_path):
    layouts = {
        "one": (1, ()),
        "stages": (2, ("model.pipeline_model_parallel_size=2",)),
        "tensor_context": (
            4,
            (
                *("model.tensor_model_parallel_size=2", "model.sequence_parallel=true"),
                *("model.context_parallel_size=2", "ddp.use_distributed_optimizer=false"),
            ),
        ),
    }
    found = {}
    for name, (nproc, settings) in layouts.items():
        folder = tmp_path / name
        pretrain(folder, *SHARED, *settings, nproc=nproc, config="dit_debug.yaml")
        found[name] = [
            {k: v for k, v in line.items() if k.startswith(NAMES)} for line in metrics(folder)
        ]
    assert len(found["one"][0]) >= 5 + 6 + 3 + 4 - 2  # a fifth of the levels may have no sample
    for name in ("stages", "tensor_context"):
        for mine, reference in zip(found[name], found["one"], strict=True):
            assert mine == pytest.approx(reference, rel=1e-5, abs=1e-9), name

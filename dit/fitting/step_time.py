"""Seconds of a training step: measured on this machine, or planned for a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from dit.config import DatasetConfig, MockGeometry, ModelConfig, RunConfig
from dit.device_specs import device_named
from dit.planner.efficiency import EFFICIENCIES
from dit.planner.times import expected_load, times
from dit.sizing.activations import geometry_tokens
from dit.sizing.flops import forward_flops
from dit.sizing.memory import memory

_WARM_UP, _STEPS = 2, 4
_MOST_TOKENS = 8192  # of a pack that is measured; times of longer packs are extrapolated

Clock = Callable[[], float]


def measured_seconds(config: RunConfig, *, clock: Clock = time.perf_counter) -> float:
    """Seconds of one step of `config`: real packs, gradients, optimizer and EMA, without saving.

    For packs of more than 8,192 tokens the time is extrapolated, by numbers of operations, from
    mock packs of 1,024 tokens.
    """
    from dit.train.trainer import measure_steps

    short = _short(config)
    taken = list[float]()

    @contextmanager
    def around() -> Iterator[None]:
        began = clock()
        yield
        taken.append(clock() - began)

    _start(short)
    measure_steps(_only_steps(short), warm_up=_WARM_UP, steps=_STEPS, around=around())
    return (
        taken[0] / _STEPS * _work(config.model, config.dataset) / _work(short.model, short.dataset)
    )


def _start(config: RunConfig) -> None:
    from dit.distributed.process_groups import start_processes

    start_processes(seed=config.rng.seed, model=config.model)


def _short(config: RunConfig) -> RunConfig:
    """`config`, with mock packs of 1,024 tokens if its own are too long to measure."""
    if config.dataset.task_encoder_seq_length <= _MOST_TOKENS:
        return config
    side, rows = 32 * config.model.patch_spatial, config.dataset.mock_samples[0].text_length
    sample = MockGeometry(height=side, width=side, text_length=rows)
    data = replace(
        config.dataset,
        path=None,
        mock=True,
        mock_samples=(sample,),
        task_encoder_seq_length=1024,
        use_train_split_for_val=False,
    )
    return replace(config, dataset=data)


def _only_steps(config: RunConfig) -> RunConfig:
    return replace(
        config,
        train=replace(config.train, train_iters=_WARM_UP + _STEPS + 1, eval_interval=0),
        scheduler=replace(config.scheduler, lr_warmup_iters=0),
        checkpoint=replace(config.checkpoint, save=None, load=None),
    )


def _work(model: ModelConfig, dataset: DatasetConfig) -> float:
    """Operations of the forward pass over a pack full of copies of the first mock sample."""
    (sample, *_), model = dataset.mock_samples, model
    tokens = geometry_tokens(model, sample)
    count = max(1, dataset.task_encoder_seq_length // tokens)
    return forward_flops(model, tokens=[tokens] * count, text=[sample.text_length] * count)


def planned_seconds(config: RunConfig, device: str) -> float | None:
    """Seconds of one step on the GPU named `device`, from its data sheet; None for an unknown GPU.

    They are infinite if weights and activations do not fit into its memory.
    """
    found, efficiency = device_named(device), EFFICIENCIES["fused"]
    if found is None:
        return None
    if memory(config, world_size=1).total > found.memory * efficiency.memory:
        return float("inf")
    load = expected_load(config)
    return times(config, load, world_size=1, device=found, efficiency=efficiency).step

"""Packs of loader processes are pinned, and reach a GPU as they are without a wait of the host."""

from __future__ import annotations

import pytest
import torch

from dit.config import DatasetConfig, MockGeometry, RunConfig
from dit.data import build_train_loader
from dit.models.dit.family import DitConfig
from dit.pack_wire import pack_to

pytestmark = pytest.mark.gpu


def packs(workers: int, count: int):
    config = RunConfig(
        model=DitConfig(),
        dataset=DatasetConfig(
            mock=True,
            mock_samples=(
                MockGeometry(frames=1, height=16, width=24, text_length=9),
                MockGeometry(frames=3, height=8, width=6, text_length=4, fps=8.0),
            ),
            task_encoder_seq_length=512,
            packing_buffer_size=16,
            num_workers=workers,
        ),
    )
    loader = build_train_loader(config, rank=0, world_size=1)
    yield from (next(loader) for _ in range(count))
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_packs_are_pinned_and_copied_without_a_wait(workers):
    expected = list(packs(0, 20))
    moved = []
    for pack in packs(workers, 20):
        assert all(tensor.is_pinned() for tensor in pack.tensors.values())
        torch.cuda.set_sync_debug_mode("error")
        try:
            moved.append(pack_to(pack, torch.device("cuda")))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for pack, alone in zip(moved, expected, strict=True):
        assert pack.keys == alone.keys
        for name, tensor in pack.tensors.items():
            assert torch.equal(tensor.cpu().nan_to_num(), alone.tensors[name].nan_to_num()), name

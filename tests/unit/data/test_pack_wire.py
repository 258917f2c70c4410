"""Packs of loader processes lie in memory that is used again, not while it is looked at."""

import gc
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dit.batch import LatentSample
from dit.data import Reject, build_train_loader
from dit.data.cook import Expected
from dit.data.energon.resumable_loader import stages_of
from dit.data.energon.stages import WorkerOutput
from dit.data.pack import PackWriter, SampleSize
from dit.models.family import InputKind, SampleInput
from dit.models.patch_layout import PatchLayout
from dit.models.positions import GridPositions
from dit.pack_wire import PackBuffers

LAYOUT = PatchLayout(
    patch_temporal=1,
    patch_spatial=2,
    sample_multiple=4,
    positions=GridPositions(24.0),
    inputs=(SampleInput(name="text", kind=InputKind.TEXT, width=3),),
)
SAMPLE = LatentSample(
    key="k", latent_CFHW=torch.ones(2, 1, 4, 4), text_LE=torch.ones(1, 3), fps=math.nan
)
PACKS = 40


@pytest.fixture
def load(shards, tmp_path, opened):
    """Opens loaders of one dataset; `workers` of them are processes."""
    root = shards.good_set(tmp_path / "data", 60)

    def open_one(workers, **settings):
        config = shards.config(root, num_workers=workers, **settings)
        return opened(build_train_loader(config, rank=0, world_size=1))

    return open_one


def equal(one, other):
    assert one.keys == other.keys and one.grids == other.grids
    for name, tensor in one.tensors.items():
        found = other.tensors[name]
        assert tensor.dtype == found.dtype
        assert torch.equal(tensor.nan_to_num(), found.nan_to_num()), name


def place(pack):
    return min(tensor.data_ptr() for tensor in pack.tensors.values())


def shared(loader, pack):
    """Whether it lies in a row that the processes share."""
    (last,) = stages_of(loader._loader.chain, WorkerOutput)
    slots = [slot for of_process in last._buffers._slots for slot in of_process]
    return any(0 <= place(pack) - slot.data_ptr() < slot.nbytes for slot in slots)


def test_packs_that_are_kept_stay_as_they_are(load):
    """More of them than there are rows."""
    loader = load(1)
    kept = [next(loader) for _ in range(PACKS)]
    for pack, alone in zip(kept, load(0), strict=False):
        equal(pack, alone)


def test_rows_are_used_again_when_their_packs_are_gone(load):
    loader = load(1)
    rows = 3 + 2 * 2  # ahead of the trainer, and with it
    places = [place(next(loader)) for _ in range(PACKS)]
    assert 1 < len(set(places)) <= rows
    kept = [next(loader) for _ in range(PACKS)]
    assert sum(shared(loader, pack) for pack in kept) <= rows
    one = kept.pop().latent_TC[2:5]  # part of a pack keeps all of it
    numbers = one.clone()
    del kept
    gc.collect()
    for _ in range(rows):  # made while the rows were taken; kept, they would take them again
        next(loader)
    assert all(shared(loader, next(loader)) for _ in range(PACKS))
    assert torch.equal(one, numbers)


def test_a_run_that_goes_on_has_all_rows(load):
    """Its workers first make again what had been given since their last snapshot."""
    before = load(1, checkpoint_every_sec=3600.0)
    for _ in range(PACKS):
        next(before)
    after = load(1)
    after.load_state_dict([before.state_dict()])
    for _ in range(PACKS):
        pack, alike = next(after), next(before)
        equal(pack, alike)
        assert shared(after, pack) and shared(before, alike)


def test_packs_come_where_no_memory_can_be_shared(load, monkeypatch):
    def refuse(*_):
        raise OSError("no")

    monkeypatch.setattr("dit.pack_wire.os.memfd_create", refuse)
    loader = load(2)
    packs = [next(loader) for _ in range(3)]
    monkeypatch.undo()
    for pack, alike in zip(packs, load(2), strict=False):
        equal(pack, alike)


def test_a_pack_that_no_row_has_room_for_comes_as_well(load, monkeypatch):
    monkeypatch.setattr(Expected, "pack_bytes", 100)
    loader = load(2, task_encoder_seq_length=512)
    kept = [next(loader) for _ in range(10)]
    assert not any(shared(loader, pack) for pack in kept)
    monkeypatch.undo()
    for pack, alike in zip(kept, load(2, task_encoder_seq_length=512), strict=False):
        equal(pack, alike)


def test_a_sample_that_is_refused_leaves_no_gap(shards, tmp_path, opened):
    """It had room in its pack when it turned out to be damaged."""
    latent = torch.randn(shards.channels, 5, 8, 4)
    samples = [shards.ours(latent.clone(), torch.randn(2100, shards.width)) for _ in range(12)]
    broken = latent.clone()
    broken[0, 1, 2, 3] = math.nan
    samples[5] = shards.ours(broken, torch.randn(2100, shards.width))
    root = shards.write(tmp_path / "data", samples)

    def packs(workers):
        config = shards.config(
            root, num_workers=workers, task_encoder_seq_length=256, max_bad_fraction=1.0
        )
        loader = opened(build_train_loader(config, rank=0, world_size=1))
        found = [next(loader) for _ in range(20)]
        assert set(loader.counts()) == {Reject.NOT_FINITE}
        return found

    for one, other in zip(packs(0), packs(1), strict=True):
        equal(one, other)
        assert one.starts[-1] == len(one.latent_TC) and one.text_starts[-1] == len(one.text_LE)
        assert not any(key.endswith("000005") for key in one.keys)
        assert one.latent_TC.isfinite().all()


@pytest.mark.parametrize("latents", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", [torch.float32, torch.bfloat16])
def test_a_pack_lies_in_its_row_whatever_its_types(monkeypatch, latents, text):
    monkeypatch.setattr("dit.pack_wire.get_worker_info", lambda: SimpleNamespace(id=0))
    layout = replace(
        LAYOUT, inputs=(*LAYOUT.inputs, SampleInput(name="v", kind=InputKind.VECTOR, width=5))
    )
    sample = replace(
        SAMPLE,
        latent_CFHW=SAMPLE.latent_CFHW.to(latents),
        text_LE=SAMPLE.text_LE.to(text),
        others={"v": torch.ones(5)},
        loss_weight=2.0,
    )
    rows = PackBuffers(1, size=10_000, held=1)
    writer = PackWriter(layout, [SampleSize.of(sample, layout)], channels=2, memory=rows.free)
    writer.add(sample)
    assert rows.placed(writer.finish())[1] == (0, 0)


def test_a_pack_that_lost_a_sample_does_not_stay_in_a_row_that_is_free(monkeypatch):
    """It is sent by a thread, while the next pack is laid."""
    monkeypatch.setattr("dit.pack_wire.get_worker_info", lambda: SimpleNamespace(id=0))
    layout, sample = LAYOUT, SAMPLE
    rows = PackBuffers(1, size=10_000, held=1)
    sizes = [SampleSize.of(sample, layout)] * 2
    writer = PackWriter(layout, sizes, channels=2, memory=rows.free)
    writer.add(sample)
    sent, found = rows.placed(writer.finish())
    assert found is None
    rows.free(9_000).fill_(7)
    assert (sent.latent_TC == 1).all() and (sent.text_LE == 1).all()

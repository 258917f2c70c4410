import math
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dit.batch import LatentSample, pack_identity
from dit.data.energon.stages import WorkerBatch
from dit.data.pack import pack_samples
from dit.data.rejections import RejectCounts
from dit.models.family import InputKind, SampleInput
from dit.models.patch_layout import PatchLayout
from dit.models.positions import GridPositions
from dit.pack_wire import flatten_pack, unflatten_pack

POSITIONS = GridPositions(24.0)

TEXT = SampleInput(name="text", kind=InputKind.TEXT, width=5)


def layout_of(temporal=1, spatial=2, *, multiple=8, positions=POSITIONS, inputs=(TEXT,)):
    return PatchLayout(
        patch_temporal=temporal,
        patch_spatial=spatial,
        sample_multiple=multiple,
        positions=positions,
        inputs=inputs,
    )


LAYOUT = layout_of()


def sample(size, *, key="k", fps=math.nan, dtype=torch.float16, text=(3, torch.bfloat16)):
    length, text_dtype = text
    rng = torch.Generator().manual_seed(sum(size) + length)
    return LatentSample(
        key=key,
        latent_CFHW=torch.randn(size, generator=rng).to(dtype),
        text_LE=torch.randn((length, 5), generator=rng).to(text_dtype),
        fps=fps,
    )


@pytest.mark.parametrize("patch", [(1, 1), (1, 2), (2, 2), (3, 4)])
def test_token_and_feature_order(patch):
    """Every number is looked up where the definition puts it."""
    pt, ps = patch
    layout = layout_of(pt, ps, multiple=1)
    one = sample((3, 2 * pt, 3 * ps, 2 * ps))
    packed = pack_samples([one], layout)
    frames, rows, columns = packed.grids[0]
    assert (frames, rows, columns) == (2, 3, 2)
    for token in range(frames * rows * columns):
        f, r, c = token // (rows * columns), token // columns % rows, token % columns
        cube = one.latent_CFHW[:, f * pt :, r * ps :, c * ps :][:, :pt, :ps, :ps]
        assert torch.equal(packed.latent_TC[token], cube.reshape(-1).float())
        assert packed.position_TA[token].tolist() == [f, r, c]


SIZES = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6)),
    min_size=1,
    max_size=6,
)


@given(SIZES)
def test_packing_neither_mixes_nor_loses_samples(sizes):
    samples = [
        sample((4, f, 2 * h, 2 * w), key=f"k{i}", text=(length, torch.bfloat16))
        for i, (f, h, w, length) in enumerate(sizes)
    ]
    packed = pack_samples(samples, LAYOUT)
    assert packed.num_samples == len(samples)
    assert packed.starts[-1] == len(packed.latent_TC) == len(packed.segment_T)
    for i, one in enumerate(samples):
        alone = pack_samples([one], LAYOUT)
        own = slice(packed.starts[i], packed.starts[i + 1])
        assert packed.starts[i] % 8 == 0
        assert torch.equal(packed.latent_TC[own], alone.latent_TC)
        assert torch.equal(packed.position_TA[own], alone.position_TA)
        assert torch.equal(packed.is_real_T[own], alone.is_real_T)
        assert set(packed.segment_T[own].tolist()) == {i}
        text = slice(packed.text_starts[i], packed.text_starts[i + 1])
        assert torch.equal(packed.text_LE[text], one.text_LE)


@given(SIZES)
def test_padding_is_zero_and_counted_out(sizes):
    packed = pack_samples([sample((4, f, 2 * h, 2 * w)) for f, h, w, _ in sizes], LAYOUT)
    assert int(packed.is_real_T.sum()) == packed.real_tokens
    assert not packed.latent_TC[~packed.is_real_T].any()
    assert not packed.position_TA[~packed.is_real_T].any()
    for start, tokens in zip(packed.starts, packed.num_tokens, strict=False):
        assert packed.is_real_T[start : start + tokens].all()


def test_types_of_the_fields():
    packed = pack_samples([sample((4, 1, 4, 4)), sample((4, 2, 4, 6), fps=12.0)], LAYOUT)
    assert packed.latent_TC.dtype == packed.position_TA.dtype == packed.fps_N.dtype == torch.float32
    assert packed.segment_T.dtype == torch.int64
    assert packed.is_real_T.dtype == torch.bool
    assert packed.fps_N.isnan().tolist() == [True, False]


def test_frames_are_counted_at_the_base_rate():
    half_speed = GridPositions(24.0)(((3, 1, 1),), fps=12.0)
    assert half_speed[:, 0].tolist() == [0.0, 2.0, 4.0]
    unknown = GridPositions(24.0)(((3, 1, 1),), fps=math.nan)
    assert unknown[:, 0].tolist() == [0.0, 1.0, 2.0]


def test_bfloat16_stays_and_a_mixture_becomes_float32():
    low, high = torch.bfloat16, torch.float32
    size = (4, 1, 2, 2)
    alike = pack_samples([sample(size, dtype=low, text=(2, low)) for _ in range(2)], LAYOUT)
    assert alike.text_LE.dtype == alike.latent_TC.dtype == low
    samples = [sample(size, dtype=d, text=(n, d)) for n, d in ((2, low), (3, high))]
    mixed = pack_samples(samples, LAYOUT)
    assert mixed.text_LE.dtype == mixed.latent_TC.dtype == high
    assert torch.equal(mixed.text_LE, torch.cat([s.text_LE.float() for s in samples]))
    for one, start in zip(samples, mixed.starts, strict=False):
        alone = pack_samples([one], LAYOUT)
        assert torch.equal(mixed.latent_TC[start : start + 8], alone.latent_TC.float())


def test_identity_is_that_of_the_keys_in_order():
    samples = [sample((4, 1, 2, 2), key=key) for key in ("a", "b")]
    assert pack_samples(samples, LAYOUT).pack_id == pack_identity(("a", "b"))
    assert pack_samples(samples[::-1], LAYOUT).pack_id == pack_identity(("b", "a"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_pack_crosses_to_another_process_as_one_tensor(dtype):
    sizes = [(3, 1, 2, 2), (3, 2, 4, 2), (3, 1, 6, 2)]  # odd numbers of numbers
    samples = [sample(size, key=str(i), text=(i + 1, dtype)) for i, size in enumerate(sizes)]
    sent = pack_samples(samples, LAYOUT)
    outline, row = flatten_pack(sent)
    assert row.nbytes == sum(t.nbytes for t in sent.tensors.values())
    assert all(t.is_meta for t in outline.tensors.values())
    delivery = WorkerBatch(worker=1, counts=RejectCounts(read=5), pack=sent, samples=((0, 7),))
    received = pickle.loads(ForkingPickler.dumps(delivery))
    assert (received.worker, received.samples, received.counts.read) == (1, ((0, 7),), 5)
    assert len({t.untyped_storage().data_ptr() for t in received.pack.tensors.values()}) == 1
    for filled in (unflatten_pack(outline, row), received.pack):
        assert filled.keys == sent.keys and filled.starts == sent.starts
        for name, tensor in sent.tensors.items():
            got = filled.tensors[name]
            assert got.dtype == tensor.dtype
            assert torch.equal(got.nan_to_num(), tensor.nan_to_num()), name
    end = WorkerBatch(worker=0, counts=RejectCounts(), error="why")
    assert pickle.loads(ForkingPickler.dumps(end)) == end


def test_a_pack_has_no_trace_of_what_was_in_memory_before():
    """Padding is written as well: the memory of a pack is not cleared first."""
    torch.full((64, 12), torch.nan)  # what the next allocation of its size finds
    packed = pack_samples([sample((3, 1, 2, 2)), sample((3, 1, 4, 6))], LAYOUT)
    assert not packed.latent_TC[~packed.is_real_T].any()

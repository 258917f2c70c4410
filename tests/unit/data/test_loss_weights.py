"""Weights of losses on their way from a shard to the tokens of a pack."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace

import pytest
import torch

from dit.batch import TokenWeights
from dit.data.cook import Expected, cook, measure_sample
from dit.data.pack import pack_samples
from dit.data.rejections import Reject, SampleRefused
from dit.pack_wire import flatten_pack, unflatten_pack

SIZES = [(2, 4, 6), (1, 2, 4), (1, 4, 4)]  # of latents: 12, 2 and 4 tokens


@pytest.fixture
def expected(shards) -> Expected:
    return Expected.of(shards.config())


@pytest.fixture
def parts(shards):
    """A record of our layout by the size of its latent, with `about` in its .json."""

    def make(size=(1, 4, 4), **more):
        rng = torch.Generator().manual_seed(sum(size))
        return shards.ours(torch.randn(2, *size, generator=rng), torch.ones(2, 8), **more)

    return make


def pack_of(records, expected):
    samples = [cook(one, expected, key=str(i)) for i, one in enumerate(records)]
    return pack_samples(samples, expected.layout)


@pytest.mark.parametrize("weights", [(2, 0.5, 0), (None, 3.5, None), (1.0, None, 1)])
def test_a_weight_is_that_of_each_token_of_its_sample(parts, expected, weights) -> None:
    given = [{} if weight is None else {"loss_weight": weight} for weight in weights]
    pairs = zip(SIZES, given, strict=True)
    pack = pack_of([parts(size, **about) for size, about in pairs], expected)
    each = [1.0 if weight is None else float(weight) for weight in weights]
    if set(each) == {1.0}:
        assert pack.method(TokenWeights) is None  # and costs nothing
        return
    weight_T = pack.method(TokenWeights).weight_T
    assert weight_T.dtype == torch.float32
    assert torch.equal(weight_T, torch.tensor(each)[pack.segment_T])
    for sent in (unflatten_pack(*flatten_pack(pack)), pickle.loads(pickle.dumps(pack))):
        assert torch.equal(sent.method(TokenWeights).weight_T, weight_T)


def test_a_record_of_dfm_may_have_a_weight(shards, expected) -> None:
    record = shards.dfm(torch.ones(2, 4, 4), torch.ones(2, 8), loss_weight=0.25)
    assert cook(record, expected, key="k").loss_weight == 0.25


@pytest.mark.parametrize("weight", [-1, -1e-9, True, "2", [1], 1e7, math.nan, math.inf])
def test_a_weight_that_is_none_refuses_its_sample(parts, expected, weight) -> None:
    record = parts()
    about = json.loads(record["json"]) | {"loss_weight": weight}
    record["json"] = json.dumps(about).encode()
    with pytest.raises(SampleRefused) as caught:
        cook(record, expected, key="k")
    assert caught.value.reason is Reject.LOSS_WEIGHT
    assert f"loss_weight={weight!r} is not a number from 0 to 1e+06" in caught.value.detail


def test_the_size_of_a_sample_says_whether_it_is_weighted(parts, expected) -> None:
    for about, wanted in (({}, False), ({"loss_weight": 2}, True), ({"loss_weight": 1}, False)):
        # Larger than what is decoded when it is read, so that only its head is measured.
        size = measure_sample(parts((2, 64, 32), **about), _roomy(expected))
        assert size is not None and size.is_weighted is wanted


def _roomy(expected: Expected) -> Expected:
    return replace(expected, capacity=4096)


def test_a_loader_gives_weights_where_a_sample_has_one(shards, tmp_path) -> None:
    records = [shards.good(index) for index in range(30)]
    for index in (4, 17):
        about = json.loads(records[index]["json"]) | {"loss_weight": index / 8}
        records[index]["json"] = json.dumps(about).encode()
    shards.write(tmp_path, records, split="val")
    found = shards.one_pass(shards.config(shards.write(tmp_path, records)))
    weights = {}
    for pack in found.packs:
        of_pack = pack.method(TokenWeights)
        assert (of_pack is not None) == any(k[-6:] in ("000004", "000017") for k in pack.keys)
        for number, key in enumerate(pack.keys):
            own = [1.0] if of_pack is None else of_pack.weight_T[pack.segment_T == number]
            weights[key] = {float(weight) for weight in own}
    assert len(weights) == 30
    kept = {key[-6:]: weight for key, weight in weights.items() if weight != {1.0}}
    assert kept == {"000004": {0.5}, "000017": {2.125}}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("patch", [(1, 2), (2, 2), (1, 1)])
def test_a_mask_weighs_each_token_by_the_mean_of_its_patch(parts, expected, patch, dtype) -> None:
    pt, ps = patch
    layout = replace(expected.layout, patch_temporal=pt, patch_spatial=ps)
    expected = replace(expected, layout=layout, capacity=128)
    size, rng = (4, 4, 6), torch.Generator().manual_seed(1)
    mask = (torch.rand(1, *size, generator=rng) > 0.5).to(dtype) * 0.75
    records = [parts(size, loss_mask=mask, loss_weight=3), parts((2, 2, 2))]
    pack = pack_of(records, expected)
    weight_T = pack.method(TokenWeights).weight_T
    frames, rows, columns = pack.grids[0]
    for token in range(frames * rows * columns):  # looked up where the definition puts it
        f, r, c = token // (rows * columns), token // columns % rows, token % columns
        cells = mask[0, f * pt :, r * ps :, c * ps :][:pt, :ps, :ps].float()
        assert weight_T[token] == pytest.approx(3 * cells.mean().item(), rel=1e-6)
    assert (weight_T[pack.starts[1] :] == 1).all()


BAD_MASKS = {
    "another size": (torch.ones(1, 1, 4, 2), r"shape \[1, 1, 4, 2\], .* needs \[1, 1, 4, 4\]"),
    "channels": (torch.ones(2, 1, 4, 4), r"shape \[2, 1, 4, 4\]"),
    "below 0": (torch.full((1, 1, 4, 4), -0.5), "from -0.5 to -0.5, not within 0"),
    "NaN": (torch.full((1, 1, 4, 4), math.nan), "from nan to nan"),
    "infinite": (torch.full((1, 1, 4, 4), math.inf), "from inf to inf"),
}


@pytest.mark.parametrize("fault", BAD_MASKS)
def test_a_mask_that_is_none_refuses_its_sample(parts, expected, fault) -> None:
    mask, said = BAD_MASKS[fault]
    with pytest.raises(SampleRefused, match=said) as caught:
        cook(parts(loss_mask=mask), expected, key="k")
    assert caught.value.reason is Reject.LOSS_MASK


def test_a_mask_is_read_by_every_family_and_from_the_head(parts, expected) -> None:
    mask = torch.ones(1, 2, 64, 32)
    size = measure_sample(parts((2, 64, 32), loss_mask=mask), _roomy(expected))
    assert size is not None and size.is_weighted and size.unknown == ()
    assert cook(parts(loss_mask=torch.ones(1, 1, 4, 4)), expected, key="k").unknown == ()

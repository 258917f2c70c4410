import json
import math
import pickle
import zlib
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from dit import safe_pickle
from dit.batch import LatentSample
from dit.config import Precision
from dit.convert.diffusers_config import model_config
from dit.data.cook import Expected, cook, measure_sample
from dit.data.pack import SampleSize
from dit.data.records import head_length
from dit.data.rejections import Reject, SampleRefused
from dit.models.dit.family import ExtraPosition
from dit.models.registry import diffusers_form, named_model
from dit.stored_samples import RecordHeader
from tests.families.lumina2 import random_lumina2
from tests.families.zimage import random_zimage


@pytest.fixture
def expected(shards):
    return Expected.of(shards.config())


def latent(*size):
    return torch.arange(math.prod(size)).reshape(size).half() / 10


def text(length, width=8, dtype=torch.bfloat16):
    return (torch.arange(length * width).reshape(length, width) + 1).to(dtype)


def refusal(parts, expected):
    with pytest.raises(SampleRefused) as caught:
        cook(parts, expected, key="k")
    return caught.value


def test_our_layout_comes_back_as_stored(shards, expected):
    parts = shards.ours(latent(2, 3, 4, 6), text(5), caption="seven", fps=12.5)
    sample = cook(parts, expected, key="a/b", source="a")
    assert torch.equal(sample.latent_CFHW, latent(2, 3, 4, 6))
    assert torch.equal(sample.text_LE, text(5))
    assert sample.text_LE.dtype == torch.bfloat16
    assert (sample.key, sample.source) == ("a/b", "a")
    assert (sample.caption, sample.fps) == ("seven", 12.5)


@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_text_of_higher_precision_is_not_rounded(shards, expected, stored):
    words = torch.linspace(-1, 1, 16).reshape(2, 8).to(stored)
    sample = cook(shards.ours(latent(2, 1, 4, 4), words), expected, key="k")
    assert sample.text_LE.dtype == torch.float32
    assert torch.equal(sample.text_LE, words.float())


@pytest.mark.parametrize("size", [(1, 2, 1, 4, 6), (2, 1, 4, 6), (2, 4, 6)])
def test_dfm_latents_of_each_model_become_four_axes(shards, expected, size):
    sample = cook(shards.dfm(latent(*size), text(2)[None]), expected, key="k")
    assert torch.equal(sample.latent_CFHW, latent(2, 1, 4, 6))
    assert math.isnan(sample.fps)


def test_padding_of_dfm_text_is_trimmed(shards, expected):
    padded = torch.zeros(1, 12, 8, dtype=torch.bfloat16)
    padded[0, :3] = text(3)
    padded[0, 1] = 0  # a zero inside the text is text
    sample = cook(shards.dfm(latent(2, 4, 4), padded), expected, key="k")
    assert torch.equal(sample.text_LE, padded[0, :3])


def test_text_of_padding_alone_keeps_one_token(shards, expected):
    sample = cook(shards.dfm(latent(2, 4, 4), torch.zeros(12, 8)), expected, key="k")
    assert torch.equal(sample.text_LE, torch.zeros(1, 8))


@pytest.mark.parametrize(
    "stored",
    [{"prompt_embeds": text(2)}, {"t5_embeds": text(2)}, text(2), text(2).float().numpy()],
    ids=["flux", "flux-old", "tensor", "array"],
)
def test_dfm_text_containers(shards, expected, stored):
    sample = cook(shards.dfm(latent(2, 4, 4), stored), expected, key="k")
    assert torch.equal(sample.text_LE.float(), text(2).float())


class Attack:
    def __reduce__(self):
        return print, ("code of the file ran",)


def test_a_pickle_that_calls_something_is_refused_and_not_run(shards, expected, capsys):
    parts = shards.dfm(latent(2, 4, 4), Attack())
    found = refusal(parts, expected)
    assert found.reason == Reject.UNDECODABLE
    assert "print" in found.detail

    # The hole that torch's own pickled storages leave: a payload inside the storage's bytes.
    class Nested:
        def __reduce__(self):
            return torch.storage._load_from_bytes, (pickle.dumps(Attack(), protocol=2),)

    assert refusal(shards.dfm(latent(2, 4, 4), Nested()), expected).reason == Reject.UNDECODABLE
    assert "code of the file ran" not in capsys.readouterr().out


def broken(shards, name):
    """A sample with one fault each."""
    fine = shards.ours(latent(2, 1, 4, 4), text(2))
    nan, inf_text = latent(2, 1, 4, 4).clone(), text(2).clone()
    nan[1, 0, 2, 3], inf_text[1, 1] = math.nan, -math.inf
    flipped = bytearray(fine["safetensors"])
    flipped[-5] ^= 16
    garbage = {"safetensors": b"not a tensor", "json": b"{}"}
    return {
        "no json": {"safetensors": fine["safetensors"]},
        "no safetensors": {"json": fine["json"]},
        "no latent": {
            "safetensors": safetensors.torch.save({"other": torch.zeros(1)}),
            "json": b"{}",
        },
        "bit flip": fine | {"safetensors": bytes(flipped)},
        "garbage": garbage,
        "json garbage": fine | {"json": b"{"},
        "json list": fine | {"json": b"[]"},
        "future": shards.ours(latent(2, 1, 4, 4), text(2), format_version=2),
        "zero fps": shards.ours(latent(2, 1, 4, 4), text(2), fps=0),
        "two axes": shards.ours(latent(2, 4), text(2)),
        "integers": shards.ours(torch.ones(2, 1, 4, 4, dtype=torch.int64), text(2)),
        "channels": shards.ours(latent(3, 1, 4, 4), text(2)),
        "odd rows": shards.ours(latent(2, 1, 5, 4), text(2)),
        "long": shards.ours(latent(2, 1, 16, 18), text(2)),
        "no text": shards.ours(latent(2, 1, 4, 4), None),
        "empty text": shards.ours(latent(2, 1, 4, 4), torch.zeros(0, 8)),
        "wide text": shards.ours(latent(2, 1, 4, 4), text(2, width=9)),
        "nan": shards.ours(nan, text(2)),
        "text inf": shards.ours(latent(2, 1, 4, 4), inf_text),
        "dfm without text": {
            k: v for k, v in shards.dfm(latent(2, 4, 4), 0).items() if k != "pickle"
        },
        "dfm garbage": shards.dfm(latent(2, 4, 4), text(2)) | {"pth": b"no"},
        "dfm no tensor": shards.dfm(latent(2, 4, 4), "words"),
    }[name]


CASES = (
    ("no json", Reject.MISSING_PART, ["no .json", ".safetensors"]),
    ("no safetensors", Reject.MISSING_PART, ["no .safetensors", ".json"]),
    ("no latent", Reject.MISSING_PART, ["other", "latent"]),
    ("bit flip", Reject.CHECKSUM, ["crc32"]),
    ("garbage", Reject.UNDECODABLE, [".safetensors"]),
    ("json garbage", Reject.UNDECODABLE, [".json"]),
    ("json list", Reject.UNDECODABLE, ["list"]),
    ("future", Reject.NEWER, ["format_version=2", "reads 1", "program is older than the shard"]),
    ("zero fps", Reject.UNDECODABLE, ["fps=0"]),
    ("two axes", Reject.UNDECODABLE, ["[2, 4]"]),
    ("integers", Reject.UNDECODABLE, ["int64"]),
    ("channels", Reject.CHANNELS, ["3 channels", "model.in_channels=2"]),
    ("odd rows", Reject.NOT_PATCHABLE, ["[2, 1, 5, 4]", "model.patch_spatial=2"]),
    ("long", Reject.TOO_LONG, ["72 tokens", "dataset.task_encoder_seq_length=64"]),
    ("no text", Reject.NO_TEXT, ["text"]),
    ("empty text", Reject.NO_TEXT, ["0 tokens"]),
    ("wide text", Reject.TEXT_WIDTH, ["width 9", "model.crossattn_emb_size=8"]),
    ("nan", Reject.NOT_FINITE, ["1 of 32"]),
    ("text inf", Reject.TEXT_NOT_FINITE, ["1 of 16"]),
    ("dfm without text", Reject.MISSING_PART, ["no .pickle"]),
    ("dfm garbage", Reject.UNDECODABLE, [".pth"]),
    ("dfm no tensor", Reject.UNDECODABLE, ["str"]),
)
FAULTS = [name for name, _, _ in CASES]
FAULTS_OF_NUMBERS = ["bit flip", "nan", "text inf"]


@pytest.mark.parametrize(("fault", "reason", "told"), CASES)
def test_each_fault_has_its_reason_and_tells_the_values(shards, expected, fault, reason, told):
    found = refusal(broken(shards, fault), expected)
    assert found.reason == reason
    assert all(words in found.detail for words in told), found.detail


def test_learnable_positions_bound_the_size(shards):
    config = shards.config()
    table = replace(config.model, extra_pos_embed=ExtraPosition.LEARNABLE, max_size=(2, 8, 8))
    expected = Expected.of(replace(config, model=table))
    cook(shards.ours(latent(2, 2, 8, 8), text(1)), expected, key="k")
    found = refusal(shards.ours(latent(2, 3, 4, 4), text(1)), expected)
    assert found.reason == Reject.BEYOND_TABLE
    assert "(2, 8, 8)" in found.detail
    rotary = Expected.of(config)
    cook(shards.ours(latent(2, 3, 4, 4), text(1)), rotary, key="k")


@pytest.mark.parametrize(("made", "most"), [(random_lumina2, 299), (random_zimage, 1504)])
def test_texts_have_places_in_the_tables_of_diffusers(shards, made, most):
    """Neither network runs with one row more."""
    network = made()
    keys = {name: value for name, value in network.config.items() if name[0] != "_"}
    content = {"_class_name": type(network).__name__, **keys}
    model = model_config(content, precision=Precision.FP32, place="config.json")
    of_long_packs = replace(shards.config().dataset, task_encoder_seq_length=2048)
    config = replace(shards.config(), model=model, dataset=of_long_packs)
    form = diffusers_form(model)
    for rows in (most, most + 1):
        parts = shards.ours(latent(4, 1, 4, 4), text(rows, width=16))
        sample = LatentSample(
            key="k",
            latent_CFHW=torch.zeros(4, 1, 4, 4),
            text_LE=torch.zeros(rows, 16),
            fps=math.nan,
        )
        if rows == most:
            cook(parts, Expected.of(config), key="k")
            form.run(network, sample, 500.0, model)
            continue
        found = refusal(parts, Expected.of(config))
        assert (found.reason, str(most) in found.detail) == (Reject.TEXT_ROWS, True)
        with pytest.raises((IndexError, RuntimeError), match="index"):
            form.run(network, sample, 500.0, model)


def test_sides_of_several_tokens_are_refused_by_the_family(shards):
    """A patch of one cell alone would take them."""
    keys = {"name": "custom", "in_channels": 2, "crossattn_emb_size": 8}
    model = replace(named_model("qwen_image21"), **keys)
    expected = Expected.of(replace(shards.config(), model=model))
    cook(shards.ours(latent(2, 1, 4, 6), text(1)), expected, key="k")
    found = refusal(shards.ours(latent(2, 1, 4, 5), text(1)), expected)
    assert found.reason == Reject.NOT_PATCHABLE
    assert (
        "model.family=qwen_image21 takes only rows and columns that are multiples of 2"
        in found.detail
    )


def test_large_finite_numbers_are_not_called_infinite(shards, expected):
    huge = torch.full((2, 1, 4, 4), 3e38, dtype=torch.bfloat16)  # their sum overflows
    cook(shards.ours(huge, text(1)), expected, key="k")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [4, 4096])
def test_one_number_that_is_not_finite_is_found(shards, expected, dtype, width):
    """Few numbers and many are looked at in different ways."""
    finite = torch.randn(2, 1, 4, width).to(dtype)
    finite[0, 0, 0, :2] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min])
    wide = replace(expected, capacity=2**20)
    cook(shards.ours(finite, text(1)), wide, key="k")
    for bad in (math.inf, -math.inf, math.nan, math.copysign(math.nan, -1)):
        broken = finite.clone()
        broken[1, 0, 2, 3] = bad
        with pytest.raises(SampleRefused, match=f"1 of {8 * width} numbers"):
            cook(shards.ours(broken, text(1)), wide, key="k")


def test_a_sample_without_checksum_is_read(shards, expected):
    parts = shards.ours(latent(2, 1, 4, 4), text(2))
    about = json.loads(parts["json"])
    del about["crc32"]
    cook(parts | {"json": json.dumps(about).encode()}, expected, key="k")


def head(parts):
    """A record whose `.safetensors` is its head alone."""
    payload = parts["safetensors"]
    return parts | {
        "safetensors": RecordHeader(data=payload[: head_length(payload)], size=len(payload))
    }


@pytest.mark.parametrize("blanks", [0, 1, 4])
def test_tensors_are_read_where_they_lie(shards, expected, blanks):
    """A head may end where no number of a tensor can begin."""
    parts = shards.ours(latent(2, 3, 4, 6).bfloat16(), text(600).float())
    payload = parts["safetensors"]
    end = head_length(payload)
    padded = payload[8:end] + b" " * blanks
    payload = len(padded).to_bytes(8, "little") + padded + payload[end:]
    crc32 = {"crc32": {"safetensors": f"{zlib.crc32(payload):08x}"}}
    parts = {"json": json.dumps(json.loads(parts["json"]) | crc32).encode()}
    memory = bytearray(payload)
    found = cook(parts | {"safetensors": memoryview(memory)}, expected, key="k")
    whole = cook(parts | {"safetensors": payload}, expected, key="k")
    for name in ("latent_CFHW", "text_LE"):
        assert torch.equal(getattr(found, name), getattr(whole, name))
    memory[-4:] = bytes(4)
    in_place = not found.latent_CFHW.flatten()[-1]  # narrower numbers come last
    assert in_place == (blanks != 1)


@pytest.mark.parametrize("size", [(2, 3, 4, 6), (1, 2, 1, 4, 6), (2, 4, 6)])
def test_the_head_of_a_record_tells_its_size(shards, expected, size):
    parts = shards.ours(latent(*size), text(600))
    sample = cook(parts, expected, key="k")
    whole = SampleSize.of(sample, expected.layout)
    assert measure_sample(head(parts), expected) == measure_sample(parts, expected) == whole


@pytest.mark.parametrize("name", FAULTS_OF_NUMBERS)
def test_faults_of_the_numbers_are_not_seen_in_a_head(shards, expected, name):
    assert measure_sample(head(broken(shards, name)), expected).shape == (4, 2)


def test_a_head_that_tells_of_a_fault_or_of_nothing_is_left_to_the_whole(shards, expected):
    for name in set(FAULTS) - set(FAULTS_OF_NUMBERS):
        parts = broken(shards, name)
        assert measure_sample(head(parts) if "safetensors" in parts else parts, expected) is None, (
            name
        )
    payload = shards.ours(latent(2, 1, 4, 4), text(2))["safetensors"]
    for size in (4, 9, 100, len(payload) - 1):
        cut = RecordHeader(data=payload[:size], size=size)
        assert measure_sample({"safetensors": cut, "json": b"{}"}, expected) is None
    assert (
        measure_sample({"safetensors": payload, "json": b"{}"}, expected) is None
    )  # small: decode it
    assert measure_sample(shards.dfm(latent(2, 4, 4), text(2)), expected) is None


def test_tensors_pickled_beside_newer_megatron_load():
    """It replaces the function by which a pickle loads storages, in any process that imports it."""
    before, after = b"torch.storage\n_load_from_bytes", b"core.safe_globals\nsafe_load_from_bytes"
    data = pickle.dumps(text(5), protocol=2).replace(before, b"megatron." + after)
    assert after in data
    assert torch.equal(safe_pickle.loads(data), text(5))

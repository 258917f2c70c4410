"""The sound of samples, from a shard to a stream of a pack."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from dit.batch import SOUND, CleanTokens
from dit.config import Balance
from dit.data.cook import Expected, cook, measure_sample, size_in_pack
from dit.data.pack import pack_samples
from dit.data.records import SOUND_PART, head_length
from dit.data.rejections import Reject, SampleRefused
from dit.pack_wire import flatten_pack, unflatten_pack
from dit.sizing.flops import forward_flops
from dit.stored_samples import RecordHeader
from tests.sounding import sound_layout, sound_model, sound_samples
from tests.unit.data.conftest import built

RATE, K = 20.0, 6


def model(shards):
    return sound_model(
        in_channels=shards.channels, crossattn_emb_size=shards.width, sound_rate=RATE
    )


def heard(parts, number: int, *, frames: int | None = None, latent=None, **about):
    """A sample with sound: every third has none, some are larger than what is read at first."""
    if number % 3 == 0:
        return parts
    frames = frames or (400 if number % 12 == 4 else 4 + number % 5)
    if latent is None:
        latent = torch.randn(K, frames, generator=torch.Generator().manual_seed(number))
    payload = safetensors.torch.save({"latent": latent})
    said = json.loads(parts["json"])
    said["crc32"] |= {SOUND_PART: f"{zlib.crc32(payload):08x}"}
    seconds = {"rate": 1000, "channels": 1, "samples": round(1000 / RATE * frames)}
    return parts | {
        SOUND_PART: payload,
        "json": json.dumps(said | {"sound": seconds} | about).encode(),
    }


@pytest.mark.parametrize("balance", [Balance.NONE, Balance.FLOPS_TARGET])
def test_each_sound_comes_into_its_pack_to_the_bit(shards, tmp_path, opened, balance) -> None:
    plain = [shards.good(number) for number in range(60)]
    root = shards.write(tmp_path, [heard(parts, n) for n, parts in enumerate(plain)])
    config = replace(
        shards.config(root, balance=balance, task_encoder_seq_length=512), model=model(shards)
    )
    loader, seen = opened(built(config, rank=0, world_size=1)), set()
    expected = Expected.of(config)
    for _, pack in zip(range(20), loader, strict=False):
        sound = pack.others[SOUND]
        assert pack.starts[-1] + sound.starts[-1] <= 512
        for n, key in enumerate(pack.keys):
            number = int(key)
            rows = slice(sound.starts[n], sound.starts[n] + sound.num_tokens[n])
            sample = cook(heard(plain[number], number), expected, key=key)
            own = sample.others.get(SOUND, torch.empty(K, 0))
            assert torch.equal(sound.latent_TC[rows], own.T)
            assert torch.equal(sound.position_TA[rows, 0], torch.arange(own.shape[1]).float())
            assert (sound.segment_T[rows] == n).all() and (sound.level_row_T[rows] == n).all()
            seen.add(number)
        filled = (sound.is_real_T == sound.is_target_T).all()
        assert filled and int(sound.is_real_T.sum()) == sound.real_tokens
        sent = unflatten_pack(*flatten_pack(pack))
        assert all(
            torch.equal(sent.tensors[n].nan_to_num(), x.nan_to_num())
            for n, x in pack.tensors.items()
        )
    assert len(seen) == 60


def test_the_head_of_a_record_tells_its_size(shards) -> None:
    config = replace(shards.config(task_encoder_seq_length=2048), model=model(shards))
    expected = Expected.of(config)
    parts = heard(shards.good(4), 4, frames=700)
    whole = parts | {p: _head(parts[p]) for p in ("safetensors", SOUND_PART)}
    size = measure_sample(whole, expected)
    assert size == size_in_pack(parts, expected) and size.sound == 700
    assert size.tokens == size.rows + 700 and measure_sample(shards.good(4), expected) is None
    silent = size_in_pack(shards.good(4), expected)
    assert silent.sound == 0 and silent.tokens == size.tokens - 700


def _head(payload: bytes) -> RecordHeader:
    return RecordHeader(data=payload[: head_length(payload)], size=len(payload))


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"latent": torch.ones(K + 1, 4), "frames": 4}, Reject.INPUT_SHAPE, r"takes \[6, any\]"),
        ({"latent": torch.ones(K, 5), "frames": 4}, Reject.INPUT_SHAPE, "asks for 4"),
        (
            {"latent": torch.full((K, 4), math.nan), "frames": 4},
            Reject.INPUT_NOT_FINITE,
            "24 of 24",
        ),
        ({"crc32": {SOUND_PART: "0"}}, Reject.CHECKSUM, r"\.sound\.safetensors has crc32"),
        ({"sound": {"rate": 0}}, Reject.UNDECODABLE, "lacks whole numbers `samples` and `rate`"),
        ({"payload": b"no tensors"}, Reject.UNDECODABLE, r"\.sound\.safetensors"),
        ({"frames": 61}, Reject.TOO_LONG, "61 frames of sound"),
    ],
)
def test_what_is_wrong_with_a_sound_is_said(shards, changes, reason, message) -> None:
    expected = Expected.of(replace(shards.config(), model=model(shards)))
    changes = dict(changes)
    payload = changes.pop("payload", None)
    parts = heard(shards.good(1), 1, **changes)
    if payload is not None:
        parts |= {SOUND_PART: payload, "json": shards.good(1)["json"]}
    with pytest.raises(SampleRefused, match=message) as refusal:
        cook(parts, expected, key="k")
    assert refusal.value.reason is reason


def test_a_pack_without_sound_has_an_empty_stream() -> None:
    model = sound_model()
    pack = pack_samples([sound_samples(model)[n] for n in (1, 5)], sound_layout(model))
    sound = pack.others[SOUND]
    assert sound.starts == (0, 0, 0) and sound.latent_TC.shape == (0, model.sound_channels)
    assert sound.method(CleanTokens) == CleanTokens(level=0.0, counts=(0, 0))


def test_operations_grow_with_the_sound_alone() -> None:
    """A sample without sound costs what it does beside others, and layers count both rows."""
    model, lengths = sound_model(), {"tokens": [12, 8], "text": [5, 3]}
    silent = forward_flops(model, **lengths)
    assert silent == forward_flops(model, **lengths, sound=[0, 0])
    first, second = (forward_flops(model, **lengths, sound=[n, 0]) - silent for n in (4, 8))
    s, layers = model.sound_hidden_size, model.num_layers
    own = 4 * s * s + 2 * s * s + 2 * s * s * int(model.mlp_ratio)  # linears, of its own tokens
    own += 2 * s * s + 2 * s * s  # across: queries and output, keys and values
    pairs = 2 * s * 5 + 2 * 2 * s * 12  # to text; frames and sound to each other
    ends = 2 * s * model.sound_channels
    assert second - 2 * first == 2 * layers * 2 * s * (8 * 8 - 2 * 4 * 4)
    assert first == 2 * (4 * (layers * (own + pairs) + ends) + layers * 2 * s * 4 * 4)

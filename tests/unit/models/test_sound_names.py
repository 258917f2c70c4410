"""Names of the weights of networks with sound, and which linears `lora.streams` chooses."""

from __future__ import annotations

import math
import re

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from dit.config import (
    LoraConfig,
    LoraStreams,
    LoraTargets,
    OptimizerConfig,
    OptimizerKind,
    Precision,
    Problems,
)
from dit.lora.targets import chosen_adapters
from dit.models.linears import linear_shapes, matrices_of_linears, orthogonalised
from dit.models.ltx2.family import TINY, Ltx2Config
from dit.models.registry import VARIABLE, pairs
from dit.models.sound_dit.model import SoundDit
from tests.sounding import sound_model
from tests.toy_sound_family import PLACE as TOY_PLACE
from tests.toy_sound_family import ToySoundConfig, ToySoundNetwork

MODEL = sound_model()
EVERY = tuple(LoraTargets)


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (SoundDit, MODEL),
        (SoundDit, sound_model(streams_meet=False)),
        (ToySoundNetwork, ToySoundConfig(precision=Precision.FP32)),
    ],
    ids=["streams meet", "streams apart", "three rows"],
)
def test_every_tensor_of_a_checkpoint_is_named_once(groups, monkeypatch, kind, model) -> None:
    """Its shape, too; parts of theirs are joined to it, and it is split into them."""
    monkeypatch.setenv(VARIABLE, TOY_PLACE)
    network, table = kind(model, groups), pairs(model)
    stored = {
        (entry.key, entry.global_offset[0] if entry.prepend_axis_num else None): entry.global_shape
        for entry in network.sharded_state_dict().values()
        if isinstance(entry, ShardedTensor)
    }
    wanted = {
        (pair.ours, pair.layer): pair.shape if pair.layer is None else (pair.layers, *pair.shape)
        for pair in table
    }
    assert wanted == stored and len(stored) == len(table)
    names = [name for pair in table for name in pair.theirs]
    assert len(set(names)) == len(names)
    for pair in table:
        whole = torch.arange(math.prod(pair.shape)).view(pair.shape)
        assert torch.equal(pair.join(pair.split(whole)), whole)


def test_muon_takes_queries_keys_and_values_of_both_streams_apart() -> None:
    found = orthogonalised(MODEL, OptimizerConfig(kind=OptimizerKind.MUON))
    first = {p.ours.split(".")[2]: p for p in found if p.layer == 0 and "_q" in p.ours}
    assert set(first) == {
        f"{one}_attention" for one in ("self", "cross", "sound_self", "sound_cross")
    } | {"from_sound", "from_video"}
    assert linear_shapes(first["sound_self_attention"]) == [(32, 32)] * 3
    assert linear_shapes(first["from_sound"]) == [(32, 48)]
    left = {p.ours for p in matrices_of_linears(MODEL)} - {p.ours for p in found}
    assert all(re.search("modul|level|patches|sound_in|proj_out", name) for name in left)


def chosen(model, streams: str, targets: tuple[str, ...] = EVERY) -> set[str]:
    made = chosen_adapters(model, LoraConfig(rank=2, targets=targets, streams=LoraStreams(streams)))
    return {re.sub(r"\d+", "*", name) for name in made}


def test_streams_divide_the_linears() -> None:
    both, video, sound = (chosen(MODEL, one) for one in ("both", "video", "sound"))
    assert not video & sound and both - video - sound == {
        f"blocks.*.from_sound_attention.to_{part}" for part in (*"qkv", "out")
    }
    assert not any("sound" in name for name in video)
    assert "blocks.*.from_video_attention.to_q" in sound
    assert all(name.replace("sound_", "") in video for name in sound if "from_video" not in name)


@pytest.mark.parametrize("size", TINY)
def test_streams_divide_the_linears_of_ltx2(size: str) -> None:
    model = Ltx2Config(name="custom", **TINY[size])
    both, video, sound = (chosen(model, one, EVERY[:2]) for one in ("both", "video", "sound"))
    assert all("audio" not in name for name in video) and video and not video & sound
    assert all("audio" in name for name in sound)
    assert {name.rpartition(".to_")[0] for name in both - video - sound} == {
        "transformer_blocks.*.audio_to_video_attn"
    }
    outer = {name for name in chosen(model, "video", ("*",)) if not name.startswith("trans")}
    assert not any("audio" in name or "av_cross" in name or "a2v" in name for name in outer)


def test_targets_of_another_stream_are_refused_by_name() -> None:
    with pytest.raises(Problems, match=r"lora\.targets=sound_mlp\.0: .*lora\.streams=video"):
        chosen(MODEL, "video", ("attention", "sound_mlp.0"))

"""LTX-2 in Diffusers: tiny random networks, and packs of clips with and without sound."""

# T tokens of a latent, A latents of a sound, C numbers of a token, N samples

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor, nn

from dit.batch import LATENTS, WHOLE, CleanTokens, Grid, NoisyTokens, PackedBatch, TokenStream
from dit.config import ModelConfig
from dit.models.ltx2.diffusers import video_coordinates
from dit.models.ltx2.family import FAMILY, SOUND, SOUND_TEXT
from tests.families import case
from tests.packs import random_pack

_V23 = {
    "caption_channels": 3840,  # that of published files, though nothing reads it
    **{"gated_attn": True, "audio_gated_attn": True, "perturbed_attn": True},
    **{"cross_attn_mod": True, "audio_cross_attn_mod": True, "use_prompt_embeddings": False},
}
VERSIONS: dict[str, dict[str, Any]] = {
    "2.0": {},
    "2.3": _V23,
    "2.5": {**_V23, "ff_bias": False, "use_keyframes_abs_pos_embedding": True},
    "static": {**_V23, "use_prompt_adaln_single": False},
}
"""Sets of switches: those of the published networks, and captions without levels."""
GRIDS: Sequence[Grid] = ((3, 2, 3), (2, 3, 1), (1, 3, 4), (4, 1, 2), (2, 2, 2), (1, 1, 1))
"""Latent grids of six samples, of which the third and the last are pictures."""
RATES = (24.0, 30.0, 25.0, 12.5, 24.0, 16.0)
SOUNDS = (9, 0, 0, 14, 5, 1)
"""Latents of the sound of each sample."""
PREFIXES = (0, 0, 0, 4, 5, 0)
"""Given latents of the sound of each sample; the fifth has all given."""
TEXTS = (7, 1, 12, 3, 20, 2)
LEVELS = {
    LATENTS: (812.5, 20.0, 437.0, 999.0, 31.25, 600.0),
    SOUND: (300.0, 0.0, 0.0, 999.0, 750.0, 62.5),
}
"""1000 t of each stream."""


def configuration(version: str, number: int) -> dict[str, Any]:
    """config.json of a tiny network, of sizes that are drawn."""
    draw = random.Random(number)
    heads = draw.choice([1, 2, 3, 4])
    widths = draw.choice([6, 10, 16]), draw.choice([2, 4, 8])
    side, channels = draw.choice([1, 1, 2]), draw.choice([1, 3, 5])
    return {
        **{"num_attention_heads": heads, "audio_num_attention_heads": heads},
        **{"attention_head_dim": widths[0], "audio_attention_head_dim": widths[1]},
        "cross_attention_dim": heads * widths[0],
        "audio_cross_attention_dim": heads * widths[1],
        **{"in_channels": 4 * channels, "out_channels": 4 * channels, "patch_size": side},
        **{"audio_in_channels": channels, "audio_out_channels": channels},
        "caption_channels": draw.choice([8, 20]),
        "num_layers": draw.choice([1, 2, 3]),
        "rope_type": "split",
        **VERSIONS[version],
    }


def random_network(version: str, number: int, **changes: Any) -> Any:
    """Diffusers' network with random weights everywhere."""
    network = LTX2VideoTransformer3DModel(**{**configuration(version, number), **changes}).eval()
    case.fill_random(network, seed=number)
    return network


def sound_of(
    model: Any,
    lengths: Sequence[int] = SOUNDS,
    prefixes: Sequence[int] = PREFIXES,
    *,
    multiple: int = 4,
    seed: int = 3,
) -> TokenStream:
    """A stream of sounds of so many latents, the first of which may be given."""
    sizes = [-(-n // multiple) * multiple for n in lengths]
    starts = tuple(accumulate(sizes, initial=0))
    parts = [*zip(sizes, lengths, prefixes, strict=True)]
    place_T = torch.cat([torch.arange(size) for size in sizes])
    is_real_T = torch.cat([torch.arange(size) < n for size, n, _ in parts])
    is_given_T = torch.cat([torch.arange(size) < given for size, _, given in parts])
    segment_T = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    drawn = torch.Generator().manual_seed(seed)
    latent_TC = torch.randn(len(place_T), model.sound_channels, generator=drawn)
    position_TA = place_T[:, None].float()
    clean = CleanTokens(level=0.0, counts=tuple(prefixes)) if any(prefixes) else None
    return TokenStream(
        latent_TC=latent_TC * is_real_T[:, None],
        position_TA=position_TA,
        segment_T=segment_T,
        is_real_T=is_real_T,
        is_target_T=is_real_T & ~is_given_T,
        level_row_T=segment_T + len(sizes) * is_given_T,
        grids=tuple((n, 1, 1) for n in lengths),
        starts=starts,
        share=WHOLE,
        methods={} if clean is None else {CleanTokens: clean},
    )


def pack_with_sound(model: Any, **sound: Any) -> PackedBatch:
    """Six samples: clips and pictures, with and without sound, frames and prefixes given.

    Every second one has reference videos of three frames where the network takes them.
    """
    told: Any = {"fps": RATES, "family": FAMILY, "multiple": 4, "reference_frames": 3}
    batch = random_pack(GRIDS, TEXTS, model=model, **told)
    return replace(batch, others={SOUND: sound_of(model, **sound)})


def level_rows(stream: TokenStream, levels: Sequence[float]) -> Tensor:
    """Rows of the samples' levels, and of the clean one where the stream has such tokens."""
    level_N = torch.tensor(levels)
    return torch.cat([level_N, torch.zeros(stream.num_levels - len(level_N))])


def fed(batch: PackedBatch) -> tuple[Tensor, Tensor, PackedBatch]:
    """What our network takes of a pack: tokens, levels and the pack itself."""
    sound, dtype = batch.others[SOUND], batch.latent_TC.dtype
    level_M = level_rows(sound, LEVELS[SOUND]).to(dtype)
    own = NoisyTokens(input_TC=sound.latent_TC, level_M=level_M)
    batch = replace(batch, others={SOUND: sound.with_method(own)})
    return batch.latent_TC, level_rows(batch, LEVELS[LATENTS]).to(dtype), batch


def theirs(
    network: nn.Module,
    batch: PackedBatch,
    index: int,
    model: Any,
    levels: Mapping[str, Any] = LEVELS,
) -> dict[str, Tensor]:
    """Outputs of Diffusers' network for one sample by stream; nothing of a sound that is not."""
    dtype, sound = batch.latent_TC.dtype, batch.others.get(SOUND)
    start, tokens, own = batch.starts[index], batch.num_tokens[index], batch.latent_tokens[index]
    level = levels[LATENTS][index]
    told_T = torch.full((1, tokens), level, dtype=dtype)
    told_T[:, : batch.clean_tokens[index]] = 0
    told_T[:, own:] = 0
    length = 0 if sound is None else sound.num_tokens[index]
    x_AC = torch.zeros(1, 1, model.sound_channels, dtype=dtype)
    told_A, heard = torch.zeros(1, 1, dtype=dtype), levels[SOUND][index]
    if length:
        assert sound is not None
        first = sound.starts[index]
        x_AC = sound.latent_TC[None, first : first + length]
        told_A = torch.full((1, length), heard, dtype=dtype)
        told_A[:, : sound.clean_tokens[index]] = 0
    grids = [batch.grids[index], *batch.references[index]]
    seen, sounded = network(
        hidden_states=batch.latent_TC[None, start : start + tokens],
        audio_hidden_states=x_AC,
        encoder_hidden_states=case.text_of(batch, index),
        audio_encoder_hidden_states=case.text_of(batch, index, SOUND_TEXT),
        timestep=told_T,
        audio_timestep=told_A,
        sigma=torch.tensor([level], dtype=dtype),
        audio_sigma=torch.tensor([heard], dtype=dtype),
        video_coords=video_coordinates(network, grids, float(batch.fps_N[index]), model),
        audio_num_frames=max(length, 1),
        isolate_modalities=not length,
        use_cross_timestep=model.cross_levels == "other",
        return_dict=False,
    )
    return {LATENTS: seen[0, :own]} | ({SOUND: sounded[0]} if length else {})


TINY = {
    **{"num_attention_heads": 4, "audio_num_attention_heads": 4},
    **{"attention_head_dim": 10, "audio_attention_head_dim": 6},
    **{"cross_attention_dim": 40, "audio_cross_attention_dim": 24},
    **{"in_channels": 4, "out_channels": 4, "audio_in_channels": 3, "audio_out_channels": 3},
    **{"caption_channels": 16, "num_layers": 2, "rope_type": "split"},
}
"""Keys of config.json of the test networks: 2.0's, with two pairs of numbers that do not rotate."""
_OF_SOUND = ("audio", "av_cross", "a2v", "video_to", "keyframes")


def _configuration(number: int) -> dict[str, Any]:
    return configuration([*VERSIONS][number % len(VERSIONS)], number)


def _grid(draw: random.Random) -> Grid:
    return (draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 5))


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Pictures and videos without sound, and given first frames; `test_ltx2.py` has sounds."""
    batch = case.mixed_pack(model, number, _grid, fps=RATES)
    return replace(batch, others={})


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    levels = {LATENTS: {index: level}, SOUND: {index: 0.0}}
    return theirs(network, batch, index, model, levels)[LATENTS]


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    text = {"encoder_hidden_states": torch.zeros(1, 12, model.crossattn_emb_size)}
    text["audio_encoder_hidden_states"] = torch.zeros(1, 12, model.sound_text_size)
    return {
        "hidden_states": torch.zeros(1, frames * rows * columns, model.patch_features),
        "audio_hidden_states": torch.zeros(1, 1, model.sound_channels),
        **text,
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "audio_num_frames": 1,
    }


CASE = case.Case(
    network=LTX2VideoTransformer3DModel,
    tiny=TINY,
    parameters={
        "ltx2.0": 18_876_174_592,
        "ltx2.3": 18_988_838_144,
        "ltx2.5": 18_987_859_200,
    },
    configuration=_configuration,
    cases=4,
    quick=1,
    pack=_pack,
    theirs=_theirs,
    unread=lambda _, name, __: any(part in name for part in _OF_SOUND),
    counted=[],
    arguments=_arguments,
    refused=[
        ({"num_attention_heads": 2048}, "must be a multiple of 2 \\* num_attention_heads"),
        ({"text_pad_to": 128}, "LTX-2 does not attend to padding"),
        ({"sound_rate": 0.0}, "sound_rate=0.0 must be positive"),
    ],
    # Sizes of the connectors are those of another config.json.
    exportable={"connector_heads": None, "connector_rows": 1024, "connector_registers": 128}
    | {"connector_layers": None},
    grids=case.VIDEOS,
    decayed=("*sound*", "*between*", "*.gates.*"),
    second_attention="attn2",
    comfyui=True,
)

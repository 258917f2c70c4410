"""OmniGen2: tiny random networks, as its public code has them (`omnigen2_network`)."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from safetensors.torch import load_file
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.config import ModelConfig
from dit.models.positions import unpatchify
from tests.families import case, pipeline_parts
from tests.families.omnigen2_network import OmniGen2Transformer2DModel
from tests.packs import random_pack

# Where an export or a comparison looks for the class of config.json.
diffusers.OmniGen2Transformer2DModel = OmniGen2Transformer2DModel  # type: ignore[attr-defined]

TINY = {
    "in_channels": 4,
    "hidden_size": 48,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 6,
    "num_kv_heads": 2,
    "multiple_of": 1,
    "ffn_dim_multiplier": 0.5,
    "axes_dim_rope": (2, 2, 4),
    "axes_lens": (10_000, 10_000, 10_000),  # as published
    "text_feat_dim": 16,
    "timestep_scale": 1000.0,
}
"""Keys of a tiny config.json."""
JUDGED = (0, 4, 9)
"""Numbers of the configurations of which the public code's results are stored."""
GOLDEN = Path(__file__).parents[1] / "golden/omnigen2.safetensors"
_SIDES = (((6, 10), ()), ((2, 4), ((4, 6),)), ((8, 4), ((2, 10), (6, 2), (4, 4))))
"""Rows and columns of the latents of the judged samples, and of their references."""


INDEX = {
    "_class_name": "OmniGen2Pipeline",
    "mllm": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "processor": ["transformers", "Qwen2_5_VLProcessor"],
    "scheduler": ["scheduling_of_its_own", "FlowMatchEulerDiscreteScheduler"],
    "transformer": ["transformer_omnigen2", "OmniGen2Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "dynamic_time_shift": True,
    "num_train_timesteps": 1000,
}


def configuration(number: int) -> dict[str, Any]:
    """Of config.json; most have three heads of queries for one of keys."""
    draw, axes = random.Random(number), case.AXES[(number + 1) % len(case.AXES)]
    keys, readers = draw.choice([1, 2]), (3, 1, 2)[number // 4 % 3]
    width, multiplier = keys * readers * sum(axes), draw.choice([None, 0.5, 1.25])
    return {
        "in_channels": draw.choice([1, 3, 16]),
        "hidden_size": width,
        "num_attention_heads": keys * readers,
        "num_kv_heads": keys,
        "num_layers": draw.choice([1, 2, 3]),
        "num_refiner_layers": draw.choice([1, 2]),
        "multiple_of": 256 if multiplier is None else 1,
        "ffn_dim_multiplier": multiplier,
        "axes_dim_rope": axes,
        "text_feat_dim": draw.choice([8, 20]),
    }


def angles_of(network: Any) -> list[Tensor]:
    """Tables of angles, as the pipeline hands them to the network."""
    sizes = zip(network.config.axes_dim_rope, network.config.axes_lens, strict=True)
    made: Any = partial(get_1d_rotary_pos_embed, theta=10_000, freqs_dtype=torch.float64)
    return [made(width, rows) for width, rows in sizes]


def run(
    network: Any, latent_CHW: Tensor, told: float, text_LE: Tensor, references: Sequence[Tensor]
) -> Tensor:
    """What a network, or the public code's, makes of a sample."""
    mask = torch.ones(1, len(text_LE), dtype=torch.int64)
    given = [list(references)] if references else None
    inputs = ([latent_CHW], torch.tensor([told]), text_LE[None], angles_of(network), mask)
    (made,) = network(*inputs, ref_image_hidden_states=given)
    return made


def judged(network: Any, number: int) -> dict[str, Tensor]:
    """Outputs of a random network of three samples, and the norm of each tensor's gradient."""
    case.fill_random(network.eval(), seed=number)
    draw = torch.Generator().manual_seed(number)
    channels, width = network.config.in_channels, network.config.text_feat_dim
    found: dict[str, Tensor] = {}
    for index, (own, others) in enumerate(_SIDES):
        latent, *references = (
            torch.randn(channels, *sides, generator=draw) for sides in (own, *others)
        )
        text = torch.randn(3 + 4 * index, width, generator=draw)
        made = run(network, latent, 0.1875 + 0.25 * index, text, references)
        (made * torch.randn(made.shape, generator=draw)).sum().backward()
        found[f"{number}.output.{index}"] = made.detach().contiguous()
    for name, weight in network.named_parameters():
        found[f"{number}.gradient.{name}"] = weight.grad.norm()
    return found


def stored() -> dict[str, Tensor]:
    """`judged` of the public code's network, by commit 0f72fa92 of VectorSpaceLab/OmniGen2."""
    return load_file(GOLDEN)


SIZE, SEED, STEPS = (1, 6, 10), 7, 4
"""Of the generated pictures; the noise is that of `dit.sampling.ode_solvers.initial_noise`."""
CALLS = (
    *((0, 4.0, 1.0, 1.0), (2, 4.0, 1.0, 1.0), (2, 4.0, 2.0, 1.0), (1, 2.5, 1.5, 1.0)),
    *((2, 1.0, 2.0, 1.0), (2, 4.0, 2.0, 0.5)),
)
"""Number of references, scale of the text, scale of the references, end of cfg_range."""


def given(references: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Inputs of a request for a picture by `TINY`, what guidance leads away from, its noise."""
    draw = torch.Generator().manual_seed(SEED)
    inputs = {name: torch.randn(rows, 16, generator=draw) for name, rows in (("a", 5), ("b", 3))}
    text, negative = ({"text": rows_LE} for rows_LE in inputs.values())
    sizes, tokens = ((1, 4, 6), (1, 8, 2))[:references], 15
    for number, size in enumerate(sizes):
        text[f"reference_latent_{number}"] = torch.randn(4, *size, generator=draw)
        tokens += size[1] * size[2] // 4
    noise_TC = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(SEED))
    return text, negative, unpatchify(noise_TC, (1, 3, 5), 1, 2)


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Samples with and without references, of unequal odd sides."""
    draw, references = random.Random(number), (2, 0, 5, 1)[number % 4]
    grids = [case.picture(draw) for _ in range(5)]
    texts = ([7, 1, 12, 3, 20], [1, 1, 5, 2, 1])[number % 2]
    packed: Any = replace(model, reference_latents=references)  # type: ignore[call-arg]
    batch = random_pack(grids, texts, model=packed)
    found = [len(one) for one in batch.references]
    assert found == [0, references, 0, references, 0]
    return batch


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """As the pipeline calls it and turns it round."""
    at, grids = batch.starts[index], [batch.grids[index]]
    grids += batch.references[index]
    pictures = []
    for grid in grids:
        shifted = replace(batch, starts=(at,), grids=(grid,))
        pictures.append(case.latent_of(shifted, 0, model)[:, 0])
        at += grid[1] * grid[2]
    own, *references = pictures
    made = run(network, own, 1 - level / 1000, case.text_of(batch, index)[0], references)
    return -case.rows_of(made[:, None], model)


def _unread(_: Any, name: str, batch: PackedBatch) -> bool:
    """What sees references alone, where no sample has any; and numbers that none of them has."""
    return not any(batch.references) and ("ref_image" in name or "image_index" in name)


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    sides = frames * rows * model.patch_spatial, columns * model.patch_spatial
    tables: list[Any] = [
        get_1d_rotary_pos_embed(width, 100, freqs_dtype=torch.float64) for width in model.rope_axes
    ]
    return {
        "hidden_states": [torch.zeros(model.in_channels, *sides)],
        "text_hidden_states": torch.zeros(1, case.COUNTED_TEXT, model.crossattn_emb_size),
        "freqs_cis": tables,
        "text_attention_mask": torch.ones(1, case.COUNTED_TEXT, dtype=torch.int64),
    }


def _levels(num_steps: int, tokens: int) -> Tensor:
    """Its times run from noise, 0, to data; the shift goes by cells, four of which are a token."""
    even_S, shift = torch.linspace(0, 1, num_steps + 1).double(), (4 * tokens) ** 0.5 / 40
    return 1 - even_S / (shift - shift * even_S + even_S)


def _their_operations(model: Any, tokens: int, rows: int) -> int:
    """It gives text to the head, and embeds no pictures as references that are none."""
    embedded = 2 * model.hidden_size * tokens * model.patch_features
    return case.head_of_text(model, tokens, rows) - embedded


CASE = case.Case(
    network=OmniGen2Transformer2DModel,
    tiny=TINY,
    parameters={"omnigen2": 3_967_161_400},
    configuration=configuration,
    cases=12,
    pack=_pack,
    theirs=_theirs,
    unread=_unread,
    published_levels={"omnigen2": _levels},
    page=case.Page(
        model="OmniGen2", keys=("model.num_layers=2", "model.num_refiner_layers=1"), edits=True
    ),
    their_operations=_their_operations,
    counted=[("omnigen2", {}), ("omnigen2", {"num_refiner_layers": 2})],
    arguments=_arguments,
    text_rows=lambda a: a["text_hidden_states"].shape[1],
    refused=[
        ({"num_kv_heads": 5}, "num_kv_heads=5 must divide num_attention_heads=21"),
        ({"tensor_model_parallel_size": 3}, "=3 must divide num_kv_heads=7, .* 1 or 7"),
        ({"tensor_model_parallel_size": 7}, "7"),
        ({"rope_axes": (4, 4, 2)}, "must add up to 120, .* sum is 10"),
        ({"reference_latents": 6}, "reference_latents=6 must be at most 5"),
        ({"reference_latents": -1}, "reference_latents=-1 must not be negative"),
        ({"route_from": 5, "route_to": 9}, "route_from=5 must be 6 or more: .* OmniGen2"),
        ({"patch_temporal": 2}, "OmniGen2 is a network of images"),
        ({"patch_spatial": 1}, "patch_spatial=1 must be 2, .* of OmniGen2"),
        ({"text_pad_to": 8}, "must be null: OmniGen2 does not attend"),
    ],
    training=("model.reference_latents=2",),
    adapted=("norm1.linear", "linear_1", "linear_3", "norm_out.linear_1"),
)
random_omnigen2 = CASE.random


def pipeline(folder: Path) -> Path:
    """Its folder as it is published, with random weights, in `folder`/pipeline."""
    root = pipeline_parts.omnigen2(folder / "pipeline")
    random_omnigen2().save_pretrained(root / "transformer")
    (root / "scheduler").mkdir()
    (root / "scheduler/scheduler_config.json").write_text(json.dumps(SCHEDULER))
    (root / "model_index.json").write_text(json.dumps(INDEX))
    for code in ("transformer/transformer_omnigen2.py", "scheduler/scheduling_of_its_own.py"):
        (root / code).write_text("# its class")
    return root

"""Networks with joint attention on one process: what moves them, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import (
    ChromaTransformer2DModel,
    HunyuanImageTransformer2DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.config import ModelConfig, Precision, Problems, RunConfig
from dit.models.cost import forward_flops, parameter_count
from dit.models.hunyuan_video.family import FirstFrame
from dit.models.positions import CentredPositions
from dit.models.qwen_image.model import text_positions
from dit.models.registry import diffusers_form, family_named, family_of, named_model, pairs
from dit.train.model_and_optimizer import initialise_weights, randomise
from tests.packs import random_pack, run_config
from tests.toy_networks import level_rows

PUBLISHED = {
    "qwen_image": 20_430_401_088,
    "qwen_image_edit": 20_430_401_088,
    "qwen_image_edit_2511": 20_430_401_088,
    "hunyuanvideo": 12_821_012_544,
    "hunyuanvideo_i2v": 12_821_012_544,
    "hunyuanvideo_i2v_33ch": 12_810_991_680,
    "hunyuanvideo_15": 8_326_608_160,
    "hunyuanimage_21": 17_425_795_520,
    "hunyuanimage_21_distilled": 17_453_334_976,
    "sd3": 2_028_328_000,
    "sd3.5_medium": 2_243_171_520,
    "sd3.5_large": 8_056_627_520,
    "chroma": 8_899_983_424,
}
NETWORKS: dict[str, Any] = {
    "qwen_image": QwenImageTransformer2DModel,
    "hunyuan_video": HunyuanVideoTransformer3DModel,
    "hunyuan_video_15": HunyuanVideo15Transformer3DModel,
    "hunyuan_image": HunyuanImageTransformer2DModel,
    "sd3": SD3Transformer2DModel,
    "chroma": ChromaTransformer2DModel,
}
GRIDS, TEXTS = [(3, 2, 3), (1, 4, 2), (2, 3, 1), (4, 1, 2), (1, 1, 1)], [9, 2, 4, 30, 1]
LEVELS = torch.tensor([812.5, 0.5, 437.0, 999.0, 31.25])


def tiny(size: str, **changes: Any) -> ModelConfig:
    """The family's own tiny network, of two layers."""
    family = family_of(named_model(size))
    settings = {**family.sizes[size], **family.tiny[size], "num_layers": 2, "name": "custom"}
    return family.config(**(settings | changes))


def _theirs(model: ModelConfig, device: str) -> nn.Module:
    """Diffusers' network of the same sizes."""
    content = diffusers_form(model).content(RunConfig(model=model))
    with torch.device(device):
        return NETWORKS[model.family](**content)


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_sizes_have_the_tensors_of_diffusers(name: str) -> None:
    model = named_model(name)
    theirs = _theirs(model, "meta")
    ours = {name: shape for pair in pairs(model) for name, shape in pair.their_shapes.items()}
    assert ours == {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert parameter_count(model) == PUBLISHED[name] == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    "size",
    [
        "qwen_image",
        "hunyuanvideo_15",
        "hunyuanvideo_i2v",
        "hunyuanimage_21",
        "sd3",
        "sd3.5_medium",
        "chroma",
    ],
)
def test_description_counts_parameters_and_operations(groups, size: str) -> None:
    """Of a sample of a caption alone: what it says of other rows of text is an upper bound."""
    changes: Any = (
        {"glyph_hidden_size": 2048}
        if size in ("hunyuanvideo_15", "hunyuanimage_21")
        else {"mlp_ratio": 4.0}
    )
    if size == "hunyuanvideo_i2v":  # Diffusers computes modulations of level 0 beside the others
        changes["image_condition"] = FirstFrame.NONE
    model: Any = tiny(size, **changes)
    network = family_of(model).network()(model, groups)
    assert parameter_count(model) == sum(weight.numel() for weight in network.parameters())
    text, grid = 12, (3, 4, 5)
    texts = torch.zeros(1, text, model.crossattn_emb_size)
    if size == "hunyuanvideo_15":
        channels = model.in_channels + model.condition_channels
        inputs: dict[str, Any] = {
            "hidden_states": torch.zeros(1, channels, 3, 8, 10),
            "encoder_attention_mask": torch.ones(1, text),
            "encoder_hidden_states_2": torch.zeros(1, 0, model.glyph_embed_size),
            "encoder_attention_mask_2": torch.ones(1, 0),
            "image_embeds": torch.zeros(1, 0, model.image_embed_size),
        }
    elif size == "hunyuanvideo_i2v":
        inputs = {
            "hidden_states": torch.zeros(1, model.in_channels, 3, 8, 10),
            "encoder_attention_mask": torch.ones(1, text),
            "pooled_projections": torch.zeros(1, model.pooled_size),
            "guidance": torch.zeros(1),
        }
    elif model.family == "hunyuan_image":
        inputs = {
            "hidden_states": torch.zeros(1, model.in_channels, 24, 10),
            "encoder_attention_mask": torch.ones(1, text),
        }
    elif model.family == "sd3":
        latent = torch.zeros(1, model.in_channels, 24, 10)
        inputs = {"hidden_states": latent, "pooled_projections": torch.zeros(1, model.pooled_size)}
    else:
        tokens = torch.zeros(1, 60, model.patch_features)
        inputs = {"hidden_states": tokens, "img_shapes": [[grid]]}
    if model.family == "chroma":
        inputs["img_ids"], inputs["txt_ids"] = torch.zeros(60, 3), torch.zeros(text, 3)
        del inputs["img_shapes"]
    theirs = _theirs(model, "cpu")
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        theirs(encoder_hidden_states=texts, timestep=torch.zeros(1), **inputs)
    assert forward_flops(model, tokens=[60], text=[text]) == counter.get_total_flops()


@pytest.mark.parametrize(
    ("size", "name"),
    [
        *(("qwen_image", name) for name in ("latent_TC", "texts.text", "level")),
        *(("qwen_image_edit_2511", name) for name in ("latent_TC", "texts.text", "reference")),
        *(("hunyuanvideo_15", name) for name in ("latent_TC", "texts.text", "level")),
        *(("hunyuanvideo_15", f"texts.{name}") for name in ("text_2", "image_embed")),
        ("hunyuanvideo_15", "condition_TC"),
        *(("hunyuanvideo_i2v", name) for name in ("latent_TC", "texts.text", "level")),
        ("hunyuanvideo_i2v", "vectors.pooled_text"),
        ("hunyuanvideo_i2v_33ch", "condition_TC"),
        *(("hunyuanimage_21", name) for name in ("latent_TC", "texts.text", "texts.text_2")),
        *(("sd3.5_medium", name) for name in ("latent_TC", "texts.text", "level")),
        *(("sd3.5_medium", name) for name in ("vectors.pooled_text", "position_TA")),
        *(("chroma", name) for name in ("latent_TC", "texts.text", "level", "position_TA")),
    ],
)
def test_output_moves_with_its_own_inputs_and_with_no_neighbours(groups, size: str, name: str):
    """Of the second sample, and of its references."""
    model: Any = tiny(size)
    network = family_of(model).network()(model, groups)
    randomise(network, seed=7)
    network.eval()
    grids = [(1, h, w) for _, h, w in GRIDS] if model.largest_latent else GRIDS
    told = family_of(model).guidance(model)
    batch = random_pack(grids, TEXTS, model=model, guidance=told)
    level_N, tensors = LEVELS.clone(), {n: x.clone() for n, x in batch.tensors.items()}
    second = batch.starts[1]
    if name == "level":
        level_N[1] += 1
    elif name == "reference":
        tensors["latent_TC"][second + 8] += 1
    elif name.startswith("vectors."):
        tensors[name][1] += 1
    elif name.startswith("texts."):
        first, last = batch.text_offsets[name.partition(".")[2]][1:3]
        assert last > first
        tensors[name][first] += 1
    else:
        tensors[name][second] += 1
    altered = batch.with_tensors(tensors)
    with torch.no_grad():
        before = network(batch.latent_TC, level_rows(LEVELS, batch), batch)
        after = network(altered.latent_TC, level_rows(level_N, batch), altered)
    spans = zip(batch.starts, batch.latent_tokens, strict=False)
    moved = [not torch.equal(before[s : s + n], after[s : s + n]) for s, n in spans]
    assert moved == [False, True, False, False, False]


def test_positions_are_counted_from_the_middle_of_each_picture() -> None:
    found = CentredPositions()(((1, 3, 2), (1, 1, 4)), fps=24.0)
    assert found[:, 0].tolist() == [0.0] * 6 + [1.0] * 4
    assert found[:6, 1].tolist() == [-2, -2, -1, -1, 0, 0]
    assert found[:6, 2].tolist() == [-1, 0] * 3
    assert found[6:, 1].tolist() == [-1] * 4 and found[6:, 2].tolist() == [-2, -1, 0, 1]
    text = text_positions([2, 0, 1], [[(1, 3, 2), (1, 1, 4)], [(1, 1, 1)], [(1, 9, 2)]])
    assert text.tolist() == [[2] * 3, [3] * 3, [4] * 3]  # half of the longest side of all pictures


def test_a_first_frame_is_shown_as_channels_with_a_mask(groups) -> None:
    """The second and the fourth sample have one; the second has no frame beyond it."""
    model: Any = tiny("hunyuanvideo_15")
    batch = random_pack(GRIDS, TEXTS, model=model)
    assert batch.condition_TC is not None
    mask_T = batch.condition_TC[:, -1]
    first = batch.starts[3]
    assert mask_T.nonzero().flatten().tolist() == [first, first + 1]  # of a frame of two tokens
    assert batch.condition_TC[:first].abs().sum() == 0
    assert batch.condition_TC[first : first + 2, :-1].abs().min() > 0
    assert batch.is_target_T[first] and not batch.clean_tokens


def test_a_new_table_of_positions_is_that_of_diffusers(groups) -> None:
    """Published weights bring theirs along; initial values leave it as it is made."""
    model: Any = tiny("sd3")
    network = family_of(model).network()(model, groups)
    initialise_weights(network, run_config(model=model))
    expected = _theirs(model, "cpu").pos_embed.pos_embed[0]
    assert torch.equal(network.positions.table, expected)


@pytest.mark.parametrize(
    "size", ["qwen_image", "hunyuanvideo_15", "hunyuanimage_21", "sd3.5_medium", "chroma"]
)
def test_layers_start_as_the_identity_and_the_output_as_zero(groups, size: str) -> None:
    model: Any = tiny(size)
    network = family_of(model).network()(model, groups)
    initialise_weights(network, run_config(model=model))
    batch = random_pack([(1, 2, 3)], [4], model=model)
    assert not network(batch.latent_TC, LEVELS[:1], batch).any()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen_image", {"text_pad_to": 8}, "text_pad_to=8: Qwen-Image attends to no padding"),
        ("qwen_image", {"rope_axes": (4, 4, 4)}, r"rope_axes=\[4, 4, 4\] add up to 12"),
        ("qwen_image", {"rope_axes": (1, 4, 8)}, "must be even numbers"),
        ("qwen_image", {"reference_latents": 9}, r"reference_latents=9 must lie in \[0, 3\]"),
        ("qwen_image", {"clean_references": True}, "needs reference_latents of 1 or more"),
        ("qwen_image", {"patch_temporal": 2}, "Qwen-Image learns pictures"),
        ("hunyuan_video", {"num_single_layers": 0}, "num_single_layers=0 must be at least 1"),
        ("hunyuan_video", {"text_pad_to": 8}, "text_pad_to=8: HunyuanVideo attends to no"),
        ("hunyuan_video_15", {"num_refiner_layers": 0}, "num_refiner_layers=0 must be at least 1"),
        ("hunyuan_video_15", {"rope_axes": (4, 4, 4)}, r"rope_axes=\[4, 4, 4\] add up to 12"),
        ("hunyuan_video_15", {"text_pad_to": 8}, "text_pad_to=8: HunyuanVideo 1.5 attends to no"),
        ("hunyuan_image", {"rope_axes": (4, 4)}, r"rope_axes=\[4, 4\] add up to 8"),
        ("hunyuan_image", {"text_pad_to": 8}, "text_pad_to=8: HunyuanImage attends to no padding"),
        ("hunyuan_image", {"patch_temporal": 2}, "HunyuanImage learns pictures"),
        ("hunyuan_image", {"mlp_ratio": 3.999}, "MLP width 14332 .* does not divide by"),
        ("sd3", {"max_size": (1, 8, 6)}, r"max_size=\[1, 8, 6\] must be \[1, N, N\]"),
        ("sd3", {"max_size": (1, 7, 7)}, "does not divide into patches"),
        ("sd3", {"dual_attention_layers": 25, "qk_norm": True}, r"must lie in \[0, 24\]"),
        ("sd3", {"patch_temporal": 2}, "SD3 learns pictures"),
        ("chroma", {"approximator_channels": 6}, "=6 must be a multiple of 4"),
        ("chroma", {"approximator_layers": 65}, "approximator_layers=65 must be at most 64"),
        ("chroma", {"text_pad_to": 8}, "text_pad_to=8: Chroma attends to the one row of padding"),
    ],
)
def test_what_the_networks_cannot_be_is_refused(family: str, changes: Any, message: str) -> None:
    with pytest.raises(Problems, match=message):
        family_named(family).config(**(changes | {"name": "custom", "precision": Precision.FP32}))

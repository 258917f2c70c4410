"""Our packed forward against Diffusers' CosmosTransformer3DModel on the same random weights."""

from __future__ import annotations

import pytest
import torch
from diffusers import CosmosTransformer3DModel
from diffusers.models.transformers import transformer_cosmos

from dit.config import ExtraPosition, ModelConfig
from dit.model.dit import DiT
from dit.model.weights import randomise
from tests.packs import random_pack, tiny_model

GRIDS = [(1, 3, 5), (4, 2, 3), (1, 1, 1), (2, 6, 4)]
TEXTS = [7, 1, 12, 3]
FPS = [float("nan"), 16.0, float("nan"), 30.0]


class _NearestResize:
    """Stands in for torchvision, which has no CPU build here: a mask of zeros stays zeros."""

    class functional:  # noqa: N801
        @staticmethod
        def resize(mask, size, interpolation):
            return torch.nn.functional.interpolate(mask, size=size, mode="nearest")

    class InterpolationMode:
        NEAREST = "nearest"


def _pair(groups, **changes):
    model = tiny_model(**changes)
    ours = DiT(model, groups)
    randomise(ours, seed=5)
    learnable = model.extra_pos_embed is ExtraPosition.LEARNABLE
    theirs = CosmosTransformer3DModel(
        in_channels=model.in_channels,
        out_channels=model.in_channels,
        num_attention_heads=model.num_attention_heads,
        attention_head_dim=model.hidden_size // model.num_attention_heads,
        num_layers=model.num_layers,
        mlp_ratio=model.mlp_ratio,
        text_embed_dim=model.crossattn_emb_size,
        adaln_lora_dim=model.adaln_lora_dim,
        max_size=model.max_size,
        patch_size=(model.patch_temporal, model.patch_spatial, model.patch_spatial),
        rope_scale=model.rope_scale,
        concat_padding_mask=model.concat_padding_mask,
        extra_pos_embed_type="learnable" if learnable else None,
    )
    theirs.load_state_dict(_diffusers_state(ours, model))
    return ours.eval(), theirs.eval(), model


def _diffusers_state(ours: DiT, model: ModelConfig) -> dict[str, torch.Tensor]:
    state, heads = {}, model.num_attention_heads
    norms = {"modulate_self": "norm1", "modulate_cross": "norm2", "modulate_mlp": "norm3"}
    attentions = {"self_attention": "attn1", "cross_attention": "attn2"}
    leaves = {
        "linear_proj": "to_out.0",
        "q_layernorm": "norm_q",
        "k_layernorm": "norm_k",
        "linear_q": "to_q",
    }
    for name, value in ours.state_dict().items():
        if name.endswith("_extra_state"):
            continue
        if not name.startswith("decoder."):
            if name == "proj_out.weight":  # (c, t, h, w) -> (h, w, t, c)
                p, s = model.patch_temporal, model.patch_spatial
                value = value.view(-1, p, s, s, value.shape[1]).permute(2, 3, 1, 0, 4).flatten(0, 3)
            for old, new in {
                "patches.": "patch_embed.proj.",
                "level.linear": "time_embed.t_embedder.linear",
                "level.norm": "time_embed.norm",
                "positions.": "learnable_pos_embed.",
                "modulate_out.": "norm_out.",
            }.items():
                name = name.replace(old, new)
            state[name] = value
            continue
        layer, part, rest = name.removeprefix("decoder.layers.").split(".", 2)
        prefix = f"transformer_blocks.{layer}."
        if part in norms:
            state[f"{prefix}{norms[part]}.{rest}"] = value
        elif part == "mlp":
            leaf = "ff.net.0.proj" if "fc1" in rest else "ff.net.2"
            state[f"{prefix}{leaf}.weight"] = value
        elif rest in ("linear_qkv.weight", "linear_kv.weight"):
            letters = rest.split("_")[1].split(".")[0]
            by_head = value.view(heads, len(letters), -1, value.shape[1])
            for i, letter in enumerate(letters):
                state[f"{prefix}{attentions[part]}.to_{letter}.weight"] = by_head[:, i].flatten(
                    0, 1
                )
        else:
            leaf, kind = rest.split(".")
            state[f"{prefix}{attentions[part]}.{leaves[leaf]}.{kind}"] = value
    return state


def _unpack(tokens, grid, model):
    f, h, w = grid
    p, s = model.patch_temporal, model.patch_spatial
    blocks = tokens.view(f, h, w, model.in_channels, p, s, s)
    return blocks.permute(3, 0, 4, 1, 5, 2, 6).reshape(model.in_channels, f * p, h * s, w * s)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"patch_temporal": 2, "patch_spatial": 1},
        {"rope_scale": (2.0, 1.0, 1.5), "mlp_ratio": 3.0},
        {"extra_pos_embed": ExtraPosition.LEARNABLE, "max_size": (8, 16, 16)},
        {"concat_padding_mask": True, "text_pad_to": 12},
    ],
    ids=["plain", "patch", "rope", "learnable", "padding"],
)
def test_packed_forward_equals_diffusers(groups, monkeypatch, changes):
    monkeypatch.setattr(transformer_cosmos, "transforms", _NearestResize, raising=False)
    ours, theirs, model = _pair(groups, **changes)
    batch = random_pack(GRIDS, TEXTS, model=model, fps=FPS)
    level_N = torch.tensor([-2.1, 0.3, 1.7, 500.0])
    with torch.no_grad():
        prediction_TC = ours(batch.latent_TC, level_N, batch)
        for i, grid in enumerate(GRIDS):
            start, tokens = batch.starts[i], batch.num_tokens[i]
            text = batch.text_LE[batch.text_starts[i] : batch.text_starts[i + 1]]
            if model.text_pad_to:
                text = torch.nn.functional.pad(text, (0, 0, 0, model.text_pad_to - len(text)))
            latent = _unpack(batch.latent_TC[start : start + tokens], grid, model)
            expected = theirs(
                latent[None],
                level_N[i : i + 1],
                text[None],
                fps=None if FPS[i] != FPS[i] else FPS[i],
                padding_mask=torch.zeros(1, 1, *latent.shape[-2:]),
            ).sample[0]
            got = _unpack(prediction_TC[start : start + tokens], grid, model)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_parameter_count_equals_diffusers(groups):
    ours, theirs, _ = _pair(groups)
    count = sum(p.numel() for p in ours.parameters())
    assert count == sum(p.numel() for p in theirs.parameters())

"""The cross-attention layer with Wan's choice of parts against Wan's published block."""

# T tokens, D model width, K head width

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from dit.config import Precision
from dit.models.layers.modulation import TimestepConditioning
from dit.models.layers.per_sample import PerSample
from tests.packs import random_pack, tiny_model
from tests.toy_networks import ToyCross

WIDTH, HEADS, HEAD = 64, 4, 16
GRIDS, TEXTS = [(2, 3, 5), (1, 4, 4), (3, 2, 2)], [5, 1, 7]
MODEL = tiny_model(
    num_layers=1, hidden_size=WIDTH, num_attention_heads=HEADS, crossattn_emb_size=WIDTH
)


def _halves(rows: Tensor) -> Tensor:
    """Rows of a head, whose neighbours are turned together, as halves that are."""
    heads = rows.unflatten(0, (-1, HEAD))
    return torch.cat((heads[:, 0::2], heads[:, 1::2]), dim=1).flatten(0, 1)


def _by_head(*parts: Tensor) -> Tensor:
    """Rows of several matrices, ordered head by head."""
    return torch.cat([part.unflatten(0, (HEADS, -1)) for part in parts], dim=1).flatten(0, 1)


def _weights(theirs: WanTransformerBlock) -> dict[str, Tensor]:
    own, cross = theirs.attn1, theirs.attn2
    first, last = theirs.ffn.net[0].proj, theirs.ffn.net[2]
    made = {"modulation.table": theirs.scale_shift_table[0]}
    for kind in ("weight", "bias"):
        q, k, v = (getattr(linear, kind) for linear in (own.to_q, own.to_k, own.to_v))
        made[f"self_attention.linear_qkv.{kind}"] = _by_head(_halves(q), _halves(k), v)
        made[f"self_attention.linear_proj.{kind}"] = getattr(own.to_out[0], kind)
        k, v = (getattr(linear, kind) for linear in (cross.to_k, cross.to_v))
        made[f"cross_attention.linear_q.{kind}"] = getattr(cross.to_q, kind)
        made[f"cross_attention.linear_kv.{kind}"] = _by_head(k, v)
        made[f"cross_attention.linear_proj.{kind}"] = getattr(cross.to_out[0], kind)
        made[f"norm_cross.{kind}"] = getattr(theirs.norm2, kind)
        made[f"mlp.linear_fc1.{kind}"] = getattr(first, kind)
        made[f"mlp.linear_fc2.{kind}"] = getattr(last, kind)
    for name, attention, order in (("self", own, _halves), ("cross", cross, lambda x: x)):
        norm = f"{name}_attention.across_heads"
        made[f"{norm}.query_scale"] = order(attention.norm_q.weight)
        made[f"{norm}.key_scale"] = order(attention.norm_k.weight)
    return made


def _neighbours(angle_TK: Tensor) -> Tensor:
    """Cosines or sines of halves as those of neighbours, as Wan's own rotation takes them."""
    return angle_TK[:, : HEAD // 2].repeat_interleave(2, dim=1)[None, :, None]


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("clean", [False, True], ids=["a level a sample", "clean first frames"])
@torch.no_grad()
def test_a_packed_layer_is_wans_block_of_each_sample(groups, clean, precision):
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    theirs = WanTransformerBlock(WIDTH, 3 * WIDTH, HEADS, cross_attn_norm=True)
    for p in theirs.parameters():
        nn.init.normal_(p, mean=float(p.dim() == 1), std=0.1, generator=generator)
    network = ToyCross(replace(MODEL, precision=precision), groups)
    dtype = network.config.params_dtype
    theirs.to(dtype)
    theirs.scale_shift_table.data = theirs.scale_shift_table.data.float()
    weights = _weights(theirs)
    layer = network.stacks["blocks"].layers[0]
    assert {name for name, _ in layer.named_parameters()} == weights.keys()
    for name, parameter in layer.named_parameters():
        assert parameter.shape == weights[name].shape, name
        parameter.copy_(weights[name])
    theirs.scale_shift_table.data.copy_(layer.modulation.table[None])  # rounded as ours

    batch = random_pack(GRIDS, TEXTS, model=MODEL)
    samples, h_TD = len(GRIDS), drawn(len(batch.segment_T), WIDTH).to(dtype)
    shared_NX = drawn(2 * samples, 6 * WIDTH)
    level_row_T = batch.segment_T + samples * (clean * (batch.position_TA[:, 0] == 0))
    blocks = {"t_emb": drawn(samples, WIDTH), "shared": shared_NX}
    conditions = network.conditions(blocks, batch, PerSample.of(level_row_T))
    timestep = TimestepConditioning(t_emb_ND=blocks["t_emb"], adaln_shift_NX=shared_NX)
    found_TD = layer(h_TD, replace(conditions, timestep=timestep))

    texts = list(pairwise(batch.text_starts))
    for i, tokens in enumerate(batch.num_tokens):
        mine, text = slice(batch.starts[i], batch.starts[i] + tokens), slice(*texts[i])
        rotation = tuple(turn_TK[mine] for turn_TK in conditions.tokens.angles_TK or ())
        temb = shared_NX[level_row_T[mine]].view(1, tokens, 6, WIDTH)
        wanted_TD = theirs(
            h_TD[None, mine],
            batch.text_LE[None, text].to(dtype),
            temb if clean else temb[:, 0],
            tuple(_neighbours(angle) for angle in rotation),
        )[0]
        error = (found_TD[mine] - wanted_TD).float().norm() / wanted_TD.float().norm()
        assert error <= (1e-5 if precision is Precision.FP32 else 0.01)

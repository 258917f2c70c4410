"""Kinds of rows of the tables of names: exact inverses, and the arithmetic of Diffusers' layers."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import AdaLayerNormContinuous
from diffusers.models.transformers.transformer_flux2 import Flux2SwiGLU
from torch import Tensor, nn
from torch.nn.functional import linear

from dit.models.diffusers.arrangements import (
    ByHead,
    Convolution,
    Features,
    FusedHeads,
    GatesThenValues,
    HeadColumns,
    RotaryPairs,
    SwappedHalves,
)
from dit.models.diffusers.names import Pair, their_tensors
from dit.models.layer_spec import Activation
from dit.models.layers.parallel_linear import ACTIVATIONS
from dit.models.layers.queries_and_keys import rotate
from dit.models.registry import VARIABLE, pairs
from tests.odd_family import PLACE, OddConfig
from tests.odd_names import ROTATED

MODEL = OddConfig(in_channels=3, patch_temporal=2, patch_spatial=2, hidden_size=48, mlp_ratio=2.5)
HEADS, WIDTH = MODEL.num_attention_heads, MODEL.hidden_size // MODEL.num_attention_heads


@pytest.fixture(autouse=True)
def odd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, PLACE)


def drawn(table: list[Pair]) -> dict[tuple[str, int | None], Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {(p.ours, p.layer): torch.randn(p.shape, generator=rng) for p in table}


def test_every_kind_of_row_is_undone_exactly():
    table = pairs(MODEL)
    ours = drawn(table)
    theirs = their_tensors(table, lambda pair: ours[pair.ours, pair.layer])
    for pair in table:
        parts = [theirs[name] for name in pair.theirs]
        assert [tuple(part.shape) for part in parts] == [*pair.their_shapes.values()]
        again = pair.join(parts)
        assert torch.equal(again, ours[pair.ours, pair.layer]), pair.ours
    # Every number of ours is in theirs once.
    assert sum(t.numel() for t in theirs.values()) == sum(t.numel() for t in ours.values())
    every = torch.cat([t.flatten() for t in theirs.values()]).sort().values
    assert torch.equal(every, torch.cat([t.flatten() for t in ours.values()]).sort().values)


def test_rotary_pairs_give_the_products_of_neighbouring_pairs():
    """Queries and keys of Diffusers' interleaved rotation, with biases and a norm across heads."""
    rng = torch.Generator().manual_seed(1)
    wide, tokens = MODEL.hidden_size, 7
    x = torch.randn(tokens, wide, generator=rng)
    theirs = [torch.randn(wide, wide, generator=rng) for _ in range(3)]
    biases = [torch.randn(wide, generator=rng) for _ in range(3)]
    norms = [torch.rand(wide, generator=rng) + 0.5 for _ in range(2)]
    angle = torch.randn(tokens, WIDTH // 2, generator=rng)

    def heads(y: Tensor) -> Tensor:
        return y.unflatten(-1, (HEADS, -1))

    made = [linear(x, w, b) for w, b in zip(theirs, biases, strict=True)]
    q, k = (nn.functional.rms_norm(y, (wide,), w) for y, w in zip(made[:2], norms, strict=True))
    table = [t.repeat_interleave(2, dim=-1) for t in (angle.cos(), angle.sin())]
    q, k = (apply_rotary_emb(heads(y).transpose(0, 1)[None], tuple(table))[0] for y in (q, k))
    wanted = torch.einsum("htd,hsd->hts", q, k)

    joined = ROTATED.join(theirs, MODEL), ROTATED.join(biases, MODEL)
    ours = heads(linear(x, *joined)).unflatten(-1, (3, -1)).unbind(-2)
    assert torch.equal(ours[2], heads(made[2]))  # values are not rotated
    scales = [RotaryPairs().join([w], MODEL) for w in norms]
    normed = [
        heads(nn.functional.rms_norm(y.flatten(1), (wide,), w))
        for y, w in zip(ours[:2], scales, strict=True)
    ]
    cos, sin = (torch.cat([t, t], dim=-1) for t in (angle.cos(), angle.sin()))
    q, k = (rotate(y, cos, sin).transpose(0, 1) for y in normed)
    torch.testing.assert_close(torch.einsum("htd,hsd->hts", q, k), wanted)
    unpermuted = [heads(y) for y in (made[0], made[1])]
    q, k = (rotate(y, cos, sin).transpose(0, 1) for y in unpermuted)
    assert not torch.allclose(torch.einsum("htd,hsd->hts", q, k), wanted, atol=0.1)


def test_a_convolution_over_patches_is_the_matrix():
    rng = torch.Generator().manual_seed(2)
    conv = nn.Conv3d(3, 48, kernel_size=(2, 2, 2), stride=(2, 2, 2), bias=False)
    latent = torch.randn(3, 4, 6, 2, generator=rng)
    matrix = Convolution().join([conv.weight], MODEL)
    tokens = latent.reshape(3, 2, 2, 3, 2, 1, 2).permute(1, 3, 5, 0, 2, 4, 6).flatten(3)
    torch.testing.assert_close(linear(tokens, matrix), conv(latent[None])[0].movedim(0, -1))


@pytest.mark.parametrize("order", ["thwc", "hwtc", "chwt"])
def test_features_of_a_token_are_moved_where_ours_are(order):
    sizes = {"c": 3, "t": 2, "h": 2, "w": 2}
    theirs = torch.arange(24 * 5).view(24, 5)
    ours = Features(order).join([theirs], MODEL)
    split = theirs.view(*(sizes[letter] for letter in order), 5)
    for c, t, h, w in ((0, 1, 0, 1), (2, 0, 1, 1), (1, 1, 1, 0)):
        at = {"c": c, "t": t, "h": h, "w": w}
        row = ((c * 2 + t) * 2 + h) * 2 + w
        assert torch.equal(ours[row], split[tuple(at[letter] for letter in order)])
    columns = Features(order, axis=1).join([theirs.T.contiguous()], MODEL)
    assert torch.equal(columns, ours.T)


def test_scale_and_shift_change_places():
    norm = AdaLayerNormContinuous(16, 12, elementwise_affine=False, eps=1e-6)
    x, level = torch.randn(1, 5, 16), torch.randn(1, 12)
    weight = SwappedHalves().join([norm.linear.weight], MODEL)
    bias = SwappedHalves().join([norm.linear.bias], MODEL)
    shift, scale = linear(nn.functional.silu(level), weight, bias).chunk(2, dim=-1)
    ours = nn.functional.layer_norm(x, (16,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(ours, norm(x, level))


def test_columns_of_attention_and_feed_forward_are_laid_by_head():
    """FLUX's `proj_out` takes both side by side."""
    wide, hidden = MODEL.hidden_size, MODEL.ffn_hidden_size
    attention, mlp, theirs = torch.randn(3, wide), torch.randn(3, hidden), torch.randn(6, 168)
    assert wide + hidden == 168
    ours = HeadColumns().join([theirs], MODEL)
    by_head = [x.unflatten(1, (HEADS, -1)) for x in (attention, mlp)]
    made = linear(torch.cat(by_head, dim=-1).flatten(1), ours)
    torch.testing.assert_close(made, linear(torch.cat([attention, mlp], dim=1), theirs))


def test_a_feed_forward_beside_queries_is_laid_by_head():
    rows = [torch.randn(48, 6) for _ in range(3)] + [torch.randn(120, 6)]
    x = torch.randn(2, 6)
    each = [WIDTH] * 3 + [120 // HEADS]
    made = linear(x, ByHead().join(rows, MODEL)).unflatten(1, (HEADS, -1)).split(each, dim=-1)
    for part, theirs in zip(made, rows, strict=True):
        torch.testing.assert_close(part.flatten(1), linear(x, theirs))


def test_gates_and_values_by_turns_are_the_swiglu_of_halves():
    """Any part of the rows has both of a hidden unit, as tensor ranks need."""
    theirs, x = torch.randn(240, 6), torch.randn(2, 6)
    ours = GatesThenValues().join([theirs], MODEL)
    made = [ACTIVATIONS[Activation.SWIGLU](linear(x, rows)) for rows in ours.chunk(4)]
    torch.testing.assert_close(torch.cat(made, dim=1), Flux2SwiGLU()(linear(x, theirs)))
    assert torch.equal(GatesThenValues().split(ours, MODEL, 1)[0], theirs)


def test_one_matrix_of_a_single_stream_layer_is_laid_by_head():
    """As four of them are, with gates and values by turns."""
    wide = MODEL.hidden_size
    theirs = torch.randn(3 * wide + 240, 6)
    *qkv, rest = theirs.split([wide, wide, wide, 240])
    parts = [*qkv, GatesThenValues().join([rest], MODEL)]
    ours = FusedHeads().join([theirs], MODEL)
    assert torch.equal(ours, ByHead(rotated=(0, 1)).join(parts, MODEL))
    assert torch.equal(FusedHeads().split(ours, MODEL, 1)[0], theirs)


def test_biases_are_laid_by_head_as_their_matrices():
    weights, biases = [torch.randn(48, 6) for _ in range(3)], [torch.randn(48) for _ in range(3)]
    x = torch.randn(2, 6)
    joined = ByHead().join(weights, MODEL), ByHead().join(biases, MODEL)
    q, k, v = linear(x, *joined).unflatten(-1, (HEADS, 3, -1)).unbind(2)
    for made, weight, bias in zip((q, k, v), weights, biases, strict=True):
        torch.testing.assert_close(made.flatten(1), linear(x, weight, bias))

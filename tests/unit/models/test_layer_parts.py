"""Parts that layers choose from, against their definitions."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import nn

from dit.models.dit.family import LowRankModulation
from dit.models.dit.model import LowRankAdaLN
from dit.models.layer_spec import (
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    PerBlockModulation,
    QkNorm,
    SharedModulation,
    TableModulation,
)
from dit.models.layers.modulation import SharedModulations, TimestepConditioning, make_modulation
from dit.models.layers.packed_attention import AttendedRows, CrossAttention
from dit.models.layers.parallel_linear import (
    BuildContext,
    FeedForward,
    GatheredLinear,
    transformer_config,
)
from dit.models.layers.per_sample import PerSample
from dit.models.layers.queries_and_keys import (
    AcrossHeadsNorm,
    CentredNorm,
    HeadNorm,
    RotaryTable,
    hold_key_bias,
)
from tests.packs import tiny_model

MODEL = tiny_model(hidden_size=48, num_attention_heads=4)


@pytest.fixture
def context(groups) -> BuildContext:
    return BuildContext(model=MODEL, config=transformer_config(MODEL), groups=groups)


def _randomise(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module


def test_norm_across_heads_is_one_rmsnorm_over_them_all(groups):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 4, 12, generator=generator, requires_grad=True) for n in (7, 5))
    norm = AcrossHeadsNorm(48, eps=1e-6, dtype=torch.float32, group=groups.tp)
    _randomise(norm)
    found = norm(q, k)
    plain = [nn.RMSNorm(48, eps=1e-6) for _ in range(2)]
    for theirs, ours in zip(plain, norm.parameters(), strict=True):
        theirs.weight.data.copy_(ours)
    wanted = [theirs(x.flatten(1)).view_as(x) for theirs, x in zip(plain, (q, k), strict=True)]
    mine = [q, k, *norm.parameters()]
    other = [q, k, *(theirs.weight for theirs in plain)]
    losses = [sum((x * torch.arange(12.0)).sum() for x in pair) for pair in (found, wanted)]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    gradients = [torch.autograd.grad(losses[0], mine), torch.autograd.grad(losses[1], other)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_weights_of_the_norm_across_heads_have_names_that_nobody_sums(groups):
    norm = AcrossHeadsNorm(48, eps=1e-6, dtype=torch.float32, group=groups.tp)
    for name, weight in norm.named_parameters(prefix="across_heads"):
        assert "q_layernorm" not in name and "k_layernorm" not in name
        assert (weight.tensor_model_parallel, weight.partition_dim) == (True, 0)
        assert not getattr(weight, "sequence_parallel", False)


def test_a_bias_of_keys_that_softmax_does_not_see_is_held():
    """Its gradient is rounding's noise otherwise; those of all other weights stay as they are."""
    x_TD = torch.randn(7, 48, generator=torch.Generator().manual_seed(1))

    def gradients(*, held: bool) -> tuple[torch.Tensor, torch.Tensor]:
        linear = _randomise(nn.Linear(48, 3 * 48))
        if held:
            hold_key_bias(linear.bias, 12)
        q, k, v = linear(x_TD).view(7, 4, 3, 12).transpose(0, 1).unbind(2)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        (out * torch.arange(12.0)).sum().backward()
        return linear.weight.grad, linear.bias.grad.view(4, 3, 12)

    (weight, bias), (free_weight, free_bias) = gradients(held=True), gradients(held=False)
    assert torch.equal(weight, free_weight) and not bias[:, 1].any()
    assert torch.equal(bias[:, ::2], free_bias[:, ::2]) and bias[:, ::2].any()
    assert 0 < free_bias[:, 1].abs().max() < 1e-4 * free_bias.abs().max()


@pytest.mark.parametrize("theta", [256.0, 1e4])
def test_rotary_table_is_diffusers_own_on_every_axis(theta):
    """In float64, to the last bit of float32; pairs are halves of a head, theirs neighbours."""
    widths, position_TA = (
        (4, 8, 2, 6),
        torch.tensor([[1023.0, 3.0, 7.0, -5.0], [0.0, 1.0, 2.5, 9.0]]),
    )
    cos, sin = RotaryTable(widths, (theta,) * 4, dtype=torch.float64)(position_TA)
    assert cos.dtype == sin.dtype == torch.float32
    axes = [
        get_1d_rotary_pos_embed(
            w, position_TA[:, i], theta=theta, use_real=True, freqs_dtype=torch.float64
        )
        for i, w in enumerate(widths)
    ]
    for ours, theirs in zip((cos, sin), zip(*axes, strict=True), strict=True):
        wanted = torch.cat(theirs, dim=1)[:, ::2]
        assert torch.equal(ours[:, :10], wanted) and torch.equal(ours[:, 10:], wanted)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", list(Activation))
def test_feed_forward_of_any_width(context, activation, bias):
    spec = FeedForwardSpec(width=48, hidden=20, activation=activation, bias=bias)
    mlp = _randomise(FeedForward(context, spec))
    x = torch.randn(3, 48)
    wide = x @ mlp.linear_fc1.weight.T + (mlp.linear_fc1.bias if bias else 0)
    wanted = {
        Activation.GELU: lambda: 0.5 * wide * (1 + torch.erf(wide / 2**0.5)),
        Activation.GELU_TANH: lambda: nn.functional.gelu(wide, approximate="tanh"),
        Activation.SILU: lambda: wide * wide.sigmoid(),
        Activation.SWIGLU: lambda: wide[:, ::2] * wide[:, ::2].sigmoid() * wide[:, 1::2],
        Activation.GEGLU: lambda: nn.functional.gelu(wide[:, ::2]) * wide[:, 1::2],
    }[activation]()
    assert wanted.shape[1] == 20
    out = wanted @ mlp.linear_fc2.weight.T + (mlp.linear_fc2.bias if bias else 0)
    torch.testing.assert_close(mlp(x), out, rtol=1e-4, atol=1e-3)


def test_norms_stored_less_one_compute_in_float32(context):
    norm = CentredNorm(6, eps=1e-5, dtype=torch.bfloat16)
    assert not norm.offset.any()  # the weights are 1 at first
    _randomise(norm)
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = x.float()
    scale = 1 + norm.offset.float()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale
    assert norm(x).dtype is torch.bfloat16
    torch.testing.assert_close(norm(x).float(), wanted, rtol=2**-8, atol=1e-6)
    assert torch.equal(norm(None), scale)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (LowRankModulation(5), 1),
        *((spec, parts) for spec in (PerBlockModulation(), TableModulation()) for parts in (1, 2)),
    ],
)
def test_each_modulation_gives_shift_scale_and_gate_of_its_parts(context, spec, parts, gated):
    if isinstance(spec, LowRankModulation):
        module = _randomise(LowRankAdaLN(context, 48, spec, gated=gated))
    else:
        module = _randomise(make_modulation(spec, context, 48, parts=parts, gated=gated))
    rows = parts * (3 if gated else 2)
    timestep = TimestepConditioning(
        t_emb_ND=torch.randn(2, 48), adaln_shift_NX=torch.randn(2, 48 * rows)
    )
    act = nn.functional.silu(timestep.t_emb_ND)
    if isinstance(spec, LowRankModulation):
        wanted = act @ module.linear_1.weight.T @ module.linear_2.weight.T + timestep.adaln_shift_NX
    elif isinstance(spec, PerBlockModulation):
        wanted = act @ module.linear.weight.T + module.linear.bias
    else:
        wanted = module.table.flatten() + timestep.adaln_shift_NX
    found = [
        x for a in module(timestep) for x in (a.shift_ND, a.scale_ND, a.gate_ND) if x is not None
    ]
    assert len(found) == rows
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("bias", "plain"), [(False, ()), (True, ("text",))])
def test_all_layers_of_a_stack_take_the_rows_of_one_linear(context, bias, plain):
    vectors = {"latents": 6, "text": 6, "single": 3}
    module = _randomise(SharedModulations(context, 48, vectors, bias=bias, plain=plain))
    assert sum(p.numel() for p in module.parameters()) == (48 + bias) * 48 * sum(vectors.values())
    t_emb_ND = torch.randn(2, 48, requires_grad=True)
    timestep = TimestepConditioning(t_emb_ND=module(t_emb_ND))
    place = {"latents": 0, "text": 6, "single": 12}
    for layer in (0, 3):
        made = {
            name: make_modulation(
                SharedModulation(first), context, 48, parts=vectors[name] // 3, layer=layer
            )
            for name, first in place.items()
        }
        for name, one in made.items():
            assert not [*one.parameters()] and place[name] == one.first
            rows = [x for a in one(timestep) for x in (a.shift_ND, a.scale_ND, a.gate_ND)]
            linear = module.get_submodule(name)
            read = t_emb_ND if name in plain else nn.functional.silu(t_emb_ND)
            wanted = nn.functional.linear(read, linear.weight, linear.bias if bias else None)
            torch.testing.assert_close(torch.cat(rows, dim=1), wanted, rtol=1e-4, atol=1e-4)


def test_float32_rows_keep_the_sum_of_bfloat16_tokens_in_float32():
    """Wan: one rounding, at the end."""
    generator = torch.Generator().manual_seed(0)
    h, x = torch.randn(2, 6, 8, generator=generator).bfloat16()
    gate, shift = torch.randn(2, 2, 8, generator=generator)
    per_sample = PerSample.of(torch.tensor([0, 0, 0, 1, 1, 1]))
    added = per_sample.add(h, x, gate_ND=gate)
    row = per_sample.level_row_T
    assert torch.equal(added, (h.float() + x.float() * gate[row]).bfloat16())
    modulated = per_sample.modulate(h, scale_ND=1 + gate, shift_ND=shift)
    norm = nn.functional.layer_norm(h.float(), (8,), eps=1e-6)
    assert torch.equal(modulated, torch.addcmul(shift[row], norm, 1 + gate[row]).bfloat16())


@pytest.mark.parametrize("looked_up", [False, True])
def test_a_sample_with_clean_tokens_has_two_level_rows(looked_up):
    level_row_T = torch.tensor([2, 2, 0, 0, 0, 1, 3, 1])  # rows 2 and 3 are told to clean tokens
    per_sample = PerSample.of(level_row_T)
    per_sample = PerSample(level_row_T, None) if looked_up else per_sample
    rows = torch.arange(4.0)[:, None].expand(4, 3).clone().requires_grad_()
    out = per_sample.add(torch.zeros(8, 3), torch.ones(8, 3), gate_ND=rows)
    assert out[:, 0].tolist() == level_row_T.tolist()
    out.sum().backward()
    assert rows.grad is not None and rows.grad[:, 0].tolist() == [3, 2, 2, 1]


def test_cross_attention_of_a_sample_without_text_gives_zeros(context):
    from dit.models.attention.spans import Spans

    spec = AttentionSpec(width=48, heads=4, norm=QkNorm.NONE)
    attention = _randomise(CrossAttention(context, spec, text_width=10))
    spans = Spans.of([(0, 3), (3, 2)], [(0, 4), (4, 0)], total=5, device=torch.device("cpu"))
    text = AttendedRows(rows_LE=torch.randn(4, 10), spans=spans)
    out = attention(torch.randn(5, 48), text)
    assert out[:3].abs().min() > 0 and not out[3:].any()


def test_gathered_linear_on_one_rank_is_a_linear(context):
    linear = GatheredLinear(48, 30, config=context.config, groups=context.groups, bias=True)
    _randomise(linear)
    x = torch.randn(4, 48)
    torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.weight, linear.bias))
    assert linear.weight.tensor_model_parallel and linear.bias.tensor_model_parallel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_its_gradients_are_those_of_torch(dtype):
    mine, plain = HeadNorm(24, dtype=dtype), nn.RMSNorm(24, eps=1e-5, dtype=dtype)
    random = torch.Generator().manual_seed(0)
    for module in (mine, plain):
        nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    # A part of a wider tensor, as queries are; the last token is nearly zero.
    x_THX = torch.randn(50, 3, 72, generator=random)
    x_THX[-1] *= 1e-3
    x_THX = x_THX.to(dtype).requires_grad_()
    weight_THK = torch.randn(50, 3, 24, generator=random).to(dtype)
    found = []
    for module in (mine, plain):
        y_THK = module(x_THX[..., 24:48])
        gradients = torch.autograd.grad((y_THK * weight_THK).sum(), (x_THX, module.weight))
        found.append((y_THK, *gradients))
    tolerance = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for got, want in zip(*found, strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got, want, **tolerance)


OWNERS = {
    "equal": [0] * 4 + [1] * 4 + [2] * 4,
    "mixed": [0] * 2 + [1] * 2 + [2] * 5 + [3] * 1 + [4] * 1 + [5] * 3,
    "a part of a pack, with one more row at its end": [2] * 3 + [4] * 3 + [5] * 4,
}


@pytest.mark.parametrize("looked_up", [False, True], ids=["rectangles", "rows"])
@pytest.mark.parametrize("segment", OWNERS.values(), ids=OWNERS)
def test_rows_are_those_of_the_own_sample(segment, looked_up):
    segment_T = torch.tensor(segment)
    per_sample = PerSample.of(segment_T)
    assert per_sample.runs is not None
    per_sample = PerSample(segment_T, None) if looked_up else per_sample
    random = torch.Generator().manual_seed(0)

    def wave(rows):
        x = torch.randn(rows, 5, generator=random, dtype=torch.float64)
        return x.requires_grad_()

    x_TD, h_TD, a_ND, b_ND = wave(len(segment)), wave(len(segment)), wave(6), wave(6)
    found = (
        per_sample.modulate(x_TD, scale_ND=a_ND, shift_ND=b_ND),
        per_sample.add(h_TD, x_TD, gate_ND=a_ND),
    )
    norm_TD = (x_TD - x_TD.mean(-1, keepdim=True)) / (
        x_TD.var(-1, correction=0, keepdim=True) + 1e-6
    ).sqrt()
    expected = (norm_TD * a_ND[segment_T] + b_ND[segment_T], h_TD + a_ND[segment_T] * x_TD)
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain)
        weight = torch.randn(mine.shape, generator=random, dtype=torch.float64)
        inputs = (x_TD, h_TD, a_ND, b_ND)
        for got, want in zip(
            torch.autograd.grad((mine * weight).sum(), inputs, allow_unused=True),
            torch.autograd.grad((plain * weight).sum(), inputs, allow_unused=True),
            strict=True,
        ):
            torch.testing.assert_close(got, want)


def test_neighbours_of_equal_length_are_one_rectangle():
    (run,) = PerSample.of(torch.tensor(OWNERS["equal"])).runs or ()
    assert (run.sample, run.count, run.row, run.length) == (0, 3, 0, 4)
    assert len(PerSample.of(torch.tensor(OWNERS["mixed"])).runs or ()) == 4

"""The sequential layer against its definition, and what networks of it do with rows and places."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, rms_norm, scaled_dot_product_attention, silu

from dit.models.attention.spans import Spans
from dit.models.layer_spec import (
    JOINT_TOKENS,
    TEXT_TOKENS,
    TOKENS,
    PerBlockModulation,
    RowKind,
    SequentialLayerSpec,
    SharedModulation,
    TableModulation,
)
from dit.models.layers.context_parallel import TokenExchange
from dit.models.layers.modulation import TimestepConditioning
from dit.models.layers.packed_attention import RowConditions
from dit.models.layers.parallel_linear import transformer_config
from dit.models.layers.per_sample import PerSample
from dit.models.lumina2.family import Lumina2Config, lumina2_stacks
from dit.models.lumina2.model import Lumina2Network
from dit.models.registry import family_named
from dit.models.stacks.sequential_layer import LAYERS
from dit.train.model_and_optimizer import randomise
from tests.packs import random_pack

FAMILY = family_named("lumina2")
MODEL: Any = Lumina2Config(**{**FAMILY.tiny["lumina2"], "name": "custom", "num_layers": 2})
SPEC: Any = lumina2_stacks(MODEL)[-1].layer
LENGTHS = (6, 4)
_ROWS = (TOKENS, TEXT_TOKENS, JOINT_TOKENS)
_TOLD = PerBlockModulation(inputs=6)


def _weight(norm: Any) -> Tensor:
    return norm.weight if hasattr(norm, "weight") else 1 + norm.offset


def modulation(layer: Any, spec: Any, t_emb_NX: Tensor) -> Tensor:
    """Shifts, scales and gates of the layer side by side; perhaps those of others behind them."""
    if isinstance(spec.modulation, TableModulation):
        return t_emb_NX[:, : 6 * spec.attention.width] + layer.modulation.table.flatten()
    if isinstance(spec.modulation, SharedModulation):
        return t_emb_NX[:, spec.modulation.first * spec.attention.width :]
    x_NX = silu(t_emb_NX) if spec.modulation.activated else t_emb_NX
    return linear(x_NX, layer.modulation.linear.weight, layer.modulation.linear.bias)


def reference(layer: Any, spec: SequentialLayerSpec, h_TD: Tensor, t_emb_NX: Tensor) -> Tensor:
    """One sample, by the formulas of `SequentialLayerSpec`."""
    heads, keys, width = spec.attention.heads, spec.attention.key_heads, spec.attention.head_width

    def normed(x: Tensor, norm: Any) -> Tensor:
        if isinstance(norm, torch.nn.Identity):
            return x
        return rms_norm(x, x.shape[-1:], _weight(norm), spec.eps)

    def attention(x: Tensor) -> Tensor:
        made = layer.attention.linear_qkv(x).unflatten(-1, (keys, -1, width))
        readers = heads // keys
        q, k, v = made[:, :, :readers].flatten(1, 2), made[:, :, readers], made[:, :, readers + 1]
        gate = made[:, :, readers + 2 :].flatten(1)
        q, k = (
            rms_norm(one, (width,), _weight(norm), spec.attention.eps)
            for one, norm in ((q, layer.attention.q_layernorm), (k, layer.attention.k_layernorm))
        )
        # Head h of queries reads head h // n of keys.
        k, v = (one[:, torch.arange(heads) // (heads // keys)] for one in (k, v))
        q, k, v = (one.transpose(0, 1) for one in (q, k, v))
        together = torch.arange(len(x)) // (spec.attention.states or len(x))
        seen = together[:, None] == together
        made = scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1).flatten(1)
        made = made * gate.sigmoid() if spec.attention.output_gate else made
        return layer.attention.linear_proj(made)

    made = None
    if spec.modulation is not None:
        made_NX = modulation(layer, spec, t_emb_NX)
        vectors = (2 + spec.shifted) * (1 if spec.parallel else 2)
        made = made_NX.split(spec.attention.width, dim=-1)[:vectors]
    if spec.parallel:
        assert made is not None
        shift, scale, gate = made
        x_TD = layer_norm(h_TD, h_TD.shape[-1:], eps=1e-6) * (1 + scale) + shift
        return h_TD + gate * (attention(x_TD) + layer.mlp(x_TD))
    parts = ((attention, layer.norm_1, layer.after_1), (layer.mlp, layer.norm_2, layer.after_2))
    for at, (part, before, after) in enumerate(parts):
        x_TD, gate = normed(h_TD, before), torch.ones(())
        if made is not None:
            *shift, scale, gate = made[len(made) // 2 * at :][: len(made) // 2]
            x_TD = x_TD * (1 + scale) + (shift[0] if shift else 0)
            gate = gate.tanh() if spec.tanh else gate
        h_TD = h_TD + gate * normed(part(x_TD), after)
    return h_TD


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"after": False, "tanh": False},
        {"shifted": True, "rows": RowKind.LATENTS},
        {"modulation": PerBlockModulation(inputs=6, activated=False)},
        {"modulation": None, "rows": RowKind.TEXT},
        {"modulation": SharedModulation(1), "shifted": True, "after": False, "tanh": False},
        {"modulation": TableModulation(), "shifted": True, "centred": True, "tanh": False},
        {"attention": replace(SPEC.attention, output_gate=True, centred=True)},
        {"attention": replace(SPEC.attention, output_gate=True, groups=None)},
        {
            **{"modulation": None, "rows": RowKind.TEXT, "after": False},
            "attention": replace(SPEC.attention, output_gate=True, states=2),
        },
        {"attention": replace(SPEC.attention, groups=None)},
        {"parallel": True, "weighted": False, "after": False, "shifted": True, "tanh": False},
    ],
)
def test_layers_compute_what_their_spec_says(groups, changes) -> None:
    spec: Any = replace(SPEC, **{"modulation": _TOLD, **changes})
    config = transformer_config(MODEL)
    at: dict[str, Any] = {"model": MODEL, "layer_number": 1, "pg_collection": groups}
    layer = LAYERS[spec.rows](config, spec=spec, **at)
    randomise(layer, seed=3)
    rng, tokens = torch.Generator().manual_seed(1), sum(LENGTHS)
    h_TD = torch.randn(tokens, 96, generator=rng)
    rows_of_all = isinstance(spec.modulation, SharedModulation | TableModulation)
    t_emb_NX = torch.randn(2, 8 * 96 if rows_of_all else 6, generator=rng)
    segment_T = torch.arange(2).repeat_interleave(torch.tensor(LENGTHS))
    row = RowConditions(per_sample=PerSample.of(segment_T), angles_TK=None)
    rows = [(0, LENGTHS[0]), LENGTHS]
    exchange = TokenExchange(spans=Spans.of(rows, rows, total=tokens, device=h_TD.device))
    conditions: Any = SimpleNamespace(
        timestep=TimestepConditioning(t_emb_ND=t_emb_NX, adaln_shift_NX=t_emb_NX[:, : 6 * 96]),
        rows=dict.fromkeys(_ROWS, row),
        meetings={(name,): exchange for name in _ROWS},
        is_reference_T=None,
    )
    found = layer(h_TD, conditions).split(LENGTHS)
    for n, part in enumerate(h_TD.split(LENGTHS)):
        wanted = reference(layer, spec, part, t_emb_NX[n : n + 1])
        torch.testing.assert_close(found[n], wanted, rtol=1e-5, atol=1e-5)


def test_pictures_stand_behind_the_text_of_this_pass(groups) -> None:
    """Of a dropped caption they stand behind what is in its place."""
    network = Lumina2Network(MODEL, groups)
    for texts in ([4, 9], [4, 1]):
        batch = random_pack([(1, 2, 3), (1, 1, 2)], texts, model=MODEL)
        found = network.prepared(batch).position_TA[batch.is_real_T]
        assert found[:, 0].tolist() == [texts[0]] * 6 + [texts[1]] * 2
        assert torch.equal(found[:, 1:], batch.position_TA[batch.is_real_T][:, 1:])
        places = network.text_positions(batch)
        assert places[:, 0].tolist() == [*range(texts[0]), *range(texts[1])]
        assert not places[:, 1:].any()


def test_weights_of_a_text_that_is_not_there_have_a_gradient_of_zeros(groups) -> None:
    network = Lumina2Network(MODEL, groups)
    randomise(network, seed=4)
    batch = random_pack([(1, 2, 3), (1, 1, 2)], [0, 0], model=MODEL)
    network(batch.latent_TC, torch.tensor([300.0, 20.0]), batch).square().sum().backward()
    for name, weight in network.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()) == (not name.startswith(("text_", "context"))), name

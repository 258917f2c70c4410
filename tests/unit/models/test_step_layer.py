"""Layers of steps against their definition, and what networks of them do with rows and places."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, rms_norm, scaled_dot_product_attention, silu

from dit.models.attention.spans import Spans
from dit.models.flux3.family import AttendBesideFeed
from dit.models.joint.family import double_layer, sequential_layer
from dit.models.krea2.family import AttendGated
from dit.models.layer_spec import (
    JOINT_TOKENS,
    TEXT_TOKENS,
    TOKENS,
    Attend,
    Feed,
    LayerSpec,
    Modulation,
    NormKind,
    PerBlockModulation,
    Port,
    RowNorm,
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
from dit.models.stacks.step_layer import StepLayer
from dit.train.model_and_optimizer import randomise
from tests.packs import random_pack

FAMILY = family_named("lumina2")
MODEL: Any = Lumina2Config(**{**FAMILY.tiny["lumina2"], "name": "custom", "num_layers": 2})
_ATTEND, _FEED = lumina2_stacks(MODEL)[-1].layer.parts
ATTENTION: Any = _ATTEND.attention  # type: ignore[attr-defined]
MLP: Any = _FEED.feed_forward  # type: ignore[attr-defined]
LENGTHS, WIDTH = (6, 4), 96
_TOLD = Modulation("modulation", PerBlockModulation(inputs=6), shifted=False, tanh=True)
_ROWS = (TOKENS, TEXT_TOKENS, JOINT_TOKENS)
_RMS, _CENTRED = RowNorm("norm", eps=1e-5), RowNorm("norm", NormKind.CENTRED, 1e-5)


def _weight(norm: Any) -> Tensor:
    return norm.weight if hasattr(norm, "weight") else 1 + norm.offset


def slot(layer: Any, port: Port, t_emb_NX: Tensor) -> tuple[Any, Any, Any]:
    """Shift, scale and gate of a port."""
    assert port.slot is not None
    modulation, module = port.slot.modulation, getattr(layer, port.slot.modulation.name)
    kind = modulation.kind
    if isinstance(kind, TableModulation):
        rows_NX = t_emb_NX[:, : 6 * WIDTH] + module.table.flatten()
    elif isinstance(kind, SharedModulation):
        rows_NX = t_emb_NX[:, kind.first * WIDTH :]
    else:
        assert isinstance(kind, PerBlockModulation)
        x_NX = silu(t_emb_NX) if kind.activated else t_emb_NX
        rows_NX = linear(x_NX, module.linear.weight, module.linear.bias)
    each = 2 + modulation.shifted
    *shift, scale, gate = rows_NX.split(WIDTH, dim=-1)[each * port.slot.number :][:each]
    return shift[0] if shift else 0, scale, gate.tanh() if modulation.tanh else gate


def attended(module: Any, part: Any, x: Tensor) -> Tensor:
    """Attention of the tokens of one sample to each other."""
    spec, gated = part.attention, isinstance(part, AttendGated)
    heads, keys, width = spec.heads, spec.key_heads, spec.head_width
    made = module.linear_qkv(x).unflatten(-1, (keys, -1, width))
    readers = heads // keys
    q, k, v = made[:, :, :readers].flatten(1, 2), made[:, :, readers], made[:, :, readers + 1]
    gate = made[:, :, readers + 2 :].flatten(1)
    q, k = (
        rms_norm(one, (width,), _weight(norm), spec.eps)
        for one, norm in ((q, module.q_layernorm), (k, module.k_layernorm))
    )
    # Head h of queries reads head h // n of keys.
    k, v = (one[:, torch.arange(heads) // readers] for one in (k, v))
    q, k, v = (one.transpose(0, 1) for one in (q, k, v))
    together = torch.arange(len(x)) // ((gated and part.states) or len(x))
    seen = together[:, None] == together
    made = scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1).flatten(1)
    return module.linear_proj(made * gate.sigmoid() if gated else made)


def reference(layer: Any, spec: LayerSpec, h_TD: Tensor, t_emb_NX: Tensor) -> Tensor:
    """One sample in one row, by the formula of `Port`."""
    for part in spec.parts:
        port, of_part = part.port, SimpleNamespace(shift=0, scale=0, gate=1)
        if port.slot is not None:
            of_part.shift, of_part.scale, of_part.gate = slot(layer, port, t_emb_NX)
        if port.norm is not None:
            norm = getattr(layer, port.norm.name)
            x_TD = rms_norm(h_TD, (WIDTH,), _weight(norm), port.norm.eps)
        else:
            x_TD = layer_norm(h_TD, (WIDTH,), eps=1e-6) if port.slot else h_TD
        x_TD = x_TD * (1 + of_part.scale) + of_part.shift
        if isinstance(part, AttendBesideFeed):
            x_TD = attended(layer.attention, part, x_TD) + layer.mlp(x_TD)
        elif isinstance(part, Attend):
            x_TD = attended(getattr(layer, port.module), part, x_TD)
        else:
            x_TD = getattr(layer, port.module)(x_TD)
        if port.after is not None:
            norm = getattr(layer, port.after.name)
            x_TD = rms_norm(x_TD, (WIDTH,), _weight(norm), port.after.eps)
        h_TD = h_TD + of_part.gate * x_TD
    return h_TD


def sequential(modulation: Modulation | None = _TOLD, *row: str, **changes: Any) -> LayerSpec:
    """A layer of one row; `changes` are those of its attention, and of `sequential_layer`."""
    made = {"norm": _RMS, "after": True} | {
        name: changes.pop(name) for name in ("norm", "after", "attend") if name in changes
    }
    return sequential_layer(replace(ATTENTION, **changes), MLP, modulation, *row, **made)


def told(kind: Any, **changes: Any) -> Modulation:
    return Modulation("modulation", kind, **changes)


def unweighted() -> LayerSpec:
    """Norms without weights, in the kernels of the modulation."""
    m = told(PerBlockModulation(inputs=6))
    attend = Attend(Port(TOKENS, "attention", m[0]), ATTENTION)
    return LayerSpec((attend, Feed(Port(TOKENS, "mlp", m[1]), MLP)))


def parallel() -> LayerSpec:
    port = Port(JOINT_TOKENS, slot=told(PerBlockModulation(inputs=6))[0])
    return LayerSpec((AttendBesideFeed(port, ATTENTION, MLP),))


SPECS = {
    "sandwich": sequential(),
    "norms before alone": sequential(
        told(PerBlockModulation(inputs=6), shifted=False), after=False
    ),
    "shifts": sequential(told(PerBlockModulation(inputs=6), tanh=True), TOKENS),
    "level as it is": sequential(
        told(PerBlockModulation(inputs=6, activated=False), shifted=False, tanh=True)
    ),
    "no modulation": sequential(None, TEXT_TOKENS),
    "shared rows": sequential(told(SharedModulation(1)), after=False),
    "table": sequential(told(TableModulation()), norm=_CENTRED),
    "gate of the output": sequential(attend=AttendGated),
    "a key for each query": sequential(attend=AttendGated, groups=None),
    "states": sequential(None, TEXT_TOKENS, after=False, attend=partial(AttendGated, states=2)),
    "no groups": sequential(groups=None),
    "no weights": unweighted(),
    "parallel": parallel(),
}


@pytest.mark.parametrize("name", SPECS)
def test_layers_compute_what_their_spec_says(groups, name) -> None:
    spec = SPECS[name]
    layer = _built(spec, groups)
    rng, tokens = torch.Generator().manual_seed(1), sum(LENGTHS)
    h_TD = torch.randn(tokens, WIDTH, generator=rng)
    kinds = [modulation.kind for modulation in spec.modulations]
    rows_of_all = any(isinstance(one, SharedModulation | TableModulation) for one in kinds)
    t_emb_NX = torch.randn(2, 8 * WIDTH if rows_of_all else 6, generator=rng)
    found = layer(h_TD, _conditions(t_emb_NX)).split(LENGTHS)
    for n, part in enumerate(h_TD.split(LENGTHS)):
        wanted = reference(layer, spec, part, t_emb_NX[n : n + 1])
        torch.testing.assert_close(found[n], wanted, rtol=1e-5, atol=1e-5)


def _built(spec: LayerSpec, groups: Any, **more: Any) -> StepLayer:
    config = transformer_config(MODEL)
    at: dict[str, Any] = {"model": MODEL, "layer_number": config.num_layers}
    layer = StepLayer(config, spec=spec, pg_collection=groups, **at, **more)
    randomise(layer, seed=3)
    return layer


def _exchange(lengths: tuple[int, ...]) -> TokenExchange:
    rows = [(sum(lengths[:n]), length) for n, length in enumerate(lengths)]
    device = torch.device("cpu")
    return TokenExchange(spans=Spans.of(rows, rows, total=sum(lengths), device=device))


def _conditions(t_emb_NX: Tensor, lengths: tuple[int, ...] = LENGTHS) -> Any:
    segment_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    row = RowConditions(per_sample=PerSample.of(segment_T), angles_TK=None)
    return SimpleNamespace(
        perturbation=None,
        timestep=TimestepConditioning(t_emb_ND=t_emb_NX, adaln_shift_NX=t_emb_NX[:, : 6 * WIDTH]),
        rows=dict.fromkeys(_ROWS, row),
        meetings=dict.fromkeys([(name,) for name in _ROWS], _exchange(lengths)),
        is_reference_T=None,
    )


def test_what_nothing_reads_follows_from_the_steps() -> None:
    """Of text behind the last layer: its output of attention, and its feed-forward."""
    spec = double_layer(ATTENTION, MLP)
    assert not spec.idle(())
    assert {port.module for port in spec.idle((TEXT_TOKENS,))} == {"text_attention", "text_mlp"}
    # What latents attend to once more is read.
    (attend, *feeds) = spec.steps
    again = LayerSpec((attend, *feeds, attend))
    assert [port.module for port in again.idle((TEXT_TOKENS,))] == ["text_attention"]


def test_idle_weights_have_gradients_of_zeros(groups) -> None:
    """Where nothing reads the text it stays as it is, and latents are the same."""
    spec = double_layer(replace(ATTENTION, groups=None), MLP)
    generator = torch.Generator().manual_seed(1)
    h_TD, text_LD = torch.randn(2, 10, WIDTH, generator=generator)
    t_emb_1D, found = torch.randn(1, WIDTH, generator=generator), []
    for unread in ((), (TEXT_TOKENS,)):
        layer = _built(spec, groups, unread=unread)
        conditions = _conditions(t_emb_1D, (10,))
        conditions.meetings = {(TOKENS, TEXT_TOKENS): _exchange((20,))}
        latents_TD, made_LD = layer((h_TD, text_LD), conditions)
        latents_TD.square().sum().backward()
        weights = dict(layer.named_parameters())
        zero = {name for name, weight in weights.items() if weight.grad is None}
        assert torch.equal(made_LD, text_LD) == bool(unread)
        assert bool(zero) != bool(unread)
        found.append(latents_TD)
        if unread:
            assert layer.unused == (
                *("text_attention.linear_proj.*", "text_attention.q_layernorm.*", "text_mlp.*"),
            )
            idle = [weights[name] for name in weights if name.startswith("text_mlp.")]
            assert idle and not any(weight.grad.any() for weight in idle)
    assert torch.equal(*found)


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

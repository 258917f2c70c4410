"""Double-stream and single-stream layers against the published blocks of Diffusers."""

# T latent tokens, L text tokens, H heads, K head width, D model width

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import (
    FluxPosEmbed,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from torch import Tensor, nn

from dit.models.layer_spec import (
    Activation,
    AttentionSpec,
    DoubleLayerSpec,
    FeedForwardSpec,
    SingleLayerSpec,
    StackSpec,
)
from dit.models.layers.parallel_linear import transformer_config
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.stacks.joint_transformer import JointTransformer
from tests.packs import random_pack, tiny_model

WIDTH, HEADS, HEAD = 64, 4, 16
AXES = (4, 4, 8)
GRIDS, TEXTS = [(1, 3, 5), (1, 4, 4), (2, 2, 3)], [5, 1, 7]
MODEL = tiny_model(num_layers=1, hidden_size=WIDTH, num_attention_heads=HEADS)
ATTENTION = AttentionSpec(width=WIDTH, heads=HEADS, bias=True)
FEED_FORWARD = FeedForwardSpec(
    width=WIDTH, hidden=4 * WIDTH, activation=Activation.GELU_TANH, bias=True
)


class _OneLayer(JointTransformer):
    """One layer, and text with positions of its own."""

    def text_positions(self, batch):
        row = torch.arange(batch.text_starts[-1], dtype=torch.float32)
        return torch.stack([row, 2 * row, 3 + row], dim=1)


def _halves(rows: Tensor) -> Tensor:
    """Rows of a head, whose neighbours are turned together, as halves that are."""
    heads = rows.unflatten(0, (-1, HEAD))
    return torch.cat((heads[:, 0::2], heads[:, 1::2]), dim=1).flatten(0, 1)


def _by_head(*parts: Tensor) -> Tensor:
    """Rows of several matrices, ordered head by head."""
    return torch.cat([part.unflatten(0, (HEADS, -1)) for part in parts], dim=1).flatten(0, 1)


def _attention(theirs: Any, q: str, k: str, v: str, norms: tuple[str, str]) -> dict[str, Tensor]:
    """Queries, keys and values as one matrix, and the norms."""
    made = {}
    for kind in ("weight", "bias"):
        queries, keys, values = (getattr(getattr(theirs, name), kind) for name in (q, k, v))
        made[f"linear_qkv.{kind}"] = _by_head(_halves(queries), _halves(keys), values)
    for ours, name in zip(("q_layernorm", "k_layernorm"), norms, strict=True):
        made[f"{ours}.weight"] = _halves(getattr(theirs, name).weight)
    return made


def _linear(name: str, theirs: nn.Linear) -> dict[str, Tensor]:
    return {f"{name}.weight": theirs.weight, f"{name}.bias": theirs.bias}


def _feed_forward(name: str, theirs: Any) -> dict[str, Tensor]:
    first, last = theirs.net[0].proj, theirs.net[2]
    return _linear(f"{name}.linear_fc1", first) | _linear(f"{name}.linear_fc2", last)


def _double(theirs: Any, modulations: tuple[nn.Linear, nn.Linear], mlps: tuple[str, str]) -> dict:
    a = theirs.attn
    image = _attention(a, "to_q", "to_k", "to_v", ("norm_q", "norm_k"))
    added = ("add_q_proj", "add_k_proj", "add_v_proj")
    text = _attention(a, *added, ("norm_added_q", "norm_added_k"))
    made = {f"attention.{name}": value for name, value in image.items()}
    made |= {f"text_attention.{name}": value for name, value in text.items()}
    made |= _linear("attention.linear_proj", a.to_out[0])
    made |= _linear("text_attention.linear_proj", a.to_add_out)
    made |= _linear("modulation.linear", modulations[0])
    made |= _linear("text_modulation.linear", modulations[1])
    made |= _feed_forward("mlp", getattr(theirs, mlps[0]))
    return made | _feed_forward("text_mlp", getattr(theirs, mlps[1]))


def _single(theirs: FluxSingleTransformerBlock) -> dict[str, Tensor]:
    a = theirs.attn
    made = _attention(a, "to_q", "to_k", "to_v", ("norm_q", "norm_k"))
    made = {name: value for name, value in made.items() if "layernorm" in name}
    made = {f"attention.{name}": value for name, value in made.items()}
    for kind in ("weight", "bias"):
        q, k, v, mlp = (getattr(x, kind) for x in (a.to_q, a.to_k, a.to_v, theirs.proj_mlp))
        made[f"linear_in.{kind}"] = _by_head(_halves(q), _halves(k), v, mlp)
    columns = theirs.proj_out.weight.split([WIDTH, 4 * WIDTH], dim=1)
    made["linear_out.weight"] = _by_head(*(part.T for part in columns)).T
    made["linear_out.bias"] = theirs.proj_out.bias
    return made | _linear("modulation.linear", theirs.norm.linear)


Angles = Callable[[Tensor], Any]


def _flux_angles(position_LA: Tensor) -> Any:
    return FluxPosEmbed(theta=10_000, axes_dim=list(AXES))(position_LA)


def _complex_angles(position_LA: Tensor) -> Tensor:
    cos, sin = RotaryTable(AXES, (1e4,) * 3)(position_LA)
    return torch.complex(cos, sin)[:, : HEAD // 2]


def _random(theirs: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    for p in theirs.parameters():
        scale = 0.2 if p.dim() == 1 else p.shape[1] ** -0.5
        nn.init.normal_(p, mean=float(p.dim() == 1), std=scale, generator=generator)


def _network(groups, spec: DoubleLayerSpec | SingleLayerSpec, weights: dict) -> _OneLayer:
    stack = StackSpec(name="blocks", count=1, layer=spec)
    network = _OneLayer(transformer_config(MODEL), MODEL, groups, None, [stack])
    network.build_stacks()
    layer = network.stacks["blocks"].layers[0]
    assert {n for n, _ in layer.named_parameters()} == weights.keys()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            assert parameter.shape == weights[name].shape, name
            parameter.copy_(weights[name])
    return network.eval()


class _Pack:
    """A pack, random hidden states for it, and each sample alone."""

    def __init__(self, texts: list[int]):
        generator = torch.Generator().manual_seed(1)
        self.batch = random_pack(GRIDS, texts, model=MODEL)
        self.hidden_TD = torch.randn(len(self.batch.segment_T), WIDTH, generator=generator)
        self.text_LD = torch.randn(max(sum(texts), 1), WIDTH, generator=generator)
        self.t_emb_ND = torch.randn(len(GRIDS), WIDTH, generator=generator)

    def samples(self, network: _OneLayer):
        b, positions = self.batch, network.text_positions(self.batch)
        for i, tokens in enumerate(b.num_tokens):
            image = slice(b.starts[i], b.starts[i] + tokens)
            text = slice(b.text_starts[i], b.text_starts[i + 1])
            yield i, image, text, b.position_TA[image], positions[text]

    def run(self, network: _OneLayer, *, joined: bool) -> tuple[Tensor, Tensor]:
        """The hidden states of both rows after the layer."""
        layout = network.layout(self.batch)
        network.rotary = RotaryTable(AXES, (1e4,) * 3, dtype=torch.float64)
        conditions = network.conditions({"t_emb": self.t_emb_ND}, self.batch, layout)
        hidden = {"hidden": self.hidden_TD, "text_hidden": self.text_LD}
        if joined:
            hidden = network.joined(hidden, conditions)
        out = network.run_stacks(hidden, conditions)
        if joined:
            one, other = layout.order.split(out["joint"])
            return one, other
        return out["hidden"], out["text_hidden"]


def _flux_double(block, x, y, temb, image_positions, text_positions):
    angles = _flux_angles(torch.cat((text_positions, image_positions)))
    text, image = block(x, y, temb, image_rotary_emb=angles)
    return image[0], text[0]


def _qwen(block, x, y, temb, image_positions, text_positions):
    angles = _complex_angles(image_positions), _complex_angles(text_positions)
    text, image = block(x, y, None, temb, image_rotary_emb=angles)
    return image[0], text[0]


SOME, NONE = [0, 6, 0], [0, 0, 0]  # Qwen's block of Diffusers takes no empty text


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        *(("flux", texts) for texts in (TEXTS, SOME, NONE)),
        *(("flux_single", texts) for texts in (TEXTS, SOME, NONE)),
        ("qwen", TEXTS),
    ],
)
@torch.no_grad()
def test_a_packed_layer_is_the_published_block_of_each_sample(groups, name, texts):
    if name == "qwen":
        theirs: Any = QwenImageTransformerBlock(WIDTH, HEADS, HEAD)
        run = _qwen
    elif name == "flux":
        theirs, run = FluxTransformerBlock(WIDTH, HEADS, HEAD), _flux_double
    else:
        theirs, run = FluxSingleTransformerBlock(WIDTH, HEADS, HEAD), _flux_double
    _random(theirs)
    double = DoubleLayerSpec(attention=ATTENTION, feed_forward=FEED_FORWARD)
    if name == "qwen":
        weights = _double(theirs, (theirs.img_mod[1], theirs.txt_mod[1]), ("img_mlp", "txt_mlp"))
    elif name == "flux":
        norms = (theirs.norm1.linear, theirs.norm1_context.linear)
        weights = _double(theirs, norms, ("ff", "ff_context"))
    else:
        weights = _single(theirs)
    single = SingleLayerSpec(attention=ATTENTION, feed_forward=FEED_FORWARD)
    network = _network(groups, single if name == "flux_single" else double, weights)
    pack = _Pack(texts)
    hidden_TD, text_LD = pack.run(network, joined=name == "flux_single")
    for i, image, text, image_positions, text_positions in pack.samples(network):
        x, y = pack.hidden_TD[None, image], pack.text_LD[None, text]
        temb = pack.t_emb_ND[i : i + 1]
        wanted, wanted_text = run(theirs, x, y, temb, image_positions, text_positions)
        torch.testing.assert_close(hidden_TD[image], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(text_LD[text], wanted_text, rtol=1e-5, atol=1e-5)

"""SD3 in Diffusers: names of tensors, config.json, pipeline, and how its network is run.

Its class is `SD3Transformer2DModel`.
"""

# D model width, F width of the MLP, E text width, K head width, C numbers in a token
# G rows of the table of positions, V numbers of the modulation of latents in the last layer

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import ConfigDict, PositiveInt
from torch import Tensor, nn

from dit.batch import LatentSample
from dit.config import RunConfig, TextPadding
from dit.models.diffusers_form import DiffusersForm
from dit.models.diffusers_names import (
    Convolution,
    Features,
    LeadingOne,
    NameTable,
    Row,
    StrictKeys,
    SwappedHalves,
    TensorSplit,
    linear_rows,
)
from dit.models.joint.tensor_names import (
    LATENTS,
    TEXT,
    attention_rows,
    condition_rows,
    feed_forward_rows,
    head_rows,
    modulation_rows,
    stream_sizes,
)
from dit.models.sd3.config import Sd3Config
from dit.models.sd3.family import POOLED, TABLE, ends_dual
from dit.models.sd3.original_names import SD3_NAMES

CLASS = "SD3Transformer2DModel"
_RMS = "rms_norm"


def _layer_rows(stack: str) -> tuple[Row, ...]:
    """Of one stack; nothing is rotated, and the text of the last layer has no output."""
    ours, theirs = f"{stack}.layers.*", "transformer_blocks.*"
    last, dual = stack == "last_block", stack == "dual_blocks"
    attention: Any = {"rotated": False, "normed": lambda model: model.qk_norm}
    made = "V" if last else "9D" if dual else "6D"
    rows = (
        *modulation_rows(f"{ours}.modulation", f"{theirs}.norm1.linear", made),
        *attention_rows(f"{ours}.attention", f"{theirs}.attn", LATENTS, **attention),
        *feed_forward_rows(f"{ours}.mlp", f"{theirs}.ff"),
        *attention_rows(
            f"{ours}.text_attention", f"{theirs}.attn", TEXT, output=not last, **attention
        ),
    )
    text = f"{ours}.text_modulation", f"{theirs}.norm1_context.linear"
    if last:
        rows += modulation_rows(*text, "2D", arrangement=SwappedHalves())
    else:
        rows += modulation_rows(*text, "6D")
        rows += feed_forward_rows(f"{ours}.text_mlp", f"{theirs}.ff_context")
    if last or dual:
        exists = ends_dual if last else lambda _: True
        rows += attention_rows(
            f"{ours}.second_attention", f"{theirs}.attn2", LATENTS, exists=exists, **attention
        )
    return rows


_ROWS: tuple[Row, ...] = (
    *linear_rows("patches", "pos_embed.proj", "D", "C", arrangement=Convolution(axes=2)),
    Row(TABLE, ("pos_embed.pos_embed",), TensorSplit.REPLICATED, ("G", "D"), LeadingOne()),
    *linear_rows("text_embedder", "context_embedder", "D", "E"),
    *condition_rows(),
    *(row for stack in ("dual_blocks", "blocks", "last_block") for row in _layer_rows(stack)),
    *head_rows(features=Features("thwc")),
)


def _sizes(model: Sd3Config) -> dict[str, int]:
    return stream_sizes(model) | {
        "P": model.pooled_size,
        "G": model.table_side**2,
        "V": (9 if ends_dual(model) else 6) * model.hidden_size,
    }


def _first_layers(model: Sd3Config) -> dict[str, int]:
    """Diffusers' number of the first layer of each stack."""
    found, before = {}, 0
    for name, count in model.stack_layers.items():
        found[name] = before
        before += count
    return found


class Sd3PrivateKeys(StrictKeys):
    """What an export keeps in config.json that Diffusers has no place for."""

    text_pad_to: Literal["stored"] | None


class Sd3Transformer(StrictKeys):
    """config.json of `SD3Transformer2DModel`; keys that it does not have are kept apart."""

    model_config = ConfigDict(extra="allow")

    sample_size: PositiveInt = 128
    patch_size: PositiveInt = 2
    in_channels: PositiveInt = 16
    num_layers: PositiveInt = 18
    attention_head_dim: PositiveInt = 64
    num_attention_heads: PositiveInt = 18
    joint_attention_dim: PositiveInt = 4096
    caption_projection_dim: PositiveInt = 1152
    pooled_projection_dim: PositiveInt = 2048
    out_channels: PositiveInt | None = 16
    pos_embed_max_size: PositiveInt | None = 96
    dual_attention_layers: tuple[int, ...] = ()
    qk_norm: str | None = None

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


def _unsupported(t: Sd3Transformer) -> list[str]:
    """What of a config.json our network has no counterpart for."""
    dual = t.dual_attention_layers
    rules = [
        (
            t.out_channels in (None, t.in_channels),
            f"out_channels={t.out_channels} with in_channels={t.in_channels}",
        ),
        (
            t.caption_projection_dim == t.width,
            f"caption_projection_dim={t.caption_projection_dim} with layers of width {t.width}",
        ),
        (
            t.pos_embed_max_size is not None,
            "pos_embed_max_size=null; positions are the middle of a table",
        ),
        (t.qk_norm in (None, _RMS), f"qk_norm={t.qk_norm}, neither null nor {_RMS}"),
        (
            sorted(dual) == [*range(len(dual))],
            f"dual_attention_layers={list(dual)}, which are not the first ones",
        ),
    ]
    return [message for holds, message in rules if not holds]


def _settings(
    t: Sd3Transformer, private: Sd3PrivateKeys | None, text_pad_to: Any
) -> dict[str, Any]:
    """Settings of our network, of a config.json."""
    assert t.pos_embed_max_size is not None
    padding, side = private.text_pad_to if private else text_pad_to, t.pos_embed_max_size
    return {
        "num_layers": t.num_layers,
        "hidden_size": t.width,
        "num_attention_heads": t.num_attention_heads,
        "in_channels": t.in_channels,
        "patch_spatial": t.patch_size,
        "patch_temporal": 1,
        "crossattn_emb_size": t.joint_attention_dim,
        "pooled_size": t.pooled_projection_dim,
        "qk_norm": t.qk_norm is not None,
        "dual_attention_layers": len(t.dual_attention_layers),
        "max_size": (1, side * t.patch_size, side * t.patch_size),
        "sample_size": t.sample_size,
        "text_pad_to": TextPadding(padding) if padding else None,
    }


def _inexpressible(config: RunConfig) -> list[str]:
    """What of a run Diffusers' network has no counterpart for."""
    model = config.model
    if model.ffn_hidden_size == 4 * model.hidden_size:
        return []
    return [f"model.mlp_ratio={model.mlp_ratio:g} cannot be exported: {CLASS} has 4"]


def _content(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's network."""
    m = config.model
    assert isinstance(m, Sd3Config)
    return {
        "sample_size": m.sample_size,
        "patch_size": m.patch_spatial,
        "in_channels": m.in_channels,
        "num_layers": m.num_layers,
        "attention_head_dim": m.hidden_size // m.num_attention_heads,
        "num_attention_heads": m.num_attention_heads,
        "joint_attention_dim": m.crossattn_emb_size,
        "caption_projection_dim": m.hidden_size,
        "pooled_projection_dim": m.pooled_size,
        "out_channels": m.in_channels,
        "pos_embed_max_size": m.table_side,
        "dual_attention_layers": [*range(m.dual_attention_layers)],
        "qk_norm": _RMS if m.qk_norm else None,
    }


def _run_network(
    network: nn.Module,
    sample: LatentSample,
    level: float,
    config: RunConfig,  # noqa: ARG001
) -> Tensor:
    """What Diffusers' network makes of one sample."""
    (made,) = network(
        hidden_states=sample.latent_CFHW[None, :, 0],
        encoder_hidden_states=sample.text_LE[None],
        pooled_projections=sample.others[POOLED][None],
        timestep=torch.tensor([level]),
        return_dict=False,
    )
    return made[0, :, None]


_CALL = """\
pooled = texts["pooled_text"][None].float()
made = network(state[:, :, 0], caption, pooled, t.expand(1)).sample[:, :, None]"""

FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(
        rows=_ROWS,
        sizes=_sizes,
        layers=lambda model: model.stack_layers,
        first=_first_layers,
    ),
    config_keys=Sd3Transformer,
    private_keys=Sd3PrivateKeys,
    unsupported=_unsupported,
    settings=_settings,
    inexpressible=_inexpressible,
    content=_content,
    text_pad_to=lambda _: TextPadding.STORED,
    original_names=(SD3_NAMES,),
    pipelines={"StableDiffusion3Pipeline": "flow"},
    largest_latent=lambda model: model.max_size,
    call=lambda _: _CALL,
    run_network=_run_network,
)

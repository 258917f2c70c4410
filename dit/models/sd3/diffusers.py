"""SD3 in Diffusers, `SD3Transformer2DModel`: names of tensors, config.json, pipeline, calls."""

# D model width, F width of the MLP, E text width, K head width, C numbers in a token
# G rows of the table of positions, V numbers of the modulation of latents in the last layer

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from dit.config import TextPadding
from dit.config.checks import Rule
from dit.models.diffusers.arrangements import (
    THWC,
    Convolution,
    Features,
    LeadingOne,
    SwappedHalves,
)
from dit.models.diffusers.form import (
    ConfigKeys,
    DiffusersForm,
    Key,
    OwnKey,
    Pipeline,
    heads_of,
    same,
)
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows
from dit.models.family import POOLED
from dit.models.joint.diffusers import mlp_misfit, outputs_as_inputs
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
from dit.models.sd3.family import TABLE, Sd3Config, ends_dual

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "SD3Transformer2DModel"
_RMS = "rms_norm"


def _layer_rows(stack: str) -> tuple[Row, ...]:
    """Lines of the name table for our stack `stack`.

    Queries and keys are not rotated, and the last layer outputs no text.
    """
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
    *head_rows(features=Features(THWC)),
)


def _sizes(model: Sd3Config) -> dict[str, int]:
    return stream_sizes(model) | {
        "P": model.pooled_size,
        "G": model.table_side**2,
        "V": (9 if ends_dual(model) else 6) * model.hidden_size,
    }


def _first_layers(model: Sd3Config) -> dict[str, int]:
    """Diffusers' index of the first layer of each stack, by the stack's name."""
    found, before = {}, 0
    for name, count in model.stack_layers.items():
        found[name] = before
        before += count
    return found


_BLOCK = "transformer_blocks.*"


def _together(*names: str) -> str:
    return " ".join(f"{_BLOCK}.{name}" for name in names)


# `~`: shift and scale of the last norm, and of the text in the last block, are swapped.
SD3_NAMES: dict[str, str] = {
    "joint_blocks.*.x_block.attn.qkv": _together("attn.to_q", "attn.to_k", "attn.to_v"),
    "joint_blocks.*.x_block.attn2.qkv": _together("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "joint_blocks.*.context_block.attn.qkv": _together(
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"
    ),
    "joint_blocks.*.x_block.attn.proj": f"{_BLOCK}.attn.to_out.0",
    "joint_blocks.*.x_block.attn2.proj": f"{_BLOCK}.attn2.to_out.0",
    "joint_blocks.*.context_block.attn.proj": f"{_BLOCK}.attn.to_add_out",
    "joint_blocks.*.x_block.mlp.fc1": f"{_BLOCK}.ff.net.0.proj",
    "joint_blocks.*.x_block.mlp.fc2": f"{_BLOCK}.ff.net.2",
    "joint_blocks.*.context_block.mlp.fc1": f"{_BLOCK}.ff_context.net.0.proj",
    "joint_blocks.*.context_block.mlp.fc2": f"{_BLOCK}.ff_context.net.2",
    "joint_blocks.*.x_block.adaLN_modulation.1": f"{_BLOCK}.norm1.linear",
    "joint_blocks.*.context_block.adaLN_modulation.1": f"{_BLOCK}.norm1_context.linear~",
    "context_embedder": "context_embedder",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "final_layer.adaLN_modulation.1": "norm_out.linear~",
    "final_layer.linear": "proj_out",
}
"""Diffusers' names of linears by their names in Stability's code."""


def _rules(t: Any) -> list[Rule]:
    dual, width = t.dual_attention_layers, t.num_attention_heads * t.attention_head_dim
    return [
        outputs_as_inputs(t),
        (
            t.caption_projection_dim == width,
            f"caption_projection_dim={t.caption_projection_dim} must be {width}"
            " (num_attention_heads * attention_head_dim)",
        ),
        (
            t.pos_embed_max_size is not None,
            "pos_embed_max_size=null must be a number: our network needs a table of positions",
        ),
        (t.qk_norm in (None, _RMS), f'qk_norm={t.qk_norm!r} must be null or "{_RMS}"'),
        (
            sorted(dual) == [*range(len(dual))],
            f"dual_attention_layers={list(dual)} must be the first layers, 0, 1, 2, ...",
        ),
    ]


KEYS = ConfigKeys(
    keys=(
        same("sample_size", 128),
        Key("patch_size", "patch_spatial", 2),
        same("in_channels", 16),
        same("num_layers", 18),
        heads_of(64),
        same("num_attention_heads", 18),
        Key("joint_attention_dim", "crossattn_emb_size", 4096),
        Key("caption_projection_dim", default=1152, write=lambda m: m.hidden_size),
        Key("pooled_projection_dim", "pooled_size", 2048),
        Key("out_channels", default=16, type=PositiveInt | None, write=lambda m: m.in_channels),
        Key(
            "pos_embed_max_size",
            "max_size",
            96,
            PositiveInt | None,
            read=lambda t: (1, *(t.pos_embed_max_size * t.patch_size,) * 2),
            write=lambda m: m.table_side,
        ),
        Key(
            "dual_attention_layers",
            "dual_attention_layers",
            (),
            tuple[int, ...],
            read=lambda t: len(t.dual_attention_layers),
            write=lambda m: [*range(m.dual_attention_layers)],
        ),
        Key(
            "qk_norm",
            "qk_norm",
            type=str | None,
            read=lambda t: t.qk_norm is not None,
            write=lambda m: _RMS if m.qk_norm else None,
        ),
    ),
    kept=(OwnKey("text_pad_to", TextPadding | None, published=lambda _: TextPadding.STORED),),
    rules=_rules,
)


def _run_network(network: nn.Module, sample: LatentSample, level: float, _: Sd3Config) -> Tensor:
    import torch

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
    keys=KEYS,
    inexpressible=lambda model: mlp_misfit(model, CLASS),
    original_names=(SD3_NAMES,),
    pipelines={"StableDiffusion3Pipeline": Pipeline()},
    largest_latent=lambda model: model.max_size,
    call=lambda _: _CALL,
    run_network=_run_network,
)

"""Anima's conditioner in Diffusers, `AnimaTextConditioner`: tensor names and config.json."""

# D hidden size, E width of the embeddings and of the output, I width of the input states
# F width of an MLP, V tokens with an embedding, K head width; each has a C (conditioner) before it

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dit.config.checks import Rule
from dit.models.diffusers.form import Companion, ConfigKeys, Key
from dit.models.diffusers.names import Row, TensorSplit, linear_rows
from dit.models.dit.family import MOST_CONDITIONER_LAYERS, DitConfig, TextConditioner

FOLDER = "text_conditioner"
_OURS = "conditioner"


def _row(ours: str, theirs: str, *shape: str, exists: Any) -> Row:
    names = f"{_OURS}.{ours}.weight", (f"{FOLDER}.{theirs}.weight",)
    return Row(*names, TensorSplit.REPLICATED, shape, exists=exists)


def _linear(ours: str, theirs: str, *shape: str, exists: Any) -> tuple[Row, Row]:
    outputs, inputs = shape
    return linear_rows(f"{_OURS}.{ours}", f"{FOLDER}.{theirs}", outputs, inputs, exists=exists)


def _layer(number: int) -> Iterator[Row]:
    at, here = f"blocks.{number}", {"exists": lambda m: _has(m) and number < m.conditioner_layers}
    for kind, keys in (("self", "CD"), ("cross", "CI")):
        own, norm = f"{at}.{kind}_attn", f"{at}.norm_{kind}"
        yield _row(norm, f"{at}.norm_{kind}_attn", "CD", **here)
        yield _row(f"{own}.linear_q", f"{own}.q_proj", "CD", "CD", **here)
        yield _row(f"{own}.linear_k", f"{own}.k_proj", "CD", keys, **here)
        yield _row(f"{own}.linear_v", f"{own}.v_proj", "CD", keys, **here)
        yield _row(f"{own}.linear_proj", f"{own}.o_proj", "CD", "CD", **here)
        yield _row(f"{own}.norm_q", f"{own}.q_norm", "CK", **here)
        yield _row(f"{own}.norm_k", f"{own}.k_norm", "CK", **here)
    yield _row(f"{at}.norm_mlp", f"{at}.norm_mlp", "CD", **here)
    yield from _linear(f"{at}.linear_fc1", f"{at}.mlp.0", "CF", "CD", **here)
    yield from _linear(f"{at}.linear_fc2", f"{at}.mlp.2", "CD", "CF", **here)


def _has(model: DitConfig) -> bool:
    return model.trains_conditioner


def _narrows(model: DitConfig) -> bool:
    return _has(model) and model.conditioner_size != model.text_width


ROWS: tuple[Row, ...] = (
    _row("embed", "embed", "CV", "CE", exists=_has),
    *_linear("linear_in", "in_proj", "CD", "CE", exists=_narrows),
    *(row for number in range(MOST_CONDITIONER_LAYERS) for row in _layer(number)),
    *_linear("linear_out", "out_proj", "CE", "CD", exists=_has),
    _row("norm", "norm", "CE", exists=_has),
)


_LINEARS = [f"{a}_attn.{b}_proj" for a in ("self", "cross") for b in "qkvo"] + ["mlp.0", "mlp.2"]
_EVERY = ("in_proj", "out_proj", *(f"blocks.*.{one}" for one in _LINEARS))
ORIGINAL_NAMES = {f"llm_adapter.{one}": f"{FOLDER}.{one}" for one in _EVERY}
"""Diffusers' names of the conditioner's linears by their names in ComfyUI and diffusion-pipe."""


def sizes(model: DitConfig) -> dict[str, int]:
    """The size for each name of a size in the shapes of `ROWS`, such as "CD"."""
    width = model.conditioner_size
    return {
        "CD": width,
        "CE": model.text_width,
        "CI": model.crossattn_emb_size,
        "CF": int(width * model.conditioner_mlp_ratio),
        "CV": model.conditioner_vocabulary,
        "CK": width // model.conditioner_heads,
    }


def _rules(t: Any) -> list[Rule]:
    """Rules for `t`, the conditioner's config.json; if one is broken, it cannot be imported."""
    most = MOST_CONDITIONER_LAYERS
    return [
        (t.use_self_attention, f"use_self_attention={t.use_self_attention}, but it must be true"),
        (not t.use_layer_norm, f"use_layer_norm={t.use_layer_norm}, but it must be false"),
        (t.num_layers <= most, f"num_layers={t.num_layers}, but at most {most} are possible"),
    ]


def _text_widths(t: Any) -> tuple[int, int | None]:
    """(width of the input states, width of the output or None if it is the same)."""
    return t.source_dim, None if t.target_dim == t.source_dim else t.target_dim


COMPANION = Companion(
    folder=FOLDER,
    class_name="AnimaTextConditioner",
    field="text_conditioner",
    value=TextConditioner.TRAINED,
    instead=TextConditioner.STORED,
    keys=ConfigKeys(
        keys=(
            Key("source_dim", default=1024, write=lambda m: m.crossattn_emb_size),
            Key(
                "target_dim",
                ("crossattn_emb_size", "crossattn_proj_size"),
                1024,
                read=_text_widths,
                write=lambda m: m.text_width,
            ),
            Key("model_dim", "conditioner_size", 1024),
            Key("num_layers", "conditioner_layers", 6),
            Key("num_attention_heads", "conditioner_heads", 16),
            Key("mlp_ratio", "conditioner_mlp_ratio", 4.0),
            Key("target_vocab_size", "conditioner_vocabulary", 32128),
            Key("use_self_attention", default=True),
            Key("use_layer_norm", default=False),
            # Captions are padded with zeros to this number, as by `text_pad_to`; 1 pads none.
            Key(
                "min_sequence_length",
                "text_pad_to",
                512,
                read=lambda t: t.min_sequence_length if t.min_sequence_length > 1 else None,
                write=lambda m: m.text_pad_to or 1,
            ),
        ),
        rules=_rules,
    ),
)

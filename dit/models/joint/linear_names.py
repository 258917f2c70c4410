"""Maps from names of linears in other projects to Diffusers' names, for adapter files.

They are for FLUX and the Hunyuan models, in the form of `DiffusersForm.original_names`: `*` stands
for the index of a block. If a project fuses several of Diffusers' linears, their names are
separated by spaces; each has as many outputs as inputs, and the last has all other outputs. `~`
ends the name of a linear whose shift and scale are swapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Names = dict[str, str]
_DOUBLE, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"
_REFINER = "txt_in.individual_token_refiner.blocks.*"
_REFINED = "context_embedder.token_refiner.refiner_blocks.*"
_QKV, _ADDED = (
    tuple(f"attn.{word}" for word in words.split())
    for words in ("to_q to_k to_v", "add_q_proj add_k_proj add_v_proj")
)
_STREAMS = (("img", "", _QKV, "attn.to_out.0"), ("txt", "_context", _ADDED, "attn.to_add_out"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """The parts of one project's names of linears that differ from those of other projects."""

    attention: str  # separator between the name of an attention and the name of its linear
    modulation: str
    mlp: tuple[str, str]
    embedding: tuple[str, str]
    pooled: tuple[str, str]
    """Names of the two linears that embed pooled text in a token refiner."""
    fused: bool = True
    """Whether q, k and v of a block are one linear; in single-stream blocks it then also contains
    the first linear of the MLP."""


FLUX = Words(
    attention=".",
    modulation="lin",
    mlp=("0", "2"),
    embedding=("in_layer", "out_layer"),
    pooled=("in_layer", "out_layer"),
)
"""Names in FLUX's code. ComfyUI also uses them for the Hunyuan models."""
HUNYUAN = Words(
    attention="_",
    modulation="linear",
    mlp=("fc1", "fc2"),
    embedding=("mlp.0", "mlp.2"),
    pooled=("linear_1", "linear_2"),
)
"""Names in the original checkpoints of the Hunyuan models, in which q, k and v are one linear."""
GLYPH_LINEARS = {f"byt5_in.fc{n}": f"context_embedder_2.linear_{n}" for n in (1, 2, 3)}
"""Diffusers' names of the linears that embed ByT5's states, by their names in other projects."""
HEAD = {"final_layer.linear": "proj_out", "final_layer.adaLN_modulation.1": "norm_out.linear~"}
EMBEDDERS = {"img_in": "x_embedder", "txt_in": "context_embedder"}
"""Diffusers' names of the embedders of FLUX and Chroma, which have no token refiner."""


_NET = ("net.0.proj", "net.2")


def double_block_names(
    words: Words, *, modulated: bool = True, mlp: tuple[str, str] = _NET
) -> Names:
    """Diffusers' names for the linears of double-stream blocks, by a project's names.

    `modulated` says whether each block has linears for its modulations. `mlp` are Diffusers' names
    of the two linears of an MLP.
    """
    names: Names = {}
    for stream, end, made, out in _STREAMS:
        block = f"double_blocks.*.{stream}"
        if modulated:
            names[f"{block}_mod.{words.modulation}"] = f"{_DOUBLE}.norm1{end}.linear"
        attention = f"{block}_attn{words.attention}"
        linears = [f"{_DOUBLE}.{one}" for one in made]
        apart = {f"{attention}{letter}": ours for letter, ours in zip("qkv", linears, strict=True)}
        names |= {f"{attention}qkv": " ".join(linears)} if words.fused else apart
        names[f"{attention}proj"] = f"{_DOUBLE}.{out}"
        names |= _mlp(f"{block}_mlp", words, f"{_DOUBLE}.ff{end}", mlp)
    return names


def single_block_names(words: Words, *, modulated: bool = True) -> Names:
    """Diffusers' names for the linears of single-stream blocks, by a project's names.

    `modulated` says whether each block has a linear for its modulation.
    """
    block, linears = "single_blocks.*", [f"{_SINGLE}.{one}" for one in (*_QKV, "proj_mlp")]
    names: Names = {}
    if modulated:
        names[f"{block}.modulation.{words.modulation}"] = f"{_SINGLE}.norm.linear"
    if words.fused:
        return names | {
            f"{block}.linear1": " ".join(linears),
            f"{block}.linear2": f"{_SINGLE}.proj_out",
        }
    parts = zip(("q", "k", "v", "mlp"), linears, strict=True)
    names |= {f"{block}.linear1_{part}": ours for part, ours in parts}
    return names | {f"{block}.linear2.fc": f"{_SINGLE}.proj_out"}


def refiner_names(words: Words) -> Names:
    """Diffusers' names for the linears of a token refiner, by a project's names.

    In every project the refiner's q, k and v are one linear.
    """
    told = "context_embedder.time_text_embed"
    attention = f"{_REFINER}.self_attn{words.attention}"
    return {
        **embedding_names(words, {"txt_in.t_embedder": f"{told}.timestep_embedder"}),
        **_linears("txt_in.c_embedder", words.pooled, f"{told}.text_embedder"),
        "txt_in.input_embedder": "context_embedder.proj_in",
        f"{attention}qkv": " ".join(f"{_REFINED}.{one}" for one in _QKV),
        f"{attention}proj": f"{_REFINED}.attn.to_out.0",
        f"{_REFINER}.adaLN_modulation.1": f"{_REFINED}.norm_out.linear",
        **_mlp(f"{_REFINER}.mlp", words, f"{_REFINED}.ff"),
    }


def hunyuan_names(words: Words, embeddings: Mapping[str, str], *, single: bool = True) -> Names:
    """Diffusers' names for the linears of a Hunyuan model, by a project's names.

    `embeddings` is as in `embedding_names`; `single` says whether the model has single-stream
    blocks.
    """
    return {
        **double_block_names(words),
        **(single_block_names(words) if single else {}),
        **embedding_names(words, embeddings),
        **refiner_names(words),
        **HEAD,
    }


def embedding_names(words: Words, embeddings: Mapping[str, str]) -> Names:
    """Diffusers' names for the linears of `embeddings`, by a project's names.

    `embeddings` maps a project's name of an embedding, which has two linears, to Diffusers' name.
    """
    names: Names = {}
    for theirs, ours in embeddings.items():
        names |= _linears(theirs, words.embedding, ours)
    return names


def _linears(theirs: str, words: tuple[str, str], ours: str) -> Names:
    """Diffusers' names of the two linears of an embedding, by a project's names of them."""
    return {f"{theirs}.{word}": f"{ours}.linear_{n}" for n, word in enumerate(words, 1)}


def _mlp(theirs: str, words: Words, ours: str, linears: tuple[str, str] = _NET) -> Names:
    pairs = zip(words.mlp, linears, strict=True)
    return {f"{theirs}.{word}": f"{ours}.{linear}" for word, linear in pairs}

"""Names of linears in HunyuanVideo's own code, and in ComfyUI's -> those of Diffusers.

`*` stands for the number of a block. Where one linear of theirs is several of Diffusers', these
stand side by side with spaces. Files with names of its own code begin with `transformer.`. The
linear of the last norm is left out: its scale and shift have changed places.
"""

from __future__ import annotations

from typing import NamedTuple

_DOUBLE, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"
_REFINER = "txt_in.individual_token_refiner.blocks.*"
_REFINED = "context_embedder.token_refiner.refiner_blocks.*"
_TOLD = "time_text_embed"
_QKV, _ADDED = (
    tuple(f"attn.{w}" for w in words.split())
    for words in ("to_q to_k to_v", "add_q_proj add_k_proj add_v_proj")
)
_STREAMS = (("img", "", _QKV, "attn.to_out.0"), ("txt", "_context", _ADDED, "attn.to_add_out"))
_EMBEDDINGS = {
    "time_in": f"{_TOLD}.timestep_embedder",
    "guidance_in": f"{_TOLD}.guidance_embedder",
    "txt_in.t_embedder": f"context_embedder.{_TOLD}.timestep_embedder",
}


class _Words(NamedTuple):
    """What linears are called: of attention, of modulations, of MLPs, of embeddings."""

    attention: str
    refiner: str
    modulation: str
    mlp: tuple[str, str]
    embedding: tuple[str, str]
    pooled: tuple[str, str]


def _together(block: str, *names: str) -> str:
    return " ".join(f"{block}.{name}" for name in names)


def _linears(theirs: str, words: tuple[str, str], ours: str) -> dict[str, str]:
    """Of an embedding by two linears."""
    return {f"{theirs}.{word}": f"{ours}.linear_{n}" for n, word in enumerate(words, 1)}


def _mlp(theirs: str, words: _Words, ours: str) -> dict[str, str]:
    first, second = (f"{theirs}.{word}" for word in words.mlp)
    return {first: f"{ours}.net.0.proj", second: f"{ours}.net.2"}


def _names(words: _Words) -> dict[str, str]:
    names: dict[str, str] = {}
    for stream, end, made, out in _STREAMS:
        block = f"double_blocks.*.{stream}"
        names[f"{block}_mod.{words.modulation}"] = f"{_DOUBLE}.norm1{end}.linear"
        names[f"{block}_attn{words.attention}qkv"] = _together(_DOUBLE, *made)
        names[f"{block}_attn{words.attention}proj"] = f"{_DOUBLE}.{out}"
        names |= _mlp(f"{block}_mlp", words, f"{_DOUBLE}.ff{end}")
    for theirs, ours in _EMBEDDINGS.items():
        names |= _linears(theirs, words.embedding, ours)
    pooled = f"context_embedder.{_TOLD}.text_embedder"
    attention = f"{_REFINER}.self_attn{words.refiner}"
    return {
        **names,
        f"single_blocks.*.modulation.{words.modulation}": f"{_SINGLE}.norm.linear",
        "single_blocks.*.linear1": _together(_SINGLE, *_QKV, "proj_mlp"),
        "single_blocks.*.linear2": f"{_SINGLE}.proj_out",
        **_linears("vector_in", ("in_layer", "out_layer"), f"{_TOLD}.text_embedder"),
        **_linears("txt_in.c_embedder", words.pooled, pooled),
        "txt_in.input_embedder": "context_embedder.proj_in",
        f"{attention}qkv": _together(_REFINED, *_QKV),
        f"{attention}proj": f"{_REFINED}.attn.to_out.0",
        f"{_REFINER}.adaLN_modulation.1": f"{_REFINED}.norm_out.linear",
        **_mlp(f"{_REFINER}.mlp", words, f"{_REFINED}.ff"),
        "final_layer.linear": "proj_out",
    }


HUNYUAN_VIDEO_NAMES = _names(
    _Words(
        attention="_",
        refiner="_",
        modulation="linear",
        mlp=("fc1", "fc2"),
        embedding=("mlp.0", "mlp.2"),
        pooled=("linear_1", "linear_2"),
    )
)
"""Of the original project, and of diffusion-pipe."""
COMFYUI_NAMES = _names(
    _Words(
        attention=".",
        refiner=".",
        modulation="lin",
        mlp=("0", "2"),
        embedding=("in_layer", "out_layer"),
        pooled=("in_layer", "out_layer"),
    )
)
"""Of ComfyUI."""

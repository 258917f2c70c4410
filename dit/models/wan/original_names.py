"""Names of linears in Wan's own code -> those of Diffusers; files of adapters have either.

`*` stands for the number of a block. Weights are equal on both sides.
"""

from __future__ import annotations

_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
_IMAGE = {"k_img": "add_k_proj", "v_img": "add_v_proj"}
_EMBEDDER = "condition_embedder"

WAN_NAMES: dict[str, str] = {
    **{f"blocks.*.self_attn.{a}": f"blocks.*.attn1.{b}" for a, b in _ATTENTION.items()},
    **{f"blocks.*.cross_attn.{a}": f"blocks.*.attn2.{b}" for a, b in _ATTENTION.items()},
    **{f"blocks.*.cross_attn.{a}": f"blocks.*.attn2.{b}" for a, b in _IMAGE.items()},
    "blocks.*.ffn.0": "blocks.*.ffn.net.0.proj",
    "blocks.*.ffn.2": "blocks.*.ffn.net.2",
    "time_embedding.0": f"{_EMBEDDER}.time_embedder.linear_1",
    "time_embedding.2": f"{_EMBEDDER}.time_embedder.linear_2",
    "time_projection.1": f"{_EMBEDDER}.time_proj",
    "text_embedding.0": f"{_EMBEDDER}.text_embedder.linear_1",
    "text_embedding.2": f"{_EMBEDDER}.text_embedder.linear_2",
    "img_emb.proj.1": f"{_EMBEDDER}.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": f"{_EMBEDDER}.image_embedder.ff.net.2",
    "head.head": "proj_out",
}

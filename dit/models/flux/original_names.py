"""Names of linears in FLUX's own code, which kohya's scripts have, and in XLabs' -> Diffusers'."""

from __future__ import annotations

from dit.models.joint.linear_names import (
    EMBEDDERS,
    FLUX,
    HEAD,
    double_block_names,
    embedding_names,
    single_block_names,
)

_TOLD = "time_text_embed"
_EMBEDDINGS = {
    "time_in": f"{_TOLD}.timestep_embedder",
    "guidance_in": f"{_TOLD}.guidance_embedder",
    "vector_in": f"{_TOLD}.text_embedder",
}

FLUX_NAMES = {
    **EMBEDDERS,
    **embedding_names(FLUX, _EMBEDDINGS),
    **double_block_names(FLUX),
    **single_block_names(FLUX),
    **HEAD,
}

_DOUBLE, _SINGLE = "transformer_blocks.*.attn", "single_transformer_blocks.*"
_PROCESSOR = "double_blocks.*.processor"
XLABS_NAMES = {
    f"{_PROCESSOR}.qkv_lora1": f"{_DOUBLE}.to_q {_DOUBLE}.to_k {_DOUBLE}.to_v",
    f"{_PROCESSOR}.qkv_lora2": f"{_DOUBLE}.add_q_proj {_DOUBLE}.add_k_proj {_DOUBLE}.add_v_proj",
    f"{_PROCESSOR}.proj_lora1": f"{_DOUBLE}.to_out.0",
    f"{_PROCESSOR}.proj_lora2": f"{_DOUBLE}.to_add_out",
    # Without the first linear of the MLP, which FLUX's own linear1 has with them.
    "single_blocks.*.processor.qkv_lora": " ".join(f"{_SINGLE}.attn.to_{x}" for x in "qkv"),
    "single_blocks.*.processor.proj_lora": f"{_SINGLE}.proj_out",
}
"""Of XLabs' trainer."""

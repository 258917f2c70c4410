"""Names of linears in FLUX's own code -> those of Diffusers; files of kohya's scripts have them."""

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

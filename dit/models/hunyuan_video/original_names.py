"""Names of linears in HunyuanVideo's own code, and in ComfyUI's -> those of Diffusers.

Files with names of its own code begin with `transformer.`.
"""

from __future__ import annotations

from dit.models.joint.linear_names import (
    FLUX,
    HEAD,
    HUNYUAN,
    Words,
    double_block_names,
    embedding_names,
    refiner_names,
    single_block_names,
)

_TOLD = "time_text_embed"


def _names(words: Words) -> dict[str, str]:
    told = {
        "time_in": f"{_TOLD}.timestep_embedder",
        "guidance_in": f"{_TOLD}.guidance_embedder",
    }
    return {
        **double_block_names(words),
        **single_block_names(words),
        **embedding_names(words, told),
        # Pooled text, for which both projects have FLUX's words.
        **embedding_names(FLUX, {"vector_in": f"{_TOLD}.text_embedder"}),
        **refiner_names(words),
        **HEAD,
    }


HUNYUAN_VIDEO_NAMES = _names(HUNYUAN)
"""Of the original project, and of diffusion-pipe."""
COMFYUI_NAMES = _names(FLUX)
"""Of ComfyUI."""

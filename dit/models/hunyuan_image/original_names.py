"""Names of linears in HunyuanImage's own code, kohya's and ComfyUI's -> those of Diffusers."""

from __future__ import annotations

from dataclasses import replace

from dit.models.joint.linear_names import (
    FLUX,
    GLYPHS,
    HEAD,
    HUNYUAN,
    Words,
    double_block_names,
    embedding_names,
    refiner_names,
    single_block_names,
)

_TOLD = "time_guidance_embed"


def _names(words: Words) -> dict[str, str]:
    told = {
        "time_in": f"{_TOLD}.timestep_embedder",
        "time_r_in": f"{_TOLD}.timestep_embedder_r",
        "guidance_in": f"{_TOLD}.guidance_embedder",
    }
    return {
        **double_block_names(words),
        **single_block_names(words),
        **embedding_names(words, told),
        **refiner_names(words),
        **GLYPHS,
        **HEAD,
    }


HUNYUAN_IMAGE_NAMES = _names(replace(HUNYUAN, fused=False))
"""Of the original project, which takes the linears of its own checkpoints apart."""
KOHYA_NAMES = _names(HUNYUAN)
"""Of the original project's checkpoints, and of kohya's scripts."""
COMFYUI_NAMES = _names(FLUX)
"""Of ComfyUI."""

"""Names of linears in HunyuanVideo 1.5's own code, and in ComfyUI's -> those of Diffusers.

diffusion-pipe trains ComfyUI's network and writes its names.
"""

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
)


def _names(words: Words) -> dict[str, str]:
    return {
        **double_block_names(words),
        **embedding_names(words, {"time_in": "time_embed.timestep_embedder"}),
        **refiner_names(words),
        **GLYPHS,
        "vision_in.proj.1": "image_embedder.linear_1",
        "vision_in.proj.3": "image_embedder.linear_2",
        **HEAD,
    }


HUNYUAN_NAMES = _names(replace(HUNYUAN, fused=False))
"""Of the original project."""
COMFYUI_NAMES = _names(FLUX)
"""Of ComfyUI, and of diffusion-pipe."""

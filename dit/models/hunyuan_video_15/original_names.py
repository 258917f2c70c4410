"""Names of linears in HunyuanVideo 1.5's own code, and in ComfyUI's -> those of Diffusers.

`*` stands for the number of a block. Where one linear of ComfyUI is several of Diffusers', these
stand side by side with spaces. diffusion-pipe trains ComfyUI's network and writes its names. The
linear of the last norm is left out: its scale and shift have changed places.
"""

from __future__ import annotations

_BLOCK, _THEIRS = "double_blocks.*", "transformer_blocks.*"
_REFINER = "txt_in.individual_token_refiner.blocks.*"
_REFINED = "context_embedder.token_refiner.refiner_blocks.*"
_TOLD = "context_embedder.time_text_embed"
_STREAMS = {
    "img": ("norm1.linear", ("to_q", "to_k", "to_v"), "to_out.0", "ff"),
    "txt": (
        "norm1_context.linear",
        ("add_q_proj", "add_k_proj", "add_v_proj"),
        "to_add_out",
        "ff_context",
    ),
}


def _together(block: str, names: tuple[str, ...]) -> str:
    return " ".join(f"{block}.attn.{name}" for name in names)


_OUTSIDE = {
    "byt5_in.fc1": "context_embedder_2.linear_1",
    "byt5_in.fc2": "context_embedder_2.linear_2",
    "byt5_in.fc3": "context_embedder_2.linear_3",
    "vision_in.proj.1": "image_embedder.linear_1",
    "vision_in.proj.3": "image_embedder.linear_2",
    "txt_in.input_embedder": "context_embedder.proj_in",
    f"{_REFINER}.adaLN_modulation.1": f"{_REFINED}.norm_out.linear",
    "final_layer.linear": "proj_out",
}

HUNYUAN_NAMES: dict[str, str] = {
    **{f"{_BLOCK}.{s}_mod.linear": f"{_THEIRS}.{m}" for s, (m, *_) in _STREAMS.items()},
    **{
        f"{_BLOCK}.{stream}_attn_{letter}": f"{_THEIRS}.attn.{name}"
        for stream, (_, qkv, *_) in _STREAMS.items()
        for letter, name in zip("qkv", qkv, strict=True)
    },
    **{f"{_BLOCK}.{s}_attn_proj": f"{_THEIRS}.attn.{o}" for s, (*_, o, _) in _STREAMS.items()},
    **{f"{_BLOCK}.{s}_mlp.fc1": f"{_THEIRS}.{f}.net.0.proj" for s, (*_, f) in _STREAMS.items()},
    **{f"{_BLOCK}.{s}_mlp.fc2": f"{_THEIRS}.{f}.net.2" for s, (*_, f) in _STREAMS.items()},
    "time_in.mlp.0": "time_embed.timestep_embedder.linear_1",
    "time_in.mlp.2": "time_embed.timestep_embedder.linear_2",
    "txt_in.t_embedder.mlp.0": f"{_TOLD}.timestep_embedder.linear_1",
    "txt_in.t_embedder.mlp.2": f"{_TOLD}.timestep_embedder.linear_2",
    "txt_in.c_embedder.linear_1": f"{_TOLD}.text_embedder.linear_1",
    "txt_in.c_embedder.linear_2": f"{_TOLD}.text_embedder.linear_2",
    f"{_REFINER}.self_attn_qkv": _together(_REFINED, ("to_q", "to_k", "to_v")),
    f"{_REFINER}.self_attn_proj": f"{_REFINED}.attn.to_out.0",
    f"{_REFINER}.mlp.fc1": f"{_REFINED}.ff.net.0.proj",
    f"{_REFINER}.mlp.fc2": f"{_REFINED}.ff.net.2",
    **_OUTSIDE,
}
"""Of the original project."""

COMFYUI_NAMES: dict[str, str] = {
    **{f"{_BLOCK}.{s}_mod.lin": f"{_THEIRS}.{m}" for s, (m, *_) in _STREAMS.items()},
    **{
        f"{_BLOCK}.{stream}_attn.qkv": _together(_THEIRS, qkv)
        for stream, (_, qkv, *_) in _STREAMS.items()
    },
    **{f"{_BLOCK}.{s}_attn.proj": f"{_THEIRS}.attn.{o}" for s, (*_, o, _) in _STREAMS.items()},
    **{f"{_BLOCK}.{s}_mlp.0": f"{_THEIRS}.{f}.net.0.proj" for s, (*_, f) in _STREAMS.items()},
    **{f"{_BLOCK}.{s}_mlp.2": f"{_THEIRS}.{f}.net.2" for s, (*_, f) in _STREAMS.items()},
    "time_in.in_layer": "time_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_embed.timestep_embedder.linear_2",
    "txt_in.t_embedder.in_layer": f"{_TOLD}.timestep_embedder.linear_1",
    "txt_in.t_embedder.out_layer": f"{_TOLD}.timestep_embedder.linear_2",
    "txt_in.c_embedder.in_layer": f"{_TOLD}.text_embedder.linear_1",
    "txt_in.c_embedder.out_layer": f"{_TOLD}.text_embedder.linear_2",
    f"{_REFINER}.self_attn.qkv": _together(_REFINED, ("to_q", "to_k", "to_v")),
    f"{_REFINER}.self_attn.proj": f"{_REFINED}.attn.to_out.0",
    f"{_REFINER}.mlp.0": f"{_REFINED}.ff.net.0.proj",
    f"{_REFINER}.mlp.2": f"{_REFINED}.ff.net.2",
    **_OUTSIDE,
}
"""Of ComfyUI, and of diffusion-pipe."""

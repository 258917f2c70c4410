"""Names of linears in Stability's own code -> those of Diffusers; files of adapters have either.

`*` stands for the number of a block. Shift and scale of the last norm, and of the text in the last
block, have changed places.
"""

from __future__ import annotations

_BLOCK = "transformer_blocks.*"


def _together(*names: str) -> str:
    return " ".join(f"{_BLOCK}.{name}" for name in names)


SD3_NAMES: dict[str, str] = {
    "joint_blocks.*.x_block.attn.qkv": _together("attn.to_q", "attn.to_k", "attn.to_v"),
    "joint_blocks.*.x_block.attn2.qkv": _together("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "joint_blocks.*.context_block.attn.qkv": _together(
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"
    ),
    "joint_blocks.*.x_block.attn.proj": f"{_BLOCK}.attn.to_out.0",
    "joint_blocks.*.x_block.attn2.proj": f"{_BLOCK}.attn2.to_out.0",
    "joint_blocks.*.context_block.attn.proj": f"{_BLOCK}.attn.to_add_out",
    "joint_blocks.*.x_block.mlp.fc1": f"{_BLOCK}.ff.net.0.proj",
    "joint_blocks.*.x_block.mlp.fc2": f"{_BLOCK}.ff.net.2",
    "joint_blocks.*.context_block.mlp.fc1": f"{_BLOCK}.ff_context.net.0.proj",
    "joint_blocks.*.context_block.mlp.fc2": f"{_BLOCK}.ff_context.net.2",
    "joint_blocks.*.x_block.adaLN_modulation.1": f"{_BLOCK}.norm1.linear",
    "joint_blocks.*.context_block.adaLN_modulation.1": f"{_BLOCK}.norm1_context.linear~",
    "context_embedder": "context_embedder",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "final_layer.adaLN_modulation.1": "norm_out.linear~",
    "final_layer.linear": "proj_out",
}

"""Names of linears in FLUX's own code -> those of Diffusers; files of kohya's scripts have them.

`*` stands for the number of a block. Where one linear of theirs is several of Diffusers', these
stand side by side with spaces: all have as many outputs as it has inputs, and the last one the
rest. The linear of the last norm is left out: its scale and shift have changed places.
"""

from __future__ import annotations

_DOUBLE, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"


def _together(block: str, *names: str) -> str:
    return " ".join(f"{block}.{name}" for name in names)


FLUX_NAMES: dict[str, str] = {
    "double_blocks.*.img_mod.lin": f"{_DOUBLE}.norm1.linear",
    "double_blocks.*.txt_mod.lin": f"{_DOUBLE}.norm1_context.linear",
    "double_blocks.*.img_attn.qkv": _together(_DOUBLE, "attn.to_q", "attn.to_k", "attn.to_v"),
    "double_blocks.*.txt_attn.qkv": _together(
        _DOUBLE, "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"
    ),
    "double_blocks.*.img_attn.proj": f"{_DOUBLE}.attn.to_out.0",
    "double_blocks.*.txt_attn.proj": f"{_DOUBLE}.attn.to_add_out",
    "double_blocks.*.img_mlp.0": f"{_DOUBLE}.ff.net.0.proj",
    "double_blocks.*.img_mlp.2": f"{_DOUBLE}.ff.net.2",
    "double_blocks.*.txt_mlp.0": f"{_DOUBLE}.ff_context.net.0.proj",
    "double_blocks.*.txt_mlp.2": f"{_DOUBLE}.ff_context.net.2",
    "single_blocks.*.linear1": _together(
        _SINGLE, "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"
    ),
    "single_blocks.*.linear2": f"{_SINGLE}.proj_out",
    "single_blocks.*.modulation.lin": f"{_SINGLE}.norm.linear",
}

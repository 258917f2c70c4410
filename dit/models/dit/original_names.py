"""Names of linears in Cosmos' own code -> those of Diffusers; files of adapters have either.

`*` stands for the number of a block. Weights are equal on both sides.
"""

from __future__ import annotations

_BLOCK = "transformer_blocks.*"
_OUTER = {
    "final_layer.linear": "proj_out",
    "t_embedder.1.linear_1": "time_embed.t_embedder.linear_1",
    "t_embedder.1.linear_2": "time_embed.t_embedder.linear_2",
    "x_embedder.proj.1": "patch_embed.proj",
}


def _predict2() -> dict[str, str]:
    """Predict2 and 2.5."""
    names = {**_OUTER, "crossattn_proj.0": "crossattn_proj.0"}
    for number, part in enumerate(("self_attn", "cross_attn", "mlp"), start=1):
        for linear in (1, 2):
            theirs = f"blocks.*.adaln_modulation_{part}.{linear}"
            names[theirs] = f"{_BLOCK}.norm{number}.linear_{linear}"
    for number, part in enumerate(("self_attn", "cross_attn"), start=1):
        for letter in "qkv":
            names[f"blocks.*.{part}.{letter}_proj"] = f"{_BLOCK}.attn{number}.to_{letter}"
        names[f"blocks.*.{part}.output_proj"] = f"{_BLOCK}.attn{number}.to_out.0"
    return names | {
        "blocks.*.mlp.layer1": f"{_BLOCK}.ff.net.0.proj",
        "blocks.*.mlp.layer2": f"{_BLOCK}.ff.net.2",
        "final_layer.adaln_modulation.1": "norm_out.linear_1",
        "final_layer.adaln_modulation.2": "norm_out.linear_2",
    }


def _cosmos1() -> dict[str, str]:
    names = dict(_OUTER)
    for part in range(3):
        for linear in (1, 2):
            theirs = f"blocks.block*.blocks.{part}.adaLN_modulation.{linear}"
            names[theirs] = f"{_BLOCK}.norm{part + 1}.linear_{linear}"
    for part in range(2):
        theirs, ours = f"blocks.block*.blocks.{part}.block.attn", f"{_BLOCK}.attn{part + 1}"
        names |= {f"{theirs}.to_{letter}.0": f"{ours}.to_{letter}" for letter in "qkv"}
        names[f"{theirs}.to_out.0"] = f"{ours}.to_out.0"
    return names | {
        "blocks.block*.blocks.2.block.layer1": f"{_BLOCK}.ff.net.0.proj",
        "blocks.block*.blocks.2.block.layer2": f"{_BLOCK}.ff.net.2",
        "final_layer.adaLN_modulation.1": "norm_out.linear_1",
        "final_layer.adaLN_modulation.2": "norm_out.linear_2",
    }


PREDICT2_NAMES, COSMOS1_NAMES = _predict2(), _cosmos1()

"""Lumina Image 2.0 in Diffusers, `Lumina2Transformer2DModel`: tensor names, config.json, calls."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from dit.models.diffusers.form import ConfigKeys, DiffusersForm, Key, OwnKey, Pipeline
from dit.models.diffusers.names import NameTable
from dit.models.joint.lumina_names import (
    LEVEL,
    LUMINA_STACKS,
    TEXT,
    lumina_keys,
    lumina_rows,
    lumina_rules,
    lumina_sizes,
)
from dit.models.joint.sequential_names import refined_layers
from dit.models.layer_spec import ALL_NOISE
from dit.models.lumina2.family import AXES_LENS, EPS, Lumina2Config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "Lumina2Transformer2DModel"
_TABLE = NameTable(
    rows=lumina_rows(LUMINA_STACKS),
    sizes=lumina_sizes,
    layers=refined_layers(LUMINA_STACKS),
)


def _linears(stack: str) -> dict[str, str]:
    """Diffusers' names of the linears in the stack `stack`, by their original names."""
    attention, mlp = f"{stack}.*.attention", f"{stack}.*.feed_forward"
    made = " ".join(f"{stack}.*.attn.to_{letter}" for letter in "qkv")
    names = {f"{attention}.qkv": made, f"{attention}.out": f"{stack}.*.attn.to_out.0"}
    names |= {f"{mlp}.w{n}": f"{mlp}.linear_{n}" for n in (1, 2, 3)}
    if stack == "context_refiner":
        return names
    return names | {f"{stack}.*.adaLN_modulation.1": f"{stack}.*.norm1.linear"}


LUMINA2_NAMES = {
    **{
        name: theirs for stack in LUMINA_STACKS.values() for name, theirs in _linears(stack).items()
    },
    **{f"t_embedder.mlp.{at}": f"{LEVEL}.linear_{n}" for n, at in enumerate((0, 2), 1)},
    "cap_embedder.1": f"{TEXT}.1",
    "final_layer.adaLN_modulation.1": "norm_out.linear_1",
    "final_layer.linear": "norm_out.linear_2",
    "x_embedder": "x_embedder",
}
"""Diffusers' names of linears by their names in the original project, ComfyUI and
diffusion-pipe."""


KEYS = ConfigKeys(
    keys=(
        Key("sample_size", default=128),
        *lumina_keys(layers=(26, 2), largest=AXES_LENS),
        Key("norm_eps", default=EPS),
        Key("scaling_factor", default=1.0),  # not used
        Key("cap_feat_dim", "crossattn_emb_size", 1024),
    ),
    kept=(OwnKey("patch_temporal", PositiveInt, published=lambda _: 1),),
    rules=partial(lumina_rules, eps=EPS),
)


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, _: Lumina2Config
) -> Tensor:
    import torch

    text_1LE = sample.text_LE[None]
    (made,) = network(
        hidden_states=sample.latent_CFHW[:, 0][None],
        timestep=torch.tensor([1 - level / ALL_NOISE]),
        encoder_hidden_states=text_1LE,
        encoder_attention_mask=torch.ones(text_1LE.shape[:2], dtype=torch.int64),
        return_dict=False,
    )
    return -made[0][:, None]


FORM = DiffusersForm(
    class_name=CLASS,
    table=_TABLE,
    keys=KEYS,
    original_names=(LUMINA2_NAMES,),
    comfyui_names=lambda _: LUMINA2_NAMES,
    pipelines={"Lumina2Pipeline": Pipeline()},
    largest_latent=lambda model: (1, *model.largest_latent[1:]),
    run_network=_run_network,
)

"""Z-Image in Diffusers, `ZImageTransformer2DModel`: names of tensors, config.json, calls."""

# D model width, K head width, Q queries, keys and values of a token, F width of the MLP
# W width of the sinusoidal timestep embedding; I hidden width and T output width of its MLP
# E text width, C numbers in a token

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from dit.config.checks import Rule
from dit.models.diffusers.arrangements import THWC, Features
from dit.models.diffusers.form import ConfigKeys, DiffusersForm, Key, OwnKey, Pipeline
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows
from dit.models.joint.sequential_names import (
    SequentialNames,
    refined_layers,
    sequential_rows,
    weight_row,
)
from dit.models.joint.tensor_names import BY_HEAD
from dit.models.layer_spec import ALL_NOISE, LEVEL_WAVES, MOST_REFINER_LAYERS
from dit.models.zimage.family import AXES_LENS, EPS, INSIDE_OF_TOLD, MLP_RATIO, THETA, ZImageConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "ZImageTransformer2DModel"
_STACKS = {"noise_refiner": "noise_refiner", "context_refiner": "context_refiner"}
_STACKS |= {"blocks": "layers"}
_PATCH = "2-1"  # patches of 2 x 2 latent pixels, 1 frame
_EMBED, _HEAD = f"all_x_embedder.{_PATCH}", f"all_final_layer.{_PATCH}"


def _names(stack: str) -> SequentialNames:
    """Diffusers' names in the layers of our stack `stack`; the text refiner has no modulation."""
    return SequentialNames(
        norms=("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"),
        modulation=None if stack == "context_refiner" else "adaLN_modulation.0",
        attention="attention",
        mlp=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    )


def _pad_token(ours: str, theirs: str) -> Row:
    return Row(ours, (theirs,), TensorSplit.REPLICATED, ("1", "D"))


_TABLE = NameTable(
    rows=(
        *linear_rows("patches", _EMBED, "D", "C", arrangement=Features(THWC, axis=1)),
        weight_row("text_norm", "cap_embedder.0", "E"),
        *linear_rows("text_embedder", "cap_embedder.1", "D", "E"),
        *linear_rows("told.linear_1", "t_embedder.mlp.0", "I", "W"),
        *linear_rows("told.linear_2", "t_embedder.mlp.2", "T", "I"),
        _pad_token("padding.token", "x_pad_token"),
        _pad_token("text_padding.token", "cap_pad_token"),
        *(
            row
            for ours, theirs in _STACKS.items()
            for row in sequential_rows(ours, theirs, _names(ours), heads=BY_HEAD)
        ),
        *linear_rows(
            "modulate_out.linear",
            f"{_HEAD}.adaLN_modulation.1",
            *("D", "T"),
            split=TensorSplit.COLUMN,
        ),
        *linear_rows("proj_out", f"{_HEAD}.linear", "C", "D", arrangement=Features(THWC)),
    ),
    sizes=lambda model: _sizes(model),
    layers=refined_layers(_STACKS),
)


def _sizes(model: ZImageConfig) -> dict[str, int]:
    width, hidden = model.hidden_size, model.ffn_hidden_size
    return {
        **{"D": width, "4D": 4 * width, "K": width // model.num_attention_heads, "Q": 3 * width},
        **{"F": hidden, "2F": 2 * hidden, "W": LEVEL_WAVES, "T": model.told_width, "1": 1},
        **{"I": INSIDE_OF_TOLD, "E": model.crossattn_emb_size, "C": model.patch_features},
    }


def _linears(stack: str) -> dict[str, str]:
    """Diffusers' names of the linears in the stack `stack`, by their original names."""
    attention, mlp = f"{stack}.*.attention", f"{stack}.*.feed_forward"
    names = {
        f"{attention}.qkv": " ".join(f"{attention}.to_{letter}" for letter in "qkv"),
        f"{attention}.out": f"{attention}.to_out.0",
        **{f"{mlp}.w{n}": f"{mlp}.w{n}" for n in (1, 2, 3)},
    }
    if stack == "context_refiner":
        return names
    return names | {f"{stack}.*.adaLN_modulation.0": f"{stack}.*.adaLN_modulation.0"}


_BESIDE = {
    **{name: name for name in ("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.1")},
    "x_embedder": _EMBED,
    "final_layer.adaLN_modulation.1": f"{_HEAD}.adaLN_modulation.1",
    "final_layer.linear": f"{_HEAD}.linear",
}
ZIMAGE_NAMES = {
    **{name: theirs for stack in _STACKS.values() for name, theirs in _linears(stack).items()},
    **_BESIDE,
}
"""Diffusers' names of linears by their names in the original project and in ComfyUI, which fuse
queries, keys and values."""


def _rules(t: Any) -> list[Rule]:
    sizes = tuple(t.all_patch_size), tuple(t.all_f_patch_size)
    return [
        (
            t.siglip_feat_dim is None,
            f"siglip_feat_dim={t.siglip_feat_dim} must be null: Z-Image-Omni and Z-Image-Edit,"
            " which get SigLIP's features of other pictures, are not supported",
        ),
        (
            sizes == ((2,), (1,)),
            f"all_patch_size={list(sizes[0])} and all_f_patch_size={list(sizes[1])} must be [2] and"
            " [1]",
        ),
        (t.qk_norm, "qk_norm=false must be true"),
        (t.norm_eps == EPS, f"norm_eps={t.norm_eps:g} must be {EPS:g}"),
        (
            t.rope_theta == THETA,
            f"rope_theta={t.rope_theta:g} must be {THETA:g}",
        ),
        (t.t_scale == ALL_NOISE, f"t_scale={t.t_scale:g} must be {ALL_NOISE:g}"),
        (
            t.n_refiner_layers <= MOST_REFINER_LAYERS,
            f"n_refiner_layers={t.n_refiner_layers} must be at most {MOST_REFINER_LAYERS}",
        ),
    ]


KEYS = ConfigKeys(
    keys=(
        Key("all_patch_size", default=(2,), type=list[PositiveInt], write=lambda _: [2]),
        Key("all_f_patch_size", default=(1,), type=list[PositiveInt], write=lambda _: [1]),
        Key("in_channels", "in_channels", 16),
        Key("dim", "hidden_size", 3840),
        Key("n_layers", "num_layers", 30),
        Key("n_refiner_layers", "num_refiner_layers", 2),
        Key("n_heads", "num_attention_heads", 30),
        # Not used in Diffusers: each query head has its own key head.
        Key("n_kv_heads", default=30, write=lambda m: m.num_attention_heads),
        Key("norm_eps", default=EPS),
        Key("qk_norm", default=True),
        Key("cap_feat_dim", "crossattn_emb_size", 2560),
        Key("siglip_feat_dim", type=PositiveInt | None),
        Key("rope_theta", default=THETA),
        Key("t_scale", default=ALL_NOISE),
        Key("axes_dims", "rope_axes", (32, 48, 48)),
        Key("axes_lens", default=(1024, 512, 512), write=lambda _: AXES_LENS),
    ),
    kept=(
        OwnKey("patch_temporal", PositiveInt, published=lambda _: 1),
        OwnKey("patch_spatial", PositiveInt, published=lambda _: 2),
    ),
    rules=_rules,
)


def _inexpressible(model: ZImageConfig) -> list[str]:
    found = []
    if model.mlp_ratio != MLP_RATIO:
        found.append(
            f"model.mlp_ratio={model.mlp_ratio:g} cannot be exported: Diffusers' {CLASS} has 8/3"
            f" ({MLP_RATIO}). Train with that value to export"
        )
    if model.patch_spatial != 2:
        found.append(
            f"model.patch_spatial={model.patch_spatial} cannot be exported: Diffusers' {CLASS} has"
            " 2. Train with that value to export"
        )
    return found


def _run_network(network: nn.Module, sample: LatentSample, level: float, _: ZImageConfig) -> Tensor:
    import torch

    told = torch.tensor([1 - level / ALL_NOISE])
    (made,) = network([sample.latent_CFHW], told, [sample.text_LE], return_dict=False)
    return -made[0]


FORM = DiffusersForm(
    class_name=CLASS,
    table=_TABLE,
    keys=KEYS,
    inexpressible=_inexpressible,
    original_names=(ZIMAGE_NAMES,),
    comfyui_names=lambda _: ZIMAGE_NAMES,
    pipelines={"ZImagePipeline": Pipeline()},
    refused_pipelines={
        "ZImageOmniPipeline": "layers for SigLIP's features of pictures besides the target",
    },
    largest_latent=lambda model: (1, *model.largest_latent[1:]),
    run_network=_run_network,
)

"""FLUX.3 klein in Diffusers, `Flux3Transformer2DModel`: tensor names, config.json, calls."""

# D model width, F width of the MLP, W width of a sinusoidal embedding, E text width
# C numbers in a token

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dit.config import TextPadding
from dit.config.checks import Rule
from dit.models.diffusers.arrangements import GatesThenValues, SwappedHalves
from dit.models.diffusers.form import ConfigKeys, DiffusersForm, Key, OwnKey, Pipeline, same
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows, without_biases
from dit.models.flux3.family import EARLY, HEAD, SHIFT, STACKS, Flux3Config
from dit.models.joint.diffusers import double_single_keys, kept_patch, patch_rules
from dit.models.joint.family import EVEN_STEPS
from dit.models.joint.linear_names import FLUX, embedding_names
from dit.models.joint.linear_names import HEAD as LAST
from dit.models.joint.tensor_names import LATENTS, attention_rows, stream_sizes, two_linears
from dit.models.layer_spec import LEVEL_WAVES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "Flux3Transformer2DModel"
PATCH = 1
"""Side of a patch in latent pixels: 1, because the codec already moves patches to channels."""
_BLOCKS = {
    "text_blocks": "txt_mode_blocks",
    "image_blocks": "mode_blocks.image",
    "reference_blocks": "mode_blocks.image_cond",
    "blocks": "single_transformer_blocks",
}
_MODULATIONS = {"image": "image", "reference": "image_cond", "text": "txt"}
_TOLD, _TOLD_END = "timestep_embedder", "target_timestep_embedder"


def _layer_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    """Lines of the name table for the layers of one stack."""
    inner: Any = {"split": TensorSplit.COLUMN, "arrangement": GatesThenValues()}
    out: Any = {"split": TensorSplit.ROW}
    return (
        *attention_rows(f"{ours}.attention", f"{theirs}.attn", LATENTS),
        *linear_rows(f"{ours}.mlp.linear_fc1", f"{theirs}.ff.linear_in", "2F", "D", **inner),
        *linear_rows(f"{ours}.mlp.linear_fc2", f"{theirs}.ff.linear_out", "D", "F", **out),
    )


def _modulation_rows() -> list[Row]:
    """Lines of the name table for the linears that compute modulations, also for the head's."""
    column: Any = {"split": TensorSplit.COLUMN}
    rows: list[Row] = []
    for kind, theirs in _MODULATIONS.items():
        for stage in ("early", "single"):
            linear = f"{stage}_stream_modulations.{theirs}.linear"
            rows += linear_rows(f"{kind}_modulations.{stage}", linear, f"{EARLY}D", "D", **column)
    swapped: Any = {"arrangement": SwappedHalves(), **column}
    name = "image_modulations.out"
    return [*rows, *linear_rows(name, "norm_out.linear", f"{HEAD}D", "D", **swapped)]


_TABLE = NameTable(
    rows=without_biases(
        (
            *linear_rows("patches", "x_embedders.image", "D", "C"),
            *linear_rows("reference_patches", "x_embedders.image_cond", "D", "C"),
            *linear_rows("text_embedder", "context_embedder", "D", "E"),
            *two_linears("told", _TOLD, "W"),
            *two_linears("step_end", _TOLD_END, "W", exists=lambda model: model.flow_map),
            *_modulation_rows(),
            *(row for o, t in _BLOCKS.items() for row in _layer_rows(f"{o}.layers.*", f"{t}.*")),
            *linear_rows("proj_out", "proj_out", "C", "D"),
        )
    ),
    sizes=lambda model: stream_sizes(model) | {"2F": 2 * model.ffn_hidden_size},
    layers=lambda m: {name: m.num_layers for name in STACKS} | {"blocks": m.num_single_layers},
)

_LINEARS = {
    **{f"{letter}_proj": f"attn.to_{letter}" for letter in "qkv"},
    "attn_out": "attn.to_out.0",
    **{f"mlp_{end}": f"ff.linear_{end}" for end in ("in", "out")},
}
_ORIGINAL = {
    "txt_mode_blocks.*": "txt_mode_blocks.*",
    "content_mode_blocks.image.*": "mode_blocks.image.*",
    "content_mode_blocks.image_cond.*": "mode_blocks.image_cond.*",
    "single_blocks.*": "single_transformer_blocks.*",
}
FLUX3_NAMES = {
    **{f"emb_in.{mode}": f"x_embedders.{mode}" for mode in ("image", "image_cond")},
    "txt_in": "context_embedder",
    **embedding_names(FLUX, {"time_in": _TOLD, "ref_time_in": _TOLD_END}),
    **{
        f"{stage}_stream_modulations.{mode}.lin": f"{stage}_stream_modulations.{mode}.linear"
        for stage in ("early", "single")
        for mode in _MODULATIONS.values()
    },
    **{
        f"{block}.{name}": f"{theirs}.{linear}"
        for block, theirs in _ORIGINAL.items()
        for name, linear in _LINEARS.items()
    },
    **{name.replace("layer.", "layer.image."): theirs for name, theirs in LAST.items()},
}
"""Diffusers' names of linears by their names in the original project and in ComfyUI."""

_FIXED = {"timestep_channels": LEVEL_WAVES, "rope_theta": 10_000, "eps": 1e-6}


def _rules(t: Any) -> list[Rule]:
    told = ((name, getattr(t, name), value) for name, value in _FIXED.items())
    return [
        *((one == value, f"{name}={one:g} must be {value:g}") for name, one, value in told),
        (
            t.cond_in_channels == t.in_channels,
            f"cond_in_channels={t.cond_in_channels} must be equal to in_channels={t.in_channels}",
        ),
    ]


KEYS = ConfigKeys(
    keys=(
        *double_single_keys(
            **{"channels": 128, "layers": (5, 28), "heads": 24, "text": 20480},
            axes=(32, 32, 32, 32),
            outputs=False,
            patch=False,
        ),
        Key("cond_in_channels", default=128, write=lambda m: m.patch_features),
        *(Key(name, default=value) for name, value in _FIXED.items()),
        same("mlp_ratio", 3.0),
        same("flow_map", False),
    ),
    kept=(
        *kept_patch(PATCH),
        OwnKey("text_pad_to", TextPadding | None, published=lambda _: TextPadding.STORED),
        OwnKey("reference_latents", int, published=lambda _: 0, read=int, may_be_told=True),
    ),
    rules=_rules,
)


_LEVELS: dict[str, Any] = {**EVEN_STEPS, "flow_shift": SHIFT}


def _pipeline(*, flow_map: bool) -> Pipeline:
    def rules(model: Flux3Config) -> list[Rule]:
        told = f"model.flow_map={str(model.flow_map).lower()}"
        what = "the timestep" if flow_map else "no timestep"
        return [
            *patch_rules(model, rows=PATCH),
            (
                model.flow_map == flow_map,
                f"{told}, but the pipeline passes {what} at the end of a step to the network",
            ),
        ]

    # The pipeline's folders hold no scheduler: the pipeline creates one with a constant shift.
    return Pipeline(
        rules=rules,
        modular=True,
        objective=_LEVELS,
        sampling=lambda scheduler: _LEVELS | {"flow_shift": scheduler.get("shift", SHIFT)},
    )


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, model: Flux3Config
) -> Tensor:
    """The output [C, F, H, W] of Diffusers' network for one sample at the timestep `level`.

    A network with `flow_map` gets the same timestep as the end of the step, as in training.
    """
    import torch

    from dit.models.positions import HalfStepPositions, TimeOffsetPositions, patchify, unpatchify

    patch = (model.patch_temporal, model.patch_spatial)
    cut = partial(patchify, patch_temporal=patch[0], patch_spatial=patch[1])
    (grid, own_TC), *others = (cut(x) for x in (sample.latent_CFHW, *sample.others.values()))
    place = HalfStepPositions()((grid, *(one for one, _ in others)), fps=sample.fps)
    told = torch.tensor([level / 1000])
    inputs: dict[str, Any] = {"target_timestep": told} if model.flow_map else {}
    if others:
        inputs["image_cond_hidden_states"] = torch.cat([rows for _, rows in others])[None]
        inputs["image_cond_ids"] = place[len(own_TC) :]
    (made,) = network(
        hidden_states=own_TC[None],
        encoder_hidden_states=sample.text_LE[None],
        timestep=told,
        img_ids=place[: len(own_TC)],
        txt_ids=TimeOffsetPositions.of_text([len(sample.text_LE)]),
        return_dict=False,
        **inputs,
    )
    return unpatchify(made[0], grid, *patch)


FORM = DiffusersForm(
    class_name=CLASS,
    table=_TABLE,
    keys=KEYS,
    original_names=(FLUX3_NAMES,),
    comfyui_names=lambda _: FLUX3_NAMES,
    pipelines={
        "Flux3ModularPipeline": _pipeline(flow_map=False),
        "Flux3DistilledModularPipeline": _pipeline(flow_map=True),
    },
    run_network=_run_network,
)

"""LongCat-Image in Diffusers, `LongCatImageTransformer2DModel`: names, config.json, calls."""

# D model width, W width of the sinusoidal timestep embedding, C numbers in a token, L text tokens

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dit.config import TextPadding
from dit.config.checks import Rule
from dit.models.diffusers.form import ConfigKeys, DiffusersForm, Key, OwnKey, Pipeline
from dit.models.diffusers.names import NameTable
from dit.models.family import REFERENCE
from dit.models.joint.diffusers import (
    KEPT_PATCH,
    double_single_keys,
    mlp_misfit,
    patch_rules,
    run_on_sample,
    whole_patches,
)
from dit.models.joint.tensor_names import (
    EMBEDDER_ROWS,
    HEAD_ROWS,
    stack_layers,
    stack_rows,
    stream_sizes,
    two_linears,
)
from dit.models.longcat.family import LongCatConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import Grid, LatentSample

CLASS = "LongCatImageTransformer2DModel"
_KEYS = double_single_keys(
    channels=64, layers=(19, 38), heads=24, text=3584, axes=(16, 56, 56), outputs=False
)
KEYS = ConfigKeys(
    keys=(*_KEYS, Key("pooled_projection_dim", default=3584)),  # not used
    kept=(
        *KEPT_PATCH,
        OwnKey("text_pad_to", TextPadding | None, published=lambda _: TextPadding.STORED),
        OwnKey("reference_latents", int, published=lambda _: 0, read=int, may_be_told=True),
    ),
    rules=lambda t: [whole_patches(t)],
)


@dataclass(frozen=True, slots=True)
class _BehindText:
    """The position rule of Diffusers' pipelines for pictures after a text of `rows` tokens."""

    rows: int
    axes: int = 3

    def __call__(self, grids: tuple[Grid, ...], *, fps: float) -> Tensor:
        import torch

        from dit.models.positions import GridPositions

        return GridPositions()(grids, fps=fps) + torch.tensor([1, self.rows, self.rows])


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, model: LongCatConfig
) -> Tensor:
    import torch

    rows = len(sample.text_LE)
    told: dict[str, Any] = {"txt_ids": torch.arange(rows)[:, None] * torch.tensor([0, 1, 1])}
    pictures = (one for name, one in sample.others.items() if name.startswith(REFERENCE))
    told |= {"positions": _BehindText(rows), "references": (*pictures,)}
    return run_on_sample(network, sample, level, model, **told)


def _rules(model: LongCatConfig, *, shows: bool) -> list[Rule]:
    count, name = model.reference_latents, "a reference" if shows else "no reference"
    return [
        *patch_rules(model),
        ((count > 0) == shows, f"model.reference_latents={count}, but the pipeline passes {name}"),
    ]


FORM = DiffusersForm(
    class_name=CLASS,
    table=NameTable(
        rows=(
            *EMBEDDER_ROWS,
            *two_linears("told.level", "time_embed.timestep_embedder", "W"),
            *stack_rows(),
            *HEAD_ROWS,
        ),
        sizes=stream_sizes,
        layers=stack_layers,
    ),
    keys=KEYS,
    inexpressible=lambda model: mlp_misfit(model, CLASS),
    pipelines={
        "LongCatImagePipeline": Pipeline(rules=lambda model: _rules(model, shows=False)),
        "LongCatImageEditPipeline": Pipeline(
            settings={"reference_latents": 1}, rules=lambda model: _rules(model, shows=True)
        ),
    },
    run_network=_run_network,
)

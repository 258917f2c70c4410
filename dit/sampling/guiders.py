"""Guidance by a guider, an object that some pipelines of Diffusers have.

The pipeline of HunyuanVideo 1.5 has a `ClassifierFreeGuidance`, whose settings are in
guider/guider_config.json. The pipeline of HunyuanImage 2.1 has an `AdaptiveProjectedMixGuidance`,
and another guider in ocr_guider/ for prompts with words in quotation marks.
"""

# C patch features, T packed tokens, N samples

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.config.validation import MOST_GUIDANCE
from dit.parsing import parse_json
from dit.sampling.ode_solvers import Network, StepLevels
from dit.system_errors import reason

FOLDER, OF_QUOTED, CONFIG = "guider", "ocr_guider", "guider_config.json"
QUOTED = "text_2"
"""Text input that only prompts with words in quotation marks have."""
GUIDERS = (
    "ClassifierFreeGuidance",
    "ClassifierFreeZeroStarGuidance",
    "AdaptiveProjectedGuidance",
    "AdaptiveProjectedMixGuidance",
    "TangentialClassifierFreeGuidance",
    "MagnitudeAwareGuidance",
)
"""Diffusers' guiders that combine two predictions element by element; others change the layers of
Diffusers' network, or need rows and columns."""


def open_guider(folder: str | Path, *, scale: float | None = None) -> Any:
    """Opens a guider; `folder` is its folder, or that of a pipeline that has a guider.

    `scale` replaces the guidance scale in its configuration, unless it is None.

    Raises:
        ValueError: there is no guider, its configuration is wrong, or it needs more than two
            predictions.
    """
    from diffusers import guiders

    place = Path(folder)
    file = place / CONFIG if (place / CONFIG).is_file() else place / FOLDER / CONFIG
    try:
        content = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--guider {folder}: {file} cannot be read ({reason(error)}); give the folder of a"
            " guider, or of a pipeline that has one"
        ) from error
    name = content.get("_class_name") if isinstance(content, dict) else None
    if name not in GUIDERS:
        raise ValueError(
            f"--guider {folder}: {file} is of class {name!r}, which is not supported"
            f" ({', '.join(GUIDERS)} are); leave --guider out, and use --guidance"
        )
    for key, value in content.items():
        if isinstance(value, int | float) and not abs(value) <= MOST_GUIDANCE:
            raise ValueError(
                f"--guider {folder}: {file} has {key}={value}, which is beyond {MOST_GUIDANCE};"
                " correct the number in this file"
            )
    told = {} if scale is None else {"guidance_scale": scale}
    try:
        return getattr(guiders, name).from_config(content, **told)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"--guider {folder}: {file} is not a valid configuration of {name} ({error}); give"
            " another folder, or use --guidance"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Guiders:
    """The guiders of a pipeline: the default one, and one for prompts with quoted words."""

    usual: Any
    of_quoted: Any
    """Guider for prompts with words in quotation marks; None: the default one."""

    def of(self, batch: PackedBatch) -> list[Any]:
        """A new guider for each sample of the pack.

        Each sample has its own, because some guiders keep a running mean.
        """
        of_quoted = self.usual if self.of_quoted is None else self.of_quoted
        starts = batch.text_offsets.get(QUOTED, (0,) * (batch.num_samples + 1))
        rows = (last - first for first, last in pairwise(starts))
        return [(of_quoted if count else self.usual).new() for count in rows]


def open_guiders(folder: str | Path, *, scale: float | None = None) -> Guiders:
    """Opens all guiders of the pipeline in `folder`.

    `scale` replaces the guidance scales in their configurations, unless it is None.

    Raises:
        ValueError: there is no guider, or one whose configuration is wrong or that needs more than
            two predictions.
    """
    other = Path(folder) / OF_QUOTED
    return Guiders(
        usual=open_guider(folder, scale=scale),
        of_quoted=open_guider(other, scale=scale) if other.is_dir() else None,
    )


def guided_by(
    guiders: Guiders,
    conditional: Network,
    unconditional: Network,
    batch: PackedBatch,
    at: StepLevels,
) -> Network:
    """A network whose two predictions are combined by guiders, for each sample separately.

    `at` has the timesteps of all steps: a guider gets the index of the step, and decides whether
    `unconditional` is called.
    """
    each = guiders.of(batch)
    networks = (conditional, unconditional)

    def network(input_TC: Tensor, level_N: Tensor) -> Tensor:
        step = at.number(level_N)
        found: dict[int, Tensor] = {}

        def predicted(index: int) -> Tensor:
            if index not in found:
                found[index] = networks[index](input_TC, level_N).float()
            return found[index]

        for one, level in zip(each, level_N, strict=True):
            one.set_state(step=step, num_inference_steps=at.steps, timestep=level)
        states = [one.prepare_inputs({"network": (0, 1)}) for one in each]
        return _combined(each, states, predicted, batch)

    return network


def _combined(
    guiders: list[Any],
    states: list[list[Any]],
    predicted: Callable[[int], Tensor],
    batch: PackedBatch,
) -> Tensor:
    """Combines the predictions of all samples, [T, C]; tokens without a target are zero.

    `predicted` computes the prediction 0 (conditional) or 1 (unconditional).
    """
    made_TC = torch.zeros_like(predicted(0))
    for index, (guider, of_sample) in enumerate(zip(guiders, states, strict=True)):
        first = batch.starts[index]
        rows = slice(
            first + batch.latent_tokens[index] - batch.loss_tokens[index],
            first + batch.latent_tokens[index],
        )
        for state in of_sample:
            state.noise_pred = predicted(state.network)[None, rows]
        made_TC[rows] = guider(of_sample)[0][0]
    return made_TC

"""A Diffusers folder as the start of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.transformer.module import MegatronModule

from dit.config import RunConfig
from dit.convert.diffusers_checkpoint import DiffusersFolder
from dit.convert.load_hf.settings import HfWeights, objective_notes, open_hf_weights
from dit.convert.load_hf.weights import fill_from_diffusers
from dit.models.layers.adaptable import is_adapter
from dit.train.checkpoint.starting_point import Origin, read_origin, starting_point


@dataclass(frozen=True, slots=True)
class HfStart:
    """Fills the network of a new run, and says what with (`train_state.InitialWeights`)."""

    weights: HfWeights
    of_objective: tuple[str, ...] = ()
    """Lines for the start of the log."""

    def fill(self, model: MegatronModule, config: RunConfig) -> None:  # noqa: ARG002
        """Collective; raises as `fill_from_diffusers`."""
        groups: Any = model.groups
        fill_from_diffusers(model, self.weights, copies=groups.dp_cp, left_out=is_adapter)

    def origin(self) -> Origin:
        """Collective; raises as `read_origin`."""
        return origin_of(self.weights.source)

    @property
    def notes(self) -> list[str]:
        """Lines for the start of the log."""
        source = self.weights.source
        kind, count = source.config.get("_class_name"), len(source.headers)
        return [
            f"starting at step 0 from the weights of {source.path} ({kind}, {count} tensors)",
            *(f"other than {source.path} says: {note}" for note in self.weights.notes),
            *self.of_objective,
        ]


def origin_of(source: DiffusersFolder) -> Origin:
    """Digests of config.json and all files with weights; all ranks call it, and share the reading.

    Raises:
        CheckpointError: a file cannot be read.
    """
    return read_origin(source.path, source.files)


def weights_of_folder(folder: Path, config: RunConfig) -> HfStart:
    """The frozen weights of adapters.

    Raises:
        ConvertError: the folder is damaged, or does not fit the network.
    """
    return HfStart(open_hf_weights(folder, config.model))


def hf_start(config: RunConfig) -> HfStart | None:
    """What a run with `checkpoint.load_hf` starts from; None where it goes on from a checkpoint.

    Raises:
        ConvertError: the folder does not fit the run.
        CheckpointError: the run has a checkpoint of its own that cannot be told.
    """
    folder = config.checkpoint.load_hf
    if folder is None or starting_point(config) is not None:
        return None
    weights = open_hf_weights(Path(folder), config.model)
    notes = objective_notes(weights.source, config.model, config.objective)
    return HfStart(weights, tuple(notes))

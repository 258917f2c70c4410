"""What a checkpoint and its run say of themselves."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dit.config import RunConfig
from dit.config.inlining import value_of
from dit.train.checkpoint.paths import STEP, saved_card

CARD_FILE, SAMPLES = "README.md", "samples"
_SETTINGS = (
    *("optimizer.lr", "optimizer.weight_decay", "train.global_batch_size"),
    *("dataset.task_encoder_seq_length", "objective.name", "objective.flow_shift"),
    *("model.name", "model.precision", "rng.seed"),
)
_PICTURES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What a person who finds an exported folder should know of the run."""

    data: str | None = None
    licence: str | None = None  # of the data
    steps: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)  # dotted key -> value
    pictures: tuple[Path, ...] = ()  # copied into samples/

    @classmethod
    def of(cls, checkpoint: Path, config: RunConfig, *more: str) -> RunFacts:
        """What is known of a checkpoint; `more` are keys of settings that come first.

        Raises:
            CheckpointError: the card of its data is damaged.
        """
        step = checkpoint.name.removeprefix(STEP)
        shown = ((key, _value(config, key)) for key in (*more, *_SETTINGS))
        return cls(
            data=_data(config),
            licence=(saved_card(checkpoint) or {}).get("license") or None,
            steps=int(step) if checkpoint.name.startswith(STEP) and step.isdigit() else None,
            settings={key: _shown(value) for key, value in shown if value is not None},
            pictures=_pictures(checkpoint),
        )

    def lines(self) -> list[str]:
        """Items of a list."""
        known = {"Data": self.data, "Licence of the data": self.licence}
        known["Steps"] = None if self.steps is None else f"{self.steps:,}"
        return [f"- {name}: {value}" for name, value in known.items() if value is not None]

    def sections(self) -> list[str]:
        """What stands at the end of a card."""
        parts = []
        if self.pictures:
            shown = (f"![{one.stem}]({SAMPLES}/{one.name})" for one in self.pictures)
            parts += ["## Samples\n", "\n".join(shown) + "\n"]
        if self.settings:
            rows = "\n".join(f"| `{key}` | `{value}` |" for key, value in self.settings.items())
            parts += ["## Settings\n", f"| key | value |\n|---|---|\n{rows}\n"]
        return parts


def write_card(folder: Path, text: str, facts: RunFacts) -> None:
    """Writes the page and the pictures that it shows."""
    for picture in facts.pictures:
        (folder / SAMPLES).mkdir(exist_ok=True)
        shutil.copy(picture, folder / SAMPLES / picture.name)
    (folder / CARD_FILE).write_text(text)


def _value(config: Any, key: str) -> Any:
    group, _, name = key.partition(".")
    try:
        return value_of(getattr(config, group), name)
    except AttributeError:  # a key of another objective
        return None


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _data(config: RunConfig) -> str | None:
    """The name of the dataset's folder; its place on this machine is nobody else's business."""
    places = [config.dataset.path, *(entry.path for entry in config.dataset.blend or ())]
    return ", ".join(Path(place).name for place in places if place) or None


def _pictures(checkpoint: Path) -> tuple[Path, ...]:
    """Those that the last validation of the run generated at this step."""
    samples = checkpoint.parent.parent / "validation_generation" / checkpoint.name
    found = (one for one in sorted(samples.glob("*")) if one.suffix in (".png", ".mp4"))
    return tuple(found)[:_PICTURES]

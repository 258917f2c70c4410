"""Facts about a checkpoint and its run, and the cards (README.md) that state them."""

from __future__ import annotations

import html
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from dit.checkpoint_paths import saved_card, step_of
from dit.config import (
    DatasetConfig,
    EdmConfig,
    FlowConfig,
    ObjectiveConfig,
    ObjectiveName,
    RunConfig,
)
from dit.convert.cards.code import HUB
from dit.parsing import parse_json

CARD_FILE, SAMPLES, LISTING = "README.md", "samples", "samples.json"
_SETTINGS = (
    *("optimizer.lr", "optimizer.weight_decay", "train.global_batch_size"),
    *("dataset.task_encoder_seq_length", "model.name", "model.precision", "rng.seed"),
)
_PICTURES, _IN_A_ROW = 8, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownPicture:
    """A picture or clip that the run generated, with its prompt, for a card."""

    file: Path
    prompt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Facts about a run for the card of an export: data, licence, steps, settings, pictures."""

    data: str | None = None
    licence: str | None = None  # of the data
    steps: int | None = None
    sampling: str | None = None  # how a student generates
    settings: Mapping[str, str] = field(default_factory=dict)  # dotted key -> value
    pictures: tuple[ShownPicture, ...] = ()

    @classmethod
    def of(cls, checkpoint: Path, config: RunConfig, *more: str) -> RunFacts:
        """Facts about `checkpoint` and its run; settings with the keys `more` come first.

        Raises:
            CheckpointError: the card of its data is damaged.
        """
        shown = ((key, attrgetter(key)(config)) for key in (*more, *_SETTINGS))
        return cls(
            data=_data(config.dataset),
            licence=(saved_card(checkpoint) or {}).get("license") or None,
            steps=step_of(checkpoint),
            sampling=config.student_sampling,
            settings={
                **{key: _shown(value) for key, value in shown if value is not None},
                **_objective(config.objective),
            },
            pictures=_pictures(checkpoint),
        )

    @property
    def prompt(self) -> str:
        """The first prompt of the pictures, or "a prompt" without any; for the example code."""
        return next((one.prompt for one in self.pictures if one.prompt), "a prompt")

    def lines(self) -> list[str]:
        """The facts, as items of a Markdown list."""
        known = {"Data": self.data, "Licence of the data": self.licence}
        known["Steps"] = None if self.steps is None else f"{self.steps:,}"
        known["Distilled for"] = self.sampling
        return [f"- {name}: {value}" for name, value in known.items() if value is not None]

    def sections(self) -> list[str]:
        """The sections at the end of a card: pictures and settings."""
        parts = []
        if self.pictures:
            parts += ["## Samples\n", _table(self.pictures) + "\n"]
        if self.settings:
            rows = "\n".join(f"| `{key}` | `{value}` |" for key, value in self.settings.items())
            parts += ["## Settings\n", f"| key | value |\n|---|---|\n{rows}\n"]
        return parts


def write_card(folder: Path, text: str, facts: RunFacts) -> None:
    """Writes the card `text` and the pictures that it shows into `folder`."""
    for picture in facts.pictures:
        (folder / SAMPLES).mkdir(exist_ok=True)
        shutil.copy(picture.file, folder / SAMPLES / picture.file.name)
    (folder / CARD_FILE).write_text(text)


def _table(pictures: tuple[ShownPicture, ...]) -> str:
    """A Markdown table of `pictures`, with the prompts below each row."""
    rows = []
    for first in range(0, len(pictures), _IN_A_ROW):
        row = pictures[first : first + _IN_A_ROW]
        files = (f"{SAMPLES}/{one.file.name}" for one in row)
        rows.append(
            [f"[clip]({name})" if name.endswith(".mp4") else f"![]({name})" for name in files]
        )
        rows.append([_in_a_cell(one.prompt) for one in row])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _in_a_cell(text: str) -> str:
    """`text` on one line, escaped for a cell of a Markdown table."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|") or "(no prompt)"


def _objective(objective: ObjectiveConfig) -> dict[str, str]:
    """Maps dotted keys to texts, for the table of settings.

    The key `objective` has a summary; others are keys of the objective that differ from their
    defaults.
    """
    kinds = {str(ObjectiveName.EDM): EdmConfig, str(ObjectiveName.FLOW): FlowConfig}
    kind = kinds.get(objective.name)  # None: one that others registered
    changed = {
        f"objective.{one.name}": _shown(value)
        for one in (fields(kind) if kind is not None else ())
        if (value := getattr(objective, one.name)) != one.default and value is not None
    }
    return {"objective": objective.summary, **changed}


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _data(dataset: DatasetConfig) -> str | None:
    """Names of the dataset folders; None for mock data. Their paths are not to be published."""
    places = [dataset.path, *(entry.path for entry in dataset.blend or ())]
    return ", ".join(Path(place).name for place in places if place) or None


def _pictures(checkpoint: Path) -> tuple[ShownPicture, ...]:
    """The first 8 pictures that validation generated at the step of `checkpoint`; empty if none."""
    samples = checkpoint.parent.parent / "validation_generation" / checkpoint.name
    try:
        entries = parse_json((samples / LISTING).read_bytes())
        named = [(samples / str(one["file"]), str(one["prompt"])) for one in entries]
    except (OSError, ValueError, LookupError, TypeError):  # none were drawn, or somebody's files
        return ()
    there = (pair for pair in named if pair[0].parent == samples and pair[0].is_file())
    return tuple(ShownPicture(file=f, prompt=p) for f, p in islice(there, _PICTURES))


_OWN_LOADING = """\
`python recipes/generate_dit.py --checkpoint_path BASE --lora FOLDER` of megatron-dit generates with
the adapters, and `lora.init_from=FOLDER` trains them further.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraCard:
    """Content of the card of exported adapters."""

    network: str  # class of Diffusers' network, or `model.family` of one that it lacks
    base: str | None = None  # name on the hub of the weights that the adapter is for
    base_digest: str | None = None
    code: str = ""  # that makes a picture with the base and the adapters; none without Diffusers
    run: RunFacts = field(default_factory=RunFacts)

    def text(self, *, comfyui: bool) -> str:
        """The card as Markdown; with `comfyui` the folder has a file for ComfyUI."""
        parts = [self._front(), "# LoRA\n", self._facts(), "## Use\n", self._loading(comfyui)]
        parts += self.run.sections()
        return "\n".join(parts)

    def _front(self) -> str:
        base = ""
        if self.base is not None and HUB.fullmatch(self.base):
            base = f"base_model: {json.dumps(self.base)}\n"
        library = "diffusers" if self.code else "megatron-dit"
        return f"---\nlibrary_name: {library}\n{base}tags:\n- lora\n- peft\n---\n"

    def _facts(self) -> str:
        base = self.base or f"a `{self.network}`"
        digest = f" (SHA-256 of its weights: `{self.base_digest}`)" if self.base_digest else ""
        return "\n".join([f"- Base: {base}{digest}", *self.run.lines()]) + "\n"

    def _loading(self, comfyui: bool) -> str:
        if not self.code:
            return _OWN_LOADING
        lines = [
            f"```python\n{self.code}\n```\n",
            "`peft.PeftModel.from_pretrained(transformer, FOLDER)` reads the folder as well.",
        ]
        if comfyui:
            lines.append("For ComfyUI, copy `comfyui/lora.safetensors` into `models/loras`.")
        return "\n".join(lines) + "\n"


_USE = """## What it may be used for

_To be filled in: what the licences of the data and of the weights that it started from permit._
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkCard:
    """Content of the card of an exported network."""

    network: str  # class of Diffusers' network
    weights: str  # kind of the checkpoint's weights: model or ema
    numbers: int  # of the network
    beyond: str | None = None  # what Diffusers' network leaves out
    code: str  # that makes a picture with the folder
    run: RunFacts = field(default_factory=RunFacts)

    def text(self) -> str:
        facts = [
            f"- Network: `{self.network}`, {self.numbers:,} parameters",
            f"- Weights: {self.weights}",
            *([f"- Beyond Diffusers: {self.beyond}."] if self.beyond else []),
            *self.run.lines(),
        ]
        return "\n".join(
            [
                "---\nlibrary_name: diffusers\n---\n",
                "# Diffusion transformer\n",
                "\n".join(facts) + "\n",
                _USE,
                "## Use\n",
                f"```python\n{self.code}\n```\n",
                *self.run.sections(),
            ]
        )

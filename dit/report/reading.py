"""Reads a run folder as a `RunRecord`."""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dit.config import RunConfig
from dit.config_loading import ConfigError, default_config, read_config, to_yaml
from dit.parsing import parse_json, parse_yaml
from dit.progress import first_of
from dit.system_errors import reason

Points = list[tuple[float, float]]  # step and value

_SHOWN = 5
_MOST = 1e100
"""Largest value; larger ones are reduced to it, so that ratios and squares stay finite."""
_LAST_STEP = 2**53


class ReportError(ValueError):
    """The error that a report cannot be made or written; its message names a remedy."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What could be read of a run folder, and messages about files that could not."""

    name: str  # the shortest end of its path that differs from the other runs
    folder: Path
    lines: list[dict[str, Any]]  # of metrics.jsonl, by step; step 0 is before the first update
    settings: dict[str, Any]  # dotted key -> value; empty where there is no config.yaml
    config: RunConfig | None  # `settings` as a configuration; None if this version cannot read it
    starts: list[dict[str, Any]]  # lines of environment.jsonl: machine and software of each start
    card: dict[str, Any] | None  # dataset_card.json
    unreadable: list[str]  # messages about damaged parts that are left out

    @cached_property
    def series(self) -> dict[str, Points]:
        """The points of each metric, by its name: (step, value) where the value is finite."""
        return series_of(self.lines)

    def points(self, name: str) -> Points:
        """The points (step, value) of the metric `name` where its value is finite."""
        return self.series.get(name, [])

    def points_of_updates(self, name: str) -> Points:
        """The points (step, value) of the metric `name` at steps that change the weights.

        These are steps with a finite loss.
        """
        updates = self._updates
        return [point for point in self.points(name) if point[0] in updates]

    @cached_property
    def _updates(self) -> set[float]:
        return {step for step, _ in self.points("loss")}


def series_of(lines: Sequence[dict[str, Any]]) -> dict[str, Points]:
    """The points (step, value) of each metric in `lines` with a finite value, by its name."""
    # One pass for all metrics: a long run has 50,000 lines, and a page asks for 50 metrics.
    found: defaultdict[str, Points] = defaultdict(list)
    for line in lines:
        for name, given in line.items():
            if (value := finite(given)) is not None:
                found[name].append((line["step"], value))
    return dict(found)


def finite(value: Any) -> float | None:
    """A metric as a float for charts and sums; None for NaN, infinity, booleans, other types.

    Numbers beyond 1e100 in size are reduced to it, and those below 1e-100 become 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not -_MOST <= value <= _MOST:  # NaN comes here, too
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return _MOST if value > 0 else -_MOST  # an integer may be too large for a float
    return float(value) if abs(value) >= 1 / _MOST else 0.0


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Reads the runs in `folders`.

    Raises:
        ReportError: a folder is not a run folder or is given twice, or nothing in it can be read.
    """
    found, missing = read_begun(folders)
    if missing:
        raise missing[0]
    return found


def read_begun(folders: Sequence[Path]) -> tuple[list[RunRecord], list[ReportError]]:
    """Reads the runs in `folders` that have begun.

    The second value has the errors of folders without such a run.

    Raises:
        ReportError: a folder is given twice.
    """
    found, missing = list[RunRecord](), list[ReportError]()
    names = _names([folder.resolve() for folder in folders])
    for folder, name in zip(folders, names, strict=True):
        try:
            found.append(_read(folder, name))
        except ReportError as error:
            missing.append(error)
    return found, missing


def _names(folders: list[Path]) -> list[str]:
    """Names for the runs: the shortest ends of their paths that all differ.

    Raises:
        ReportError: two paths are the same folder.
    """
    folder, times = Counter(folders).most_common(1)[0]
    if times > 1:
        raise ReportError(f"{folder} is named {times} times; name each run once")
    deepest = max(len(folder.parts) for folder in folders)
    ends = (["/".join(f.parts[-n:]) for f in folders] for n in range(1, deepest + 1))
    return next(names for names in ends if len(set(names)) == len(names))


def _read(folder: Path, name: str) -> RunRecord:
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        what = "has no metrics.jsonl" if folder.exists() else "does not exist"
        run = next((one for one in folder.parents if (one / metrics.name).is_file()), None)
        raise ReportError(
            f"{folder} {what}; name the folder of a training run, "
            + ("its checkpoint.save" if run is None else f"here {run}")
        )
    lines, damaged = _json_lines(metrics)
    if not any(line["step"] > 0 for line in lines):
        why = f": {'; '.join(damaged)}" if damaged else ""
        raise ReportError(
            f"{metrics} has no finished step{why}; let the run continue, or name another"
        )
    starts, more = _json_lines(folder / "environment.jsonl")
    settings, config, wrong = _settings(folder / "config.yaml")
    card, lost = _card(folder, settings)
    return RunRecord(
        name=name,
        folder=folder,
        # If a step has two lines, as in files that were joined, the later one counts.
        lines=[line for _, line in sorted({line["step"]: line for line in lines}.items())],
        settings=settings,
        config=config,
        starts=starts,
        card=card,
        unreadable=[*damaged, *more, *wrong, *lost],
    )


def _json_lines(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects with a step in a file of JSON lines, and messages about other lines.

    Both are empty if there is no file.

    Raises:
        ReportError: the file cannot be read.
    """
    if not file.is_file():
        return [], []
    found, wrong = [], []
    # Only a line feed ends a line: U+2028 is legal inside one.
    *lines, rest = _text(file).split("\n")
    for number, text in enumerate([*lines, rest], start=1):
        if not text:
            continue
        try:
            found.append(_line(text))
        except ValueError as error:
            # A last line without line feed is being written, or its writer was killed.
            if number <= len(lines) or not found:
                wrong.append(f"line {number} ({_one_line(error)})")
    if not wrong:
        return found, []
    return found, [f"{file} is damaged, these lines are left out: {first_of(wrong, _SHOWN)}"]


def _line(text: str) -> dict[str, Any]:
    """Parses one line of a file of metrics.

    Raises:
        ValueError: the line is not an object with a step.
    """
    line = parse_json(text)
    if not isinstance(line, dict) or "step" not in line:
        raise ValueError("it is not an object with a 'step'")
    step = line["step"]
    if type(step) is not int or not 0 <= step <= _LAST_STEP:
        raise ValueError(f"step={str(step)[:40]!r} is not a whole number from 0 to 2^53")
    # Names that are the same string in all lines take half of the memory.
    return {sys.intern(name): value for name, value in line.items()}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReportError(
            f"{file} cannot be read ({reason(error)}); make it readable, or name another run"
        ) from error


def _settings(file: Path) -> tuple[dict[str, Any], RunConfig | None, list[str]]:
    """(settings of a run by dotted key, its configuration, messages), from its config.yaml.

    The configuration is None if the file is missing, damaged or of another version.
    """
    if not file.is_file():
        return (
            {},
            None,
            [f"{file} is missing, so settings are not shown; copy it from a checkpoint of the run"],
        )
    try:
        settings = dict(flat(parse_yaml(_text(file)).values))
    except (ValueError, AttributeError) as error:  # no YAML, or no mapping
        return (
            {},
            None,
            [
                f"{file} is damaged, so settings are not shown ({_one_line(error)}); copy it from a"
                " checkpoint of the run"
            ],
        )
    try:
        return settings, read_config(file), []
    except ConfigError as error:
        return (
            settings,
            None,
            [
                f"{file} is of another version ({_one_line(error)}); use that version to see all"
                " tables"
            ],
        )


def default_settings() -> dict[str, Any]:
    """The default settings of a run, by dotted key."""
    return dict(flat(OmegaConf.to_container(OmegaConf.create(to_yaml(default_config())))))


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the (dotted key, value) pairs of the nested mapping `tree`."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _card(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """(dataset card, messages), from the newest checkpoint, or else from the dataset folder.

    The card is None if there is none, or if it is damaged.
    """
    path = settings.get("dataset.path")
    places = [
        *sorted((folder / "checkpoints").glob("step_*/dataset_card.json"), reverse=True)[:1],
        Path(path if isinstance(path, str) else "") / "dataset_card.json",
    ]
    for file in places:
        if file.is_file():
            try:
                card = parse_json(_text(file))
            except ValueError as error:
                return None, [
                    f"{file} is damaged and not shown ({_one_line(error)}); copy it from the"
                    " dataset's folder"
                ]
            if isinstance(card, dict):
                return card, []
            return None, [
                f"{file} is damaged and not shown, because it holds no JSON object; copy it from"
                " the dataset's folder"
            ]
    return None, []


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

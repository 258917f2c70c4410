"""Converts another tool's settings to this project's, each with a note.

1. recognise  the file has a key of a tool, and no key that only this project has
2. block      a group whose presence has a meaning is read before its keys
3. read       each key of the tool becomes this project's keys, or a reason why it is not used
4. pass       other keys stay as they are; the loader checks them
5. fit        optional keys that the run cannot have are dropped, as the other tool does
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from dit.config import ModelConfig, Problems, RunConfig
from dit.config_loading.schema import hints
from dit.config_loading.settings import Setting, named, shown
from dit.foreign.automodel import AUTOMODEL, BLOCKS
from dit.foreign.dfm import DFM, SHARED
from dit.foreign.diffusion_pipe import DIFFUSION_PIPE
from dit.foreign.entry import Foreign
from dit.foreign.fastvideo import FASTVIDEO
from dit.models.registry import families

FOREIGN: dict[str, Foreign] = {**DIFFUSION_PIPE, **FASTVIDEO, **AUTOMODEL, **DFM}
# Two of the tools use this key, one for the name of a scheduler, the other for a group of keys.
FOREIGN["lr_scheduler"] = FASTVIDEO["lr_scheduler"]
_GROUPS = {
    ".".join(parts[:length])
    for parts in (key.split(".") for key in FOREIGN)
    for length in range(1, len(parts))
}
_PAGE = "docs/coming_from.md names ours"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A setting in another tool's file, and this project's settings that replace it."""

    theirs: Setting
    ours: tuple[Setting, ...]
    entry: Foreign | None = None  # None: the key passes as it is, without a note
    left_out: str = ""  # why the optional settings of this line are not used

    def without(self, key: str, why: str) -> Line:
        """This line without its settings, if the optional `key` is one of them; else unchanged.

        `why` says why the run cannot have the key.
        """
        if key not in self.optional:
            return self
        left_out = f"{key} is not set: {why}"
        return replace(self, ours=(), left_out=left_out)

    @property
    def optional(self) -> list[str]:
        """Keys that the line sets only if the run can have them."""
        is_optional = self.entry is not None and self.entry.optional
        return [one.key for one in self.ours] if is_optional else []

    @property
    def note(self) -> str:
        """Log line: the tool's key, its file and line, and this project's keys as which it is read.

        Empty if the key passes as it is.
        """
        if self.entry is None:
            return ""
        said = (self.entry.note(self.theirs.value), self.left_out)
        notes = "; ".join(text for text in said if text)
        as_ours = ", ".join(f"{one.key}={shown(one.value)}" for one in self.ours)
        read = f"read as {as_ours}" if as_ours else "read, not used"
        return f"{named(self.theirs)}: {read}{f': {notes}' if notes else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A file of another tool, converted to this project's keys, with notes."""

    lines: tuple[Line, ...]
    problems: tuple[str, ...]  # values that ask for something unsupported

    @property
    def settings(self) -> list[Setting]:
        return [one for line in self.lines for one in line.ours]

    @property
    def notes(self) -> list[str]:
        """The lines for the log; notes that concern the whole run come first."""
        lines = [line for line in self.lines if line.entry is not None]
        lines.sort(key=lambda line: not (line.entry and line.entry.grave))
        return [line.note for line in lines]


def is_theirs(settings: Sequence[Setting]) -> bool:
    """Whether a file is another tool's: it has a key of that tool, and none only of this project.

    AutoModel, FastVideo and diffusion-pipe have groups that this project lacks. DFM has the same
    groups, so its keys decide.
    """
    ours = [one.key for one in settings if _is_ours_alone(one.key)]
    return not ours and any(_entry(one.key) or one.key in _GROUPS for one in settings)


def translate(settings: Sequence[Setting]) -> Translation:
    """Converts the settings of a whole file of another tool to this project's keys.

    Unsupported values raise no error, but are listed in `problems` of the result.
    """
    problems: list[str] = []
    values = {one.key: one.value for one in settings}
    kept = [*_blocks(settings), *settings]
    # A group with nothing in it says nothing.
    kept = [one for one in kept if one.value not in (None, {}) or one.key not in _GROUPS]
    lines = []
    for theirs in kept:
        entry, ours = _entry(theirs.key), (theirs,)
        if entry is not None:
            try:
                ours = _read(theirs, entry, values)
            except ValueError as error:
                problems.append(f"{named(theirs)}: {error}")
                continue
        lines.append(Line(theirs=theirs, ours=ours, entry=entry))
    return Translation(lines=tuple(lines), problems=tuple(problems))


def fitted(
    translation: Translation, load: Callable[[list[Setting]], RunConfig]
) -> tuple[RunConfig, Translation]:
    """(run, translation): the run that `load` makes of the converted settings.

    If it fails, optional settings are left out one by one, where that removes a problem. The
    returned translation is without them, and its notes say why.

    Raises:
        Problems: all problems of file and run.
    """

    def attempt(lines: tuple[Line, ...]) -> tuple[RunConfig | None, list[str]]:
        try:
            return load([one for line in lines for one in line.ours]), []
        except Problems as error:
            return None, error.problems

    lines = translation.lines
    config, problems = attempt(lines)
    for key in sorted({key for line in lines for key in line.optional}):
        if config is not None:
            break
        # The problems that vanish without the key are the reasons for leaving it out.
        tried = tuple(line.without(key, "") for line in lines)
        found, left = attempt(tried)
        if len(left) < len(problems):
            why = "; ".join(problem for problem in problems if problem not in left)
            lines = tuple(line.without(key, why) for line in lines)
            config, problems = found, left
    if config is None or translation.problems:
        raise Problems([*translation.problems, *problems])
    return config, replace(translation, lines=lines)


def advice(setting: Setting) -> str:
    """Advice on what to write for another tool's setting; empty if no tool has its key."""
    if _entry(setting.key) is None:
        return _PAGE if setting.key in _GROUPS else ""
    if setting.value is None:
        return _PAGE
    found = translate([setting])
    if found.problems:
        return found.problems[0].removeprefix(f"{named(setting)}: ")
    line = found.lines[-1]  # behind that of its group
    note = line.entry.note(setting.value) if line.entry else ""
    if not line.ours:
        return f"leave it out{f': {note}' if note else ''}"
    words = " ".join(f"{one.key}={shown(one.value)}" for one in line.ours)
    return f"write {words}{f' ({note})' if note else ''}"


def _read(theirs: Setting, entry: Foreign, values: dict[str, object]) -> tuple[Setting, ...]:
    """This project's settings for `theirs`, a setting of another tool; null sets nothing.

    Raises:
        ValueError: the value asks for something unsupported.
    """
    if not entry.takes(theirs.value):
        raise ValueError(
            f"{theirs.value!r:.100} is not supported: {entry.note(theirs.value)}; {_remedy(entry)}"
        )
    if theirs.value is None or entry.reading is None:
        return ()
    read = entry.reading(theirs.value, values)
    origin = f"{theirs.key}, {theirs.origin}"
    return tuple(replace(theirs, key=key, value=one, origin=origin) for key, one in read.items())


def _remedy(entry: Foreign) -> str:
    """What to write for a key whose value is not supported."""
    given = " or ".join(shown(one) for one in entry.accepts or () if one)
    return f"give {given}, or leave it out" if given else "leave it out"


def _entry(key: str) -> Foreign | None:
    """The entry for another tool's `key`; None if no tool has it."""
    exact = FOREIGN.get(key)
    if exact is not None:
        return exact
    return next((entry for name, entry in FOREIGN.items() if fnmatchcase(key, name)), None)


def _blocks(settings: Sequence[Setting]) -> Iterator[Setting]:
    """A setting for each group of BLOCKS in the file, whose value is all of its keys."""
    for group in BLOCKS:
        inside = [one for one in settings if one.key.startswith(f"{group}.")]
        if inside:
            value = {one.key.removeprefix(f"{group}."): one.value for one in inside}
            yield replace(inside[0], key=group, value=value)


def _is_ours_alone(key: str) -> bool:
    """Whether `key` is this project's and no other tool's; keys of `model` may be of any family."""
    group, _, name = key.partition(".")
    name = name.partition(".")[0]
    if name in SHARED.get(group, ()) or _entry(key) is not None:
        return False
    return any(name in _names(one.config, group) for one in families())


def _names(model: type[ModelConfig], group: str) -> dict[str, object]:
    kind = model if group == "model" else hints(RunConfig).get(group)
    return hints(kind) if kind is not None else {}

"""Effect of a changed key on a run that resumes from its checkpoint.

The annotation of a field states its class; to type checkers it is plain `float`:

    lr: Live[float] = 1e-4

Keys that a family adds to `ModelConfig` are refused unless they name another class. No change is
ignored in silence. It takes effect or is an error; if only the start of a run reads the key, the
log says that the change has no effect.
"""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from functools import cache
from inspect import get_annotations
from typing import Annotated, Any, TypeVar, get_type_hints


class Resume(StrEnum):
    """Classes of configuration keys; `RESUMED` says what each means."""

    LIVE = "live"
    REFUSED = "refused"
    OF_INPUTS = "refused with the inputs"
    OF_DATA = "refused with the data"
    AT_START = "start only"


RESUMED = {
    Resume.LIVE: "it takes effect.",
    Resume.REFUSED: "it is an error, which names the key: what the checkpoint stores would get"
    " another meaning.",
    Resume.OF_INPUTS: "it is an error, which names the key: samples would get other inputs."
    " The weights stay valid: with `checkpoint.finetune=true`, and against the base of adapters, it"
    " takes effect.",
    Resume.OF_DATA: "it is an error, which names the key: the position in the data would get"
    " another meaning. With `checkpoint.load_data_position=false` the data begin anew, and it takes"
    " effect.",
    Resume.AT_START: "it has no effect, which the log says: only the start of a run reads it.",
}
"""Class of a key -> effect of a changed value on a resume, for `docs/configuration.md`."""

OF_MODEL = (Resume.REFUSED, Resume.OF_INPUTS)
"""Classes of the keys that determine shape and meaning of weights and inputs."""

T = TypeVar("T")
Live = Annotated[T, Resume.LIVE]
Refused = Annotated[T, Resume.REFUSED]
OfInputs = Annotated[T, Resume.OF_INPUTS]
OfData = Annotated[T, Resume.OF_DATA]
AtStart = Annotated[T, Resume.AT_START]


@cache
def resume_classes(group: Any) -> dict[str, Resume]:
    """Key -> its resume class, for the fields of the dataclass `group` that state one.

    A field that a subclass redeclares keeps its class unless the subclass states another.
    """
    found: dict[str, Resume] = {}
    for base in reversed(group.__mro__):
        types = get_type_hints(base, include_extras=True)
        for name in get_annotations(base):
            marks = [m for m in getattr(types[name], "__metadata__", ()) if isinstance(m, Resume)]
            found |= {name: marks[0]} if marks else {}
    return found


def resume_class(group: Any, key: str) -> Resume:
    """The resume class of `key` in the dataclass `group`; REFUSED if a family's key states none."""
    return resume_classes(group).get(key, Resume.REFUSED)


def weight_settings(model: Any) -> dict[str, Any]:
    """Settings of `model` that determine shape and meaning of weights and inputs, by key."""
    return {
        f.name: getattr(model, f.name)
        for f in fields(model)
        if resume_class(type(model), f.name) in OF_MODEL
    }

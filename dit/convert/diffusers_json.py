"""The JSON files of a Diffusers folder as checked dataclasses, with Diffusers' own defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from dit.convert.errors import ConvertError
from dit.parsing import parse_json

OUR_KEY = "_megatron_dit"
"""Key of an export's config.json for settings that Diffusers lacks; Diffusers ignores such keys."""

_Checked = TypeVar("_Checked", bound=BaseModel)


class PrivateKeys(BaseModel):
    """The keys of a config.json that begin with an underscore, as far as they are used here."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    use_default_values: list[str] = Field(default=[], alias="_use_default_values")
    ours: dict[str, Any] | None = Field(default=None, alias=OUR_KEY)


class WeightIndex(BaseModel):
    """The index of weights in several files."""

    model_config = ConfigDict(strict=True, extra="ignore")

    weight_map: dict[str, str]


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes JSON as Diffusers does."""
    file.write_text(json.dumps(content, indent=2) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """Reads a file with a JSON object.

    Raises:
        ConvertError: the file cannot be read or holds something else.
    """
    try:
        if not file.is_file():  # reading a pipe would wait for ever
            raise ValueError("it is no file")
        content = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConvertError(f"{file} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise ConvertError(f"{file} holds no JSON object")
    return content


def checked_json(
    kind: type[_Checked], content: dict[str, Any], *, place: object, within: str = ""
) -> _Checked:
    """Validates `content`, which is below the key `within` of the file `place`, as a `kind`.

    Raises:
        ConvertError: names every key that is unknown or has a value of another type.
    """
    try:
        return kind.model_validate_json(
            json.dumps(content)
        )  # from JSON, so that a list is accepted for a tuple
    except ValidationError as error:
        wrong = "; ".join(_in_words(one, within) for one in error.errors(include_url=False))
        raise ConvertError(f"{place} cannot be imported: {wrong}") from error


def _in_words(error: ErrorDetails, within: str) -> str:
    key = ".".join(map(str, filter(None, (within, *error["loc"]))))
    if error["type"] == "extra_forbidden":
        return f"unknown key {key}, of another model or a newer version"
    if error["type"] == "missing":
        return f"{key} is missing"
    shown = json.dumps(error["input"], default=str)
    said = error["msg"].removeprefix("Input ")
    return f"{key}={shown if len(shown) <= 60 else f'{shown[:57]}...'} {said}"

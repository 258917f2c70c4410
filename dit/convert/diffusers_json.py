"""What the JSON files of a Diffusers folder may hold, key by key, with Diffusers' own defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError
from pydantic_core import ErrorDetails

from dit.convert.errors import ConvertError
from dit.json_text import parse_json

OUR_KEY = "_megatron_dit"
"""Where an export keeps what Diffusers has no place for; Diffusers ignores private keys."""

_Checked = TypeVar("_Checked", bound=BaseModel)


class _Strict(BaseModel):
    """Types as they stand in JSON: 1.0 is no integer, 1 no boolean, NaN no number."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class PrivateKeys(BaseModel):
    """The keys of a config.json that begin with an underscore, as far as they count here."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    use_default_values: list[str] = Field(default=[], alias="_use_default_values")
    ours: dict[str, Any] | None = Field(default=None, alias=OUR_KEY)


class _Scheduler(_Strict):
    """A scheduler has many options of its own; those that training shares are checked."""

    model_config = ConfigDict(extra="ignore")


class EdmScheduler(_Scheduler):
    """scheduler_config.json of `EDMEulerScheduler`."""

    sigma_min: PositiveFloat = 0.002
    sigma_max: PositiveFloat = 80.0
    sigma_data: PositiveFloat = 0.5
    rho: PositiveFloat = 7.0
    prediction_type: Literal["epsilon"] = "epsilon"


class FlowScheduler(_Scheduler):
    """scheduler_config.json of `FlowMatchEulerDiscreteScheduler`."""

    shift: PositiveFloat = 1.0
    num_train_timesteps: PositiveInt = 1000
    use_karras_sigmas: bool | None = False
    use_dynamic_shifting: bool | None = False
    invert_sigmas: bool | None = False


class WeightIndex(BaseModel):
    """The index of weights that lie in several files."""

    model_config = ConfigDict(strict=True, extra="ignore")

    weight_map: dict[str, str]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConvertError: the file holds none.
    """
    try:
        if not file.is_file():  # a pipe would be waited for
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
    """`content` as a `kind`; `place` is the file that it is from, below its key `within`.

    Raises:
        ConvertError: names every key that is unknown or has a value of another type.
    """
    try:
        return kind.model_validate_json(json.dumps(content))  # JSON's lists may be tuples
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

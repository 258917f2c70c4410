"""`Foreign`: how one key of another tool and its values are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Reading = Callable[[Any, Mapping[str, Any]], dict[str, Any]]
"""Function of a value, and of all keys of the file with their values, that returns this project's
keys with values; none if none is needed. It raises ValueError with a message for the user if the
value asks for something unsupported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """How a key of another tool is read as this project's keys, or why it is not used."""

    instead: str | Callable[[Any], str] = ""
    """Text for the user, or a function of the value that returns it: which key decides instead, or
    how its meaning differs."""
    accepts: tuple[Any, ...] | None = None  # the supported values; None means any value
    reading: Reading | None = None  # None: the key is not used
    optional: bool = (
        False  # whether the key is dropped, without an error, if the run cannot take it
    )
    grave: bool = False  # the run may train another network or method than the file asks for

    def takes(self, value: object) -> bool:
        """Whether `value` is supported; True is not the same as 1."""
        if self.accepts is None:
            return True
        return any(type(value) is type(one) and value == one for one in self.accepts)

    def note(self, value: object) -> str:
        """The text for the log about `value`."""
        return self.instead if isinstance(self.instead, str) else self.instead(value)


def unused_key(instead: str, *accepts: Any, grave: bool = False) -> Foreign:
    return Foreign(instead=instead, accepts=accepts or None, grave=grave)


def read_as(*keys: str, note: str = "") -> Foreign:
    """Entry whose value is passed unchanged to each of `keys`."""
    return read_by(lambda value: dict.fromkeys(keys, value), note)


def read_by(
    reading: Callable[[Any], dict[str, Any]], note: str = "", *, optional: bool = False
) -> Foreign:
    """Entry whose value the function `reading` converts to this project's keys."""
    return Foreign(reading=lambda value, _: reading(value), instead=note, optional=optional)


def read_together(
    reading: Callable[[Mapping[str, Any]], dict[str, Any]],
    note: str = "",
    *,
    fits: Callable[[Any], bool] = lambda _: True,
    expected: str = "",
) -> Foreign:
    """Entry for one of several keys, whose values `reading` converts together.

    A value for which `fits` is false is an error of its own key, "... is not `expected`". `reading`
    also gets such values of the other keys, and must treat them as unset.
    """

    def read(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        if not fits(value):
            raise ValueError(f"{value!r:.100} is not {expected}; correct it, or leave the key out")
        return reading(values)

    return Foreign(reading=read, instead=note)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def probability(key: str) -> Callable[[Any], dict[str, Any]]:
    """Function that reads a number from 0 to 1 as `key`."""

    def reading(value: Any) -> dict[str, Any]:
        if not is_number(value) or not 0 <= value <= 1:
            raise ValueError(
                f"{value!r:.100} is not a number from 0 to 1; correct it, or leave the key out"
            )
        return {key: value}

    return reading


def flow(key: str) -> Foreign:
    """Entry for a key of flow matching, which also sets objective.name=flow."""
    return read_by(lambda value: {"objective.name": "flow", key: value})


def betas(value: Any) -> dict[str, Any]:
    parts = value.split(",") if isinstance(value, str) else value
    try:
        first, second = (float(part) for part in parts)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{value!r:.100} is not two numbers; give two, such as [0.9, 0.999]"
        ) from None
    return {"optimizer.adam_beta1": first, "optimizer.adam_beta2": second}


def recompute(value: Any) -> dict[str, Any]:
    if value in ("full", "unsloth") or value is True:
        return {"model.recompute_granularity": "full"}
    if value in ("", "none") or value is False:
        return {"model.recompute_granularity": "none"}
    raise ValueError(
        f"{value!r:.100} is not supported; give true or false, or model.recompute_granularity"
        " instead"
    )


def going_on(value: Any) -> dict[str, Any]:
    """Keys for another tool's setting that resumes a run.

    Runs here resume from their own folder without a setting, or from a given checkpoint.
    """
    automatic = value in ("", "LATEST", "latest", "auto") or isinstance(value, bool)
    return {} if automatic else {"checkpoint.load": value}


def adapter_dtype(value: Any) -> dict[str, Any]:
    words = {"bfloat16": "bf16", "float32": "fp32"}
    name = str(value).removeprefix("torch.")
    if name not in words:
        raise ValueError(f"{value!r:.100} is not supported; give bfloat16 or float32")
    return {"lora.dtype": words[name]}


def first_of(key: str) -> Callable[[Any], dict[str, Any]]:
    """Function that reads a list of one value, or a plain value, as `key`."""

    def reading(value: Any) -> dict[str, Any]:
        if isinstance(value, list) and len(value) != 1:
            raise ValueError(f"{value!r:.100} has {len(value)} values; give one, for {key}")
        return {key: value[0] if isinstance(value, list) else value}

    return reading


def network_of(families: Mapping[str, str]) -> Foreign:
    """Entry whose value names a network: one of `families`, which maps it to a family."""

    def reading(value: Any) -> dict[str, Any]:
        if str(value) not in families:
            raise ValueError(
                f"{value!r:.100} names a network that this project lacks; leave it out, and set"
                " model.family, or checkpoint.load_hf to a Diffusers folder of weights"
            )
        return {"model.family": families[str(value)]}

    return replace(read_by(reading, NETWORK.note(None)), grave=True)


NETWORK = unused_key(
    "model.family and model.name say which network is trained, objective.name how; it begins with"
    " random weights, or with those of a Diffusers folder on this machine that checkpoint.load_hf"
    " names",
    grave=True,
)
PART = unused_key("it belongs to another network; model.* describes the one that is trained here")
CHOOSE_TARGETS = "lora.targets names the linears that get an adapter; no key excludes linears"
GOING_ON = "the same command continues the run; for a path set checkpoint.load"
STEPS = "set train.train_iters, or train.epochs: passes through the data"
PACKS = (
    "a micro-batch is one pack of dataset.task_encoder_seq_length tokens, and"
    " train.global_batch_size packs make a step"
)
BUCKETS = "there are no buckets: samples of all sizes share a pack"
CONVERT = (
    "shards are read here: `python -m data_prep convert FOLDER --output_dir NEW` writes them;"
    " then set dataset.path=NEW"
)
MACHINE = "the launcher and the machine decide"
SHARDED = "ddp.sharding says what data-parallel ranks share out: the optimizer, or weights as well"

"""How one key of another tool and its values are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dit.config import RunConfig

Reading = Callable[[Any], dict[str, Any]]
"""A value of another tool -> our keys with their values; empty where the value asks for nothing.

Raises ValueError with a message for the user where the value asks for something unsupported.
"""

JointReading = Callable[[Mapping[str, Any]], dict[str, Any]]
"""The same of all keys of the other tool with their values, where several are one of ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A key of another tool: read as our keys, or not used."""

    instead: str = ""  # for the user: which key of ours decides, or how its meaning differs
    accepts: tuple[Any, ...] | None = None  # the supported values; None means any value
    reading: Reading | None = None  # None: the key is not used
    joint: JointReading | None = None  # in the place of `reading`
    where_legal: bool = False  # not used, without an error, where this run cannot take it
    of_block: bool = False  # the key is a group, which says something beside each of its keys
    of_run: Callable[[Any, RunConfig], str] | None = None  # (value, the whole run) -> `instead`
    grave: bool = False  # this run trains another network or method than the file asks for
    refused: Callable[[Any, RunConfig], str] | None = None  # (value, the whole run) -> why it is

    def takes(self, value: object) -> bool:
        """Whether the value is supported; True is not 1."""
        if self.accepts is None:
            return True
        return any(type(value) is type(one) and value == one for one in self.accepts)


def unused_key(instead: str, *accepts: Any, grave: bool = False) -> Foreign:
    return Foreign(instead=instead, accepts=accepts or None, grave=grave)


def read_as(*keys: str, note: str = "") -> Foreign:
    """The unchanged value for one or several of our keys; null sets none of them."""
    return Foreign(reading=lambda value: dict.fromkeys(keys, value), instead=note)


def read_by(reading: Reading, note: str = "") -> Foreign:
    return Foreign(reading=reading, instead=note)


def read_where_legal(key: str, note: str) -> Foreign:
    """A probability, or not used where the network that is trained here does not take our key."""
    return Foreign(reading=probability(key), instead=note, where_legal=True)


def probability(key: str) -> Reading:
    """A number from 0 to 1."""

    def reading(value: Any) -> dict[str, Any]:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError("expected a number from 0 to 1")
        return {key: value}

    return reading


def flow(key: str) -> Foreign:
    """A key of flow matching; it also sets objective.name=flow."""
    return read_by(lambda value: {"objective.name": "flow", key: value})


def betas(value: Any) -> dict[str, Any]:
    parts = value.split(",") if isinstance(value, str) else value
    try:
        first, second = (float(part) for part in parts)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("expected two numbers, such as [0.9, 0.999]") from None
    return {"optimizer.adam_beta1": first, "optimizer.adam_beta2": second}


def recompute(value: Any) -> dict[str, Any]:
    if value in ("full", "unsloth") or value is True:
        return {"model.recompute_granularity": "full"}
    if value in ("", "none") or value is False:
        return {"model.recompute_granularity": "none"}
    raise ValueError("is not supported: use true, false, or model.recompute_granularity")


def going_on(value: Any) -> dict[str, Any]:
    """A run resumes from its own folder without being asked, or from a given checkpoint."""
    automatic = value in ("", "LATEST", "latest", "auto") or isinstance(value, bool)
    return {} if automatic else {"checkpoint.load": value}


def adapter_dtype(value: Any) -> dict[str, Any]:
    words = {"bfloat16": "bf16", "float32": "fp32"}
    name = str(value).removeprefix("torch.")
    if name not in words:
        raise ValueError("is not supported: lora.dtype is bf16 or fp32")
    return {"lora.dtype": words[name]}


def first_of(key: str) -> Reading:
    """The only element of a list, or a plain value."""

    def reading(value: Any) -> dict[str, Any]:
        if isinstance(value, list) and len(value) != 1:
            raise ValueError(f"has {len(value)} values, and {key} takes one")
        return {key: value[0] if isinstance(value, list) else value}

    return reading


def network_of(families: Mapping[str, str]) -> Foreign:
    """A key whose values name networks, each of one of our families."""

    def refused(value: Any, config: RunConfig) -> str:
        family = families.get(str(value))
        if family == config.model.family:
            return ""
        meant = f"names a network of model.family={family}" if family else "names none that is here"
        return (
            f"{meant}, and this run trains model.family={config.model.family}; set"
            " checkpoint.load_hf to its Diffusers folder, or model.family, or take the key out"
        )

    return replace(NETWORK, refused=refused)


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

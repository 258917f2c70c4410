"""peft's `LoraConfig` in files: rank and alpha of each module.

It is stored as adapter_config.json, or as the entry `lora_adapter_metadata` of Diffusers' files.

1. peft_config     a file's content, checked
2. config_content  the content of a file that this project writes
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from dit.lora.factors import FactorsByModule, LoraFileError

_Number = TypeVar("_Number", int, float)
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": (None, "LORA"),
    "bias": (None, "none"),
}
"""Keys of peft with the values that are supported; the keys of `_EMPTY` must be absent, null, false
or empty."""
_EMPTY = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "target_parameters",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
_MOST_TEXT, _MOST_LOOPS = 1000, 4


class PeftConfig(BaseModel):
    """The fields of peft's `LoraConfig` that decide what adapters compute."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    place: str  # where it stands, for messages
    r: PositiveInt = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, PositiveInt] = {}
    alpha_pattern: dict[str, float] = {}

    def rank(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def alpha(self, module: str) -> float:
        """The alpha of `module` with which alpha / r is the scale that peft applies.

        peft's scale is alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732).
        """
        alpha = _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha * math.sqrt(self.rank(module)) if self.use_rslora else alpha


def _by_pattern(patterns: Mapping[str, _Number], module: str, default: _Number) -> _Number:
    """The value of the first pattern that matches the end of `module`, else `default`."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def peft_config(content: Mapping[str, Any], *, place: object) -> PeftConfig:
    """The checked content of an adapter_config.json; `place` is its path, for messages.

    Raises:
        LoraFileError: names a key that is not supported or has a wrong value.
    """
    values = {key: value for key, value in content.items() if value is not None}
    try:
        config = PeftConfig.model_validate(values | {"place": str(place)})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise LoraFileError(
            f"{place}: {key}={first['input']!r:.60}: {first['msg']}; correct it, or save the"
            " adapter again"
        ) from error
    _check_method(values, place)
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        _check_pattern(pattern, place)
    return config


def _check_method(values: Mapping[str, Any], place: object) -> None:
    wrong = {k: v for k, allowed in _SUPPORTED.items() if (v := values.get(k)) not in allowed}
    wrong |= {key: values[key] for key in _EMPTY if values.get(key)}
    for key, value in wrong.items():
        raise LoraFileError(
            f"{place}: {key}={value!r:.60} is not supported, only plain LoRA of linears without"
            " biases is: merge the adapter into the base with peft, and import the whole model"
        )
    start = values.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise LoraFileError(
            f"{place}: init_lora_weights={start!r} changes the base's weights, too; let peft"
            " convert the adapter (save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _check_pattern(pattern: str, place: object) -> None:
    """Refuses patterns that are not regular expressions, or that could take exponential time."""
    loops = re.findall(r"(?<!\\)[*+{]", pattern)
    nested = re.search(r"(?<!\\)\)[*+{]", pattern)
    if nested or len(loops) > _MOST_LOOPS or len(pattern) > _MOST_TEXT:
        raise LoraFileError(
            f"{place}: the pattern {pattern!r:.60} of ranks or alphas could take too long to"
            " match; write the full names of the modules instead"
        )
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise LoraFileError(
            f"{place}: the pattern {pattern!r:.60} of ranks or alphas is not a regular expression"
            f" ({error}); correct it, or save the adapter again"
        ) from error


def config_content(factors: FactorsByModule, base: str | None) -> dict[str, Any]:
    """The content of adapter_config.json for `factors`: ranks by pattern, alpha as the rank.

    peft matches the ends of names, so `proj_out` would also match every `*.proj_out`. So patterns
    begin with `^`, and if a target has no dot, all targets are written as one regular expression.
    `base` is the base model's name on the hub.
    """
    ranks = {module: one.rank for module, one in factors.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {f"^{re.escape(module)}": r for module, r in ranks.items() if r != rank}
    targets: list[str] | str = list(factors)
    if any("." not in module for module in factors):
        targets = "|".join(map(re.escape, factors))
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "rank_pattern": others,
        "alpha_pattern": others,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }

"""What each key of a file of adapters is: which module, and which of its factors.

The same adapter is written as `transformer.blocks.0.attn1.to_q.lora_A.weight` by Diffusers, with
the prefix `base_model.model.` by peft, with `diffusion_model.` and the names of the original
project by ComfyUI and diffusion-pipe, and as `lora_unet_blocks_0_self_attn_q.lora_down.weight`
with an `.alpha` beside it by kohya's scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from dit.config import ModelConfig
from dit.convert.lora.factors import LoraFileError
from dit.convert.lora.original_names import OriginalNames


class Factor(StrEnum):
    """What a tensor is to its module."""

    DOWN = "lora_A"
    UP = "lora_B"
    ALPHA = "alpha"


@dataclass(frozen=True, slots=True)
class LoraKey:
    """One key of a file."""

    key: str
    module: str  # as Diffusers names it; with spaces, several that the file has as one
    written: str  # the module as the file names it, without prefix; peft's patterns are of these
    part: Factor


_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.")
_INNER = "net."  # of Cosmos' own checkpoints
_FLAT = ("lora_unet_", "lora_transformer_")
_PARTS = {
    "lora_A": Factor.DOWN,
    "lora_down": Factor.DOWN,
    "lora.down": Factor.DOWN,
    "lora_B": Factor.UP,
    "lora_up": Factor.UP,
    "lora.up": Factor.UP,
    # XLabs' modules end in lora themselves: processor.qkv_lora1.down.weight.
    "down": Factor.DOWN,
    "up": Factor.UP,
}
_XLABS = r"(?:(?<=_lora\.)|(?<=_lora[12]\.))(?:down|up)"
# peft's state_dict has the adapter's name in its keys, which its files leave out.
_FACTOR = re.compile(
    rf"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora[._]down|lora[._]up|{_XLABS})"
    r"(?:\.(?P<adapter>[A-Za-z0-9_-]+))?\.weight"
)
_ALPHA = re.compile(r"(?P<module>.+)\.(?:lora_)?alpha")
_MERGE = "merge it into the base in the tool that made it, and import the whole model"
_OTHER_NETWORKS = r"(?:base_model\.model\.)?(?:%s)"
_REFUSED = (
    (
        _OTHER_NETWORKS % r"lora_te|text_encoder|text_model|te\d?[._]|cond_stage_model|conditioner",
        "is of a text encoder, whose outputs the shards hold: no text encoder is run in training."
        " Take these keys out of the file",
    ),
    (
        _OTHER_NETWORKS % r"unet\.|transformer_\d+\.|text_conditioner|llm_adapter|connectors",
        "is of another network than the transformer: give a file of that one network",
    ),
    (r".*(?:lora_magnitude_vector|dora_scale)", f"is DoRA's, which is not supported: {_MERGE}"),
    (r".*lokr_", f"is LoKr's, which is not supported: {_MERGE}"),
    (r".*hada_", f"is LoHa's, which is not supported: {_MERGE}"),
    (r".*(?:b?oft_|vera_lambda|lora_embedding_)", f"is no factor of LoRA: {_MERGE}"),
    (r".*lora_mid", "is of a convolution, which is not supported"),
    (r".*(?:\.bias|\.diff_b|lora_bias)$", "is of a bias; only weights have adapters here"),
    (r".*\.diff$", "is a whole difference of weights, and no factor of LoRA"),
)


def parse_keys(
    names: Iterable[str], *, model: ModelConfig | None = None, place: object
) -> list[LoraKey]:
    """What each key of a file is; `model` is the network that it is for, where that is known.

    Raises:
        LoraFileError: names a key that is not read, with the reason.
    """
    names, adapters = list(names), set[str]()
    matches = [match for match in map(_FACTOR.fullmatch, names) if match is not None]
    written = dict.fromkeys(_without_prefix(match["module"]) for match in matches)
    original = OriginalNames((_flat_name(module) or module for module in written), model)
    found = [_parsed(name, original, adapters, place) for name in names]
    if len(adapters) > 1:
        raise LoraFileError(
            f"{place} holds several adapters ({', '.join(sorted(adapters))}); save each in a file"
            " of its own"
        )
    return found


def _parsed(key: str, original: OriginalNames, adapters: set[str], place: object) -> LoraKey:
    for pattern, reason in _REFUSED:
        if re.match(pattern, key):
            raise LoraFileError(f"{place}: {key} {reason}")
    match = _FACTOR.fullmatch(key)
    if match is not None:
        part = _PARTS[match["part"]]
        if match["adapter"]:
            adapters.add(match["adapter"])
    elif (match := _ALPHA.fullmatch(key)) is not None:
        part = Factor.ALPHA
    else:
        raise LoraFileError(
            f"{place}: {key} is no key of LoRA (lora_A and lora_B, lora_down and lora_up, or"
            " alpha, of a module); is it a file of adapters?"
        )
    written = _without_prefix(match["module"])
    return LoraKey(key, _module(match["module"], written, original, key, place), written, part)


def _without_prefix(module: str) -> str:
    for prefix in _PREFIXES:
        module = module.removeprefix(prefix)
    return module.removeprefix(_INNER)


def _flat_name(written: str) -> str | None:
    """A name that is written with underscores, without its prefix; None for other names."""
    return next((written.removeprefix(one) for one in _FLAT if written.startswith(one)), None)


def _module(stored: str, written: str, original: OriginalNames, key: str, place: object) -> str:
    flat = _flat_name(written)
    if flat is None:
        return original.dotted(written)
    module = original.flat(flat)
    if module is None:
        raise LoraFileError(
            f"{place}: {key}: {stored} is a linear of no network that is known here; this file is"
            " of another network, or convert it with the tools of its project"
        )
    return module

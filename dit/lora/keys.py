"""What each key of a file of adapters is: which module, and which of its factors.

The same adapter is written as `transformer.blocks.0.attn1.to_q.lora_A.weight` by Diffusers, with
the prefix `base_model.model.` by peft, with `diffusion_model.` and the names of the original
project by ComfyUI and diffusion-pipe, as `lora_unet_blocks_0_self_attn_q.lora_down.weight` with an
`.alpha` beside it by kohya's scripts, and with the prefix `lycoris_` by LyCORIS, which SimpleTuner
uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from dit.config import ModelConfig
from dit.lora.factors import LoraFileError
from dit.lora.original_names import OriginalNames


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
_FLAT = ("lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_")
# Modules of XLabs and of Diffusers' former processors end in lora themselves:
# processor.qkv_lora1.down.weight, processor.to_q_lora.down.weight.
_OF_PROCESSOR = r"(?:(?<=_lora\.)|(?<=_lora[12]\.))(?:down|up)"
# peft's state_dict has the adapter's name in its keys, which its files leave out. Some scripts
# store the factor itself, and not a linear with a weight.
_FACTOR = re.compile(
    rf"(?P<module>.+)\.(?P<part>lora_[AB]|lora(?:[._]|_linear_layer\.)(?:down|up)|{_OF_PROCESSOR})"
    r"(?:(?:\.(?P<adapter>[A-Za-z0-9_-]+))?\.weight)?"
)
_ALPHA = re.compile(r"(?P<module>.+?)\.(?:lora(?:[._]|_linear_layer\.))?alpha")
_FORMER = re.compile(r"(?P<attention>.+)\.processor\.(?P<linear>\w+)_lora")
_MERGE = "merge it into the base in the tool that made it, and import the whole model"
_OTHER_NETWORKS = r"(?:base_model\.model\.)?(?:lycoris_)?(?:%s)"
_TEXT_ENCODER = re.compile(
    _OTHER_NETWORKS % r"lora_te|text_encoder|text_model|te\d?[._]|clip_[lg][._]|t5(?:xxl)?[._]"
    r"|cond_stage_model|conditioner"
)
_REFUSED = (
    (
        _TEXT_ENCODER,
        "is of a text encoder, whose outputs the shards hold: none is trained or changed here."
        " --ignore_text_encoder leaves such keys out (of a run: lora.ignore_text_encoder=true)",
    ),
    (
        _OTHER_NETWORKS % r"unet\.|transformer_\d+\.|text_conditioner|llm_adapter|connectors",
        "is of another network than the transformer: give a file of that one network",
    ),
    (r".*(?:lora_magnitude_vector|dora_scale)", f"is DoRA's, which is not supported: {_MERGE}"),
    (r".*lokr_", f"is LoKr's, which is not supported: {_MERGE}"),
    (r".*hada_", f"is LoHa's, which is not supported: {_MERGE}"),
    (r".*\.(?:[ab][12]\.weight|on_input)$", f"is of GLoRA or (IA)3, no factor of LoRA: {_MERGE}"),
    (r".*\.[wb]_norm$", f"is of a norm; only linears have adapters here: {_MERGE}"),
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


def is_of_text_encoder(key: str) -> bool:
    """Whether a key is of a text encoder, which files of several networks hold beside the rest."""
    return _TEXT_ENCODER.match(key) is not None


def _parsed(key: str, original: OriginalNames, adapters: set[str], place: object) -> LoraKey:
    for pattern, reason in _REFUSED:
        if re.match(pattern, key):
            raise LoraFileError(f"{place}: {key} {reason}")
    match = _FACTOR.fullmatch(key)
    if match is not None:
        is_down = match["part"].endswith(("_A", "down"))
        part = Factor.DOWN if is_down else Factor.UP
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
        name = original.dotted(written)
        former = _FORMER.fullmatch(name)
        if former is None:
            return name
        linear = {"to_out": "to_out.0"}.get(former["linear"], former["linear"])
        return f"{former['attention']}.{linear}"
    module = original.flat(flat)
    if module is None:
        raise LoraFileError(
            f"{place}: {key}: {stored} is a linear of no network that is known here; this file is"
            " of another network, or convert it with the tools of its project"
        )
    return module

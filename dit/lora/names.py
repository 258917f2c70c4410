"""Keys of adapter files: module, in Diffusers' names, and role (A, B, alpha).

1. parse_keys         module and role of each key of a file
2. tables_of          tables from module names in original projects to Diffusers' names
3. in_original_names  adapters by the module names of an original project

The same adapter is written as `transformer.blocks.0.attn1.to_q.lora_A.weight` by Diffusers, with
the prefix `base_model.model.` by peft, with `diffusion_model.` and the names of the original
project by ComfyUI and diffusion-pipe, as `lora_unet_blocks_0_self_attn_q.lora_down.weight` with an
`.alpha` beside it by kohya's scripts, and with the prefix `lycoris_` by LyCORIS, which SimpleTuner
uses.

A family lists the names of its original projects (`DiffusersForm.original_names`); `*` stands for
the number of a block. If an original project joins several of Diffusers' linears in one, their
names are listed with spaces between them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from dit.config import ModelConfig
from dit.lora.factors import FactorsByModule, LoraFactors, LoraFileError, side_by_side
from dit.models.diffusers.form import Companion
from dit.models.registry import diffusers_form, families


class Factor(StrEnum):
    """The role of a tensor in an adapter: A, B or alpha."""

    DOWN = "lora_A"
    UP = "lora_B"
    ALPHA = "alpha"


@dataclass(frozen=True, slots=True)
class LoraKey:
    """A parsed key of an adapter file: its module in Diffusers, and its role."""

    key: str
    module: str  # Diffusers' name; several names, with spaces, if the file joins these modules
    written: str  # the file's name of the module, without prefix; peft's patterns match this name
    part: Factor


_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.")
_PREFIXES += ("conditional_transformer.",)  # of two transformers; the other one gets no captions
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
_ANOTHER = "is of another network than the transformer"
_REFUSED = (
    (
        _TEXT_ENCODER,
        "belongs to a text encoder, whose outputs the shards hold: none is trained or changed"
        " here. Leave such keys out with --ignore_text_encoder (in a run:"
        " lora.ignore_text_encoder=true)",
    ),
    (
        _OTHER_NETWORKS % r"unet\.|transformer_\d+\.|connectors",
        f"{_ANOTHER}: give a file with the adapters of the transformer alone",
    ),
    (r".*(?:lora_magnitude_vector|dora_scale)", f"is DoRA's, which is not supported: {_MERGE}"),
    (r".*lokr_", f"is LoKr's, which is not supported: {_MERGE}"),
    (r".*hada_", f"is LoHa's, which is not supported: {_MERGE}"),
    (
        r".*\.(?:[ab][12]\.weight|on_input)$",
        f"is a factor of GLoRA or (IA)3, not of LoRA: {_MERGE}",
    ),
    (r".*\.[wb]_norm$", f"is of a norm; only linears have adapters here: {_MERGE}"),
    (r".*(?:b?oft_|vera_lambda|lora_embedding_)", f"is not a factor of LoRA: {_MERGE}"),
    (r".*lora_mid", f"is of a convolution, which is not supported: {_MERGE}"),
    (
        r".*(?:\.bias|\.diff_b|lora_bias)$",
        f"is of a bias; only weights have adapters here: {_MERGE}",
    ),
    (r".*\.diff$", f"is a whole difference of weights, not a factor of LoRA: {_MERGE}"),
)


def parse_keys(
    names: Iterable[str], *, model: ModelConfig | None = None, place: object
) -> list[LoraKey]:
    """Module and role of each key of an adapter file.

    `model` is the network for which the file is, if that is known. Messages call the file `place`.

    Raises:
        LoraFileError: names a key that cannot be read, with the reason.
    """
    names, adapters = list(names), set[str]()
    matches = [match for match in map(_FACTOR.fullmatch, names) if match is not None]
    written = dict.fromkeys(_without_prefix(match["module"]) for match in matches)
    tables = tables_of([_flat_name(module) or module for module in written], model)
    found = [_parsed(name, tables, adapters, place) for name in names]
    for one in found:
        second = companion_with(one.module)
        form = None if model is None or second is None else diffusers_form(model)
        if second is None or (model and form and form.companion_of(model)):
            continue
        remedy = "give a file without such keys"
        if form is None or form.companion is not None:
            setting = f"model.{second.field}={second.value}"
            remedy = (
                f"set {setting}, which makes that network a part of the model (with --base-path,"
                " give a checkpoint that `python -m dit.convert import` made with this setting),"
                f" or {remedy}"
            )
        raise LoraFileError(f"{place}: {one.key} {_ANOTHER}: {remedy}")
    if len(adapters) > 1:
        raise LoraFileError(
            f"{place} holds several adapters ({', '.join(sorted(adapters))}); save each in a file"
            " of its own"
        )
    return found


def companion_with(module: str) -> Companion | None:
    """The companion network that `module` belongs to; None for the transformer."""
    forms = (family.diffusers() for family in families() if family.diffusers is not None)
    every = (form.companion for form in forms if form.companion is not None)
    return next((one for one in every if module.startswith(f"{one.folder}.")), None)


def is_of_text_encoder(key: str) -> bool:
    """Whether `key`, of a file for several networks, belongs to a text encoder."""
    return _TEXT_ENCODER.match(key) is not None


def _parsed(key: str, tables: list[_Names], adapters: set[str], place: object) -> LoraKey:
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
            f"{place}: {key} is not a key of LoRA (such as lora_A and lora_B, lora_down and"
            " lora_up, or alpha, of a module); give a file of LoRA adapters"
        )
    written = _without_prefix(match["module"])
    module = _module(written, tables)
    if module is None:
        raise LoraFileError(
            f"{place}: {key}: {match['module']} is not a linear of any supported network; give"
            " adapters of a supported network, or convert the file with the tools of its project"
        )
    return LoraKey(key, module, written, part)


def _without_prefix(module: str) -> str:
    for prefix in _PREFIXES:
        module = module.removeprefix(prefix)
    return module.removeprefix(_INNER)


def _flat_name(written: str) -> str | None:
    """`written` without the prefix of kohya's scripts, which use underscores; None without it."""
    return next((written.removeprefix(one) for one in _FLAT if written.startswith(one)), None)


def _module(written: str, tables: list[_Names]) -> str | None:
    """Diffusers' name of the module `written` (several names with spaces, if it joins them).

    An unknown name is returned unchanged, or as None if it has the underscores of kohya's scripts.
    """
    if (flat := _flat_name(written)) is not None:
        return next(filter(None, (_translated(flat, names.flat) for names in tables)), None)
    name = next(filter(None, (_translated(written, names.dotted) for names in tables)), written)
    if (former := _FORMER.fullmatch(name)) is None:
        return name
    linear = {"to_out": "to_out.0"}.get(former["linear"], former["linear"])
    return f"{former['attention']}.{linear}"


SWAPPED = "~"
"""Suffix of modulations with only shift and scale, which Diffusers has in the order scale,
shift."""


def tables_of(modules: Sequence[str], model: ModelConfig | None) -> list[_Names]:
    """Name tables of all families, in the order in which to look up `modules`.

    Projects may share a name for linears that Diffusers names differently (`time_in` of all Hunyuan
    models). The family of `model` comes first, then the one that knows most of the modules.
    """
    found: list[tuple[bool, int, _Names]] = []
    for family in families():
        if family.diffusers is not None:
            names = _Names.of(family.diffusers().original_names)
            own = model is not None and family.name == model.family
            found.append((own, names.knows(modules), names))
    return [names for *_, names in sorted(found, key=lambda one: one[:2], reverse=True)]


class _Names(NamedTuple):
    """The name tables of one family: `dotted` and `flat`.

    The original projects, ComfyUI and diffusion-pipe write names with dots, kohya's scripts with
    underscores for dots.
    """

    dotted: _Table
    flat: _Table

    @classmethod
    def of(cls, tables: Sequence[Mapping[str, str]]) -> _Names:
        dotted = [pair for table in tables for pair in table.items()]
        # Some scripts write Diffusers' own names with underscores.
        own = [ours for _, names in dotted for ours in names.removesuffix(SWAPPED).split()]
        flat = {
            name.replace(".", "_"): ours for name, ours in (*zip(own, own, strict=True), *dotted)
        }
        return cls(_compiled(dotted), _compiled(flat.items()))

    def knows(self, modules: Sequence[str]) -> int:
        """How many of `modules` are in this family's tables."""
        tables = (self.dotted, self.flat)
        return sum(any(_translated(one, table) for table in tables) for one in modules)


def to_original(modules: Iterable[str], table: Mapping[str, str]) -> dict[str, str] | None:
    """Diffusers' name of each of `modules` -> original name; None if `table` lacks any."""
    back = _compiled((ours, theirs) for theirs, ours in table.items())
    found = {module: _translated(module, back) for module in modules}
    whole = {module: name for module, name in found.items() if name is not None}
    return whole if len(whole) == len(found) else None


def in_original_names(
    factors: FactorsByModule, table: Mapping[str, str]
) -> dict[str, LoraFactors] | None:
    """Adapters by the names of an original project; None if `table` lacks a name.

    Adapters of modules that the project joins in one linear are joined, with the sum of their
    ranks; None if one of these modules has no adapter.
    """
    alone = {k: ours.removesuffix(SWAPPED) for k, ours in table.items() if " " not in ours}
    turned = _compiled((alone[k], k) for k, ours in table.items() if ours.endswith(SWAPPED))
    left = {m: one.swapped() if _translated(m, turned) else one for m, one in factors.items()}
    found = dict[str, LoraFactors]()
    for theirs, parts in ((k, ours.split()) for k, ours in table.items() if " " in ours):
        first = _compiled([(parts[0], theirs)])
        for module in factors:
            name = _translated(module, first)
            if name is None:
                continue
            (number,) = re.findall(r"\.(\d+)\.", module)
            names = [part.replace("*", number) for part in parts]
            if any(part not in left for part in names):
                return None
            found[name] = side_by_side([left.pop(part) for part in names])
    names = to_original(left, alone)
    return None if names is None else found | {names[module]: one for module, one in left.items()}


_Table = list[tuple[re.Pattern[str], str]]


def _compiled(names: Iterable[tuple[str, str]]) -> _Table:
    return [(_pattern(theirs), ours) for theirs, ours in names]


@functools.cache  # of 1,600 names, asked for by each file; `re` itself keeps 512
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"(\d+)"))


def _translated(module: str, table: _Table) -> str | None:
    for pattern, ours in table:
        if match := pattern.fullmatch(module):
            return ours.replace("*", match[1]) if match.groups() else ours
    return None

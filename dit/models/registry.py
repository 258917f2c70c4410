"""The table of all model families; each family is imported at its first use.

The environment variable `DIT_FAMILIES` adds other families, as `name=module:attribute`, separated
by commas. It is not a configuration key, so that configuration files cannot name code to run; child
processes inherit it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, lru_cache, partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from dit.config import (
    CUSTOM_SIZE,
    OTHER_NETWORKS,
    ModelConfig,
    ObjectiveConfig,
    Problems,
    RunConfig,
)
from dit.models.family import Family, InputKind

if TYPE_CHECKING:
    from dit.models.diffusers.form import DiffusersForm
    from dit.models.diffusers.names import NameTable, Pair
    from dit.models.layer_spec import NetworkSpec

FAMILIES = {
    # The DiT, with the arithmetic of Diffusers' `CosmosTransformer3DModel`
    "dit": "dit.models.dit.family:FAMILY",
    # Wan 2.1 and 2.2: text, a first frame or first and last frame to video
    "wan": "dit.models.wan.family:FAMILY",
    # FLUX.1: text, and reference pictures (Kontext), to images
    "flux": "dit.models.flux.family:FAMILY",
    # Qwen-Image and Qwen-Image-Edit: text and pictures to picture
    "qwen_image": "dit.models.qwen_image.family:FAMILY",
    # HunyuanVideo and HunyuanVideo 1.5: text, or text and a first frame, to video
    "hunyuan_video": "dit.models.hunyuan_video.family:FAMILY",
    "hunyuan_video_15": "dit.models.hunyuan_video_15.family:FAMILY",
    # Stable Diffusion 3 and 3.5: text to image
    "sd3": "dit.models.sd3.family:FAMILY",
    # HunyuanImage 2.1: text, with words in quotation marks, to image
    "hunyuan_image": "dit.models.hunyuan_image.family:FAMILY",
    # Chroma1: text to image
    "chroma": "dit.models.chroma.family:FAMILY",
    # LTX-Video 0.9: text, or text and a first frame, to video
    "ltx": "dit.models.ltx.family:FAMILY",
    # LTX-2.0, 2.3 and 2.5: text, or text and a first frame, to video with sound
    "ltx2": "dit.models.ltx2.family:FAMILY",
    # FLUX.2: text and reference pictures to image
    "flux2": "dit.models.flux2.family:FAMILY",
    # FLUX.3 klein: text and reference pictures to image
    "flux3": "dit.models.flux3.family:FAMILY",
    # Lumina Image 2.0: text to image
    "lumina2": "dit.models.lumina2.family:FAMILY",
    # LongCat-Image and LongCat-Image-Edit: text and a picture to picture
    "longcat": "dit.models.longcat.family:FAMILY",
    # Z-Image and Z-Image-Turbo: text to image
    "zimage": "dit.models.zimage.family:FAMILY",
    # OmniGen2: text and reference pictures to image
    "omnigen2": "dit.models.omnigen2.family:FAMILY",
    # HiDream-I1: text to image
    "hidream": "dit.models.hidream.family:FAMILY",
    # ERNIE-Image and ERNIE-Image-Turbo: text to image
    "ernie_image": "dit.models.ernie_image.family:FAMILY",
    # Krea 2, Raw and Turbo: text to image
    "krea2": "dit.models.krea2.family:FAMILY",
    # Ideogram 4: text to image
    "ideogram4": "dit.models.ideogram4.family:FAMILY",
    # Qwen-Image-2.1 and its Turbo: text and reference pictures to picture
    "qwen_image21": "dit.models.qwen_image21.family:FAMILY",
    # The project's own DiT for text to video with sound; Diffusers has no such network
    "sound_dit": "dit.models.sound_dit.family:FAMILY",
}
"""Maps the name of a family to `module:attribute` of its `Family`; the first is the default."""
NETWORKS = {
    "CosmosTransformer3DModel": "dit",
    "WanTransformer3DModel": "wan",
    "FluxTransformer2DModel": "flux",
    "QwenImageTransformer2DModel": "qwen_image",
    "HunyuanVideoTransformer3DModel": "hunyuan_video",
    "HunyuanVideo15Transformer3DModel": "hunyuan_video_15",
    "SD3Transformer2DModel": "sd3",
    "HunyuanImageTransformer2DModel": "hunyuan_image",
    "ChromaTransformer2DModel": "chroma",
    "LTXVideoTransformer3DModel": "ltx",
    "LTX2VideoTransformer3DModel": "ltx2",
    "Flux2Transformer2DModel": "flux2",
    "Flux3Transformer2DModel": "flux3",
    "Lumina2Transformer2DModel": "lumina2",
    "LongCatImageTransformer2DModel": "longcat",
    "ZImageTransformer2DModel": "zimage",
    "OmniGen2Transformer2DModel": "omnigen2",
    "HiDreamImageTransformer2DModel": "hidream",
    "ErnieImageTransformer2DModel": "ernie_image",
    "Krea2Transformer2DModel": "krea2",
    "Ideogram4Transformer2DModel": "ideogram4",
    "QwenImage21Transformer2DModel": "qwen_image21",
}
"""Maps the name of a network class in Diffusers to the name of its family. It is a table, so that
not all families have to be imported to find one."""
VARIABLE = "DIT_FAMILIES"


def family_places() -> dict[str, str]:
    """Maps the names of all families, including those in `DIT_FAMILIES`, to `module:attribute`.

    Raises:
        Problems: an entry of `DIT_FAMILIES` does not have the form name=module:attribute.
    """
    places = dict(FAMILIES)
    for entry in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, equals, place = entry.strip().partition("=")
        if not (name and equals and ":" in place):
            raise Problems(
                [
                    f"the environment variable {VARIABLE} has the entry {entry!r}, which does not"
                    " have the form name=module:attribute; write for example"
                    f" {VARIABLE}=foo=my_package.my_module:FAMILY"
                ]
            )
        places[name] = place
    return places


def default_family() -> Family:
    """The family of configurations without `model.family` and `model.name`."""
    return family_named(next(iter(FAMILIES)))


def family_named(name: str) -> Family:
    """The family called `name`.

    Raises:
        Problems: there is no such family.
    """
    places = family_places()
    if name not in places:
        raise Problems(
            [
                f"model.family={name} is not a known family; use {', '.join(places)}, or register"
                f" your own by the environment variable {VARIABLE}={name}=module:attribute."
                f" {OTHER_NETWORKS}"
            ]
        )
    return _loaded(name, places[name])


def imported(place: str) -> Callable[[], Any]:
    """Makes a function that imports and returns the object at `place`, a `module:attribute`."""
    return partial(resolve_name, place)


@cache
def _loaded(name: str, place: str) -> Family:
    family = imported(place)()
    assert family.name == name, f"{place} has the name {family.name}, not {name}"
    return family


def family_of(model: ModelConfig) -> Family:
    """The family with the name `model.family`."""
    return family_named(model.family)


@lru_cache(maxsize=64)  # the planner calls it for many layouts
def network_spec(model: ModelConfig) -> NetworkSpec:
    """The specification of all layers of the network of `model`."""
    return family_of(model).spec(model)


def is_distilled(config: RunConfig) -> bool:
    """Whether the network of `config` is distilled to few steps.

    It is distilled if it also gets the timestep at which a step ends (flow maps), or if its named
    size is distilled (`Family.distilled`). A Diffusers folder does not tell the size; so the
    network also counts as distilled if all named sizes with the same numbers of layers, width and
    noise levels are distilled.
    """
    family = family_of(config.model)
    if family.trains_step_end and family.tells_step_end(config.model):
        return True
    alike = [size for size in family.sizes if _is_of(size, family, config.model, config.objective)]
    unnamed = bool(alike) and all(size in family.distilled for size in alike)
    return config.model.name in family.distilled or unnamed


def _is_of(size: str, family: Family, model: ModelConfig, objective: ObjectiveConfig) -> bool:
    """Whether a network has the number of layers, width and noise levels of the named `size`."""
    named = family.config(name=size, **family.sizes[size])
    told = family.objective.of_size.get(size, {})
    shape = ("all_layers", "hidden_size")
    alike = [getattr(model, key) == getattr(named, key) for key in shape]
    alike += [getattr(objective, key) == value for key, value in told.items()]
    return all(alike)


def families(*, first: str | None = None) -> list[Family]:
    """All families, the one called `first` first."""
    names = sorted(family_places(), key=lambda name: name != first)
    return [family_named(name) for name in names]


def family_of_size(size: str, *, first: str) -> Family | None:
    """The family that has the named `size`, or None if no family has it.

    The family called `first` is tried before others, and is the result for the size `custom`.

    Raises:
        Problems: the size is a published network that its family does not support.
    """
    if size == CUSTOM_SIZE or size in family_named(first).sizes:
        return family_named(first)
    every = families(first=first)
    if needs := next((one.refused[size] for one in every if size in one.refused), None):
        raise Problems(
            [
                f"model.name={size} is not supported, because its network needs {needs};"
                " docs/families.md lists the sizes that are"
            ]
        )
    return next((one for one in every if size in one.sizes), None)


def has_sound(model: ModelConfig) -> bool:
    """Whether the network of `model` has a stream of sound tokens."""
    return any(one.kind is InputKind.SOUND for one in family_of(model).inputs(model))


def diffusers_classes() -> dict[str, str]:
    """Maps network classes of Diffusers to names of families, including those in `DIT_FAMILIES`."""
    added = [family_named(name) for name in family_places() if name not in FAMILIES]
    forms = {one.name: one.diffusers() for one in added if one.diffusers is not None}
    return NETWORKS | {form.class_name: name for name, form in forms.items()}


def diffusers_form(model: ModelConfig) -> DiffusersForm:
    """The description of the class of Diffusers for the network of `model`.

    Raises:
        Problems: Diffusers has no such class.
    """
    form = family_of(model).diffusers
    if form is None:
        raise Problems(
            [
                f"Diffusers has no network for model.family={model.family}, so weights cannot be"
                " converted to or from Diffusers; use checkpoints of this project instead"
            ]
        )
    return form()


def name_table(model: ModelConfig) -> NameTable:
    """The name table of the network of `model`: the family's own table, or Diffusers'.

    Raises:
        Problems: the family has no table, and Diffusers has no class for the network.
    """
    own = family_of(model).names
    return diffusers_form(model).table if own is None else own()


def pairs(model: ModelConfig) -> list[Pair]:
    """The tensors of the network of `model`, each with the tensors in files for it.

    Raises:
        Problems: the network has no name table (see `name_table`).
    """
    from dit.models.diffusers.names import pairs_of

    return pairs_of(name_table(model), model)


def named_model(size: str) -> ModelConfig:
    """The configuration of the network with the named `size`.

    Raises:
        Problems: no family has this size, or its family does not support it.
    """
    family = family_of_size(size, first=default_family().name)
    if family is None:
        raise Problems(
            [f"model.name={size} is not a size of any family; docs/families.md lists all sizes"]
        )
    return family.config(name=size, **family.sizes[size])

"""The networks of a family as Diffusers has them: names, configuration, pipelines, arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dit.config import ModelConfig, RunConfig, TextPadding

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel
    from torch import Tensor, nn

    from dit.batch import LatentSample
    from dit.models.diffusers_names import NameTable


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenTextProjection:
    """A frozen first layer of text, where shards may hold what it makes (Cosmos 2.5)."""

    tensors: tuple[str, ...]
    """Diffusers' names of its weight [made, read] and others."""
    is_part: Callable[[Any], bool]
    """Whether a network has it."""
    added: Callable[[Any, int], ModelConfig]
    """(network of projected texts, numbers of a row before it) -> the network with it."""
    removed: Callable[[Any], ModelConfig]
    """The network with it -> that of projected texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedSamples:
    """B samples side by side, shorter ones padded with zeros, as loops without packs have them."""

    latent_BCFHW: Tensor
    inputs: Mapping[str, Tensor]
    """By name: [B, L, E] of a text, [B, E] of a vector."""
    is_text_BL: Tensor | None
    """False on padding of the main text; None where all captions have the same length."""
    level_B: Tensor
    fps: float
    """NaN for pictures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusersForm:
    """The networks of a family as Diffusers has them. Nothing here raises for what a user gave."""

    class_name: str
    """`_class_name` of config.json, by which a folder is known to be of this family."""
    table: NameTable
    """Which tensors of theirs are which of ours."""
    config_keys: type[BaseModel]
    """The keys of config.json with Diffusers' own defaults; others are kept in `model_extra`."""
    private_keys: type[BaseModel]
    """What an export keeps in config.json that Diffusers has no place for."""
    unsupported: Callable[[Any], list[str]]
    """What of `config_keys` our network has no counterpart for, in words; not unknown keys."""
    settings: Callable[[Any, Any, Any], dict[str, Any]]
    """(`config_keys`, `private_keys` if ours wrote them, text_pad_to) -> fields of the family."""
    inexpressible: Callable[[RunConfig], list[str]] = lambda _: []
    """What of a run Diffusers' network has no counterpart for, in words."""
    content: Callable[[RunConfig], dict[str, Any]]
    """config.json of a run's network, without private keys."""
    text_pad_to: Callable[[Any], int | TextPadding | None] = lambda _: None
    """`config_keys` -> `model.text_pad_to` of the published weights."""
    text_projection: FrozenTextProjection | None = None
    """None: no shards hold projected texts of the family."""
    ignored: tuple[str, ...] = ()
    """Patterns, as in `fnmatch`, of stored tensors that Diffusers' class does not read."""
    original_names: tuple[Mapping[str, str], ...] = ()
    """Tables of linears as the original projects name them -> as Diffusers does; `*`: a block.

    Several names with spaces between them are linears that the project has as one: each but the
    last has as many outputs as inputs. `~`: shift and scale have changed places, if alone."""
    comfyui_names: Callable[[Any], Mapping[str, str]] | None = None
    """The one of `original_names` that ComfyUI has of a network; None: it reads Diffusers'."""
    pipelines: Mapping[str, str]
    """Pipeline that runs these networks -> name of the objective that it samples."""
    settings_of_pipelines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Pipeline -> fields of the family that its networks have and config.json does not tell."""
    pipeline_objectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Pipeline -> keys of `objective` that its loop fixes, whatever its scheduler says."""
    sampling_settings: Callable[[str, Mapping[str, Any]], dict[str, Any]] = lambda *_: {}
    """(one of `pipeline_objectives`, its scheduler_config.json) -> keys for the samplers."""
    pipeline_misfits: Callable[[Any, str], list[str]] = lambda *_: []
    """(network, pipeline) -> what the pipeline feeds otherwise than in training, in words."""
    largest_latent: Callable[[Any], tuple[int, int, int]] = lambda _: (2**20, 2**20, 2**20)
    """Latent frames, rows and columns that Diffusers' network takes at most; default: any."""
    call: Callable[[Any], str | None] = lambda _: None
    """Python for cards: `made`, from `state` [1, C, F, H, W], `t`, `caption` [1, L, E], `texts`."""
    run_network: Callable[[nn.Module, LatentSample, float, RunConfig], Tensor]
    """(Diffusers' network, sample, level that ours is told, run) -> output [C, F, H, W]."""
    run_stacked: Callable[[nn.Module, StackedSamples, RunConfig], Tensor] | None = None
    """The same of samples side by side -> [B, C, F, H, W], by which speeds are compared."""

    def private(self, model: ModelConfig) -> dict[str, Any]:
        """The values of `private_keys`."""
        return {name: getattr(model, name) for name in self.private_keys.model_fields}

    def open_network(self, folder: Path) -> nn.Module:
        """Diffusers' network of a folder, in float32.

        Raises:
            ImportError: Diffusers is not installed.
        """
        import diffusers
        from torch import float32

        return getattr(diffusers, self.class_name).from_pretrained(folder, torch_dtype=float32)

"""The networks of a family as Diffusers has them: names, configuration, pipelines, arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dit.config import ModelConfig, RunConfig
from dit.config.checks import Rule

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from dit.batch import LatentSample
    from dit.models.config_keys import ConfigKeys
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
class Pipeline:
    """A pipeline of Diffusers, and what it feeds the networks that it runs."""

    samples: str = "flow"
    """Name of the objective that it samples."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the family that its networks have and config.json does not tell."""
    objective: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `objective` that its loop fixes, whatever its scheduler says."""
    sampling: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
    """Where its loop fixes any: scheduler_config.json -> keys for the samplers."""
    rules: Callable[[Any], list[Rule]] = lambda _: []
    """What of a network it feeds as in training, and the words if it does not."""

    def misfits(self, model: ModelConfig) -> list[str]:
        """What it feeds a network otherwise than in training, in words."""
        return [message for holds, message in self.rules(model) if not holds]


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
    keys: ConfigKeys
    """The keys of config.json, and what of our configuration says the same."""
    inexpressible: Callable[[RunConfig], list[str]] = lambda _: []
    """What of a run Diffusers' network has no counterpart for, in words."""
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
    pipelines: Mapping[str, Pipeline]
    """The pipelines that run these networks, by class."""
    largest_latent: Callable[[Any], tuple[int, int, int]] = lambda _: (2**20, 2**20, 2**20)
    """Latent frames, rows and columns that Diffusers' network takes at most; default: any."""
    call: Callable[[Any], str | None] = lambda _: None
    """Python for cards: `made`, from `state` [1, C, F, H, W], `t`, `caption` [1, L, E], `texts`."""
    run_network: Callable[[nn.Module, LatentSample, float, RunConfig], Tensor]
    """(Diffusers' network, sample, level that ours is told, run) -> output [C, F, H, W]."""
    run_stacked: Callable[[nn.Module, StackedSamples, RunConfig], Tensor] | None = None
    """The same of samples side by side -> [B, C, F, H, W], by which speeds are compared."""

    def content(self, config: RunConfig) -> dict[str, Any]:
        """config.json of a run's network, without private keys."""
        return self.keys.content(config)

    def open_network(self, folder: Path) -> nn.Module:
        """Diffusers' network of a folder, in float32.

        Raises:
            ImportError: Diffusers is not installed.
        """
        import diffusers
        from torch import float32

        return getattr(diffusers, self.class_name).from_pretrained(folder, torch_dtype=float32)

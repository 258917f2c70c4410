"""How the samples of a run become tokens and other contents of a pack."""
# C latent channels; F H W latent frames, rows, columns

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from dit.batch import REJECTED_LATENT, SOUND, Grid
from dit.config import RunConfig
from dit.config.sparsity import TokenShare, trained_as
from dit.models.family import InputKind, SampleInput
from dit.models.positions import PositionRule
from dit.models.registry import family_of, network_spec


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchLayout:
    """How the samples of a run become tokens and other contents of a pack."""

    patch_temporal: int
    patch_spatial: int
    sample_multiple: int
    """Each sample is padded to a multiple of this number of tokens."""
    positions: PositionRule
    """The family's rule for the positions of a sample's tokens."""
    side_cells: int = 1
    """Number by which the rows and columns of a latent must be divisible."""
    inputs: tuple[SampleInput, ...]
    """Inputs of a sample besides its latent."""
    counts_text: bool = False
    """Whether text tokens count towards the capacity of a pack, as with joint attention."""
    attended: Callable[[Grid, int], int] = lambda _, tokens: tokens
    """Maps (grid of a sample's target, number of the sample's tokens) to the number of tokens that
    attention processes, which may include padding."""
    text_multiple: int = 1
    """The text of each sample is padded to a multiple of this number of tokens."""
    clean_level: float | None = 0.0
    """Noise level of clean tokens (`ObjectiveConventions.clean_level`)."""
    guidance: float | None = None
    """Guidance scale that the guidance embedding gets; None: the network has no such embedding."""
    draws_given_frames: bool = False
    """Whether the objective may choose, after packing, frames of a sample that are given."""
    clean_sound_level: float | None = None
    """Noise level of sound that the objective chooses as given; None: sound is never given."""
    level_share: TokenShare | None = None
    """The tokens that have the first of a sample's two noise levels in training; None: a sample has
    one noise level."""

    _names: Mapping[InputKind, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kinds = {kind: [i.name for i in self.inputs if i.kind is kind] for kind in InputKind}
        # Computed once, because the loader calls `named` for each sample.
        names = {kind: tuple(found) for kind, found in kinds.items()}
        object.__setattr__(self, "_names", names)
        references = [one for one in self.inputs if one.kind is InputKind.REFERENCE]
        assert len(names[InputKind.FRAMES]) < 2, "at most one input may have given frames"
        assert len({one.clean for one in references}) < 2, "references must have one noise level"
        assert len(names[InputKind.REJECTED]) < 2, "a preference pair has two latents"
        assert len(names[InputKind.NULL_TEXT]) < 2, "at most one input may replace dropped text"
        assert names[InputKind.SOUND] in ((), (SOUND,)), "a sample has one sound"
        assert not self.has_clean_tokens or self.clean_level is not None, "clean_level is missing"

    @classmethod
    def of(cls, config: RunConfig) -> PatchLayout:
        family, objective = family_of(config.model), config.objective
        given = objective.given_frames is not None or objective.video_given > 0
        return cls(
            patch_temporal=config.model.patch_temporal,
            patch_spatial=config.model.patch_spatial,
            sample_multiple=config.sample_multiple,
            positions=family.positions(config.model),
            side_cells=config.model.side_cells,
            inputs=family.inputs(config.model),
            counts_text=network_spec(config.model).attends_jointly,
            attended=config.model.attended,
            text_multiple=config.model.text_multiple,
            clean_level=family.objective.clean_level,
            guidance=objective.guidance,
            draws_given_frames=given,
            clean_sound_level=family.objective.clean_level if objective.gives_sound else None,
        )

    @classmethod
    def of_training(cls, config: RunConfig) -> PatchLayout:
        """The layout for training by `config`, including the inputs of the objective."""
        layout = replace(cls.of(config), level_share=config.objective.level_share)
        if config.objective.preference is None:
            return layout
        rejected = SampleInput(
            name=REJECTED_LATENT, kind=InputKind.REJECTED, width=config.model.in_channels
        )
        return replace(layout, inputs=(*layout.inputs, rejected))

    @property
    def in_pairs(self) -> bool:
        """Whether a stored sample becomes a preference pair: two samples, one for each latent."""
        return bool(self._names[InputKind.REJECTED])

    @property
    def copies(self) -> int:
        """Number of samples in a pack that a stored sample becomes: 2 if `in_pairs`, else 1."""
        return 2 if self.in_pairs else 1

    def trained(self, tokens: int, text: int) -> list[tuple[int, int]]:
        """(latent tokens, text tokens) of each training sample that a stored sample becomes.

        `tokens` and `text` are the numbers of latent and text tokens of the stored sample.
        """
        return trained_as(tokens, text, self.level_share) * self.copies

    def named(self, kind: InputKind) -> tuple[str, ...]:
        """The names of the inputs of this `kind`, in the order of `inputs`."""
        return self._names[kind]

    @property
    def sound(self) -> SampleInput | None:
        """The input with the latent of a sample's sound; None if there is no such input."""
        return next((one for one in self.inputs if one.kind is InputKind.SOUND), None)

    @property
    def pictures(self) -> tuple[str, ...]:
        """Names of the optional text inputs that an encoder computes from a picture."""
        optional = (one for one in self.inputs if one.pictures and one.may_be_empty)
        return tuple(one.name for one in optional if one.kind is InputKind.TEXT)

    @property
    def has_clean_tokens(self) -> bool:
        """Whether samples may have clean tokens: given frames, or clean references."""
        frames = any(one.kind is InputKind.FRAMES for one in self.inputs)
        return frames or self.clean_references

    @property
    def clean_references(self) -> bool:
        """Whether tokens of references have `clean_level` instead of the sample's noise level."""
        return any(one.clean for one in self.inputs if one.kind is InputKind.REFERENCE)

    @property
    def patch(self) -> Grid:
        """The size of a patch: latent frames, rows and columns."""
        return self.patch_temporal, self.patch_spatial, self.patch_spatial

    def grid(self, latent_CFHW: Tensor) -> Grid:
        """The numbers of patches along frames, rows and columns of the latent, rounded down."""
        frames, rows, columns = latent_CFHW.shape[1:]
        return (
            frames // self.patch_temporal,
            rows // self.patch_spatial,
            columns // self.patch_spatial,
        )

    def padded_tokens(self, latent_CFHW: Tensor) -> int:
        """The number of tokens of the latent in a pack, padding included."""
        grid = self.grid(latent_CFHW)
        return self.padded(grid, math.prod(grid))

    def padded(self, grid: Grid, tokens: int) -> int:
        """The number of tokens of a sample in a pack, padding included.

        `grid` is the grid of its target, `tokens` the number of its tokens without padding.
        """
        return self.filled(self.attended(grid, tokens))

    def filled(self, tokens: int) -> int:
        """`tokens`, rounded up to a multiple of `sample_multiple`."""
        return -(-tokens // self.sample_multiple) * self.sample_multiple

    def text_room(self, rows: int) -> int:
        """The number of tokens by which `rows` text tokens of a sample reduce a pack's capacity.

        It is 0 unless `counts_text`. Text counts once for each noise level of the sample.
        """
        if not self.counts_text:
            return 0
        levels = 1 if self.level_share is None else 2
        return levels * -(-rows // self.text_multiple) * self.text_multiple

"""Options for guidance of networks with sound, without torch: commands read them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dit.command_line import option, option_names
from dit.config import ModelConfig
from dit.config.validation import MOST_GUIDANCE
from dit.models.registry import has_sound


@dataclass(frozen=True, kw_only=True)
class StreamGuidance:
    """Options for guidance of networks with sound, besides --guidance and --guidance_rescale."""

    audio_guidance: float | None = None
    """Guidance scale of the sound, where --guidance is that of the frames. (default: that of the
    frames)"""
    audio_guidance_rescale: float | None = None
    """Guidance rescale of the sound, 0 to 1. (default: that of the frames)"""
    stg_scale: float = 0.0
    """Scale s of spatio-temporal guidance (networks with sound), which moves away from the
    prediction with --stg_blocks perturbed; 0: none. (default: %(default)s)"""
    audio_stg_scale: float | None = None
    """Scale of spatio-temporal guidance of the sound. (default: that of the frames)"""
    stg_blocks: tuple[int, ...] = option((), metavar="N")
    """Layer, from 0, whose self-attention is replaced by its values in spatio-temporal guidance;
    repeatable. Published: 29 of LTX-2.0, 28 of 2.3 and 2.5."""
    modality_scale: float = 1.0
    """Scale m of guidance away from frames and sound that do not attend to each other; 1: none.
    (default: %(default)s)"""
    audio_modality_scale: float | None = None
    """Scale of the same guidance of the sound. (default: that of the frames)"""

    def __post_init__(self) -> None:
        self.check_scales()

    def check_scales(self) -> None:
        """Checks the values alone.

        Raises:
            ValueError: a value is out of range, or has no effect.
        """
        rescale = self.audio_guidance_rescale
        if rescale is not None and not 0 <= rescale <= 1:
            raise ValueError(
                f"--audio_guidance_rescale {rescale} must lie in [0, 1]; 0 is no rescaling, 0.7 is"
                " usual"
            )
        for name in option_names(StreamGuidance):
            value = getattr(self, name)
            if isinstance(value, int | float) and not abs(value) <= MOST_GUIDANCE:
                most = f"[-{MOST_GUIDANCE}, {MOST_GUIDANCE}]"
                none = 0 if name.endswith("stg_scale") else 1
                raise ValueError(f"--{name} {value} must lie in {most}; {none} is no guidance")
        scaled = any(pair(self.stg_scale, self.audio_stg_scale))
        if scaled and not self.stg_blocks:
            raise ValueError(
                f"--stg_scale {self.stg_scale:g} needs the layers that are perturbed; give"
                " --stg_blocks N"
            )
        if self.stg_blocks and not scaled:
            raise ValueError(
                f"--stg_blocks {_shown(self.stg_blocks)} has no effect without a scale; give"
                " --stg_scale, such as 1"
            )

    def check_guidance(self, model: ModelConfig) -> None:
        """Checks that `model` can use the values.

        Raises:
            ValueError: the network has no sound, or not as many layers.
        """
        given = {one.name: getattr(self, one.name) for one in fields(StreamGuidance)}
        changed = [one for one in fields(StreamGuidance) if given[one.name] != one.default]
        if changed and not has_sound(model):
            name = changed[0].name
            raise ValueError(
                f"--{name} {_shown(given[name])}: model.family={model.family} generates no sound,"
                " and this guidance is for networks with sound; leave it out"
            )
        for block in self.stg_blocks:
            if not 0 <= block < model.num_layers:
                raise ValueError(
                    f"--stg_blocks {block} must lie in 0 to {model.num_layers - 1}, because the"
                    f" network has {model.num_layers} layers"
                )


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def pair(frames: float, sound: float | None) -> tuple[float, float]:
    """A setting of the frames and of the sound; None for the sound means that of the frames."""
    return frames, frames if sound is None else sound

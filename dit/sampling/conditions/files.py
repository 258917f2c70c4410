"""Encodes the pictures and clips that are shown at certain frames of a video, as latents.

The options `--image`, `--video`, `--at_frame` and `--strength` of `generate_dit.py` name them.
A single picture without these options is the first frame in `given_pictures` instead.
"""

# F H W frames, rows and columns, of pixels or of a latent

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dit.models.family import ConditionRules
from dit.sampling.conditions.clips import read_clip
from dit.sampling.conditions.tokens import Condition
from dit.sampling.given_pictures import OF_COMMAND_LINE, read_picture
from dit.sampling.latent_sizes import Size


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionFile:
    """The file of a condition, the frame at which it begins, and its strength."""

    option: str
    """Option of the command line that named the file."""
    file: str
    frame: int
    """Frame of the generated video at which it begins, from 0."""
    strength: float

    def check(self, frames: int) -> None:
        """Checks that the condition begins inside a video of `frames` frames.

        Raises:
            ValueError: the condition begins outside the video.
        """
        if not 0 <= self.frame < frames:
            raise ValueError(
                f"--at_frame {self.frame} of {self.option} {self.file} must lie in 0 to"
                f" {frames - 1}, because the video has {frames} frames"
            )

    def latent(self, decoder: Any, rules: ConditionRules, size: Size) -> Condition:
        """Encodes the condition; a clip is cut to 8n + 1 frames that fit into the video.

        `size` is that of the video: frames, height, width in pixels.

        Raises:
            ValueError: there is no VAE, or the file is no picture or video.
        """
        where = f"{self.option} {self.file}"
        if decoder is None:
            raise ValueError(
                f"{where}: the VAE of the data is not on this machine;"
                f" {OF_COMMAND_LINE.encoders} the folder that has it"
            )
        frames, height, width = size
        self.check(frames)
        if self.option == "--image":
            pixels_F3HW = read_picture(self.file, height, width, option=self.option)
        else:
            clip = read_clip(self.file, size, option=self.option)[: frames - self.frame]
            pixels_F3HW = clip[: rules.whole_frames(len(clip))]
        # `encode` rounds to the type of shards.
        latent_CFHW = decoder.whitening.apply(decoder.encode_raw(pixels_F3HW.transpose(0, 1)))
        return Condition(latent_CFHW=latent_CFHW, frame=self.frame, strength=self.strength)


def condition_files(options: Any) -> tuple[ConditionFile, ...]:
    """The conditions that the options of generation name; empty for a single first frame.

    Raises:
        ValueError: the numbers of files, frames and strengths do not match; a strength is out of
            range; or --last_image is given with conditions.
    """
    images, videos = options.image, options.video
    files = [("--image", file) for file in images] + [("--video", file) for file in videos]
    told = {"--at_frame": options.at_frame, "--strength": options.strength}
    if not files:
        for name, values in told.items():
            if values:
                raise ValueError(
                    f"{name} {values[0]}: there is no picture or clip; give --image or --video FILE"
                )
        return ()
    if len(files) == 1 and images and not any(told.values()) and not options.condition_noise:
        return ()
    if options.last_image is not None:
        raise ValueError(
            f"--last_image {options.last_image}: with other pictures, give it as --image with"
            " --at_frame"
        )
    frames = _one_each("--at_frame", options.at_frame, files, usual=0)
    strengths = _one_each("--strength", options.strength, files, usual=1.0)
    for strength in strengths:
        if not 0 < strength <= 1:
            raise ValueError(f"--strength {strength} must be above 0 and at most 1")
    return tuple(
        ConditionFile(option=option, file=str(file), frame=frame, strength=strength)
        for (option, file), frame, strength in zip(files, frames, strengths, strict=True)
    )


def _one_each(name: str, values: Sequence[Any], files: Sequence[Any], *, usual: Any) -> list[Any]:
    if not values and (len(files) == 1 or name == "--strength"):
        return [usual] * len(files)
    if len(values) != len(files):
        raise ValueError(
            f"{name} needs one value for each of {len(files)} pictures and clips, but has"
            f" {len(values)}; give one for each --image, then for each --video, in their order"
        )
    return list(values)

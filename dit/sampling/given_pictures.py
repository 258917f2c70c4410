"""Pictures that are given with a prompt -> what the network reads of them.

GivenPictures      the first and the last frame, resized to the size that is generated, as in
                   Diffusers' pipelines; an image encoder sees the resized one, as in the packing of
                   data
ReferencePictures  pictures that the prompt changes, of the sizes that data_prep gives them
"""

# N C H W one picture, its colours, rows and columns

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from dit.codecs.reference_fit import ReferenceFit
from dit.codecs.rgb import to_rgb
from dit.models.family import InputKind, SampleInput
from dit.sampling.latent_sizes import Size


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureOptions:
    """What the options of the pictures are called, for errors."""

    first: str
    last: str
    frames: str
    missing: str  # remedy where a picture is missing; {} is `image` or `last_image`
    encoders: str  # where the VAE and the image encoder may lie


OF_COMMAND_LINE = PictureOptions(
    first="--image",
    last="--last_image",
    frames="--num_video_frames",
    missing="give --{0} FILE, or {0}_path in the file of prompts",
    encoders="--tokenizer_cache_dir and --tokenizer_model say",
)
OF_VALIDATION = PictureOptions(
    first="validation.prompts_file: image_path",
    last="validation.prompts_file: last_image_path",
    frames="validation.num_video_frames",
    missing="give {0}_path with each prompt of validation.prompts_file",
    encoders="model.vae_cache_folder says",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenPictures:
    """Files of the first and the last frame of one sample."""

    first: str | None
    last: str | None
    options: PictureOptions = OF_COMMAND_LINE

    def check(self, inputs: Sequence[SampleInput], *, frames: int) -> None:
        """Raises if the network, whose `inputs` these are, takes other pictures.

        Raises:
            ValueError: names the option.
        """
        made = [one for one in inputs if one.pictures]
        most = max((one.pictures for one in made), default=0)
        needed = most if any(one.required for one in made) else 0
        names, options = " and ".join(f"`{one.name}`" for one in made), self.options
        given = ((self.first, options.first, "image"), (self.last, options.last, "last_image"))
        for number, (value, option, name) in enumerate(given, 1):
            if value is None and number <= needed:
                raise ValueError(
                    f"the network reads {names} of a given picture: {options.missing.format(name)}"
                )
            if value is not None and number > most:
                takes = "no picture" if most == 0 else "the first picture alone"
                raise ValueError(f"{option} {value}: the network is given {takes}; leave it out")
        if self.last is not None and self.first is None:
            raise ValueError(
                f"{options.last} {self.last}: there is no first picture;"
                f" {options.missing.format('image')}"
            )
        if self.last is not None and frames < 2:
            raise ValueError(
                f"{options.last} {self.last}: a sample of {options.frames} {frames} has one picture"
            )

    def inputs(
        self, decoder: Any, wanted: Sequence[SampleInput], *, size: Size
    ) -> dict[str, Tensor]:
        """The inputs of the network, by name; `size` is that of the whole latent, in pixels.

        Raises:
            ValueError: a file is no picture, or the codec of the data does not make an input.
        """
        if self.first is None:
            return {}
        option = f"{self.options.first} {self.first}"
        if not hasattr(decoder, "image_inputs"):
            which = "is not here" if decoder is None else f"({decoder.name}) reads no pictures"
            raise ValueError(
                f"{option}: the VAE of the data {which}; {self.options.encoders} where one is"
            )
        frames, height, width = size
        first, last = self.first_picture(height, width), None
        if self.last is not None:
            last = read_picture(self.last, height, width, option=self.options.last)
        (made,) = decoder.image_inputs(first, last, frames=frames)
        names = {one.name: one.required for one in wanted if one.pictures}
        if lost := [name for name, needed in names.items() if needed and name not in made]:
            raise ValueError(
                f"{option}: the network reads `{lost[0]}`, which the pipeline"
                f" {getattr(decoder, 'model_name', decoder.name)} has no encoder for;"
                f" {self.options.encoders} where one with an image_encoder is"
            )
        return {name: made[name] for name in names if name in made}

    def first_picture(self, height: int, width: int) -> Tensor:
        """The first picture, as `read_picture` gives it.

        Raises:
            ValueError: as there.
        """
        assert self.first is not None
        return read_picture(self.first, height, width, option=self.options.first)

    def shown(self, height: int, width: int) -> np.ndarray | None:
        """The first picture as uint8 [H, W, 3], for a grid; None where none is given."""
        if self.first is None:
            return None
        colours_3HW = self.first_picture(height, width)[0]
        return ((colours_3HW + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencePictures:
    """Files of the references of one sample, in their order."""

    files: tuple[str, ...]
    size: str = ReferenceFit.TARGET

    def check(self, inputs: Sequence[SampleInput]) -> None:
        """Raises if the network, whose `inputs` these are, takes fewer references.

        Raises:
            ValueError: names the option.
        """
        most = sum(one.kind is InputKind.REFERENCE for one in inputs)
        if len(self.files) > most:
            takes = f"takes {most} at most" if most else "takes none"
            raise ValueError(
                f"--reference {self.files[most]}: the network {takes}"
                f" (model.reference_latents={most}); leave it out"
            )

    def shown(self) -> list[Image.Image]:
        """The pictures, upright RGB of their own sizes, for a text encoder that sees them.

        Raises:
            ValueError: there is none, or a file is no picture.
        """
        if not self.files:
            raise ValueError(
                "the text encoder of the data sees the pictures that the prompt changes: give"
                " --reference FILE"
            )
        return [_upright(file, option="--reference") for file in self.files]

    def inputs(
        self, decoder: Any, wanted: Sequence[SampleInput], *, target: tuple[int, int], multiple: int
    ) -> dict[str, Tensor]:
        """The inputs of the network, by name.

        `target` are height and width of what is made, `multiple` the pixels along a token's side.

        Raises:
            ValueError: a file is no picture, or the codec of the data is not here.
        """
        if self.files and decoder is None:
            raise ValueError(
                f"--reference {self.files[0]}: the VAE of the data is not here;"
                " --tokenizer_cache_dir and --tokenizer_model say where one is"
            )
        names = [one.name for one in wanted if one.kind is InputKind.REFERENCE]
        found = {}
        for name, file in zip(names, self.files, strict=False):
            sides = target
            if self.size != ReferenceFit.TARGET:
                sides = self._sides(file, decoder, multiple)
            (picture_3HW,) = read_picture(file, *sides, option="--reference")
            found[name] = decoder.encode(picture_3HW[:, None])
        return found

    def _sides(self, file: str, decoder: Any, multiple: int) -> tuple[int, int]:
        """Height and width at which a picture is encoded, where they follow from the picture."""
        width, height = _upright(file, option="--reference").size
        if self.size == ReferenceFit.PUBLISHED:
            rule = getattr(decoder, "reference_size", None)
            if rule is None:
                raise ValueError(
                    f"--reference_size published: no pipeline of the codec {decoder.name} changes"
                    " pictures; choose own or target"
                )
            width, height = rule(width, height)
        rows, columns = (max(side // multiple, 1) * multiple for side in (height, width))
        return rows, columns


def read_picture(file: str, height: int, width: int, *, option: str) -> Tensor:
    """A picture [1, 3, H, W] in [-1, 1], resized as Diffusers' `VaeImageProcessor` does.

    Raises:
        ValueError: the file is not there or no picture.
    """
    resized = _upright(file, option=option).resize((width, height), Image.Resampling.LANCZOS)
    colours_HWC = torch.from_numpy(np.asarray(resized, dtype=np.float32) / 255)
    return (2 * colours_HWC - 1).permute(2, 0, 1)[None]


def _upright(file: str, *, option: str) -> Image.Image:
    try:
        with Image.open(file) as opened:
            return to_rgb(ImageOps.exif_transpose(opened))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{option} {file} cannot be read as a picture ({error})") from error

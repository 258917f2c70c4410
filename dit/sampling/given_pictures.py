"""Encodes the pictures that are given with a prompt, as inputs of network and text encoder.

1. The first and the last frame, resized to the generated size, as in Diffusers' pipelines; an image
   encoder gets the resized frame, as in data_prep, a text encoder the original.
2. References: pictures that the prompt edits, scaled as in data_prep, or videos.
"""

# N C H W one picture, its colours, rows and columns

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dit.batch import NULL_TEXT, TEXT
from dit.codecs.rgb import Placement, ReferenceFit, cover, to_rgb, to_rgba, upright
from dit.codecs.text import TextEncoder
from dit.models.family import InputKind, SampleInput
from dit.sampling.conditions.clips import first_of_clip, is_video, read_clip
from dit.sampling.grid import beside
from dit.sampling.latent_sizes import Size
from dit.sampling.prompts import Prompt
from dit.system_errors import reason


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureOptions:
    """Names of the options for pictures, and remedies, for error messages."""

    first: str
    last: str
    reference: str
    reference_video: str
    frames: str
    missing: str  # remedy for a missing picture; {0} is `image`, `last_image` or `reference`
    encoders: str  # beginning of a remedy: the options for the folder of the VAE
    place: str = ""  # position of the prompt in its file, with which messages begin

    def of(self, prompt: Prompt) -> PictureOptions:
        """The names for one prompt, with its position in the file of prompts."""
        return replace(self, place=f"{prompt.place}: " if prompt.place else "")


OF_COMMAND_LINE = PictureOptions(
    first="--image",
    last="--last_image",
    reference="--reference",
    reference_video="--reference_video",
    frames="--num_video_frames",
    missing="give --{0} FILE, or {0}_path in the file of prompts",
    encoders="set --tokenizer_cache_dir or --tokenizer_model to",
)
OF_VALIDATION = PictureOptions(
    first="image_path",
    last="last_image_path",
    reference="reference_path",
    reference_video="reference_path",
    frames="validation.num_video_frames",
    missing="give {0}_path beside the prompt, in .json or .jsonl",
    encoders="set model.vae_cache_folder to",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTexts:
    """The text encoder's tensors for a prompt and its negative prompt, by name."""

    prompt: Mapping[str, Tensor]
    negative: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenPictures:
    """The files of a sample's first and last frame and of its references.

    `reference_size` is a `ReferenceFit`; `options` are the names for messages.
    """

    first: str | None = None
    last: str | None = None
    references: tuple[str, ...] = ()
    reference_size: str = ReferenceFit.TARGET
    options: PictureOptions = OF_COMMAND_LINE

    def check(self, inputs: Sequence[SampleInput], *, frames: int) -> None:
        """Checks that the pictures fit the network's `inputs`, for a sample of `frames` frames.

        Raises:
            ValueError: the network does not take one of the pictures, or needs one that is missing.
        """
        self._check_ends(inputs, frames)
        most = sum(one.kind is InputKind.REFERENCE for one in inputs)
        if len(self.references) > most:
            takes = f"takes at most {most}" if most else "takes no references"
            raise ValueError(
                f"{self._named(self.references[most])}: the network {takes}"
                f" (model.reference_latents={most}); leave it out, or use a network that was"
                " trained or imported with a larger model.reference_latents"
            )

    def _option(self, name: str) -> str:
        return f"{self.options.place}{getattr(self.options, name)}"

    def _named(self, reference: str) -> str:
        option = "reference_video" if is_video(reference) else "reference"
        return f"{self._option(option)} {reference}"

    def _check_ends(self, inputs: Sequence[SampleInput], frames: int) -> None:
        made = [one for one in inputs if one.pictures]
        most = max((one.pictures for one in made), default=0)
        needed = most if any(one.required for one in made) else 0
        names, options = " and ".join(f"`{one.name}`" for one in made), self.options
        place = options.place
        given = ((self.first, options.first, "image"), (self.last, options.last, "last_image"))
        for number, (value, option, name) in enumerate(given, 1):
            if value is None and number <= needed:
                raise ValueError(
                    f"{place}the network computes {names} from pictures, and one is missing:"
                    f" {options.missing.format(name)}"
                )
            if value is not None and number > most:
                takes = "no picture" if most == 0 else "the first picture alone"
                raise ValueError(
                    f"{place}{option} {value}: the network takes {takes}; leave it out"
                )
        if self.last is not None and self.first is None:
            raise ValueError(
                f"{place}{options.last} {self.last}: there is no first picture;"
                f" {options.missing.format('image')}"
            )
        if self.last is not None and frames < 2:
            raise ValueError(
                f"{place}{options.last} {self.last}: a sample of {options.frames} {frames} has one"
                " picture; leave it out"
            )

    def inputs(
        self, decoder: Any, wanted: Sequence[SampleInput], *, size: Size, multiple: int
    ) -> dict[str, Tensor]:
        """The network's inputs that are computed from the pictures, by name.

        `wanted` are the inputs that the network takes. `size` is that of the whole latent in pixels
        (frames, height, width); `multiple` is the side of a token in pixels.

        Raises:
            ValueError: a file is not a picture; the codec of the data is not on this machine, or
                cannot compute one of the inputs.
        """
        ends = {} if self.first is None else self._ends(decoder, wanted, size)
        return ends | self._references(decoder, wanted, size, multiple)

    def _ends(self, decoder: Any, wanted: Sequence[SampleInput], size: Size) -> dict[str, Tensor]:
        option = f"{self._option('first')} {self.first}"
        if not hasattr(decoder, "image_inputs"):
            which = (
                f"is not on this machine; {self.options.encoders} the folder that has it"
                if decoder is None
                else (
                    f"({decoder.name}) reads no pictures; {self.options.encoders} the folder of"
                    " one that does"
                )
            )
            raise ValueError(f"{option}: the VAE of the data {which}")
        frames, height, width = size
        first, last = self.first_picture(height, width), None
        if self.last is not None:
            last = read_picture(self.last, height, width, option=self._option("last"))
        (made,) = decoder.image_inputs(first, last, frames=frames)
        names = {one.name: one.required for one in wanted if one.pictures}
        if lost := [name for name, needed in names.items() if needed and name not in made]:
            raise ValueError(
                f"{option}: the network reads `{lost[0]}`, but the pipeline"
                f" {getattr(decoder, 'model_name', decoder.name)} has no encoder for it;"
                f" {self.options.encoders} a pipeline with an image_encoder"
            )
        return {name: made[name] for name in names if name in made}

    def first_picture(self, height: int, width: int) -> Tensor:
        """The first frame as a tensor [1, 3, H, W] in [-1, 1], by `read_picture`.

        Raises:
            ValueError: the file is missing, or is not a picture.
        """
        assert self.first is not None
        return read_picture(self.first, height, width, option=self._option("first"))

    def check_seen_by(self, encoder: TextEncoder) -> None:
        """Checks that the pictures that `encoder` reads with a prompt are given.

        Raises:
            ValueError: a picture is missing.
        """
        place, missing = self.options.place, self.options.missing
        if not encoder.reads_alone and not self.references:
            raise ValueError(
                f"{place}the text encoder {encoder.name} of the data needs the pictures that the"
                f" prompt changes: {missing.format('reference')}"
            )
        if encoder.sees_first_frame and self.first is None:
            raise ValueError(
                f"{place}the text encoder {encoder.name} of the data needs the first frame beside"
                f" a prompt: {missing.format('image')}"
            )

    def texts(
        self,
        encoder: TextEncoder,
        words: tuple[str, str],
        *,
        alone: Callable[[str, bool], Mapping[str, Tensor]],
    ) -> PromptTexts:
        """The text encoder's tensors for a prompt and its negative prompt, with the pictures.

        `words` are (prompt, negative prompt). `alone` is called with a text and whether it is the
        negative prompt, and encodes it without pictures to rows [L, E] and vectors [E], by name.

        Raises:
            ValueError: the encoder needs a picture and none is given, or a file is not a picture.
        """
        self.check_seen_by(encoder)
        prompt, negative = words
        if encoder.most_pictures and self.references:
            return self._texts_beside_references(encoder, prompt, negative)
        if not encoder.sees_first_frame:
            return PromptTexts(prompt=alone(prompt, False), negative=alone(negative, True))
        assert self.first is not None
        whole = _upright(self.first, option=self._option("first"))
        beside_first = encoder.encode_beside(prompt, [whole])
        return PromptTexts(prompt=beside_first, negative=alone(negative, True))

    def _texts_beside_references(
        self, encoder: TextEncoder, prompt: str, negative: str
    ) -> PromptTexts:
        pictures = [self._upright(file, clear=encoder.sees_alpha) for file in self.references]
        found: dict[str, Mapping[str, Tensor]] = {}
        for text in dict.fromkeys(one for one in (prompt, negative) if one) or [""]:
            made = dict(encoder.encode_beside(text, pictures))
            found[""] = {TEXT: made.pop(NULL_TEXT)}
            found.setdefault(text, made)
        return PromptTexts(prompt=found[prompt], negative=found[negative])

    def _references(
        self, decoder: Any, wanted: Sequence[SampleInput], target: Size, multiple: int
    ) -> dict[str, Tensor]:
        """The latents of the references, by names of the network's inputs.

        `wanted` are these inputs. `target` is the size of the sample: frames, height and width in
        pixels; `multiple` is the side of a token in pixels.

        Raises:
            ValueError: there is no VAE, or a file is not a picture or video.
        """
        if self.references and decoder is None:
            raise ValueError(
                f"{self._named(self.references[0])}: the VAE of the data is not"
                f" on this machine; {self.options.encoders} the folder that has it"
            )
        names = [one.name for one in wanted if one.kind is InputKind.REFERENCE]
        found = {}
        for name, file in zip(names, self.references, strict=False):
            place = self._placement(file, decoder, target, multiple)
            clear = getattr(decoder, "pixel_channels", 3) == 4
            pictures_F3HW = self._reference(file, target[0], place, clear=clear)
            stride = decoder.temporal_stride
            whole = (len(pictures_F3HW) - 1) // stride * stride + 1
            found[name] = decoder.encode(pictures_F3HW[:whole].transpose(0, 1))
        return found

    def _reference(
        self, file: str, frames: int, place: Placement, *, clear: bool = False
    ) -> Tensor:
        """A picture [1, 3, H, W], or at most `frames` frames of a video, in [-1, 1].

        It is scaled and cropped as `place` says. With `clear` a picture is [1, 4, H, W], because it
        keeps its transparency.
        """
        if is_video(file):
            width, height = place.size
            option = self._option("reference_video")
            return read_clip(file, (frames, height, width), option=option, place=place)
        return _colours(place.apply(self._upright(file, clear=clear)))

    def _upright(self, file: str, *, clear: bool = False) -> Image.Image:
        if is_video(file):
            return first_of_clip(file, option=self._option("reference_video"))
        return _upright(file, option=self._option("reference"), clear=clear)

    def _placement(self, file: str, decoder: Any, target: Size, multiple: int) -> Placement:
        """How a reference is scaled and cropped before it is encoded, as in data_prep.

        Raises:
            ValueError: --reference_size is `published`, and the codec's pipelines edit no pictures.
        """
        width, height = self._upright(file).size
        if self.reference_size == ReferenceFit.TARGET:
            return _covering((width, height), target[1:])
        is_published = self.reference_size == ReferenceFit.PUBLISHED
        if is_published:
            if not getattr(decoder, "edits_pictures", False):
                raise ValueError(
                    f"--reference_size published: no pipeline of the codec {decoder.name} edits"
                    " pictures; set --reference_size to own or target"
                )
            width, height = decoder.reference_size(width, height)
        wide, high = (max(side // multiple, 1) * multiple for side in (width, height))
        if is_published and not getattr(decoder, "crops_references", False):
            return Placement((wide, high), (wide, high))
        return Placement((max(width, wide), max(height, high)), (wide, high))

    def shown(self, height: int, width: int) -> np.ndarray | None:
        """References side by side, or else the first frame, as uint8 [H, W, 3] for the grid.

        Each picture fills `height` x `width` pixels. Returns None if there is no picture.
        """
        each = [
            self._reference(file, 1, _covering(self._upright(file).size, (height, width)))
            for file in self.references
        ]
        if not each and self.first is not None:
            each = [self.first_picture(height, width)]
        return beside(*map(_uint8, each)) if each else None


def _covering(size: tuple[int, int], sides: tuple[int, int]) -> Placement:
    """The scaling and crop with which a picture of `size` (width, height) covers `sides`.

    `sides` is (height, width).
    """
    height, width = sides
    return Placement(cover(*size, (width, height)), (width, height))


def _uint8(colours_13HW: Tensor) -> np.ndarray:
    return ((colours_13HW[0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()


def read_picture(file: str, height: int, width: int, *, option: str) -> Tensor:
    """A picture [1, 3, H, W] in [-1, 1], resized like Diffusers' `VaeImageProcessor` does it.

    `option` names the file in messages.

    Raises:
        ValueError: the file is missing, or is not a picture.
    """
    return _colours(_upright(file, option=option).resize((width, height), Image.Resampling.LANCZOS))


def _colours(picture: Image.Image) -> Tensor:
    """An RGB picture as [1, 3, H, W], or an RGBA one as [1, 4, H, W], in [-1, 1]."""
    colours_HWC = torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255)
    return (2 * colours_HWC - 1).permute(2, 0, 1)[None]


def _upright(file: str, *, option: str, clear: bool = False) -> Image.Image:
    try:
        with Image.open(file) as opened:
            return (to_rgba if clear else to_rgb)(upright(opened))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{option} {file} cannot be read as a picture ({reason(error)}); give a PNG or JPEG"
        ) from error

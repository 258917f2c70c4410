"""The codec without weights: space to depth."""

# C colour or latent channels, F frames, H rows, W columns

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from dit.codecs.dataset_card import CodecError
from dit.codecs.normalization import Whitening
from dit.codecs.vae.codec import LATENT_DTYPE, Codec


@dataclass(frozen=True, kw_only=True)
class Pixel(Codec):
    """Each square of `block` x `block` pixels becomes one latent cell, order (colour, row, column).

    The 256 levels of 8-bit pictures come back exactly: whitening and rounding to half precision
    change a value by at most 2 * 2**-11, an eighth of the distance between two levels.
    """

    name: ClassVar[str] = "pixel"
    description: ClassVar[str] = "the pixels themselves, space to depth; whitened by the dataset"
    media: ClassVar[tuple[str, ...]] = ("image", "video")
    is_exact: ClassVar[bool] = True
    whitens_by_dataset: ClassVar[bool] = True
    weights: ClassVar[str] = "none"

    block: int
    colours: int
    image_conditioning: bool = False  # whether shards get what image-to-video models read

    def __post_init__(self) -> None:
        if self.block < 1:
            raise CodecError(f"--pixel_block {self.block} must be at least 1 pixel")
        if self.colours not in (1, 3):
            raise CodecError(f"--pixel_channels {self.colours} must be 1 (grey) or 3 (RGB)")

    @classmethod
    def of(cls, *, block: int, colours: int, image_conditioning: bool = False) -> Self:
        """A codec before its whitening is measured."""
        return cls(
            block=block,
            colours=colours,
            image_conditioning=image_conditioning,
            whitening=Whitening.identity(colours * block**2),
        )

    options: ClassVar[frozenset[str]] = frozenset(
        ("pixel_block", "pixel_channels", "whitening_from")
    )

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        group = parser.add_argument_group("processor pixel")
        group.add_argument(
            "--pixel_block",
            type=int,
            default=4,
            metavar="PIXELS",
            help="Side, in pixels, of the square in one latent cell. (default: %(default)s)",
        )
        group.add_argument(
            "--pixel_channels",
            type=int,
            default=3,
            metavar="CHANNELS",
            help="Colour channels kept: 3 for RGB, 1 for grey. (default: %(default)s)",
        )

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        return cls.of(block=args.pixel_block, colours=args.pixel_channels)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        return cls.of(
            block=int(settings["block"]),
            colours=int(settings["pixel_channels"]),
            image_conditioning=settings.get("image_conditioning", False),
        )

    @property
    def settings(self) -> dict[str, Any]:
        inputs = {"image_conditioning": True} if self.image_conditioning else {}
        return {"block": self.block, "pixel_channels": self.colours} | inputs

    @property
    def pixel_channels(self) -> int:
        return self.colours

    @property
    def channels(self) -> int:
        return self.colours * self.block**2

    @property
    def stride(self) -> int:
        return self.block

    def extra_bytes(self, *, frames: int, height: int, width: int) -> int:
        frame = height * width * self.colours * LATENT_DTYPE.itemsize
        return (1 + frames) * frame if self.image_conditioning else 0

    def encode_batch(
        self, videos: Sequence[Tensor], *, keys: Sequence[str]
    ) -> list[dict[str, Tensor]]:
        found = super().encode_batch(videos, keys=keys)
        if not self.image_conditioning:
            return found
        first_NCHW = torch.stack([video_CFHW[:, 0] for video_CFHW in videos])
        inputs = self.image_inputs(first_NCHW, None, frames=videos[0].shape[1])
        return [
            parts | {name: value.to(LATENT_DTYPE) for name, value in more.items()}
            for parts, more in zip(found, inputs, strict=True)
        ]

    def image_inputs(
        self, first_NCHW: Tensor, last_NCHW: Tensor | None, *, frames: int
    ) -> list[dict[str, Tensor]]:
        """What image-to-video models read of pictures in [-1, 1], as the codec of Wan makes it.

        `condition_latent` [C, F, H, W] is the latent of the first frame, and the last where it is
        given, with grey frames elsewhere; `first_frame_latent` [C, 1, H, W] is that of the first.
        """
        samples, _, *size = first_NCHW.shape
        video_NCFHW = first_NCHW.new_zeros(samples, self.colours, frames, *size)  # 0 is mid grey
        video_NCFHW[:, :, 0] = self._coloured(first_NCHW)
        if last_NCHW is not None:
            video_NCFHW[:, :, -1] = self._coloured(last_NCHW)
        conditions = (self.whitening.apply(self.encode_raw(video)) for video in video_NCFHW)
        return [{"condition_latent": c, "first_frame_latent": c[:, :1]} for c in conditions]

    def _coloured(self, picture_NCHW: Tensor) -> Tensor:
        """Pictures with the colours of this codec; RGB becomes grey by the weights of Pillow."""
        if picture_NCHW.shape[1] == self.colours:
            return picture_NCHW
        weights_C = picture_NCHW.new_tensor([0.299, 0.587, 0.114])  # ITU-R 601-2
        return (picture_NCHW * weights_C[:, None, None]).sum(1, keepdim=True)

    def encode_raw(self, video_CFHW: Tensor) -> Tensor:
        frames_FCHW = self._coloured(video_CFHW.transpose(0, 1))  # given pictures are RGB
        return functional.pixel_unshuffle(frames_FCHW, self.block).transpose(0, 1)

    def decode_raw(self, latent_CFHW: Tensor) -> Tensor:
        frames_FCHW = latent_CFHW.transpose(0, 1)
        return functional.pixel_shuffle(frames_FCHW, self.block).transpose(0, 1)

"""The codec without weights: space to depth."""

# C colour or latent channels, F frames, H rows, W columns

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor
from torch.nn import functional

from dit.codecs.dataset_card import CodecError
from dit.codecs.normalization import Whitening
from dit.codecs.vae.codec import Codec


@dataclass(frozen=True, kw_only=True)
class Pixel(Codec):
    """Each square of `block` x `block` pixels becomes one latent cell, order (colour, row, column).

    The 256 levels of 8-bit pictures come back exactly: whitening and rounding to half precision
    change a value by at most 2 * 2**-11, an eighth of the distance between two levels.
    """

    name: ClassVar[str] = "pixel"
    description: ClassVar[str] = "the pixels themselves, space to depth; whitened by the dataset"
    media: ClassVar[tuple[str, ...]] = ("image", "video")
    whitens_by_dataset: ClassVar[bool] = True
    weights: ClassVar[str] = "none"

    block: int
    colours: int

    def __post_init__(self) -> None:
        if self.block < 1:
            raise CodecError(f"--pixel_block {self.block} must be at least 1 pixel")
        if self.colours not in (1, 3):
            raise CodecError(f"--pixel_channels {self.colours} must be 1 (grey) or 3 (RGB)")

    @classmethod
    def of(cls, *, block: int, colours: int) -> Self:
        """A codec before its whitening is measured."""
        whitening = Whitening.identity(colours * block**2)
        return cls(block=block, colours=colours, whitening=whitening)

    options: ClassVar[frozenset[str]] = frozenset(("pixel_block", "pixel_channels"))

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
        return cls.of(block=int(settings["block"]), colours=int(settings["pixel_channels"]))

    @property
    def settings(self) -> dict[str, Any]:
        return {"block": self.block, "pixel_channels": self.colours}

    @property
    def pixel_channels(self) -> int:
        return self.colours

    @property
    def channels(self) -> int:
        return self.colours * self.block**2

    @property
    def stride(self) -> int:
        return self.block

    def encode_raw(self, video_CFHW: Tensor) -> Tensor:
        frames_FCHW = video_CFHW.transpose(0, 1)
        return functional.pixel_unshuffle(frames_FCHW, self.block).transpose(0, 1)

    def decode_raw(self, latent_CFHW: Tensor) -> Tensor:
        frames_FCHW = latent_CFHW.transpose(0, 1)
        return functional.pixel_shuffle(frames_FCHW, self.block).transpose(0, 1)

"""The codec without weights: each square of pixels becomes a latent cell (space to depth).

The channels are the pixels themselves, or their frequencies.
"""

# N videos, C colour or latent channels, F frames, H rows, W columns, K frequencies

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from dit.codecs.dataset_card import CodecError
from dit.codecs.encoder_options import Basis, PixelOptions
from dit.codecs.normalization import Moments, Whitening
from dit.codecs.vae.codec import LATENT_DTYPE, Codec
from dit.command_line import option_names


def cosines(size: int) -> Tensor:
    """The matrix [K, size] of the orthonormal DCT-II, float64.

    Row k is a cosine of k half periods.

    N. Ahmed, T. Natarajan and K. R. Rao, "Discrete Cosine Transform" (1974), Eq. 1.
    """
    k_K1, place = torch.arange(size).double()[:, None], torch.arange(size).double() + 0.5
    waves = torch.cos(math.pi / size * k_K1 * place) * math.sqrt(2 / size)
    waves[0] /= math.sqrt(2)
    return waves


@cache
def frequencies(colours: int, block: int) -> Tensor:
    """The orthonormal matrix [C, C], float32, from the pixels of a cell to its frequencies.

    A cell has `block` x `block` pixels with `colours` colours. Pixels and frequencies are ordered
    (colour, row, column). The cosines of three colours are proportional to (1, 1, 1), (1, 0, -1)
    and (1, -2, 1): grey, red against blue, and green against both.
    """
    plane = torch.kron(cosines(block), cosines(block))
    return torch.kron(cosines(colours), plane).float()


@dataclass(frozen=True, kw_only=True)
class Pixel(Codec):
    """A codec without weights: a square of `block` x `block` pixels becomes one latent cell.

    With `basis` dct, channels are the frequencies of the cell (`frequencies`), each divided by the
    root of its standard deviation, with a common factor that makes the mean square 1. Large shapes
    then emerge from the noise before details, and low noise levels change every pixel little;
    whitened frequencies, like pixels, have as much noise in the finest detail as in the overall
    colour.

    8-bit pictures are restored exactly: whitening and rounding to half precision change a pixel by
    at most 2 * 2**-11, an eighth of the distance between two of the 256 levels. Frequencies are
    rounded by at most 2**-11 of each, so the root mean square change of a cell's pixels is at most
    2 * 2**-11 as well.
    """

    name = "pixel"
    description = "the pixels themselves, space to depth; scaled by the dataset"
    media = ("image", "video")
    is_exact = True
    whitens_by_dataset = True
    default_model = "none"

    block: int
    colours: int
    image_conditioning: bool = False  # whether shards get what image-to-video models read
    basis: Basis = Basis.PIXELS

    def __post_init__(self) -> None:
        if self.block < 1:
            raise CodecError(f"--pixel_block {self.block} must be at least 1 pixel")
        if self.colours not in (1, 3):
            raise CodecError(f"--pixel_channels {self.colours} must be 1 (grey) or 3 (RGB)")

    @classmethod
    def of(cls, *, block: int, colours: int, **others: Any) -> Self:
        """A codec whose whitening has not been measured yet; `others` are further fields."""
        whitening = Whitening.identity(colours * block**2)
        return cls(block=block, colours=colours, whitening=whitening, **others)

    options = frozenset((*option_names(PixelOptions), "whitening_from"))

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        basis = Basis(args.pixel_basis)
        return cls.of(block=args.pixel_block, colours=args.pixel_channels, basis=basis)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        return cls.of(
            block=int(settings["block"]),
            colours=int(settings["pixel_channels"]),
            image_conditioning=settings.get("image_conditioning", False),
            basis=Basis(settings.get("basis", Basis.PIXELS)),  # older cards have none
        )

    @property
    def settings(self) -> dict[str, Any]:
        inputs = {"image_conditioning": True} if self.image_conditioning else {}
        basis = {} if self.basis is Basis.PIXELS else {"basis": self.basis.value}
        return {"block": self.block, "pixel_channels": self.colours} | basis | inputs

    @property
    def pixel_channels(self) -> int:
        return self.colours

    @property
    def channels(self) -> int:
        return self.colours * self.block**2

    @property
    def stride(self) -> int:
        return self.block

    def fitted(self, moments: Moments) -> Self:
        fit = super().fitted(moments)
        if self.basis is Basis.PIXELS or not moments.count:
            return fit
        std_C = torch.tensor(fit.whitening.std, dtype=torch.float64)
        scale_C = (std_C * std_C.mean()).sqrt()  # mean of (std / scale)^2 is 1
        return replace(fit, whitening=replace(fit.whitening, std=tuple(scale_C.float().tolist())))

    def extra_bytes(self, *, frames: int, height: int, width: int) -> int:
        frame = height * width * self.colours * LATENT_DTYPE.itemsize
        return (1 + frames) * frame if self.image_conditioning else 0

    def encode_batch(
        self, videos: Sequence[Tensor], *, keys: Sequence[str]
    ) -> list[dict[str, Tensor]]:
        """The tensors to store for each of `videos` [C, F, H, W]: a dict by name.

        With `image_conditioning` it includes the inputs of image-to-video models.
        """
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
        """The inputs of image-to-video models: for each first frame a dict, as by Wan's codec.

        `first_NCHW` and `last_NCHW` are first and last frames in [-1, 1]. `condition_latent` [C, F,
        H, W] is the latent of a clip of `frames` frames, which has the given frames and is grey
        elsewhere; `first_frame_latent` [C, 1, H, W] is the first frame's latent.
        """
        samples, _, *size = first_NCHW.shape
        video_NCFHW = first_NCHW.new_zeros(samples, self.colours, frames, *size)  # 0 is mid grey
        video_NCFHW[:, :, 0] = self._coloured(first_NCHW)
        if last_NCHW is not None:
            video_NCFHW[:, :, -1] = self._coloured(last_NCHW)
        conditions = (self.whitening.apply(self.encode_raw(video)) for video in video_NCFHW)
        return [{"condition_latent": c, "first_frame_latent": c[:, :1]} for c in conditions]

    def _coloured(self, picture_NCHW: Tensor) -> Tensor:
        """Converts pictures [N, C, H, W] to this codec's number of colours; grey by ITU-R 601-2."""
        if picture_NCHW.shape[1] == self.colours:
            return picture_NCHW
        weights_C = picture_NCHW.new_tensor([0.299, 0.587, 0.114])  # ITU-R 601-2
        return (picture_NCHW * weights_C[:, None, None]).sum(1, keepdim=True)

    def encode_raw(self, video_CFHW: Tensor) -> Tensor:
        frames_FCHW = self._coloured(video_CFHW.transpose(0, 1))  # given pictures are RGB
        cells_FCHW = functional.pixel_unshuffle(frames_FCHW, self.block)
        return self._turned(cells_FCHW.transpose(0, 1), back=False)

    def decode_raw(self, latent_CFHW: Tensor) -> Tensor:
        frames_FCHW = self._turned(latent_CFHW, back=True).transpose(0, 1)
        return functional.pixel_shuffle(frames_FCHW, self.block).transpose(0, 1)

    def _turned(self, cells_CFHW: Tensor, *, back: bool) -> Tensor:
        """Transforms pixels of each cell to latent channels by `basis`; `back` is the inverse."""
        if self.basis is Basis.PIXELS:
            return cells_CFHW
        matrix_CC = frequencies(self.colours, self.block).to(cells_CFHW)
        return torch.einsum("kc,cfhw->kfhw", matrix_CC.T if back else matrix_CC, cells_CFHW)

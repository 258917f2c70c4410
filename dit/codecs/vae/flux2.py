"""Codecs on FLUX.2's autoencoder, which normalises 2 x 2 cells together."""

# N pictures, C channels of the autoencoder, F frames, H rows, W columns

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor

from dit.codecs.normalization import Whitening
from dit.codecs.vae.autoencoder import Autoencoder

_PATCH = 2  # cells of the autoencoder along one side of a latent cell, as the pipelines fix it
_MOST_PIXELS = 1024 * 1024  # of a reference, in the pipelines


class Flux2(Autoencoder):
    """The codec of FLUX.2: images with cells of 16 x 16 pixels.

    A cell has 32 x 2 x 2 numbers, ordered (c, h, w). Each of the 128 is normalised by the running
    mean and variance of the autoencoder's batch norm, which are stored with its weights.
    """

    name = text_encoder = "flux2"
    description = "(2x2 cells - mean) / sqrt(variance + eps), as Flux2Pipeline"
    media = ("image",)
    default_model = "black-forest-labs/FLUX.2-dev"
    vae = "AutoencoderKLFlux2"
    tuning = ("conf/flux2_lora.yaml", "model.name=flux2_dev")
    tuning_of_edits = ("model.reference_latents=1",)
    has_time = False
    patch = 1
    statistics = ("bn.running_mean", "bn.running_var")
    edits_pictures = True
    crops_references = True
    channels_last: ClassVar[bool] = False
    """Whether the numbers of a latent cell are in the order (h, w, c)."""

    @staticmethod
    def reference_size(width: int, height: int) -> tuple[int, int]:
        """A size of the same aspect with at most a megapixel, as in Flux2ImageProcessor."""
        if width * height <= _MOST_PIXELS:
            return width, height
        scale = math.sqrt(_MOST_PIXELS / (width * height))
        return int(width * scale), int(height * scale)

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        mean_C, variance_C = (config[name].double() for name in cls.statistics)
        std_C = (variance_C + cls.eps_of(config)).sqrt()
        return Whitening(mean=tuple(mean_C.tolist()), std=tuple(std_C.tolist()))

    @staticmethod
    def eps_of(config: dict[str, Any]) -> float:
        """The number that is added to variances, by the VAE's configuration `config`."""
        return config["batch_norm_eps"]

    @property
    def channels(self) -> int:
        return super().channels * _PATCH**2

    @property
    def stride(self) -> int:
        return 2 ** (len(self._config["block_out_channels"]) - 1) * _PATCH

    def decode_raw(self, latent_CFHW: Tensor) -> Tensor:
        cells = (_PATCH, _PATCH)
        if self.channels_last:
            split = latent_CFHW.unflatten(0, (*cells, -1)).movedim(2, 0)
        else:
            split = latent_CFHW.unflatten(0, (-1, *cells))
        return super().decode_raw(split.permute(0, 3, 4, 1, 5, 2).flatten(4).flatten(2, 3))

    def _cells(self, values_NCFHW: Tensor) -> Tensor:
        split = values_NCFHW.unflatten(4, (-1, _PATCH)).unflatten(3, (-1, _PATCH))
        cells = split.permute(0, 1, 4, 6, 2, 3, 5)
        return (cells.movedim(1, 3) if self.channels_last else cells).flatten(1, 3)


class ErnieImage(Flux2):
    """The codec of ERNIE-Image: FLUX.2's, with the eps with which the network was trained."""

    name = text_encoder = "ernie_image"
    description = "(2x2 cells - mean) / sqrt(variance + 1e-5), as ErnieImagePipeline"
    default_model = "baidu/ERNIE-Image"
    tuning = ("conf/ernie_image_lora.yaml",)
    tuning_of_edits = ()
    edits_pictures = crops_references = False

    @staticmethod
    def eps_of(config: dict[str, Any]) -> float:  # noqa: ARG004
        return 1e-5  # fixed in the pipeline; config.json says 1e-4


class Ideogram4(Flux2):
    """The codec of Ideogram 4: FLUX.2's, with another order of the numbers in a cell."""

    name = text_encoder = "ideogram4"
    description = "(2x2 cells - mean) / sqrt(variance + eps), order (h, w, c), as Ideogram4Pipeline"
    default_model = "ideogram-ai/ideogram-4-fp8"
    tuning = ("conf/ideogram4_lora.yaml",)
    tuning_of_edits = ()
    edits_pictures = crops_references = False
    channels_last = True


class Flux2Klein(Flux2):
    """The codec of FLUX.2 klein: FLUX.2's, with klein's text encoder."""

    name = text_encoder = "flux2_klein"
    description = "as flux2; text of three layers of Qwen3"
    default_model = "black-forest-labs/FLUX.2-klein-base-4B"
    tuning = ("conf/flux2_lora.yaml", "model.name=custom")  # 4B or 9B


class Flux3Klein(Flux2):
    """The codec of FLUX.3 klein: FLUX.2's, with FLUX.3's text encoder.

    Reference pictures are scaled as FLUX.3's pipeline scales them if it is given several.
    """

    name = text_encoder = "flux3_klein"
    description = "as flux2; text of eight layers of Qwen3-VL"
    default_model = "black-forest-labs/flux-3-image-klein-base"
    tuning = ("conf/flux3_lora.yaml",)

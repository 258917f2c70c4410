"""The codec of FLUX.2, which normalises 2 x 2 cells of its autoencoder together."""

# N pictures, C channels of the autoencoder, F frames, H rows, W columns

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dit.codecs.normalization import Whitening
from dit.codecs.vae.autoencoder import Autoencoder

_PATCH = 2  # cells of the autoencoder along one side of a latent cell, as the pipelines fix it
_MOST_PIXELS = 1024 * 1024  # of a reference, in the pipelines


class Flux2(Autoencoder):
    """Images, each latent cell of 16 x 16 pixels: 2 x 2 cells of 32 numbers, order (c, h, w).

    Each of the 128 is normalised by the running mean and variance of the autoencoder's batch norm,
    which lie among its weights.
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

    @staticmethod
    def reference_size(width: int, height: int) -> tuple[int, int]:
        """At most a megapixel of the same ratio, as Flux2ImageProcessor scales a picture."""
        if width * height <= _MOST_PIXELS:
            return width, height
        scale = math.sqrt(_MOST_PIXELS / (width * height))
        return int(width * scale), int(height * scale)

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        mean_C, variance_C = (config[name].double() for name in cls.statistics)
        std_C = (variance_C + config["batch_norm_eps"]).sqrt()
        return Whitening(mean=tuple(mean_C.tolist()), std=tuple(std_C.tolist()))

    @property
    def channels(self) -> int:
        return super().channels * _PATCH**2

    @property
    def stride(self) -> int:
        return 2 ** (len(self._config["block_out_channels"]) - 1) * _PATCH

    def decode_raw(self, latent_CFHW: Tensor) -> Tensor:
        split = latent_CFHW.unflatten(0, (-1, _PATCH, _PATCH)).permute(0, 3, 4, 1, 5, 2)
        return super().decode_raw(split.flatten(4).flatten(2, 3))

    def _encode(self, video_NCFHW: Tensor, keys: Sequence[str] | None) -> Tensor:
        cells = super()._encode(video_NCFHW, keys)
        split = cells.unflatten(4, (-1, _PATCH)).unflatten(3, (-1, _PATCH))
        return split.permute(0, 1, 4, 6, 2, 3, 5).flatten(1, 3)


class Flux2Klein(Flux2):
    """The same, with the text encoder of klein."""

    name = text_encoder = "flux2_klein"
    description = "as flux2; text of three layers of Qwen3"
    default_model = "black-forest-labs/FLUX.2-klein-base-4B"
    tuning = ("conf/flux2_lora.yaml", "model.name=custom")  # 4B or 9B

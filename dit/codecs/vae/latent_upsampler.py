"""Enlarges latents of LTX-2, between the two stages of its pipelines."""

# C channels, F frames, H rows, W columns of a latent

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.codecs.normalization import Whitening
from dit.codecs.pretrained import published
from dit.codecs.vae.ltx import Ltx2
from dit.parsing import parse_json
from dit.system_errors import explained, reason

FOLDER, CONFIG = "latent_upsampler", "config.json"
KIND = "LTX2LatentUpsamplerModel"


@dataclass(frozen=True, kw_only=True)
class LatentUpsampler:
    """The network of a `LTX2LatentUpsamplePipeline`, for whitened latents."""

    place: Path
    scale: Fraction
    """Factor of rows and columns, above 1."""
    precision: str
    whitening: Whitening

    @classmethod
    def of(cls, folder: str | Path, decoder: Any) -> Self:
        """The upsampler in `folder`, or in its folder `latent_upsampler`, for latents of `decoder`.

        Its weights are read at their first use, in the precision of the VAE.

        Raises:
            CodecError: there is no upsampler of LTX-2's frames, or it is for other latents.
        """
        place = Path(folder)
        place = place if (place / CONFIG).is_file() else place / FOLDER
        file, said = place / CONFIG, f"--upsampler {folder}"
        remedy = f"give the folder of a {KIND} that enlarges rows and columns"
        try:
            config = parse_json(file.read_bytes())
        except (OSError, ValueError) as error:
            raise CodecError(
                f"{said}: {file} cannot be read ({reason(error)}); {remedy}"
            ) from error
        kind = config.get("_class_name") if isinstance(config, dict) else None
        if kind != KIND:
            raise CodecError(f"{said}: {file} is of class {kind!r}; {remedy}")
        scale = config.get("rational_spatial_scale", 2.0)
        if not config.get("use_rational_resampler", True):
            scale = 2.0
        in_space = config.get("spatial_upsample", True) and not config.get("temporal_upsample")
        if not in_space or not isinstance(scale, int | float) or not 1 < scale <= 4:
            raise CodecError(f"{said}: {file} does not enlarge rows and columns alone; {remedy}")
        channels = config.get("in_channels", 128)
        if not isinstance(decoder, Ltx2) or channels != decoder.channels:
            own = "no VAE of LTX-2" if not isinstance(decoder, Ltx2) else f"{decoder.channels}"
            raise CodecError(
                f"{said}: {file} enlarges latents of LTX-2 with {channels} channels, and the run"
                f" has {own}; give the upsampler of the run's own VAE, or leave it out"
            )
        return cls(
            place=place,
            scale=Fraction(scale).limit_denominator(8),
            precision=decoder.precision,
            whitening=decoder.whitening,
        )

    def smaller(self, latent_FHW: tuple[int, int, int]) -> tuple[int, int, int]:
        """The size in latent cells that is enlarged to `latent_FHW`.

        Rows and columns of the latter must be multiples of the numerator of `scale`.
        """
        frames, rows, columns = latent_FHW
        return frames, int(rows / self.scale), int(columns / self.scale)

    @property
    def model(self) -> Any:
        """Diffusers' network, in host memory.

        Raises:
            CodecError: its weights cannot be read.
        """
        return _loaded(self.place, self.precision)

    def enlarged(self, latent_CFHW: Tensor) -> Tensor:
        """The latent [C, F, H * scale, W * scale] of `latent_CFHW`, whitened as it is, float32.

        It is computed on the device of `latent_CFHW`, and the network returns to host memory.
        """
        model = self.model.to(latent_CFHW.device)
        with torch.inference_mode():
            raw_CFHW = self.whitening.undo(latent_CFHW).to(model.dtype)
            large_CFHW = self.whitening.apply(model(raw_CFHW[None])[0])
        model.to("cpu")
        return large_CFHW.clone()


@lru_cache
def _loaded(place: Path, precision: str) -> Any:
    from safetensors import SafetensorError

    kind = published(f"diffusers.pipelines.ltx2.latent_upsampler:{KIND}")
    try:
        model = kind.from_pretrained(place, torch_dtype=getattr(torch, precision))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CodecError(
            f"--upsampler {place}: the weights cannot be read ({explained(error)}); download the"
            " folder again"
        ) from error
    return model.requires_grad_(False).eval()

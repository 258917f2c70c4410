"""Codecs on the autoencoders of Diffusers."""

# N samples, C colour or latent channels, F frames, H rows, W columns, E width

from __future__ import annotations

import hashlib
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from PIL import Image
from torch import Tensor

from dit.codecs.normalization import Whitening
from dit.codecs.pretrained import PipelineComponent, load, model_config_of
from dit.codecs.vae.codec import LATENT_DTYPE, Codec


@dataclass(frozen=True, kw_only=True)
class Autoencoder(Codec):
    """A codec whose weights lie in the folder `vae` of a Diffusers pipeline.

    A new family is a subclass with the names of its classes and the normalisation of its pipeline.
    """

    vae: ClassVar[str]  # class name
    default_model: ClassVar[str]
    image_encoder: ClassVar[str | None] = None  # class name; only image-to-video models have one
    image_processor: ClassVar[str] = "image_processor"  # name of its folder
    has_time: ClassVar[bool] = True  # whether it takes videos
    takes_batches: ClassVar[bool] = True

    model_name: str
    channels_: int
    precision: str = "float32"
    stochastic: bool = False
    image_conditioning: bool = False
    tiling: bool = False
    slicing: bool = False
    cache: str | None = None
    device: str = "cpu"
    local_only: bool = False

    @classmethod
    @abstractmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        """The normalisation of latents in the pipeline of the model."""

    options: ClassVar[frozenset[str]] = frozenset(
        ("model_name", "precision", "slicing", "stochastic", "tiling", "vae_cache_folder")
    ) | {"workload_type"}

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        return cls._of(
            model_name=args.model_name or cls.default_model,
            precision=args.precision,
            stochastic=args.stochastic,
            image_conditioning=args.workload_type == "i2v",
            tiling=args.tiling,
            slicing=args.slicing,
            cache=str(args.vae_cache_folder) if args.vae_cache_folder else None,
        )

    @classmethod
    def _of(
        cls, *, model_name: str, cache: str | None = None, local_only: bool = False, **options: Any
    ) -> Self:
        part = PipelineComponent(
            library="diffusers",
            kind=cls.vae,
            model=model_name,
            subfolder="vae",
            cache=cache,
            local_only=local_only,
        )
        config = model_config_of(part)
        channels = config.get("latent_channels") or config["z_dim"]
        given = {**options, "model_name": model_name, "cache": cache, "channels_": channels}
        given["local_only"] = local_only
        return cls(whitening=cls.whitening_of(config), **given)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        names = ("model_name", "precision", "stochastic", "image_conditioning")
        options = {name: settings[name] for name in names}
        options |= {k: settings[k] for k in ("cache", "local_only") if k in settings}
        return cls._of(**options)

    @property
    def settings(self) -> dict[str, Any]:
        names = ("model_name", "precision", "stochastic", "image_conditioning")
        return {name: getattr(self, name) for name in (*names, "tiling", "slicing")}

    @property
    def pixel_channels(self) -> int:
        return 3

    @property
    def channels(self) -> int:
        return self.channels_

    @property
    def _config(self) -> dict[str, Any]:
        return model_config_of(self._part)

    @property
    def _part(self) -> PipelineComponent:
        return PipelineComponent(
            library="diffusers",
            kind=self.vae,
            model=self.model_name,
            subfolder="vae",
            cache=self.cache,
            local_only=self.local_only,
        )

    @contextmanager
    def visiting(self, device: torch.device) -> Iterator[None]:
        model = self.model
        home = model.device
        model.to(device)
        try:
            yield
        finally:
            model.to(home)

    @property
    def model(self) -> Any:
        """The network, loaded at its first use."""
        model = load(replace(self._part, precision=self.precision, device=self.device))
        if self.tiling:
            model.enable_tiling()
        if self.slicing:
            model.enable_slicing()
        return model

    def on(self, device: str) -> Self:
        return replace(self, device=device)

    def encode_raw(self, video_CFHW: Tensor) -> Tensor:
        return self._encode(video_CFHW[None], None)[0]

    def decode_raw(self, latent_CFHW: Tensor) -> Tensor:
        model = self.model
        latent = latent_CFHW[None].to(model.device, model.dtype)
        with torch.inference_mode():
            if self.has_time:
                return model.decode(latent).sample[0].float()
            frames = model.decode(latent[0].transpose(0, 1)).sample
            return frames.transpose(0, 1).float()

    def encode_batch(
        self, videos: Sequence[Tensor], *, keys: Sequence[str]
    ) -> list[dict[str, Tensor]]:
        video_NCFHW = torch.stack(list(videos))
        latents = self._encode(video_NCFHW, keys if self.stochastic else None)
        found = [{"latent": self._whitened(latent)} for latent in latents]
        if self.image_conditioning:
            firsts = self._encode(video_NCFHW[:, :, :1], None)
            embeds = self._image_embeds([_picture(video) for video in videos])
            for parts, first, embed in zip(found, firsts, embeds, strict=True):
                parts["first_frame_latent"] = self._whitened(first)
                parts["image_embed"] = embed.to(LATENT_DTYPE)
        return found

    def _whitened(self, latent_CFHW: Tensor) -> Tensor:
        return self.whitening.apply(latent_CFHW).to(LATENT_DTYPE)

    def _encode(self, video_NCFHW: Tensor, keys: Sequence[str] | None) -> Tensor:
        """Latents [N, C, F, H, W] on the CPU: means, or with `keys` draws seeded by each key."""
        if len(video_NCFHW) > 1 and not self.takes_batches:
            singly = (self._encode(v[None], keys and [keys[i]]) for i, v in enumerate(video_NCFHW))
            return torch.cat(list(singly))
        model = self.model
        video = video_NCFHW.to(model.device, model.dtype)
        with torch.inference_mode():
            if self.has_time:
                latents = model.encode(video).latent_dist
                mean, std = _moments(latents)
            else:
                mean, std = _moments(model.encode(video[:, :, 0]).latent_dist)
                mean, std = mean[:, :, None], None if std is None else std[:, :, None]
        mean = mean.float().cpu()
        if keys is None or std is None:
            return mean
        noise = torch.stack([_noise(key, mean[0].shape) for key in keys])
        return mean + std.float().cpu() * noise

    def _image_embeds(self, pictures: list[Image.Image]) -> Tensor:
        """Features of the first frames [N, tokens, E]."""
        assert self.image_encoder is not None, f"{self.name} has no image encoder"
        given = {"model": self.model_name, "cache": self.cache, "library": "transformers"}
        processor = load(
            PipelineComponent(kind="AutoImageProcessor", subfolder=self.image_processor, **given)
        )
        encoder = load(
            PipelineComponent(
                kind=self.image_encoder,
                subfolder="image_encoder",
                precision=self.precision,
                device=self.device,
                **given,
            )
        )
        pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            answer = encoder(pixels.to(encoder.device, encoder.dtype), output_hidden_states=True)
        return self.features_of(answer).cpu()

    def features_of(self, answer: Any) -> Tensor:
        """The part of the image encoder's output that the diffusion model is conditioned on."""
        return answer.last_hidden_state


def _moments(latents: Any) -> tuple[Tensor, Tensor | None]:
    """Mean and deviation of a latent distribution; some autoencoders have no deviation."""
    return latents.mode(), getattr(latents, "std", None)


def _noise(key: str, shape: torch.Size) -> Tensor:
    digest = hashlib.blake2b(key.encode(), digest_size=7, person=b"latent").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, generator=generator)


def _picture(video_CFHW: Tensor) -> Image.Image:
    levels_HWC = ((video_CFHW[:, 0].permute(1, 2, 0) + 1) * 127.5).round().to(torch.uint8)
    return Image.fromarray(levels_HWC.numpy())

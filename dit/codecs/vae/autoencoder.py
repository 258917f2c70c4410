"""Codecs on the autoencoders of Diffusers."""

# N samples, C colour or latent channels, F frames, H rows, W columns, E width

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from PIL import Image
from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.codecs.normalization import Whitening
from dit.codecs.pretrained import (
    PipelineComponent,
    has_component,
    load,
    model_config_of,
    tensors_of,
)
from dit.codecs.vae.codec import DISTRIBUTION, DISTRIBUTION_DTYPE, LATENT_DTYPE, Codec

_STORED = ("model_name", "precision", "stochastic", "image_conditioning")
"""Settings that every dataset card of these codecs has."""


@dataclass(frozen=True, kw_only=True)
class Autoencoder(Codec):
    """A codec whose weights are in the folder `vae` of a Diffusers pipeline.

    A new family is a subclass with the names of its classes and the normalisation of its pipeline.
    """

    vae: ClassVar[str]  # class name
    default_models: ClassVar[Mapping[str, str]] = {}  # by --workload_type, where it is another
    workloads: ClassVar[tuple[str, ...]] = ("t2v",)  # of --workload_type; the first is the default
    image_encoder: ClassVar[str | None] = None  # class name; only image-to-video models have one
    image_processor: ClassVar[str] = "image_processor"  # name of its folder
    class_tokens: ClassVar[int] = 0  # of the image encoder, beside those of its patches
    has_time: ClassVar[bool] = True  # whether it takes videos
    takes_batches: ClassVar[bool] = True
    has_distribution: ClassVar[bool] = True  # whether its latents have a variance
    statistics: ClassVar[tuple[str, ...]] = ()  # tensors of its weights that are no weights

    ratios: ClassVar[tuple[str, str]] = ("spatial_compression_ratio", "temporal_compression_ratio")
    """Names of a latent cell's strides, in pixels and in frames, in the VAE's configuration."""

    model_name: str
    precision: str = "float32"
    stochastic: bool = False
    latent_distribution: bool = False  # whether shards get means and log variances
    image_conditioning: bool = False
    last_frame: bool = False  # whether models are given the last frame as well as the first
    tiling: bool = False
    slicing: bool = False
    cache: str | None = None
    device: str = "cpu"
    local_only: bool = False

    @classmethod
    def whitening_of(cls, config: dict[str, Any]) -> Whitening:
        """The pipeline's normalisation of latents, by the VAE's configuration `config`.

        `config` also has the tensors of `statistics`. By default there is one mean and one
        deviation for each channel.
        """
        return Whitening(mean=tuple(config["latents_mean"]), std=tuple(config["latents_std"]))

    options: ClassVar[frozenset[str]] = frozenset(
        ("model_name", "precision", "slicing", "stochastic", "tiling", "vae_cache_folder")
    ) | {"workload_type", "latent_distribution"}

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        workload = args.workload_type or cls.workloads[0]
        if workload not in cls.workloads:
            raise CodecError(
                f"--workload_type {workload}: processor {cls.name!r} has no inputs for it; give"
                f" {' or '.join(cls.workloads)}"
            )
        if args.latent_distribution and not cls.has_distribution:
            raise CodecError(
                f"--latent_distribution: the autoencoder of processor {cls.name!r} has no variance;"
                " leave it out"
            )
        if args.latent_distribution and args.stochastic:
            raise CodecError(
                "--latent_distribution and --stochastic exclude each other: the former stores the"
                " distribution of latents, the latter one draw of it; give one of them"
            )
        return cls._of(
            latent_distribution=args.latent_distribution,
            model_name=args.model_name or cls.default_models.get(workload, cls.default_model),
            precision=args.precision,
            stochastic=args.stochastic,
            image_conditioning=workload != "t2v",
            last_frame=workload == "flf2v",
            tiling=args.tiling,
            slicing=args.slicing,
            cache=str(args.vae_cache_folder) if args.vae_cache_folder else None,
        )

    @classmethod
    def _of(cls, **options: Any) -> Self:
        codec = cls(whitening=Whitening.identity(0), **options)
        config = {**codec._config, **tensors_of(codec._part, cls.statistics)}
        return replace(codec, whitening=cls.whitening_of(config))

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        options = {name: settings[name] for name in _STORED}
        rare = ("cache", "local_only", "last_frame", "latent_distribution")
        options |= {k: settings[k] for k in rare if k in settings}
        return cls._of(**options)

    @property
    def settings(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in (*_STORED, "tiling", "slicing")}
        rare = ("last_frame", "latent_distribution")
        return found | {name: True for name in rare if getattr(self, name)}

    @property
    def pixel_channels(self) -> int:
        return 3

    @property
    def channels(self) -> int:
        return self._config.get("latent_channels") or self._config["z_dim"]

    @property
    def stride(self) -> int:
        return self._config[self.ratios[0]]

    @property
    def temporal_stride(self) -> int:
        return self._config[self.ratios[1]] if self.has_time else 1

    @property
    def _config(self) -> dict[str, Any]:
        return model_config_of(self._part)

    @property
    def _part(self) -> PipelineComponent:
        return PipelineComponent.of(self, "diffusers", self.vae, "vae")

    @property
    def _image_part(self) -> PipelineComponent | None:
        """The image encoder of the pipeline as a component; None if the model has none."""
        if self.image_encoder is None:
            return None
        part = PipelineComponent.of(self, "transformers", self.image_encoder, "image_encoder")
        return part if has_component(part) else None

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
        """The VAE, which is loaded at its first use."""
        model = load(replace(self._part, precision=self.precision, device=self.device))
        if self.tiling:
            model.enable_tiling()
        if self.slicing:
            model.enable_slicing()
        return model

    def on(self, device: str) -> Self:
        return replace(self, device=device)

    @property
    def latent_dtype(self) -> torch.dtype:
        return DISTRIBUTION_DTYPE if self.latent_distribution else LATENT_DTYPE

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
        """The tensors to store for each of `videos` [C, F, H, W]: a dict by name.

        The videos are encoded as one batch. `keys` are the keys of their samples, which seed random
        draws of a `stochastic` codec.
        """
        video_NCFHW = torch.stack(list(videos))
        if self.latent_distribution:
            mean, logvar = self._distribution(video_NCFHW)
            assert logvar is not None, f"the latents of {self.model_name} have no variance"
            pairs = zip(self._cells(mean), self._cells(logvar), strict=True)
            found = [self._whitened(mean_CFHW.cpu(), own.cpu()) for mean_CFHW, own in pairs]
        else:
            latents = self._encode(video_NCFHW, keys if self.stochastic else None)
            found = [{"latent": self.whitening.apply(latent)} for latent in latents]
        if self.image_conditioning:
            last_NCHW = video_NCFHW[:, :, -1] if self.last_frame else None
            frames = video_NCFHW.shape[2]
            inputs = self.image_inputs(video_NCFHW[:, :, 0], last_NCHW, frames=frames)
            found = [parts | more for parts, more in zip(found, inputs, strict=True)]
        return [
            {k: v.to(LATENT_DTYPE) if v.dtype == torch.float32 else v for k, v in parts.items()}
            for parts in found
        ]

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the tensors that `image_inputs` returns."""
        return ("first_frame_latent",) + (("image_embed",) if self._image_part else ())

    @property
    def notices(self) -> tuple[str, ...]:
        if not self.image_conditioning or self._image_part:
            return ()
        return (
            f"no image_embed is written, as {self.model_name} has no image_encoder; where the model"
            " to be trained reads it (Wan 2.1 and HunyuanVideo 1.5 do, Wan 2.2 does not), give the"
            " --model_name of its pipeline",
        )

    def image_inputs(
        self, first_NCHW: Tensor, last_NCHW: Tensor | None, *, frames: int
    ) -> list[dict[str, Tensor]]:
        """The inputs of image-to-video models: for each video a dict by name, float32 on the CPU.

        `first_NCHW` are the first frames, in [-1, 1]; last frames and the number of frames are for
        subclasses. `first_frame_latent` [C, 1, H, W] is the latent of a first frame. `image_embed`
        [tokens, E] has the features of this frame, if the model has an image encoder.
        """
        del last_NCHW, frames
        firsts = self._encode(first_NCHW[:, :, None], None)
        found = [{"first_frame_latent": self.whitening.apply(first)} for first in firsts]
        if "image_embed" in self.input_names:
            embeds = self._image_embeds([picture_of(picture) for picture in first_NCHW])
            found = [one | {"image_embed": e} for one, e in zip(found, embeds, strict=True)]
        return found

    def extra_bytes(self, *, frames: int, height: int, width: int) -> int:
        frame = height // self.stride * (width // self.stride) * self.channels
        latent_frames = 1 + (frames - 1) // self.temporal_stride
        variances = frame * latent_frames * DISTRIBUTION_DTYPE.itemsize * self.latent_distribution
        if not self.image_conditioning:
            return variances
        numbers = {"first_frame_latent": frame}
        numbers["condition_latent"] = frame * latent_frames
        if "image_embed" in self.input_names:
            assert self._image_part is not None
            config = model_config_of(self._image_part)
            rows = (config.image_size // config.patch_size) ** 2 + self.class_tokens
            numbers["image_embed"] = rows * config.hidden_size * (2 if self.last_frame else 1)
        inputs = sum(numbers[name] for name in self.input_names)
        return variances + inputs * LATENT_DTYPE.itemsize

    def _encode(self, video_NCFHW: Tensor, keys: Sequence[str] | None) -> Tensor:
        """Encodes videos as latents [N, C, F, H, W] before whitening, on the CPU.

        Without `keys`, or if the VAE has no variance, latents are means. With `keys` they are
        random draws, each seeded by the key of its sample.
        """
        mean, logvar = self._distribution(video_NCFHW)
        if keys is None or logvar is None:
            return self._cells(mean.float().cpu())
        std = (0.5 * logvar).exp().float().cpu()  # in the type of the model, as Diffusers has it
        noise = torch.stack([_noise(key, mean[0].shape) for key in keys])
        return self._cells(mean.float().cpu() + std * noise)

    def _cells(self, values_NCFHW: Tensor) -> Tensor:
        """The autoencoder's output, regrouped as latents where a subclass needs it."""
        return values_NCFHW

    def _whitened(self, mean_CFHW: Tensor, logvar_CFHW: Tensor) -> dict[str, Tensor]:
        both = self.whitening.apply(mean_CFHW), self.whitening.apply_to_logvar(logvar_CFHW)
        return {k: v.to(DISTRIBUTION_DTYPE) for k, v in zip(DISTRIBUTION, both, strict=True)}

    def _distribution(self, video_NCFHW: Tensor) -> tuple[Tensor, Tensor | None]:
        """Means and log variances [N, C, F, H, W] of the VAE's latents of videos.

        Log variances are None if the VAE has none. A VAE of pictures encodes the first frame alone.
        """
        if len(video_NCFHW) > 1 and not self.takes_batches:
            means, logvars = zip(*map(self._distribution, video_NCFHW.split(1)), strict=True)
            return torch.cat(means), None if logvars[0] is None else torch.cat(logvars)
        model = self.model
        video = video_NCFHW.to(model.device, model.dtype)
        with torch.inference_mode():
            if self.has_time:
                return _moments(model.encode(video).latent_dist)
            mean, logvar = _moments(model.encode(video[:, :, 0]).latent_dist)
        return mean[:, :, None], None if logvar is None else logvar[:, :, None]

    def _image_embeds(self, pictures: list[Image.Image]) -> Tensor:
        """The image encoder's features [N, tokens, E] of N `pictures`, float32 on the CPU."""
        part = self._image_part
        assert part is not None, f"{self.name} has no image encoder"
        processor = load(replace(part, kind="AutoImageProcessor", subfolder=self.image_processor))
        encoder = load(replace(part, precision=self.precision, device=self.device))
        pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            answer = encoder(pixels.to(encoder.device, encoder.dtype), output_hidden_states=True)
        return self.features_of(answer).float().cpu()

    def features_of(self, answer: Any) -> Tensor:
        """The part of the image encoder's output `answer` that the diffusion model reads."""
        return answer.last_hidden_state


def _moments(latents: Any) -> tuple[Tensor, Tensor | None]:
    """Mean and log variance of the latent distribution `latents` of Diffusers.

    The log variance is None for an autoencoder without variance.
    """
    return latents.mode(), getattr(latents, "logvar", None)


def _noise(key: str, shape: torch.Size) -> Tensor:
    digest = hashlib.blake2b(key.encode(), digest_size=7, person=b"latent").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, generator=generator)


def picture_of(picture_CHW: Tensor) -> Image.Image:
    """A tensor [3, H, W] in [-1, 1] as an RGB picture."""
    levels_HWC = ((picture_CHW.permute(1, 2, 0) + 1) * 127.5).round().to(torch.uint8)
    return Image.fromarray(levels_HWC.numpy())

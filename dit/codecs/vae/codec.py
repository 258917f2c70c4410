"""The interface of codecs, for data preparation and generation."""

# C colour or latent channels, F frames, H rows, W columns

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dit.codecs.dataset_encoder import DatasetEncoder
from dit.codecs.normalization import Moments, Whitening
from dit.codecs.rgb import on_white

LATENT_DTYPE = torch.float16
DISTRIBUTION, DISTRIBUTION_DTYPE = ("latent", "latent_logvar"), torch.bfloat16
"""Names in a shard of mean and log variance, for latents stored as distributions; their dtype."""


@dataclass(frozen=True, kw_only=True)
class Codec(DatasetEncoder):
    """Encodes videos and pictures as whitened latents, and decodes latents.

    A new codec is a subclass in a file of this folder.
    """

    kind: ClassVar[str] = "processor"
    card_part: ClassVar[str] = "processor"
    subfolder: ClassVar[str] = "vae"

    description: ClassVar[str]
    media: ClassVar[tuple[str, ...]]  # "image", "video" or both
    default_model: ClassVar[str]  # hub name of the model that is downloaded, or "none"
    text_encoder: ClassVar[str] = "words"  # the one that its diffusion models were trained with
    patch: ClassVar[int] = 2
    """Side of a patch in latent cells, in the networks that take these latents."""

    side_cells: ClassVar[int | None] = None
    """Sides of pictures are multiples of this many latent cells; None: of `patch` cells."""

    edits_pictures: ClassVar[bool] = False
    """Whether pipelines with these latents edit pictures, which they scale to `reference_size`."""

    tuning: ClassVar[tuple[str, ...]] = ()
    """Configuration file, then settings `key=value`, to fine-tune a published network of these
    latents."""
    tuning_of_edits: ClassVar[tuple[str, ...]] = ()
    """Additional settings `key=value`, to fine-tune a network that edits pictures."""
    crops_references: ClassVar[bool] = False
    """Whether editing pipelines crop reference pictures to whole tokens, around the centre."""

    whitening: Whitening

    @property
    @abstractmethod
    def pixel_channels(self) -> int:
        """Number of colour channels of videos: 1 (grey), 3 (RGB) or 4 (RGBA)."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """Number of channels of a latent."""

    @property
    @abstractmethod
    def stride(self) -> int:
        """Side of a latent cell in pixels."""

    @property
    def temporal_stride(self) -> int:
        """Number of frames in each latent frame except the first, which has one.

        Videos have 1 + n * temporal_stride frames.
        """
        return 1

    def extra_bytes(self, *, frames: int, height: int, width: int) -> int:
        """Bytes in a shard of the tensors that `encode_batch` returns besides the latent.

        `frames`, `height` and `width` are those of the video, the latter two in pixels.
        """
        del frames, height, width
        return 0

    @property
    def latent_dtype(self) -> torch.dtype:
        """Dtype of latents in a shard."""
        return LATENT_DTYPE

    @abstractmethod
    def encode_raw(self, video_CFHW: Tensor) -> Tensor:
        """The latent of a video [C, F, H, W] in [-1, 1] before whitening, float32."""

    @abstractmethod
    def decode_raw(self, latent_CFHW: Tensor) -> Tensor:
        """The video [C, F, H, W], float32, of a latent that is not whitened."""

    @staticmethod
    def reference_size(width: int, height: int) -> tuple[int, int]:
        """The (width, height) to which the pipeline scales a picture of this size to edit it.

        Raises:
            NotImplementedError: `edits_pictures` is False.
        """
        raise NotImplementedError(
            "the pipeline of this processor edits no pictures (edits_pictures is False), so there"
            " is no size for a reference picture"
        )

    is_exact: ClassVar[bool] = False
    """Whether `decode` restores the encoded 8-bit pixels exactly, without a network."""

    whitens_by_dataset: ClassVar[bool] = False
    """Whether the whitening is measured on the clips of each dataset, before encoding."""

    def measure(self, video_CFHW: Tensor) -> Moments:
        """Mean and variance of the latent of one video, before whitening."""
        moments = Moments()
        moments.add(self.encode_raw(video_CFHW))
        return moments

    def fitted(self, moments: Moments) -> Self:
        """A copy that whitens by `moments`, which weight each latent cell of a dataset alike.

        Returns the codec itself if no latent was measured.
        """
        return replace(self, whitening=moments.whitening()) if moments.count else self

    @contextmanager
    def visiting(self, device: torch.device) -> Iterator[None]:
        """A context in which the codec's network is on `device`.

        Afterwards the network returns to its former device.
        """
        del device
        yield

    def encode_batch(
        self, videos: Sequence[Tensor], *, keys: Sequence[str]
    ) -> list[dict[str, Tensor]]:
        """The tensors to store for each video: a dict by their names in a shard.

        `videos` have one shape [C, F, H, W], float32 in [-1, 1]. `keys` are the keys of their
        samples, which seed random draws.
        """
        del keys
        return [{"latent": self.encode(video_CFHW)} for video_CFHW in videos]

    def encode(self, video_CFHW: Tensor) -> Tensor:
        """The whitened latent of a video in [-1, 1], float16 as in a shard."""
        return self.whitening.apply(self.encode_raw(video_CFHW)).to(LATENT_DTYPE)

    def decode(self, latent_CFHW: Tensor, *, alpha: bool = False) -> Tensor:
        """Frames of a whitened latent, uint8 [F, H, W, 3] on the CPU; grey is repeated three times.

        Transparent pixels are put on white; with `alpha`, RGBA codecs return [F, H, W, 4].

        Raises:
            ValueError: the latent is not [C, F, H, W] with the channels of this codec.
        """
        if latent_CFHW.dim() != 4 or latent_CFHW.shape[0] != self.channels:
            raise ValueError(
                f"processor {self.name!r} decodes latents [{self.channels}, F, H, W], but was given"
                f" {list(latent_CFHW.shape)}; use the dataset card that the model was trained with"
            )
        video_CFHW = self.decode_raw(self.whitening.undo(latent_CFHW)).cpu()
        levels_CFHW = ((video_CFHW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        levels_FHWC = levels_CFHW.permute(1, 2, 3, 0).contiguous()
        if levels_FHWC.shape[-1] == 4:
            return levels_FHWC if alpha else torch.from_numpy(on_white(levels_FHWC.numpy()))
        return levels_FHWC.expand(-1, -1, -1, 3).contiguous()

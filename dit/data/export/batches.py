"""Joins samples to a batch, under the keys that AutoModel's training reads."""

# B samples, C latent channels, F H W frames, rows, columns; L text tokens, E text width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dit.data.rejections import DataError

_GLYPHS = 256  # tokens to which the pipeline of HunyuanVideo pads its second text
_MULTIPLE = 8  # tokens; AutoModel pads the texts of pictures to a multiple of this
# Our name -> AutoModel's name of tensors that are stacked without padding.
_STACKED = {
    "pooled_text": "pooled_prompt_embeds",
    "image_embed": "image_embeds",
    "first_frame_latent": "first_frame_latent",
    "condition_latent": "condition_latent",
    "loss_mask": "loss_mask",
}
Samples = Sequence[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoBatches:
    """Function that joins videos to a batch; all texts are padded to `text_length` rows."""

    text_length: int

    def __call__(self, samples: Samples) -> dict[str, Any]:
        """Joins `samples` to a batch under AutoModel's names.

        The batch has `video_latents` [B, C, F, H, W], `text_embeddings` [B, L, E], `text_mask`
        [B, L] and `data_type`, "video". If the samples have a second text, it also has
        `text_embeddings_2` and `text_mask_2`. Further inputs, such as `image_embeds`, are stacked.

        Raises:
            ValueError: a text has more than `text_length` rows.
            DataError: some of the samples lack a tensor.
        """
        text_BLE, mask_BL = padded(_all(samples, "text"), self.text_length)
        batch = {
            "video_latents": torch.stack(_all(samples, "latent")),
            "text_embeddings": text_BLE,
            "text_mask": mask_BL,
            "data_type": "video",
        }
        if "text_2" in samples[0]:
            second = _all(samples, "text_2")
            batch["text_embeddings_2"], batch["text_mask_2"] = padded(
                second, max(_GLYPHS, *map(len, second))
            )
        return batch | _stacked(samples)


def image_batch(samples: Samples) -> dict[str, Any]:
    """A batch of pictures, with `image_latents` [B, C, H, W] and `text_embeddings` [B, L, E].

    Raises:
        DataError: a sample is a video, or some of the samples lack a tensor.
    """
    latent_BCFHW = torch.stack(_all(samples, "latent"))
    if latent_BCFHW.shape[2] != 1:
        raise DataError(
            f"sample {samples[0]['key']} has {latent_BCFHW.shape[2]} latent frames and is not a"
            " picture; read videos with build_video_multiresolution_dataloader"
        )
    texts = _all(samples, "text")
    rows = -(-max(map(len, texts)) // _MULTIPLE) * _MULTIPLE
    return {
        "image_latents": latent_BCFHW[:, :, 0],
        "text_embeddings": padded(texts, rows)[0],
        "data_type": "image",
        "metadata": _metadata(samples),
        # Like the latents, without the axis of frames.
        **{name: t[:, :, 0] if t.dim() == 5 else t for name, t in _stacked(samples).items()},
    }


def padded(rows: Sequence[Tensor], length: int) -> tuple[Tensor, Tensor]:
    """(texts [B, length, E], mask [B, length]): the `rows` [L, E] of B samples, padded with zeros.

    The mask is int64: 1 for rows of the sample, 0 for padding.

    Raises:
        ValueError: a sample has more than `length` rows.
    """
    lengths_B = torch.tensor([len(one) for one in rows])
    if int(lengths_B.max()) > length:
        raise ValueError(
            f"a text has {int(lengths_B.max())} rows, more than {length}; give a text_length of at"
            " least that many"
        )
    filled = rows[0].new_zeros(length, rows[0].shape[1])  # sets the length of the others
    text_BLE = pad_sequence([*rows, filled], batch_first=True)[:-1]
    return text_BLE, (torch.arange(length) < lengths_B[:, None]).long()


def _metadata(samples: Samples) -> dict[str, Any]:
    sizes = [(one["width"], one["height"]) for one in samples]
    before = [
        [one["about"].get(f"original_{side}") or one[side] for side in ("width", "height")]
        for one in samples
    ]
    return {
        "prompts": [one["caption"] for one in samples],
        "image_paths": [str(one["about"].get("source", one["key"])) for one in samples],
        "bucket_ids": [one["about"].get("bucket_id", one["bucket"]) for one in samples],
        "aspect_ratios": [
            one["about"].get("aspect_ratio", one["width"] / one["height"]) for one in samples
        ],
        "crop_resolution": torch.tensor(sizes),
        "original_resolution": torch.tensor(before),
        # Shards store no offset; 0 is that of a picture that was not cropped.
        "crop_offset": torch.tensor([one["about"].get("crop_offset", [0, 0]) for one in samples]),
    }


def _stacked(samples: Samples) -> dict[str, Tensor]:
    return {
        theirs: torch.stack(_all(samples, ours))
        for ours, theirs in _STACKED.items()
        if ours in samples[0]
    }


def _all(samples: Samples, name: str) -> list[Tensor]:
    lacking = [one["key"] for one in samples if name not in one]
    if lacking:
        raise DataError(
            f"sample {lacking[0]} has no `{name}`, which its batch needs; make the data again"
        )
    return [one[name] for one in samples]

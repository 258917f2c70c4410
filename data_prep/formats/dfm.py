"""Reads and writes shards of NVIDIA DFM.

A sample has the files `.pth` (latent), `.pickle` (text) and `.json`. Their content depends on the
network that the shards are for:

| network | `.pth`, latent | `.pickle`, text |
|---|---|---|
| DiT | [1, C, F, H, W], bfloat16; raw with Cosmos' codec | [1, 512, E], bfloat16 |
| FLUX | [C, H, W], raw | a dict: `prompt_embeds` [512, E], `pooled_prompt_embeds` [P] |
| Wan | [C, F, H, W], normalised | [226, E] |

Raw latents are the autoencoder's output without normalisation.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Container, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.formats.cached_samples import (
    CachedSample,
    RefusedRecord,
    checked_description,
    load_untrusted,
    numbers,
    padded,
    read_tars,
    to_text,
)
from data_prep.planning.splits import key_of
from data_prep.refusals import Reason, RefusedError
from data_prep.writing.tar_shards import ShardSeries
from dit.codecs.normalization import Whitening
from dit.codecs.vae.codec import Codec
from dit.parsing import parse_json
from dit.stored_samples import dfm_texts

FOLDER = "dfm_shards"


class Form(StrEnum):
    """Networks of DFM, each of which has a format of its own."""

    DIT = "dit"
    FLUX = "flux"
    WAN = "wan"


HELD = {
    Form.DIT: {"latent", "text"},
    Form.FLUX: {"latent", "text", "pooled_text"},
    Form.WAN: {"latent", "text"},
}
"""Names of the tensors of a sample that DFM's files can hold, by network."""
_ROWS = {Form.DIT: 512, Form.FLUX: 512, Form.WAN: 226}
"""Rows of a text in DFM's files, by network; a shorter text is padded with rows of zeros."""
_RAW_CODECS = ("cosmos",)


def form_of(codec: type[Codec], names: Container[str]) -> Form:
    """The network of DFM whose file format fits samples of `codec` with the tensors `names`.

    Most codecs have no network of their own in DFM; their samples are written for a network that
    reads the same tensors.
    """
    if codec.name == "wan":
        return Form.WAN
    # FLUX's reader knows no frames.
    return Form.FLUX if "pooled_text" in names and "video" not in codec.media else Form.DIT


def holds_raw_latents(folder: Path, codec: Codec | type[Codec] | None) -> bool:
    """Whether the latents in the DFM shards below `folder` lack the normalisation of `codec`.

    The first readable sample decides which of DFM's networks the shards are for.
    """
    first = next((one for one in read_dfm(folder) if isinstance(one, CachedSample)), None)
    is_flux = first is not None and "pooled_text" in first.tensors
    return is_raw(Form.FLUX if is_flux else Form.DIT, codec)


def is_raw(form: Form, codec: Codec | type[Codec] | None) -> bool:
    """Whether DFM trains the network `form` on latents of `codec` that are not normalised."""
    return form is Form.FLUX or (codec is not None and codec.name in _RAW_CODECS)


def write_dfm(
    records: Iterable[CachedSample],
    folder: Path,
    *,
    shard_size: int,
    form: Form,
    whitening: Whitening | None = None,
) -> int:
    """Writes samples as DFM's `rank0-000000.tar`, ... below `folder`; returns their number.

    A tar has at most `shard_size` samples. If `whitening` is given, the latents are written without
    this normalisation.
    """
    # DFM decodes by webdataset: `.pth` by torch.load, `.pickle` by pickle.loads, which cannot read
    # what torch.save writes.
    total = 0
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    with ShardSeries(target, max_samples=shard_size, max_bytes=2**40, prefix="rank0-") as series:
        for record in records:
            latent, text = _as_theirs(record.tensors, form, whitening)
            about = {
                **record.about,
                "image_height": record.about["height"],
                "image_width": record.about["width"],
            }
            parts = {"pth": _saved(latent), "pickle": pickle.dumps(text)}
            series.write(record.key, {**parts, "json": json.dumps(about).encode()})
            total += 1
    return total


def _as_theirs(
    tensors: dict[str, Tensor], form: Form, whitening: Whitening | None
) -> tuple[Tensor, Any]:
    """Latent and text of a sample with the axes and dtypes that DFM's network `form` reads.

    If `whitening` is given, the latent is returned without this normalisation.
    """
    latent = tensors["latent"] if whitening is None else whitening.undo(tensors["latent"])
    # In float32, as DFM's writers make it on a CPU: bfloat16 does not fit into float16.
    text = padded(tensors["text"].float(), _ROWS[form])
    match form:
        case Form.DIT:
            return latent[None].bfloat16(), text[None].bfloat16()
        case Form.FLUX:
            pooled = tensors["pooled_text"].float()
            return latent[:, 0].float(), {"prompt_embeds": text, "pooled_prompt_embeds": pooled}
        case Form.WAN:
            return latent, text


def _saved(tensor: Tensor) -> bytes:
    content = io.BytesIO()
    # Cloned, because torch.save stores the whole tensor that a view belongs to.
    torch.save(tensor.contiguous().clone(), content)
    return content.getvalue()


def read_dfm(folder: Path) -> Iterator[CachedSample | RefusedRecord]:
    """Yields every sample of every DFM tar below `folder`, or its refusal."""
    return read_tars(folder, _record)


def _record(name: str, key: str, parts: dict[str, bytes]) -> CachedSample:
    missing = {"pth", "pickle", "json"} - set(parts)
    if missing:
        found = ", ".join(f".{part}" for part in parts) or "nothing"
        raise RefusedError(
            Reason.UNREADABLE, f"there is no .{min(missing)}, only {found}; write the sample again"
        )
    latent = numbers(load_untrusted(parts["pth"]), "CFHW", what="latent")
    tensors = {"latent": latent}
    texts, about = dfm_texts(load_untrusted(parts["pickle"])), parse_json(parts["json"])
    if texts.get("pooled_text") is not None:
        tensors["pooled_text"] = numbers(texts["pooled_text"], "E", what="pooled text")
    tensors["text"] = to_text(texts["text"])
    # DFM's image_height and image_width are taken from wrong axes, so they are not used.
    height, width = 8 * latent.shape[2], 8 * latent.shape[3]
    known = {"caption": "", "source": name, "height": height, "width": width, "fps": None}
    known |= {"original_height": height, "original_width": width, "num_frames": latent.shape[1]}
    if not isinstance(about, dict):
        raise RefusedError(
            Reason.UNREADABLE,
            f".json holds a {type(about).__name__}, not an object; write the sample again",
        )
    return CachedSample(
        key=key if re.fullmatch(r"[A-Za-z0-9_-]{1,80}", key) else key_of(name),
        tensors=tensors,
        about=checked_description({k: about.get(k, v) for k, v in known.items()}),
    )

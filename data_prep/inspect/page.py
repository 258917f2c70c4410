"""A page of what a packed dataset shows when it is decoded again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from itertools import islice
from pathlib import Path

import safetensors.torch
from PIL import Image

from data_prep.inspect.html import html_table, picture, write_html
from data_prep.inspect.reading import read_samples, shard_counts
from dit.codecs import vae
from dit.codecs.dataset_card import read_card
from dit.codecs.vae import Codec

_SHARDS, _SAMPLES = 20, 8  # that are shown


def write_inspection(folder: Path, path: Path) -> None:
    """Decoded pictures of the first samples of the first shards.

    Raises:
        PrepError: the folder is no dataset, or its codec cannot be rebuilt.
    """
    card = read_card(folder)
    processor = vae.codec_of_card(card)
    facts = [(name, json.dumps(card.get(name))) for name in card if name != "sizes"]
    parts = [html_table(("card", ""), facts)]
    for name in islice(shard_counts(folder), _SHARDS):
        parts.append(f"<h2>{escape(name)}</h2>")
        parts += _figures(folder / name, processor)
    write_html(path, folder.resolve().name, parts)


def _figures(shard: Path, processor: Codec) -> Iterator[str]:
    for _, key, files in islice(read_samples(shard), _SAMPLES):
        latent = safetensors.torch.load(files["safetensors"])["latent"]
        frames_FHWC = processor.decode(latent).numpy()
        about = json.loads(files["json"])
        shown = (frames_FHWC[0], frames_FHWC[-1])[: len(frames_FHWC)]
        pictures = "".join(picture(Image.fromarray(frame)) for frame in shown)
        text = f"{escape(key)}<br>{list(latent.shape)}<br>{escape(about['caption'][:200])}"
        yield f"<figure>{pictures}<figcaption>{text}</figcaption></figure>"

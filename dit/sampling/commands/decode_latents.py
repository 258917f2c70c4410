"""Decodes the latents of an earlier generation to pictures and videos.

    python recipes/decode_latents.py --latents samples --output_dir samples/decoded

The output folder may be the folder of the latents; samples.json then lists both.
"""

# C latent channels; F H W 3 frames, rows, columns, colours of one picture

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dit.command_line import OptionParser
from dit.local_path import local_text
from dit.parsing import cause, parse_json
from dit.sampling.latent_sizes import cut
from dit.sampling.media_files import (
    LISTING,
    Picture,
    Written,
    make_folder,
    report_written,
    waveform_of,
    write_listing,
    write_picture,
)
from dit.system_errors import explained
from dit.watching import NotShown, watching

CARD = "dataset_card.json"
_NEEDED = ("prompt", "seed")


def main(argv: Sequence[str] | None = None) -> int:
    parser = OptionParser(description=__doc__, formatter_class=_AsWritten)
    add = parser.add_argument
    add("--latents", type=Path, required=True, help=f"folder with {LISTING} and {CARD}")
    add("--output_dir", type=Path, required=True, help="folder for the pictures")
    add_path = partial(add, type=local_text)
    add_path("--tokenizer_cache_dir", help="Hugging Face cache, or pipeline folder, with the VAE")
    add_path("--tokenizer_model", help="hub name or folder of the VAE, if not that of the dataset")
    add("--save_wav", action="store_true", help="write the sound of videos as WAV, too")
    args = parser.parse_args(argv)
    entries, card = _entries(args.latents), _read(args.latents / CARD)
    make_folder(args.output_dir, count=len(entries))
    decoders = _decoders(card, args.latents / CARD, args)
    written = decode(entries, decoders, latents=args.latents, folder=args.output_dir)
    report_written(written, args.output_dir, count=sum("latent" in entry for entry in entries))
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentDecoders:
    """The codecs that the dataset card in the folder of the latents names.

    With `keeps_wav` the sound of videos is written as WAV, too.
    """

    video: Any
    sound: Any = None  # None where the dataset has no sound
    keeps_wav: bool = False


def decode(
    entries: Sequence[dict[str, Any]], decoders: LatentDecoders, *, latents: Path, folder: Path
) -> Written:
    """Decodes the latents of `entries` and writes their pictures and videos to `folder`.

    `entries` are those of samples.json in the folder `latents`. The result's `lost` names latents
    that could not be decoded. If `folder` is the folder of the latents, every entry stays in its
    samples.json with its latent.
    """
    at_home = folder.resolve() == latents.resolve()
    lost: list[NotShown] = []
    listed, firsts = [], []
    for number, entry in enumerate(entries):
        made = first = None
        if "latent" in entry:
            with watching(str(entry["latent"]), lost):
                picture = _decoded(latents, entry, decoders)
                made = write_picture(picture, folder, number)
                made |= {"latent": entry["latent"]} if at_home else {}
                first = picture.frames_FHW3[0]
        if made or at_home:
            listed.append(made or entry)
            firsts.append(first)
    grid, notes = write_listing(listed, firsts, folder)
    return Written(grid=grid, lost=tuple(lost), notes=tuple(notes))


class _AsWritten(argparse.RawDescriptionHelpFormatter):
    """A help formatter that keeps the line breaks of descriptions."""


def _entries(folder: Path) -> list[dict[str, Any]]:
    """The entries of samples.json in `folder`.

    Raises:
        ValueError: the file cannot be read, or names no latent.
    """
    entries = _read(folder / LISTING)
    if not isinstance(entries, list):
        raise ValueError(
            f"{folder / LISTING} must be a JSON list of samples, not a {type(entries).__name__};"
            " generate again with --save_latents"
        )
    for number, entry in enumerate(entries):
        prompt, seed = (entry.get(k) if isinstance(entry, dict) else None for k in _NEEDED)
        if not isinstance(prompt, str) or type(seed) is not int:
            raise ValueError(
                f"{folder / LISTING}: entry {number} must have a text `prompt` and a whole number"
                f" `seed`, not {prompt!r:.60} and {seed!r:.60}; generate again with --save_latents"
            )
    if not any("latent" in entry for entry in entries):
        raise ValueError(f"{folder / LISTING} lists no latents; generate again with --save_latents")
    return entries


def _read(file: Path) -> Any:
    try:
        return parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read ({explained(error)}); give --latents a folder that"
            " generate_dit.py --save_latents, or a validation without a decoder, has written"
        ) from error


def _decoders(card: Any, file: Path, args: argparse.Namespace) -> LatentDecoders:
    from dit.codecs.sound import sound_codec_of_card
    from dit.sampling.cards import decoder_of_card

    try:
        return LatentDecoders(
            video=decoder_of_card(card, args.tokenizer_model, args.tokenizer_cache_dir),
            sound=sound_codec_of_card(card),
            keeps_wav=args.save_wav,
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged ({cause(error)}); replace it by the dataset_card.json of the"
            " dataset that the model was trained on"
        ) from error


def _decoded(folder: Path, entry: dict[str, Any], decoders: LatentDecoders) -> Picture:
    from safetensors.torch import load_file

    from dit.codecs.rgb import on_white

    name = Path(entry["latent"])
    if name.name != str(name):
        raise ValueError(
            f"{entry['latent']!r:.80} is not a plain file name; put the latent beside"
            " samples.json, and write only its file name there"
        )
    tensors = load_file(folder / name)
    video = decoders.video.decode(tensors["latent"], alpha=True).numpy()
    size: list[Any] = [entry.get(name) for name in ("num_video_frames", "height", "width")]
    if all(size):
        video = cut(video, (size[0], size[1], size[2]))
    own = {"file", "latent", "prompt", "seed", "sound_rate", "waveform", "wav"}
    return Picture(
        frames_FHW3=on_white(video),
        clear_FHW4=video if video.shape[-1] == 4 else None,
        prompt=entry["prompt"],
        seed=entry["seed"],
        settings={name: value for name, value in entry.items() if name not in own},
        sound=_waveform(tensors.get("sound_latent"), len(video), entry, decoders.sound),
        keeps_wav=decoders.keeps_wav,
    )


def _waveform(latent_KA: Any, frames: int, entry: dict[str, Any], codec: Any) -> Any:
    fps = entry.get("fps")
    if latent_KA is None or codec is None or not fps:
        return None
    return waveform_of(latent_KA, codec, frames / fps)

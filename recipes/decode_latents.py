"""Latents that were saved -> pictures and videos.

python recipes/decode_latents.py --latents samples --output_dir samples/decoded
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from recipes.entry import run
from recipes.opening import decoder_of
from recipes.picture_files import LISTING, Picture, make_folder, write
from recipes.sizes import cut

CARD = "dataset_card.json"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsWritten)
    add = parser.add_argument
    add("--latents", type=Path, required=True, help=f"folder with {LISTING} and {CARD}")
    add("--output_dir", type=Path, required=True, help="folder for the pictures")
    add("--tokenizer_cache_dir", help="Hugging Face cache, or pipeline folder, with the VAE")
    add("--tokenizer_model", help="hub name or folder of the VAE, if not that of the dataset")
    args = parser.parse_args(argv)
    entries, card = _listing(args.latents, LISTING), _listing(args.latents, CARD)
    make_folder(args.output_dir)
    decoder = decoder_of(card, args.tokenizer_model, args.tokenizer_cache_dir)
    pictures = [_decoded(args.latents, entry, decoder) for entry in entries if "latent" in entry]
    if not pictures:
        raise ValueError(f"{args.latents / LISTING} names no latent; generate with --save_latents")
    grid = write(pictures, args.output_dir)
    Console(soft_wrap=True, highlight=False).print(f"{len(pictures)} samples, {grid}")
    return 0


class _AsWritten(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


def _listing(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder / name} cannot be read ({error}); --latents wants a folder that"
            " generate_dit.py --save_latents, or a validation without a decoder, has written"
        ) from error


def _decoded(folder: Path, entry: dict[str, Any], decoder: Any) -> Picture:
    from safetensors.torch import load_file

    latent_CFHW = load_file(folder / entry["latent"])["latent"]
    video = decoder.decode(latent_CFHW).numpy()
    size: list[Any] = [entry.get(name) for name in ("num_video_frames", "height", "width")]
    if all(size):
        video = cut(video, (size[0], size[1], size[2]))
    own = {"file", "latent", "prompt", "seed"}
    return Picture(
        frames_FHW3=video,
        prompt=entry["prompt"],
        seed=entry["seed"],
        settings={name: value for name, value in entry.items() if name not in own},
    )


if __name__ == "__main__":
    sys.exit(run(main))

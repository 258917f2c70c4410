"""The program of generate_dit.py: generates picture and video files from prompts.

1. open_checkpoint  configuration, weights, text encoder and decoder of the run
2. generate_opened  prompts -> uint8 pictures, packed together, divided over all processes
3. write_media      PNG or MP4 files, a grid, samples.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from dit.command_line import chosen
from dit.console import Console
from dit.progress import Track, progress_on
from dit.sampling.commands.load_options import LoadOptions
from dit.sampling.commands.options import (
    MOST_SAMPLES,
    GenerationOptions,
    check_count,
    check_seed,
    parser,
)
from dit.sampling.commands.options_file import with_file
from dit.sampling.media_files import make_folder, replace_file, report_written, write_media
from dit.sampling.prompts import Prompt, read_prompts

_QUIET_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Generates what the command line `argv` asks for into --output_dir; returns exit code 0."""
    known = parser()
    args = known.parse_args(with_file(sys.argv[1:] if argv is None else argv, known))
    options, loading = chosen(GenerationOptions, args), chosen(LoadOptions, args)
    given = [Prompt(text=text) for text in args.prompt or ()] or read_prompts(args.prompts_file)
    most = max(1, MOST_SAMPLES // len(given))
    check_count("num_images_per_prompt", args.num_images_per_prompt, most=most)
    check_seed(args.seed, count=len(given) * args.num_images_per_prompt)
    prompts = [prompt for prompt in given for _ in range(args.num_images_per_prompt)]
    make_folder(args.output_dir, count=len(prompts))
    # Imported late: --help and a wrong option answer at once.
    from dit.sampling.commands.generate_media import generate_opened, notes_on
    from dit.sampling.open_checkpoint import open_checkpoint

    opened = open_checkpoint(
        args.checkpoint_path,
        weights=options.weights,
        options=loading,
        needs_decoder=not args.save_latents or options.upsampler is not None,
    )
    keep = args.save_latents
    pictures = generate_opened(
        opened, prompts, seed=args.seed, options=options, latents=keep, track=shown_progress()
    )
    pictures = [replace(one, keeps_wav=args.save_wav) for one in pictures]
    if pictures:
        written = write_media(pictures, args.output_dir)
        if keep:
            card = json.dumps(opened.card, indent=1) + "\n"
            replace_file(args.output_dir / "dataset_card.json", card.encode())
        for note in notes_on(opened, options, prompts):
            Console().print(note)
        report_written(written, args.output_dir, count=len(pictures))
    return 0


def shown_progress() -> Track:
    """A `Track` that shows progress on stderr; what takes less than five seconds leaves no line."""
    return progress_on(Console(stderr=True), quiet_s=_QUIET_S)

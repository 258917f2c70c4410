"""Runs the command line of the playground: `python -m dit.playground CKPT`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from dit.command_line import chosen
from dit.distributed.entry import Parser, leave, run
from dit.local_path import checkpoint_place, local_text
from dit.sampling.commands.load_options import LoadOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Serves the page until Ctrl-C, then ends the process with exit code 0."""
    args = _parser().parse_args(argv)
    # Imported late: --help and a wrong option answer at once.
    from dit.playground.server import PlaygroundServer
    from dit.playground.studio import Studio, open_variants

    options = chosen(LoadOptions, args)
    places = [args.checkpoint, *args.compare]
    # The server comes first: checkpoints take minutes to open, and a taken port is said at once.
    server = PlaygroundServer(args.host, args.port)
    server.studio = Studio(
        open_variants(places, weights=args.weights, options=options), weights=args.weights
    )
    server.serve(
        "playground",
        risk="everybody who reaches this machine can generate here: there is no password",
    )
    # At its exit Python would stop a thread that still generates inside torch, which then aborts.
    leave(0)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="python -m dit.playground",
        description="Serves a page to try prompts on, for the browser of this machine.",
    )
    add = parser.add_argument
    add_path = partial(add, type=local_text)
    add_place = partial(add, type=checkpoint_place)
    add_place("checkpoint", metavar="CKPT", help="run folder, checkpoint or mirror (msc://...)")
    add_place("compare", metavar="OTHER", nargs="*", help="other checkpoints to compare with")
    add_path(
        "--lora", action="append", default=[], help="LoRA, FILE or FILE:SCALE, to compare with none"
    )
    add("--ignore_text_encoder", action="store_true", help="leave out a LoRA's text encoder keys")
    add("--weights", choices=("ema", "model"), default="ema", help="averaged or last weights")
    add("--host", default="127.0.0.1", help="address; by default only this machine reaches it")
    add("--port", type=int, default=8470, help="0 takes any free port (%(default)s)")
    add(
        "--precision",
        choices=("bf16", "fp32"),
        help="type of matrix products (default: as in training)",
    )
    add_path("--t5_cache_dir", help="Hugging Face cache or pipeline folder with the text encoder")
    add_path("--tokenizer_cache_dir", help="the same for the VAE")
    add_path("--tokenizer_model", help="hub name or folder of the VAE, if not that of the dataset")
    return parser


if __name__ == "__main__":
    sys.exit(run(main))

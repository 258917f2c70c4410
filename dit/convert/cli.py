"""The command line: import, export, verify, export-lora, import-lora."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dit.command_line import OptionParser, size_in_bytes
from dit.config import TextPadding, Weights
from dit.console import Console
from dit.convert.lora.commands import (
    add_checkpoint,
    add_export_lora,
    add_import_lora,
    run_export_lora,
    run_import_lora,
)
from dit.progress import Track, no_progress, progress_on

EXIT_CODES = """\
Exit codes: 0 success, 1 an error or a difference (the last line says which), 2 a wrong command
line, 130 interrupted. A folder is written as a whole or not at all.
"""
_QUIET_S = 2.0
"""Seconds after which progress shows in a log."""
LARGEST_PART = 1e-4
"""Largest accepted difference of outputs, as a part of their root mean square.

Sums in another order make a difference of this size in float32.
"""


_bytes = partial(size_in_bytes, example="5GB, 5GiB or 1000000", least=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; under a launcher all processes share the work."""
    parser = convert_parser()
    args = parser.parse_args(arguments)
    if args.run is None:
        parser.print_help()
        return 0
    # Warnings of Megatron-Core and torch about themselves: a user cannot change their cause.
    for module in (r"megatron\.", r"torch\."):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", message="Please use DTensor instead")
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)
    started = False
    try:
        started = _start()
        return args.run(args)
    except (ValueError, OSError) as error:
        _say(f"error: {error}", stream=sys.stderr)
        return 1
    finally:
        if started:
            _stop()


def convert_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m dit.convert",
        description="Converts checkpoints to and from Hugging Face Diffusers.",
        epilog=EXIT_CODES,
    )
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_import(commands)
    _add_export(commands)
    _add_verify(commands)
    lora = add_export_lora(commands, EXIT_CODES)
    lora.set_defaults(run=lambda args: run_export_lora(args, _say))
    lora = add_import_lora(commands, EXIT_CODES)
    lora.set_defaults(run=lambda args: run_import_lora(args, _say))
    return parser


def _add_import(commands: Any) -> None:
    about = "A folder of Diffusers -> a checkpoint that a run can start from."
    parser = commands.add_parser("import", help=about, description=about, epilog=EXIT_CODES)
    _add_hf_path(parser, "Folder with config.json and safetensors, or of a pipeline.")
    text = "Checkpoint to write; must not exist."
    parser.add_argument("--megatron-path", type=Path, required=True, metavar="DIR", help=text)
    parser.add_argument(
        "--text-pad-to",
        type=_tokens,
        default=argparse.SUPPRESS,
        metavar="TOKENS",
        help="Captions that the weights were trained with: padded with zeros to this many tokens,"
        " `stored` (with the padding of their encoder), or `none`. (default: as for the family's"
        " published weights; exports from here remember it)",
    )
    parser.add_argument(
        "--projected-text",
        action="store_true",
        help="Leave out the text projection of Cosmos 2.5, for shards of data_prep"
        " --text_projection; an export puts it back.",
    )
    parser.add_argument(
        "objective",
        nargs="*",
        metavar="objective.KEY=VALUE",
        help="Objective of the weights, if there is no scheduler beside them that says it, such as"
        " objective.name=flow objective.flow_shift=3.",
    )
    parser.set_defaults(run=_import)


def _add_export(commands: Any) -> None:
    about = "A checkpoint -> a folder that Diffusers opens."
    parser = commands.add_parser("export", help=about, description=about, epilog=EXIT_CODES)
    add_checkpoint(parser)
    _add_hf_path(parser, "Folder to write; must not exist.")
    _add_weights(parser)
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        help="Type of all tensors. (default: the stored type of each; averages are fp32)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_bytes,
        default="5GB",
        metavar="BYTES",
        help="Largest file, such as 500MB. (default: %(default)s)",
    )
    _add_text_projection(parser)
    parser.add_argument(
        "--merged",
        action="store_true",
        help="For a checkpoint of LoRA adapters: write the whole network, with adapters added.",
    )
    alternatives = parser.add_mutually_exclusive_group()
    alternatives.add_argument(
        "--pipeline-from",
        type=Path,
        metavar="DIR",
        help="Folder of a Diffusers pipeline for this network. The export gets its tokenizer, text"
        " encoder and VAE, and is a pipeline itself.",
    )
    alternatives.add_argument(
        "--no-scheduler",
        action="store_true",
        help="Write no scheduler_config.json, for an objective without scheduler in Diffusers.",
    )
    parser.set_defaults(run=_export)


def _add_verify(commands: Any) -> None:
    about = "Compares a folder of Diffusers with a checkpoint: each tensor, and the outputs."
    parser = commands.add_parser("verify", help=about, description=about, epilog=EXIT_CODES)
    _add_hf_path(parser, "Folder that was imported, or exported to.")
    add_checkpoint(parser)
    _add_weights(parser)
    _add_text_projection(parser)
    parser.add_argument(
        "--tensors-only",
        action="store_true",
        help="Compare no outputs, which would take memory for the network in float32.",
    )
    parser.set_defaults(run=_verify)


def _add_hf_path(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--hf-path", type=Path, required=True, metavar="DIR", help=text)


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        choices=("ema", "model"),
        help="Average of the weights, or the last ones. (default: ema if the run keeps one)",
    )


def _add_text_projection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text-projection",
        type=Path,
        metavar="DIR",
        help="Diffusers transformer whose text projection made the stored texts; the export gets"
        " this projection. (default: the folder that the dataset card names)",
    )


def _tokens(text: str) -> int | TextPadding | None:
    if text == "none":
        return None
    if text == TextPadding.STORED:
        return TextPadding.STORED
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither `none` nor `stored` nor a number of tokens"
        )
    return int(text)


def _import(args: argparse.Namespace) -> int:
    from dit.convert.import_ import import_weights

    told: dict[str, Any] = {"text_pad_to": args.text_pad_to} if "text_pad_to" in args else {}
    told["projected_text"] = args.projected_text
    told["track"] = _track()
    done = import_weights(args.hf_path, args.megatron_path, objective=args.objective, **told)
    which = "all but the text projection" if args.projected_text else "all of them"
    _say(f"{done.tensors} tensors of {args.hf_path} are in {done.path}, {which} and exactly")
    _say(f"precision: {done.config.model.precision}, {done.precision_note}")
    _say(f"objective: {done.config.objective.name}, {done.objective_note}")
    _say(f"text: {_about_text(done.config.model.text_pad_to)}")
    _say(
        f"start a run with --config-file {done.path / 'config.yaml'} checkpoint.load={done.path}"
        " checkpoint.finetune=true checkpoint.save=... dataset.path=..."
    )
    return 0


def _about_text(text_pad_to: int | TextPadding | None) -> str:
    if text_pad_to is None:
        return "attended to as long as it is (--text-pad-to)"
    if text_pad_to is TextPadding.STORED:
        return "attended to with the padding of its encoder, as shards hold it (--text-pad-to)"
    return f"filled up with zeros to {text_pad_to} tokens (--text-pad-to)"


def _export(args: argparse.Namespace) -> int:
    import torch

    from dit.convert.export import ExportOptions, check_whole_checkpoint, export_weights

    types = {"fp32": torch.float32, "bf16": torch.bfloat16, None: None}
    options = ExportOptions(
        weights=Weights(args.weights) if args.weights else None,
        dtype=types[args.dtype],
        max_shard_size=args.max_shard_size,
        scheduler=not args.no_scheduler,
        pipeline_from=args.pipeline_from,
        text_projection=args.text_projection,
        merged=args.merged,
    )
    path = check_whole_checkpoint(args.megatron_path)
    done = export_weights(path, args.hf_path, options, track=_track())
    which = {Weights.EMA: "averages of the weights", Weights.MODEL: "weights"}[done.weights]
    _say(
        f"{which} of {path} are in {done.path}: {done.tensors} tensors, {done.bytes / 1e9:.2f} GB"
        f" in {done.files} {'file' if done.files == 1 else 'files'}"
    )
    return 0


def _verify(args: argparse.Namespace) -> int:
    from dit.convert.export import check_whole_checkpoint
    from dit.convert.verify import compare_forward, compare_tensors

    path = check_whole_checkpoint(args.megatron_path)
    asked = Weights(args.weights) if args.weights else None
    tensors, chosen = compare_tensors(
        args.hf_path, path, asked, text_projection=args.text_projection, track=_track()
    )
    equal = tensors.different == 0
    where = f"; the largest difference is {tensors.largest:.3g}, in {tensors.where}"
    _say(
        f"{tensors.count - tensors.different} of {tensors.count} tensors equal bit for bit"
        f" (weights={chosen}){'' if equal else where}"
    )
    if not args.tensors_only:
        forward = compare_forward(args.hf_path, path, chosen, text_projection=args.text_projection)
        close = forward.largest <= LARGEST_PART * forward.scale
        equal = equal and close
        _say(
            f"outputs of {forward.samples} random samples in one pack, float32: the largest"
            f" difference is {forward.largest:.3g} at a root mean square of {forward.scale:.3g}"
        )
    if not equal:
        _say("error: the folder and the checkpoint differ", stream=sys.stderr)
    return 0 if equal else 1


def _start() -> bool:
    """Starts a process group: of the launcher, or of this process alone. False if there is one."""
    dist = _distributed()
    if dist.is_initialized():
        return False
    launched = "RANK" in os.environ
    alone = {"init_method": "tcp://127.0.0.1:0", "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **({} if launched else alone))
    return True


def _stop() -> None:
    dist = _distributed()
    if dist.is_initialized():
        dist.destroy_process_group()


def _track() -> Track:
    """Shows the progress of the first process; what takes less than two seconds shows none."""
    return progress_on(Console(stderr=True), quiet_s=_QUIET_S) if _is_first() else no_progress


def _say(line: str, *, stream: Any = None) -> None:
    if _is_first():
        Console(file=stream).print(line)


def _is_first() -> bool:
    dist = _distributed()
    return not dist.is_initialized() or dist.get_rank() == 0


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed

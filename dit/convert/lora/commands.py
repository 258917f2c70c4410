"""export-lora and import-lora of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dit.config import Weights
from dit.local_path import checkpoint_place

Say = Callable[[str], None]


def add_export_lora(commands: Any, epilog: str) -> argparse.ArgumentParser:
    about = "A checkpoint of LoRA adapters -> a folder for Diffusers, peft and ComfyUI."
    parser = commands.add_parser("export-lora", help=about, description=about, epilog=epilog)
    add_checkpoint(parser)
    _add_folder(parser, "--hf-path", "Folder to write; must not exist.")
    parser.add_argument(
        "--weights",
        choices=("ema", "model"),
        help="Average of the adapters, or the last ones. (default: ema if the run keeps one)",
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--base-model",
        metavar="NAME",
        help="Hub name of the base model, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers, for the card.",
    )
    return parser


def add_import_lora(commands: Any, epilog: str) -> argparse.ArgumentParser:
    about = "A file or folder of LoRA adapters -> a checkpoint that a run of adapters starts from."
    parser = commands.add_parser("import-lora", help=about, description=about, epilog=epilog)
    _add_folder(parser, "--hf-path", "Folder or safetensors file of Diffusers, peft or ComfyUI.")
    _add_folder(parser, "--base-path", "Diffusers folder or checkpoint of the base model.")
    _add_folder(parser, "--megatron-path", "Checkpoint to write; must not exist.")
    parser.add_argument(
        "--ignore-text-encoder",
        action="store_true",
        help="Leave out keys of text encoders, and count them.",
    )
    return parser


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """The option for a checkpoint that is read."""
    parser.add_argument(
        "--megatron-path",
        type=checkpoint_place,
        required=True,
        metavar="DIR",
        help="Run folder, checkpoint folder, or LATEST file of a run; or msc://PROFILE/PATH of its"
        " checkpoint.mirror.",
    )


def _add_folder(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    parser.add_argument(name, type=Path, required=True, metavar="DIR", help=text)


def run_export_lora(args: argparse.Namespace, say: Say) -> int:
    import torch

    from dit.convert.export import check_whole_checkpoint
    from dit.convert.lora.checkpoints import export_lora

    path = check_whole_checkpoint(args.megatron_path)
    done = export_lora(
        path,
        args.hf_path,
        weights=Weights(args.weights) if args.weights else None,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype],
        base_model=args.base_model,
    )
    which = {Weights.EMA: "averages of the adapters", Weights.MODEL: "adapters"}[done.weights]
    numbers = sum(one.down.numel() + one.up.numel() for one in done.factors.values())
    say(
        f"{which} of {path} are in {args.hf_path}: {len(done.factors)} linears,"
        f" {numbers / 1e6:.2f} million numbers; README.md there says how to load them"
    )
    return 0


def run_import_lora(args: argparse.Namespace, say: Say) -> int:
    from dit.convert.lora.checkpoints import import_lora

    factors = import_lora(
        args.hf_path,
        args.base_path,
        args.megatron_path,
        without_text_encoder=say if args.ignore_text_encoder else None,
    )
    path = args.megatron_path
    ranks = ", ".join(map(str, sorted({one.rank for one in factors.values()})))
    say(f"adapters of {len(factors)} linears, of rank {ranks}, are in {path}")
    say(
        f"start a run with --config-file {path / 'config.yaml'} checkpoint.load={path}"
        " checkpoint.finetune=true checkpoint.save=... dataset.path=..."
    )
    return 0

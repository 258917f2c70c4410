"""The command line of `dit.convert`: import, export, verify, export-lora, import-lora."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from dit.command_line import OptionParser, add_options, option, size_in_bytes
from dit.config import TextPadding, Weights
from dit.console import Console, hide_library_warnings
from dit.launched import check_launch, is_alone, meet, meets_others, rank, world_size
from dit.local_path import CheckpointPath
from dit.progress import Track, no_progress, progress_on
from dit.system_errors import explained

EXIT_CODES = """\
Exit codes: 0 success, 1 an error or a difference (the last line says which), 2 a wrong command
line, 130 interrupted. A folder is written as a whole or not at all.
"""
_QUIET_S = 2.0
"""Seconds after which a log shows the progress of a step."""
LARGEST_PART = 1e-4
"""Largest accepted difference of outputs, relative to their root mean square. Sums in another order
cause differences of this size in float32."""


_bytes = partial(size_in_bytes, example="5GB, 5GiB or 1000000", least=1)


def _tokens(text: str) -> int | TextPadding | None:
    if text == "none":
        return None
    if text == TextPadding.STORED:
        return TextPadding.STORED
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither `none` nor `stored` nor a number of tokens, such as 512"
        )
    return int(text)


@dataclass(frozen=True, kw_only=True)
class _ImportOptions:
    """Converts a folder of Diffusers to a checkpoint that a run can start from."""

    hf_path: Path = option(metavar="DIR")
    """Folder with config.json and safetensors, or of a pipeline."""
    megatron_path: Path = option(metavar="DIR")
    """Checkpoint to write; must not exist."""
    text_pad_to: Annotated[Any, _tokens] = option(argparse.SUPPRESS, metavar="TOKENS")
    """Captions that the weights were trained with: padded with zeros to this many tokens, `stored`
    (with the padding of their encoder), or `none`. (default: as for the family's published weights;
    exports of this program record it)"""
    projected_text: bool = False
    """Leave out the text projection of Cosmos 2.5, for shards of data_prep --text_projection; an
    export puts it back."""


@dataclass(frozen=True, kw_only=True)
class _Checkpoint:
    """The checkpoint to read."""

    megatron_path: CheckpointPath = option(metavar="DIR")
    """Run folder, checkpoint folder, or LATEST file of a run; or msc://PROFILE/PATH of its
    checkpoint.mirror."""


@dataclass(frozen=True, kw_only=True)
class _WhichWeights:
    """Choice of the weights to take from the checkpoint."""

    weights: Literal["ema", "model"] | None = None
    """Average of the weights, or the last ones. (default: ema if the run keeps one)"""
    text_projection: Path | None = option(None, metavar="DIR")
    """Diffusers transformer whose text projection made the stored texts; the export gets this
    projection. (default: the folder that the dataset card names)"""


@dataclass(frozen=True, kw_only=True)
class _ExportOptions:
    """Converts a checkpoint to a folder that Diffusers opens."""

    hf_path: Path = option(metavar="DIR")
    """Folder to write; must not exist."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of all tensors. (default: the stored dtype of each; averages are fp32)"""
    max_shard_size: Annotated[int, _bytes] = option("5GB", metavar="BYTES")
    """Largest file, such as 500MB. (default: %(default)s)"""
    merged: bool = False
    """For a checkpoint of LoRA adapters: write the whole network, with adapters added."""
    critic: bool = False
    """For a distillation by DMD2: write its critic, and not its student."""


@dataclass(frozen=True, kw_only=True)
class _Surroundings:
    """Files to write besides the network; at most one of these options."""

    pipeline_from: Path | None = option(None, metavar="DIR")
    """Folder of a Diffusers pipeline for this network. The export gets its tokenizer, text encoder
    and VAE, and is a pipeline itself."""
    no_scheduler: bool = False
    """Write no scheduler_config.json, for an objective without scheduler in Diffusers."""


@dataclass(frozen=True, kw_only=True)
class _VerifyOptions:
    """Compares a folder of Diffusers with a checkpoint: each tensor, and the outputs."""

    hf_path: Path = option(metavar="DIR")
    """Folder that was imported, or exported to."""
    tensors_only: bool = False
    """Compare no outputs, which would take memory for the network in float32."""


@dataclass(frozen=True, kw_only=True)
class _ExportLoraOptions:
    """Writes the LoRA adapters of a checkpoint to a folder for Diffusers, peft and ComfyUI."""

    hf_path: Path = option(metavar="DIR")
    """Folder to write; must not exist."""
    weights: Literal["ema", "model"] | None = None
    """Average of the adapters, or the last ones. (default: ema if the run keeps one)"""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """(default: %(default)s)"""
    base_model: str | None = option(None, metavar="NAME")
    """Hub name of the base model, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers, for the card."""
    critic: bool = False
    """For a distillation by DMD2: write the adapters of its critic, and not of its student."""


@dataclass(frozen=True, kw_only=True)
class _ImportLoraOptions:
    """Converts LoRA adapters in a file or folder to a checkpoint that a run can start from."""

    hf_path: Path = option(metavar="DIR")
    """Folder or safetensors file of Diffusers, peft or ComfyUI."""
    base_path: Path = option(metavar="DIR")
    """Diffusers folder or checkpoint of the base model."""
    megatron_path: Path = option(metavar="DIR")
    """Checkpoint to write; must not exist."""
    ignore_text_encoder: bool = False
    """Leave out keys of text encoders, and count them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; under a launcher all processes share the work."""
    parser = convert_parser()
    args = parser.parse_args(arguments)
    if args.run is None:
        parser.print_help()
        return 0
    hide_library_warnings()
    started = False
    try:
        started = _start()
        return args.run(args)
    except (ValueError, OSError) as error:
        _say(f"error: {explained(error)}", stream=sys.stderr)
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
    _add(commands, "import", _import, _ImportOptions).add_argument(
        "objective",
        nargs="*",
        metavar="KEY=VALUE",
        help="Objective of the weights, such as objective.name=flow objective.flow_shift=3, if the"
        " folder has no scheduler that states it; also model.KEY=VALUE for settings that neither"
        " config.json nor the class of a pipeline states.",
    )
    exporting = _add(commands, "export", _export, _ExportOptions, _Checkpoint, _WhichWeights)
    add_options(exporting.add_mutually_exclusive_group(), _Surroundings, dashes=True)
    _add(commands, "verify", _verify, _VerifyOptions, _Checkpoint, _WhichWeights)
    _add(commands, "export-lora", _export_lora, _ExportLoraOptions, _Checkpoint)
    _add(commands, "import-lora", _import_lora, _ImportLoraOptions)
    return parser


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], *kinds: Any
) -> argparse.ArgumentParser:
    """Adds the command `name`, which calls `run`, and returns its parser.

    Its options are the fields of the dataclasses `kinds`; the docstring of the first one is its
    help.
    """
    about = kinds[0].__doc__
    parser = commands.add_parser(name, help=about, description=about, epilog=EXIT_CODES)
    add_options(parser, *kinds, dashes=True)
    parser.set_defaults(run=run)
    return parser


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
    for notice in done.notices:
        _say(notice)
    return _say_next(done.path)


def _say_next(checkpoint: Path) -> int:
    _say(
        f"start a run with --config-file {checkpoint / 'config.yaml'} checkpoint.load={checkpoint}"
        " checkpoint.finetune=true checkpoint.save=... dataset.path=..."
    )
    return 0


def _about_text(text_pad_to: int | TextPadding | None) -> str:
    if text_pad_to is None:
        return "not padded (--text-pad-to)"
    if text_pad_to is TextPadding.STORED:
        return "with the padding of its encoder, as shards hold it (--text-pad-to)"
    return f"padded with zeros to {text_pad_to} tokens (--text-pad-to)"


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
        critic=args.critic,
    )
    path = check_whole_checkpoint(args.megatron_path)
    done = export_weights(path, args.hf_path, options, track=_track())
    which = {Weights.EMA: "averages of the weights", Weights.MODEL: "weights"}[done.weights]
    _say(
        f"{which} of {path} are in {done.path}: {done.tensors} tensors, {done.bytes / 1e9:.2f} GB"
        f" in {done.files} {'file' if done.files == 1 else 'files'}"
    )
    if done.beyond is not None:
        _say(f"beyond Diffusers: {done.beyond}")
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


def _export_lora(args: argparse.Namespace) -> int:
    import torch

    from dit.convert.export import check_whole_checkpoint
    from dit.convert.lora import export_lora
    from dit.lora.files import COMFYUI_FILE

    path = check_whole_checkpoint(args.megatron_path)
    done = export_lora(
        path,
        args.hf_path,
        weights=Weights(args.weights) if args.weights else None,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype],
        base_model=args.base_model,
        critic=args.critic,
    )
    which = {Weights.EMA: "averages of the adapters", Weights.MODEL: "adapters"}[done.weights]
    numbers = sum(one.down.numel() + one.up.numel() for one in done.factors.values())
    _say(
        f"{which} of {path} are in {args.hf_path}: {len(done.factors)} linears,"
        f" {numbers / 1e6:.2f} million numbers; README.md there says how to load them"
    )
    if not (args.hf_path / COMFYUI_FILE).is_file():
        _say(
            "there is no file for ComfyUI, which has no name for one of these linears, or has it as"
            " one with others that have no adapters"
        )
    return 0


def _import_lora(args: argparse.Namespace) -> int:
    from dit.convert.lora import import_lora

    factors = import_lora(
        args.hf_path,
        args.base_path,
        args.megatron_path,
        without_text_encoder=_say if args.ignore_text_encoder else None,
    )
    path = args.megatron_path
    ranks = ", ".join(map(str, sorted({one.rank for one in factors.values()})))
    _say(f"adapters of {len(factors)} linears, of rank {ranks}, are in {path}")
    return _say_next(path)


def _start() -> bool:
    """Starts the process group of the launcher or of this process alone.

    Returns False, and does nothing, if there is a process group already.
    """
    dist = _distributed()
    if dist.is_initialized():
        return False
    check_launch()
    alone = is_alone() or not meets_others()
    place = {"init_method": "tcp://127.0.0.1:0"} if alone else {"store": meet()}
    dist.init_process_group("gloo", rank=rank(), world_size=world_size(), **place)
    return True


def _stop() -> None:
    dist = _distributed()
    if dist.is_initialized():
        dist.destroy_process_group()


def _track() -> Track:
    """Progress that the first process shows for steps of more than two seconds."""
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

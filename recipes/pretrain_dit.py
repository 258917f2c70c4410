"""Pretrains a DiT; see --help, and conf/ for runs to start from."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dit.config import RunConfig
from dit.config_loading.cli import parse_arguments
from dit.config_loading.validate import check_trainable
from dit.distributed.cuda_environment import set_cuda_environment
from dit.distributed.entry import run, say_once
from dit.distributed.megatron_import import import_megatron
from dit.launched import check_launch, rank, world_size
from dit.sizing.memory import check_memory
from dit.streams import result
from recipes.runs import RECIPES, for_weights, read_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Trains the run that `argv` describes; returns 0, or 75 if stopped after a checkpoint."""
    arguments = parse_arguments(
        sys.argv[1:] if argv is None else argv,
        recipes=RECIPES,
        program="pretrain_dit.py",
        adapt=for_weights,
    )
    config = arguments.config
    if not (arguments.dry_run or arguments.print_config):
        check_launch()
    set_cuda_environment(config)  # before an import starts CUDA
    # Errors are reported before any process waits for another one.
    check_trainable(config.model)
    if arguments.print_config:
        _print(config)
        return 0
    import_megatron()
    check_memory(config, world_size=world_size())
    start = export = None
    if config.checkpoint.load_hf is not None:
        from dit.convert.load_hf.start import hf_start

        start = hf_start(config)
    if config.checkpoint.also_save_hf:
        from dit.convert.export import exporter

        export = exporter(config)
    if arguments.dry_run:
        if rank() == 0:
            with result():
                _check(config, world_size=world_size(), notes=start.notes if start else ())
        return 0
    open_samples = None
    if config.samples:
        from dit.sampling.validation.samples import open_samples
    # Imported late: --help, --print-config and a wrong key answer without torch.
    from dit.distributed.collective_errors import from_first_rank
    from dit.distributed.process_groups import start_processes
    from dit.distributed.watchdog.monitor import watchdog

    limit_s = 60 * config.dist.distributed_timeout_minutes
    start_processes(
        seed=config.rng.seed,
        model=config.model,
        dp_replicate_size=config.ddp.dp_replicate_size,
        limit_s=limit_s,
    )
    with watchdog(limit_s=limit_s, say=say_once):
        from dit.sizing.passes import steps_of_epochs
        from dit.train.checkpoint.saving import next_commands
        from dit.train.trainer import ExitCode, pretrain

        config = from_first_rank(lambda: steps_of_epochs(config))
        code = pretrain(
            config, export=export, open_samples=open_samples, start=start, read_folder=read_folder
        )
        if code is ExitCode.DONE and rank() == 0:
            sys.stdout.write(next_commands(config))
        return int(code)


def _print(config: RunConfig) -> None:
    """Prints the configuration as YAML, without importing torch.

    Raises the errors that a start of the run would raise, except those about data and memory.
    """
    from dit.config_loading.load import to_yaml
    from dit.convert.diffusers_config import check_also_saved
    from dit.convert.load_hf.settings import weights_of_run

    config.data_parallel_size(world_size())
    weights_of_run(config)
    if config.checkpoint.also_save_hf:
        check_also_saved(config)
    if rank() == 0:
        with result():
            sys.stdout.write(to_yaml(config))


def _check(config: RunConfig, *, world_size: int, notes: Sequence[str]) -> None:
    """Prints the plan of the run (`--dry-run`); raises the errors that its start would raise."""
    from dit.sizing.describe import describe
    from dit.sizing.passes import data_lines, steps_of_epochs
    from dit.train.opening.checks import start_lines

    config = steps_of_epochs(config)
    sys.stdout.write(describe(config, world_size=world_size))
    sys.stdout.write(data_lines(config))
    for note in notes:
        sys.stdout.write(f"# {note}\n")
    sys.stdout.write(start_lines(config, world_size=world_size, read_folder=read_folder))
    c = config.validation
    if config.samples and (c.prompts_file or c.negative_prompt or c.feature_extractor):
        from dit.sampling.validation.samples import check_samples

        check_samples(config)


if __name__ == "__main__":
    sys.exit(run(main))

r"""Counts bytes that each rank writes, reads, sends and holds to save and load a checkpoint.

1. model     builds the network of the given configuration and layout, its optimizer and average
2. save      counts the bytes of this rank's files (written), those sent to other ranks (sent), and
             the most memory at a time beyond that of training (held)
3. load      counts the bytes read from the files (read), and those sent and held. The checksums,
             for which all ranks together read every byte once more, do not count

    for n in 1 2 4 8; do python -m torch.distributed.run --standalone --nproc-per-node $n \
        benchmarks/benchmark_checkpoint.py --config-file conf/dit_debug.yaml --mock; done
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit.config import RunConfig
from dit.config_loading.cli import parse_arguments
from dit.distributed.entry import Parser, run
from recipes.runs import RECIPES

if TYPE_CHECKING:
    from dit.train.model_and_optimizer import ModelAndOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """Bytes that one rank wrote, read, sent and held for a checkpoint."""

    weights: int  # weights on the rank, or its rows of them
    largest: int  # the largest weight, with its optimizer state and average
    state: int  # optimizer state and average on the rank
    written: int
    read: int
    sent_at_save: int
    sent_at_load: int
    held_at_save: int
    held_at_load: int
    metadata: int  # names, places and plans, sent at save and load


def main(argv: Sequence[str] | None = None) -> int:
    options, config = _parse(argv)
    # Imported late: --help and a wrong key answer without waiting for Megatron-Core.
    import torch.distributed as dist

    from dit.distributed.process_groups import process_groups, start_processes
    from dit.launched import check_launch, world_size
    from dit.train.model_and_optimizer import build_model_and_optimizer, randomise

    check_launch()
    # No pack is trained on, so the number of packs of a step is free.
    packs = replace(config.train, global_batch_size=world_size())
    config = replace(config, train=packs)
    config.data_parallel_size(world_size())
    start_processes(
        seed=config.rng.seed,
        model=config.model,
        dp_replicate_size=config.ddp.dp_replicate_size,
    )
    fill = partial(randomise, seed=1)
    model = build_model_and_optimizer(config, process_groups(), fill=fill)
    places: list[Any] = [tempfile.mkdtemp(dir=options.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(places)
    shares: list[Any] = [None] * world_size()
    dist.all_gather_object(shares, measure(model, config, Path(places[0]), options.bucket))
    if dist.get_rank() == 0:
        shutil.rmtree(places[0])
        _print(shares, bucket=options.bucket)
        if options.json:
            options.json.write_text(
                json.dumps([asdict(share) for share in shares], indent=1) + "\n"
            )
    return 0


def _parse(argv: Sequence[str] | None) -> tuple[Namespace, RunConfig]:
    parser = Parser(
        prog="benchmark_checkpoint.py",
        description=(__doc__ or "").splitlines()[0],
        epilog="All other arguments are those of pretrain_dit.py: --config-file FILE, --mock,"
        " --recipe NAME, KEY=VALUE ...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--json", type=Path, help="file for the figures of each rank")
    add("--folder", type=Path, help="where the checkpoint lies meanwhile (default: temporary)")
    add("--bucket", type=int, default=2**20, help="bytes of state on its way (%(default)s)")
    options, others = parser.parse_known_args(argv)
    return options, parse_arguments(others, recipes=RECIPES, program=parser.prog).config


def measure(model: ModelAndOptimizer, config: RunConfig, folder: Path, bucket: int) -> RankShare:
    """Saves and loads a checkpoint in `folder`, and counts the bytes of this rank.

    All ranks must call it. `bucket` is the largest number of bytes in one exchange between ranks.
    """
    import torch.distributed as dist
    from measuring.rank_bytes import counted_bytes

    from dit.train.checkpoint import exchange
    from dit.train.checkpoint.async_save import save_checkpoint
    from dit.train.checkpoint.state_dict import (
        DataState,
        TrainProgress,
        load_checkpoint,
        stored_values,
    )

    exchange.BUCKET_BYTES = bucket
    values = stored_values(model)
    weights = [p for chunk in model.chunks for p in chunk.parameters()]
    about = {"progress": TrainProgress(), "config": config}
    with counted_bytes() as save:
        data = DataState(position=None, card=None, null={})
        path = save_checkpoint(folder, model, data=data, **about)
    with counted_bytes() as load:
        load_checkpoint(path, model, config=config)
    return RankShare(
        weights=sum(p.nbytes for p in weights),
        largest=max(p.nbytes + 4 * len(values) * p.numel() for p in weights),
        state=sum(t.nbytes for tensors in values.values() for t in tensors),
        written=sum(f.stat().st_size for f in path.glob(f"__{dist.get_rank()}_*.distcp")),
        read=load.read,
        sent_at_save=save.sent,
        sent_at_load=load.sent,
        held_at_save=save.held,
        held_at_load=load.held,
        metadata=save.metadata + load.metadata,
    )


def _print(shares: Sequence[RankShare], *, bucket: int) -> None:
    from rich.table import Table

    from dit.console import Console

    even = sum(share.written for share in shares) / len(shares)
    bound = 1.2 * even + max(share.largest for share in shares)
    table = Table(title=f"Bytes of a rank, of {len(shares)}", title_justify="left")
    for name in ("", "most", "mean", "at most"):
        table.add_column(name, justify="right" if name else "left")
    state = max(share.state for share in shares)
    limits = {"written": bound, "read": bound, "sent_at_save": state}
    limits |= {"held_at_save": bound + bucket, "held_at_load": bound + bucket}
    for field in fields(RankShare):
        found = [getattr(share, field.name) for share in shares]
        limit = f"{limits[field.name]:,.0f}" if field.name in limits else ""
        table.add_row(field.name, f"{max(found):,}", f"{sum(found) / len(found):,.0f}", limit)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(run(main))

"""Program of a test: what each of several ranks opens when a run starts and resumes, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from dit.config import RunConfig
from dit.config_loading.cli import parse_arguments
from dit.data import LoaderLayout, build_train_loader, build_val_packs
from dit.data.energon import task_encoder
from dit.distributed.pack_broadcast import Replica
from dit.distributed.process_groups import process_groups, start_processes
from dit.models.dit.family import DitConfig
from dit.train.checkpoint.data_position import data_positions, loader_file
from dit.train.validation import read_validation_packs
from recipes.runs import RECIPES

_opened: list[str] = []


@contextmanager
def _opens(suffix: str) -> Iterator[list[str]]:
    """The files with this suffix that are opened inside."""
    first, names = len(_opened), []
    yield names
    names += [Path(name).name for name in _opened[first:] if name.endswith(suffix)]


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str):
        _opened.append(arguments[0])


def _resumed(config: RunConfig, folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Files opened by a resume on as many ranks, and on two of them; and whether it is exact."""
    layout = LoaderLayout(ranks=ranks, workers=config.dataset.num_workers)
    loader = build_train_loader(config, rank=rank, world_size=ranks)
    next(loader)
    torch.save(loader.state_dict(), folder / loader_file(rank))
    following = next(loader)
    dist.barrier()
    with _opens(".pt") as own:
        states = data_positions(folder, layout, rank=rank)
    again = build_train_loader(config, rank=rank, world_size=ranks)
    again.load_state_dict(states)
    with _opens(".pt") as shared:
        two = LoaderLayout(ranks=2, workers=layout.workers)
        dealt = data_positions(folder, two, rank=rank if rank < 2 else None)
    files = [torch.load(folder / loader_file(n), weights_only=True) for n in range(ranks)]
    return {
        "own": own,
        "exact": next(again).keys == following.keys,
        "shared": shared,
        "complete": dealt == files,
    }


def _validated(config: RunConfig, rank: int, ranks: int) -> dict[str, Any]:
    """Samples decoded for the validation packs, and whether these are those of a rank alone."""
    indices, replica = range(rank, config.train.eval_iters, ranks), Replica(process_groups())
    with patch.object(task_encoder, "cook", wraps=task_encoder.cook) as cook:
        found = read_validation_packs(config, replica, rank=rank, world_size=ranks)
    packs = found["val_loss"].packs
    whole = build_val_packs(config, indices=indices).packs
    same = [
        a.keys == b.keys and torch.equal(a.latent_TC[a.is_real_T], b.latent_TC[b.is_real_T])
        for a, b in zip(packs, whole, strict=True)
    ]
    return {
        "decoded": cook.call_count,
        "samples": sum(len(pack.keys) for pack in packs),
        "packs": len(packs),
        "same": all(same),
    }


def _drawn(config: RunConfig) -> dict[str, Any]:
    """Numbers that this rank draws for the weights, and whether all are those of a rank alone."""
    from dit.models.registry import family_of
    from dit.train.model_and_optimizer import draw_weights

    groups, drawn = process_groups(), []

    def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        drawn.append(torch.Size(shape).numel())
        return torch.randn(shape, generator=generator)

    networks = [family_of(config.model).network()(config.model, groups, None) for _ in range(2)]
    for network, copies in zip(networks, (groups.dp_cp, None), strict=True):
        drawn.clear()
        draw_weights(network, draw, seed=1, copies=copies)
        if copies is not None:
            mine = sum(drawn)
    pairs = zip(*(network.parameters() for network in networks), strict=True)
    return {"mine": mine, "all": sum(drawn), "same": all(torch.equal(a, b) for a, b in pairs)}


def _groups() -> dict[str, list[int]]:
    """Calls of `new_group` in all, and groups that this rank is in, for layouts of four ranks."""
    layouts = {
        "dp4": {},
        "tp2 dp2": {"tensor_model_parallel_size": 2},
        "cp2 dp2": {"context_parallel_size": 2},
        "pp2 dp2": {"pipeline_model_parallel_size": 2},
        "tp2 cp2": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    }
    original, found = dist.new_group, {}
    for name, sizes in layouts.items():
        made: list[list[int]] = []

        def counted(ranks: list[int], *arguments: Any, **options: Any) -> Any:
            made.append(list(ranks))  # noqa: B023
            return original(ranks, *arguments, **options)

        dist.new_group = counted
        start_processes(seed=1, model=DitConfig(**sizes), limit_s=60)
        dist.new_group = original
        groups = process_groups()
        whole = groups.tp.size() * groups.pp.size() * groups.dp_cp.size()
        assert (whole, groups.dp.size() * groups.cp.size()) == (4, groups.dp_cp.size())
        for one in fields(groups):  # a shared group has the ranks that were asked for
            group = getattr(groups, one.name, None)
            if isinstance(group, dist.ProcessGroup):
                total = torch.ones(1)
                dist.all_reduce(total, group=group)
                assert total.item() == group.size()
        found[name] = [len(made), sum(dist.get_rank() in ranks for ranks in made)]
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    config = parse_arguments(sys.argv[2:], recipes=RECIPES).config
    start_processes(seed=1, model=config.model, limit_s=60)
    sys.addaudithook(_hear)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = {
        "resumed": _resumed(config, folder, rank, ranks),
        "validated": _validated(config, rank, ranks),
        "drawn": _drawn(config),
        "groups": _groups(),
    }
    found = [here] * ranks
    dist.all_gather_object(found, here)
    if rank == 0:
        print(json.dumps(found))  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

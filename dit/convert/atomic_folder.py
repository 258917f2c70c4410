"""A target folder that appears only when it is complete; divides work among processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from dit.convert.errors import ConvertError
from dit.distributed.collective_errors import RankError, error_in_words, on_all_ranks, on_first_rank


@contextmanager
def new_folder(target: Path, *, option: str) -> Iterator[Path]:
    """A context with a folder to fill, which then becomes `target`; after an error it is removed.

    Collective: all processes call it, and the first one makes the folder. `option` is the
    command-line option that set `target`.

    Raises:
        ConvertError: `target` exists, or a file in it cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise ConvertError(f"{option} {target} exists; remove it or choose another folder")
    partial = target.with_name(f".partial_{target.name}")

    def make() -> None:
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
        partial.mkdir(parents=True)

    try:
        on_first_rank(make)
        yield partial
        on_first_rank(lambda: partial.rename(target))
    except (OSError, RankError) as error:
        _remove(partial)
        raise ConvertError(
            f"{option} {target} cannot be written ({error_in_words(error)}); free space or choose"
            " another folder. Nothing is left there"
        ) from error
    except BaseException:
        _remove(partial)
        raise


def _remove(partial: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)


def split_work(work: Callable[[int], object], count: int) -> list[object]:
    """Results of `work` for 0 to `count - 1`, each computed on one of the processes.

    Collective: all processes call it, and each gets all results in order.

    Raises:
        RankError: a call failed on any process.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    of_ranks = on_all_ranks(lambda: [work(piece) for piece in range(rank, count, world)])
    return [of_ranks[piece % world][piece // world] for piece in range(count)]

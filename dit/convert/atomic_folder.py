"""A target folder that is there when it is whole, and not before."""

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
    """A folder to fill, called `target` once the block has ended well, else removed.

    All processes enter and leave it together. `option` is what the user set `target` with.

    Raises:
        ConvertError: `target` exists, or something in it cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise ConvertError(f"{option} {target} exists; remove it or choose another folder")
    partial = target.with_name(f".partial_{target.name}")

    def make() -> None:
        shutil.rmtree(partial, ignore_errors=True)  # left by one that was killed
        partial.mkdir(parents=True)

    try:
        on_first_rank(make)
        yield partial
        on_first_rank(lambda: partial.rename(target))
    except (OSError, RankError) as error:
        _remove(partial)
        raise ConvertError(
            f"{option} {target} cannot be written ({error_in_words(error)}); is the disk full, or"
            " the folder not yours? Nothing is left there"
        ) from error
    except BaseException:
        _remove(partial)
        raise


def _remove(partial: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)


def share(work: Callable[[int], object], count: int) -> list[object]:
    """Does pieces 0 to `count` of some work, each on one of the processes; all of them call it.

    Returns the results in the order of the pieces.

    Raises:
        RankError: a piece failed, on whichever process.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    of_ranks = on_all_ranks(lambda: [work(piece) for piece in range(rank, count, world)])
    return [of_ranks[piece % world][piece // world] for piece in range(count)]

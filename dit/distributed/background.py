"""An iterator that goes on by itself while its caller does something else."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

from dit.distributed.watchdog.monitor import standing_in

T = TypeVar("T")


class Background(Iterator[T], Generic[T]):
    """What `items` gives, made by a thread and kept until it is asked for.

    An error of `items` is raised in its place, where it is asked for.
    """

    def __init__(self, items: Iterator[T]):
        self._made: SimpleQueue[tuple[T] | Exception] = SimpleQueue()
        # A process that ends does not wait for it: it may wait for another that has died.
        self.thread = Thread(target=self._make, args=(items,), daemon=True)
        self.thread.start()

    def _make(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._made.put((item,))
            self._made.put(StopIteration())
        except Exception as error:  # noqa: BLE001  # raised where it is asked for
            self._made.put(error)

    def __next__(self) -> T:
        with standing_in(self.thread):
            made = self._made.get()
        if isinstance(made, Exception):
            raise made
        return made[0]

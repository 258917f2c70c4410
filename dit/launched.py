"""Reads a process's rank from its launcher's variables, and notices when the launcher dies.

1. torch and this project read five variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
   MASTER_PORT. One process alone needs none of them.
2. `meet` waits until all processes have joined the store through which they find each other.
3. `LauncherWatch` ends a process whose launcher has died before the processes met.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from dit.system_errors import explained, system_number

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

FIVE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_STARTERS = {  # names of RANK, WORLD_SIZE and LOCAL_RANK
    # Slurm sets SLURM_NTASKS and SLURM_PROCID in the shell of a batch job as well.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK")),
}
MEETING = timedelta(minutes=10)
"""Time within which all processes must join."""
_LIMIT = " (dist.distributed_timeout_minutes of a training)"
_POLL_S = 0.1
_ROUND_S = 0.5
_PROBE_ROUNDS = 4
"""Rounds of `LauncherWatch` between two probes of the launcher's store, which up to 1,000 processes
probe."""
_PROBE_S = 2.0


class LaunchError(ValueError):
    """The variables of a launcher are incomplete or wrong; each process shows the error."""


class NoAnswerError(TimeoutError):
    """The store through which all processes meet does not answer this process."""


def rank() -> int:
    """Rank of this process among all processes, from 0; 0 without a launcher.

    Raises:
        LaunchError: RANK is not a whole number.
    """
    return _whole("RANK", 0)


def world_size() -> int:
    """Number of all processes; 1 without a launcher.

    Raises:
        LaunchError: WORLD_SIZE is not a whole number of at least 1.
    """
    return _whole("WORLD_SIZE", 1)


def local_rank() -> int:
    """Index of this process on its machine; 0 without all variables of a launcher."""
    return _whole("LOCAL_RANK", 0) if meets_others() else 0


def meets_others(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has set all variables that this process needs to meet the others."""
    return all(environment.get(name) for name in FIVE)


def is_alone() -> bool:
    """Whether this process is the whole run; a MASTER_ADDR in its environment is then ignored."""
    return world_size() == 1 and not is_launched()


def is_launched() -> bool:
    """Whether torch.distributed.run started this process; its agent then hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def check_launch() -> None:
    """Checks the five variables, before anything waits for a process that will never come.

    Raises:
        LaunchError: a variable is wrong; or variables are missing although there are several
            processes. srun and mpirun start several processes without setting these variables:
            each process would do the whole work, which WORLD_SIZE=1 allows explicitly.
    """
    at, size = rank(), world_size()
    if not meets_others():
        if at > 0 or size > 1:
            raise LaunchError(_incomplete(os.environ))
        if not os.environ.get("WORLD_SIZE"):
            _check_starter(os.environ)
        return
    if at >= size:
        raise LaunchError(
            f"RANK={at} must be from 0 to {size - 1}, below WORLD_SIZE={size}; correct it, or let"
            " torch.distributed.run set both"
        )
    if local_rank() >= size:
        raise LaunchError(
            f"LOCAL_RANK={local_rank()} must be below WORLD_SIZE={size}; correct it, or let"
            " torch.distributed.run set both"
        )
    if not 0 < _whole("MASTER_PORT", 0) < 1 << 16:
        raise LaunchError(
            f"MASTER_PORT={os.environ['MASTER_PORT']} must be from 1 to 65535; set it to a free"
            " port of MASTER_ADDR"
        )


def _whole(name: str, missing: int) -> int:
    text = os.environ.get(name) or str(missing)
    least = 1 if name == "WORLD_SIZE" else 0
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise LaunchError(
            f"{name}={text[:40]} is not a whole number of at least {least}; `unset {name}`, or let"
            " torch.distributed.run set it"
        )
    return int(text)


def _incomplete(environment: Mapping[str, str]) -> str:
    there = [name for name in FIVE if environment.get(name)]
    missing = [name for name in FIVE if name not in there]
    said = " ".join(f"{name}={environment[name]}" for name in there)
    message = (
        f"{said}: a run of several processes needs {', '.join(missing)} as well. For one"
        f" process, `unset {' '.join(there)}`; for several, start the command with"
        " `python -m torch.distributed.run --nproc-per-node N`, which sets all five"
    )
    for starter, names in _STARTERS.items():
        if all(name in environment for name in names):
            message += f", or {_translated(starter)}"
    return message


def _translated(starter: str) -> str:
    """Advice on how to set the five variables in processes that `starter` (srun, mpirun) starts."""
    given = zip(FIVE, _STARTERS[starter], strict=False)
    return (
        f"in what {starter} starts set {' '.join(f'{name}=${theirs}' for name, theirs in given)},"
        " and MASTER_ADDR and MASTER_PORT of the first process"
    )


def _check_starter(environment: Mapping[str, str]) -> None:
    """Raises `LaunchError` in one of several processes of srun or mpirun."""
    for starter, (_, size, _) in _STARTERS.items():
        count = environment.get(size, "")
        if count.isascii() and count.isdecimal() and int(count) > 1:
            raise LaunchError(
                f"{size}={count}: {starter} has started {count} processes, and each would do the"
                f" whole work by itself. For one run of all, {_translated(starter)}, or start"
                " `python -m torch.distributed.run` once on each node; for a run of each,"
                " `export WORLD_SIZE=1`"
            )


def meet(timeout: timedelta = MEETING) -> Store:
    """Waits until all processes have joined; returns the store that they share in this start.

    torch.distributed.run keeps one store through its restarts (pytorch issue 135712): a process
    that is faster than others would find the addresses of their dead predecessors in it. Counting
    restarts would not help, because each node's launcher counts its own. So the first rank
    publishes a new random name together with the list of the ranks that have registered under this
    name. A rank that has read the name of an earlier start is not on the list, and reads again. The
    returned store has only the entries under the new name.

    Raises:
        LaunchError: as `check_launch`.
        TimeoutError: names the ranks that did not join, or the store that does not answer.
        OSError: this process should host the store, and cannot.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    check_launch()
    store = _connected(timeout)
    name = _open(store, timeout) if rank() == 0 else _join(store, timeout)
    return PrefixStore(name, store)


def _connected(timeout: timedelta) -> Store:
    """Connects to the launcher's store, or without a launcher to that of rank 0.

    A thread makes the connection, because torch waits for ever for a machine that accepts it and
    does not answer, such as one whose process is stopped.

    Raises:
        NoAnswerError: the store does not answer within `timeout`.
        OSError: this process should host the store, and cannot.
    """
    from torch.distributed.rendezvous import rendezvous

    found: SimpleQueue[Store | Exception] = SimpleQueue()

    def connect() -> None:
        try:
            found.put(next(iter(rendezvous("env://", timeout=timeout)))[0])
        except Exception as error:  # noqa: BLE001  # the waiting thread raises what it does not know
            found.put(error)

    threading.Thread(target=connect, daemon=True).start()
    place = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
    try:
        answer = found.get(timeout=timeout.total_seconds())
    except Empty:
        answer = TimeoutError()
    if not isinstance(answer, Exception):
        return answer
    if not isinstance(answer, RuntimeError | OSError | ValueError):
        raise answer
    if rank() == 0 and not is_launched() and system_number(answer):  # the port is taken
        raise OSError(f"MASTER_PORT of {place}: {explained(answer)}") from answer
    who = "the launcher of the first node" if is_launched() else "rank 0"
    raise NoAnswerError(
        f"{who} did not answer at MASTER_ADDR:MASTER_PORT={place} within"
        f" {timeout.total_seconds():.0f} s{_LIMIT}; read the log of that machine, and check that"
        f" {socket.gethostname()} reaches it (`getent hosts`, firewalls)"
    ) from answer


def _open(store: Store, timeout: timedelta) -> str:
    from torch.distributed import DistStoreError

    name = secrets.token_hex(8)
    store.set("rendezvous", name)
    keys = [f"{name}/{other}" for other in range(1, world_size())]
    try:
        store.wait(keys, timeout)
    except DistStoreError as error:
        late = [str(other) for other, key in enumerate(keys, 1) if not store.check([key])]
        raise _missing(f"rank {', '.join(late)}", timeout) from error
    store.set(f"{name}/members", b" ".join(store.multi_get(keys)).decode())
    return name


def _join(store: Store, timeout: timedelta) -> str:
    me, deadline = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if store.check(["rendezvous"]):
            name = store.get("rendezvous").decode()
            store.set(f"{name}/{rank()}", me)
            members = f"{name}/members"
            if store.check([members]) and me in store.get(members).decode().split():
                return name
        time.sleep(_POLL_S)
    raise _missing("rank 0", timeout)


def _missing(who: str, timeout: timedelta) -> TimeoutError:
    return TimeoutError(
        f"{who} did not join within {timeout.total_seconds():.0f} s{_LIMIT}; read the log of its"
        " node, and check that each node was started with the same --nnodes, --nproc-per-node and"
        " --rdzv-endpoint"
    )


class LauncherWatch:
    """A thread that ends this process when torch.distributed.run has died unnoticed.

    It checks whether its parent has changed. Until the processes have met, it also checks whether
    the launcher's store refuses connections: the launcher may have died before this process
    started, or a shell between them may live on. `leave` ends the process with a message.
    """

    paused = False
    """Whether this check is left to the watchdog, whose message is more complete."""

    def __init__(self, leave: Callable[[str], None]):
        self._leave = leave
        self._parent = os.getppid()
        if is_launched() and meets_others():
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        rounds, wake = 0, threading.Event()
        while True:
            if not self.paused and (who := self._dead(rounds)):
                self._leave(
                    f"{who} died or was killed, perhaps because memory ran out; this process"
                    " ends, too. Start the run again with the same command"
                )
            rounds += 1
            wake.wait(_ROUND_S)

    def _dead(self, rounds: int) -> str:
        """Phrase for the launcher that has ended; empty if none has."""
        if os.getppid() != self._parent:
            return f"the launcher (process {self._parent})"
        if rounds % _PROBE_ROUNDS or has_started() or not all(_refused() for _ in range(2)):
            return ""
        return "the launcher of the first node ({MASTER_ADDR}:{MASTER_PORT})".format(**os.environ)


def has_started() -> bool:
    """Whether this process has met the others in torch's process group."""
    # Looked up, not imported: --help and the like must not wait for torch.
    dist = sys.modules.get("torch.distributed")
    return dist is not None and getattr(dist, "is_initialized", bool)()


def _refused() -> bool:
    """Whether the machine of the store reports that nothing listens on its port."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with suppress(OSError, ValueError):  # silence is not death: the network may be slow
        try:
            socket.create_connection(place, timeout=_PROBE_S).close()
        except ConnectionRefusedError:
            return True
    return False

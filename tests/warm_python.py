"""Python with torch, Megatron-Core and Diffusers imported, for tests that start many processes.

Importing them costs a process four seconds, ten times what most tests compute. A server imports
them once and forks for each program that it is asked to run, and so it does with our own modules,
which are a third of what a short run computes. What stands for `python` in a command is a client:
it hands its arguments, environment, folder, files and their limit (`ulimit -f`) to the server,
passes signals on, and exits as the program does.

Tests of processes themselves (of those that are killed, of what their parent is) and of what a
process imports start Python as users do.
"""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import importlib
import json
import os
import pickle
import pkgutil
import resource
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from filelock import FileLock

MODULES = (
    *("torch", "torch.distributed.run", "torch.distributed.checkpoint", "torch.utils.data"),
    *("torch._inductor.compile_fx", "torch.utils.tensorboard", "numpy", "PIL.Image", "yaml"),
    *("megatron.core", "megatron.core.distributed", "megatron.core.optimizer", "megatron.energon"),
    *("megatron.core.transformer.transformer_block", "megatron.core.models.backends"),
    *("megatron.core.dist_checkpointing.strategies.torch", "megatron.core.models.common"),
    *("megatron.core.pipeline_parallel", "safetensors.torch", "omegaconf", "pydantic"),
    *("transformers", "diffusers", "diffusers.pipelines.pipeline_utils", "peft", "webdataset"),
    *("diffusers.models.modeling_utils", "rich.console", "rich.progress", "av", "scipy.optimize"),
    "pyarrow",  # Diffusers' pipelines bring it with older transformers
    *("matplotlib.figure", "matplotlib.font_manager", "ftfy"),
    *("sklearn.datasets", "sklearn.model_selection", "sklearn.svm"),
)
OURS = ("dit", "recipes", "data_prep")
COMPUTED = ("dit.sizing.flops._counted", "dit.sizing.kept._traced")
LENGTH = struct.Struct("!I")
STATUS = struct.Struct("!i")

CLIENT = """#!{python} -IS
import json, os, resource, signal, socket, struct, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), limits]).encode()
socket.send_fds(server, [struct.pack("!I", len(asked))], [0, 1, 2])
server.sendall(asked)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
parent = os.getppid()
server.settimeout(1)
while os.getppid() == parent:  # an orphan ends, and with it the program
    try:
        answer = server.recv(4)
    except TimeoutError:
        continue
    status = struct.unpack("!i", answer)[0] if answer else 1
    if status >= 0:
        os._exit(status)
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
"""


TESTS = "DIT_TESTS"
"""Environment variable of a run of tests: the process of all of it, and when it began."""


def name_tests() -> None:
    """Names a run of tests in its first process, for all workers that pytest starts."""
    os.environ[TESTS] = f"{os.getpid()}-{time.time_ns()}"


@functools.cache
def warm_python() -> str:
    """The path of what stands for `python`; its server is that of all workers, and ends with them.

    The first that asks starts it, and the others wait.
    """
    if TESTS not in os.environ:
        name_tests()
    folder = Path(tempfile.gettempdir(), f"warm-python-{os.environ[TESTS]}")
    folder.mkdir(exist_ok=True)
    address, client = folder / "server", folder / "python"
    with FileLock(folder / "lock"):
        if not client.exists():
            _start_server(address)
            made = CLIENT.format(python=sys.executable, address=str(address))
            client.write_text(made)
            client.chmod(0o755)
    return str(client)


def _start_server(address: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, __file__, str(address), os.environ[TESTS].partition("-")[0]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the tests, and the server ends with them
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the server of warm_python did not start"


@dataclass(frozen=True)
class Request:
    """What a client wants to be."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    file_size: list[int]
    """Limits in bytes, soft and hard."""
    files: list[int]
    """Standard input, output and error."""

    @classmethod
    def read(cls, client: socket.socket) -> Request:
        head, files, _, _ = socket.recv_fds(client, LENGTH.size, 3)
        (length,) = LENGTH.unpack(head)
        asked = b""
        while len(asked) < length:
            asked += client.recv(length - len(asked))
        arguments, environment, folder, limits = json.loads(asked)
        return cls(arguments, environment, folder, limits, files)


class Server:
    """Forks for each client, and tells it how the fork ended."""

    def __init__(self, address: str, tests: int) -> None:
        self.tests = os.pidfd_open(tests)  # readable from the end of that process on
        self.clients: dict[int, socket.socket] = {}
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.woken, self.wakes = socket.socketpair()
        self.wakes.setblocking(False)
        signal.set_wakeup_fd(self.wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.waiting = selectors.DefaultSelector()
        for source in (self.listener, self.woken, self.tests):
            self.waiting.register(source, selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """Returns in a fork what it is to be, and None when nobody can ask any more."""
        while True:
            for key, _ in self.waiting.select():
                if key.fileobj == self.tests:
                    for child in self.clients:
                        with suppress(ProcessLookupError):
                            os.killpg(child, signal.SIGKILL)
                    return None
                if key.fileobj is self.listener:
                    if request := self._fork():
                        return request
                elif key.fileobj is self.woken:
                    self.woken.recv(1024)
                    self._bury()
                elif key.data in self.clients:
                    self._pass_on(key.data)

    def _fork(self) -> Request | None:
        client, _ = self.listener.accept()
        request = Request.read(client)
        if child := os.fork():
            for file in request.files:
                os.close(file)
            self.clients[child] = client
            self.waiting.register(client, selectors.EVENT_READ, child)
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.waiting.close()
        os.close(self.tests)
        for one in (self.listener, self.woken, self.wakes, client, *self.clients.values()):
            one.close()
        return request

    def _pass_on(self, child: int) -> None:
        """Signals to a client; the end of it is that of the fork."""
        client = self.clients[child]
        numbers = client.recv(16)
        with suppress(ProcessLookupError):
            for number in numbers:
                os.kill(child, number)
            if not numbers:
                self.waiting.unregister(client)
                os.killpg(child, signal.SIGKILL)

    def _bury(self) -> None:
        for child, client in list(self.clients.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                continue
            del self.clients[child]
            with suppress(KeyError, OSError):  # it was killed itself
                self.waiting.unregister(client)
                client.sendall(STATUS.pack(os.waitstatus_to_exitcode(status)))
            client.close()


def become(request: Request) -> NoReturn:
    """Runs a program to its end, but does not take the imported modules apart again."""
    _enter(request)
    status = 0
    try:
        _run(request.arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as error:  # noqa: BLE001
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _enter(request: Request) -> None:
    """Makes this fork the process that the client was asked to be."""
    os.setsid()
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        os.close(file)
    ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, request.file_size)
    installed = [place for place in sys.path[1:] if place not in ours]
    given = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = ["", *(place for place in given if place), *installed]
    client = str(Path(sys.argv[1]).with_name("python"))
    if shutil.which("python", path=request.environment.get("PATH")) == client:
        sys.executable = client  # what the program starts is warm, but for multiprocessing
    sys.orig_argv = [sys.executable, *request.arguments]


def _run(arguments: list[str]) -> None:
    """`-u`, `-W ACTION`, `-c CODE`, `-m MODULE` and SCRIPT, as Python takes them."""
    kind, *rest = arguments
    if kind == "-u":
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        return _run(rest)
    if kind == "-W":
        warnings.simplefilter(rest[0])  # type: ignore[arg-type]
        return _run(rest[1:])
    if kind == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = rest
        if not hasattr(sys.modules.get(rest[0]), "__path__"):
            sys.modules.pop(rest[0], None)  # runpy warns of a module that it runs once more
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(kind).resolve().parent)
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


def name_calls_quickly() -> None:
    """Lets a launcher name the functions of its events without `inspect.stack`.

    That looks at each of the thousands of modules that are imported here, for each frame of 18
    calls: 1.5 CPU seconds of every launch.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def name_of(depth: int = 2) -> str:
        return sys._getframe(depth).f_code.co_name

    dynamic_rendezvous.get_method_name = name_of


def import_ours() -> None:
    """Imports our modules, but for programs and for what needs a package that is not here."""
    root = str(Path(__file__).resolve().parents[1])
    sys.path.insert(1, root)
    for name in OURS:
        places = importlib.import_module(name).__path__
        for found in pkgutil.walk_packages(places, f"{name}."):
            if not found.name.endswith("__main__"):
                with suppress(ModuleNotFoundError):
                    importlib.import_module(found.name)
    sys.path.remove(root)


def read_configurations() -> None:
    """Makes what reads and checks the keys of each family, which a process makes at its first."""
    from dit.config_loading import default_config
    from dit.config_loading.load import to_yaml
    from dit.config_loading.validate import plain_group
    from dit.models.registry import families

    to_yaml(default_config())
    for family in families():
        plain_group(family.default())


def read_once(name: str, kept: Path) -> None:
    """Lets the forks count a network's work and its saved tensors once for all of them.

    `name` is that of a function of one configuration, the same in every process: 0.2 to 0.5 CPU
    seconds of each rank. The first fork that asks writes the result into the folder `kept`; what
    the functions return is for tests in pytest's own process, which computes it as users' do.
    """
    place, _, named = name.rpartition(".")
    module = importlib.import_module(place)
    computed = getattr(module, named)

    @functools.cache
    def read(of: object) -> object:
        # What no comparison looks at, no result depends on.
        parts = [getattr(of, one.name) for one in fields(of) if one.compare]  # type: ignore[arg-type]
        file = kept / f"{named}-{hashlib.sha256(repr(parts).encode()).hexdigest()}"
        with suppress(OSError):
            return pickle.loads(file.read_bytes())
        found, mine = computed(of), file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # in a test of full disks, or of too many files
            mine.write_bytes(pickle.dumps(found))
            mine.replace(file)
        return found

    setattr(module, named, read)


if __name__ == "__main__":
    gc.disable()  # importing makes no garbage worth a look
    # The allocator of pyarrow starts a thread where it is loaded.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    for name in MODULES:
        importlib.import_module(name)
    name_calls_quickly()
    import_ours()
    read_configurations()
    for function in COMPUTED:
        read_once(function, Path(sys.argv[1]).parent)
    gc.freeze()  # what the collector does not visit stays shared with the forks
    gc.enable()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lose {len(threads) - 1} threads"
    server = Server(sys.argv[1], int(sys.argv[2]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if request := server.serve():
        become(request)
    shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)

"""Breaks the code in many small ways and lists the changes that no test sees; takes hours.

    python -m tools.mutate --count 60 --seed 1      some places of the code that decides numbers
    python -m tools.mutate dit/objectives/edm.py    every place of a file
    python -m tools.mutate --fixed 30 --quick       of the first 30 functions of the fixed list

The tests of a change are first those named like its file, then those that mirror its folder, and if
these pass, `WIDER`. A change with which all pass needs a test, or a reason why it is no fault: an
equal formula, a matter of speed, a case that only a GPU has.

The fixed list, mutated_functions.txt, has 100 functions, drawn once (`--draw`), as module:name, to
compare two states of the tree. A function is found by its name, in whichever file; one that was
renamed, or shares its name with others, needs ` -> module:name` after it. Of the changes of a
function the one with the smallest hash is tried: it stays the same as long as its line does.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import pytest

FIXED = Path(__file__).with_name("mutated_functions.txt")
# What is broken by default, and the tests meant for it.
MIRRORS = {
    "dit/objectives": ["tests/unit/objectives"],
    "dit/models": ["tests/unit/models", "tests/contract"],
    "dit/train": ["tests/unit/train"],
    "dit/data": ["tests/unit/data"],
    "dit/bin_packing": ["tests/unit/test_bin_packing.py"],
    "dit/batch": ["tests/unit/data/test_pack.py", "tests/unit/data/test_pack_wire.py"],
    "dit/distributed": ["tests/unit/distributed"],
    "dit/sampling": ["tests/unit/sampling/test_generate.py"],
}
DRAWN = (
    *(
        "dit/batch",
        "dit/bin_packing",
        "dit/objectives/",
        "dit/models/attention/",
        "dit/sizing/",
    ),
    *("dit/models/kernels/", "dit/models/layer_spec/", "dit/models/layers/", "dit/models/stacks/"),
    *("dit/models/positions", "dit/data/", "dit/distributed/", "dit/train/"),
    *("dit/sampling/generate", "dit/sampling/ode_solvers"),
    *("dit/models/flux/model", "dit/models/wan/model", "dit/models/dit/model"),
)
"""Files from which the fixed list was drawn: they decide numbers, the order of samples,
checkpoints."""
WIDER = [
    "tests/contract",
    *("tests/unit/objectives", "tests/unit/models", "tests/unit/train", "tests/unit/data"),
    *("tests/contract", "tests/unit/convert", "tests/unit/sampling/test_generate.py"),
    *("tests/distributed/test_golden_losses.py", "tests/distributed/test_layouts.py"),
]
_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
}
_NAMES = {"cos": "sin", "sin": "cos", "min": "max", "max": "min", "sum": "mean", "mean": "sum"}


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of a file: its bytes from `start` to `stop`, which are `before`, become `after`."""

    file: str
    line: int
    start: int
    stop: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"


def changed(node: ast.AST) -> ast.AST | None:
    """A copy of `node` with one thing wrong in it; None if there is nothing to break."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return ast.BinOp(left, _OPERATORS[type(op)](), right)  # type: ignore[arg-type]
        case ast.Compare(left, [op], right) if type(op) in _OPERATORS:
            return ast.Compare(left, [_OPERATORS[type(op)]()], right)  # type: ignore[list-item]
        case ast.BoolOp(op, values):
            return ast.BoolOp(_OPERATORS[type(op)](), values)  # type: ignore[arg-type]
        case ast.UnaryOp(ast.USub() | ast.Not(), operand):
            return operand
        case ast.IfExp(test, body, orelse):
            return ast.IfExp(test, orelse, body)
        case ast.Constant(bool() as value):
            return ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            return ast.Constant(value + 1 if isinstance(value, int) else value * 2 or 1.0)
        case ast.Attribute(value, name) if name in _NAMES:
            return ast.Attribute(value, _NAMES[name])
        case ast.Expr(ast.Call()):
            return ast.Pass()
    return None


def mutations(root: Path, file: Path, within: ast.AST | None = None) -> Iterator[Mutation]:
    """Yields every change of a file, or of the part `within` it, in the order of the file."""
    source = file.read_bytes()
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for node in _code(within or ast.parse(source)):
        after = changed(node)
        if after is None:
            continue
        start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        stop = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        text = ast.unparse(after)
        yield Mutation(
            file=str(file.relative_to(root)),
            line=node.lineno,  # type: ignore[attr-defined]
            start=start,
            stop=stop,
            before=" ".join(source[start:stop].decode().split()),
            after=f"({text})" if isinstance(after, ast.expr) else text,
        )


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes inside `node` except annotations, decorators and texts of messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.JoinedStr, ast.Assert)):
                yield child
                yield from _code(child)


def passes(checkout: Path, tests: list[str], marks: str) -> bool:
    """Whether the tests pass in `checkout`; `marks` is a marker expression of pytest.

    A test that hangs fails. If `marks` selects no test, the result is True.
    """
    options = ["-x", "-q", "--timeout=300", "-p", "no:cacheprovider", "-m", marks]
    child = os.fork()  # with what takes long to import, and nothing of ours
    if child == 0:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        os.environ |= {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        os.chdir(checkout)
        sys.path.insert(0, str(checkout))
        os._exit(pytest.main([*options, *tests]))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) in (0, pytest.ExitCode.NO_TESTS_COLLECTED)


def verdict(mutation: Mutation, checkout: Path, *, narrow: bool, marks: str) -> str:
    """Tries a change: makes it in `checkout`, runs tests, and undoes it.

    Returns which tests saw the change, or SURVIVES if none did. `narrow` leaves out the wider
    tests; `marks` is a marker expression of pytest.
    """
    file = checkout / mutation.file
    source = file.read_bytes()
    broken = source[: mutation.start] + mutation.after.encode() + source[mutation.stop :]
    file.write_bytes(broken)
    own = [*checkout.glob(f"tests/unit/**/test_{file.stem}.py")]
    mirror = [t for part, tests in MIRRORS.items() if mutation.file.startswith(part) for t in tests]
    try:
        for said, tests in (("own", list(map(str, own))), ("mirroring", mirror), ("wider", WIDER)):
            tests = [test for test in tests if (checkout / test).exists()]
            if tests and not (narrow and said == "wider") and not passes(checkout, tests, marks):
                return f"seen by {said} tests"
        return "SURVIVES"
    finally:
        file.write_bytes(source)


def functions(root: Path) -> Iterator[tuple[str, Path, ast.AST]]:
    """Yields (`module:name`, file, syntax node) of every function and method of dit/.

    Functions inside other functions are left out.
    """
    for file in sorted(root.rglob("dit/**/*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_bytes()).body:
            inner = node.body if isinstance(node, ast.ClassDef) else [node]
            begin = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for one in inner:
                if isinstance(one, ast.FunctionDef):
                    yield f"{module}:{begin}{one.name}", file, one


def fixed(root: Path, count: int | None) -> Iterator[Mutation | str]:
    """Yields one change of each function of the fixed list, or a string why there is none.

    Only the first `count` functions of the list are taken; None takes all.
    """
    found = {name: (file, node) for name, file, node in functions(root)}
    for line in FIXED.read_text().splitlines()[:count]:
        old, _, new = line.partition(" -> ")
        own = old.partition(":")[2]
        same = [name for name in found if name.partition(":")[2] == own]
        places = [name for name in (new, old) if name in found][:1] or same
        if len(places) != 1:
            yield f"{'AMBIGUOUS' if places else 'GONE'}: {line}  {' '.join(places)}"
            continue
        changes = list(mutations(root, *found[places[0]]))
        if not changes:
            yield f"NOTHING TO BREAK: {line}"
            continue
        yield min(changes, key=lambda c: hashlib.sha256(f"{c.before} {c.after}".encode()).digest())


def draw(root: Path, seed: int) -> list[str]:
    """Draws 100 functions from the files in `DRAWN` in which there is something to break."""
    names = [
        name
        for name, file, node in functions(root)
        if str(file.relative_to(root)).startswith(DRAWN)
        and not re.search(r"triton|\.traffic:|\.export\.|adapters:", name)  # may go, or want a GPU
        and any(mutations(root, file, node))
    ]
    return random.Random(seed).sample(names, 100)


def copy_of(root: Path, checkout: Path) -> Path:
    """Copies the tracked files of `root` to `checkout`, and returns `checkout`.

    Changes are made there, so that they do not touch `root`.
    """
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    for name in filter(None, listing.stdout.decode().split("\0")):
        target = checkout / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target, follow_symlinks=False)
    return checkout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="default: all of " + ", ".join(MIRRORS))
    parser.add_argument("--count", type=int, help="only so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--narrow", action="store_true", help="only the tests that mirror a file")
    parser.add_argument("--fixed", type=int, metavar="COUNT", help="so many of the fixed list")
    parser.add_argument("--draw", action="store_true", help="draw the fixed list anew with --seed")
    parser.add_argument("--root", type=Path, default=Path(), help="a checkout (default: this one)")
    parser.add_argument("--quick", action="store_true", help="without tests that are marked slow")
    args = parser.parse_args()
    marks = "not gpu and not slow" if args.quick else "not gpu"
    root = args.root.resolve()
    if args.draw:
        FIXED.write_text("".join(f"{name}\n" for name in draw(root, args.seed)))
        return
    _import_what_tests_need()
    found = [] if args.fixed is None else list(fixed(root, args.fixed))
    for said in (one for one in found if isinstance(one, str)):
        sys.stdout.write(f"{said}\n")
    found = [one for one in found if isinstance(one, Mutation)]
    if args.fixed is None:
        wanted = args.files or list(MIRRORS)
        files = [f for f in sorted(root.rglob("dit/**/*.py")) if _under(root, f, wanted)]
        found = [m for file in files for m in mutations(root, file)]
    if args.count:
        found = random.Random(args.seed).sample(found, min(args.count, len(found)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        free: Queue[Path] = Queue()
        for number in range(args.jobs):
            free.put(copy_of(root, Path(folder, str(number))))

        def judge(mutation: Mutation) -> tuple[str, float]:
            checkout, began = free.get(), time.monotonic()
            try:
                said = verdict(mutation, checkout, narrow=args.narrow, marks=marks)
                return said, time.monotonic() - began
            finally:
                free.put(checkout)

        counts: dict[str, int] = {}
        for mutation, (said, seconds) in zip(found, pool.map(judge, found), strict=True):
            counts[said] = counts.get(said, 0) + 1
            sys.stdout.write(f"{said} ({seconds:.0f} s): {mutation}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{counts}\n")


def _import_what_tests_need() -> None:
    """Imports packages once for all processes that `verdict` forks; --help does without."""
    import diffusers.models.transformers.transformer_cosmos  # noqa: F401
    import megatron.core.optimizer  # noqa: F401


def _under(root: Path, file: Path, wanted: list[str]) -> bool:
    name = str(file.relative_to(root))
    return any(name.startswith(part.rstrip("/")) for part in wanted)


if __name__ == "__main__":
    main()

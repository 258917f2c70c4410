"""Breaks the code in many small ways and says which ones no test sees. Run by hand: it takes hours.

    python -m tools.mutate --count 60 --seed 1            some places of what decides the numbers
    python -m tools.mutate dit/objectives/edm.py           every place of a file

A change is first tried on the tests that mirror its file, and where those pass on `WIDER`. What
survives both wants a test, or a reason why it is no fault: an equal formula, a matter of speed, a
case that only a GPU has.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import diffusers.models.transformers.transformer_cosmos  # noqa: F401
import megatron.core.optimizer  # noqa: F401
import pytest

ROOT = Path(__file__).resolve().parents[1]
# What is broken by default, and the tests meant for it.
MIRRORS = {
    "dit/objectives": ["tests/unit/objectives"],
    "dit/models": ["tests/unit/models", "tests/contract"],
    "dit/train": ["tests/unit/train"],
    "dit/data/pack": ["tests/unit/data/test_pack.py", "tests/unit/test_bin_packing.py"],
}
WIDER = [
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
    """One change: bytes of a file, from `start` to `stop`, become `after`."""

    file: str
    line: int
    start: int
    stop: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"


def changed(node: ast.AST) -> ast.AST | None:
    """The node with one thing wrong in it, or None where there is nothing to break."""
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


def mutations(file: Path) -> Iterator[Mutation]:
    """Every change of a file, in its order."""
    source = file.read_bytes()
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for node in _code(ast.parse(source)):
        after = changed(node)
        if after is None:
            continue
        start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        stop = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        text = ast.unparse(after)
        yield Mutation(
            file=str(file.relative_to(ROOT)),
            line=node.lineno,  # type: ignore[attr-defined]
            start=start,
            stop=stop,
            before=" ".join(source[start:stop].decode().split()),
            after=f"({text})" if isinstance(after, ast.expr) else text,
        )


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, decorators and what only a message says."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.JoinedStr, ast.Assert)):
                yield child
                yield from _code(child)


def passes(checkout: Path, tests: list[str]) -> bool:
    """Whether tests pass in a checkout; one that hangs does not."""
    options = ["-x", "-q", "--timeout=120", "-p", "no:cacheprovider", "-m", "not gpu"]
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
    return os.waitstatus_to_exitcode(status) == 0


def verdict(mutation: Mutation, checkout: Path, *, narrow: bool) -> str:
    """Which tests saw the change; `narrow` asks only those that mirror its file."""
    file = checkout / mutation.file
    source = file.read_bytes()
    broken = source[: mutation.start] + mutation.after.encode() + source[mutation.stop :]
    file.write_bytes(broken)
    mirror = [t for part, tests in MIRRORS.items() if mutation.file.startswith(part) for t in tests]
    try:
        if mirror and not passes(checkout, mirror):
            return "seen"
        return "SURVIVES" if narrow or passes(checkout, WIDER) else "seen by wider tests"
    finally:
        file.write_bytes(source)


def copy_of(checkout: Path) -> Path:
    """The tracked files, to be broken."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listing.stdout.decode().split("\0")):
        target = checkout / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return checkout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="default: all of " + ", ".join(MIRRORS))
    parser.add_argument("--count", type=int, help="only so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--narrow", action="store_true", help="only the tests that mirror a file")
    args = parser.parse_args()
    wanted = args.files or list(MIRRORS)
    files = [f for f in sorted(ROOT.rglob("dit/**/*.py")) if _under(f, wanted)]
    found = [m for file in files for m in mutations(file)]
    if args.count:
        found = random.Random(args.seed).sample(found, min(args.count, len(found)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        free: Queue[Path] = Queue()
        for number in range(args.jobs):
            free.put(copy_of(Path(folder, str(number))))

        def judge(mutation: Mutation) -> str:
            checkout = free.get()
            try:
                return verdict(mutation, checkout, narrow=args.narrow)
            finally:
                free.put(checkout)

        counts: dict[str, int] = {}
        for mutation, said in zip(found, pool.map(judge, found), strict=True):
            counts[said] = counts.get(said, 0) + 1
            sys.stdout.write(f"{said}: {mutation}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{counts}\n")


def _under(file: Path, wanted: list[str]) -> bool:
    name = str(file.relative_to(ROOT))
    return any(name.startswith(part.rstrip("/")) for part in wanted)


if __name__ == "__main__":
    main()

"""tools/check_parallel.py on small networks, each with a fault that is known from elsewhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launching import ROOT, run
from tools.check_parallel import main

TOYS = "tests.distributed.parallel_toys"
DATA, CONTEXT = "fsdp2+dp2", "ddp+cp2"
HALF = "gradients that are 0.5 times those of one process: 19 of 21"
# What is said of a toy on data ranks, and on context ranks.
FAULTS: dict[str, tuple[list[str], list[str]]] = {
    "sound": ([], []),
    "local_counts": (
        ["loss of step 1", "gradients that differ", "weights that differ"],
        ["loss of step 1", "gradients that differ", "weights that differ"],
    ),
    "mean_of_means": ([], ["loss of step 1", "gradients that differ", "weights that differ"]),
    "unsummed": ([], ["loss of step 2", "gradients that differ", "weights that differ"]),
    "overwritten": (["loss of step 1", HALF], ["loss of step 1", HALF]),
    "wrong_group": ([], ["loss of step 1", "gradients that differ", "weights that differ"]),
    "drifting": (
        [],
        [
            *("loss of step 2", "gradients that differ: 1 of 21, most head.bias"),
            *("weights that differ", "weights whose copies differ between ranks: 1 of 21"),
        ],
    ),
    "averaged": ([HALF], [HALF]),
}
REFUSED = {
    f"{TOYS}:odd_batch": "batch 1 has a tensor of (3, 6, 4), and 2 data ranks cannot divide",
    f"{TOYS}:no_pair": "forward_loss returns Tensor, not a sum and a count",
    f"{TOYS}:other_builds": f"build gives embed.weight other values on rank 1 of {DATA}",
    "tests.nowhere": "tests.nowhere cannot be imported: ModuleNotFoundError",
}


MODULE, FILE = ("-m", "tools.check_parallel"), (str(ROOT / "tools/check_parallel.py"),)


def check(
    *names: str, layouts: tuple[str, ...], program: tuple[str, ...] = MODULE
) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, *program, *names, "--layouts", *layouts])


def faults_of(output: str) -> dict[str, dict[str, list[str]]]:
    """What is wrong, by network and layout; of those that are not checked, why not."""
    found: dict[str, dict[str, list[str]]] = {}
    layouts, faults = {}, []
    for line in output.splitlines():
        head, _, rest = line.strip().partition(": ")
        if not line.startswith(" "):
            layouts = found.setdefault(line, {})
        elif head == "WRONG":
            faults.append(rest)
        else:
            faults = layouts.setdefault(head, [rest] if head == "not checked" else [])
    return found


@pytest.mark.slow
def test_each_planted_fault_is_found_and_nothing_else() -> None:
    names = [*(f"{TOYS}:{name}" for name in FAULTS), *REFUSED]
    done = check(*names, layouts=(DATA, CONTEXT))
    assert done.returncode == 2, done.stderr
    said = faults_of(done.stdout)
    for name, expected in FAULTS.items():
        for layout, starts in zip((DATA, CONTEXT), expected, strict=True):
            found = said[f"{TOYS}:{name}"][layout]
            assert len(found) == len(starts), (name, layout, found)
            pairs = zip(found, starts, strict=True)
            assert all(line.startswith(start) for line, start in pairs), (name, layout, found)
    for name, start in REFUSED.items():
        (sentence,) = said[name]["not checked"]
        assert sentence.startswith(start)


@pytest.mark.slow
def test_the_exit_code_tells_networks_that_are_right() -> None:
    sound, averaged = (f"{TOYS}:{name}" for name in ("sound", "averaged"))
    assert check(sound, layouts=(CONTEXT,)).returncode == 0
    assert check(averaged, layouts=(CONTEXT,), program=FILE).returncode == 1


def test_a_layout_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["package.module", "--layouts", "tp2"])
    assert (
        "'tp2' is not the name of a layout; give one such as ddp+dp2, fsdp2+dp2"
        in capsys.readouterr().err
    )

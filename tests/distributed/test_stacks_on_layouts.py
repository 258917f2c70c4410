"""Networks of all kinds of layers give the numbers of one process on every layout.

All cases run in one launch: each is a training of `check_layouts.py` with another network in the
place of the DiT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, run

CASES = {
    "joint": ("joint", 4, ("full", "tp2", "tp2+sp", "cp2", "cp2+ag", "pp2", "pp2+vpp2")),
    "double": ("double", 2, ("dp2+overlap", "pp2")),
    "cross": ("cross", 2, ("tp2", "tp4", "tp2+sp+cp2+ag")),
    "norm of a rank's own heads": ("cross", 1, ("tp2",)),
    "norm whose gradient stays on its rank": ("cross", 1, ("tp2",)),
    "norm whose weights Megatron-Core sums": ("cross", 1, ("tp2+sp",)),
    "modulation gradients of a rank's own tokens": ("joint", 2, ("tp2+sp",)),
}
"""(network, layers, layouts) by name; the last four break the code."""

SCRIPT = """
import json, sys
from importlib import import_module
from pathlib import Path
from torch.distributed.distributed_c10d import PrefixStore
from dataclasses import replace
import dit.models.family
from dit.models.layers import packed_attention, parallel_linear
from dit.models.layers import queries_and_keys as qk
from dit.layout_check import program
from recipes import check_layouts
from tests.toy_networks import NETWORKS

# `import torch.distributed.rendezvous` finds the function of that name.
meeting = import_module("torch.distributed.rendezvous")

family = dit.models.family.default_family()
backward, summed, norm = qk._SumOverRanks.backward, qk._summed, qk.AcrossHeadsNorm

def norm_of_own_heads():
    qk._summed = lambda x, group: x * group.size()

def norm_without_way_back():
    qk._SumOverRanks.backward = staticmethod(lambda ctx, gradient: (gradient, None))

def norm_weights_summed():
    # What the names q_layernorm and k_layernorm would do, of a weight that is split by heads.
    class Summed(norm):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.query_scale.sequence_parallel = True
    packed_attention.AcrossHeadsNorm = Summed

def modulation_of_own_tokens():
    plain = parallel_linear.gather_from_tensor_model_parallel_region
    parallel_linear.all_gather_last_dim_from_tensor_parallel_region = plain

FAULTS = {
    "norm of a rank's own heads": norm_of_own_heads,
    "norm whose gradient stays on its rank": norm_without_way_back,
    "norm whose weights Megatron-Core sums": norm_weights_summed,
    "modulation gradients of a rank's own tokens": modulation_of_own_tokens,
}

def main(folder, cases):
    program.STEPS = 2
    store, *_ = next(iter(meeting.rendezvous("env://")))
    for number, (name, (network, layers, layouts)) in enumerate(cases.items()):
        meeting.rendezvous = lambda _, n=number: iter([(PrefixStore(str(n), store), 0, 1)])
        other = replace(family, network=lambda network=network: NETWORKS[network])
        dit.models.family._loaded = lambda *_: other
        qk._summed, qk._SumOverRanks.backward = summed, staticmethod(backward)
        packed_attention.AcrossHeadsNorm = norm
        FAULTS.get(name, lambda: None)()
        output = Path(folder, f"{number}.json")
        arguments = ["--layouts", *layouts, "--output", str(output), "objective.name=flow"]
        check_layouts.main([*arguments, f"model.num_layers={layers}", "objective.text_dropout=0"])

if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """What each case wrote, without the training of one process."""
    folder = tmp_path_factory.mktemp("stacks")
    script = folder / "stacks.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    line = [sys.executable, *launcher, str(script), str(folder), json.dumps(CASES)]
    # The script imports `tests` and `recipes`, which no environment installs.
    done = run(line, timeout=600, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    written = [json.loads(Path(folder, f"{n}.json").read_text()) for n in range(len(CASES))]
    return {
        name: [c for c in every if c["layout"] != "one"]
        for name, every in zip(CASES, written, strict=True)
    }


def _worst(comparison: dict, kind: str, *, idle: tuple[str, ...] = ()) -> float:
    """Relative norm of the tensor that is furthest off; `idle` ones have none."""
    numbers = comparison["tensors"][kind]
    return max(v for name, v in numbers.items() if not any(part in name for part in idle))


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", ["joint", "cross"])
def test_every_tensor_is_that_of_one_process(found, case):
    assert [c["layout"] for c in found[case]] == list(CASES[case][2])
    for c in found[case]:
        assert max(c["steps"].values()) <= 1e-5, c["layout"]
        assert _worst(c, "gradient") <= 1e-5, c["layout"]
        assert _worst(c, "weight") <= 1e-5, c["layout"]
        assert not c["torn"] and not c["faults"], c["layout"]


@pytest.mark.slow
def test_the_last_text_that_nothing_reads_has_gradients_of_zeros(found):
    """Megatron-Core's DDP waits for none of them; all others are those of one process."""
    idle = tuple(
        f"double_blocks.layers.1.{name}"
        for name in ("text_attention.linear_proj", "text_attention.q_layernorm", "text_mlp")
    )
    assert [c["layout"] for c in found["double"]] == list(CASES["double"][2])
    for c in found["double"]:
        without = {n for n, v in c["tensors"]["gradient"].items() if not v < float("inf")}
        assert len(without) == 7, without
        assert all(any(part in name for part in idle) for name in without)
        assert _worst(c, "gradient", idle=idle) <= 1e-5, c["layout"]
        assert _worst(c, "weight", idle=idle) <= 1e-5, c["layout"]
        assert not c["torn"]


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES)[3:])
def test_broken_code_is_found(found, case):
    (comparison,) = found[case]
    assert _worst(comparison, "gradient") > 1e-3

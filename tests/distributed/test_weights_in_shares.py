"""Weights in shares of data ranks (`ddp.sharding=weights`): numbers, checkpoints, bytes, passes."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.launching import ROOT, run
from tests.proofs import Proof, launch, results

LAYOUTS = {
    2: (
        *("fsdp", "dp2+fsdp+frozen+compiled", "cp2+fsdp", "dp2+fsdp+bf16", "dp2+fsdp+lora+drop"),
        "dp2+fsdp+once+kept",
    ),
    3: ("dp3+fsdp+packs3",),
    4: (
        *("tp2+sp+dp2+fsdp", "dp4+hsdp2+fsdp+packs8", "pp2+dp2+fsdp+once", "tp2+cp2+fsdp+full"),
        "tp2+sp+dp2+fsdp+lora+fp8base",
    ),
}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
THREE, BF16 = {"name": "three"}, {"precision": "bf16"}
ADAPTERS = {"name": "adapters", "lora": "float8_e4m3", "precision": "bf16"}
COPIES = {"packs": 3, "copies": 2}
WORKER = "tests/distributed/shares_worker.py"
PROOFS: dict[str, Proof] = {
    "copies": (4, "to_and_fro", {"name": "copies", "copies": 2}),
    "three ranks": (3, "to_and_fro", THREE),
    "adapters": (3, "to_and_fro", ADAPTERS),
    "bf16": (2, "to_and_fro", {"name": "bf16", "host": True} | BF16),
    "of three ranks on two": (2, "on_other_ranks", THREE),
    "of three data ranks on two tensor ranks": (2, "on_other_ranks", THREE | TENSOR),
    "of adapters on three ranks on two tensor ranks": (2, "on_other_ranks", ADAPTERS | TENSOR),
    "of two copies on two ranks": (2, "on_other_ranks", {"name": "copies"}),
    "bytes": (2, "bytes_of_a_rank", {}),
    "not finite": (2, "not_finite_on_one_rank", {}),
    "held": (2, "held_gradient", {}),
    "passes of three": (3, "passes_of_each_rank", {}),
    "passes of two": (2, "passes_of_each_rank", {}),
    "sound": (2, "beside_the_other", {}),
    "sound tensor ranks": (2, "beside_the_other", TENSOR),
    "sound moments on the host": (2, "beside_the_other", {"host": True}),
    "sound bf16": (2, "beside_the_other", BF16),
    "order of sums": (2, "order_of_sums", {}),
    "once": (2, "once_a_step", {}),
    "passes of kept layers": (2, "passes_of_each_rank", {"reshard_after_forward": False}),
    "divided": (2, "beside_the_other", {"fault": "divided"}),
    "marks": (2, "beside_the_other", {"fault": "marks"} | TENSOR),
    "cast": (2, "beside_the_other", {"fault": "cast"} | BF16),
    "sent": (4, "sent_in_a_step", COPIES),
    "sent once": (4, "sent_in_a_step", COPIES | {"reduce_each_pack": False}),
    "sent kept": (4, "sent_in_a_step", COPIES | {"reshard_after_forward": False}),
    "sent ahead": (4, "sent_in_a_step", COPIES | {"prefetch_layers": 3}),
    "sent ahead again": (4, "sent_in_a_step", COPIES | {"prefetch_layers": 3, "again": 2}),
    "6 layers": (4, "most_at_one_time", {"layers": 6}),
    "12 layers": (4, "most_at_one_time", {"layers": 12}),
}
"""Ranks, function of `shares_worker.py` and its settings, by name."""

CHECK = """
import sys
from functools import partial
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from dit.layout_check import program
from dit.models.layers import packed_attention, per_sample
from recipes import check_layouts

if __name__ == "__main__":
    # As torch.compile traces them; tests/unit/models/test_compiled.py has what g++ makes of them.
    traced = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward))
    compiled = partial(per_sample.compiled, backend=traced)
    per_sample.compiled = packed_attention.compiled = compiled
    program.STEPS = 2  # `to_and_fro` makes six
    sys.exit(check_layouts.main(sys.argv[1:]))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_tensor_is_that_of_one_process(tmp_path, ranks):
    numbers, script = tmp_path / "numbers.json", tmp_path / "check.py"
    script.write_text(CHECK)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    flags = ["--output", str(numbers), "--layouts", *LAYOUTS[ranks]]
    small = ("objective.name=edm", "model.num_layers=2", "validation.quantiles=1")
    words = [sys.executable, *launcher, str(script), *flags, *small]
    done = run(words, timeout=800, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr  # bf16 in its bounds
    found = [one for one in json.loads(numbers.read_text()) if "fsdp" in one["layout"]]
    assert [one["layout"] for one in found] == [*LAYOUTS[ranks]]
    for one in found:
        assert not one["faults"], one["layout"]


@pytest.fixture(scope="module")
def found(once) -> dict[str, Any]:
    """What each proof has found."""
    return results(once("shares", lambda folder: launch(folder, WORKER, PROOFS)), PROOFS)


def test_interpreted_kernels_take_gathered_weights(tmp_path):
    """In ranks that start as users start them: Triton chooses its interpreter as it is imported."""
    proofs = {"kernels": (2, "beside_the_other", {"fused_kernels": True, "num_layers": 1})}
    launch(tmp_path, WORKER, proofs, TRITON_INTERPRET="1", PYTHON_EXEC=sys.executable)
    assert results(tmp_path, proofs)["kernels"]["furthest"] <= 1e-5


@pytest.mark.parametrize("case", ["three ranks", "bf16", "copies", "adapters"])
def test_a_checkpoint_goes_on_and_to_and_fro_bit_for_bit(found, case):
    proof = found[case]
    assert proof["goes_on"]
    assert proof["goes_on_after"]
    assert not proof["different"]
    if case == "three ranks":
        assert proof["uneven"] == 8  # weights whose rows do not divide
    if case != "bf16":  # see test_steps_are_those_of_a_sharded_optimizer
        assert proof["furthest"] <= 1e-5  # the other kind's next steps


@pytest.mark.parametrize("case", [name for name in PROOFS if name.startswith("of ")])
def test_a_checkpoint_is_the_same_on_other_ranks(found, case):
    assert not found[case]["different"]


def test_a_rank_has_its_rows_and_no_more(found):
    """Frozen weights included, which their products look up in each pass."""
    proof = found["bytes"]
    assert sum(proof["ranks"]) == proof["whole"]
    assert max(proof["ranks"]) <= 1.05 * proof["whole"] / 2
    assert proof["rows"]
    assert proof["module"]
    assert proof["gradients"]
    assert all(proof["moments"])
    assert proof["frozen"] == ["DTensor"]  # rows, between passes
    assert proof["planned"] == proof["held"]


def test_what_is_not_finite_on_one_rank_is_skipped_by_all(found):
    assert found["not finite"]["skipped"] == [True, True]
    assert all(0 < number < 1e3 for number in found["not finite"]["next"])


def test_a_hook_of_a_gradient_holds_for_rows(found):
    """That of a bias of keys, which softmax does not see, and which noise would move otherwise."""
    assert found["held"] == [True, False]


@pytest.mark.parametrize("case", ["passes of two", "passes of three", "passes of kept layers"])
def test_ranks_make_as_many_passes_as_they_want(found, case):
    proof = found[case]
    assert [len(losses) for losses in proof["shares"]] in ([0, 3], [0, 1, 3])
    assert proof["shares"] == proof["plain"]
    assert proof["shares then"] == pytest.approx(proof["plain then"], rel=1e-5)


def test_steps_are_those_of_a_sharded_optimizer(found):
    for case in ("sound", "sound tensor ranks", "sound moments on the host"):
        assert found[case]["furthest"] <= 1e-5, case
    assert found["sound bf16"]["loss"] <= 1e-6


def test_in_bf16_the_order_of_one_sum_is_another(found):
    """Nothing but the gradient of the noise levels, which all parts of all layers add to."""
    proof = found["order of sums"]
    assert proof["plain"] == [f"level.{name}.weight" for name in ("linear_1", "linear_2", "norm")]
    assert proof["layer"] == []


@pytest.mark.parametrize("case", [name for name in PROOFS if name.startswith("sent")])
def test_ranks_send_what_the_planner_says(found, case):
    """In a step of three packs; what is before and after the layers stays gathered in a pass."""
    proof = found[case]
    again = 0 if case == "sent kept" else proof["again"]
    assert proof["sent"]["_allgather_base_ 2"] == proof["gathers"] - again
    assert proof["sent"]["_reduce_scatter_base_ 2"] == proof["gradients"]
    assert proof["sent"]["allreduce_ 2"] == proof["copies"]


def test_gradients_summed_once_are_those_of_each_pack(found):
    """In bf16, also where the first pack does not use a weight of a layer."""
    assert found["once"]["once"] == pytest.approx(found["once"]["each"], rel=5e-3)


@pytest.mark.parametrize(
    ("fault", "number"), [("divided", "furthest"), ("marks", "furthest"), ("cast", "loss")]
)
def test_broken_code_is_found(found, fault, number):
    """A mean over ranks in place of a sum, no marks on rows, noise levels in bf16."""
    assert found[fault][number] > 2e-5


def test_no_rank_ever_has_the_whole_network(found):
    """At a fresh start, a save, a resume, and in 0, 1 and 3 passes of the weights and the average.

    In numbers. What a rank keeps is its share of weights, average and moments; beside it there are
    two layers and twice the embedders and the head at most, however many layers there are.
    """
    few, many = found["6 layers"], found["12 layers"]
    kept, of_few = many["most"].pop("held"), few["most"].pop("held")
    allowed = 2 * many["layer"] + 2 * many["root"]
    assert kept > 5 * allowed / 2  # else the bound would say little
    assert set(many["most"]) == {"fresh start", "save", "resume", "passes"}
    for name, most in many["most"].items():
        assert most <= kept + allowed, name
        # A bucket of a checkpoint is on its way several times, and not always as often.
        buckets = 8 * many["bucket"] if name in ("save", "resume") else 0
        assert most - few["most"][name] <= 1.01 * (kept - of_few) + buckets, name

"""Adapters beside a base in 8 bits whose rows are shared out (`ddp.sharding=weights`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.families.dit import publish, random_model
from tests.proofs import Proof, launch, results

WORKER = "tests/distributed/base_in_shares_worker.py"
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
BF16 = {"precision": "bf16"}
PROOFS: dict[str, Proof] = {
    "tensor ranks": (4, "beside_the_other", BF16 | TENSOR),
    "few layers": (4, "most_at_one_time", {"layers": 6}),
    "many layers": (4, "most_at_one_time", {"layers": 12}),
    "uneven": (3, "beside_the_other", {"precision": "fp32"}),
    "imported": (3, "beside_the_other", {"imported": True} | BF16),
    "samples of four": (4, "samples", {}),
    "samples of three, adapters": (3, "samples", {"lora": "float8_e4m3"}),
    "read": (3, "read_one_at_a_time", BF16),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _launch(folder: Path) -> None:
    publish(folder / "2.hf", random_model(text_embed_dim=8))
    for layers in (6, 12):
        wide = random_model(num_layers=layers, attention_head_dim=32, text_embed_dim=8)
        publish(folder / f"{layers}.hf", wide.bfloat16())
    launch(folder, WORKER, PROOFS)


@pytest.fixture(scope="module")
def found(once) -> dict[str, Any]:
    """What each proof has found."""
    return results(once("base", _launch), PROOFS)


@pytest.mark.parametrize("case", ["tensor ranks", "uneven", "imported"])
def test_a_base_in_shares_has_the_bits_of_whole_matrices(found, case):
    """Of a row that tensor ranks share, the factor is that of the whole row."""
    proof = found[case]
    assert proof["matrices"] > 20
    assert not any(proof["different"])
    assert proof["loss"] <= 1e-6
    assert proof["norm"] <= 1e-6
    assert sum(proof["bytes"]) == proof["whole"] * (2 if case == "tensor ranks" else 1)
    assert proof["uneven"] > 0 or case != "uneven"


@pytest.mark.parametrize("case", [name for name in PROOFS if name.startswith("samples")])
def test_samples_are_those_of_whole_weights(found, case):
    """Of no, one and three prompts; ranks without any take part in the passes of the others."""
    assert [one["prompts"] for one in found[case][:: 1 + ("lora" in PROOFS[case][2])]] == [0, 1, 3]
    for one in found[case]:
        assert sum(map(len, one["apart"])) == one["prompts"]
        assert all(apart <= 1e-5 for of_rank in one["apart"] for apart in of_rank)


def test_no_rank_reads_a_weight_before_it_has_let_go_of_the_last(found):
    """Of a weight that is several of Diffusers' they are held, and their row."""
    proof = found["read"]
    assert proof["before"] == [0, 0, 0]
    assert max(proof["most"]) <= 2 * proof["largest"]


def test_no_rank_ever_has_the_whole_base(found):
    """In bytes; beside its share a rank has two layers, and twice what lies around them.

    Gloo's threads may hold the weight that was sent last a moment longer, in one run and not in
    the other: up to half a layer.
    """
    few, many = found["few layers"], found["many layers"]
    allowed = 2 * many["layer"] + 2 * many["root"]
    assert 12 * many["layer"] > 2 * allowed  # else the bound would say little
    for name, most in many["most"].items():
        assert most <= many["held"] + allowed, name
        more = 1.01 * (many["held"] - few["held"])
        assert most - few["most"][name] <= more + many["layer"] / 2, name

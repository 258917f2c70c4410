"""Networks of all kinds of layers give the numbers of one process on every layout.

All cases run in one launch: each is a training of `check_layouts.py`, of the toy family, or of a
network with cross-attention in the place of the DiT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dit.models.family import VARIABLE
from tests.launching import ROOT, run
from tests.toy_family import PLACE

TOY = ("model.family=toy", "model.precision=fp32")
DOUBLE = (*TOY, "model.num_single_layers=0")
WEIGHTED = (*TOY, "objective.loss=huber", "objective.huber_c=0.5")
WAN = (
    *("model.family=wan", "model.name=custom", "model.num_layers=2", "model.hidden_size=96"),
    *("model.num_attention_heads=8", "model.mlp_ratio=2.0", "model.in_channels=4"),
    *("model.crossattn_emb_size=16", "model.freq_dim=16", "model.precision=fp32"),
)
FLF2V = (
    *(*WAN, "model.image_condition=first_and_last_frame", "model.image_embed_size=10"),
    *("model.image_embed_length=6", "model.image_embed_positions=true", "model.text_pad_to=null"),
)
TI2V = (*WAN, "model.image_condition=clean_first_frame", "model.text_pad_to=24")
JOINT_LAYOUTS = (
    *("full", "tp2", "tp2+sp", "cp2", "cp2+ag", "pp2", "pp2+vpp2", "tp2+cp2+pp2", "dp2+overlap"),
)
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "joint": (TOY, JOINT_LAYOUTS),
    "given frames drawn": ((*TOY, "objective.given_frames=[1, 2, 1]"), ("cp2", "tp2+sp", "pp2")),
    "weighted": (WEIGHTED, ("cp2", "tp2+sp", "tp2+cp2+pp2", "dp2+overlap")),
    "double": (DOUBLE, ("dp2+overlap", "pp2", "tp2+sp")),
    "cross": (("model.num_layers=2",), ("tp2", "tp4", "tp2+sp+cp2+ag")),
    "wan, first and last frame": (FLF2V, ("tp2", "dp2+overlap", "tp2+sp+cp2+pp2")),
    "wan, clean first frame": (TI2V, ("tp2+sp+cp2+pp2",)),
    "joint, as a GPU attends": (TOY, ("tp2+sp", "cp2", "cp2+ag", "pp2")),
    "cross, as a GPU attends": (("model.num_layers=2",), ("cp2", "tp2+sp+cp2+ag")),
    "norm of a rank's own heads": (("model.num_layers=1",), ("tp2",)),
    "norm whose gradient stays on its rank": (("model.num_layers=1",), ("tp2",)),
    "norm whose weights Megatron-Core sums": (("model.num_layers=1",), ("tp2+sp",)),
    "modulation gradients of a rank's own tokens": (TOY, ("tp2+sp",)),
    "text whose gradient counts each tensor rank": (FLF2V, ("tp2+sp",)),
    "clean tokens that have a loss": (TOY, ("cp2",)),
    "weights of other tokens": (WEIGHTED, ("cp2",)),
    "clean tokens that are told their sample's level": (TOY, ("cp2",)),
}
"""(settings, layouts) by name."""
SOUND = (
    *("joint", "given frames drawn", "weighted", "double", "cross"),
    *("wan, first and last frame", "wan, clean first frame"),
    *("joint, as a GPU attends", "cross, as a GPU attends"),
)
"""The others break the code."""

SCRIPT = """
import json, sys, zlib
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest.mock import patch
import torch
from safetensors.torch import load, save
from torch.distributed.distributed_c10d import PrefixStore
import dit.models.family
from dit.data import mock
from dit.distributed import model_parallel
from dit.models.layers import packed_attention, parallel_linear
from dit.models.layers import queries_and_keys as qk
from dit.models.wan import conditions
from dit.layout_check import program
from recipes import check_layouts
from tests.plain_kernel import attend_as_a_gpu
from tests.toy_networks import ToyCross

# `import torch.distributed.rendezvous` finds the function of that name.
meeting = import_module("torch.distributed.rendezvous")

class NormWithSummedWeights(qk.AcrossHeadsNorm):
    # What the names q_layernorm and k_layernorm would do, of a weight that is split by heads.
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.query_scale.sequence_parallel = True

embedding = conditions.TextEmbedding.__init__

def marked(self, model):
    embedding(self, model)
    for parameter in self.parameters():
        parameter.sequence_parallel = model.sequence_parallel

split_tokens = model_parallel.split_tokens

def split_wrongly(field, of):
    # Where tokens are shared out, so must be what is said of them.
    def split(batch, problem, *, share, multiple):
        mine, part = split_tokens(batch, problem, share=share, multiple=multiple)
        return (replace(mine, **{field: getattr(mine, of)}) if share.count > 1 else mine), part
    return patch.object(model_parallel, "split_tokens", split)

def weighted_record(config, *, seed, index):
    # Half of the samples have a mask, and half of both kinds a weight.
    parts = record_of(config, seed=seed, index=index)
    tensors, about = load(parts["safetensors"]), json.loads(parts["json"])
    if index % 2:
        size = (1, *tensors["latent"].shape[1:])
        tensors["loss_mask"] = torch.rand(size, generator=torch.Generator().manual_seed(index))
    if index % 4 > 1:
        about["loss_weight"] = index % 7 / 2
    payload = save(tensors)
    about["crc32"] = {"safetensors": f"{zlib.crc32(payload):08x}"}
    return {"safetensors": payload, "json": json.dumps(about).encode()}

def weights_of_other_tokens(batch, problem, *, share, multiple):
    mine, part = split_tokens(batch, problem, share=share, multiple=multiple)
    if share.count > 1 and mine.weight_T is not None:
        mine = replace(mine, weight_T=mine.weight_T.flip(0))
    return mine, part

record_of = mock.mock_record
weighted = patch.object(mock, "mock_record", weighted_record)
gather = "all_gather_last_dim_from_tensor_parallel_region"
of_own = parallel_linear.gather_from_tensor_model_parallel_region
one_way = staticmethod(lambda ctx, gradient: (gradient, None))
as_a_gpu = patch.object(packed_attention, "attention_for", lambda *of: attend_as_a_gpu)
PATCHES = {
    "weighted": weighted,
    "weights of other tokens": (
        patch.object(model_parallel, "split_tokens", weights_of_other_tokens), weighted
    ),
    "joint, as a GPU attends": as_a_gpu,
    "cross, as a GPU attends": as_a_gpu,
    "norm of a rank's own heads": patch.object(qk, "_summed", lambda x, group: x * group.size()),
    "norm whose gradient stays on its rank": patch.object(qk._SumOverRanks, "backward", one_way),
    "norm whose weights Megatron-Core sums": patch.object(
        packed_attention, "AcrossHeadsNorm", NormWithSummedWeights
    ),
    "modulation gradients of a rank's own tokens": patch.object(parallel_linear, gather, of_own),
    "text whose gradient counts each tensor rank": patch.object(
        conditions.TextEmbedding, "__init__", marked
    ),
    "clean tokens that have a loss": split_wrongly("is_target_T", "is_real_T"),
    "clean tokens that are told their sample's level": split_wrongly("level_row_T", "segment_T"),
}

def main(folder, cases):
    program.STEPS = 2
    store, *_ = next(iter(meeting.rendezvous("env://")))
    loaded = dit.models.family._loaded
    cross = replace(dit.models.family.default_family(), network=lambda: ToyCross)
    dit.models.family._loaded = lambda *of: cross if of[0] == "dit" else loaded(*of)
    for number, (name, (settings, layouts)) in enumerate(cases.items()):
        meeting.rendezvous = lambda _, n=number: iter([(PrefixStore(str(n), store), 0, 1)])
        arguments = ["--layouts", *layouts, "--output", str(Path(folder, f"{number}.json"))]
        with ExitStack() as patches:
            broken = PATCHES.get(name, ())
            for one in broken if isinstance(broken, tuple) else (broken,):
                patches.enter_context(one)
            check_layouts.main([*arguments, "objective.name=flow", *settings])

if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """What each case wrote, without the training of one process."""
    folder = tmp_path_factory.mktemp("stacks")
    script = folder / "stacks.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    line = [sys.executable, *launcher, str(script), str(folder), json.dumps(CASES)]
    # The script imports `tests` and `recipes`, which no environment installs.
    done = run(line, timeout=900, env={"PYTHONPATH": str(ROOT), VARIABLE: PLACE})
    assert done.returncode == 0, done.stdout + done.stderr
    written = [json.loads(Path(folder, f"{n}.json").read_text()) for n in range(len(CASES))]
    return {
        name: [c for c in every if c["layout"] != "one"]
        for name, every in zip(CASES, written, strict=True)
    }


def _worst(comparison: dict, kind: str) -> float:
    """Relative norm of the tensor that is furthest off."""
    return max(comparison["tensors"][kind].values())


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("case", SOUND)
def test_every_tensor_is_that_of_one_process(found, case):
    assert [c["layout"] for c in found[case]] == list(CASES[case][1])
    for c in found[case]:
        assert max(c["steps"].values()) <= 1e-5, c["layout"]
        assert _worst(c, "gradient") <= 1e-5, c["layout"]
        assert _worst(c, "weight") <= 1e-5, c["layout"]
        assert not c["torn"] and not c["faults"], c["layout"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in SOUND])
def test_broken_code_is_found(found, case):
    (comparison,) = found[case]
    # Samples with clean tokens come in a later step than the first, whose gradients are compared.
    assert max(_worst(comparison, "gradient"), *comparison["steps"].values()) > 1e-3
    assert comparison["faults"]

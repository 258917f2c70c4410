"""Networks of all kinds of layers give the numbers of one process on every layout.

All cases run in one launch: each is a training of `check_layouts.py`, of tiny networks of any kind,
or of a network with cross-attention in the place of the DiT (`cross`). Of each kind of stack one
network is trained on many layouts, and one of each other family, or more, on tensor, context and
pipeline ranks together (`check_layouts.py --family all` has all of them).
Of layouts that contain each other the larger is taken: `tests/distributed/test_layouts.py` has the
smaller ones of the DiT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dit.models.registry import FAMILIES, VARIABLE, family_named
from tests.launching import ROOT, own_words, run
from tests.toy_family import PLACE
from tests.toy_sound_family import PLACE as PLACE_OF_SOUND

WHOLE = "wan2.1_i2v_14b"  # with image rows beside the text
JOINT = "flux1_kontext"  # with guidance, and reference tokens behind those of the target
REFINED = "lumina2"  # with a sequential layer
CHOSEN = (WHOLE, JOINT, REFINED)
# Another network of the family, or a case here, has all that these have.
CONTAINED = {
    *("cosmos_7b", "cosmos_predict2_2b", "cosmos_predict2_2b_video2world", "wan2.1_t2v_1.3b"),
    *("wan2.1_flf2v_14b", "wan2.2_i2v_a14b", "flux1_schnell", "qwen_image", "sd3"),
    *("hunyuanvideo_i2v_33ch", "ltxv_2b_0.9", "flux2_klein_4b", "flux3_klein"),
    "qwen_image21",
    *("ltx2.0", "ltx2.3", "ltx2.5"),
}
OTHERS = [
    network
    for name in FAMILIES
    for network in family_named(name).tiny
    if network not in CONTAINED.union(CHOSEN)
]
# Of two pipeline stages the first has layers of both kinds, of four the first has the first kind.
FLUX = ("--family", JOINT, "model.num_layers=2", "model.num_single_layers=3")
SHORT = ("model.num_layers=2",)
GIVEN_STREAMS = (
    *("objective.video_given=0.3", "objective.sound_given=0.2", "objective.sound_prefix=0.3"),
)
# One of each kind of stacks; the others of `--family all` are trained in shares by hand.
IN_SHARES = ("wan2.2_ti2v_5b", JOINT, "hunyuanvideo_i2v", "chroma", "ltxv_2b", REFINED)
TOY, CROSS = ("--family", "toy"), ("objective.name=flow",)
EDM = ("objective.name=edm", "model.num_layers=2")
WEIGHTED = (*TOY, "objective.loss=huber", "objective.huber_c=0.5")
FLF2V = ("--family", "wan2.1_flf2v_14b", "model.num_layers=2")
EXTRAS = (
    *("model.extra_pos_embed=learnable", "model.max_size=[8,16,16]", "objective.name=flow"),
    *("objective.loss_mean=sample", "model.text_pad_to=16", "model.concat_padding_mask=true"),
    *("model.crossattn_proj_size=40", "model.condition_mask=true"),
)
# Of 12, 6 and 3 cubes of tokens, most of them partial, and of one.
CUBES = (
    *("--family", "wan2.1_t2v_1.3b", *SHORT, "model.sparse_attention=true"),
    *("model.sparse_share=0.4", "dataset.task_encoder_seq_length=288"),
    "dataset.mock_samples=[{frames: 5, height: 12, width: 18, text_length: 5, weight: 1.0},"
    " {height: 20, width: 14, text_length: 9, weight: 1.0},"
    " {frames: 2, height: 8, width: 20, text_length: 3, weight: 1.0},"
    " {height: 2, width: 4, text_length: 3, weight: 1.0}]",
)
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "joint, many layouts": (
        FLUX,
        (
            *("full", "tp4", "cp4+ag", "pp2+vpp2", "pp4", "dp2+overlap"),
            "tp2+sp+cp2+pp2",
        ),
    ),
    "image rows": (("--family", WHOLE), ("full", "cp4+ag", "pp2+vpp2", "tp2+sp+cp2+pp2")),
    "adapters": (
        ("--family", WHOLE),
        (
            *("tp2+sp+lora", "pp2+lastlora", "tp2+cp2+pp2+lora+drop", "dp2+overlap+lora"),
            "cp2+pp2+lora+dpo",
            *("tp2+sp+lora+fp8base+swap", "pp2+lora+fp8base+swap"),
        ),
    ),
    "average velocity": (
        ("objective.name=flow", "model.num_layers=4"),
        ("tp2+pp2+vpp2+opd", "tp2+sp+cp2+opd+lora", "dp2+fsdp+opd", "dp2+overlap+opd+lora"),
    ),
    "distribution matching": (
        ("objective.name=flow", "model.num_layers=4"),
        (
            *("tp2+sp+cp2+pp2+dmd", "tp2+sp+cp2+pp2+dmd+lora"),
            *("dp2+fsdp+dmd", "dp2+fsdp+dmd+lora"),
        ),
    ),
    "frozen groups": (("--family", WHOLE), ("tp2+sp+frozen", "pp2+frozen", "dp2+overlap+frozen")),
    "adapters of joint attention": (
        FLUX,
        ("tp2+sp+frozenlora", "pp2+lastlora", "tp2+cp2+pp2+lora+drop"),
    ),
    "latents, text and sound": (
        ("--family", "toy_sound", *SHORT, *GIVEN_STREAMS),
        ("tp2+sp+cp2+pp2+muon+route", "tp2+cp2+lora"),
    ),
    "frames and sound of a published network": (
        ("--family", "ltx2.3", *SHORT, *GIVEN_STREAMS),
        ("tp2+sp+cp2+pp2+muon+route",),
    ),
    "all other kinds": (("--family", *OTHERS, *SHORT), ("tp2+sp+cp2+pp2",)),
    "refiners and grouped heads, many layouts": (
        ("--family", REFINED, *SHORT),
        (
            *("tp4", "cp4", "cp2+ag", "pp2+vpp2+full", "pp3"),
            *("tp2+sp+cp2+pp2", "tp2+cp2+pp2+lora"),
        ),
    ),
    "weights in shares": (("--family", *IN_SHARES, *SHORT), ("dp2+fsdp",)),
    "weighted, given frames drawn": (
        (*WEIGHTED, "objective.given_frames=[1, 2, 1]"),
        ("tp2+sp+cp2+pp2", "dp2+overlap"),
    ),
    "positions, projected text, means of samples": (
        EXTRAS,
        ("cp2+ag+selective", "tp2+pp2+whole"),
    ),
    # Its border lies in the route, which begins in one kind of layers and ends in the other.
    "token route, joint": (FLUX, ("tp2+sp+route", "cp2+ag+route", "pp4+block+route")),
    "token route and two levels, positions": (
        EXTRAS,
        ("tp2+sp+cp2+levels+route", "pp2+vpp2+full+route"),
    ),
    "cubes": (CUBES, ("tp2+sp+cp2+pp2",)),
    "fewest packs": (("objective.name=edm", "model.num_layers=8"), ("pp4+vpp2+packs4",)),
    "cross": ((*CROSS, "model.num_layers=2"), ("tp4", "tp2+sp+cp2+ag")),
    "first and last frame": (FLF2V, ("tp2+sp+cp2",)),
    "joint, as a GPU attends": (TOY, ("tp2+sp", "cp2", "cp2+ag")),
    "cross, as a GPU attends": ((*CROSS, "model.num_layers=2"), ("cp2", "tp2+sp+cp2+ag")),
    "cross, norm of a rank's own heads": ((*CROSS, "model.num_layers=1"), ("tp2",)),
    "cross, norm whose gradient stays on its rank": ((*CROSS, "model.num_layers=1"), ("tp2",)),
    "cross, norm whose weights Megatron-Core sums": ((*CROSS, "model.num_layers=1"), ("tp2+sp",)),
    "modulation gradients of a rank's own tokens": (TOY, ("tp2+sp",)),
    "text whose gradient counts each tensor rank": (FLF2V, ("tp2+sp",)),
    "clean tokens that have a loss": (TOY, ("cp2",)),
    "weights of other tokens": (WEIGHTED, ("cp2",)),
    "clean tokens that are told their sample's level": (TOY, ("cp2",)),
    "gathered twice": (EDM, ("tp2+sp",)),
    "norms of heads not summed": (EDM, ("tp2",)),
    "heads in another order": (EDM, ("cp2",)),
}
"""(arguments, layouts) by name."""
SOUND = list(CASES)[: list(CASES).index("cross, norm of a rank's own heads")]
"""The others break the code."""
NAMED = {
    "gathered twice": "grad_norm",
    "norms of heads not summed": "_layernorm.weight",
    "heads in another order": "gradient",
}
"""What the verdict says of a fault."""

# Whichever test comes first makes the launch, or waits for another worker that makes it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]

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
import dit.models.dit.model
import dit.models.registry
from dit.batch import TokenWeights
from dit.data import mock
from dit.distributed import model_parallel
from dit.models.layers import packed_attention, parallel_linear
from dit.models.layers import queries_and_keys as qk
from dit.models.layers.context_parallel import Context
from dit.models.stacks import stacked_transformer
from dit.models.wan import model as wan
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

embedding = wan.TextEmbedding.__init__

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
    weights = mine.method(TokenWeights)
    if share.count > 1 and weights is not None:
        mine = mine.with_method(TokenWeights(weight_T=weights.weight_T.flip(0)))
    return mine, part

record_of = mock.mock_record
weighted = patch.object(mock, "mock_record", weighted_record)
gather = "all_gather_last_dim_from_tensor_parallel_region"
of_own = parallel_linear.gather_from_tensor_model_parallel_region
one_way = staticmethod(lambda ctx, gradient: (gradient, None))
as_a_gpu = patch.object(packed_attention, "attention_for", lambda *of: attend_as_a_gpu)
gathered = stacked_transformer.gather_from_sequence_parallel_region

def gather_twice(x, tensor_parallel_output_grad, group):
    return gathered(x, tensor_parallel_output_grad=True, group=group)

transformer_config = dit.models.dit.model.transformer_config

def without_qk_layernorm(model):
    made = transformer_config(model)
    made.qk_layernorm = False
    return made

tokens_of_mine = Context._tokens_of_mine

PATCHES = {
    "gathered twice": patch.object(
        stacked_transformer, "gather_from_sequence_parallel_region", gather_twice
    ),
    "norms of heads not summed": patch.object(
        dit.models.dit.model, "transformer_config", without_qk_layernorm
    ),
    "heads in another order": patch.object(
        Context, "_tokens_of_mine", lambda self, x: tokens_of_mine(self, x).flip(1)
    ),
    "weighted, given frames drawn": weighted,
    "weights of other tokens": (
        patch.object(model_parallel, "split_tokens", weights_of_other_tokens), weighted
    ),
    "joint, as a GPU attends": as_a_gpu,
    "cross, as a GPU attends": as_a_gpu,
    "cross, norm of a rank's own heads": patch.object(
        qk, "_summed", lambda x, group: x * group.size()
    ),
    "cross, norm whose gradient stays on its rank": patch.object(
        qk._SumOverRanks, "backward", one_way
    ),
    "cross, norm whose weights Megatron-Core sums": patch.object(
        packed_attention, "AcrossHeadsNorm", NormWithSummedWeights
    ),
    "modulation gradients of a rank's own tokens": patch.object(parallel_linear, gather, of_own),
    "text whose gradient counts each tensor rank": patch.object(
        wan.TextEmbedding, "__init__", marked
    ),
    "clean tokens that have a loss": split_wrongly("is_target_T", "is_real_T"),
    "clean tokens that are told their sample's level": split_wrongly("level_row_T", "segment_T"),
}

def main(folder, cases):
    program.STEPS = 2
    store, *_ = next(iter(meeting.rendezvous("env://")))
    loaded = dit.models.registry._loaded
    cross = replace(dit.models.registry.default_family(), network=lambda: ToyCross)
    in_its_place = patch.object(
        dit.models.registry, "_loaded", lambda *of: cross if of[0] == "dit" else loaded(*of)
    )
    for number, (name, (settings, layouts)) in enumerate(cases.items()):
        meeting.rendezvous = lambda _, n=number, **__: iter([(PrefixStore(str(n), store), 0, 1)])
        arguments = ["--layouts", *layouts, "--output", str(Path(folder, f"{number}.json"))]
        # Two packs are enough for what a step sums; tests/distributed/test_layouts.py has four.
        arguments += ["validation.quantiles=1", "train.global_batch_size=2"]
        with ExitStack() as patches:
            broken = PATCHES.get(name, ())
            for one in broken if isinstance(broken, tuple) else (broken,):
                patches.enter_context(one)
            if name.startswith("cross"):
                patches.enter_context(in_its_place)
            check_layouts.main([*arguments, *settings])

if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def found(once) -> dict[str, list[dict]]:
    """What each case wrote."""
    folder = once("stacks", _launch)
    written = [json.loads(Path(folder, f"{n}.json").read_text()) for n in range(len(CASES))]
    return dict(zip(CASES, written, strict=True))


def _launch(folder: Path) -> None:
    script = folder / "stacks.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    line = [sys.executable, *launcher, str(script), str(folder), json.dumps(CASES)]
    # The script imports `tests` and `recipes`, which no environment installs.
    done = run(
        line, timeout=1500, env={"PYTHONPATH": str(ROOT), VARIABLE: f"{PLACE},{PLACE_OF_SOUND}"}
    )
    assert done.returncode == 0, done.stdout + own_words(done.stderr)


def _compared(comparisons: list[dict]) -> list[dict]:
    """Without the trainings of one process that the others are compared with."""
    return [c for c in comparisons if not c["layout"].startswith("one")]


def _worst(comparison: dict, kind: str) -> float:
    """Of the tensor that is furthest off."""
    return max(comparison["tensors"][kind].values())


@pytest.mark.parametrize("case", SOUND)
def test_every_tensor_is_that_of_one_process(found, case):
    comparisons = _compared(found[case])
    networks = dict.fromkeys(c["network"] for c in comparisons)
    tried = [(c["network"], c["layout"]) for c in comparisons]
    assert tried == [(n, layout) for layout in CASES[case][1] for n in networks]
    if case == "all other kinds":
        assert [*networks] == OTHERS
    for c in comparisons:
        assert not c["torn"] and not c["faults"], (c["network"], c["layout"])


def test_what_a_case_trains_is_there(found):
    """Validation, which is forward only, has the fewest packs as well as training."""
    one, few, stages = found["fewest packs"]
    assert [c["layout"] for c in (one, few, stages)] == ["one", "one+packs4", "pp4+vpp2+packs4"]
    assert stages["losses"] == pytest.approx(few["losses"], rel=1e-5)
    wanted = {"positions.pos_emb_t", "text_proj.weight", "text_proj.bias"}
    for c in found["positions, projected text, means of samples"]:
        assert wanted <= c["tensors"]["weight"].keys()
    names = found["joint, many layouts"][0]["tensors"]["weight"].keys()
    assert {"told.guidance.linear_1.weight", "single_blocks.layers.2.linear_in.bias"} <= names
    gradients = found["cubes"][0]["tensors"]["gradient"]
    assert "blocks.layers.1.self_attention.linear_gate.bias" in gradients
    gradients = found["frames and sound of a published network"][0]["tensors"]["gradient"]
    assert {"sound_in.patches.weight", "sound_proj_out.weight"} <= gradients.keys()
    names = found["image rows"][0]["tensors"]["weight"].keys()
    assert "blocks.layers.3.cross_attention.linear_image_kv.weight" in names


@pytest.mark.parametrize("case", [case for case in CASES if case not in SOUND])
def test_broken_code_is_found(found, case):
    (comparison,) = _compared(found[case])
    # Samples with clean tokens come in a later step than the first, whose gradients are compared.
    assert max(_worst(comparison, "gradient"), *comparison["steps"].values()) > 1e-3
    assert NAMED.get(case, "") in "; ".join(comparison["faults"])
    assert comparison["faults"]

"""Which kernels of attention fit, which of them work, and what is timed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention as nn_attention

from dit.config import AttentionBackend, ContextComm, Precision
from dit.models.attention import choice, fit
from dit.models.attention.choice import attention_calls, fault, first_working, milliseconds
from dit.models.attention.fit import AttentionCase, fitting, refusal
from dit.models.attention.kernels import ATTEND, attend_by_runs, attend_packed
from dit.models.layers import packed_attention
from dit.train.model_and_optimizer import randomise
from tests.learning import tiny_run
from tests.plain_kernel import plain_kernel
from tests.toy_family import PLACE
from tests.toy_networks import NETWORKS, level_rows, toy_model, toy_pack

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FLASH_4, FLASH_3, ENGINE, CUDNN, FLASH_2, SDPA = (
    AttentionBackend.FLASH_4,
    AttentionBackend.FLASH_3,
    AttentionBackend.TRANSFORMER_ENGINE,
    AttentionBackend.CUDNN,
    AttentionBackend.FLASH_2,
    AttentionBackend.SDPA,
)
HOPPER = AttentionCase(capability=(9, 0), head_width=128, half=True)


@pytest.fixture
def installed(monkeypatch):
    """The packages that are here: all of them."""
    versions = {fit.FLASH_4: "4.0.0b36", fit.CUDNN_FRONTEND: "1.28.0"}
    found = {"flash_attn_interface", "transformer_engine"}

    def version(name):
        if name not in versions:
            raise fit.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(fit, "find_spec", lambda name: name in found)
    monkeypatch.setattr(fit, "version", version)
    for cached in (fit._missing, fault, first_working):
        cached.cache_clear()
    yield SimpleNamespace(versions=versions, found=found)
    for cached in (fit._missing, fault, first_working):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [FLASH_4, FLASH_3, ENGINE, CUDNN, FLASH_2, SDPA]),
        ({"head_width": 72}, [FLASH_4, FLASH_3, ENGINE, CUDNN, FLASH_2, SDPA]),
        ({"head_width": 36}, [ENGINE, SDPA]),
        ({"head_width": 256}, [FLASH_4, FLASH_3, ENGINE, CUDNN, FLASH_2, SDPA]),
        ({"deterministic": True}, [FLASH_2, SDPA]),
        ({"capability": (10, 0)}, [FLASH_4, ENGINE, CUDNN, FLASH_2, SDPA]),
        ({"capability": (10, 0), "head_width": 192}, [ENGINE, FLASH_2, SDPA]),
        ({"capability": (12, 0)}, [FLASH_4, ENGINE, FLASH_2, SDPA]),
        ({"capability": (8, 0)}, [ENGINE, FLASH_2, SDPA]),
        ({"capability": (8, 0), "deterministic": True}, [FLASH_2, SDPA]),
        ({"capability": (7, 5)}, [ENGINE, SDPA]),
        ({"half": False}, [SDPA]),
        ({"capability": None}, [SDPA]),
    ],
)
def test_kernels_that_fit(installed, changes, expected):
    assert fitting(replace(HOPPER, **changes)) == expected


@pytest.mark.parametrize(
    ("backend", "changes", "reason"),
    [
        (FLASH_4, {"capability": (8, 0)}, "compute capability 9.0 (Hopper) or later, .* 8.0"),
        (FLASH_4, {"head_width": 264}, "at most 256, but .* is 264"),
        (FLASH_4, {"capability": None}, "needs an NVIDIA GPU"),
        (FLASH_3, {"capability": (10, 0)}, "9.0 (Hopper) alone, and this GPU has 10.0"),
        (FLASH_3, {"head_width": 256, "deterministic": True}, "at most 248"),
        (ENGINE, {"deterministic": True}, "memory that grows with the square"),
        (CUDNN, {"deterministic": True}, "not deterministic"),
        (CUDNN, {"capability": (12, 0)}, "9 (Hopper) or 10 (Blackwell), and this GPU has 12.0"),
        (CUDNN, {"capability": (10, 0), "head_width": 256}, "at most 128, but .* is 256"),
        (CUDNN, {"head_width": 36}, "at most 256, but .* is 36"),
        (FLASH_2, {"half": False}, "computes only in bfloat16"),
    ],
)
def test_the_reason_of_a_refusal(installed, backend, changes, reason):
    pattern = reason.replace("(", r"\(").replace(")", r"\)")
    assert re.search(pattern, refusal(backend, replace(HOPPER, **changes)))


def test_packages_that_are_missing_or_too_old(installed):
    installed.found.clear()
    assert "extra `te`" in refusal(ENGINE, HOPPER)
    assert "flash_attn_interface" in refusal(FLASH_3, HOPPER)
    for backend, package, extra, old in (
        (FLASH_4, fit.FLASH_4, "attention", "4.0.0b8"),
        (CUDNN, fit.CUDNN_FRONTEND, "cudnn", "1.18.0"),
    ):
        for here, said in ({package: old}, f"{package} {old} is older"), ({}, "not installed"):
            installed.versions.clear()
            installed.versions.update(here)
            fit._missing.cache_clear()
            assert said in refusal(backend, HOPPER)
            assert f"the extra `{extra}`" in refusal(backend, HOPPER)
    assert fitting(HOPPER) == [FLASH_2, SDPA]


def _broken(error):
    def attend(*of):
        raise error

    return attend


@pytest.mark.parametrize(
    "error",
    [
        ImportError("undefined symbol: _ZN3c10"),
        OSError("no libcudart.so.12"),
        AttributeError("fwd"),
    ],
)
def test_what_a_broken_package_raises_is_its_fault(installed, monkeypatch, error):
    monkeypatch.setitem(ATTEND, FLASH_4, _broken(error))
    assert fault(FLASH_4, 64, CPU) == f"{type(error).__name__}: {error}"


def test_flash_attention_3_of_another_torch_is_its_fault(installed):
    def register():
        raise ImportError("undefined symbol: _ZN3c10")

    nn_attention.register_flash_attention_impl("FA3", register_fn=register)
    assert fault(FLASH_3, 64, CPU) == "ImportError: undefined symbol: _ZN3c10"
    assert nn_attention.current_flash_attention_impl() is None


def test_a_process_by_itself_goes_on_without_what_does_not_work(installed, monkeypatch):
    """FlashAttention 3 that does not import is one notice."""
    broken = {FLASH_4: "", FLASH_3: "ImportError: undefined symbol", ENGINE: "OSError: no file"}
    installed.versions.clear()
    monkeypatch.setattr(choice, "fault", lambda backend, *of: broken.get(backend, ""))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    with pytest.warns(UserWarning) as said:
        found = [first_working(CUDA, torch.bfloat16, 64, deterministic=False) for _ in range(3)]
    assert found == [FLASH_2] * 3
    assert [str(one.message).partition(". ")[0] for one in said] == [
        f"attention is computed without {backend}, because a trial of it failed on this machine:"
        f" {broken[backend]}"
        for backend in (FLASH_3, ENGINE)
    ]


@pytest.mark.parametrize("backend", list(AttentionBackend))
def test_tensors_without_values_need_no_package(backend):
    for dtype, expected in ((torch.bfloat16, FLASH_2), (torch.float32, SDPA)):
        q = torch.empty(3, 2, 64, dtype=dtype, device="meta")
        assert choice.attention_for(backend, q) is ATTEND[expected]


GRIDS, TEXTS = [(1, 4, 6), (3, 2, 5), (1, 1, 1), (2, 4, 3)], [9, 0, 4, 30]


@pytest.mark.parametrize("name", list(NETWORKS))
def test_the_calls_that_are_timed_are_those_of_the_network(groups, monkeypatch, name):
    seen = Counter()

    def attention_for(backend, q_THK):
        def attend(q, k, v, spans):
            seen[_lengths(spans), q.shape[1], q.shape[2]] += 1
            return attend_by_runs(q, k, v, spans)

        return attend

    monkeypatch.setattr(packed_attention, "attention_for", attention_for)
    monkeypatch.setenv("DIT_FAMILIES", PLACE)
    model = toy_model(name)
    network, batch = NETWORKS[name](model, groups), toy_pack(model, GRIDS, TEXTS)
    randomise(network, seed=7)
    levels = torch.tensor([0.1, -0.2, 0.4, 0.3])
    network(batch.latent_TC, level_rows(levels, batch), batch)
    tokens = [length for _, length in batch.shared_spans]  # with those of references
    texts = [length + (getattr(model, "image_rows", None) or 0) for length in TEXTS]
    calls = attention_calls(model, list(zip(tokens, texts, strict=True)), device=CPU)
    assert Counter({(_lengths(c.spans), c.heads, c.width): c.layers for c in calls}) == seen


def _lengths(spans):
    return tuple(zip(spans.lengths, spans.key_lengths, strict=True))


@pytest.mark.parametrize(
    ("layout", "inside", "across"),
    [
        ({}, (4, (24, 24)), (4, (24, 9))),
        ({"tensor_model_parallel_size": 2}, (2, (24, 24)), (2, (24, 9))),
        ({"context_parallel_size": 2}, (2, (24, 24)), (4, (12, 9))),
        (
            {"context_parallel_size": 2, "cp_comm_type": ContextComm.ALL_GATHER},
            (4, (12, 24)),
            (4, (12, 9)),
        ),
        ({"context_parallel_size": 2, "cp_comm_type": ContextComm.P2P}, None, (4, (12, 9))),
    ],
)
def test_a_rank_has_its_part_of_heads_or_of_queries(layout, inside, across):
    model = tiny_run(num_attention_heads=4, num_layers=3, **layout).model
    calls = attention_calls(model, [(24, 9)], device=CPU)
    expected = [one for one in (inside, across) if one is not None]
    assert [(c.heads, *_lengths(c.spans)) for c in calls] == expected
    assert {c.layers for c in calls} == {3}


def test_without_texts_nothing_is_timed_for_them():
    assert len(attention_calls(tiny_run().model, [(24, 0)], device=CPU)) == 1


def test_both_passes_of_all_layers_are_timed(monkeypatch):
    """With a clock that a pass moves on by a second: 3 layers of 2 calls."""
    now, passes = [0.0], []

    def attend(q, k, v, spans):
        now[0] += 1
        passes.append(q.shape)
        assert q.dtype is torch.bfloat16 and not v.is_contiguous()
        return attend_packed(q, k, v, spans, kernel=plain_kernel)

    monkeypatch.setitem(ATTEND, FLASH_2, attend)
    monkeypatch.setattr(choice.time, "perf_counter", lambda: now[0])
    model = tiny_run(num_layers=3, precision=Precision.BF16).model
    calls = attention_calls(model, [(24, 9), (8, 3)], device=CPU)
    before = torch.random.get_rng_state()
    assert milliseconds(FLASH_2, calls, budget_s=1.0) == 6000
    assert len(passes) == 6  # a first one, one that is measured, and as many as the budget has
    assert torch.equal(torch.random.get_rng_state(), before)

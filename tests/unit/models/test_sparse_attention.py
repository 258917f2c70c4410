"""Attention among cubes of tokens against dense attention with a mask, and against FastVideo's."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dit.config import (
    ContextComm,
    DatasetConfig,
    MockGeometry,
    ModelConfig,
    ObjectiveConfig,
    Precision,
    Problems,
    Recompute,
)
from dit.config.sparsity import CUBE_TOKENS, WHOLE, SparseSchedule, attended_cubes
from dit.models.attention import cube_attention, cube_kernel
from dit.models.attention import cubes as cubes_module
from dit.models.attention.cube_attention import attend_cubes, chosen_cubes
from dit.models.attention.cube_kernel import attend_in_blocks, block_mask
from dit.models.attention.cubes import Cubes
from dit.models.attention.kernels import attend_by_runs
from dit.models.attention.spans import Spans
from dit.models.compilation import missing_for_compilation
from dit.models.wan.model import WanNetwork
from dit.sizing.flops import attention_flops, forward_flops
from dit.sizing.memory import memory
from dit.train.model_and_optimizer import initialise_weights, randomise
from tests.families.wan import wan_model
from tests.float64 import IN_FLOAT64, in_float64
from tests.launching import ROOT, run
from tests.packs import random_pack, run_config, single

CPU = torch.device("cpu")
GRIDS = [(4, 8, 8), (1, 3, 2), (5, 6, 9), (2, 9, 4)]
PADDING = 3
FASTVIDEO = ROOT / "tests/golden/fastvideo_vsa.safetensors"
"""Inputs, outputs and gradients of its plain torch functions, joined as in its ops.py, at commit
2f3d4074; of each case a grid and a sparsity."""
CASES = {"whole": ((4, 8, 8), 0.5), "partial": ((5, 6, 9), 0.7), "image": ((1, 10, 7), 0.4)}


def _spans(grids, share: Fraction) -> Spans:
    sizes = [math.prod(grid) for grid in grids]
    starts = [sum(sizes[:i]) + i * PADDING for i in range(len(grids) + 1)]
    spans = list(zip(starts, sizes, strict=False))
    made = Spans.of(spans, spans, total=starts[-1], device=CPU)
    cubes = Cubes.of(grids, starts, total=starts[-1], share=share, device=CPU)
    return replace(made, cubes=cubes)


def _masked(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, grid, share: float) -> Tensor:
    """One sample [T, H, K], token by token: what each sees is a set of cubes."""
    cube_of = [tuple(i // 4 for i in place) for place in product(*map(range, grid))]
    names = sorted(set(cube_of))
    members = [[t for t, cube in enumerate(cube_of) if cube == name] for name in names]
    scale, out = q.shape[-1] ** -0.5, []
    for head in range(q.shape[1]):
        means = [torch.stack([x[m, head].mean(0) for m in members]) for x in (q, k, v)]
        scores = means[0] @ means[1].T * scale
        coarse = scores.softmax(-1) @ means[2]
        kept = scores.topk(max(1, math.ceil(share * len(names) - 1e-9))).indices.tolist()
        sees = torch.zeros(len(cube_of), len(cube_of), dtype=torch.bool)
        for query, cube in enumerate(cube_of):
            for other in kept[names.index(cube)]:
                sees[query, members[other]] = True
        weights = (q[:, head] @ k[:, head].T * scale).masked_fill(~sees, -math.inf).softmax(-1)
        spread = coarse[[names.index(cube) for cube in cube_of]]
        out.append(weights @ v[:, head] + gate[:, head] * spread)
    return torch.stack(out, dim=1)


def _random(total: int, *, seed: int, heads: int = 2, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(total, heads, width, generator=generator) for _ in range(5)]


def _of_blocks(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, **_: Any) -> Tensor:
    """What FlexAttention computes [1, H, S, K], forward and backward."""
    blocks, places = block_mask.to_dense().bool(), torch.arange(q.shape[2])
    sees_1HSS = blocks.repeat_interleave(CUBE_TOKENS, 2).repeat_interleave(CUBE_TOKENS, 3)
    zero = places[:1]
    sees_1HSS &= block_mask.mask_mod(zero, zero, zero, places)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees_1HSS)


@pytest.mark.parametrize(
    ("share", "on_gpu"), [(0.1, False), (0.3, False), (0.3, True), (0.5, False), (1.0, False)]
)
def test_a_pack_attends_as_each_sample_does_with_a_mask(
    share: float, on_gpu: bool, monkeypatch
) -> None:
    """`on_gpu`: all that is around the kernel of a GPU."""
    if on_gpu:
        monkeypatch.setattr(Tensor, "is_cuda", True)
        monkeypatch.setattr(cube_kernel, "_compiled", lambda _: _of_blocks)
    with in_float64():
        spans = _spans(GRIDS, Fraction(repr(share)))
        *inputs, weight = _random(spans.total, seed=3)
        leaves = [x.requires_grad_() for x in inputs]
        q, k, v, gate = leaves
        made = attend_cubes((q, k, v), gate, spans, attend=attend_by_runs)
        wanted = torch.zeros_like(made)
        for start, length, grid in zip(spans.starts, spans.lengths, GRIDS, strict=True):
            mine = slice(start, start + length)
            wanted[mine] = _masked(*(x[mine] for x in leaves), grid, share)
        both = [torch.autograd.grad((one * weight).sum(), leaves) for one in (made, wanted)]
    assert (made - wanted).abs().max() < IN_FLOAT64
    for ours, theirs in zip(*both, strict=True):
        assert theirs.any() and (ours - theirs).abs().max() < IN_FLOAT64


@pytest.mark.parametrize("case", CASES)
def test_it_attends_as_fastvideo_does(case: str) -> None:
    """The tolerance is that of what is stored, which FastVideo computed in float32."""
    grid, sparsity = CASES[case]
    stored = {k.partition(".")[2]: v.double() for k, v in load_file(FASTVIDEO).items() if case in k}
    with in_float64():
        spans = _spans([grid], 1 - Fraction(repr(sparsity)))
        leaves = [torch.nn.functional.pad(stored[n], (0, 0) * 2 + (0, PADDING)) for n in "qkv"]
        leaves.append(torch.nn.functional.pad(stored["gate"], (0, 0) * 2 + (0, PADDING)))
        leaves = [x.requires_grad_() for x in leaves]
        made = attend_cubes(tuple(leaves[:3]), leaves[3], spans, attend=attend_by_runs)[:-PADDING]
        gradients = torch.autograd.grad((made * stored["d"]).sum(), leaves)
    assert (made - stored["out"]).abs().max() < 2e-6
    for ours, name in zip(gradients, ("dq", "dk", "dv", "dgate"), strict=True):
        assert (ours[:-PADDING] - stored[name]).abs().max() < 5e-6


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_compilation()), reason=missing_for_compilation())
def test_the_kernel_of_a_gpu_chooses_the_same_cubes() -> None:
    """Its compiled forward pass, which runs here as well; `tests/gpu` has the backward pass.

    In a process of its own: torch 2.13 cannot compile it for CPUs behind another compilation, as
    one of `test_compiled.py` ("full not supported in subgraph, missing lowering").
    """
    code = f"from {__name__} import gap_in_blocks; print(gap_in_blocks())"
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split()[-1]) < 2e-6


def gap_in_blocks() -> float:
    """The largest difference between attention in FlexAttention's blocks and in plain runs."""
    spans = _spans(GRIDS, Fraction(3, 10))
    q, k, v, gate, _ = _random(spans.total, seed=5, width=16)
    wanted = attend_cubes((q, k, v), gate, spans, attend=attend_by_runs)

    def in_blocks(qkv, chosen, spans):
        cubes = spans.cubes
        return cubes.of_order(attend_in_blocks(tuple(map(cubes.placed, qkv)), chosen, cubes))

    cube_attention.attend_by_mask = in_blocks
    with torch.no_grad():
        made = attend_cubes((q, k, v), gate, spans, attend=attend_by_runs)
    return float((made - wanted).abs().max())


@pytest.mark.parametrize("heads_at_once", [1, 2, 3])
def test_lists_of_cubes_are_those_of_all_scores(heads_at_once: int, monkeypatch) -> None:
    """Of some heads at a time, against torch's scores of all, and its lists by a sort."""
    cubes = _spans(GRIDS, Fraction(3, 10)).cubes
    heads, count = 3, sum(cubes.counts)
    q, k = (
        torch.randn(count, heads, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2)
    )
    score_HCC = torch.einsum("chk,dhk->hcd", q, k) * 8**-0.5
    most = score_HCC.masked_fill(cubes.apart_CC, -math.inf).topk(max(cubes.chosen)).indices
    monkeypatch.setattr(cubes_module, "_PAIRS_AT_ONCE", heads_at_once * count**2)
    chosen = chosen_cubes(q, k, cubes)
    for first, cubes_here, seen in zip(
        accumulate(cubes.counts, initial=0), cubes.counts, cubes.chosen, strict=False
    ):
        mine = slice(first, first + cubes_here)
        assert torch.equal(chosen[:, mine, :seen], most[:, mine, :seen])
    made = block_mask(chosen, cubes)
    theirs = BlockMask.from_kv_blocks(made.kv_num_blocks, made.kv_indices, BLOCK_SIZE=CUBE_TOKENS)
    assert made.seq_lengths == theirs.seq_lengths and made.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert torch.equal(made.q_num_blocks, theirs.q_num_blocks)
    listed = torch.arange(count) < theirs.q_num_blocks[..., None]
    assert made.q_indices.dtype == theirs.q_indices.dtype == torch.int32
    assert torch.equal(made.q_indices[listed], theirs.q_indices[listed])


class _Kernel(torch.autograd.Function):
    """What FlexAttention keeps and makes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


class _Moved(TorchDispatchMode):
    """Bytes that operations read and write, views left out; of numbers of all pairs, by type."""

    def __init__(self, pairs: tuple[int, int]):
        super().__init__()
        self.pairs, self.bytes, self.most = pairs, 0, Counter[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.__name__:
            made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            read = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            self.bytes += sum(x.numel() * x.element_size() for x in (*made, *read.values()))
            for x in made:
                if x.shape[-2:] == self.pairs:
                    self.most[x.dtype] = max(self.most[x.dtype], x.nbytes)
        return out


def test_a_gpu_moves_tokens_once_and_keeps_no_scores(monkeypatch) -> None:
    """Around the kernel, in units: a number for each token and unit of width, read or written."""
    grid, heads, share = (8, 16, 16), 4, Fraction(1, 10)
    spans = _spans([grid], share)
    cubes = Cubes.of([grid], [0], total=math.prod(grid), share=share, device=CPU)
    count = sum(cubes.counts)
    monkeypatch.setattr(cubes_module, "_PAIRS_AT_ONCE", count**2)  # a head at a time
    monkeypatch.setattr(cube_kernel, "_compiled", lambda _: lambda *qkv, **_: _Kernel.apply(*qkv))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    *qkv, gate, weight = _random(math.prod(grid), seed=5, heads=heads, width=8)
    for x in (*qkv, gate):
        x.requires_grad_()
    kept: list[Tensor] = []
    forward, backward = _Moved((count, count)), _Moved((count, count))
    with forward, saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = attend_cubes(tuple(qkv), gate, replace(spans, cubes=cubes), attend=attend_by_runs)
    with backward:
        out.backward(weight)
    assert forward.bytes / gate.nbytes < 18.5, "4 * 2 to place, 3 to average, 3 to add, 2 back"
    assert backward.bytes / gate.nbytes < 26, "5 * 2 taken, 3 * 2 to add, and 8 of the gate"
    assert not [x for x in kept if x.shape[-2:] == (count, count)]
    # Scores of some heads; of all which cubes each sees, and which see it, as the kernel wants.
    assert forward.most == {torch.float32: 4 * count**2, torch.int32: 4 * heads * count**2}
    assert not backward.most


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """What other tests have compiled counts towards the limit, as what this one has does there."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("nothing_compiled")
def test_plain_calls_never_take_the_place_of_the_kernel(monkeypatch) -> None:
    """torch compiles no more than `recompile_limit` kinds of calls, and says nothing of others."""
    compiled = partial(torch.compile, backend="eager")
    monkeypatch.setattr(cube_kernel, "_compiled", cache(cube_kernel._compiled.__wrapped__))
    monkeypatch.setattr(torch, "compile", compiled)

    def call(*grids: tuple[int, int, int]) -> None:
        spans = _spans(grids, Fraction(3, 10))
        cubes = spans.cubes
        q, k, v, *_ = _random(spans.total, seed=5, width=16)
        chosen = torch.zeros(q.shape[1], len(cubes.tokens_C11), 1, dtype=torch.int64)
        attend_in_blocks(tuple(map(cubes.placed, (q, k, v))), chosen, cubes)

    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        call(GRIDS[0])
        call(*GRIDS)  # of any number of cubes it is one kernel, but of a single cube
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            call(GRIDS[1])


def test_the_share_goes_down_as_fastvideos_sparsity_goes_up() -> None:
    schedule = SparseSchedule.of(0.1, step=0.03, interval=30)
    for step in (1, 29, 30, 59, 60, 450, 899, 900, 10_000):
        theirs = min(step // 30, 30) * 0.03  # 0.9 // 0.03 is 30 of exact numbers
        assert float(1 - schedule.at(step)) == pytest.approx(theirs, abs=1e-12)
    assert schedule.at(0) == WHOLE and SparseSchedule.of(0.1, step=1, interval=5).at(4) == WHOLE
    assert SparseSchedule.of(0.1, step=1, interval=5).at(5) == Fraction(1, 10)
    # The numbers are meant as they are written: ten of 100 cubes, and not eleven.
    assert [attended_cubes(Fraction(1, 10), n) for n in (1, 10, 11, 100)] == [1, 1, 2, 10]


def _network(groups, **changes) -> WanNetwork:
    network = WanNetwork(wan_model(**changes), groups)
    randomise(network, seed=7)
    return network.eval()


def _made(network: WanNetwork, batch) -> Tensor:
    levels = torch.linspace(100, 900, batch.num_samples)
    with torch.no_grad():
        return network(batch.latent_TC, levels, batch)


def test_all_cubes_and_a_gate_of_zeros_change_nothing(groups) -> None:
    """As a run begins; in its first steps only the gate of the dense network learns to differ."""
    grids = [(4, 8, 8), (3, 5, 6)]
    dense, sparse = _network(groups), _network(groups, sparse_attention=True, sparse_share=0.3)
    sparse.load_state_dict(dense.state_dict(), strict=False)
    batch = random_pack(grids, [5, 3], model=dense.model)
    sparse.at_step(1)
    assert (_made(sparse, batch) - _made(dense, batch)).abs().max() > 1e-3  # a random gate
    initialise_weights(sparse, run_config(model=sparse.model))
    gates = {n: w for n, w in sparse.named_parameters() if "linear_gate" in n}
    assert len(gates) == 4 and not any(w.any() for w in gates.values())
    sparse.load_state_dict(dense.state_dict(), strict=False)
    assert (_made(sparse, batch) - _made(dense, batch)).abs().max() < 1e-6
    sparse.at_step(10**6)
    assert (_made(sparse, batch) - _made(dense, batch)).abs().max() > 1e-3


def test_a_packed_sample_is_as_alone(groups) -> None:
    network = _network(groups, sparse_attention=True, sparse_share=0.25)
    batch = random_pack(GRIDS, [4, 9, 1, 6], model=network.model)
    levels = torch.linspace(100, 900, batch.num_samples)
    packed = _made(network, batch)
    for index, (start, real) in enumerate(zip(batch.starts, batch.num_tokens, strict=False)):
        with torch.no_grad():
            alone = single(batch, index)
            made = network(alone.latent_TC, levels[index : index + 1], alone)
        assert (made[:real] - packed[start : start + real]).abs().max() < 1e-5


def test_what_it_does_not_go_with_is_refused() -> None:
    sparse = {"sparse_attention": True}
    for comm in (ContextComm.ALL_GATHER, ContextComm.P2P):
        with pytest.raises(Problems, match=rf"with cp_comm_type={comm} .* set cp_comm_type=a2a"):
            wan_model(**sparse, context_parallel_size=2, cp_comm_type=comm)
    with pytest.raises(Problems, match=r"route_from=0. leaves tokens out; set route_from"):
        wan_model(**sparse, route_from=0, route_to=1)
    for share in (0.0, 1.5, math.nan):
        with pytest.raises(Problems, match=r"sparse_share=.* must be above 0 and at most 1"):
            wan_model(sparse_share=share)
    config = run_config(model=wan_model(**sparse))
    with pytest.raises(Problems, match="sparse_attention=true needs all of them together"):
        replace(config, objective=ObjectiveConfig(name="flow", second_level_rate=0.5))


def test_operations_follow_from_the_share() -> None:
    """Linears with the gate, and pairs of tokens: a share of them, and one for two cubes' means."""
    sizes = {"name": "wan2.1_t2v_1.3b", "precision": Precision.BF16}
    dense, sparse = (
        _published(**sizes, sparse_attention=on, sparse_share=0.1) for on in (False, True)
    )
    tokens, width, layers = 32_760, 1536, 30
    shape = {"tokens": [tokens], "text": [512]}
    gates = 2 * layers * tokens * width * width
    pairs = 4 * layers * width * tokens**2
    spared = pairs * (1 - 0.1 - 1 / 4096)
    change = forward_flops(sparse, **shape) - forward_flops(dense, **shape)
    assert change == pytest.approx(gates - spared, rel=1e-9)
    cross = attention_flops(dense, **shape) - pairs
    assert attention_flops(sparse, **shape) == pytest.approx(pairs - spared + cross, rel=1e-9)
    early = forward_flops(sparse.at_step(60), **shape) - forward_flops(dense, **shape)
    assert early == pytest.approx(gates - pairs * (0.03 - 1 / 4096), rel=1e-9)


def test_memory_counts_pairs_of_cubes() -> None:
    """8 bytes for each head and pair in each layer; heads are shared by ranks of two kinds."""
    (geometry,) = (MockGeometry(frames=21, height=90, width=160),)
    data = DatasetConfig(mock=True, mock_samples=(geometry,), task_encoder_seq_length=75_600)

    def kept(**settings: Any) -> int:
        model = _published(name="wan2.1_t2v_1.3b", precision=Precision.BF16, **settings)
        return memory(run_config(model=model, dataset=data), world_size=4).activations

    cubes, layers, heads = 6 * 12 * 20, 30, 12  # borders of 21 frames and 45 rows are cubes, too
    pairs = 8 * heads * cubes**2
    # By cubes: queries, keys, values, what the kernel makes of them, and the gate; means are few.
    placed = 2 * 5 * 75_600 * 1536

    def more(**settings: Any) -> int:
        return kept(sparse_attention=True, **settings) - kept(**settings)

    again: Any = {"recompute_granularity": Recompute.SELECTIVE}  # pairs of one layer at a time
    assert more() - more(**again) == pytest.approx((layers - 1) * pairs, rel=1e-6)
    shared = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    few = more(**shared) - more(**shared, **again)
    assert few == pytest.approx((layers - 1) * pairs / 4, rel=1e-6)
    assert more(**again) == pytest.approx(layers * placed + pairs, rel=0.04)


def _published(**settings) -> ModelConfig:
    from dit.models.registry import family_named

    family = family_named("wan")
    return family.config(**(dict(family.sizes[settings["name"]]) | settings))

"""Video Sparse Attention (VSA, arXiv:2505.13389): attention among the cubes of a sample.

coarse: the means of cubes attend to each other; the output is multiplied by a gate of each token
fine:   tokens attend to the tokens of the cubes with the highest coarse scores
The coarse part has a gradient, but the choice of cubes has none. Means and softmax are over real
tokens, and tokens never attend to other samples. Tests compare every implementation with dense
attention under a mask.
"""

# T packed tokens, C cubes of a pack, B positions of a cube, H heads, K head width
# J largest number of cubes that a cube attends to

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from dit.models.attention.cubes import Cubes
from dit.models.attention.kernels import attend_by_runs
from dit.models.attention.spans import Attend, Spans


def attend_cubes(
    qkv: tuple[Tensor, Tensor, Tensor], gate_THK: Tensor, spans: Spans, *, attend: Attend
) -> Tensor:
    """The output [T, H, K] of sparse attention: fine part + gate * coarse part.

    `qkv` are queries, keys and values [T, H, K]. `attend` is dense attention, which computes the
    fine part if every cube attends to all cubes.
    """
    cubes = spans.cubes
    assert cubes is not None
    (q, q_mean_CHK), (k, k_mean_CHK), (v, v_mean_CHK) = map(cubes.with_means, qkv)
    # By SDPA, whose GPU kernels do not keep the scores of all pairs of cubes for the backward pass.
    coarse_CHK = attend_by_runs(q_mean_CHK, k_mean_CHK, v_mean_CHK, _spans_of_cubes(spans))
    gate_CBHK, coarse_C1HK = cubes.placed(gate_THK), coarse_CHK.to(gate_THK.dtype)[:, None]
    if cubes.all_chosen:
        return attend(*qkv, spans) + cubes.of_order(gate_CBHK * coarse_C1HK)
    chosen_HCJ = chosen_cubes(q_mean_CHK, k_mean_CHK, cubes)
    if gate_THK.is_cuda or gate_THK.is_meta:
        from dit.models.attention.cube_kernel import attend_in_blocks  # it takes FlexAttention in

        fine_CBHK = attend_in_blocks((q, k, v), chosen_HCJ, cubes)
        return cubes.of_order(torch.addcmul(fine_CBHK, gate_CBHK, coarse_C1HK))
    return attend_by_mask(qkv, chosen_HCJ, spans) + cubes.of_order(gate_CBHK * coarse_C1HK)


def _spans_of_cubes(spans: Spans) -> Spans:
    """Spans for attention among the cubes of each sample; computed once for all layers."""

    def make() -> Spans:
        assert spans.cubes is not None
        counts = spans.cubes.counts
        pairs = list(zip(accumulate(counts, initial=0), counts, strict=False))
        return Spans.of(pairs, pairs, total=sum(counts), device=spans.device)

    return spans.once("cubes", make)  # type: ignore[return-value]


@torch.no_grad()
def chosen_cubes(q_CHK: Tensor, k_CHK: Tensor, cubes: Cubes) -> Tensor:
    """Indices [H, C, J], int64, of the J cubes with the highest scores for each cube.

    J is the largest number of cubes that a cube of any sample attends to. A score is the product of
    a cube's mean query and another cube's mean key, both [C, H, K]. Indices are sorted by
    descending score; cubes of other samples, whose score is -inf, come last.
    """
    heads = zip(*(x.split(cubes.heads_at_once, dim=1) for x in (q_CHK, k_CHK)), strict=True)
    chosen = []
    for some_q, some_k in heads:
        score_HCC = torch.einsum("chk,dhk->hcd", some_q, some_k)
        score_HCC.masked_fill_(cubes.apart_CC, -math.inf)
        chosen.append(score_HCC.topk(max(cubes.chosen), dim=-1).indices)
    return torch.cat(chosen)


def attend_by_mask(qkv: tuple[Tensor, Tensor, Tensor], chosen_HCJ: Tensor, spans: Spans) -> Tensor:
    """The output [T, H, K] of attention to the tokens of chosen cubes, by SDPA with a mask."""
    cubes = spans.cubes
    assert cubes is not None
    pieces, row = [], 0
    firsts = accumulate(cubes.counts, initial=0)
    samples = zip(spans.starts, spans.lengths, firsts, cubes.counts, cubes.chosen, strict=False)
    for start, length, first, count, most in samples:
        mine = slice(start, start + length)
        mask_HTT = None
        if most < count:
            own_HCJ = chosen_HCJ[:, first : first + count, :most] - first
            sees_HCC = torch.zeros(len(own_HCJ), count, count, dtype=torch.bool)
            sees_HCC = sees_HCC.to(own_HCJ.device).scatter(2, own_HCJ, True)
            cube_T = cubes.cube_of_tokens.index[mine] - first
            mask_HTT = sees_HCC[:, cube_T][:, :, cube_T]
        q, k, v = (x[mine].transpose(0, 1)[None] for x in qkv)
        out_HTK = scaled_dot_product_attention(q, k, v, attn_mask=mask_HTT)[0]
        pieces.append(pad(out_HTK.transpose(0, 1), (0, 0, 0, 0, start - row, 0)))
        row = start + length
    return pad(torch.cat(pieces), (0, 0, 0, 0, 0, spans.total - row))

"""cuDNN's attention of packs on a GPU: small and large packs, each head width, fused rows."""

from __future__ import annotations

import pytest
import torch

from dit.config import AttentionBackend
from dit.models.attention.cudnn_graphs import takes_much_space
from dit.models.attention.fit import AttentionCase, refusal
from dit.models.attention.kernels import ATTEND
from dit.models.attention.spans import Offsets, Spans, attend_one_by_one

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("across", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize(("samples", "most"), [(1, 3000), (17, 700), (200, 150)])
@pytest.mark.parametrize("width", [64, 72, 96, 128, 256])
def test_a_pack_equals_one_by_one(width, samples, most, across):
    """With queries, keys and values where a matrix product writes them."""
    capability, device = torch.cuda.get_device_capability(), torch.device("cuda")
    case = AttentionCase(capability=capability, head_width=width, half=True)
    if reason := refusal(AttentionBackend.CUDNN, case):
        pytest.skip(reason)
    random = torch.Generator().manual_seed(samples)
    tokens, texts = torch.randint(most // 2, most, (2, samples), generator=random).tolist()

    def rows(sizes):
        ends = torch.tensor([0, *sizes]).cumsum(0)
        return list(zip(ends.tolist(), sizes, strict=False)), ends

    (queries, ends), (keys, key_ends) = rows(tokens), rows(texts if across else tokens)
    offsets = Offsets(cu=ends, key_cu=key_ends, longest=max(tokens), longest_key=1)
    assert not takes_much_space(offsets, int(ends[-1]), width)
    spans = Spans.of(queries, keys, total=int(ends[-1]), device=device)
    drawn = torch.Generator(device).manual_seed(0)
    shapes = [(spans.total, 1), (int(key_ends[-1]), 2)] if across else [(spans.total, 3)]
    leaves = [
        torch.randn(n, 4, parts * width, generator=drawn, device=device).bfloat16().requires_grad_()
        for n, parts in shapes
    ]
    results = []
    for attend in (attend_one_by_one, ATTEND[AttentionBackend.CUDNN]):
        q, k, v = (part for x in leaves for part in x.split(width, dim=-1))
        out = attend(q, k, v, spans)
        gradients = torch.autograd.grad(out.float().square().sum(), leaves)
        results.append([out.detach().float(), *(x.float() for x in gradients)])
    for plain, fast in zip(*results, strict=True):
        assert (fast - plain).norm() / plain.norm() < 1e-2

"""cuDNN's attention of a whole pack in one call, by graphs of nvidia-cudnn-frontend.

1. GraphKey         the sizes and strides for which a graph is built; many packs have the same
2. forward_graph    o = softmax(q kᵀ / √K) v within each sequence, and the statistics of softmax
   backward_graph   gradients of q, k and v
3. cudnn_attention  attention as an autograd function that runs the two graphs

A graph takes concatenated sequences of any length: their starts ("ragged offsets", in elements, not
bytes) and their lengths are tensors of the call. So the graph itself fixes only the largest number
of sequences and the largest length, both rounded up. Names of operations and arguments are from:
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

# T query tokens, S key tokens, H heads, K head width, N sequences, X numbers of a token

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dit.models.attention.spans import Offsets
from dit.models.kernels.row_gradient import offer_of, taken

_COUNTS, _LENGTHS, _TOKENS = 16, 512, 4096
"""Multiples to which a graph's number of sequences, longest sequence and tokens are rounded up (see
`few_sizes`)."""
_SHORTEST = 64
"""Smallest value of a graph's longest length: cuDNN builds no graph for sequences of one token."""
_MOST_SPACE = 4
"""Largest workspace that the backward pass may need, in multiples of the bytes of q's gradient in
float32."""
Strides = tuple[int, int]
"""Strides of a tensor [T, H, K] in elements: (between tokens, between heads)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphKey:
    """What a cuDNN graph depends on: the GPU, and the dtype, sizes and strides of its tensors."""

    capability: tuple[int, int]  # of the GPU
    dtype: torch.dtype
    sequences: int
    longest: int
    longest_key: int
    tokens: int  # largest number of queries of all sequences together
    heads: int
    width: int  # of a head
    wide: bool  # whether offsets are int64
    q: Strides
    k: Strides
    v: Strides
    to_v: Strides  # of the gradient of v

    @property
    def packed(self) -> Strides:
        """Strides of the contiguous tensors: the output, its gradient, and gradients of q and k."""
        return self.heads * self.width, self.width


def few_sizes(size: int, multiple: int) -> int:
    """`size` rounded up to a power of two; beyond `multiple`, to a multiple of `multiple`."""
    if size > multiple:
        return -(-size // multiple) * multiple
    return 1 << max(size - 1, 0).bit_length()


def takes_much_space(offsets: Offsets, tokens: int, width: int) -> bool:
    """Whether cuDNN's backward pass would need more than 4 times the memory of q's gradient.

    cuDNN computes the gradient of q in float32. For head widths divisible by 16 it has as many
    numbers as q. For other widths, such as 72, the frontend allocates it as if each sequence were
    as long as the longest one.
    """
    count = few_sizes(len(offsets.cu) - 1, _COUNTS)
    longest = few_sizes(max(offsets.longest, _SHORTEST), _LENGTHS)
    return width % 16 != 0 and count * longest > _MOST_SPACE * tokens


class _Tensors:
    """The tensors of a graph by name.

    A name is that of a buffer of `_run`, such as "q"; `("offsets", rows, X)` for the offsets of
    tensors with X numbers per token; or `("lengths", rows)`. `rows` is "q" for tensors with a row
    per query, "k" with a row per key. Tensors of offsets and lengths are created at first use.
    """

    def __init__(self, key: GraphKey, handle: Any):
        import cudnn  # type: ignore[import-not-found]

        self.key, self.types = key, cudnn.data_type
        self.dtype = self.types.HALF if key.dtype is torch.float16 else self.types.BFLOAT16
        self.graph = cudnn.pygraph(
            io_data_type=self.dtype,
            intermediate_data_type=self.types.FLOAT,
            compute_data_type=self.types.FLOAT,
            handle=handle,
            sm_version=10 * key.capability[0] + key.capability[1],
        )
        self.made: dict[Any, Any] = {}

    def given(self, name: str, strides: Strides, *, rows: str = "q", width: int = 0) -> Any:
        """Declares and returns the input `name`, [T, H, K], or [S, H, K] if `rows` is "k".

        If `width` is not 0, the input is float32 and K is `width`.
        """
        dim, stride = self._layout(strides, rows, width or self.key.width)
        self.made[name] = self.graph.tensor(
            dim=dim,
            stride=stride,
            data_type=self.dtype if not width else self.types.FLOAT,
            ragged_offset=self._offsets(rows, strides[0]),
            name=name,
        )
        return self.made[name]

    def result(
        self, name: str, tensor: Any, strides: Strides, *, rows: str = "q", width: int = 0
    ) -> None:
        """Declares `tensor` as the output `name`, [T, H, K], or [S, H, K] if `rows` is "k".

        If `width` is not 0, the output is float32 and K is `width`.
        """
        dim, stride = self._layout(strides, rows, width or self.key.width)
        tensor.set_output(True).set_dim(dim).set_stride(stride)
        tensor.set_data_type(self.dtype if not width else self.types.FLOAT)
        tensor.set_ragged_offset(self._offsets(rows, strides[0]))
        self.made[name] = tensor

    def options(self) -> dict[str, Any]:
        """Arguments of `sdpa` and `sdpa_backward`: the scale and the lengths of sequences."""
        lengths = {rows: self._numbers(("lengths", rows), self.key.sequences) for rows in "qk"}
        scale = self.key.width**-0.5
        return {
            "attn_scale": scale,
            "use_padding_mask": True,
            "seq_len_q": lengths["q"],
            "seq_len_kv": lengths["k"],
        }

    def _layout(self, strides: Strides, rows: str, width: int) -> tuple[list[int], list[int]]:
        """(shape [N, H, longest, width], strides) of a tensor for cuDNN.

        The stride between sequences is a placeholder: cuDNN uses the offsets.
        """
        key = self.key
        longest = key.longest if rows == "q" else key.longest_key
        token, head = strides
        return [key.sequences, key.heads, longest, width], [longest * token, head, token, 1]

    def _offsets(self, rows: str, numbers: int) -> Any:
        return self._numbers(("offsets", rows, numbers), self.key.sequences + 1)

    def _numbers(self, name: tuple[Any, ...], count: int) -> Any:
        if name not in self.made:
            wide = self.key.wide and name[0] == "offsets"
            self.made[name] = self.graph.tensor(
                dim=[count, 1, 1, 1],
                stride=[1, 1, 1, 1],
                data_type=self.types.INT64 if wide else self.types.INT32,
                name="_".join(map(str, name)),
            )
        return self.made[name]


def forward_graph(key: GraphKey, handle: Any = None) -> _Tensors:
    """The tensors of the forward graph for `key`; `graph.build` must be called before it runs."""
    tensors = _Tensors(key, handle)
    inputs = {
        "q": tensors.given("q", key.q),
        "k": tensors.given("k", key.k, rows="k"),
        "v": tensors.given("v", key.v, rows="k"),
    }
    out, stats = tensors.graph.sdpa(**inputs, generate_stats=True, **tensors.options())
    tensors.result("out", out, key.packed)
    tensors.result("stats", stats, (key.heads, 1), width=1)
    return tensors


def backward_graph(key: GraphKey, handle: Any = None) -> _Tensors:
    """The tensors of the backward graph for `key`; `graph.build` must be called before it runs."""
    tensors = _Tensors(key, handle)
    inputs = {
        "q": tensors.given("q", key.q),
        "k": tensors.given("k", key.k, rows="k"),
        "v": tensors.given("v", key.v, rows="k"),
        "o": tensors.given("out", key.packed),
        "dO": tensors.given("to_out", key.packed),
        "stats": tensors.given("stats", (key.heads, 1), width=1),
    }
    to_q, to_k, to_v = tensors.graph.sdpa_backward(
        **inputs, max_total_seq_len_q=key.tokens, **tensors.options()
    )
    tensors.result("to_q", to_q, key.packed)
    tensors.result("to_k", to_k, key.packed, rows="k")
    tensors.result("to_v", to_v, key.to_v, rows="k")
    return tensors


@cache
def _built(key: GraphKey, device: torch.device, *, backward: bool) -> tuple[_Tensors, int]:
    """(tensors of the built graph for `key`, bytes of its workspace)."""
    import cudnn  # type: ignore[import-not-found]

    handle = _handle(device)
    tensors = (backward_graph if backward else forward_graph)(key, handle)
    tensors.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return tensors, tensors.graph.get_workspace_size()


@cache
def _handle(device: torch.device) -> Any:  # noqa: ARG001  # the caller makes `device` current
    """The cuDNN handle of `device`.

    Raises:
        RuntimeError: the cuDNN library is missing.
    """
    import cudnn  # type: ignore[import-not-found]

    try:
        cudnn.backend_version()
    except RuntimeError as error:
        raise RuntimeError(
            "nvidia-cudnn-frontend finds no cuDNN library: install the package of your CUDA"
            " version, nvidia-cudnn-cu12 or nvidia-cudnn-cu13 (CUDA builds of torch install it)"
        ) from error
    return cudnn.create_handle()


def _run(key: GraphKey, buffers: Mapping[str, Tensor], offsets: Offsets, *, backward: bool) -> None:
    """Runs the forward or backward graph for `key` on the current stream.

    `buffers` maps names to the input and output tensors; it writes into the output tensors.
    """
    import cudnn  # type: ignore[import-not-found]

    device = buffers["q"].device
    with torch.cuda.device_of(buffers["q"]):
        tensors, size = _built(key, device, backward=backward)
        pack = {
            tensor: buffers[name] if isinstance(name, str) else _numbers(name, key, offsets)
            for name, tensor in tensors.made.items()
        }
        handle = _handle(device)
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
            cudnn.set_stream(handle=handle, stream=stream)
        workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        tensors.graph.execute(pack, workspace, handle=handle)


def _numbers(name: tuple[Any, ...], key: GraphKey, offsets: Offsets) -> Tensor:
    """The offsets [N + 1] or lengths [N] of the name `name`, computed once for each pack."""

    def make() -> Tensor:
        kind, rows, *numbers = name
        cu = offsets.cu if rows == "q" else offsets.key_cu
        cu = torch.cat((cu, cu[-1:].expand(key.sequences + 1 - len(cu))))  # empty ones at the end
        if kind == "lengths":
            return cu.diff()
        return (cu.long() if key.wide else cu) * numbers[0]

    return offsets.once((name, key.sequences, key.wide), make)


def _key(
    q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, to_v_SHK: Tensor, offsets: Offsets
) -> GraphKey:
    device, (tokens, heads, width) = q_THK.device, q_THK.shape
    q, k, v, to_v = ((x.stride(0), x.stride(1)) for x in (q_THK, k_SHK, v_SHK, to_v_SHK))
    last = max(tokens * max(q[0], heads * width), len(k_SHK) * max(k[0], v[0], to_v[0]))
    return GraphKey(
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0),
        dtype=q_THK.dtype,
        sequences=few_sizes(len(offsets.cu) - 1, _COUNTS),
        longest=few_sizes(max(offsets.longest, _SHORTEST), _LENGTHS),
        longest_key=few_sizes(max(offsets.longest_key, _SHORTEST), _LENGTHS),
        tokens=few_sizes(tokens, _TOKENS),
        heads=heads,
        width=width,
        wide=last >= 2**31,
        q=q,
        k=k,
        v=v,
        to_v=to_v,
    )


def _readable(x_THK: Tensor) -> Tensor:
    """`x_THK`, or a contiguous copy if its rows overlap or are not aligned to 16 bytes."""
    token, head, number = x_THK.stride()
    whole = number == 1 and min(token, head) >= x_THK.shape[-1]
    aligned = token % 8 == head % 8 == 0 and x_THK.data_ptr() % 16 == 0
    return x_THK if whole and aligned else x_THK.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets) -> Tensor:
        ctx.place = offer_of(v_SHK)
        q_THK, k_SHK, v_SHK = map(_readable, (q_THK, k_SHK, v_SHK))
        out_THK = q_THK.new_empty(q_THK.shape)
        stats_TH = q_THK.new_empty(q_THK.shape[:2], dtype=torch.float32)
        buffers = {"q": q_THK, "k": k_SHK, "v": v_SHK, "out": out_THK, "stats": stats_TH}
        _run(_key(q_THK, k_SHK, v_SHK, v_SHK, offsets), buffers, offsets, backward=False)
        ctx.save_for_backward(q_THK, k_SHK, v_SHK, out_THK, stats_TH)
        ctx.offsets = offsets
        return out_THK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_SHK, v_SHK, out_THK, stats_TH = ctx.saved_tensors
        (to_out_THK,) = gradients
        to_q_THK, to_k_SHK = q_THK.new_empty(q_THK.shape), k_SHK.new_empty(k_SHK.shape)
        to_v_SHK = taken(v_SHK, ctx.place)
        buffers = {"q": q_THK, "k": k_SHK, "v": v_SHK, "out": out_THK, "stats": stats_TH}
        buffers |= {"to_q": to_q_THK, "to_k": to_k_SHK, "to_v": to_v_SHK}
        buffers["to_out"] = to_out_THK.contiguous()
        key = _key(q_THK, k_SHK, v_SHK, to_v_SHK, ctx.offsets)
        _run(key, buffers, ctx.offsets, backward=True)
        return to_q_THK, to_k_SHK, to_v_SHK, None


def cudnn_attention(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets) -> Tensor:
    """The output [T, H, K] of attention to keys and values [S, H, K] within each sequence.

    Raises:
        RuntimeError: the cuDNN library is missing, or it has no kernel for these sizes.
    """
    out_THK = _Attention.apply(q_THK, k_SHK, v_SHK, offsets)
    assert isinstance(out_THK, Tensor)
    return out_THK

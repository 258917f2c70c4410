"""nvidia-cudnn-frontend on a CPU: graphs are recorded, and what they mean is computed in torch.

Each tensor of a graph says where its numbers lie: strides, and for each sequence where it begins in
the buffer of the call. They are read and written there and nowhere else, so that a wrong offset,
length or stride gives wrong numbers, or an error at the end of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import Signature
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "BFLOAT16": torch.bfloat16,
    "HALF": torch.float16,
    "FLOAT": torch.float32,
    "INT32": torch.int32,
    "INT64": torch.int64,
}
WORKSPACE = 64
"""Bytes."""


@dataclass(eq=False)
class GraphTensor:
    """The part of a tensor's description that attention needs."""

    dim: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    data_type: str = ""
    ragged_offset: GraphTensor | None = None
    name: str = ""
    is_output: bool = False

    def __getattr__(self, name: str) -> Callable[[Any], GraphTensor]:
        key = {"set_output": "is_output"}.get(name, name.removeprefix("set_"))
        assert name.startswith("set_") and key in self.__dataclass_fields__, name

        def change(value: Any) -> GraphTensor:
            setattr(self, key, value)
            return self

        return change


class Graph:
    """`cudnn.pygraph`; its calls must fit `signatures`, those of the package."""

    def __init__(self, signatures: dict[str, Signature], **options: Any):
        signatures["pygraph.__init__"].bind(None, **options)
        assert options["intermediate_data_type"] == options["compute_data_type"] == "FLOAT"
        self.signatures, self.options = signatures, options
        self.call: tuple[str, dict[str, Any], list[GraphTensor]]

    def tensor(self, **options: Any) -> GraphTensor:
        self.signatures["pygraph.tensor"].bind(None, **options)
        return GraphTensor(**options)

    def sdpa(self, **options: Any) -> list[GraphTensor]:
        self.signatures["sdpa"].bind(None, **options)
        assert options.pop("generate_stats")
        return self._called("forward", options, outputs=2)

    def sdpa_backward(self, **options: Any) -> list[GraphTensor]:
        self.signatures["sdpa_backward"].bind(None, **options)
        return self._called("backward", options, outputs=3)

    def _called(self, kind: str, options: dict[str, Any], *, outputs: int) -> list[GraphTensor]:
        assert options.pop("use_padding_mask")  # without it, ragged offsets are refused
        made = [GraphTensor() for _ in range(outputs)]
        self.call = kind, options, made
        return made

    def build(self, heuristics: list[str]) -> None:
        assert heuristics == ["A", "FALLBACK"] and self.options["handle"] == "handle"
        _, given, made = self.call
        for one in (*given.values(), *made):
            if isinstance(one, GraphTensor) and one.ragged_offset is not None:
                aligned = all(stride % 8 == 0 for stride in one.stride[1:3])
                assert one.stride[3] == 1 and (aligned or one.data_type == "FLOAT")
                assert one.ragged_offset.dim == [one.dim[0] + 1, 1, 1, 1]

    def get_workspace_size(self) -> int:
        return WORKSPACE

    def execute(self, pack: dict[GraphTensor, Tensor], workspace: Tensor, **options: Any) -> None:
        self.signatures["pygraph.execute"].bind(None, pack, workspace, **options)
        assert options == {"handle": "handle"} and workspace.nbytes >= WORKSPACE
        kind, given, made = self.call[0], dict(self.call[1]), self.call[2]
        assert all(one.is_output for one in made)
        for one, buffer in pack.items():
            assert DTYPES[one.data_type] is buffer.dtype, one.name
        lengths = [pack[given.pop(f"seq_len_{rows}")].tolist() for rows in ("q", "kv")]
        scale, most = given.pop("attn_scale"), given.pop("max_total_seq_len_q", sum(lengths[0]))
        assert sum(lengths[0]) <= most
        for number, (length, key_length) in enumerate(zip(*lengths, strict=True)):

            def view(one: GraphTensor, rows: int, number: int = number) -> Tensor:
                return _sequence(one, pack, number, rows)

            q, k, v = (
                view(given[name], rows).float()
                for name, rows in (("q", length), ("k", key_length), ("v", key_length))
            )
            score = q @ k.mT * scale
            if kind == "forward":
                out, stats = made
                stats_HT1 = score.logsumexp(-1, keepdim=True)
                view(stats, length).copy_(stats_HT1)
                view(out, length).copy_((score - stats_HT1).exp() @ v)
                continue
            out, to_out = view(given["o"], length).float(), view(given["dO"], length).float()
            weight = (score - view(given["stats"], length)).exp()
            to_score = weight * (to_out @ v.mT - (to_out * out).sum(-1, keepdim=True)) * scale
            for one, rows, gradient in zip(
                made,
                (length, key_length, key_length),
                (to_score @ k, to_score.mT @ q, weight.mT @ to_out),
                strict=True,
            ):
                view(one, rows).copy_(gradient)


def _sequence(one: GraphTensor, pack: dict[GraphTensor, Tensor], number: int, rows: int) -> Tensor:
    """Rows [H, rows, X] of a sequence, where the graph says that they are."""
    assert one.ragged_offset is not None
    _, heads, longest, width = one.dim
    assert rows <= longest
    buffer, begin = pack[one], int(pack[one.ragged_offset][number])
    assert buffer.data_ptr() % 16 == 0
    place = buffer.storage_offset() + begin
    return buffer.as_strided((heads, rows, width), tuple(one.stride[1:]), place)


def stand_in(signatures: dict[str, Signature]) -> ModuleType:
    """A module `cudnn`."""
    module = ModuleType("cudnn")
    vars(module).update(
        data_type=SimpleNamespace(**{name: name for name in DTYPES}),
        heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
        pygraph=lambda **options: Graph(signatures, **options),
        create_handle=lambda: "handle",
        backend_version=lambda: 91900,
    )
    return module

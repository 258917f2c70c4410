"""Counts the bytes that operations of a network read and write, on tensors without values.

1. OperationCounter   counts each operation except views: bytes of its inputs and outputs
2. layer_traffic      forward and backward pass of one layer: the difference between a network of
                      two layers and one of one layer

With tensors on `meta` the code takes the branches for a GPU. Caches are not modelled.
"""

# T packed tokens, D model width, K head width, M level rows, C numbers of a token

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dit.batch import AdapterDropout, Grid, LatentSample, PackedBatch
from dit.config import LoraConfig, ModelConfig
from dit.data.pack import pack_samples
from dit.lora.targets import attach_adapters, chosen_adapters
from dit.models.family import InputKind
from dit.models.kernels.traffic import OPERATOR_BYTES
from dit.models.patch_layout import PatchLayout
from dit.models.registry import family_of
from dit.pack_wire import pack_to
from dit.sizing.cuda_kernels import META, CudaKernels

OperatorBytes = Mapping[str, Callable[..., int]]
"""The bytes that operators move, where these are not those of their arguments and results.

The key is the operator's name ("dit::gated_norm"); the value takes the arguments of a call and
returns the bytes. A fused kernel belongs here: it may read an argument twice, or a few rows of it,
so only its own loads and stores tell."""

ATTENTION = "attention"
WEIGHT_PRODUCTS = "products with a weight"
ONE_HOT_PRODUCTS = "one-hot products"
_NO_TRAFFIC = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_ATTENTION = {"_varlen_attn", "_varlen_attn_backward"}


class OperationCounter(TorchDispatchMode):
    """A context that counts operations and their bytes by name."""

    def __init__(self, operator_bytes: OperatorBytes):
        super().__init__()
        self.count: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.operator_bytes = operator_bytes
        self._masks: set[StorageWeakRef] = set()  # of numbers that were cast from truth values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.is_view or name in _NO_TRAFFIC:
            return out
        # A tensor that is given twice is read once.
        inputs = {id(x): x for x in tree_leaves((args, kwargs)) if _counts(x)}.values()
        if name == "_to_copy" and all(x.dtype == torch.bool for x in inputs):
            self._masks.add(_storage(out))
        title = self._title(name, [*inputs])
        own = self.operator_bytes.get(f"{func.namespace}::{name}")
        both = [*inputs, *(x for x in tree_leaves(out) if _counts(x))]
        moved = own(*args, **kwargs) if own else sum(x.numel() * x.element_size() for x in both)
        self.count[title] += 1
        self.bytes[title] += moved
        return out

    def _title(self, name: str, inputs: list[Tensor]) -> str:
        if name in _ATTENTION:
            return ATTENTION
        if name not in _PRODUCTS:
            return name
        # Nothing else multiplies by a mask that was cast to numbers.
        one_hot = any(_storage(x) in self._masks for x in inputs)
        return ONE_HOT_PRODUCTS if one_hot else WEIGHT_PRODUCTS


def _counts(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device == META


def _storage(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())


@dataclass(frozen=True, kw_only=True, slots=True)
class PackShape:
    """The shape of a pack of equal samples."""

    samples: int = 32
    grid: Grid = (1, 32, 32)
    text: int = 128
    multiple: int = 16  # dataset.sample_multiple

    @property
    def padded(self) -> PackShape:
        """A shape with a row and a column of patches less, so that every sample needs padding."""
        frames, rows, columns = self.grid
        return replace(self, grid=(frames, rows - 1, columns - 1))

    def pack(self, model: ModelConfig) -> PackedBatch:
        """A pack of samples of zeros for `model`, on the device `meta`."""
        frames, rows, columns = self.grid
        tall, wide = model.patch_temporal, model.patch_spatial
        size = (model.in_channels, frames * tall, rows * wide, columns * wide)
        family = family_of(model)
        vectors = [i for i in family.inputs(model) if i.kind is InputKind.VECTOR and i.required]
        one = LatentSample(
            key="",
            latent_CFHW=torch.zeros(size),
            text_LE=torch.zeros(self.text, model.crossattn_emb_size),
            fps=math.nan,
            others={vector.name: torch.zeros(vector.width) for vector in vectors},
        )
        layout = PatchLayout(
            patch_temporal=tall,
            patch_spatial=wide,
            sample_multiple=self.multiple,
            positions=family.positions(model),
            inputs=family.inputs(model),
        )
        return pack_to(pack_samples([one] * self.samples, layout), META)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTraffic:
    """Bytes that one layer adds to the forward or the backward pass."""

    count: dict[str, int]  # operations by name
    bytes: dict[str, int]
    unit: int  # bytes of the tokens of the pack in bfloat16

    @classmethod
    def between(cls, less: OperationCounter, more: OperationCounter, *, unit: int) -> LayerTraffic:
        """The traffic of one layer: the counts of `more` minus those of `less`.

        The network that `more` counted has one layer more than the network of `less`. `unit` is the
        number of bytes in a unit of traffic.
        """
        names = more.count.keys()
        return cls(
            count={name: more.count[name] - less.count[name] for name in names},
            bytes={name: more.bytes[name] - less.bytes[name] for name in names},
            unit=unit,
        )

    def units(self, *, without: Collection[str] = (ATTENTION, WEIGHT_PRODUCTS)) -> float:
        """Units of traffic of all operations except those named in `without`."""
        return sum(n for name, n in self.bytes.items() if name not in without) / self.unit


def layer_traffic(
    model: ModelConfig,
    shape: PackShape,
    groups: ProcessGroupCollection,
    *,
    fused: bool = False,
    lora: LoraConfig | None = None,
    counts: Sequence[Mapping[str, int]] = ({"num_layers": 1}, {"num_layers": 2}),
) -> tuple[LayerTraffic, LayerTraffic]:
    """Memory traffic of one layer on one device, as (forward pass, backward pass).

    It is the difference between two networks. `counts` are the keys of `model` to replace in each;
    the second network must have one layer more.

    `fused` selects the kernels of `dit/models/kernels` instead of torch's operations. If `lora` has
    a rank, adapters are attached and the layer's own weights are frozen.
    """
    model = replace(model, name="custom", fused_kernels=fused)
    network = family_of(model).network()
    with META:  # no time for numbers that nobody looks at
        one, two = (network(replace(model, **keys), groups) for keys in counts)
        if lora is not None and lora.rank is not None:
            for made in (one, two):
                chosen: Any = chosen_adapters(made.model, lora)
                attach_adapters(made, chosen, precision=model.precision, dropout=lora.dropout)
    batch = shape.pack(model).with_method(AdapterDropout(seed=0))
    return added_traffic(one, two, batch, width=model.hidden_size)


def added_traffic(
    less: nn.Module, more: nn.Module, batch: PackedBatch, *, width: int
) -> tuple[LayerTraffic, LayerTraffic]:
    """Memory traffic of network `more` minus that of `less`, as (forward pass, backward pass).

    `batch` is a pack on the device `meta`, and `width` the width of both networks.
    """
    passes = [_pass_traffic(network, batch) for network in (less, more)]
    unit = 2 * len(batch.segment_T) * width
    forward, backward = (
        LayerTraffic.between(*pair, unit=unit) for pair in zip(*passes, strict=True)
    )
    return forward, backward


def _pass_traffic(
    network: nn.Module, batch: PackedBatch
) -> tuple[OperationCounter, OperationCounter]:
    network.train().to(META)
    forward, backward = OperationCounter(OPERATOR_BYTES), OperationCounter(OPERATOR_BYTES)
    level_M = torch.empty(batch.num_levels, device=META)
    with CudaKernels(), forward:
        out_TC = network(batch.latent_TC.float(), level_M, batch)
    with backward:
        out_TC.sum().backward()
    return forward, backward

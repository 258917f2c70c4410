"""Activations that layers save for backward, traced in passes over packs on the meta device.

A layer of each stack runs once, and then again on its own output. The tensors that autograd saves
in the second run, and not in the first, are what a layer adds behind another layer. Their size is a
linear function of the tokens of latents, texts and sounds, and of the samples of a pack, which
packs of equal samples determine. Bytes are those in bfloat16, with the kernels of a GPU.
"""

# S places of all cubes, C cubes, B places of a cube, H heads, K head width

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from dit.batch import SOUND, PackedBatch, SequenceShard
from dit.config import ContextComm, ModelConfig, Precision
from dit.config.sparsity import CUBE
from dit.models.layer_spec import LayerSpec, NetworkSpec, ReferencesAlone
from dit.models.registry import has_sound, network_spec
from dit.models.stacks.stacked_transformer import StackedTransformer
from dit.sizing.cuda_kernels import CudaKernels, FusedAttention
from dit.sizing.inventory import alone
from dit.sizing.meta_network import meta_pack, meta_pass, replaced, stage_on_meta, text_rows

_SIDE, _SOUND = 16, 256
_SAMPLES = 2  # one sample is in joint order already, and nothing is copied


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes saved for backward, for each token or sample.

    `token` (latents) and `sound` are for tokens of a rank, `text` and `sample` for those of a whole
    pack. In layers of joint attention context ranks divide the text, whose tokens count as latents.
    """

    token: float = 0.0
    text: float = 0.0
    sample: float = 0.0
    sound: float = 0.0

    def __add__(self, other: Kept) -> Kept:
        return Kept(*(getattr(self, x.name) + getattr(other, x.name) for x in fields(Kept)))

    def __sub__(self, other: Kept) -> Kept:
        return self + other.times(-1)

    def times(self, factor: float) -> Kept:
        return Kept(*(getattr(self, x.name) * factor for x in fields(Kept)))

    def of(
        self, *, tokens: float, text: float = 0.0, samples: float = 0.0, sound: float = 0.0
    ) -> float:
        """Bytes saved for a pack of `tokens` (latents), `text`, `sound` and `samples`.

        `tokens` and `sound` are numbers of tokens of a rank, `text` that of the pack.
        """
        rows = self.token * tokens + self.sound * sound
        return rows + self.text * text + self.sample * samples


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Bytes saved for backward: of bfloat16 tensors (`narrow`), and of all others."""

    narrow: Kept
    others: Kept

    def of(self, precision: Precision) -> Kept:
        return self.narrow.times(2 if precision is Precision.FP32 else 1) + self.others


def kept_by_layers(model: ModelConfig) -> list[tuple[int, Kept]]:
    """(number of layers, bytes that one of them saves on one rank of `model`), for each stack."""
    counts = [stack.count for stack in network_spec(model).stacks if stack.count]
    return [*zip(counts, _on_rank(model), strict=True)]


@lru_cache(maxsize=4096)  # a plan asks for each layout and each number of recomputed layers
def kept_by_layer(model: ModelConfig) -> Kept:
    """Bytes that a layer of `model` saves on one tensor and context rank, averaged over layers."""
    each = kept_by_layers(model)
    total = sum((kept.times(count) for count, kept in each), Kept())
    return total.times(1 / sum(count for count, _ in each))


def kept_of_text(model: ModelConfig, part: str) -> float:
    """Bytes saved for each text token by the module `part`, which runs over text alone.

    The rank has all captions whole.
    """
    return _traced_on_text(alone(model), part).of(model.precision).text


def _on_rank(model: ModelConfig) -> list[Kept]:
    """Bytes that a layer of each stack saves on one tensor and context rank of `model`.

    A trace on one rank and a trace on a few tensor ranks are compared. They differ in the tensors
    that tensor ranks divide, between a column-parallel and a row-parallel linear. The bytes for any
    number of ranks follow from the difference.
    """
    ranks, whole = model.tensor_model_parallel_size, _traced_in(model)
    more = _exchanged(model, whole)
    if ranks == 1:
        return [one + exchanged for one, exchanged in zip(whole, more, strict=True)]
    few = ranks if ranks % 2 else 2
    split, outside_by = _traced_in(model, tensor=few), ranks if model.sequence_parallel else 1
    found = list[Kept]()
    for one, part, exchanged in zip(whole, split, more, strict=True):
        inside = (one - part).times(few / (few - 1))
        outside = one - inside
        found.append((inside + exchanged).times(1 / ranks) + outside.times(1 / outside_by))
    return found


def _exchanged(model: ModelConfig, alone: Sequence[Kept]) -> list[Kept]:
    """Bytes that attention saves on a context rank in addition to `alone`, for each stack.

    With parallelism over heads and in a ring these bytes do not depend on the number of ranks; with
    gathered keys and values they grow linearly with it.
    """
    ranks, comm = model.context_parallel_size, model.cp_comm_type
    if ranks == 1:
        return [Kept()] * len(alone)

    def more(ranks: int) -> list[Kept]:
        found = _traced_in(model, context=ranks)
        return [one - own for one, own in zip(found, alone, strict=True)]

    if comm is not ContextComm.ALL_GATHER:
        return more(ranks if ranks % 2 else 2)
    two = more(2)
    if ranks == 2:
        return two
    rise = ((one - less).times((ranks - 2) / 2) for less, one in zip(two, more(4), strict=True))
    return [one + by for one, by in zip(two, rise, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """All that a trace depends on: the key under which a process caches it."""

    family: str
    spec: NetworkSpec
    fused: bool
    tensor: int
    context: int
    comm: ContextComm
    model: ModelConfig = field(compare=False)  # a configuration with these values


def _traced_in(model: ModelConfig, *, tensor: int = 1, context: int = 1) -> list[Kept]:
    """Bytes that a layer of each stack saves, on one of `tensor` * `context` ranks."""
    spec, comm = network_spec(model), model.cp_comm_type if context > 1 else ContextComm.A2A
    stacks = (replace(one, count=min(one.count, 2)) for one in spec.stacks)
    fused = model.fused_kernels and not model.compile
    sizes: Any = {"tensor_model_parallel_size": tensor, "context_parallel_size": context}
    form = _Form(
        family=model.family,
        spec=replace(spec, stacks=tuple(stacks)),
        fused=fused,
        tensor=tensor,
        context=context,
        comm=comm,
        model=replace(alone(model), fused_kernels=fused, cp_comm_type=comm, **sizes),
    )
    return [one.of(model.precision) for one in _traced(form)]


@lru_cache(maxsize=256)
def _traced(form: _Form) -> tuple[_Bytes, ...]:
    """Bytes that one layer of each stack saves for backward, in a network of this form.

    The network is divided into one pipeline stage for each layer, and the first stage of each stack
    is built and traced.
    """
    model = form.model
    stacks = [stack for stack in network_spec(model).stacks if stack.count]
    firsts, found = [0, *accumulate(stack.count for stack in stacks)], list[_Bytes]()
    of_packs = replace(model, fused_kernels=True, tensor_model_parallel_size=1)
    for stack, first in zip(stacks, firsts, strict=False):
        network = stage_on_meta(model, stage=first, stages=firsts[-1]).train()
        packs = _packs(of_packs, network.context.share)
        (layer,) = network.stacks[stack.name].layers
        found.append(packs.line_of([_kept_by_next(network, layer, one) for one in packs.all]))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Packs:
    """Packs of equal samples: a first one, then packs with more latent tokens, sound and text.

    Networks without sound have no pack with more sound, and networks whose number of text tokens is
    fixed none with more text.
    """

    all: tuple[PackedBatch, ...]
    texts: Sequence[int]
    """Text tokens of a sample as layers see them, for each pack; some networks pad the text."""

    def line_of(self, kept: Sequence[Counter[bool]]) -> _Bytes:
        """Bytes for each token of latents, text and sound, and each sample.

        `kept` has a counter for each pack: the bytes of bfloat16 tensors at True, of others at
        False.
        """
        return _Bytes(*(self._line([one[narrow] for one in kept]) for narrow in (True, False)))

    def _line(self, kept: Sequence[int]) -> Kept:
        base, wide, *others = kept
        rows, more = (len(one.segment_T) for one in self.all[:2])
        token, text, sound, heard = (wide - base) / (more - rows), 0.0, 0.0, 0
        if self.all[0].others:
            heard, louder = (len(self.all[n].others[SOUND].segment_T) for n in (0, 2))
            sound = (others.pop(0) - base) / (louder - heard)
        if others and self.texts[-1] > self.texts[0]:
            text = (others[0] - base) / (_SAMPLES * (self.texts[-1] - self.texts[0]))
        sample = (base - token * rows - sound * heard) / _SAMPLES - text * self.texts[0]
        return Kept(token, text, sample, sound)


@lru_cache(maxsize=64)
def _packs(model: ModelConfig, share: SequenceShard) -> _Packs:
    """Packs for traces of `model`; each is the shard `share` of a context rank."""
    spec = network_spec(model)
    layers = [stack.layer for stack in spec.stacks if stack.count]
    more: Any = {
        "samples": _SAMPLES,
        # Whole cubes, of which some are chosen.
        "frames": CUBE if any(one.among_cubes for one in layers) else 1,
        "references": any(_sees_references(one) for one in layers),
        "share": share,
    }
    text = min(text_rows(model), model.text_zeros_to or text_rows(model))
    base: dict[str, int] = {"side": _side(model), "text": text}
    if has_sound(model):
        base["sound"] = _SOUND
    grown = [name for name in ("side", "sound", "text") if name in base]
    if spec.text([text]) == spec.text([2 * text]):
        grown.remove("text")
    sizes = [base, *(base | {name: 2 * base[name]} for name in grown)]
    packs = [meta_pack(model, **size, **more) for size in sizes]
    return _Packs(tuple(packs), [spec.text(model.text_in(one))[0] for one in packs])


def _side(model: ModelConfig) -> int:
    """Tokens along a side of the pictures in packs, such that the network accepts twice as many."""
    if model.largest_latent is None:
        return _SIDE
    return min(_SIDE, *(side // model.patch_spatial // 2 for side in model.largest_latent[1:]))


@lru_cache(maxsize=64)
def _traced_on_text(model: ModelConfig, part: str) -> _Bytes:
    network = stage_on_meta(model).train()
    kept, few = [], text_rows(model)
    for text in (few, 2 * few):
        saved = _Saved()
        module = network.get_submodule(part)
        hooks = (
            module.register_forward_pre_hook(lambda *_, saved=saved: saved.__enter__()),
            module.register_forward_hook(lambda *_, saved=saved: saved.__exit__(None, None, None)),
        )
        with CudaKernels():
            meta_pass(network, meta_pack(model, side=_side(model), text=text, samples=_SAMPLES))
        for hook in hooks:
            hook.remove()
        kept.append(saved.bytes(beside=_Saved(), weights=network.parameters()))
    rises = ((kept[1][n] - kept[0][n]) / (_SAMPLES * few) for n in (True, False))
    return _Bytes(*(Kept(text=rise) for rise in rises))


def _sees_references(layer: LayerSpec) -> bool:
    """Whether `layer` runs over reference latents alone, and samples of the run have references."""
    return isinstance(layer.view, ReferencesAlone) and not layer.view.idle


def _kept_by_next(
    network: StackedTransformer, layer: nn.Module, batch: PackedBatch
) -> Counter[bool]:
    """Bytes that `layer` saves for backward in a second run, on its own output.

    `layer` is the only one of the stage `network`. The counter has the bytes of bfloat16 tensors at
    True, those of others at False.
    """
    before, then = _Saved(), _Saved()

    def again(_: Any, inputs: tuple[Any, Any], made: Any) -> None:
        hook.remove()
        with then:
            layer(made, inputs[1])

    hook = layer.register_forward_hook(again)
    sparse = any(stack.layer.among_cubes for stack in network.stack_specs)
    with CudaKernels(), _cubes_in_one_kernel() if sparse else nullcontext(), before:
        meta_pass(network, batch)
    return then.bytes(beside=before, weights=network.parameters())


class _Saved(saved_tensors_hooks):
    """A context that records the memory of all tensors saved for backward."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[torch.UntypedStorage, bool]] = {}  # which stay alive here
        super().__init__(self._keep, lambda x: x)

    def _keep(self, x: Tensor) -> Tensor:
        self.storages[_place(x)] = x.untyped_storage(), x.dtype is torch.bfloat16
        return x

    def bytes(self, *, beside: _Saved, weights: Iterable[Tensor]) -> Counter[bool]:
        """Bytes of bfloat16 tensors (True) and others (False), without `beside` and `weights`."""
        others = {_place(weight) for weight in weights} | beside.storages.keys()
        found = Counter[bool]()
        for key, (storage, narrow) in self.storages.items():
            if key not in others:
                found[narrow] += storage.nbytes()
        return found


def _place(x: Tensor) -> int:
    return StorageWeakRef(x.untyped_storage()).cdata


@contextmanager
def _cubes_in_one_kernel() -> Iterator[None]:
    """A context in which attention among cubes avoids FlexAttention, which `meta` cannot compile.

    The index lists of cubes are not counted in it: see `activation_bytes`.
    """
    from dit.models.attention import cube_kernel  # it takes FlexAttention in

    def attend(placed_CBHK: tuple[Tensor, Tensor, Tensor], *_: Any) -> Tensor:
        q, k, v = (x.flatten(0, 1).transpose(0, 1) for x in placed_CBHK)
        out_HSK: Any = FusedAttention.apply(q, k, v)
        return out_HSK.transpose(0, 1).unflatten(0, placed_CBHK[0].shape[:2])

    with replaced([(cube_kernel, "attend_in_blocks", attend)]):
        yield

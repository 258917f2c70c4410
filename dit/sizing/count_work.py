"""Multiplications of a network, counted in passes over packs of several sizes on the meta device.

Rows of each linear, and queries and keys of each attention, are linear functions of a sample's
tokens and text. Packs of equal samples determine them: one pack, and others with more tokens, more
text and more samples. Optional inputs (references, glyphs, given frames) are absent. Only necessary
work counts: for the head, which may run over text as well, only latent tokens.
"""

# n latent tokens, m text tokens, a tokens of sound of a sample

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from itertools import count as numbers
from typing import Any

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.config import AttentionBackend, ModelConfig
from dit.models.attention import cube_attention
from dit.models.attention import spans as spans_of_packs
from dit.models.attention.kernels import ATTEND
from dit.models.attention.spans import Spans
from dit.models.layers import packed_attention
from dit.models.layers.adaptable import Adaptable
from dit.models.pass_work import Multiplications, PartWork
from dit.models.registry import has_sound, network_spec
from dit.models.stacks.stacked_transformer import StackedTransformer
from dit.sizing.meta_network import meta_pack, meta_pass, replaced, stage_on_meta, text_rows

_SIDE, _SAMPLES, _SOUND = 4, 2, 8
_CONDITIONER, _OUTSIDE, _LAYER = "conditioner", "outside", "layer"


def count_work(model: ModelConfig) -> tuple[PartWork, tuple[PartWork, ...], PartWork]:
    """Multiplications on one rank: (outside the layers, in each layer, in the conditioner).

    The network is built with as many pipeline stages as layers, but only the first and the last
    stage of each stack: layers between them equal the first.
    """
    if model.text_zeros_to is not None:
        model = replace(model, text_pad_to=None)  # captions of any length stay as they are
    counts = [stack.count for stack in network_spec(model).stacks if stack.count]
    ends = [*accumulate(counts)]
    asked = {*(ends[i] - n for i, n in enumerate(counts)), *(end - 1 for end in ends)}
    found = {at: _StageWork.of(model, stage=at, stages=ends[-1]) for at in asked}
    layers = list[PartWork]()
    for end, count in zip(ends, counts, strict=True):
        layers += [found[end - count].part(_LAYER)] * (count - 1) + [found[end - 1].part(_LAYER)]
    outside = [found[at].part(_OUTSIDE) for at in {0, ends[-1] - 1}]
    return sum(outside, PartWork()), tuple(layers), found[0].part(_CONDITIONER)


@dataclass(frozen=True, slots=True)
class _Attended:
    """An attention of a pass over a pack of equal samples."""

    place: str
    width: int  # of all heads together
    queries: int  # of a sample
    keys: int
    seen: float  # pairs of a query and a key for each pair of tokens


@dataclass(slots=True)
class _Pass:
    """The linears and attentions that one pass over a pack computes."""

    rows: Counter[str] = field(default_factory=Counter)
    """Number of rows of each linear's input, by the linear's name."""
    attentions: list[_Attended] = field(default_factory=list)
    place: str = _OUTSIDE


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """A count for one sample as a linear function: sample + n * tokens + m * text + a * sound."""

    sample: int
    n: int
    m: int
    a: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _StageWork:
    """A pipeline stage's passes over packs of several sizes, and the lengths of their samples."""

    network: StackedTransformer
    # With a side of 4 tokens, then with twice the side, text, samples, and sound if there is any.
    passes: tuple[_Pass, ...]
    tokens: tuple[int, ...]  # of a sample of each of the packs, as attention sees it
    texts: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelConfig, *, stage: int, stages: int) -> _StageWork:
        network = stage_on_meta(model, stage=stage, stages=stages).eval()
        base: Any = {"side": _SIDE, "text": text_rows(model), "samples": _SAMPLES, "sound": _SOUND}
        grown = ["side", "text", "samples", *(["sound"] if has_sound(model) else [])]
        sizes = [base, *(base | {name: 2 * base[name]} for name in grown)]
        batches = [meta_pack(model, **one) for one in sizes]
        return cls(
            network=network,
            passes=tuple(_run(network, batch) for batch in batches),
            tokens=tuple(model.attended_in(batch)[0] for batch in batches),
            texts=tuple(network_spec(model).text(model.text_in(batch))[0] for batch in batches),
        )

    def part(self, place: str) -> PartWork:
        """Multiplications at `place`: outside the layers, in a layer, or in the conditioner."""
        linears = (self._linear(name) for name in self.passes[0].rows if self._is_at(name, place))
        of_lines = (*self.passes[:3], *self.passes[4:])
        groups = zip(*(one.attentions for one in of_lines), strict=True)
        attentions = (self._attention(group) for group in groups if group[0].place == place)
        none = Multiplications()
        return PartWork(sum(linears, none), sum(attentions, none))

    def _is_at(self, name: str, place: str) -> bool:
        first = name.partition(".")[0]
        here = _LAYER if first in self.network.stacks else _OUTSIDE
        return place == (_CONDITIONER if first == _CONDITIONER else here)

    def _line(self, base: int, wide: int, long: int, *louder: int) -> _Line:
        """The linear function with these values for the packs.

        They are `base` for the first pack, `wide` for that with more latent tokens, `long` for that
        with more text, and `louder`, if given, for that with more sound.
        """
        n = _slope(wide - base, self.tokens[1] - self.tokens[0])
        m = _slope(long - base, self.texts[2] - self.texts[0])
        a = sum(_slope(one - base, _SOUND) for one in louder)
        return _Line(
            sample=base - n * self.tokens[0] - m * self.texts[0] - a * _SOUND, n=n, m=m, a=a
        )

    def _linear(self, name: str) -> Multiplications:
        base, wide, long, many, *louder = (one.rows[name] for one in self.passes)
        # Rows that a pack has once, as for the guidance embedding; each sample needs them.
        once = 2 * base - many
        packs = (base, wide, long, *louder)
        line = self._line(*((rows - once) // _SAMPLES + once for rows in packs))
        one = Multiplications(line.sample, line.n, line.m, a=line.a)
        if line.n and not self.network.pre_process and self._is_at(name, _OUTSIDE):
            one = Multiplications(n=line.n)  # the head, whose outputs for text nothing reads
        return one.times(self.network.get_parameter(f"{name}.weight").numel())

    def _attention(self, group: Sequence[_Attended]) -> Multiplications:
        """Multiplications for one sample: queries with keys, and attention weights with values.

        `group` is the same attention in the passes over packs of different sizes.
        """
        q, k = self._line(*(a.queries for a in group)), self._line(*(a.keys for a in group))
        of_pairs = Multiplications(
            sample=q.sample * k.sample,
            n=q.sample * k.n + q.n * k.sample,
            m=q.sample * k.m + q.m * k.sample,
            nn=q.n * k.n * group[0].seen,
            nm=q.n * k.m + q.m * k.n,
            mm=q.m * k.m,
            a=q.sample * k.a + q.a * k.sample,
            na=q.n * k.a + q.a * k.n,
            ma=q.m * k.a + q.a * k.m,
            aa=q.a * k.a,
        )
        return of_pairs.times(2 * group[0].width)


def _slope(rise: int, run: int) -> int:
    if not run:  # texts of one length
        return 0
    slope, rest = divmod(rise, run)
    assert not rest, "rows grow with tokens or text, by whole numbers"
    return slope


def _run(network: StackedTransformer, batch: PackedBatch) -> _Pass:
    """The linears and attentions of a forward pass of the stage `network` over `batch`."""
    found = _Pass()

    def count(name: str, _: Any, inputs: tuple[Tensor, ...]) -> None:
        found.rows[name] += inputs[0].numel() // inputs[0].shape[-1]

    linears = [(n, one) for n, one in network.named_modules() if isinstance(one, Adaptable)]
    hooks = [one.register_forward_pre_hook(partial(count, name)) for name, one in linears]
    places = [(one, _LAYER) for one in network.stacks.values()]
    if (conditioner := getattr(network, _CONDITIONER, None)) is not None:
        places.append((conditioner, _CONDITIONER))
    for module, place in places:
        hooks.append(module.register_forward_pre_hook(partial(_goes_to, found, place)))
        hooks.append(module.register_forward_hook(partial(_goes_to, found, _OUTSIDE)))
    with _attention_counted(found, network.model, len(batch.keys)), torch.no_grad():
        meta_pass(network, batch)
    for hook in hooks:
        hook.remove()
    return found


def _goes_to(found: _Pass, place: str, *_: Any) -> None:
    found.place = place


@contextmanager
def _attention_counted(found: _Pass, model: ModelConfig, samples: int) -> Iterator[None]:
    """A context in which attention is recorded in `found` and not computed.

    The pack has `samples` equal samples.
    """
    cubes = (stack.layer.among_cubes for stack in network_spec(model).stacks)
    sparse = next((one.pairs for one in cubes if one), None) or 1.0

    def attend(q_THK: Tensor, _k: Any, _v: Any, spans: Spans, *, seen: float = 1) -> Tensor:
        width, pairs = q_THK.shape[1] * q_THK.shape[2], (spans.lengths[0], spans.key_lengths[0])
        found.attentions.append(_Attended(found.place, width, *pairs, seen))
        return torch.empty_like(q_THK)

    def attend_cubes(qkv: tuple[Tensor, Tensor, Tensor], _: Any, spans: Spans, **__: Any) -> Tensor:
        return attend(*qkv, spans, seen=sparse)

    calls = numbers()

    def masked(q_THK: Tensor, k_SHK: Tensor, *_: Any) -> Tensor:
        if next(calls) % samples == 0:  # each of the equal samples has a call; one is counted
            width, pairs = q_THK.shape[1] * q_THK.shape[2], (len(q_THK), len(k_SHK))
            found.attentions.append(_Attended(found.place, width, *pairs, seen=1))
        return torch.empty_like(q_THK)

    def in_groups(q_THK: Tensor, _k: Any, _v: Any, size: int) -> Tensor:
        width, queries = q_THK.shape[1] * q_THK.shape[2], q_THK.shape[0] // samples
        found.attentions.append(_Attended(found.place, width, queries, size, seen=1))
        return torch.empty_like(q_THK)

    kernel = AttentionBackend.FLASH_2  # that of bfloat16 on the meta device
    own, ATTEND[kernel] = ATTEND[kernel], attend
    try:
        others = [
            (cube_attention, "attend_cubes", attend_cubes),
            (spans_of_packs, "attend_in_groups", in_groups),
            (packed_attention, "masked_attention", masked),
        ]
        with replaced(others):
            yield
    finally:
        ATTEND[kernel] = own

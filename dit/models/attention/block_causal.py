"""Block-causal attention: text is causal; a picture attends to itself and everything before it.

A sample is a sequence of texts and pictures:

    a text token      attends to the keys at its own index and before it
    a picture's token attends to the keys before the end of its picture

Softmax does not depend on the order of keys, so the rows of a sample may have any order. Each query
is in exactly one call, so no results are merged. Queries of pictures use the kernel of the run.
Kernels need each key in exactly one sequence: if a picture does not attend to its whole sample (a
reference does not), its keys are copied. The few queries of text use torch's SDPA with a mask.
"""

# T query tokens, S key tokens, H heads, K head width

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dit.models.attention.spans import Attend, BlockCausal, MaskedCall, Spans
from dit.pack_wire import to_device


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent tokens in the sequence of a sample: a piece of its text, or a whole picture."""

    is_text: bool
    first: int  # index of the first token among the sample's text tokens, or its latent tokens
    count: int


@dataclass(frozen=True, slots=True)
class SequencePlaces:
    """Positions of tokens in the sequence of one sample, int64 [tokens] each, on the CPU."""

    place: Tensor  # position of each token
    end: Tensor  # each token attends to the keys at positions below this
    picture: Tensor  # index of each token's segment; -1 for text

    @classmethod
    def of(cls, segments: Sequence[Segment], *, text: bool) -> SequencePlaces:
        """Positions of a sample's text tokens (`text`) or latent tokens, in the order of the pack.

        `segments` is the whole sequence of the sample, text and pictures.
        """
        starts = [*accumulate((one.count for one in segments), initial=0)]
        numbers = [n for n, one in enumerate(segments) if one.is_text is text]
        parts = [torch.zeros(3, 0, dtype=torch.int64)]
        for number in sorted(numbers, key=lambda n: segments[n].first):
            place = torch.arange(starts[number], starts[number + 1])
            whole = torch.full_like(place, starts[number + 1])
            end = place + 1 if text else whole
            parts.append(torch.stack((place, end, torch.full_like(place, -1 if text else number))))
        return cls(*torch.cat(parts, dim=1))

    def part(self, first: int, count: int) -> SequencePlaces:
        """The positions of `count` tokens, starting with token `first`."""
        here = slice(first, first + count)
        return SequencePlaces(self.place[here], self.end[here], self.picture[here])

    @classmethod
    def joined(cls, parts: Sequence[SequencePlaces]) -> SequencePlaces:
        """Positions of the tokens of all `parts`, concatenated."""
        each = zip(*((one.place, one.end, one.picture) for one in parts), strict=True)
        return cls(*(torch.cat(values) for values in each))


Located = Mapping[int, tuple[int, SequencePlaces]]
"""Maps the index of a sample to (row of its first token, positions of its tokens)."""


def calls_of(queries: Located, keys: Located, *, total: int, device: torch.device) -> BlockCausal:
    """The attention calls for a pack with `total` rows of queries, with indices on `device`.

    `queries` and `keys` have the positions of each sample's tokens; `keys` must hold all keys of
    each sample that has queries.
    """
    rows, seen, of_text, texts = [_NONE], [_NONE], [_NONE], list[MaskedCall]()
    for sample, (first, own) in queries.items():
        key_first, of_keys = keys[sample]
        for number in own.picture.unique().tolist():
            here = (own.picture == number).nonzero().flatten()
            end = own.end[here]
            its_keys = (of_keys.place < end.max()).nonzero().flatten()
            if number >= 0:
                rows.append(here + first)
                seen.append(its_keys + key_first)
                continue
            sees = of_keys.place[its_keys] < end[:, None]
            given = (here + first, its_keys + key_first, sees)
            texts.append(MaskedCall(*(to_device(one, device) for one in given)))
            of_text.append(here + first)
    asked, of_pictures = torch.cat(rows), torch.cat(seen)
    order = torch.cat((asked, *of_text))
    back = torch.full((total,), len(order))
    back[order] = torch.arange(len(order))
    as_they_are = torch.equal(of_pictures, torch.arange(len(of_pictures)))
    spans = [_side_by_side(each) for each in (rows, seen)]
    return BlockCausal(
        rows=to_device(asked, device),
        keys=None if as_they_are else to_device(of_pictures, device),
        pictures=Spans.of(*spans, total=len(asked), device=device),
        texts=tuple(texts),
        back=to_device(back, device),
    )


_NONE = torch.zeros(0, dtype=torch.int64)


def _side_by_side(rows: Sequence[Tensor]) -> list[tuple[int, int]]:
    """(first row, number of rows) of each tensor in the concatenation of all `rows`."""
    ends = accumulate((len(one) for one in rows), initial=0)
    return [(start, len(one)) for start, one in zip(ends, rows, strict=False)]


AttendMasked = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attend_block_causal(
    q_THK: Tensor,
    k_SHK: Tensor,
    v_SHK: Tensor,
    spans: Spans,
    *,
    attend: Attend,
    attend_masked: AttendMasked,
) -> Tensor:
    """The output [T, H, K] of block-causal attention, by the calls in `spans.block_causal`.

    `attend` computes the outputs of pictures, `attend_masked` the outputs of text. Outputs of
    padding are zeros.
    """
    calls = spans.block_causal
    assert calls is not None
    found = list[Tensor]()
    if calls.pictures.lengths:
        k, v = k_SHK, v_SHK
        if calls.keys is not None:
            k, v = (x.index_select(0, calls.keys) for x in (k_SHK, v_SHK))
        found.append(attend(q_THK.index_select(0, calls.rows), k, v, calls.pictures))
    for one in calls.texts:
        k, v = (x.index_select(0, one.keys) for x in (k_SHK, v_SHK))
        found.append(attend_masked(q_THK.index_select(0, one.rows), k, v, one.sees))
    found.append(torch.zeros_like(q_THK[:1]))
    return torch.cat(found).index_select(0, calls.back)


def masked_attention(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, sees_TS: Tensor) -> Tensor:
    """The output [T, H, K] of torch's SDPA; `sees_TS` is True where a query attends to a key."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_SHK, v_SHK))
    return scaled_dot_product_attention(q, k, v, attn_mask=sees_TS)[0].transpose(0, 1)

"""Networks with self-attention of latents and cross-attention to text (DiT, Wan, LTX).

The captions of some published networks are padded with zeros, to which the layers attend.
"""

# T packed tokens, L text tokens, E text width, D model width, K head width

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from dit.batch import TEXT, PackedBatch
from dit.config import ModelConfig
from dit.models.attention.spans import Spans
from dit.models.layer_spec import TOKENS
from dit.models.layers.modulation import TimestepConditioning
from dit.models.layers.packed_attention import AttendedRows, RowConditions
from dit.models.layers.parallel_linear import WholeLinear, dtype
from dit.models.layers.per_sample import PerSample
from dit.models.layers.queries_and_keys import RotaryTable, WholeWidthRotary
from dit.models.stacks.parts import LayerConditions
from dit.models.stacks.stacked_transformer import StackedTransformer


def axis_widths(head: int) -> tuple[int, int, int]:
    """Widths of a head of width `head` that are rotated by frame, by row and by column.

    The widths for row and column are a third of the head each, rounded down to an even number.
    """
    spatial = head // 6 * 2
    return head - 2 * spatial, spatial, spatial


class CrossTransformer(StackedTransformer):
    """Base of networks with cross-attention to text, padded to `model.text_pad_to` tokens."""

    rotary: RotaryTable | WholeWidthRotary
    """The rotary embedding, which each family creates."""

    def prepared(self, batch: PackedBatch) -> PackedBatch:
        return pad_text(batch, self.model.text_pad_to)

    def layout(self, batch: PackedBatch) -> PerSample:
        return self.per_sample(self.my_tokens(batch.level_row_T))

    def cross_conditions(
        self,
        batch: PackedBatch,
        layout: PerSample,
        *,
        timestep: TimestepConditioning,
        text_LD: Tensor,
        of_parts: Mapping[str, Tensor] | None = None,
        **others: AttendedRows,
    ) -> LayerConditions:
        """The inputs of every layer besides tokens, for the tokens of `batch` on this rank.

        `text_LD` are the text states for cross-attention, and `others` further states, by name.
        `of_parts` are inputs that only the layers of one family use.
        """
        angles_TK = self.rotary(batch.position_TA)
        text = AttendedRows(rows_LE=text_LD, spans=spans_of(batch, batch.text_starts))
        return LayerConditions(
            timestep=timestep,
            rows={TOKENS: RowConditions(per_sample=layout, angles_TK=angles_TK)},
            meetings={(TOKENS,): self.context.exchange(batch, rows=len(batch.segment_T))},
            keys={TEXT: text, **others},
            of_parts=of_parts or {},
        )


class TextEmbedding(nn.Module):
    """An MLP that embeds text states, padding included: [L, E] -> [L, D].

    Every tensor rank computes all tokens and has the whole gradient of the weights, so gradients
    are not summed under sequence parallelism.
    """

    def __init__(self, model: ModelConfig):
        super().__init__()
        width = model.hidden_size
        self.linear_1 = WholeLinear(model.crossattn_emb_size, width, dtype=dtype(model))
        self.linear_2 = WholeLinear(width, width, dtype=dtype(model))

    def forward(self, text_LE: Tensor) -> Tensor:
        return self.linear_2(gelu(self.linear_1(text_LE), approximate="tanh"))


def spans_of(batch: PackedBatch, starts: tuple[int, ...]) -> Spans:
    """Spans for attention of this rank's tokens of `batch` to the text states of their samples.

    `starts` are the N + 1 offsets of the samples' text states.
    """
    rows = [(first, stop - first) for first, stop in pairwise(starts)]
    tokens, device = len(batch.segment_T), batch.segment_T.device
    return Spans.of(batch.shared_spans, rows, total=tokens, device=device)


def padded_rows(batch: PackedBatch, length: int | None, text: str = TEXT) -> int:
    """The number of tokens of the text input `text`, with each caption padded to `length` tokens.

    If `length` is None, captions are not padded.
    """
    return batch.text_offsets[text][-1] if length is None else length * batch.num_samples


def pad_text(batch: PackedBatch, length: int | None) -> PackedBatch:
    """A copy of the pack with every caption padded with zeros to `length` tokens.

    If `length` is None, the result is `batch` itself. The published weights of Cosmos and Wan
    attend to this padding.

    Raises:
        ValueError: a caption is longer than `length`.
    """
    if length is None:
        return batch
    for sample, (start, stop) in enumerate(pairwise(batch.text_starts)):
        if stop - start > length:
            raise ValueError(
                f"the caption of sample {batch.keys[sample]!r} has {stop - start} tokens, more than"
                f" model.text_pad_to={length}; raise model.text_pad_to, or prepare the data with"
                " shorter captions"
            )
    starts = tuple(range(0, length * batch.num_samples + 1, length))
    return batch.with_text(TEXT, filled_up(batch.text_LE, batch.text_starts, length), starts)


def filled_up(rows_LE: Tensor, starts: Sequence[int], length: int | None) -> Tensor:
    """`rows_LE` with the rows of each sample padded with zeros to `length` rows.

    If `length` is None, the result is `rows_LE` itself. `starts` are the N + 1 offsets of the
    samples.
    """
    if length is None:
        return rows_LE
    parts, width = [], rows_LE.shape[-1]
    for start, stop in pairwise(starts):
        parts += [rows_LE[start:stop], rows_LE.new_zeros(length - (stop - start), width)]
    return torch.cat(parts)

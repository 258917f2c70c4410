"""Networks with one row of latents and cross-attention to text (DiT, Wan, LTX).

Published weights of several families attend to captions that are padded with zeros.
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
    """Numbers of a head of width `head` that are rotated by frame, by row and by column.

    Rows and columns get a third each, rounded down to an even number; frames get the rest.
    """
    spatial = head // 6 * 2
    return head - 2 * spatial, spatial, spatial


class CrossTransformer(StackedTransformer):
    """A network with cross-attention to text, which is padded to `model.text_pad_to` tokens."""

    rotary: RotaryTable | WholeWidthRotary
    """Rotary positions; each family sets its own."""

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
        """Inputs of every layer besides tokens.

        `others` are more rows for cross-attention by name; `of_parts` are inputs that only parts of
        one family read.
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
    """Embeds the text encoder's output, padding included: two linears [L, E] -> [L, D].

    Every tensor rank has all rows and their whole gradient, so the weights need no mark for
    sequence parallelism.
    """

    def __init__(self, model: ModelConfig):
        super().__init__()
        width = model.hidden_size
        self.linear_1 = WholeLinear(model.crossattn_emb_size, width, dtype=dtype(model))
        self.linear_2 = WholeLinear(width, width, dtype=dtype(model))

    def forward(self, text_LE: Tensor) -> Tensor:
        return self.linear_2(gelu(self.linear_1(text_LE), approximate="tanh"))


def spans_of(batch: PackedBatch, starts: tuple[int, ...]) -> Spans:
    """Spans in which this rank's tokens attend to the text rows of their samples.

    `starts` has the first text row of each sample, and the end of the last.
    """
    rows = [(first, stop - first) for first, stop in pairwise(starts)]
    tokens, device = len(batch.segment_T), batch.segment_T.device
    return Spans.of(batch.shared_spans, rows, total=tokens, device=device)


def padded_rows(batch: PackedBatch, length: int | None, text: str = TEXT) -> int:
    """Number of rows of the text input `text`, if each caption is padded to `length` tokens.

    None stands for no padding.
    """
    return batch.text_offsets[text][-1] if length is None else length * batch.num_samples


def pad_text(batch: PackedBatch, length: int | None) -> PackedBatch:
    """A copy of the pack with every caption padded by zero vectors to `length` tokens.

    With None it is the pack itself. The published weights of Cosmos and of Wan attend to this
    padding.

    Raises:
        ValueError: a caption is longer than `length`.
    """
    if length is None:
        return batch
    for sample, (start, stop) in enumerate(pairwise(batch.text_starts)):
        if stop - start > length:
            raise ValueError(
                f"the caption of sample {batch.keys[sample]!r} has {stop - start} tokens, more than"
                f" model.text_pad_to={length}; raise it, or encode shorter captions"
            )
    starts = tuple(range(0, length * batch.num_samples + 1, length))
    return batch.with_text(TEXT, filled_up(batch.text_LE, batch.text_starts, length), starts)


def filled_up(rows_LE: Tensor, starts: Sequence[int], length: int | None) -> Tensor:
    """The rows of each sample, followed by zeros up to `length` rows; None: `rows_LE` itself.

    `starts` has the first row of each sample, and the end of the last.
    """
    if length is None:
        return rows_LE
    parts, width = [], rows_LE.shape[-1]
    for start, stop in pairwise(starts):
        parts += [rows_LE[start:stop], rows_LE.new_zeros(length - (stop - start), width)]
    return torch.cat(parts)

"""Tokens in the order of their level rows, cut into chunks that each have one row.

The gradient of a row's scale is a sum over its tokens, wherever in the pack they lie: frames that
are given, reference latents and joint rows of latents and text are told levels of their own. So the
tokens are sorted by row, which leaves them in place where they are in order already, and cut after
each CHUNK tokens and after each row. One program takes one such piece, keeps scale and shift of its
row in registers, and writes its part of the sums to a place of its own; a second kernel adds the
parts of a row, first to last. Nothing depends on which program comes first.

The place of the piece of row r in chunk c is c + r. Going through the sorted tokens, each piece
raises c or r, so that no two pieces share a place, and their number is known without asking the
device how long the rows are.
"""

# T tokens, N level rows, S slots: pieces, of which some may be empty

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 32
"""Tokens of a piece at most.

32k tokens are 1024 programs; a part of a sum has 1/16 of the bytes of its tokens in bfloat16.
"""


@dataclass(frozen=True, slots=True)
class RowChunks:
    """Computed on the device, once for all layers of a pass."""

    order_T: Tensor  # int32, tokens by level row, and by place inside of a row
    slots_S3: Tensor  # int32: level row, first token of `order_T`, and the one past the last
    rows_N2: Tensor  # int32: first slot of a level row, and how many hold tokens of it

    @classmethod
    def of(cls, level_row_T: Tensor, rows: int) -> RowChunks:
        """For `rows` level rows, some of which may have no tokens."""
        device, tokens = level_row_T.device, len(level_row_T)
        sorted_T, order_T = level_row_T.sort(stable=True)
        row_N = torch.arange(rows, device=device)
        start_N = torch.searchsorted(sorted_T, row_N)
        stop_N = torch.searchsorted(sorted_T, row_N, right=True)
        first_N = start_N // CHUNK + row_N
        count_N = ((stop_N - 1) // CHUNK - start_N // CHUNK + 1) * (stop_N > start_N)
        slot_S = torch.arange(slots_of(tokens, rows), device=device)
        row_S = torch.searchsorted(first_N, slot_S, right=True) - 1
        chunk_S = slot_S - row_S
        begin_S = torch.maximum(chunk_S * CHUNK, start_N[row_S])
        end_S = torch.minimum((chunk_S + 1) * CHUNK, stop_N[row_S])
        return cls(
            order_T=order_T.int(),
            slots_S3=torch.stack((row_S, begin_S, end_S), dim=1).int(),
            rows_N2=torch.stack((first_N, count_N), dim=1).int(),
        )


def slots_of(tokens: int, rows: int) -> int:
    """S, for so many tokens of so many level rows."""
    return -(-tokens // CHUNK) + rows - 1

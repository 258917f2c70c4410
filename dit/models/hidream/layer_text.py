"""The text that differs from layer to layer: each layer projects its own hidden state of Llama.

This layer text follows the other text of a sample. Between two layers, its rows hold the projection
for the last layer of the network; so that projection reaches the last layer on any pipeline stage.
"""

# B rows of layer text in a pack, X width of all concatenated hidden states, D model width
# T tokens of a stream on this rank, W tokens of the stream on this context rank

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from dit.models.hidream.family import LAYER_TEXT, OwnText
from dit.models.layer_spec import JOINT_TOKENS, TEXT_TOKENS
from dit.models.layers.joint_order import JointOrder, TokenRow
from dit.models.layers.parallel_linear import BuildContext, WholeLinear
from dit.models.stacks.parts import JointConditions
from dit.models.stacks.views import RunningView
from dit.pack_wire import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRows:
    """The rows of the layer text in one stream of tokens."""

    places: Tensor  # int64, rows of the layer text in [0, W)
    rows: int  # W
    is_there_T: Tensor  # bool, whether a token of this rank is layer text

    @classmethod
    def of(cls, places: Tensor, rows: int, my_tokens: Callable[[Tensor], Tensor]) -> PlacedRows:
        there_W = torch.zeros(rows, dtype=torch.bool, device=places.device)
        there_W = there_W.index_fill(0, places, True)
        return cls(places=places, rows=rows, is_there_T=my_tokens(there_W))

    def replaced(self, h_TD: Tensor, by_TD: Tensor) -> Tensor:
        """`h_TD`, in which the rows of the layer text are those of `by_TD`."""
        return torch.where(self.is_there_T[:, None], by_TD, h_TD)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTextRows:
    """The hidden states of the layer text of a pack, and its rows in each stream of tokens."""

    states_BX: Tensor
    source: Tensor  # int64, the row of `states_BX` for each element of `PlacedRows.places`
    placed: Mapping[str, PlacedRows]  # by the name of the stream of tokens
    my_tokens: Callable[[Tensor], Tensor]

    @classmethod
    def of(
        cls,
        states_BX: Tensor,
        lengths: Sequence[int],
        *,
        before: Sequence[int],
        text: TokenRow,
        order: JointOrder,
        my_tokens: Callable[[Tensor], Tensor],
    ) -> LayerTextRows:
        """Computes the rows of the layer text in the text stream `text` and in the joint stream.

        `states_BX` has `lengths[n]` rows for sample n, which come after `before[n]` rows of the
        sample's other texts. `order` is the order of the joint stream.
        """
        first = list(accumulate(lengths, initial=0))
        places, source = [torch.arange(0)], [torch.arange(0)]
        for piece in text.on(text.share.index):
            begin = text.share.index * piece.size - before[piece.sample]  # within the layer text
            here = torch.arange(max(begin, 0), max(begin + piece.real, 0))
            places.append(here - begin + piece.start)
            source.append(here + first[piece.sample])
        both = to_device(torch.stack([torch.cat(places), torch.cat(source)]), states_BX.device)
        latents, rows = order.sizes
        joint = latents + both[0]
        if (back := order.own.to_ranks_W) is not None:
            joint = back[joint]
        wide = {TEXT_TOKENS: (both[0], rows), JOINT_TOKENS: (joint, latents + rows)}
        placed = {name: PlacedRows.of(*where, my_tokens) for name, where in wide.items()}
        return cls(states_BX=states_BX, source=both[1], placed=placed, my_tokens=my_tokens)

    def laid(self, text_BD: Tensor, token_row: str) -> Tensor:
        """A tensor [T, D]: `text_BD` at its rows of the stream `token_row`, zeros elsewhere."""
        at = self.placed[token_row]
        whole_WD = text_BD.new_zeros(at.rows, text_BD.shape[1])
        return self.my_tokens(whole_WD.index_copy(0, at.places, text_BD[self.source]))


class LayerText(MegatronModule):
    """The linear by which a layer projects its own hidden state of the text encoder.

    Every rank has the hidden states of all texts of the pack.
    """

    def __init__(self, context: BuildContext, view: OwnText, *, state: int, width: int):
        super().__init__(config=context.config)
        self.token_row = context.token_row
        self.columns = view.columns(state)
        dtype = context.config.params_dtype
        self.linear = WholeLinear(view.width, width, bias=False, dtype=dtype)

    def forward(self, h_TD: Tensor, rows: LayerTextRows) -> Tensor:
        """`h_TD`, in which the rows of the layer text are this layer's projection."""
        states_BE = rows.states_BX[:, self.columns].to(h_TD.dtype)
        text_TD = rows.laid(self.linear(states_BE), self.token_row)
        return rows.placed[self.token_row].replaced(h_TD, text_TD)


class SeeingOwnText(RunningView):
    """Replaces the layer text before a layer by the layer's projection, and restores it after."""

    view: OwnText

    def modules(self, context: BuildContext, width: int, layer: int) -> dict[str, nn.Module]:
        state = self.view.state(layer)
        assert state is not None, "the last layer sees the text as it is"
        context = replace(context, token_row=self.view.row)
        return {"layer_text": LayerText(context, self.view, state=state, width=width)}

    def seen(self, layer: Any, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        return layer.layer_text(h_TD, conditions.of_parts[LAYER_TEXT])

    def written(self, made_TD: Tensor, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        rows: LayerTextRows = conditions.of_parts[LAYER_TEXT]
        return rows.placed[self.view.row].replaced(made_TD, h_TD)

"""Networks whose layers attend to latents and text jointly (FLUX, Qwen-Image, SD3)."""

# T latent tokens, L text tokens, J = T + L, N samples, C patch features, A axes of positions

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad

from dit.batch import PackedBatch
from dit.config import ModelConfig
from dit.models.attention.block_causal import Segment
from dit.models.layer_spec import (
    JOINT_TOKENS,
    TEXT_TOKENS,
    TOKENS,
    PerBlockModulation,
    RowKind,
    StackSpec,
)
from dit.models.layers.context_parallel import TokenExchange, check_joint_context
from dit.models.layers.joint_order import JointOrder, TextRow, TokenRow, text_row, text_rows
from dit.models.layers.modulation import PerBlockAdaLN, TimestepConditioning
from dit.models.layers.packed_attention import Angles, RowConditions
from dit.models.layers.parallel_linear import BuildContext, Replicated
from dit.models.layers.per_sample import PerSample
from dit.models.stacks.parts import JointConditions
from dit.models.stacks.stack import LayerStack
from dit.models.stacks.stacked_transformer import Blocks, Shapes, StackedTransformer
from dit.pack_wire import to_device

T_EMB = "t_emb"


@dataclass(frozen=True, kw_only=True, slots=True)
class JointLayout:
    """The text of a pack on this rank, the joint order, and the timesteps of all tokens."""

    text: TextRow
    order: JointOrder
    latents: PerSample
    text_per_sample: PerSample
    joint: PerSample


class JointTransformer(StackedTransformer):
    """Base of networks whose layers attend to latents and text jointly.

    Every rank gets the whole text of a pack. `layout.text.of` takes this context rank's shard of
    the text, and `my_tokens` takes this tensor rank's shard of that. `embed` returns the streams
    `TOKENS` and `TEXT_TOKENS`, and the timestep embeddings `T_EMB`, from which modulations are
    computed. The head from `build_head` computes predictions for all latents of this context rank.
    """

    shares_samples, unread = True, (TEXT_TOKENS,)
    padding_has_keys: ClassVar[bool] = True
    """Whether padding to which layers attend has keys like real tokens; if not, its keys are
    zeros."""
    refines_references: ClassVar[bool] = False
    """Whether there are separate layers for references. Then pictures of a sample do not attend to
    each other in layers over latents only."""
    references_meet: ClassVar[bool] = False
    """Whether the references of a sample attend to each other in layers over latents only."""
    text_level: ClassVar[int] = 0
    """Timesteps of text: the k-th group of N rows of `T_EMB`, for N samples; 0 are the timesteps of
    the samples' noisy tokens."""
    rotary: nn.Module | None
    """The rotary embedding of latents and text, which a family creates; None: no rotation."""

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        groups: ProcessGroupCollection,
        vp_stage: int | None,
        stacks: Sequence[StackSpec],
    ):
        super().__init__(config, model, groups, vp_stage, stacks)
        check_joint_context(model.cp_comm_type, groups.cp.size())
        self.rotary = None
        shapes = (shape for stack in stacks for shape in stack.layer.attentions)
        self.attends = {shape.queries for shape in shapes}  # kinds of tokens with self-attention

    def text_lengths(self, batch: PackedBatch) -> list[int]:
        """The number of text tokens of each sample, in all text inputs together; may be 0."""
        return list(batch.text_rows)

    def latents_row(self, batch: PackedBatch) -> TokenRow:
        """The stream of latents, including padding to which layers attend."""
        return TokenRow.of_stream(batch, attended=self.model.attended_in(batch))

    def sequences(self, batch: PackedBatch) -> Sequence[Sequence[Segment]] | None:  # noqa: ARG002
        """The order of texts and pictures in each sample, for block-causal attention.

        None: all tokens of a sample attend to each other.
        """
        return None

    def text_positions(self, batch: PackedBatch) -> Tensor:
        """The positions [L, A] of all text tokens of the pack; zeros mean no rotation."""
        rows = sum(self.text_lengths(batch))
        return batch.position_TA.new_zeros(rows, batch.position_TA.shape[1])

    def hidden_rows(self, batch: PackedBatch) -> Mapping[str, int]:
        share, multiple = self.context.share, self.model.token_multiple
        text = text_rows(self.text_lengths(batch), share=share, multiple=multiple)
        latents, text = (rows // self.token_parts for rows in (len(batch.segment_T), text))
        return {TOKENS: latents, TEXT_TOKENS: text, JOINT_TOKENS: latents + text}

    def layout(self, batch: PackedBatch) -> JointLayout:
        device = batch.segment_T.device
        text = text_row(
            self.text_lengths(batch),
            share=self.context.share,
            multiple=self.model.token_multiple,
            device=device,
        )
        both = (self.latents_row(batch), text.row)
        order = self._order(*both, device=device, sequences=self.sequences(batch))
        text_row_L = text.sample_L + self.text_level * batch.num_samples
        levels = (batch.level_row_T, text_row_L)
        rows = (*levels, order.arranged(levels))
        latents, text_rows_of, joint = (self.per_sample(self.my_tokens(row)) for row in rows)
        return JointLayout(
            text=text, order=order, latents=latents, text_per_sample=text_rows_of, joint=joint
        )

    def token_places(self, batch: PackedBatch, layout: JointLayout) -> Mapping[str, Tensor]:
        """The index in the pack, int64, of each token of this context rank, by stream.

        Text tokens are numbered after all latents.
        """
        (latents_T,) = super().token_places(batch, layout).values()
        text_L = layout.text.source_L + batch.starts[-1]
        joint_J = layout.order.arranged((latents_T, text_L))
        return {TOKENS: latents_T, TEXT_TOKENS: text_L, JOINT_TOKENS: joint_J}

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        return {T_EMB: (batch.num_levels, self.config.hidden_size)}

    def conditions(
        self, blocks: Blocks, batch: PackedBatch, layout: JointLayout
    ) -> JointConditions:
        owners = (layout.latents, layout.text_per_sample, layout.joint)
        each = zip(owners, self._angles(batch, layout), self._keys(batch, layout), strict=True)
        made = [
            RowConditions(per_sample=per_sample, angles_TK=angles, has_key_T=keys)
            for per_sample, angles, keys in each
        ]
        meetings = {
            (TOKENS, TEXT_TOKENS): layout.order.apart,
            (JOINT_TOKENS,): layout.order.joined,
        }
        if RowKind.LATENTS in self.attends:
            meetings[(TOKENS,)] = self._latents_alone(batch)
        if RowKind.TEXT in self.attends:
            order = self._order(layout.text.row, device=batch.segment_T.device)
            meetings[(TEXT_TOKENS,)] = order.apart
        return JointConditions(
            timestep=TimestepConditioning(t_emb_ND=blocks[T_EMB]),
            rows=dict(zip((TOKENS, TEXT_TOKENS, JOINT_TOKENS), made, strict=True)),
            meetings=meetings,
            order=layout.order,
            is_reference_T=self._references(batch),
        )

    def _references(self, batch: PackedBatch) -> Tensor | None:
        """The mask [T] of reference tokens among this tensor rank's latents.

        Returns None if the pack has no references, or if there are no separate layers for
        references.
        """
        if not (self.refines_references and any(batch.references)):
            return None
        return self.my_tokens(batch.is_real_T & ~batch.is_target_T)

    def _latents_alone(self, batch: PackedBatch) -> TokenExchange:
        if self.refines_references and any(batch.references):
            row = TokenRow.of_pictures(batch, references_meet=self.references_meet)
            return self._order(row, device=batch.segment_T.device).apart
        if not self.model.attends_to_padding:
            return self.context.exchange(batch, rows=len(batch.segment_T))
        return self._order(self.latents_row(batch), device=batch.segment_T.device).apart

    def _keys(self, batch: PackedBatch, layout: JointLayout) -> Sequence[Tensor | None]:
        """The masks of tokens that have keys: of latents, of text and of both in joint order.

        A mask is None if all tokens have keys.
        """
        attended = self.model.attended_in(batch)
        if self.padding_has_keys or attended == list(batch.num_tokens):
            return (None,) * 3
        text_L = torch.ones_like(layout.text.source_L, dtype=torch.bool)
        return batch.is_real_T, None, layout.order.arranged((batch.is_real_T, text_L))

    def _order(
        self,
        *rows: TokenRow,
        device: torch.device,
        sequences: Sequence[Sequence[Segment]] | None = None,
    ) -> JointOrder:
        """The joint order of `rows`: each sample's tokens of the first row, then of the next."""
        shared_by = self.groups.tp if self.config.sequence_parallel else None
        options: Any = {"device": device, "shared_by": shared_by, "sequences": sequences}
        return JointOrder.of(rows, context=self.context, **options)

    def rows_beside(self, stack: LayerStack) -> tuple[str, ...]:
        """The streams that exist while `stack` runs: latents and text, or both as one stream."""
        return stack.hidden if JOINT_TOKENS in stack.hidden else (TOKENS, TEXT_TOKENS)

    def _angles(self, batch: PackedBatch, layout: JointLayout) -> Sequence[Angles | None]:
        """Rotary angles of latents, of text, and of both in joint order; None without rotation."""
        if self.rotary is None:
            return (None,) * 3
        latents = self.rotary(batch.position_TA)
        text = self.rotary(layout.text.of(self.text_positions(batch)))
        cos, sin = (layout.order.arranged(pair) for pair in zip(latents, text, strict=True))
        return latents, text, (cos, sin)

    def joined(self, hidden: Blocks, conditions: JointConditions) -> Blocks:
        rows = (hidden[TOKENS], hidden[TEXT_TOKENS])
        return {JOINT_TOKENS: conditions.order.join(rows)}

    def parted(self, hidden: Blocks, conditions: JointConditions) -> Blocks:
        if JOINT_TOKENS not in hidden:
            return hidden
        latents, text = conditions.order.split(hidden[JOINT_TOKENS])
        return {TOKENS: latents, TEXT_TOKENS: text}

    def build_head(
        self,
        token_row: str,
        *,
        modulate_out: Callable[[BuildContext], nn.Module] | None = None,
        bias: bool = True,
    ) -> None:
        """Creates the modulated norm and the output linear, on the last pipeline stage.

        Their input is the stream `token_row`. `modulate_out` builds the modulation of the norm;
        None: a linear of the timestep embedding.
        """
        if self.post_process:
            model, config = self.model, self.config
            context = BuildContext(model=model, config=config, groups=self.groups)
            self.modulate_out = (modulate_out or _modulation)(context)
            sizes = (model.hidden_size, model.output_features)
            self.proj_out = Replicated(*sizes, config=config, bias=bias, token_row=token_row)

    def head(self, blocks: Blocks, batch: PackedBatch, layout: JointLayout) -> Tensor:  # noqa: ARG002
        (adaln,) = self.modulate_out(TimestepConditioning(t_emb_ND=blocks[T_EMB]))
        if JOINT_TOKENS not in blocks:
            made_TC = self.proj_out(adaln.modulate(blocks[TOKENS], layout.latents))
            return self.all_tokens(made_TC)
        joint_JC = self.all_tokens(
            self.proj_out(adaln.modulate(blocks[JOINT_TOKENS], layout.joint))
        )
        return layout.order.latents(joint_JC)


class TextFirstTransformer(JointTransformer):
    """Base of joint networks in which positions of pictures follow those of the caption.

    On the first axis, the positions of a picture's tokens are shifted by the caption's length plus
    `first_place`.
    """

    first_place: ClassVar[int] = 0
    """Position of the first token of a caption on the first axis."""
    text_axes: ClassVar[int] = 1
    """Number of leading axes on which the position of a caption token is its index plus
    `first_place`; it is 0 on other axes."""

    def prepared(self, batch: PackedBatch) -> PackedBatch:
        position_TA = batch.position_TA
        length_N = torch.tensor(self.text_lengths(batch), dtype=position_TA.dtype)
        length_T = to_device(length_N + self.first_place, position_TA.device)[batch.segment_T]
        moved_TA = pad((length_T * batch.is_real_T)[:, None], (0, position_TA.shape[1] - 1))
        return replace(batch, position_TA=position_TA + moved_TA)

    def text_positions(self, batch: PackedBatch) -> Tensor:
        places = [torch.arange(length) + self.first_place for length in self.text_lengths(batch)]
        place_L1 = torch.cat(places).to(batch.position_TA.dtype)[:, None]
        place_LA = place_L1.expand(-1, self.text_axes)
        rows_LA = pad(place_LA, (0, batch.position_TA.shape[1] - self.text_axes))
        return to_device(rows_LA.contiguous(), batch.position_TA.device)


def _modulation(context: BuildContext) -> nn.Module:
    width = context.config.hidden_size
    return PerBlockAdaLN(context, width, PerBlockModulation(), parts=1, gated=False)

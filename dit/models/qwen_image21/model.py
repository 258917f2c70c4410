"""Qwen-Image-2.1: layers over a sequence of texts and pictures, with block-causal attention."""
# T packed tokens, L text tokens, N samples, M timesteps, C patch features, D model width
# A axes of positions, E text width, R pictures of a sample

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn.functional import gelu

from dit.batch import TEXT, Grid, PackedBatch
from dit.models.attention.block_causal import Segment
from dit.models.layer_spec import JOINT_TOKENS, LEVEL_WAVES, TEXT_TOKENS, TOKENS
from dit.models.layers.adaptable import sees_part_of_tokens
from dit.models.layers.modulation import PrecomputedAdaLN, SharedModulations, TwoLinears, sinusoid
from dit.models.layers.parallel_linear import BuildContext, Replicated, transformer_config
from dit.models.layers.queries_and_keys import CentredNorm, RotaryTable
from dit.models.layers.token_refiner import by_sample
from dit.models.qwen_image21.family import (
    EPS,
    MOST_REFERENCES,
    THETA,
    VECTORS,
    QwenImage21Config,
    qwen_image21_stack,
)
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, JointTransformer
from dit.models.stacks.stacked_transformer import Blocks, Shapes
from dit.pack_wire import to_device

X = TypeVar("X")


class QwenImage21Network(JointTransformer):
    """Denoiser of Qwen-Image-2.1: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `QwenImage21Transformer2DModel`. A sample is a sequence of
    texts with references between them, then its picture. It has two timestep embeddings: for its
    picture that of its noise level; for texts and references that of level 0 with
    `causal_condition`, else also that of its noise level. The first pipeline stage computes all
    modulations, 5 vectors per embedding, and sends them with the hidden states.
    """

    text_level = 1

    def __init__(
        self, model: QwenImage21Config, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, (qwen_image21_stack(model),))
        self.rotary = RotaryTable(model.rope_axes, (THETA,) * 3)
        if self.pre_process:
            made: Any = {"config": config, "bias": False}
            text, sizes = model.crossattn_emb_size, (width, width)
            self.patches = Replicated(model.patch_features, width, token_row=TOKENS, **made)
            self.text_norm = CentredNorm(text, eps=EPS, dtype=config.params_dtype)
            sees_part_of_tokens(self.text_norm, config)
            of_text: Any = {"widths": sizes, "activation": partial(gelu, approximate="tanh")}
            self.text_embedder = TwoLinears(text, token_row=TEXT_TOKENS, **of_text, **made)
            self.told = TwoLinears(LEVEL_WAVES, **made)
            context = BuildContext(model=model, config=config, groups=groups)
            self.modulations = SharedModulations(context, width, VECTORS)
        self.build_stacks()
        self.build_head(
            JOINT_TOKENS,
            modulate_out=lambda context: PrecomputedAdaLN(
                context.config, first=VECTORS["blocks"], gated=False, shifted=False
            ),
            bias=False,
        )

    def sequences(self, batch: PackedBatch) -> Sequence[Sequence[Segment]]:
        found = []
        samples = zip(_samples(batch), batch.num_tokens, strict=True)
        for (texts, grids), tokens in samples:
            sizes = [math.prod(grid) for grid in grids]
            own = tokens - sum(sizes)
            # The target is the first of the latents, but the last in the sequence.
            firsts = accumulate(sizes, initial=own)
            pictures = [*zip(firsts, sizes, strict=False), (0, own)]
            texts_of = zip(accumulate(texts, initial=0), texts, strict=False)
            both = ((True, texts_of), (False, pictures))
            found.append(_laid(*([Segment(kind, *one) for one in of] for kind, of in both)))
        return found

    def prepared(self, batch: PackedBatch) -> PackedBatch:
        """A copy of `batch` with positions (index in the sequence, row, column).

        The index replaces the picture number, the first axis of `CentredPositions`.
        """
        places = [_places(*sample)[1] for sample in _samples(batch)]
        # The target, whose picture number is 0, comes after all references.
        rows = [[own[-1], *own[:-1], *[0] * (1 + MOST_REFERENCES - len(own))] for own in places]
        position_TA = batch.position_TA
        place_NR = to_device(torch.tensor(rows, dtype=position_TA.dtype), position_TA.device)
        place_T = place_NR[batch.segment_T, position_TA[:, 0].long()]
        moved_TA = torch.cat((place_T[:, None], position_TA[:, 1:]), dim=1)
        return replace(batch, position_TA=moved_TA)

    def text_positions(self, batch: PackedBatch) -> Tensor:
        """The positions [L, A] of text tokens: their index in the sequence, on all A axes."""
        places = [place for sample in _samples(batch) for place in _places(*sample)[0]]
        place_L = torch.tensor(places, dtype=batch.position_TA.dtype)
        place_LA = place_L[:, None].repeat(1, batch.position_TA.shape[1])
        return to_device(place_LA, batch.position_TA.device)

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        width = sum(VECTORS.values()) * self.config.hidden_size
        return {T_EMB: (2 * batch.num_samples, width)}

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype, level_N = self.config.params_dtype, level_M[: batch.num_samples]
        clean_N = torch.zeros_like(level_N) if self.model.causal_condition else level_N
        told_MD = self.told(sinusoid(torch.cat((level_N, clean_N)), LEVEL_WAVES).to(dtype))
        offsets = _texts_in_order(batch)
        text_LE = by_sample([batch.texts[name].to(dtype) for name in offsets], [*offsets.values()])
        text_LE = self.my_tokens(layout.text.of(text_LE))
        return {
            TOKENS: self.patches(self.my_tokens(x_TC.to(dtype))),
            TEXT_TOKENS: self.text_embedder(self.text_norm(text_LE)),
            T_EMB: self.modulations(told_MD),
        }


def _texts_in_order(batch: PackedBatch) -> dict[str, tuple[int, ...]]:
    """The offsets of samples in each text of a pack, by name; the caption is the last text."""
    names = [name for name in batch.text_offsets if name != TEXT]
    return {name: batch.text_offsets[name] for name in (*names, TEXT)}


def _samples(batch: PackedBatch) -> Iterator[tuple[tuple[int, ...], tuple[Grid, ...]]]:
    """Yields (lengths of the texts in order, grids of the references) for each sample."""
    offsets = _texts_in_order(batch).values()
    lengths = ([stop - start for start, stop in pairwise(of)] for of in offsets)
    return zip(zip(*lengths, strict=True), batch.references, strict=True)


def _laid(texts: Sequence[X], pictures: Sequence[X]) -> list[X]:
    """`texts` and `pictures` in the order of the sequence; the last picture is the target.

    There is a text before each reference, and all other texts before the target.
    """
    *references, target = pictures
    count = len(references)
    assert len(texts) > count, "there must be a text before each reference, and the caption"
    pairs = zip(texts[:count], references, strict=True)
    return [*chain.from_iterable(pairs), *texts[count:], target]


def _places(texts: Sequence[int], references: Sequence[Grid]) -> tuple[list[int], list[int]]:
    """(index in the sequence of each text token of a sample, index of each picture).

    `texts` are the lengths of the texts, `references` the grids of the references. A text token
    uses one index, a reference as many as the tokens of its longest side. The target is the last
    picture.
    """
    of_texts, of_pictures, place = list[int](), list[int](), 0
    sides = [max(grid[1:]) for grid in references]
    for is_text, size in _laid([(True, n) for n in texts], [(False, n) for n in (*sides, 0)]):
        if is_text:
            of_texts += range(place, place + size)
        else:
            of_pictures.append(place)
        place += size
    return of_texts, of_pictures

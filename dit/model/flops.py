"""Arithmetic of a pack, from its true geometry: padding and recomputation do not count."""

from __future__ import annotations

from itertools import pairwise

from dit.batch import PackedBatch
from dit.config import ModelConfig


def forward_flops(model: ModelConfig, batch: PackedBatch) -> int:
    """Floating-point operations of one forward pass; a product of matrices counts 2 m n k.

    Linear layers go by real tokens, self-attention by the squares of sample lengths,
    cross-attention by the products of sample and caption lengths, modulation by samples.
    """
    width, rank, samples = model.hidden_size, model.adaln_lora_dim, batch.num_samples
    lengths = batch.num_tokens
    captions = [b - a for a, b in pairwise(batch.text_starts)]
    if model.text_pad_to is not None:
        captions = [model.text_pad_to] * samples
    tokens, text = sum(lengths), sum(captions)
    mask = model.patch_features // model.in_channels if model.concat_padding_mask else 0

    linears = tokens * width * (6 * width + 2 * model.ffn_hidden_size)
    linears += text * model.text_width * 2 * width
    attention = 2 * width * sum(n * (n + m) for n, m in zip(lengths, captions, strict=True))
    modulation = samples * 3 * (width * rank + rank * 3 * width)
    layer = linears + attention + modulation

    ends = tokens * width * (2 * model.patch_features + mask)
    ends += text * model.crossattn_emb_size * (model.crossattn_proj_size or 0)
    ends += samples * (4 * width**2 + rank * 3 * width)  # level embedding, last modulation
    return 2 * (model.num_layers * layer + ends)


def training_flops(model: ModelConfig, batch: PackedBatch) -> int:
    """Operations of a training step on a pack: the backward pass costs twice the forward one."""
    return 3 * forward_flops(model, batch)

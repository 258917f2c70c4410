"""Arithmetic of packed samples, from their true lengths: padding and recomputation do not count."""

from __future__ import annotations

from collections.abc import Sequence

from dit.config import ModelConfig


def forward_flops(model: ModelConfig, *, tokens: Sequence[int], text: Sequence[int]) -> int:
    """Operations of one forward pass over samples of `tokens` patches and `text` caption tokens.

    A product of matrices counts 2 m n k. Linear layers go by real tokens, self-attention by the
    squares of sample lengths, cross-attention by the products of sample and caption lengths,
    modulation by samples.
    """
    width, rank, samples = model.hidden_size, model.adaln_lora_dim, len(tokens)
    if model.text_pad_to is not None:
        text = [model.text_pad_to] * samples
    mask = model.patch_features // model.in_channels if model.concat_padding_mask else 0

    linears = sum(tokens) * width * (6 * width + 2 * model.ffn_hidden_size)
    linears += sum(text) * model.text_width * 2 * width
    attention = 2 * width * sum(n * (n + m) for n, m in zip(tokens, text, strict=True))
    modulation = samples * 3 * (width * rank + rank * 3 * width)
    layer = linears + attention + modulation

    ends = sum(tokens) * width * (2 * model.patch_features + mask)
    ends += sum(text) * model.crossattn_emb_size * (model.crossattn_proj_size or 0)
    ends += samples * (4 * width**2 + rank * 3 * width)  # level embedding, last modulation
    return 2 * (model.num_layers * layer + ends)

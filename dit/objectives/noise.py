"""Standard normal noise for the tokens of a pack, and latents drawn from distributions."""

# T packed tokens, R real tokens, C patch features

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dit.batch import LatentVariance, PackedBatch, Pairs, TokenStream


def draw_latents(batch: PackedBatch, *rngs: torch.Generator) -> PackedBatch:
    """A copy of the pack with latents sampled from the distributions that its shard stores.

    A sample is mean + exp(log variance / 2) * noise (arXiv:1312.6114, Eq. 10). `rngs` is one
    generator, or one for each sample, on the device of the batch. A pack without variances is
    returned unchanged.
    """
    variance = batch.method(LatentVariance)
    if variance is None:
        return batch
    assert batch.share.count == 1, "draws are made before a pack is split"
    std_TC = (variance.logvar_TC.float() / 2).exp()
    latent_TC = batch.latent_TC + std_TC * draw_noise(batch, *rngs)
    return replace(batch, latent_TC=latent_TC).without(LatentVariance)


def draw_noise(batch: TokenStream, *rngs: torch.Generator) -> Tensor:
    """Standard normal noise [T, C], float32, zero on padding.

    Numbers are drawn for the real tokens in pack order, so padding does not change them. `rngs` is
    one generator, or one for each sample. The two samples of a pair get the same noise.
    """
    copies = 2 if Pairs in batch.methods else 1
    rows = [batch.real_tokens // copies] if len(rngs) == 1 else batch.num_tokens
    width = batch.latent_TC.shape[1]
    drawn = zip(rows, rngs, strict=True)
    noise_RC = torch.cat(
        [torch.randn((n, width), generator=rng, device=rng.device) for n, rng in drawn]
    )
    if batch.method(Pairs) is not None:
        of_pairs = noise_RC.split(batch.num_tokens[::2])
        noise_RC = torch.cat([noise for one in of_pairs for noise in (one, one)])
    return insert_padding(noise_RC, batch)


def insert_padding(values_RC: Tensor, batch: TokenStream) -> Tensor:
    """A tensor [T, C] with the rows of `values_RC` at the real tokens and zeros on padding."""
    if not len(values_RC):
        return values_RC.new_zeros(len(batch.is_real_T), values_RC.shape[1])
    # A cumulative count, because nonzero() would wait for the device. Padding before the first real
    # token gets the index -1, which is valid; its row is masked like all padding.
    row_T = batch.is_real_T.cumsum(0) - 1
    return values_RC[row_T].masked_fill(~batch.is_real_T[:, None], 0)

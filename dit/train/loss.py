"""The loss of a pack, from what the network predicts.

1. token_errors      error of each target token, weighted as the objective and the data say
2. loss_of           sum of the errors over tokens, or of samples' means; or the loss of pairs
3. made_latents      sums for mean and deviation of the latents that a student predicts
4. preference_loss   Flow-DPO: pairs of a preferred and a rejected sample

Flow-DPO (arXiv:2305.18290 for language, arXiv:2311.12908 for diffusion, arXiv:2501.13918, Sec. 4.2,
for flow matching) of a pair w, l with one noise and one level:

    loss = -ln sigmoid(margin),  margin = -beta / 2 ((e_w - r_w) - (e_l - r_l))

e is the mean error over a sample's target tokens, and r the mean error of the network without its
adapters. Other code uses sums over a sample, so its beta depends on the sample's size.
"""

# T packed tokens, N samples, P = N / 2 pairs, C patch features

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import softplus

from dit.batch import LATENTS, PackedBatch, Parts, Problem, TokenStream, TokenWeights
from dit.config import LossKind, LossMean, ObjectiveConfig
from dit.objectives.objective import per_token
from dit.objectives.registry import sampling_path
from dit.pack_wire import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Loss of a pack on this rank: the sum of weighted errors, and the count that divides it."""

    total: Tensor  # float32 scalar; for pairs, the sum of their losses on the first context rank
    count: Tensor  # int32 scalar: target tokens, samples or pairs
    # float32, each token's part of `total`; in packs with pairs, or with samples split into two
    # noise levels (`Parts`), each token's part of the mean error of its sample
    error_T: Tensor
    count_N: Tensor  # int32, each sample's part of `count`; 1 in packs with pairs or `Parts`
    # float64 [P, 3], for pairs on the first context rank: margin, e_w - r_w, e_l - r_l
    pairs_P3: Tensor | None = None
    # float32, the error of each token of the other streams of the pack, by name; without gradient
    others: Mapping[str, Tensor] = field(default_factory=dict)
    # float64 [2, 3], in distillation: count, sum and sum of squares of the numbers on this rank in
    # the student's latents (row 0), and in the data's latents of the same samples (row 1)
    made_23: Tensor | None = None

    def of_samples(self, batch: PackedBatch) -> Tensor:
        """(sum of errors, count) of each sample of `batch` on this rank, float64 [N, 2]."""
        return torch.stack([sample_sums(self.error_T, batch), self.count_N.double()], dim=1)

    def of_stream(self, name: str, batch: PackedBatch) -> Tensor:
        """(sum of errors, count) of each sample in the token stream `name`, float64 [N, 2]."""
        stream = batch.others[name]
        sums_N = sample_sums(self.others[name], stream)
        return torch.stack([sums_N, sums_N.new_tensor(stream.shared_loss_tokens)], dim=1)


def sample_sums(values_T: Tensor, batch: TokenStream) -> Tensor:
    """Sums of `values_T` over the tokens of each sample on this rank, float64 [N]."""
    sums_N = torch.zeros(batch.num_samples, dtype=torch.float64, device=values_T.device)
    return sums_N.index_add_(0, batch.segment_T, values_T.double())


def pseudo_huber(error_TC: Tensor, *, c: float) -> Tensor:
    """The pseudo-Huber error sqrt(e² + c²) - c of each number: arXiv:2310.14189, Sec. 3.3.

    It is scaled as in diffusion-pipe, and written as a quotient, because the difference loses its
    digits in float32 if e is below c / 1000. Diffusers' examples multiply it by 2 c, which does not
    change AdamW's steps but does change the bound of the gradient's norm.
    """
    square_TC = error_TC.square()
    return square_TC / ((square_TC + c * c).sqrt() + c)


def token_errors(
    batch: TokenStream, problem: Problem, prediction_TC: Tensor, options: ObjectiveConfig
) -> Tensor:
    """Mean error over the channels of each target token, weighted, float32 [T]; 0 for other tokens.

    If `problem.anchor_TC` is set, `drift_weight` times the squared distance from it is added.
    """

    def away_from(other_TC: Tensor) -> Tensor:
        away_TC = prediction_TC.float() - other_TC
        scale_N = problem.scale_N
        return away_TC if scale_N is None else away_TC * scale_N[batch.segment_T, None]

    error_TC = away_from(problem.target_TC)
    huber = options.loss is LossKind.HUBER
    error_TC = pseudo_huber(error_TC, c=options.huber_c) if huber else error_TC.square()
    if problem.anchor_TC is not None:
        away_TC = away_from(problem.anchor_TC)
        error_TC = error_TC + options.drift_weight * away_TC.square()
    error_T = error_TC.mean(-1)
    error_T = error_T * problem.weight_N[batch.segment_T]
    if (of_data := batch.method(TokenWeights)) is not None:
        error_T = error_T * of_data.weight_T
    # Not a product with the mask: on padding the prediction is meaningless, and may be NaN.
    return error_T.where(batch.is_target_T, 0)


def loss_of(
    batch: PackedBatch,
    problem: Problem,
    prediction_TC: Tensor | Mapping[str, Tensor],
    options: ObjectiveConfig,
    *,
    context: dist.ProcessGroup | None = None,
) -> Loss:
    """Loss of a pack on this rank: the sum of errors of tokens, or of samples' mean errors.

    `options.loss_mean` selects the unit, token or sample. Weights of the objective and of the data
    multiply errors but not counts: a weight of 2 has the gradient of two copies of the sample, and
    the gradients of other samples stay as they are.

    If `problem` has the errors of pairs without adapters (`reference_N`), the result is the
    preference loss, summed over pairs. `context` is the group of context ranks, which have the
    other tokens of the pack.

    If `prediction_TC` has several token streams by name, their losses are added. The mean error of
    a sample's sound is multiplied by `sound_weight`. With loss_mean=token it is also multiplied by
    the number of the sample's frame tokens that have a loss, or of all its frame tokens if none has
    one.
    """
    if isinstance(prediction_TC, Mapping):
        return _of_streams(batch, problem, prediction_TC, options)
    error_T = token_errors(batch, problem, prediction_TC, options)
    if problem.reference_N is not None:
        return preference_loss(
            batch, error_T, problem.reference_N, beta=options.dpo_beta, context=context
        )
    if options.loss_mean is LossMean.TOKEN:
        total, counts = error_T.sum(), batch.shared_loss_tokens
        count = sum(counts)
    else:
        parts = batch.method(Parts)
        read = range(batch.num_samples) if parts is None else parts.of
        # A sample that is split into two noise levels still counts once.
        total = _parts_of_means(error_T, batch, read=read).sum()
        error_T = _parts_of_means(error_T, batch)
        once = int(batch.share.index == 0)  # over context ranks
        counts, count = [once] * batch.num_samples, once * len({*read})
    return Loss(
        total=total,
        count=to_device(torch.tensor(count, dtype=torch.int), error_T.device),
        error_T=error_T,
        count_N=to_device(torch.tensor(counts, dtype=torch.int), error_T.device),
        made_23=made_latents(batch, problem, prediction_TC, options),
    )


def _of_streams(
    batch: PackedBatch,
    problem: Problem,
    prediction_TC: Mapping[str, Tensor],
    options: ObjectiveConfig,
) -> Loss:
    assert problem.reference_N is None, "preferences are of one stream"
    main = loss_of(batch, problem, prediction_TC[LATENTS], options)
    total, count, others = main.total, main.count, dict[str, Tensor]()
    of_tokens = options.loss_mean is LossMean.TOKEN
    if of_tokens and (more := _tokens_of_given(batch)):
        count = count + more
    weight_N = _counted_tokens(batch) if of_tokens else [1] * batch.num_samples
    for name, stream in batch.others.items():
        error_T = token_errors(stream, problem.others[name], prediction_TC[name], options)
        weights_N = torch.tensor(weight_N, dtype=torch.float32) * options.sound_weight
        weight_T = to_device(weights_N, error_T.device)[stream.segment_T]
        total = total + (_parts_of_means(error_T, stream) * weight_T).sum()
        others[name] = error_T.detach()
    return replace(main, total=total, count=count, others=others)


def _counted_tokens(batch: PackedBatch) -> list[int]:
    """Number of main-stream tokens with a loss in each sample; of all its tokens if none has."""
    pairs = zip(batch.loss_tokens, batch.latent_tokens, strict=True)
    return [with_loss or tokens for with_loss, tokens in pairs]


def _tokens_of_given(batch: PackedBatch) -> int:
    """Number of tokens on this rank of the samples that have a loss in another stream only."""
    alone = [
        not with_loss and any(stream.loss_tokens[n] for stream in batch.others.values())
        for n, with_loss in enumerate(batch.loss_tokens)
    ]
    return sum(here for here, only in zip(batch.shared_latent_tokens, alone, strict=True) if only)


@torch.no_grad()
def made_latents(
    batch: PackedBatch, problem: Problem, prediction_TC: Tensor, options: ObjectiveConfig
) -> Tensor | None:
    """`Loss.made_23`: count, sum and sum of squares of a student's latents and of the data's.

    None for a network that is not distilled.
    """
    if problem.made_N is None:
        return None
    noise_T1 = per_token(problem.noise_N.double(), batch)
    raw_TC, state_TC = prediction_TC.detach().double(), problem.input_TC.double()
    made_TC = sampling_path(options).predict(state_TC, raw_TC, noise_T1).latent_TC
    read_T1 = (problem.made_N[batch.segment_T] & batch.is_target_T)[:, None]
    rows = []
    for latent_TC in (made_TC, batch.latent_TC.double()):
        read_TC = latent_TC.masked_fill(~read_T1, 0)
        count = read_T1.sum() * latent_TC.shape[1]
        rows.append(torch.stack([count, read_TC.sum(), read_TC.square().sum()]))
    return torch.stack(rows)


def _parts_of_means(
    error_T: Tensor, batch: TokenStream, *, read: Sequence[int] | None = None
) -> Tensor:
    """Each token's share of the mean error of its sample, [T].

    `read` has the index of a group for each sample; the share is then of the group's mean error.
    """
    tokens = torch.tensor(batch.loss_tokens, dtype=torch.float32)
    if read is not None:
        of_N = torch.tensor(read)
        tokens = torch.zeros(len(of_N)).index_add_(0, of_N, tokens)[of_N]
    return error_T / to_device(tokens.clamp(min=1), error_T.device)[batch.segment_T]


@torch.no_grad()
def mean_errors(
    batch: PackedBatch, error_T: Tensor, *, context: dist.ProcessGroup | None
) -> Tensor:
    """Mean error of each sample over its target tokens on all ranks of `context`, float64 [N]."""
    return _over_context(sample_sums(_parts_of_means(error_T, batch), batch), batch, context)


def _over_context(sums_N: Tensor, batch: PackedBatch, context: dist.ProcessGroup | None) -> Tensor:
    if batch.share.count > 1:
        dist.all_reduce(sums_N, group=context)
    return sums_N


def preference_loss(
    batch: PackedBatch,
    error_T: Tensor,
    reference_N: Tensor,
    *,
    beta: float,
    context: dist.ProcessGroup | None = None,
) -> Loss:
    """The Flow-DPO loss; `reference_N` are the `mean_errors` of the network without adapters.

    The sigmoid needs a sample's tokens on all context ranks. Its slope is therefore computed first,
    and the errors of this rank's tokens are multiplied by it, which gives the exact gradient.
    """
    part_T = _parts_of_means(error_T, batch)
    # Only the first context rank counts the pairs, since each context rank has all of them.
    counts = int(batch.share.index == 0)
    with torch.no_grad():
        error_N = _over_context(sample_sums(part_T, batch), batch, context)
        away_P2 = (error_N - reference_N).view(-1, 2)
        margin_P = -beta / 2 * (away_P2[:, 0] - away_P2[:, 1])
        value = counts * softplus(-margin_P).sum()
        slope_P = beta / 2 * torch.sigmoid(-margin_P)
        slope_N = torch.stack([slope_P, -slope_P], dim=1).flatten().float()
    sloped = (part_T * slope_N[batch.segment_T]).sum()
    pairs = batch.num_samples // 2
    count_N = torch.full((batch.num_samples,), counts, dtype=torch.int, device=error_T.device)
    return Loss(
        total=value.float() + (sloped - sloped.detach()),
        count=torch.full((), counts * pairs, dtype=torch.int, device=error_T.device),
        error_T=part_T,
        count_N=count_N,
        pairs_P3=torch.cat([margin_P[:, None], away_P2], dim=1) if counts else None,
    )

"""FID, KID and CLIP score, from features of generated and real pictures. Pure torch."""

# N pictures, D features

from __future__ import annotations

import torch
from torch import Tensor


def frechet_distance(one_ND: Tensor, other_ND: Tensor) -> float:
    """FID (arXiv:1706.08500, Eq. 6): the distance between Gaussians with the moments of the sets.

    It is biased: compare only sets of equal size, with many more pictures than features.

    Raises:
        ValueError: fewer than two pictures.
    """
    (mean_D, cov_DD), (other_D, other_DD) = _moments(one_ND), _moments(other_ND)
    return gaussian_distance(mean_D, cov_DD, other_D, other_DD)


def gaussian_distance(mean_D: Tensor, cov_DD: Tensor, other_D: Tensor, other_DD: Tensor) -> float:
    """|m - m'|² + tr(C + C' - 2 (C C')^½)."""
    values_D, vectors_DD = torch.linalg.eigh(cov_DD.double())
    root_DD = vectors_DD * values_D.clamp(min=0).sqrt() @ vectors_DD.T
    # C C' has the same eigenvalues as the symmetric C^½ C' C^½: they are real and not negative.
    joint_D = torch.linalg.eigvalsh(root_DD @ other_DD.double() @ root_DD)
    trace = cov_DD.trace() + other_DD.trace() - 2 * joint_D.clamp(min=0).sqrt().sum()
    return float((mean_D - other_D).square().sum() + trace)


def kernel_distance(one_ND: Tensor, other_ND: Tensor) -> float:
    """KID (arXiv:1801.01401, Sec. 3): unbiased squared MMD under the kernel (x y / D + 1)³.

    Raises:
        ValueError: fewer than two pictures.
    """
    _check(one_ND, other_ND)
    x_ND, y_ND = one_ND.double(), other_ND.double()

    def kernel(a_ND: Tensor, b_ND: Tensor) -> Tensor:
        return (a_ND @ b_ND.T / a_ND.shape[1] + 1) ** 3

    def within(a_ND: Tensor) -> Tensor:
        k_NN, n = kernel(a_ND, a_ND), len(a_ND)
        return (k_NN.sum() - k_NN.trace()) / (n * (n - 1))

    return float(within(x_ND) + within(y_ND) - 2 * kernel(x_ND, y_ND).mean())


def clip_score(picture_ND: Tensor, caption_ND: Tensor) -> float:
    """Mean of 100 max(cosine, 0) over pictures with their captions (arXiv:2104.08718, w = 100)."""
    cosine_N = torch.cosine_similarity(picture_ND.double(), caption_ND.double())
    return float(100 * cosine_N.clamp(min=0).mean())


def _moments(features_ND: Tensor) -> tuple[Tensor, Tensor]:
    _check(features_ND)
    x_ND = features_ND.double()
    return x_ND.mean(0), torch.cov(x_ND.T).reshape(x_ND.shape[1], x_ND.shape[1])


def _check(*sets: Tensor) -> None:
    """Refuses features [N, D] of fewer than two pictures, which have no spread."""
    for features_ND in sets:
        if len(features_ND) < 2:
            raise ValueError(
                f"a distance of sets needs at least 2 pictures in each, and one has"
                f" {len(features_ND)}; sample more"
            )

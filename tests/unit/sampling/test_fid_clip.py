"""FID, KID and CLIP score against Gaussians with known answers."""

from __future__ import annotations

import pytest
import torch
from scipy.linalg import sqrtm

from dit.sampling.validation.feature_extractor import (
    clip_score,
    frechet_distance,
    gaussian_distance,
    kernel_distance,
)


def test_distance_of_gaussians_on_the_same_axes() -> None:
    mean, other = torch.tensor([1.0, -2.0]).double(), torch.tensor([0.5, 1.0]).double()
    std, wide = torch.tensor([1.0, 0.2]).double(), torch.tensor([3.0, 0.7]).double()
    found = gaussian_distance(mean, std.square().diag(), other, wide.square().diag())
    assert found == pytest.approx(float(((mean - other) ** 2 + (std - wide) ** 2).sum()))


def test_distance_of_gaussians_on_other_axes_is_that_of_scipy() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5, 5, generator=rng, dtype=torch.float64)
    one, other, zero = a @ a.T, b @ b.T, torch.zeros(5).double()
    root = torch.as_tensor(sqrtm((one @ other).numpy()).real)
    expected = (one + other - 2 * root).trace()
    assert gaussian_distance(zero, one, zero, other) == pytest.approx(float(expected))
    assert gaussian_distance(zero, one, zero, one) == pytest.approx(0, abs=1e-6)
    # Fewer samples than features: the covariance has no inverse.
    flat = b[:, :2] @ b[:, :2].T
    assert gaussian_distance(zero, flat, zero, flat) == pytest.approx(0, abs=1e-6)


def test_fid_of_many_samples_is_that_of_their_gaussians() -> None:
    rng = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 200_000, 3, generator=rng)
    scale, shift = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.0, 1.0, -1.0])
    expected = float(((scale - 1) ** 2 + shift**2).sum())
    assert frechet_distance(one, other * scale + shift) == pytest.approx(expected, abs=0.03)


def test_kid_is_the_sum_over_pairs() -> None:
    x, y = torch.randn(2, 5, 3, dtype=torch.float64)
    y = y[:4] + 1

    def mean(a, b, *, same):
        pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if not (same and i == j)]
        return sum(float(a[i] @ b[j] / 3 + 1) ** 3 for i, j in pairs) / len(pairs)

    expected = mean(x, x, same=True) + mean(y, y, same=True) - 2 * mean(x, y, same=False)
    assert kernel_distance(x, y) == pytest.approx(expected)


def test_kid_of_gaussians_is_the_distance_of_their_moments() -> None:
    """On a line the kernel is 1 + 3 xy + 3 x²y² + x³y³: squared differences of three moments."""
    rng = torch.Generator().manual_seed(0)
    mu, std = 0.5, 1.2
    moments = [(0.0, mu), (1.0, mu**2 + std**2), (0.0, mu**3 + 3 * mu * std**2)]
    expected = sum(w * (a - b) ** 2 for w, (a, b) in zip((3, 3, 1), moments, strict=True))
    draws = torch.randn(400, 2, 50, 1, generator=rng, dtype=torch.float64)
    found = torch.tensor([kernel_distance(x, mu + std * y) for x, y in draws])
    same = torch.tensor([kernel_distance(x, y) for x, y in draws])
    for values, value in ((found, expected), (same, 0.0)):
        error = values.std() / len(values) ** 0.5
        assert abs(values.mean() - value) < 4 * error
    assert found.mean() > 10 * same.mean().abs()


def test_clip_score_is_the_mean_cosine_without_negative_ones() -> None:
    pictures = torch.tensor([[2.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    captions = torch.tensor([[5.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    assert clip_score(pictures, captions) == pytest.approx(100 * (1 + 2**-0.5 + 0) / 3)


def test_one_picture_has_no_distance() -> None:
    one, two = torch.zeros(1, 3), torch.zeros(2, 3)
    for distance in (frechet_distance, kernel_distance):
        with pytest.raises(ValueError, match="at least 2 pictures"):
            distance(two, one)

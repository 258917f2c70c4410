"""A bound of the difference between two updates of Adam whose gradients differ by rounding.

Adam (arXiv:1412.6980, Algorithm 1) divides a gradient by its own size: if the gradient of an
element is only rounding, as when contributions cancel, the update is a step of full length in a
direction that depends on the order of sums. So a bound on weights follows from each element's
gradients.
"""

from __future__ import annotations

from torch import Tensor


def update_gaps(r: float | Tensor, mean_square: Tensor, *, eps: float) -> Tensor:
    """Upper bounds of |u - u'| of each element, if all gradients so far differ by up to `r`.

    u = m / (s + eps) is Adam's update without the learning rate, where m is the mean of the
    gradients and s the root of `mean_square`, the mean of their squares, both bias-corrected. The
    weights of m add up to 1, and s is a norm, so each of m and s changes by at most r. From u - u'
    = (m - m') / (s + eps) + u' (s' - s) / (s + eps), and |u'| <= 1.02 for up to five updates with
    the usual betas (Cauchy and Schwarz), the gap is at most 2.02 r / (s + eps), and 2.04.
    """
    return (2.02 * r / (mean_square.sqrt() + eps)).clamp(max=2.04)

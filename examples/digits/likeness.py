"""Compares sets of digits or clips by principal components of the pixels of real ones.

That digits are read as prompted says little about a sampler's steps: one fixed picture of each
digit would be read right, too. So there are two figures:

spread    mean variance within a digit, or within clips of a caption, over the components
distance  Fréchet distance (arXiv:1706.08500, Eq. 6) of all pictures together to the real ones, or
          to a teacher's pictures, minus the distance between two sets of the teacher's
"""

# N pictures or clips; P pixels; D components

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COMPONENTS = 20


@dataclass(frozen=True, kw_only=True)
class Components:
    """Principal components of real digits or clips, and the coordinates of the digits or clips."""

    mean_P: np.ndarray
    axes_DP: np.ndarray
    real_ND: np.ndarray
    real_labels: Sequence[Hashable]

    @classmethod
    def of(cls, real_NP: np.ndarray, labels: Sequence[Hashable]) -> Components:
        """Computes the components of real pictures [N, P], whose digit or caption is in `labels`.

        Only the first COMPONENTS of them are kept.
        """
        mean_P = real_NP.mean(0)
        *_, axes_PP = np.linalg.svd(real_NP - mean_P, full_matrices=False)
        axes_DP = axes_PP[:COMPONENTS]
        real_ND = (real_NP - mean_P) @ axes_DP.T
        return cls(mean_P=mean_P, axes_DP=axes_DP, real_ND=real_ND, real_labels=labels)

    def places(self, pixels_NP: np.ndarray) -> np.ndarray:
        """Coordinates [N, D] of pictures [N, P] along the components."""
        return (pixels_NP - self.mean_P) @ self.axes_DP.T

    def figures(
        self,
        pixels_NP: np.ndarray,
        labels: Sequence[Hashable],
        teacher: Sequence[np.ndarray] = (),
        teacher_labels: Sequence[Hashable] = (),
    ) -> dict[str, Any]:
        """Spread and distance of generated pictures [N, P], by name, and figures for comparison.

        `teacher` are pixels [N, P] of two sets of the teacher's pictures; without them the distance
        is that to the real pictures. A figure is None if there are too few pictures for it.
        """
        made_ND = self.places(pixels_NP)
        found = {"spread": spread(made_ND, labels)}
        found["spread_real"] = spread(self.real_ND, self.real_labels)
        if not teacher:
            return found | {"distance": _distance(made_ND, self.real_ND)}
        one_ND, other_ND = (self.places(pixels) for pixels in teacher)
        between, away = _distance(one_ND, other_ND), _distance(made_ND, one_ND)
        nearer = None if between is None or away is None else away - between
        return found | {
            "distance": nearer,
            "spread_teacher": spread(one_ND, teacher_labels),
            "distance_of_teacher": between,
        }


def spread(places_ND: np.ndarray, labels: Sequence[Hashable]) -> float | None:
    """The variance within a label, averaged over labels and components.

    None if no label has two pictures.
    """
    each = dict.fromkeys(labels)
    rows = [[row for row, of in enumerate(labels) if of == label] for label in each]
    variances = [places_ND[of_one].var(0, ddof=1).mean() for of_one in rows if len(of_one) > 1]
    return float(np.mean(variances)) if variances else None


def _distance(one_ND: np.ndarray, other_ND: np.ndarray) -> float | None:
    import torch  # late: --help needs none of it

    from dit.sampling.validation.feature_extractor import frechet_distance

    if min(len(one_ND), len(other_ND)) < 2:
        return None
    return frechet_distance(torch.from_numpy(one_ND), torch.from_numpy(other_ND))


def figure_lines(report: dict[str, Any]) -> list[str]:
    """Lines to print about the result of `Components.figures`; empty if a figure is None."""
    if report.get("spread") is None or report["distance"] is None:
        return []
    whose = "teacher" if "spread_teacher" in report else "real"
    other = report[f"spread_{whose}"]
    said = f"spread {report['spread']:.3g}, {report['spread'] / other:.0%} of that of"
    said += " the teacher's" if whose == "teacher" else " real ones"
    away = f"distance to them {report['distance']:.3g}"
    if whose == "teacher":
        between = report["distance_of_teacher"]
        away += f" more than the {between:.3g} between two sets of the teacher"
    return [f"{said}; {away}"]

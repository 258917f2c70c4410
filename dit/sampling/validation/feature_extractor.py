"""Features of pictures and captions, from a network that the user names, and metrics of them.

    FILE.pt   TorchScript: uint8 [N, 3, H, W] in, [N, D] out, as the Inception of FID's authors
    FOLDER    a vision model of Transformers; CLIP and SigLIP also give features of captions

Neither contains Python code, so a configuration file cannot run code. FID, KID and CLIP score are
computed in torch from features of generated and real pictures.
"""

# N pictures, D features; H W 3 rows, columns, colours

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dit.system_errors import explained


class FeatureExtractor:
    """A network that computes features of pictures on `device`, and of captions on the CPU.

    Between calls of `pictures` its weights are in host memory.
    """

    def __init__(self, name: str, device: torch.device):
        """Opens the network `name`, a TorchScript file or a folder of Transformers.

        Raises:
            ValueError: the file or folder does not exist, or holds no such network.
        """
        self.device = device
        self.processor: Any = None
        try:
            self.network: Any = self._open(name)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"validation.feature_extractor={name} cannot be opened ({explained(error)}); name a"
                " TorchScript file (.pt), or the folder of a vision model of Transformers"
            ) from error
        self.network.eval()
        self.reads_captions = hasattr(self.network, "get_text_features")

    def _open(self, name: str) -> Any:
        if Path(name).suffix == ".pt":
            return torch.jit.load(name, map_location="cpu")
        from transformers import AutoModel, AutoProcessor

        self.processor = AutoProcessor.from_pretrained(name, local_files_only=True)
        return AutoModel.from_pretrained(name, local_files_only=True)

    @torch.no_grad()
    def pictures(self, firsts: Sequence[np.ndarray]) -> Tensor:
        """Features [N, D], on the CPU, of uint8 pictures [H, W, 3], whose sizes may differ."""
        self.network.to(self.device)
        found = [self._picture(picture_HW3) for picture_HW3 in firsts]
        self.network.to("cpu")
        return torch.stack(found)

    def _picture(self, picture_HW3: np.ndarray) -> Tensor:
        if self.processor is None:
            pixels_13HW = torch.from_numpy(picture_HW3.copy()).permute(2, 0, 1)[None]
            return self.network(pixels_13HW.to(self.device))[0].flatten().float().cpu()
        given = self.processor(images=picture_HW3, return_tensors="pt").to(self.device)
        if self.reads_captions:
            return _vector(self.network.get_image_features(**given))
        return _vector(self.network(**given))

    @torch.no_grad()
    def captions(self, texts: Sequence[str]) -> Tensor:
        """Features [N, D] of `texts`, on the CPU; only for networks with `reads_captions`."""
        given = self.processor(text=list(texts), return_tensors="pt", padding=True, truncation=True)
        found = self.network.get_text_features(**given)
        return torch.stack([_vector(one[None]) for one in getattr(found, "pooler_output", found)])


def _vector(answer: Any) -> Tensor:
    """The features [D] in `answer`, the output of a Transformers model for one sample."""
    if not isinstance(answer, Tensor):
        pooled = getattr(answer, "pooler_output", None)
        answer = pooled if pooled is not None else answer.last_hidden_state.mean(1)
    return answer[0].flatten().float().cpu()


def frechet_distance(one_ND: Tensor, other_ND: Tensor) -> float:
    """FID (arXiv:1706.08500, Eq. 6) of two sets of features [N, D].

    It is the distance between Gaussians with the moments of the sets. It is biased: compare only
    sets of equal size, with many more pictures than features.

    Raises:
        ValueError: a set has fewer than two pictures.
    """
    (mean_D, cov_DD), (other_D, other_DD) = _moments(one_ND), _moments(other_ND)
    return gaussian_distance(mean_D, cov_DD, other_D, other_DD)


def gaussian_distance(mean_D: Tensor, cov_DD: Tensor, other_D: Tensor, other_DD: Tensor) -> float:
    """Distance of two Gaussians by mean and covariance: |m - m'|² + tr(C + C' - 2 (C C')^½)."""
    values_D, vectors_DD = torch.linalg.eigh(cov_DD.double())
    root_DD = vectors_DD * values_D.clamp(min=0).sqrt() @ vectors_DD.T
    # C C' has the same eigenvalues as the symmetric C^½ C' C^½: they are real and not negative.
    joint_D = torch.linalg.eigvalsh(root_DD @ other_DD.double() @ root_DD)
    trace = cov_DD.trace() + other_DD.trace() - 2 * joint_D.clamp(min=0).sqrt().sum()
    return float((mean_D - other_D).square().sum() + trace)


def kernel_distance(one_ND: Tensor, other_ND: Tensor) -> float:
    """KID of two sets of features [N, D] (arXiv:1801.01401, Sec. 3).

    It is the unbiased squared MMD under the kernel (x y / D + 1)³.

    Raises:
        ValueError: a set has fewer than two pictures.
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
    """CLIP score, the mean of 100 max(cosine, 0) over pictures with their captions.

    Both are features [N, D] (arXiv:2104.08718, with w = 100).
    """
    cosine_N = torch.cosine_similarity(picture_ND.double(), caption_ND.double())
    return float(100 * cosine_N.clamp(min=0).mean())


def _moments(features_ND: Tensor) -> tuple[Tensor, Tensor]:
    _check(features_ND)
    x_ND = features_ND.double()
    return x_ND.mean(0), torch.cov(x_ND.T).reshape(x_ND.shape[1], x_ND.shape[1])


def _check(*sets: Tensor) -> None:
    """Checks that each set of features [N, D] has at least two rows, whose spread a distance needs.

    Raises:
        ValueError: a set has fewer rows.
    """
    for features_ND in sets:
        if len(features_ND) < 2:
            raise ValueError(
                "the distance between two sets needs at least 2 pictures in each, but one has"
                f" {len(features_ND)}; raise validation.num_captions"
            )

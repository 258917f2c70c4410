"""Features of pictures and captions, from a network that the user names.

    FILE.pt   TorchScript: uint8 [N, 3, H, W] in, [N, D] out, as the Inception of FID's authors
    FOLDER    a vision model of Transformers; CLIP and SigLIP also give features of captions

Neither contains Python code, so a configuration file cannot run code.
"""

# N pictures, D features; H W 3 rows, columns, colours

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


class FeatureExtractor:
    """A network that stays on the CPU and moves to `device` only while it computes."""

    def __init__(self, name: str, device: torch.device):
        """Opens the network `name`.

        Raises:
            ValueError: the file or folder does not exist, or holds no such network.
        """
        self.device = device
        self.processor: Any = None
        try:
            self.network: Any = self._open(name)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"validation.feature_extractor={name} cannot be opened ({error}); name a"
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
        """Features [N, D] on the CPU of uint8 pictures [H, W, 3] of any sizes."""
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
        """Features [N, D] on the CPU, for a network with `reads_captions`."""
        given = self.processor(text=list(texts), return_tensors="pt", padding=True, truncation=True)
        found = self.network.get_text_features(**given)
        return torch.stack([_vector(one[None]) for one in getattr(found, "pooler_output", found)])


def _vector(answer: Any) -> Tensor:
    """One row of features from the output of a Transformers model, whichever form it has."""
    if not isinstance(answer, Tensor):
        pooled = getattr(answer, "pooler_output", None)
        answer = pooled if pooled is not None else answer.last_hidden_state.mean(1)
    return answer[0].flatten().float().cpu()

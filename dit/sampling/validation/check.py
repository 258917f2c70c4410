"""What a start refuses of the samples at validation, for a dry run: no text is encoded for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dit.config import RunConfig
from dit.data import dataset_card
from dit.sampling.prompts import read_prompts
from dit.sampling.validation.feature_extractor import FeatureExtractor
from dit.sampling.validation.prompt_requests import (
    check_encoder,
    check_prompts,
    find_decoder,
    latent_stride,
)
from dit.sampling.validation.samples import no_pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class _CardAndConfig:
    config: RunConfig
    card: dict[str, Any] | None


def check_samples(config: RunConfig) -> None:
    """Checks prompts, their pictures, the text encoder and the network of the quality metrics.

    Raises:
        ValueError: one of them is missing or does not fit.
    """
    c, run = config.validation, _CardAndConfig(config=config, card=dataset_card(config))
    prompts = []
    if c.prompts_file is not None:
        prompts = read_prompts(Path(c.prompts_file), option="validation.prompts_file")
    check_encoder(run, check_prompts(run, prompts))
    is_known = "stride" in (run.card or {}).get("latent", {})
    asks = c.feature_extractor is not None or (bool(prompts) and not is_known)
    decoder = find_decoder(run)[0] if asks else None
    latent_stride(decoder, run, needed=bool(prompts))
    if c.feature_extractor is not None:
        if decoder is None:
            raise no_pictures(c.feature_extractor)
        FeatureExtractor(c.feature_extractor, torch.device("cpu"))

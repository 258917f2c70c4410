"""What a run samples at each validation: prompts of a file, captions of held-out samples.

1. open    prompts are encoded, captions found, the decoder is looked for: once, before training
2. sample  each replica makes its share, on all of its ranks
3. write   PNG or MP4 for each, a grid, samples.json, in validation_generation/step_XXXXXXXX

Where the decoder is not on this machine, latents are written and shown in false colours.
"""

# C latent channels; F H W frames, rows, columns; L text tokens, E text width

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_prep.cards import CARD_NAME
from data_prep.processors import Processor
from dit.config import RunConfig
from dit.generation import SamplingSettings, generate_latents
from dit.parallel.first import from_first
from dit.parallel.groups import device
from dit.parallel.watch import doing
from dit.quality import clip_score, frechet_distance, kernel_distance
from dit.train.run import Drawn, Run, Samples
from recipes.features import Extractor
from recipes.picture_files import Picture, false_colours, write_listing, write_picture
from recipes.prompts import read_prompts, unused
from recipes.sizes import cut
from recipes.validation_wanted import (
    Wanted,
    captions,
    look,
    notes,
    open_decoder,
    wanted_prompt,
)

FOLDER = "validation_generation"


def open_samples(run: Run) -> Samples:
    """Finds all that is sampled, and what for. Collective.

    Raises:
        ValueError: the file of prompts, their text encoder or their size is missing.
    """
    c = run.config.validation
    prompts = []
    if c.prompts_file is not None:
        file = Path(c.prompts_file)
        prompts = read_prompts(file, option="validation.prompts_file")
    with torch.random.fork_rng([]):
        found = from_first(lambda: look(run, prompts))
        decoder = open_decoder(run)[0] if run.replica.reads else None
        extractor = _extractor(run, decoder)
    wanted = [wanted_prompt(prompt, run, found) for prompt in prompts]
    features = None
    if extractor is not None and decoder is not None:
        features = partial(_features, decoder, extractor)
    wanted += captions(run, found, features) if c.num_captions else []
    wanted = [
        replace(one, request=replace(one.request, seed=c.sample_seed + i))
        for i, one in enumerate(wanted)
    ]
    said = [unused(prompts), *notes(wanted, found, guidance=c.guidance)]
    run.notes += [f"samples at each validation: {note}" for note in said if note]
    return ValidationSamples(wanted=wanted, decoder=decoder, extractor=extractor)


def _extractor(run: Run, decoder: Processor | None) -> Extractor | None:
    """The network of the quality metrics, on the ranks that decode.

    Raises:
        ValueError: it is not on this machine, or there is nothing to decode with.
    """
    name = run.config.validation.feature_extractor
    if name is None or not run.replica.reads:
        return None
    if decoder is None:
        raise ValueError(
            f"validation.feature_extractor={name} looks at pictures, and the decoder of the data is"
            " not on this machine; set model.vae_cache_folder, or feature_extractor=null"
        )
    return Extractor(name, device())


def _features(decoder: Processor, extractor: Extractor, latent_CFHW: Tensor) -> Tensor:
    with decoder.visiting(device()):
        return extractor.pictures([decoder.decode(latent_CFHW)[0].numpy()])[0]


@dataclass(frozen=True, kw_only=True)
class ValidationSamples:
    """A round of samples."""

    wanted: list[Wanted]
    decoder: Processor | None
    extractor: Extractor | None

    def __call__(self, run: Run, model: nn.Module) -> Drawn | None:
        folder = _folder(run)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        first, replicas = run.data_ranks.rank(), run.data_ranks.size()
        mine = self.wanted[first::replicas]
        latents = generate_latents(
            model,
            [one.request for one in mine],
            config=run.config,
            settings=_settings(run.config),
        )
        written: list[Any] = []
        if run.replica.reads:
            written = self._write(mine, latents, run, first=first, step=replicas)
        shares: list[Any] | None = None
        if dist.get_rank() == 0:
            shares = [None] * dist.get_world_size()
        dist.gather_object(written, shares)
        if shares is None:
            return None
        every = sorted((one for share in shares for one in share), key=lambda one: one[0])
        entries, firsts, features = zip(*(made for _, *made in every), strict=True)
        grid = write_listing(entries, firsts, folder)
        if self.decoder is None and run.card is not None:  # decode_latents.py needs it
            (folder / CARD_NAME).write_text(json.dumps(run.card, indent=1) + "\n")
        files = [(folder / entry["file"], entry["prompt"]) for entry in entries]
        return Drawn(
            grid=grid,
            videos=[one for one in files if one[0].suffix == ".mp4"],
            quality=self._quality(features),
        )

    def _quality(self, features: Sequence[Tensor | None]) -> dict[str, float]:
        """Metrics of the samples that have a held-out one to be compared with."""
        pairs = [
            (one, made)
            for one, made in zip(self.wanted, features, strict=True)
            if one.real_D is not None and made is not None
        ]
        if self.extractor is None or not pairs:
            return {}
        made_ND = torch.stack([made for _, made in pairs])
        real_ND = torch.stack([one.real_D for one, _ in pairs if one.real_D is not None])
        found = {
            "val_fid": frechet_distance(made_ND, real_ND),
            "val_kid": kernel_distance(made_ND, real_ND),
        }
        if self.extractor.reads_captions:
            said_ND = self.extractor.captions([one.prompt for one, _ in pairs])
            found["val_clip_score"] = clip_score(made_ND, said_ND)
        return found

    def _write(
        self, mine: Sequence[Wanted], latents: Sequence[Tensor], run: Run, *, first: int, step: int
    ) -> list[tuple[int, dict[str, Any], np.ndarray, Tensor | None]]:
        """Number, entry in the list, first frame and features of what this replica made."""
        written = []
        for i, (one, picture) in enumerate(zip(mine, self._pictures(mine, latents), strict=True)):
            number = first + i * step
            made = Picture(
                frames_FHW3=picture,
                prompt=one.prompt,
                seed=one.request.seed,
                settings=_facts(run, one),
                latent_CFHW=latents[i] if self.decoder is None else None,
            )
            features = None
            if self.extractor is not None and one.real_D is not None:
                features = self.extractor.pictures([picture[0]])[0]
            entry = write_picture(made, _folder(run), number)
            written.append((number, entry, picture[0], features))
        return written

    def _pictures(self, mine: Sequence[Wanted], latents: Sequence[Tensor]) -> list[np.ndarray]:
        if self.decoder is None:
            return [false_colours(latent) for latent in latents]
        pictures = []
        with self.decoder.visiting(device()):
            for one, latent in zip(mine, latents, strict=True):
                doing("decoding of samples")
                video = self.decoder.decode(latent.cpu()).numpy()
                pictures.append(cut(video, one.pixels) if one.pixels else video)
        return pictures


def _folder(run: Run) -> Path:
    assert run.folder is not None
    return run.folder / FOLDER / f"step_{run.progress.step:08d}"


def _settings(config: RunConfig) -> SamplingSettings:
    c = config.validation
    return SamplingSettings(num_steps=c.sampling_steps, guidance=c.guidance, sampler=c.sampler)


def _facts(run: Run, one: Wanted) -> dict[str, Any]:
    c, fps = run.config.validation, one.request.fps
    frames, height, width = one.pixels or (None, None, None)
    return {
        "height": height,
        "width": width,
        "num_video_frames": frames,
        "fps": c.fps if math.isnan(fps) else fps,
        "num_steps": c.sampling_steps,
        "guidance": c.guidance,
        "negative_prompt": one.negative,
        "sampler": str(c.sampler),
        "weights": "model" if run.learner.ema is None else "ema",
        "step": run.progress.step,
    }

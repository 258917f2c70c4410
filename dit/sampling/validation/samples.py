"""Generates samples at each validation of a training run, writes them, and measures them.

1. open_samples   once, before training: the requests, the decoder, the feature extractor
2. sample         each data-parallel replica generates its share, on all of its ranks
3. write          PNG or MP4 files, a grid, samples.json, in validation_generation/step_XXXXXXXX
4. quality        FID, KID and CLIP score of samples with captions of held-out samples

Without a decoder on this machine, latents are written and shown in false colours. A run with
adapters also samples without them, from the same noise: those files are in without_adapter/, and
the grid shows both side by side.
"""

# C latent channels; F H W frames, rows, columns; L text tokens, E text width
# N pictures, D features of one

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dit.codecs.dataset_card import CARD_NAME
from dit.codecs.sound import SoundCodec, sound_codec_of_card
from dit.codecs.vae import Codec
from dit.config import RunConfig, ValidationConfig
from dit.data import dataset_card
from dit.distributed.collective_errors import from_first_rank
from dit.distributed.data_parallel import own_passes
from dit.distributed.process_groups import device
from dit.distributed.watchdog import heartbeat
from dit.models.layers.adaptable import adapters_off
from dit.sampling.generate import (
    Generated,
    SamplingSettings,
    check_requests,
    generate_streams,
)
from dit.sampling.grid import beside
from dit.sampling.latent_sizes import cut
from dit.sampling.media_files import (
    LISTING,
    Picture,
    false_colours,
    replace_file,
    waveform_of,
    write_listing,
    write_picture,
)
from dit.sampling.prompts import Prompt, read_prompts, unused
from dit.sampling.validation.feature_extractor import (
    FeatureExtractor,
    clip_score,
    frechet_distance,
    kernel_distance,
)
from dit.sampling.validation.prompt_requests import (
    check_encoder,
    check_prompts,
    find_decoder,
    latent_stride,
    prepare_prompts,
)
from dit.sampling.validation.requests import ValidationRequest, notes, requests_of_captions
from dit.train.train_state import DrawnSamples, Samples, TrainState
from dit.watching import NotShown, watching

FOLDER, WITHOUT = "validation_generation", "without_adapter"


def open_samples(run: TrainState) -> Samples:
    """Prepares the samples that every validation generates; all ranks must call it.

    Notices about the samples are added to `run.notes`.

    Raises:
        ValueError: the file of prompts, the text encoder, a size, a picture or an input is missing.
    """
    c = run.config.validation
    prompts = _prompts(run.config.validation)
    with torch.random.fork_rng([]):
        found = from_first_rank(lambda: prepare_prompts(run, prompts))
        decoder = find_decoder(run)[0] if run.replica.reads else None
        extractor = _extractor(run, decoder)
    wanted, features = list(found.requests), None
    if extractor is not None and decoder is not None:
        features = partial(_features, decoder, extractor)
    wanted += requests_of_captions(run, found, features) if c.num_captions else []
    wanted = [
        replace(one, request=replace(one.request, seed=c.sample_seed + i))
        for i, one in enumerate(wanted)
    ]
    check_requests([one.request for one in wanted], run.config)
    said = [unused(prompts), *notes(wanted, found, guidance=run.config.guidance)]
    run.notes += [f"samples at each validation: {note}" for note in said if note]
    sound = None
    if run.replica.reads and run.card is not None and any(one.request.sound for one in wanted):
        sound = sound_codec_of_card(run.card)
    return ValidationSamples(wanted=wanted, decoder=decoder, extractor=extractor, sound=sound)


def _prompts(validation: ValidationConfig) -> list[Prompt]:
    file = validation.prompts_file
    return [] if file is None else read_prompts(Path(file), option="validation.prompts_file")


def _extractor(run: TrainState, decoder: Codec | None) -> FeatureExtractor | None:
    """The network of the quality metrics, on ranks that decode samples.

    Returns None on other ranks, or if the run names no such network.

    Raises:
        ValueError: the network is not on this machine, or there is no decoder.
    """
    name = run.config.validation.feature_extractor
    if name is None or not run.replica.reads:
        return None
    if decoder is None:
        raise no_pictures(name)
    return FeatureExtractor(name, device())


def no_pictures(extractor: str) -> ValueError:
    """The error of a run that names a network for quality metrics but has no decoder."""
    return ValueError(
        f"validation.feature_extractor={extractor} needs pictures, but the decoder of the data is"
        " not on this machine; set model.vae_cache_folder to the folder that has it, or"
        " validation.feature_extractor=null"
    )


def _features(decoder: Codec, extractor: FeatureExtractor, latent_CFHW: Tensor) -> Tensor:
    with decoder.visiting(device()):
        return extractor.pictures([decoder.decode(latent_CFHW)[0].numpy()])[0]


@dataclass(frozen=True, kw_only=True)
class GeneratedSample:
    """A generated sample whose files have been written, and its features for metrics."""

    number: int
    entry: dict[str, Any]  # its entry in samples.json
    first_HW3: np.ndarray  # its first frame, for the grid
    features_D: Tensor | None  # of its first frame; None if metrics do not use the sample


@dataclass(frozen=True, kw_only=True)
class ValidationSamples:
    """Generates and writes the samples of a validation; a run calls it as `run.samples`."""

    wanted: list[ValidationRequest]
    decoder: Codec | None
    extractor: FeatureExtractor | None
    sound: SoundCodec | None = None
    """Codec of the sound of videos, on the ranks that decode."""
    frozen: dict[int, Generated] = field(default_factory=dict)
    """What was generated without the adapters, by sample number. It is generated once, because base
    weights are frozen."""

    def __call__(self, run: TrainState, model: nn.Module) -> DrawnSamples | None:
        folder, undrawn, adapted = _folder(run), [], run.model.adapters is not None
        if dist.get_rank() == 0:
            with watching("the folder of the samples", undrawn):
                (folder / WITHOUT if adapted else folder).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        first, replicas = run.data_ranks.rank(), run.data_ranks.size()
        numbers = range(first, len(self.wanted), replicas)
        latents = self._generate(numbers, run, model)
        # Ranks without a sample may have to take part in the passes of the others.
        if adapted and from_first_rank(lambda: not self.frozen):
            with adapters_off(model):
                made = self._generate(numbers, run, model)
            self.frozen.update(zip(numbers, (one.on_host() for one in made), strict=True))
        written: list[GeneratedSample] = []
        without: list[GeneratedSample] = []
        if run.replica.reads:
            written = self._write(numbers, latents, run, undrawn)
            if adapted:
                bare = [self.frozen[number] for number in numbers]
                without = self._write(numbers, bare, run, undrawn, adapter=False)
        shares: list[Any] | None = None
        if dist.get_rank() == 0:
            shares = [None] * dist.get_world_size()
        dist.gather_object((written, without, undrawn), shares)
        if shares is None:
            return None
        every, bare, notes = (
            [one for part in parts for one in part] for parts in zip(*shares, strict=True)
        )
        return self._conclude(_in_order(every), _in_order(bare), notes, run)

    def _generate(
        self, numbers: Sequence[int], run: TrainState, model: nn.Module
    ) -> list[Generated]:
        requests = [self.wanted[number].request for number in numbers]
        with own_passes(run.model.chunks):
            return generate_streams(
                model, requests, config=run.config, settings=settings_of(run.config)
            )

    def _conclude(
        self,
        every: Sequence[GeneratedSample],
        without: Sequence[GeneratedSample],
        undrawn: list[NotShown],
        run: TrainState,
    ) -> DrawnSamples:
        """Writes the list and the grid of all samples, and measures quality, on the first rank.

        `every` are the samples of all replicas, `without` those generated without adapters;
        `undrawn` gets notices of what failed.
        """
        folder, grid, quality = _folder(run), None, {}
        firsts: list[np.ndarray] = []
        bare = {one.number: one.first_HW3 for one in without}
        given = {one.number: self.wanted[one.number].given_HW3 for one in every}
        with watching(LISTING, undrawn):
            if without:
                write_listing([one.entry for one in without], [], folder / WITHOUT)
            firsts = [beside(given[o.number], bare.get(o.number), o.first_HW3) for o in every]
            title = _title(any(one is not None for one in given.values())) if without else ""
            grid, notes = write_listing([o.entry for o in every], firsts, folder, title=title)
            undrawn += notes
            if self.decoder is None and run.card is not None:  # decode_latents.py needs it
                card = json.dumps(run.card, indent=1) + "\n"
                for place in (folder, folder / WITHOUT) if without else (folder,):
                    replace_file(place / CARD_NAME, card.encode())
        with watching("the quality of the samples", undrawn):
            quality = self._quality(every)
        files = [(folder / one.entry["file"], one.entry["prompt"]) for one in every]
        return DrawnSamples(
            grid=grid,
            videos=[one for one in files if one[0].suffix == ".mp4"],
            quality=quality,
            firsts=firsts,
            undrawn=undrawn,
        )

    def _quality(self, every: Sequence[GeneratedSample]) -> dict[str, float]:
        """FID, KID and CLIP score, by name, of the samples with captions of held-out samples.

        The result is empty without a feature extractor or without such samples.
        """
        pairs = [
            (self.wanted[one.number], one.features_D)
            for one in every
            if self.wanted[one.number].real_D is not None and one.features_D is not None
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
        self,
        numbers: Sequence[int],
        generated: Sequence[Generated],
        run: TrainState,
        undrawn: list[NotShown],
        *,
        adapter: bool = True,
    ) -> list[GeneratedSample]:
        """Writes the files of this replica's samples; a failure of one does not affect the others.

        `generated` are the samples with the numbers `numbers`. `adapter` is False for samples
        without the adapters, which get a folder of their own. `undrawn` gets notices of what
        failed.
        """
        written = []
        folder = _folder(run) if adapter else _folder(run) / WITHOUT
        pictures = self._pictures(numbers, [one.latent_CFHW for one in generated], undrawn)
        for number, (latent, sound_KA), picture in zip(numbers, generated, pictures, strict=True):
            if picture is None:
                continue
            one = self.wanted[number]
            made = Picture(
                frames_FHW3=picture,
                prompt=one.prompt,
                seed=one.request.seed,
                settings=_facts(run, one, adapter=adapter),
                latent_CFHW=latent if self.decoder is None else None,
                sound_latent_KA=sound_KA if self.decoder is None else None,
            )
            if sound_KA is not None and self.sound is not None:
                seconds = len(picture) / one.request.fps
                made = replace(made, sound=waveform_of(sound_KA, self.sound, seconds))
            features = None
            if self.extractor is not None and one.real_D is not None and adapter:
                with watching("features of a sample", undrawn):
                    features = self.extractor.pictures([picture[0]])[0]
            with watching("a sample", undrawn):
                entry = write_picture(made, folder, number)
                written.append(
                    GeneratedSample(
                        number=number, entry=entry, first_HW3=picture[0], features_D=features
                    )
                )
        return written

    def _pictures(
        self, numbers: Sequence[int], latents: Sequence[Tensor], undrawn: list[NotShown]
    ) -> list[np.ndarray | None]:
        """Videos [F, H, W, 3], uint8, of `latents`; None for a latent that cannot be decoded.

        `undrawn` gets a notice of each failure. Without a decoder all are in false colours.
        """
        if self.decoder is None:
            return [false_colours(latent) for latent in latents]
        pictures: list[np.ndarray | None] = [None] * len(latents)
        with watching("decoding of samples", undrawn), self.decoder.visiting(device()):
            for i, (number, latent) in enumerate(zip(numbers, latents, strict=True)):
                heartbeat("decoding of samples")
                with watching("decoding of samples", undrawn):
                    video = self.decoder.decode(latent.cpu()).numpy()
                    size = self.wanted[number].pixels
                    pictures[i] = cut(video, size) if size else video
        return pictures


def _in_order(samples: Iterable[GeneratedSample]) -> list[GeneratedSample]:
    return sorted(samples, key=lambda one: one.number)


def _title(given: bool) -> str:
    first = "given picture | " if given else ""
    return f"each sample: {first}without the adapter | with the adapter (same noise)"


def _folder(run: TrainState) -> Path:
    assert run.folder is not None
    return run.folder / FOLDER / f"step_{run.progress.step:08d}"


def settings_of(config: RunConfig) -> SamplingSettings:
    """The sampler, its steps and guidance for the samples of a validation."""
    steps, sampler, guidance = config.validation_sampling
    return SamplingSettings(
        num_steps=steps,
        guidance=guidance,
        reference_guidance=config.validation.reference_guidance,
        sampler=sampler,
    )


def _facts(run: TrainState, one: ValidationRequest, *, adapter: bool) -> dict[str, Any]:
    c, fps, used = run.config.validation, one.request.fps, run.config.validation_sampling
    frames, height, width = one.pixels or (None, None, None)
    return {
        "height": height,
        "width": width,
        "num_video_frames": frames,
        "fps": c.fps if math.isnan(fps) else fps,
        "num_steps": used.steps,
        "guidance": used.guidance,
        "reference_guidance": c.reference_guidance,
        "negative_prompt": one.negative,
        **one.pictures,
        "sampler": str(used.sampler),
        "weights": "model" if run.model.ema is None else "ema",
        "step": run.progress.step,
        **({} if run.model.adapters is None else {"adapter": adapter}),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _CardAndConfig:
    config: RunConfig
    card: dict[str, Any] | None


def check_samples(config: RunConfig) -> None:
    """Checks prompts, their pictures, the text encoder and the network of quality metrics.

    A dry run calls this; the start of a run checks the same while it encodes the prompts.

    Raises:
        ValueError: one of these is missing or does not fit.
    """
    c, run = config.validation, _CardAndConfig(config=config, card=dataset_card(config))
    prompts = _prompts(config.validation)
    check_encoder(run, check_prompts(run, prompts))
    is_known = "stride" in (run.card or {}).get("latent", {})
    asks = c.feature_extractor is not None or (bool(prompts) and not is_known)
    decoder = find_decoder(run)[0] if asks else None
    latent_stride(decoder, run, needed=bool(prompts))
    if c.feature_extractor is not None:
        if decoder is None:
            raise no_pictures(c.feature_extractor)
        FeatureExtractor(c.feature_extractor, torch.device("cpu"))

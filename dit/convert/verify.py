"""Compares a Diffusers folder with a checkpoint: every tensor, and the outputs of the networks."""

# T packed tokens, C patch features, M rows of the table of noise levels

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dit.batch import LATENTS, TEXT, CleanTokens, LatentSample, StepEnd
from dit.config import ModelConfig, Precision, RunConfig, Weights
from dit.convert.diffusers_checkpoint import CONFIG, DiffusersFolder, open_folder
from dit.convert.diffusers_config import diffusers_transformer_config
from dit.convert.errors import ConvertError
from dit.convert.export import open_stored
from dit.convert.megatron_checkpoint import StoredWeights, WithTextProjection
from dit.data.pack import pack_samples
from dit.models.diffusers.names import their_tensors
from dit.models.family import InputKind
from dit.models.patch_layout import PatchLayout
from dit.models.positions import unpack_latents
from dit.models.registry import diffusers_form, family_of, pairs
from dit.progress import Track, no_progress
from dit.token_ids import as_digits

# Random inputs: grids in patches, frames per second, lengths of captions, noise levels.
_SOUND_FRAMES = 5  # latent frames of the sound of a sample of several frames
_GRIDS = ((1, 5, 3), (3, 2, 4), (2, 3, 3))
_FPS, _CAPTIONS, _LEVELS = (math.nan, 16.0, 30.0), (7, 1, 12), (-1.3, 0.4, 250.0)


@dataclass(frozen=True, slots=True)
class TensorReport:
    """Differences between a folder's tensors and the checkpoint's, exported again."""

    count: int
    different: int  # tensors that are not bit-identical
    largest: float  # largest difference of two numbers
    where: str  # the tensor that has it


@dataclass(frozen=True, slots=True)
class ForwardReport:
    """Differences between the outputs of the two networks, in float32."""

    samples: int
    largest: float  # largest difference of two numbers
    scale: float  # root mean square of Diffusers' output


def compare_tensors(
    hf_path: Path,
    checkpoint: Path,
    weights: Weights | None,
    *,
    text_projection: Path | None = None,
    track: Track = no_progress,
) -> tuple[TensorReport, Weights]:
    """Compares the tensors of `hf_path` with those of the checkpoint, exported in the same dtypes.

    Returns the differences, and whether averages or last weights were compared. `text_projection`
    is as in `open_stored`; `track` counts pairs of the name table.

    Raises:
        ConvertError: folder and checkpoint hold different tensors.
    """
    source = open_folder(hf_path)
    stored, config, chosen = open_stored(checkpoint, weights, text_projection=text_projection)
    table, form = pairs(config.model), diffusers_form(config.model)
    if (second := form.companion_of(config.model)) is not None:
        source.join(second)
    source.check(table, ignored=form.ignored)
    count, different, largest, where = 0, 0, 0.0, ""
    with track("comparing tensors", len(table), 0) as advance:
        for pair in table:
            for name, ours in their_tensors([pair], stored.read).items():
                theirs = source.read(name)
                count += 1
                if torch.equal(ours.to(theirs.dtype), theirs):
                    continue
                gap = float((ours.float() - theirs.float()).abs().max())
                different += 1
                if not gap <= largest:  # so that NaN counts as large
                    largest, where = gap, name
            advance(1)
    return TensorReport(count, different, largest, where), chosen


def compare_forward(
    hf_path: Path, checkpoint: Path, weights: Weights, *, text_projection: Path | None = None
) -> ForwardReport:
    """Runs both networks on the same random inputs in float32, one network at a time.

    Outputs for frames that condition a sample are not compared.

    Raises:
        ConvertError: there are several processes, or Diffusers cannot run the model here.
    """
    if dist.get_world_size() > 1:
        raise ConvertError("verify runs in one process; start it without a launcher")
    source = open_folder(hf_path)
    stored, config, _ = open_stored(checkpoint, weights, text_projection=text_projection)
    if isinstance(stored, WithTextProjection):
        raise ConvertError(
            f"{stored.path} was trained on projected texts, so that the inputs of the two networks"
            " differ: compare with --tensors-only"
        )
    if (beyond := diffusers_form(config.model).beyond(config.model)) is not None:
        raise ConvertError(
            f"Diffusers cannot compute what this network does: compare with --tensors-only. The"
            f" folder has {beyond}"
        )
    model = replace(config.model.on_one_rank(), precision=Precision.FP32)
    samples = [_sample(i, model) for i in range(len(_GRIDS))]
    theirs = _diffusers_outputs(source, config, model, samples)
    ours = _our_outputs(stored, config, model, samples)
    # Nothing reads the outputs at given frames, so the two networks may differ there.
    given = [_given_frames(sample, model) for sample in samples]
    ours, theirs = (
        [latent[:, n:] for latent, n in zip(latents, given, strict=True)]
        for latents in (ours, theirs)
    )
    gaps = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    numbers = torch.cat([latent.flatten() for latent in theirs])
    return ForwardReport(len(samples), max(gaps), float(numbers.square().mean().sqrt()))


def _given_frames(sample: LatentSample, model: ModelConfig) -> int:
    """Number of frames of `sample` that condition it and have no noise."""
    frames = [one for one in family_of(model).inputs(model) if one.kind is InputKind.FRAMES]
    return sum(sample.others[one.name].shape[1] for one in frames if one.name in sample.others)


def _sample(index: int, model: ModelConfig) -> LatentSample:
    rng = torch.Generator().manual_seed(index)
    patch = (model.patch_temporal, model.side_cells, model.side_cells)
    most = diffusers_form(model).largest_latent(model)
    ends = (end // p for end, p in zip(most, patch, strict=True))
    grid = [min(side, end) for side, end in zip(_GRIDS[index], ends, strict=True)]
    size = [side * p for side, p in zip(grid, patch, strict=True)]
    caption = min(_CAPTIONS[index], model.text_zeros_to or _CAPTIONS[index])
    return LatentSample(
        key=str(index),
        latent_CFHW=torch.randn(model.in_channels, *size, generator=rng),
        text_LE=torch.randn(caption, model.crossattn_emb_size, generator=rng),
        fps=_FPS[index],
        others=_others(model, size, caption, rng, index=index),
    )


def _others(
    model: ModelConfig, size: Sequence[int], rows: int, rng: torch.Generator, *, index: int
) -> dict[str, Tensor]:
    """Random inputs of sample `index`, besides latent and text; odd samples get references."""
    found, (frames, *sides) = {}, size
    given = max(frames - model.patch_temporal, 0)  # leaves one to be made; an image has none
    for one in family_of(model).inputs(model):
        match one.kind:
            case InputKind.CHANNELS:
                shape = (one.width, *size)
            case InputKind.VECTOR:
                shape = (one.width,)
            case InputKind.FRAMES | InputKind.FRAME_CHANNELS:
                # Pipelines make them of one picture; those without take frames of a video.
                shown = min(given, model.patch_temporal) if one.pictures else given
                shape = (one.width, shown, *sides)
            case InputKind.REFERENCE:
                shape = (one.width, model.patch_temporal, *sides[:: 1 - 2 * (index % 2)])
                shape = shape if index % 2 else (0,)
            case InputKind.SOUND:
                shape = (one.width, _SOUND_FRAMES if frames > model.patch_temporal else 0)
            case _:
                shape = (one.rows or rows, one.width)
        if one.vocabulary is not None:
            found[one.name] = as_digits(torch.randint(one.vocabulary, shape[:1], generator=rng))
        elif one.name != TEXT and math.prod(shape):
            found[one.name] = torch.randn(shape, generator=rng)
    return found


@torch.no_grad()
def _diffusers_outputs(
    source: DiffusersFolder, config: RunConfig, model: ModelConfig, samples: list[LatentSample]
) -> list[Tensor]:
    # A setting that Diffusers cannot express is an error here, and not a difference of outputs.
    diffusers_transformer_config(config)
    form, guidance = diffusers_form(model), config.objective.guidance
    try:
        second = form.companion_of(model)
        beside = None if second is None else source.companion_path(second)
        if source.multiplied_out is None and (source.path / CONFIG).is_file():
            network = form.open_network(source.path, beside)
        else:  # Diffusers reads no scales, and not each file
            weights = {name: source.read(name).float() for name in source.headers}
            network = form.filled_network(source.config, weights)
    except ImportError as error:
        raise ConvertError(
            "comparing what the networks compute needs Diffusers: pip install"
            " 'megatron-dit[prep]', or --tensors-only"
        ) from error
    except NotImplementedError as error:
        raise ConvertError(
            f"outputs cannot be compared: {error}. Compare the weights alone with --tensors-only"
        ) from error
    return [
        form.run(network, s, level, model, guidance=guidance)
        for s, level in zip(samples, _LEVELS, strict=True)
    ]


@torch.no_grad()
def _our_outputs(
    stored: StoredWeights, config: RunConfig, model: ModelConfig, samples: list[LatentSample]
) -> list[Tensor]:
    """Outputs of this project's network for all samples, in one pack."""
    from dit.distributed.process_groups import process_groups, start_processes
    from dit.train.checkpoint.state_dict import load_weights

    start_processes(seed=0, model=model)
    groups = process_groups()
    network = family_of(model).network()(model, groups).eval()
    load_weights(stored.path, [network], groups, averaged=bool(stored.prefix))
    batch = pack_samples(samples, PatchLayout.of(replace(config, model=model)))
    level_M = torch.tensor(_LEVELS)
    if (clean := batch.method(CleanTokens)) is not None:
        level_M = torch.cat((level_M, torch.full_like(level_M, clean.level)))
    family = family_of(model)
    if family.tells_step_end(model) and not family.trains_step_end:
        # At the data, as `DiffusersForm.run` has it.
        batch = batch.with_method(StepEnd(level_N=torch.zeros(batch.num_samples)))
    made_TC = network(batch.latent_TC, level_M, batch)
    if batch.others:
        made_TC = made_TC[LATENTS]
    patch = {"patch_temporal": model.patch_temporal, "patch_spatial": model.patch_spatial}
    return unpack_latents(made_TC, batch, **patch)

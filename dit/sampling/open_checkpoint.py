"""Opens a checkpoint for sampling, with the text encoder and decoder of its data."""

# L text tokens, E text width

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dit.batch import NullInputs
from dit.checkpoint_paths import (
    NULL_TEXT,
    CheckpointError,
    has_adapters,
    saved_card,
    saved_config,
    saved_null_inputs,
)
from dit.codecs.text import TextEncoder
from dit.codecs.vae import Codec
from dit.config import ModelConfig, Precision, RunConfig, TextPadding
from dit.convert.load_hf.start import weights_of_folder
from dit.distributed.entry import say_notice
from dit.distributed.model_parallel import FullForward
from dit.distributed.process_groups import device, process_groups, start_processes
from dit.launched import check_launch, world_size
from dit.models.family import NullInput
from dit.models.registry import family_of
from dit.objectives.registry import check_covers_all_levels
from dit.sampling.cards import card_of_pipeline, decoder_of_card, encoder_of_card
from dit.sampling.commands.load_options import LoadOptions
from dit.sampling.commands.lora_option import add_adapters
from dit.sampling.experts import GuidedPair, TwoExperts, TwoNetworks, boundary_of, check_pair
from dit.sampling.latent_sizes import LatentStride
from dit.train.checkpoint.adapters import load_adapted
from dit.train.checkpoint.starting_point import named_checkpoint
from dit.train.checkpoint.state_dict import load_weights, saved_step

_Expert = tuple[Path, RunConfig]


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint opened for generation: network, text encoder, decoder."""

    path: Path
    config: RunConfig
    model: FullForward | TwoNetworks
    encoder: TextEncoder
    decoder: Codec | None
    latent_stride: LatentStride
    lora: tuple[str, ...]  # the values of --lora and --lora_low
    null: NullInputs  # the inputs of a sample without caption; empty if samples have their own
    card: dict[str, Any] = field(repr=False)

    def with_stride(self, latent_stride: LatentStride) -> OpenCheckpoint:
        """A copy of this checkpoint, which generates latents of sizes by `latent_stride`."""
        return replace(self, latent_stride=latent_stride)


def open_checkpoint(
    checkpoint_path: str | Path,
    *,
    weights: str,
    options: LoadOptions | None = None,
    needs_decoder: bool = True,
) -> OpenCheckpoint:
    """Opens the checkpoint at `checkpoint_path`, with text encoder and decoder of its dataset.

    `weights` is `ema` or `model`, as for --weights.

    Raises:
        ValueError: there is no checkpoint, it was trained without a text encoder or on a part of
            the noise levels, or the decoder is needed and cannot be opened.
    """
    check_launch()
    options = options or LoadOptions()
    path = named_checkpoint(checkpoint_path, named=f"--checkpoint_path {checkpoint_path}")
    config = on_layout(saved_config(path), options)
    away = _network_away(config, options)
    low, boundary = _low_expert(config, options)
    card = saved_card(path) or _card_of_pipeline(options, config.model)
    if card is None:
        raise CheckpointError(
            f"{path} was trained without a text encoder (mock data, or shards without"
            " dataset_card.json), so it cannot read a prompt; train on a dataset that"
            " `python -m data_prep` packed, or, for an imported checkpoint, give the folder of"
            " its pipeline as --t5_cache_dir"
        )
    decoder, latent_stride = open_decoder(card, options, config.model, needed=needs_decoder)
    encoder = encoder_of_card(card, options.t5_cache_dir)
    model: FullForward | TwoNetworks
    if away is None:
        model = _load_experts((path, config), low, boundary, weights=weights, options=options)
    else:
        model = _load_pair((path, config), away, weights=weights, options=options)
    return OpenCheckpoint(
        path=path,
        config=config,
        model=model,
        encoder=encoder,
        decoder=decoder,
        latent_stride=latent_stride,
        lora=(*options.lora, *options.lora_low),
        null=_null_inputs(path, encoder, config.model),
        card=card,
    )


def _null_inputs(path: Path, encoder: TextEncoder, model: ModelConfig) -> NullInputs:
    """The inputs of a sample without caption, by name.

    They are read from the checkpoint if it stores them; else "" is encoded. If the encoder needs
    pictures, the result is empty, because each sample then has inputs of its own.
    """
    if not encoder.reads_alone:
        return {}
    if (path / NULL_TEXT).exists():
        return saved_null_inputs(path)
    encoded, inputs = encoder.encode_all(""), family_of(model).inputs(model)
    empty = {one.name for one in inputs if one.null is NullInput.EMPTY}
    return {name: rows[:0] if name in empty else rows for name, rows in encoded.items()}


def _low_expert(config: RunConfig, options: LoadOptions) -> tuple[_Expert | None, float]:
    """The low-noise expert, and the lowest timestep of the high-noise one.

    Returns ((path, configuration), timestep), or (None, 0.0) without --checkpoint_path_low.

    Raises:
        ValueError: an option of two experts is given for one, the two do not fit together, or a
            single network was not trained at all noise levels.
    """
    if options.checkpoint_path_low is None:
        for name in ("offload_experts", "lora_low"):
            paired = name == "offload_experts" and options.checkpoint_path_away is not None
            if getattr(options, name) and not paired:
                raise ValueError(f"--{name} needs both experts: give --checkpoint_path_low, too")
        check_covers_all_levels(config.objective)
        return None, 0.0
    place = options.checkpoint_path_low
    path = named_checkpoint(place, named=f"--checkpoint_path_low {place}")
    low = on_layout(saved_config(path), options)
    return (path, low), boundary_of(config, low)


def _network_away(config: RunConfig, options: LoadOptions) -> _Expert | None:
    """The (path, configuration) of --checkpoint_path_away, or None without this option.

    Guidance moves away from the predictions of that network.

    Raises:
        ValueError: the network does not fit the network of `config`, or there are two experts.
    """
    place = options.checkpoint_path_away
    if place is None:
        return None
    if options.checkpoint_path_low is not None:
        raise ValueError(
            "--checkpoint_path_away and --checkpoint_path_low cannot be used together; leave one of"
            " them out"
        )
    path = named_checkpoint(place, named=f"--checkpoint_path_away {place}")
    away = on_layout(saved_config(path), options)
    check_pair(config, away)
    return path, away


def _load_pair(own: _Expert, away: _Expert, *, weights: str, options: LoadOptions) -> GuidedPair:
    averaged = weights == "ema"
    second = _load(*away, averaged=averaged, lora=(), options=options)
    if options.offload_experts:  # before the other comes to the device
        second.to("cpu")
    first = _load(*own, averaged=averaged, lora=options.lora, options=options)
    return GuidedPair(first, second, offload=options.offload_experts)


def _load_experts(
    high: _Expert, low: _Expert | None, boundary: float, *, weights: str, options: LoadOptions
) -> FullForward | TwoExperts:
    averaged = weights == "ema"
    if low is None:
        return _load(*high, averaged=averaged, lora=options.lora, options=options)
    below = _load(*low, averaged=averaged, lora=options.lora_low, options=options)
    if options.offload_experts:  # before the other comes to the device
        below.to("cpu")
    above = _load(*high, averaged=averaged, lora=options.lora, options=options)
    return TwoExperts(above, below, boundary=boundary, offload=options.offload_experts)


def _card_of_pipeline(options: LoadOptions, model: ModelConfig) -> dict[str, Any] | None:
    """A dataset card for the pipeline in --t5_cache_dir, for a checkpoint without a card.

    Returns None if that folder has no VAE.
    """
    if options.t5_cache_dir is None or not (Path(options.t5_cache_dir) / "vae").is_dir():
        return None
    stored = model.text_pad_to is TextPadding.STORED
    named = family_of(model).vae(model)
    return card_of_pipeline(Path(options.t5_cache_dir), processor=named, stored_padding=stored)


def on_layout(config: RunConfig, options: LoadOptions) -> RunConfig:
    """`config`, the configuration of a run, with the parallelism and precision of `options`.

    Raises:
        ValueError: the parallelism does not divide the processes or the model.
    """
    model = replace(
        config.model.on_one_rank(),
        precision=Precision(options.precision or config.model.precision),
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        sequence_parallel=options.sequence_parallel,
        context_parallel_size=options.context_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
    )
    parts = model.model_parallel_size
    if world_size() % parts:
        raise ValueError(
            f"the number of processes ({world_size()}) is not a multiple of {parts}, the product of"
            " --tensor_model_parallel_size, --context_parallel_size and"
            " --pipeline_model_parallel_size; start python -m torch.distributed.run"
            f" --nproc-per-node {parts} recipes/generate_dit.py ..."
        )
    # Padding does not change results, so samples may be padded to a multiple that context ranks can
    # split evenly.
    context = model.context_parallel_size
    multiple = math.lcm(config.dataset.sample_multiple, 2 * context if context > 1 else 1)
    capacity = -(-config.dataset.task_encoder_seq_length // multiple) * multiple
    dataset = replace(config.dataset, sample_multiple=multiple, task_encoder_seq_length=capacity)
    return replace(config, model=model, dataset=dataset)


def open_decoder(
    card: dict[str, Any], options: LoadOptions, model: ModelConfig, *, needed: bool
) -> tuple[Codec | None, LatentStride]:
    """Opens the decoder (VAE) that a dataset card names; also returns the size of its latent cells.

    If the decoder cannot be opened and is not `needed`, None is returned in its place, and the size
    is taken from the card.

    Raises:
        ValueError: the decoder cannot be opened, and it is needed or the card lacks the sizes.
    """
    latent = card.get("latent", {})
    try:
        decoder = decoder_of_card(card, options.tokenizer_model, options.tokenizer_cache_dir)
        return decoder, LatentStride.of(decoder, model)
    except ValueError as error:
        if needed or "stride" not in latent:
            raise ValueError(
                f"the decoder of the dataset cannot be opened: {error}. Give its folder with"
                " --tokenizer_cache_dir or --tokenizer_model, or keep latents: --save_latents"
            ) from error
    patches = {"side_cells": model.side_cells, "patch_temporal": model.patch_temporal}
    strides = {name: latent[name] for name in ("stride", "temporal_stride")}
    return None, LatentStride(**strides, **patches)


def _load(
    path: Path, config: RunConfig, *, averaged: bool, lora: Sequence[str], options: LoadOptions
) -> FullForward:
    start_processes(seed=config.rng.seed, model=config.model)
    network = family_of(config.model).network()
    groups = process_groups()
    model = network(config.model, groups).to(device())
    if has_adapters(path):
        load_adapted(path, model, groups, averaged=averaged, read_folder=weights_of_folder)
    else:
        load_weights(path, [model], groups, averaged=averaged)
    if step := saved_step(path):
        model.at_step(step)
    if lora:
        ignored = say_notice if options.ignore_text_encoder else None
        add_adapters(model, lora, option="--lora", without_text_encoder=ignored)
    return FullForward([model]).eval()

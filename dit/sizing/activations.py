"""Bytes of activations that one device saves for backward, over all packs in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dit.config import DatasetConfig, ModelConfig, Precision, Recompute, RecomputeMethod, RunConfig
from dit.config.data import MockGeometry
from dit.config.sparsity import CUBE
from dit.models.family import InputKind
from dit.models.layer_spec import SOUND_TOKENS
from dit.models.linears import part_learns
from dit.models.registry import family_of, has_sound, network_spec

_CUBE_PAIR_BYTES = 8
"""Bytes saved for each pair of cubes and head: an int32 index in the list of cubes that a cube
attends to, and one in the list of cubes that attend to it."""


def activation_bytes(config: RunConfig, *, accumulation: int) -> int:
    """Bytes of activations that the fullest device saves for backward, in all packs in flight.

    `accumulation` is the number of packs of a replica in a step.
    """
    model = config.model
    pipeline = model.pipeline_model_parallel_size
    in_flight = min(accumulation, pipeline) / pipeline  # packs on a stage, times its part of layers
    if model.virtual_stages > 1:  # arXiv:2205.05198, Sec. 4.2.3
        in_flight *= 1 + (pipeline - 1) / (pipeline * model.virtual_stages)
    tokens = config.dataset.task_encoder_seq_length / model.context_parallel_size
    # The last stage keeps the predictions of passes without gradients, float32, of all packs.
    said = config.objective.predictions_kept * accumulation * 4 * model.output_features
    pairs, row = _cube_pairs(model, config.dataset), _row_numbers(model, config.dataset)
    again = model.recompute_granularity is Recompute.SELECTIVE
    layer = _kept_by_layer(config) + (0 if again else pairs)
    layers = _kept(model, layer=layer, row=number_bytes(model) * row)
    texts = _kept_of_texts(config) * _text_rows_in_flight(config, accumulation)
    return int(layers * in_flight + pairs * again + said * tokens + texts)


def _kept_by_layer(config: RunConfig) -> float:
    """Bytes that a layer saves for backward on a rank, for a full pack of `dataset.mock_samples`.

    The result is the mean over layers, without pairs of cubes; layers inside a token route save
    less. In joint attention text tokens count towards the capacity of a pack, so all its tokens
    count as latents.
    """
    from dit.sizing.kept import kept_by_layer  # Megatron-Core takes 4 s to import

    model, spec, kept = config.model, network_spec(config.model), kept_by_layer(config.model)
    whole, heard = config.dataset.task_encoder_seq_length, _sound_part(model, config.dataset)
    here = whole / model.context_parallel_size
    tokens, sound = seen_tokens(model) * (1 - heard) * here, heard * here
    if spec.attends_jointly:
        return kept.of(tokens=tokens)
    lengths = [one.text_length for one in config.dataset.mock_samples]
    texts = [max(length, 0) for length in spec.text(lengths)]
    rows = {"text": texts, "samples": [1] * len(texts)}
    beside = {k: (1 - heard) * whole * _rows_of_texts(config, n) for k, n in rows.items()}
    return kept.of(tokens=tokens, sound=sound, **beside)


def _row_numbers(model: ModelConfig, dataset: DatasetConfig) -> float:
    """Number of elements of a layer's input on a context rank, for all tokens of a full pack."""
    heard = _sound_part(model, dataset)
    tokens = dataset.task_encoder_seq_length / model.context_parallel_size
    parts = (part for stack in network_spec(model).stacks for part in stack.layer.parts)
    ports = ((part, port) for part in parts for port in part.ports)
    widths = (part.width_of(port) for part, port in ports if port.row == SOUND_TOKENS)
    sound = next(widths, 0)
    return tokens * ((1 - heard) * model.hidden_size + heard * sound)


def _sound_part(model: ModelConfig, dataset: DatasetConfig) -> float:
    """Fraction of the tokens in packs of `dataset.mock_samples` that are tokens of sound."""
    mixture = dataset.mock_samples
    latents = sum(one.weight * geometry_tokens(model, one) for one in mixture)
    sounds = sum(one.weight * sound_tokens(model, one) for one in mixture)
    return sounds / (latents + sounds)


def _kept_of_texts(config: RunConfig) -> float:
    """Bytes for each text token that trained layers over text alone save on the first stage.

    The conditioner, a network for captions before padding, has all captions on every context rank;
    other layers over text divide them between ranks.
    """
    from dit.sizing.kept import kept_of_text

    model, spec, total = config.model, network_spec(config.model), 0.0
    if spec.trains_conditioner and part_learns(config):
        total += kept_of_text(model, "conditioner")
    if spec.text_layers and part_learns(config, spec.text_layers):
        ranks = model.tensor_model_parallel_size if model.sequence_parallel else 1
        shared_by = model.context_parallel_size * ranks
        total += kept_of_text(model, spec.text_layers.rstrip(".")) / shared_by
    return total


def _text_rows_in_flight(config: RunConfig, accumulation: int) -> float:
    """Number of text tokens in all packs that the first pipeline stage holds at once."""
    model = config.model
    lengths = [one.text_length for one in config.dataset.mock_samples]
    rows = config.dataset.task_encoder_seq_length * _rows_of_texts(config, lengths)
    # The first of several groups of layers runs up to twice as far ahead.
    packs = min(accumulation, model.pipeline_model_parallel_size * min(model.virtual_stages, 2))
    return rows * packs


def _cube_pairs(model: ModelConfig, dataset: DatasetConfig) -> float:
    """Bytes that a layer saves for the index lists of cubes, in a full pack of `mock_samples`.

    The lists have an entry for each pair of cubes. The result is the mean over layers, on one rank.
    """
    mixture, spec = dataset.mock_samples, network_spec(model)
    each = ((stack.count, stack.layer.among_cubes) for stack in spec.stacks)
    heads = sum(n * one.attention.heads for n, one in each if one) / spec.layers
    if not heads:
        return 0.0
    sides = (model.patch_temporal, model.patch_spatial, model.patch_spatial)
    cubes = tokens = 0.0
    for one in mixture:
        latent = (one.frames, one.height, one.width)
        grid = (side // patch for side, patch in zip(latent, sides, strict=True))
        cubes += one.weight * math.prod(-(-side // CUBE) for side in grid)
        tokens += one.weight * geometry_tokens(model, one)
    of_pack = dataset.task_encoder_seq_length * cubes / max(tokens, 1)
    ranks = model.tensor_model_parallel_size * model.context_parallel_size  # that share heads
    return _CUBE_PAIR_BYTES * heads / ranks * of_pack**2


def numbers_of_pack(model: ModelConfig, dataset: DatasetConfig) -> float:
    """Number of elements of the hidden states of a pack on one context rank."""
    return dataset.task_encoder_seq_length / model.context_parallel_size * model.hidden_size


def _rows_of_texts(config: RunConfig, lengths: Sequence[int]) -> float:
    """Ratio of text tokens to latent tokens in a pack of `dataset.mock_samples`.

    `lengths` are the text tokens of each mock sample. The text of a sample with two noise levels is
    in the pack twice.
    """
    mixture = config.dataset.mock_samples
    latents = [geometry_tokens(config.model, one) for one in mixture]
    weighted = [
        sum(one.weight * count for one, count in zip(mixture, counts, strict=True))
        for counts in (lengths, latents)
    ]
    return config.objective.levels_a_sample * weighted[0] / max(weighted[1], 1)


def geometry_tokens(model: ModelConfig, geometry: MockGeometry) -> int:
    """Number of latent tokens of a mock sample that attention processes."""
    return model.tokens_of(geometry.frames, geometry.height, geometry.width)


def sound_tokens(model: ModelConfig, geometry: MockGeometry) -> int:
    """Number of sound tokens of a sample whose sound is as long as its frames; 0 for pictures.

    A frame of the latent lasts 1 / fps seconds, as for the positions of both streams.
    """
    inputs = family_of(model).inputs(model) if has_sound(model) else ()
    heard = next((one for one in inputs if one.kind is InputKind.SOUND), None)
    if heard is None or geometry.fps is None:
        return 0
    return heard.sound_frames(geometry.frames / geometry.fps)


def number_bytes(model: ModelConfig) -> int:
    """Bytes of one number in the model's compute dtype."""
    return 4 if model.precision is Precision.FP32 else 2


def _kept(model: ModelConfig, *, layer: float, row: float) -> float:
    """Bytes of activations that all layers keep on the device for a pack.

    `recompute_granularity` and offloading to the host reduce them. `layer` is the number of bytes
    that one layer saves without recomputation, `row` that of a layer's input alone.
    """
    layers = network_spec(model).layers
    stages = model.pipeline_model_parallel_size * model.virtual_stages
    away = min(model.cpu_offloading_num_layers * stages, layers)
    # Of the layers on the host, at most one on its way there, or two on their way back.
    staying = min(layers - away + min(away, 1), layers)
    if model.recompute_granularity is not Recompute.FULL:
        return max(staying, min(away, 2)) * layer
    if model.recompute_method is RecomputeMethod.BLOCK:
        # The inputs of the first layers, and all others; at the end, the one that is recomputed.
        again = min(model.recompute_num_layers * stages, layers)
        return max(again - away, 0) * row + max(min(layers - again, staying), 1) * layer
    again = min(model.recompute_num_layers, layers)
    # The input of every group, and the group that is being recomputed.
    return staying / again * row + again * layer


def seen_tokens(model: ModelConfig) -> float:
    """Fraction of latent tokens that a layer sees in training, averaged over layers.

    It is 1 without a token route.
    """
    if (route := model.token_route) is None:
        return 1.0
    routed = (route.last - route.first + 1) / network_spec(model).layers
    return 1 - routed * (1 - route.kept / route.run)

"""A checkpoint -> a model that samples, with the encoders of its data."""

# L text tokens, E text width

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit.distributed.entry import say_notice
from dit.sampling.latent_sizes import Steps
from dit.sampling.options import GenerationOption

if TYPE_CHECKING:
    from torch import Tensor

    from dit.codecs.text import TextEncoder
    from dit.codecs.vae import Codec
    from dit.config import ModelConfig, RunConfig
    from dit.distributed.full_forward import FullForward


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint that is ready to generate."""

    path: Path
    config: RunConfig
    model: FullForward
    encoder: TextEncoder
    decoder: Codec | None
    steps: Steps
    null_text_LE: Tensor
    card: dict[str, Any] = field(repr=False)


def open_checkpoint(
    checkpoint_path: str | Path,
    *,
    weights: str,
    setting: GenerationOption | None = None,
    needs_decoder: bool = True,
) -> OpenCheckpoint:
    """Loads the model and the encoders that its dataset was made with.

    Raises:
        ValueError: there is no checkpoint, it was trained without a text encoder, or a decoder is
            needed and not to be had.
    """
    from dit.train.checkpoint.paths import (
        CheckpointError,
        find_checkpoint,
        saved_card,
        saved_config,
        saved_null_text,
    )

    setting = setting or GenerationOption()
    path = find_checkpoint(Path(checkpoint_path))
    if path is None:
        raise CheckpointError(
            f"--checkpoint_path {checkpoint_path} holds no checkpoint; give a run folder, a"
            " checkpoints/step_... folder or a LATEST file"
        )
    config = spread(saved_config(path), setting)
    card = saved_card(path)
    if card is None:
        raise CheckpointError(
            f"{path} was trained without a text encoder (mock data, or shards without"
            " dataset_card.json), so it cannot read a prompt; train on a dataset that"
            " `python -m data_prep` packed"
        )
    decoder, steps = open_decoder(card, setting, config.model, needed=needs_decoder)
    return OpenCheckpoint(
        path=path,
        config=config,
        model=_load(path, config, averaged=weights == "ema"),
        encoder=_encoder_of(card, setting.t5_cache_dir),
        decoder=decoder,
        steps=steps,
        null_text_LE=saved_null_text(path),
        card=card,
    )


def spread(config: RunConfig, setting: GenerationOption) -> RunConfig:
    """The same model on other ranks than it was trained on.

    Raises:
        ValueError: the processes or the sizes of the model do not divide.
    """
    from dit.config import Precision
    from dit.distributed.process_groups import world_size

    model = replace(
        config.model.on_one_rank(),
        precision=Precision(setting.precision or config.model.precision),
        tensor_model_parallel_size=setting.tensor_model_parallel_size,
        sequence_parallel=setting.sequence_parallel,
        context_parallel_size=setting.context_parallel_size,
        pipeline_model_parallel_size=setting.pipeline_model_parallel_size,
    )
    parts = model.model_parallel_size
    if world_size() % parts:
        raise ValueError(
            f"{world_size()} processes do not divide by tensor * context * pipeline = {parts};"
            f" start python -m torch.distributed.run --nproc-per-node {parts}"
            " recipes/generate_dit.py ..."
        )
    # Padding is invisible, so samples may be padded to whatever the context ranks share out.
    context = model.context_parallel_size
    multiple = math.lcm(config.dataset.sample_multiple, 2 * context if context > 1 else 1)
    capacity = -(-config.dataset.task_encoder_seq_length // multiple) * multiple
    dataset = replace(config.dataset, sample_multiple=multiple, task_encoder_seq_length=capacity)
    return replace(config, model=model, dataset=dataset)


def decoder_of(card: dict[str, Any], model: str | None, cache: str | None) -> Codec:
    """The decoder of a dataset, from where the options say; what it does not use is said.

    Raises:
        ValueError: it is not to be had.
    """
    from dit.codecs import vae
    from dit.codecs.pretrained import ModelLocation
    from dit.codecs.unused_options import unused_places

    decoder = vae.codec_of_card(card, ModelLocation(model=model, cache=cache))
    given = {"--tokenizer_model": model, "--tokenizer_cache_dir": cache}
    for sentence in unused_places(decoder, given):
        say_notice(sentence)
    return decoder


def _encoder_of(card: dict[str, Any], cache: str | None) -> TextEncoder:
    from dit.codecs import text
    from dit.codecs.pretrained import ModelLocation
    from dit.codecs.unused_options import unused_places

    encoder = text.text_encoder_of_card(card, ModelLocation(cache=cache))
    for sentence in unused_places(encoder, {"--t5_cache_dir": cache}):
        say_notice(sentence)
    return encoder


def open_decoder(
    card: dict[str, Any], setting: GenerationOption, model: ModelConfig, *, needed: bool
) -> tuple[Codec | None, Steps]:
    """The decoder of a dataset, and how large its cells are.

    Raises:
        ValueError: it is not to be had, and needed, or the card does not say how large they are.
    """
    latent = card.get("latent", {})
    try:
        decoder = decoder_of(card, setting.tokenizer_model, setting.tokenizer_cache_dir)
        return decoder, Steps.of(decoder, model)
    except ValueError as error:
        if needed or "stride" not in latent:
            raise ValueError(
                f"the decoder of the dataset cannot be opened: {error}. --tokenizer_cache_dir and"
                " --tokenizer_model say where it is; --save_latents goes on without it"
            ) from error
    patches = {"patch_spatial": model.patch_spatial, "patch_temporal": model.patch_temporal}
    strides = {name: latent[name] for name in ("stride", "temporal_stride")}
    return None, Steps(**strides, **patches)


def _load(path: Path, config: RunConfig, *, averaged: bool) -> FullForward:
    from dit.distributed.full_forward import FullForward
    from dit.distributed.process_groups import device, process_groups, start_processes
    from dit.models.family import family_of
    from dit.train.checkpoint.state_dict import load_weights

    start_processes(seed=config.rng.seed, model=config.model)
    network = family_of(config.model).network()
    model = network(config.model, process_groups()).to(device())
    load_weights(path, [model], averaged=averaged)
    return FullForward([model]).eval()

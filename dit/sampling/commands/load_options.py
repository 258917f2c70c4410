"""Options of all programs that generate from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dit.command_line import option
from dit.local_path import CheckpointPath, LocalPath


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Options for opening networks: second network, adapters, precision and parallelism."""

    checkpoint_path_low: CheckpointPath | None = option(None, metavar="DIR")
    """Checkpoint of the low-noise expert (Wan 2.2), for levels below objective.level_range."""
    checkpoint_path_away: CheckpointPath | None = option(None, metavar="DIR")
    """Weaker network without captions, from which guidance moves away (autoguidance)."""
    lora: Sequence[LocalPath] = option((), metavar="FILE[:SCALE]")
    """File or folder of LoRA adapters, and their scale, such as x.safetensors:0.8; repeatable.
    (default scale: 1)"""
    lora_low: Sequence[LocalPath] = option((), metavar="FILE[:SCALE]")
    """Adapters for --checkpoint_path_low, in the form of --lora."""
    ignore_text_encoder: bool = False
    """Leave out the keys of text encoders in files of --lora, and count them."""
    offload_experts: bool = False
    """Keep the idle network of two in host memory."""
    precision: str | None = option(None, choices=("fp32", "bf16"))
    """Dtype of matrix products. (default: as in training)"""
    tensor_model_parallel_size: int = 1
    """Processes over which matrices are split. (default: 1)"""
    context_parallel_size: int = 1
    """Processes over which tokens are split. (default: 1)"""
    pipeline_model_parallel_size: int = 1
    """Processes over which layers are split. (default: 1)"""
    sequence_parallel: bool = False
    """Also divide the tokens between matrix products over the tensor processes."""


@dataclass(frozen=True, kw_only=True)
class EncoderPlaces:
    """Options for where the text encoder and the VAE are."""

    t5_cache_dir: LocalPath | None = None
    """Hugging Face cache, or pipeline folder, with the text encoder."""
    tokenizer_cache_dir: LocalPath | None = option(None, "--vae_cache_folder")
    """Hugging Face cache, or pipeline folder, with the VAE that decodes."""
    tokenizer_model: LocalPath | None = None
    """Hub name or folder of the VAE, if not the dataset's."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions(EncoderPlaces, NetworkOptions):
    """Options for opening a checkpoint."""

"""What to do with a dataset: the command that trains on it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dit.codecs.text import TextEncoder
from dit.codecs.vae import Codec
from dit.codecs.vae.autoencoder import Autoencoder


def training_command(folder: Path, config: str, overrides: Mapping[str, Any]) -> str:
    """The command that trains on `folder`, ready for a shell."""
    words = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    words += ["recipes/pretrain_dit.py", "--config-file", config, f"dataset.path={folder}"]
    return shlex.join(words + [f"{key}={value}" for key, value in overrides.items()])


def published_network(codec: Codec, text: TextEncoder) -> tuple[str, str, str | None] | None:
    """The recipe that tunes the network that such samples are for, its folder, and its download.

    None where they are for no published one, or its folder was copied without the network.
    """
    if not isinstance(codec, Autoencoder) or codec.tuning is None:
        return None
    if text.name != codec.text_encoder:
        return None
    folder = Path(codec.model_name)
    if folder.is_dir():
        weights = any(folder.glob("transformer/*.safetensors"))
        return (codec.tuning, codec.model_name, None) if weights else None
    repository, _, revision = codec.model_name.partition("@")
    words = ["hf", "download", repository, "--local-dir", f"models/{Path(repository).name}"]
    words += ["--revision", revision] if revision else []
    return codec.tuning, words[4], shlex.join(words)

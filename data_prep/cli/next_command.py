"""What to do with a dataset: the command that trains on it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dit.codecs.text import TextEncoder
from dit.codecs.vae import Codec
from dit.codecs.vae.autoencoder import Autoencoder
from dit.command_line import python
from dit.parsing import YamlError, parse_yaml


def training_command(folder: Path, config: str, overrides: Mapping[str, Any]) -> str:
    """The command that trains on `folder`, ready for a shell."""
    words = [python(), *_script(), "--config-file", config]
    words += [f"dataset.path={_quoted(str(folder))}"]
    return shlex.join(words + [f"{key}={value}" for key, value in overrides.items()])


def _script() -> list[str]:
    """That of a checkout in this folder, else the installed one."""
    if Path("recipes/pretrain_dit.py").is_file() or find_spec("recipes") is None:
        return ["recipes/pretrain_dit.py"]
    return ["-m", "recipes.pretrain_dit"]


def _quoted(text: str) -> str:
    """A text for a key of the configuration: what YAML reads as anything else is quoted."""
    try:
        is_text = parse_yaml(text).values == text
    except YamlError:
        is_text = False
    return text if is_text else json.dumps(text, ensure_ascii=False)


def tuning_of(codec: Codec, text: TextEncoder) -> tuple[str, dict[str, str], str | None] | None:
    """Configuration and keys that tune the network such samples are for, and its download.

    None where they are for no published one, or its folder was copied without the network.
    """
    if not isinstance(codec, Autoencoder) or not codec.tuning or text.name != codec.text_encoder:
        return None
    config, *words = codec.tuning
    keys = dict(word.split("=") for word in words)
    folder = Path(codec.model_name)
    if folder.is_dir():
        weights = any(folder.glob("transformer/*.safetensors"))
        return (config, keys | {"checkpoint.load_hf": str(folder)}, None) if weights else None
    repository, _, revision = codec.model_name.partition("@")
    place = f"models/{Path(repository).name}"
    download = ["hf", "download", repository, "--local-dir", place]
    download += ["--revision", revision] if revision else []
    return config, keys | {"checkpoint.load_hf": place}, shlex.join(download)

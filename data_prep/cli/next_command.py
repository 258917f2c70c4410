"""Finds the command that trains on a dataset, to be printed after packing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.writing.dataset_folder import TRAIN_NAME
from dit.codecs.encoder_options import EncoderPadding
from dit.codecs.text import TextEncoder
from dit.codecs.vae import Codec
from dit.codecs.vae.autoencoder import Autoencoder
from dit.command_line import recipe_command
from dit.parsing import YamlError, parse_yaml

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def training_command(folder: Path, config: str, overrides: Mapping[str, Any]) -> str:
    """The shell command that trains on the dataset in `folder`.

    `config` is a configuration file, and `overrides` are keys with values that replace its
    settings.
    """
    words = ["--config-file", config, f"dataset.path={_quoted(str(folder))}"]
    words += [f"{key}={value}" for key, value in overrides.items()]
    return recipe_command("pretrain_dit", *words)


def fit_run(folder: Path, minutes: float | None, *, notify: Callable[[str], None]) -> list[str]:
    """Tries some training steps, writes train.yaml into `folder`, and returns lines to print.

    The last line is the command that trains. `minutes` is the time that training may take; None
    uses the default. The trial runs in a new process, without the variables of a launcher. If no
    configuration fits, the result is empty and `notify` gets the reason.
    """
    words = [sys.executable, "-m", "dit.fitting", str(folder)]
    words += [] if minutes is None else ["--minutes", f"{minutes:g}"]
    alone = {k: v for k, v in os.environ.items() if k not in _LAUNCHED} | {"WORLD_SIZE": "1"}
    try:
        done = subprocess.run(words, env=alone, capture_output=True, text=True, check=False)
    except KeyboardInterrupt:
        notify(f"interrupted: no {TRAIN_NAME} was written; the dataset is complete")
        return []
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        notify(f"no {TRAIN_NAME} was written: {reason}")
        return []
    return done.stdout.splitlines()


def _quoted(text: str) -> str:
    """`text` as a YAML value, quoted if YAML would read it as something other than text."""
    try:
        is_text = parse_yaml(text).values == text
    except YamlError:
        is_text = False
    return text if is_text else json.dumps(text, ensure_ascii=False)


def from_scratch(kind: str, codec: Codec, text: TextEncoder) -> tuple[str, dict[str, Any]]:
    """The configuration file and its overrides (key -> value) that train a new network.

    The network fits the latents of `codec` and the hidden states of `text`. `kind` is image or
    video.
    """
    config = f"conf/dit_xl_{kind}.yaml"
    keys: dict[str, Any] = {"model.in_channels": codec.channels}
    keys["model.crossattn_emb_size"] = text.width
    if text.settings.get("padding") == EncoderPadding.KEEP and is_published(codec, text):
        # Only networks of the codec's own family attend to the padding of a text encoder.
        config, *words = codec.tuning
        keys |= keys_of([word for word in words if word != "model.name=custom"])
        keys["lora.rank"] = "null"
    return config, keys


def is_published(codec: Codec, text: TextEncoder) -> bool:
    """Whether a published network reads the latents of `codec` and the hidden states of `text`."""
    return bool(codec.tuning) and text.name == codec.text_encoder


def keys_of(words: Sequence[str]) -> dict[str, str]:
    """Splits `words` such as `model.num_layers=2` into a dict from key to value."""
    return dict(word.split("=") for word in words)


def edit_keys(codec: Codec, references: int) -> dict[str, str]:
    """Overrides (key -> value) to fine-tune the published network of `codec` as an editing network.

    `references` is the number of reference pictures of each sample.
    """
    keys = keys_of(codec.tuning_of_edits)
    if most := keys.get("model.reference_latents"):
        keys["model.reference_latents"] = str(max(int(most), references))
    return keys


def tuning_of(codec: Codec, text: TextEncoder) -> tuple[str, dict[str, str], str | None] | None:
    """How to fine-tune the published network for samples of `codec` and `text`.

    Returns the configuration file, its overrides (key -> value), and the shell command that
    downloads the weights (None if `codec.model_name` is a local folder). Returns None instead if
    there is no such network, or if the local folder holds no weights of it.
    """
    if not (isinstance(codec, Autoencoder) and is_published(codec, text)):
        return None
    config, *words = codec.tuning
    keys = keys_of(words)
    folder = Path(codec.model_name)
    if folder.is_dir():
        weights = any(folder.glob("transformer/*.safetensors"))
        return (config, keys | {"checkpoint.load_hf": str(folder)}, None) if weights else None
    repository, _, revision = codec.model_name.partition("@")
    place = f"models/{Path(repository).name}"
    download = ["hf", "download", repository, "--local-dir", place]
    download += ["--revision", revision] if revision else []
    return config, keys | {"checkpoint.load_hf": place}, shlex.join(download)

"""The runs that a user starts from, one function each; `--recipe NAME` chooses.

This file is not called `dit.py`: the folder of a script is the first place that Python imports
from, so that name would hide the package `dit` from every script in this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dit.config import (
    CheckpointConfig,
    DatasetConfig,
    MockGeometry,
    ModelConfig,
    Precision,
    RunConfig,
    TrainConfig,
)
from dit.config_loading.load import ForWeights
from dit.models.registry import named_model

# Difficult on purpose: captions of one token, samples longer than half of a pack (285 of 512), and
# padding in nine samples of ten. Packs are full to 0.98 with a buffer of 100.
DEBUG_MIXTURE = (
    MockGeometry(height=30, width=38, text_length=40, weight=1.0),
    MockGeometry(frames=5, height=10, width=14, text_length=24, fps=12.0, weight=1.0),
    MockGeometry(height=22, width=26, text_length=7, weight=2.0),
    MockGeometry(height=14, width=18, text_length=64, weight=3.0),
    MockGeometry(height=6, width=10, text_length=1, weight=2.0),
    MockGeometry(height=8, width=8, text_length=1, weight=1.0),
)


def _sized(name: str) -> RunConfig:
    return RunConfig(model=named_model(name))


def dit_s() -> RunConfig:
    """DiT-S, 49 M parameters at text width 1024: 12 layers, width 384, 6 heads. Not measured."""
    return _sized("dit_s")


def dit_b() -> RunConfig:
    """DiT-B, 149 M parameters at text width 1024: 12 layers, width 768, 12 heads. Not measured."""
    return _sized("dit_b")


def dit_l() -> RunConfig:
    """DiT-L, 483 M parameters at text width 1024: 24 layers, width 1024, 16 heads. Not measured."""
    return _sized("dit_l")


def dit_xl() -> RunConfig:
    """DiT-XL, 692 M parameters at text width 1024: 28 layers, width 1152, 16 heads. Not measured.

    It is the base of a run that names no recipe. EDM, bf16, packs of 15,360 tokens, AdamW at 1e-4
    with a cosine to zero and no warm-up.
    """
    return _sized("dit_xl")


def dit_debug() -> RunConfig:
    """A model of 1.3 M parameters in float32 for tests: seconds on a CPU, on mock data.

    Layers, heads and widths divide by tensor, context and pipeline degrees of 2 and 4.
    """
    base = _sized("dit_s")
    model = replace(
        base.model,
        name="custom",
        num_layers=8,
        hidden_size=96,
        num_attention_heads=8,
        adaln_lora_dim=16,
        in_channels=4,
        crossattn_emb_size=32,
        precision=Precision.FP32,
    )
    return replace(
        base,
        model=model,
        dataset=DatasetConfig(
            mock=True,
            mock_samples=DEBUG_MIXTURE,
            task_encoder_seq_length=512,
            num_workers=0,
        ),
        train=TrainConfig(train_iters=20, global_batch_size=4, eval_interval=10, eval_iters=2),
        checkpoint=CheckpointConfig(save="runs/debug", save_interval=10),
    )


def for_weights(recipe: RunConfig, given: Callable[..., Any]) -> ForWeights | None:
    """The settings of network and objective that the weights in `checkpoint.load_hf` need.

    None if that key is not given. `recipe` is the run that is adapted; `given` returns the value
    that the user gave to a key, or None.
    """
    if given("checkpoint.load_hf") is None:
        return None
    # Imported late: it needs torch and Megatron-Core.
    from dit.convert.load_hf.settings import settings_of_folder

    return settings_of_folder(recipe, given)


def read_folder(folder: Path, model: ModelConfig) -> Any:
    """Reads a Diffusers folder as frozen base weights, for a run of adapters: a `ReadFolder`.

    Raises:
        ConvertError: the folder is damaged, or does not fit the network.
    """
    from dit.convert.load_hf.start import weights_of_folder

    return weights_of_folder(folder, model)


RECIPES: dict[str, Callable[[], RunConfig]] = {
    recipe.__name__: recipe for recipe in (dit_xl, dit_s, dit_b, dit_l, dit_debug)
}

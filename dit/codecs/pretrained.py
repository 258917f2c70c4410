"""Models of Diffusers and Transformers, loaded once a process, from a folder or from the hub."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dit.codecs.dataset_card import CodecError

PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One component of a pipeline's folder."""

    library: str  # diffusers or transformers
    kind: str  # class name
    model: str  # hub name or folder of the whole pipeline
    subfolder: str
    cache: str | None = None  # where downloads are kept; None for the library's own place
    precision: str | None = None  # None for what is no network, such as a tokenizer
    device: str = "cpu"
    local_only: bool = False  # whether nothing may be downloaded

    @property
    def where(self) -> dict[str, Any]:
        local = {"local_files_only": True} if self.local_only else {}
        return {"subfolder": self.subfolder, "cache_dir": self.cache, **local}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLocation:
    """Where a dataset card's models are now, if not where they were when it was written."""

    model: str | None = None  # hub name or folder; None for the card's own
    cache: str | None = None  # Hugging Face cache, or the folder of the pipeline itself
    tokenizer_cache: str | None = None
    local_only: bool = False  # whether nothing may be downloaded

    def settings(self, *, subfolder: str) -> dict[str, Any]:
        """What stands in for the settings of a card; `subfolder` is one that the model has."""
        found: dict[str, Any] = {"local_only": self.local_only}
        model = self.model
        if self.cache and model is None and (Path(self.cache) / subfolder).is_dir():
            model = self.cache
        elif self.cache:
            found["cache"] = self.cache
        if model:
            found["model_name"] = model
        if self.tokenizer_cache:
            found["tokenizer_cache"] = self.tokenizer_cache
        return found


def _class_of(part: Part) -> Any:
    import importlib

    try:
        return getattr(importlib.import_module(part.library), part.kind)
    except ImportError:
        raise CodecError(
            f"{part.kind} needs the package {part.library}; install it with"
            " pip install 'megatron-dit[prep]'"
        ) from None


def _unusable(part: Part, error: Exception) -> CodecError:
    return CodecError(
        f"--model_name {part.model}: {part.subfolder}/ cannot be loaded as {part.kind} ({error});"
        " name a folder or a hub model in the layout of Diffusers"
    )


@lru_cache
def model_config_of(part: Part) -> Any:
    """The configuration alone, without the weights.

    Raises:
        CodecError: there is none.
    """
    kind = _class_of(part)
    try:
        if part.library == "diffusers":
            return kind.load_config(part.model, **part.where)
        return kind.config_class.from_pretrained(part.model, **part.where)
    except (OSError, ValueError) as error:
        raise _unusable(part, error) from None


@lru_cache
def load(part: Part) -> Any:
    """The component itself; networks without gradients, on their device.

    Raises:
        CodecError: it cannot be loaded.
    """
    import torch

    kind = _class_of(part)
    try:
        if part.precision is None:
            return kind.from_pretrained(part.model, **part.where)
        dtype = getattr(torch, part.precision)
        name = "torch_dtype" if part.library == "diffusers" else "dtype"
        model = kind.from_pretrained(part.model, **part.where, **{name: dtype})
    except (OSError, ValueError) as error:
        raise _unusable(part, error) from None
    _tie(model)
    return model.requires_grad_(False).eval().to(part.device)


def forget() -> None:
    """Lets go of every network that was loaded here."""
    load.cache_clear()


def _tie(model: Any) -> None:
    """Gives T5's encoder its token embedding, where the file holds it as `shared` alone.

    Transformers 5 leaves the encoder's own copy at random then, and says nothing.
    """
    shared, encoder = getattr(model, "shared", None), getattr(model, "encoder", None)
    if shared is not None and encoder is not None and hasattr(encoder, "embed_tokens"):
        encoder.embed_tokens.weight = shared.weight

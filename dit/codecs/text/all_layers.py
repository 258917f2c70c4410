"""The text encoder of Cosmos-Predict2.5: the states of all layers of Qwen2.5-VL."""

# L tokens, E width of the embedding

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from dit.codecs.dataset_card import CodecError
from dit.codecs.pretrained import model_config_of
from dit.codecs.text.pretrained_encoder import TEXT_DTYPE, PretrainedTextEncoder

_TEMPLATE = 30  # tokens of the pipeline's instruction before and after a caption, about
_WEIGHT, _BIAS = "crossattn_proj.0.weight", "crossattn_proj.0.bias"


@dataclass(frozen=True, kw_only=True)
class CosmosPredict25Text(PretrainedTextEncoder):
    """Qwen2.5-VL; each layer's states are normalised, then all are put side by side.

    The pipeline pads captions to `max_length` tokens and gives the network no mask. The rows of the
    padding are attended to, and behind a caption they depend on it, so all rows are kept.
    """

    name: ClassVar[str] = "cosmos_predict25"
    network: ClassVar[str] = "Qwen2_5_VLForConditionalGeneration"
    default_model: ClassVar[str] = "nvidia/Cosmos-Predict2.5-2B@diffusers/base/post-trained"
    options: ClassVar[frozenset[str]] = PretrainedTextEncoder.options | {"text_projection"}

    text_projection: str | None = None
    """Folder of the transformer whose frozen text projection is applied; None for none."""

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        group = parser.add_argument_group(f"text encoder {cls.name}")
        group.add_argument(
            "--text_projection",
            type=Path,
            metavar="DIR",
            help="Folder of a Cosmos-Predict2.5 transformer in the layout of Diffusers: store texts"
            " as its crossattn_proj makes them, 1,024 numbers a token for 100,352, for training"
            " that leaves this projection as it is. (default: the states of all layers)",
        )

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        given = str(args.text_projection) if args.text_projection else None
        encoder = replace(super().from_arguments(args), text_projection=given)
        encoder._check_projection()
        return encoder

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        given = settings.get("text_projection")
        return replace(super().from_settings(settings), text_projection=given)

    @property
    def settings(self) -> dict[str, Any]:
        given = {"text_projection": self.text_projection} if self.text_projection else {}
        return super().settings | given

    @property
    def _width_of_layers(self) -> int:
        config = model_config_of(self._part(self.network, self.subfolders[0])).get_text_config()
        return config.num_hidden_layers * config.hidden_size

    @property
    def width(self) -> int:  # type: ignore[override] # configuration or projection has it
        if self.text_projection is None:
            return self._width_of_layers
        return len(_projection(self.text_projection)[1])

    @property
    def notices(self) -> tuple[str, ...]:
        size = self.max_length * self.width * TEXT_DTYPE.itemsize
        if self.text_projection is not None or size < 2**20:
            return ()
        return (
            f"each caption takes {size / 1e6:.0f} MB ({self.max_length} tokens of {self.width:,}"
            " numbers); --text_projection stores its projection, for training that freezes this",
        )

    def rows_of(self, caption: str) -> int:
        del caption
        return self.max_length

    def is_cut(self, caption: str) -> bool:
        return self.count(caption) > self.max_length - _TEMPLATE

    def embed(self, caption: str) -> dict[str, Tensor]:
        from diffusers.pipelines.cosmos import pipeline_cosmos2_5_predict as pipeline

        parts: Any = SimpleNamespace(
            text_encoder=self.load_network(self.network, self.subfolders[0]),
            tokenizer=self.load_tokenizer(self.subfolders[1]),
            _execution_device=torch.device(self.device),
        )
        # Private function of the pipeline: the weights expect its instruction and its padding.
        get = pipeline.Cosmos2_5_PredictBasePipeline._get_prompt_embeds
        states_LE = get(parts, caption, self.max_length)[0]
        if self.text_projection is None:
            return {"text": states_LE}
        weight, bias = _projection(self.text_projection)
        projected_LE = functional.linear(states_LE.float().cpu(), weight, bias)
        return {"text": functional.gelu(projected_LE)}

    def _check_projection(self) -> None:
        """Raises CodecError where the projection does not fit the text encoder."""
        if self.text_projection is None:
            return
        width = _projection(self.text_projection)[0].shape[1]
        if width != self._width_of_layers:
            raise CodecError(
                f"--text_projection {self.text_projection} takes {width} numbers a token, and the"
                f" text encoder of {self.model_name} makes {self._width_of_layers}; give the"
                " transformer of the same pipeline"
            )


@lru_cache
def _projection(folder: str) -> tuple[Tensor, Tensor]:
    """Weight and bias of a Diffusers transformer's `crossattn_proj`, float32.

    Raises:
        CodecError: the folder has none.
    """
    found = dict[str, Tensor]()
    try:
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safetensors.safe_open(path, "pt") as file:
                names = {_WEIGHT, _BIAS} & set(file.keys())
                found |= {name: file.get_tensor(name).float() for name in names}
    except (OSError, SafetensorError) as error:
        raise CodecError(f"--text_projection {folder}: {error}") from None
    if len(found) < 2:
        raise CodecError(
            f"--text_projection {folder}: no *.safetensors in it has {_WEIGHT} and {_BIAS}; give"
            " the folder transformer of a Cosmos-Predict2.5 pipeline"
        )
    return found[_WEIGHT], found[_BIAS]

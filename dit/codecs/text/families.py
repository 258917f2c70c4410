"""Text encoders of several families, as in Diffusers' pipelines.

Other families have files of their own.
"""

# L tokens, E width of the embedding

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from dit.codecs.dataset_card import CodecError
from dit.codecs.encoder_options import EncoderPadding
from dit.codecs.pretrained import model_config_of, pipeline_class
from dit.codecs.text.encoder import requested_length
from dit.codecs.text.pretrained_encoder import (
    TEXT_DTYPE,
    MaskedTextEncoder,
    PretrainedTextEncoder,
    UnmaskedTextEncoder,
)
from dit.system_errors import explained

_LTX = {
    "LTXPipeline": (False, 128),
    "LTXImageToVideoPipeline": (False, 128),
    "LTXConditionPipeline": (True, 256),
}
"""By pipeline class of LTX-Video: whether T5 gets the mask of padding, and most tokens of a
caption."""
_TEMPLATE = 30  # tokens of Predict2.5's instruction before and after a caption, about


class CosmosText(MaskedTextEncoder):
    """Text encoder of Cosmos: T5, whose padding is masked."""

    name = "cosmos"
    network = "T5EncoderModel"
    default_model = "nvidia/Cosmos-1.0-Diffusion-7B-Text2World"


class ChromaText(MaskedTextEncoder):
    """Text encoder of Chroma: T5, which masks padding; the first row of padding is stored, too."""

    name = "chroma"
    network = "T5EncoderModel"
    default_model = "lodestones/Chroma1-HD"
    padding_rows = 1


class WanText(MaskedTextEncoder):
    """Text encoder of Wan: UMT5 with a mask, on captions with repaired characters."""

    name = "wan"
    network = "UMT5EncoderModel"
    default_model = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"

    def clean(self, caption: str) -> str:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return prompt_clean(caption)


class FluxText(UnmaskedTextEncoder):
    """Text encoders of FLUX.1: embeddings of T5, and the pooled output of CLIP-L."""

    name = "flux"
    network = "T5EncoderModel"
    subfolders = ("text_encoder_2", "tokenizer_2")
    default_model = "black-forest-labs/FLUX.1-dev"

    def embed(self, caption: str) -> dict[str, Tensor]:
        ids, mask = self.tokens(caption, "tokenizer_2", self.max_length)
        # No mask: FLUX's pipeline lets T5 attend to the padding.
        states_LE = self.load_network("T5EncoderModel", "text_encoder_2")(ids).last_hidden_state[0]
        length = self.load_tokenizer("tokenizer").model_max_length
        ids, _ = self.tokens(caption, "tokenizer", length)
        pooled = self.load_network("CLIPTextModel", "text_encoder")(ids).pooler_output
        return {"text": self.stored(states_LE, mask), "pooled_text": pooled[0]}


_CLIP_ROWS = 77  # `model_max_length` of CLIP's tokenizers


class Sd3Text(UnmaskedTextEncoder):
    """Text encoders of Stable Diffusion 3: two CLIPs with pooled outputs, then T5.

    The features of both CLIPs are concatenated, and filled with zeros to the width of T5's rows.
    """

    name = "sd3"
    network = "T5EncoderModel"
    subfolders = ("text_encoder_3", "tokenizer_3")
    default_model = "stabilityai/stable-diffusion-3-medium-diffusers"
    default_length = 256

    @property
    def most_rows(self) -> int:
        return _CLIP_ROWS + self.max_length

    def rows_of(self, caption: str) -> int:
        if self.padding is EncoderPadding.KEEP:
            return self.most_rows
        return super().rows_of(caption) + min(self.length_of(caption), _CLIP_ROWS)

    def embed(self, caption: str) -> dict[str, Tensor]:
        ids, mask = self.tokens(caption, "tokenizer_3", self.max_length)
        # No masks: the pipeline lets all three attend to the padding.
        states_LE = self.load_network("T5EncoderModel", "text_encoder_3")(ids).last_hidden_state[0]
        rows, pooled = zip(*(self._clip(caption, end) for end in ("", "_2")), strict=True)
        clip_LE = torch.cat(rows, dim=-1)
        clip_LE = functional.pad(clip_LE, (0, states_LE.shape[-1] - clip_LE.shape[-1]))
        text_LE = torch.cat((clip_LE, self.stored(states_LE, mask)))
        return {"text": text_LE, "pooled_text": torch.cat(pooled)}

    def _clip(self, caption: str, end: str) -> tuple[Tensor, Tensor]:
        """Rows [L, E] and pooled vector [P] of `caption` from one of the two CLIP encoders.

        `end` is the end of the name of its folder: "" or "_2".
        """
        length = self.load_tokenizer("tokenizer").model_max_length
        ids, mask = self.tokens(caption, f"tokenizer{end}", length)
        network = self.load_network("CLIPTextModelWithProjection", f"text_encoder{end}")
        made = network(ids, output_hidden_states=True)
        return self.stored(made.hidden_states[-2][0], mask), made.text_embeds[0]


class HunyuanText(PretrainedTextEncoder):
    """Text encoders of HunyuanVideo 1.5: Qwen2.5-VL and ByT5.

    Qwen2.5-VL reads an instruction and the caption, ByT5 the words in quotation marks.
    """

    name = "hunyuan"
    network = "Qwen2_5_VLTextModel"
    default_model = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    default_length = 1000

    def embed(self, caption: str) -> dict[str, Tensor]:
        from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as pipeline

        Pipeline = pipeline.HunyuanVideo15Pipeline

        # Private functions of the pipeline: the weights expect its instruction and its cuts.
        text, mask = Pipeline._get_mllm_prompt_embeds(
            self.load_network(self.network, "text_encoder"),
            self.load_tokenizer("tokenizer"),
            caption,
            self.device,  # type: ignore[arg-type] # it is only handed to `to`
            tokenizer_max_length=self.max_length,
        )
        glyphs, glyph_mask = Pipeline._get_byt5_prompt_embeds(
            self.load_tokenizer("tokenizer_2"),
            self.load_network("T5EncoderModel", "text_encoder_2"),
            caption,
            self.device,  # type: ignore[arg-type]
        )
        return {"text": text[mask.bool()], "text_2": glyphs[glyph_mask.bool()]}


@dataclass(frozen=True, kw_only=True)
class CosmosPredict25Text(PretrainedTextEncoder):
    """Text encoder of Cosmos-Predict2.5: the normalised states of all layers of Qwen2.5-VL, joined.

    The pipeline pads captions to `max_length` tokens and gives the encoder no mask. The network
    attends to rows of padding, which depend on the caption before them, so all rows are kept.
    """

    name = "cosmos_predict25"
    network = "Qwen2_5_VLForConditionalGeneration"
    default_model = "nvidia/Cosmos-Predict2.5-2B@diffusers/base/post-trained"
    options = PretrainedTextEncoder.options | {"text_projection"}

    text_projection: str | None = None
    """Folder of the transformer whose frozen text projection is applied; None: no projection."""

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        given = str(args.text_projection) if args.text_projection else None
        encoder = replace(super().from_arguments(args), text_projection=given)
        if given is not None:
            width, made = projection_of(given)[0].shape[1], encoder._width_of_layers
            if width != made:
                raise CodecError(
                    f"--text_projection {given} takes {width} numbers a token, but the text encoder"
                    f" of {encoder.model_name} makes {made}; give the transformer of the same"
                    " pipeline"
                )
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
        return len(projection_of(self.text_projection)[1])

    @property
    def notices(self) -> tuple[str, ...]:
        size = self.max_length * self.width * TEXT_DTYPE.itemsize
        if self.text_projection is not None or size < 2**20:
            return ()
        return (
            f"each caption takes {size / 1e6:.0f} MB ({self.max_length} tokens of {self.width:,}"
            " numbers); --text_projection FOLDER stores a small projection instead, for training"
            " with that projection frozen",
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
        # A private function of the pipeline: the weights expect its instruction and its padding.
        get = pipeline.Cosmos2_5_PredictBasePipeline._get_prompt_embeds
        states_LE = get(parts, caption, self.max_length)[0]
        if self.text_projection is None:
            return {"text": states_LE}
        weight, bias = projection_of(self.text_projection)
        projected_LE = functional.linear(states_LE.float().cpu(), weight, bias)
        return {"text": functional.gelu(projected_LE)}


@dataclass(frozen=True, kw_only=True)
class LtxText(PretrainedTextEncoder):
    """Text encoder of LTX-Video: T5 on a padded caption, whose padding is cut off afterwards.

    The class of the pipeline decides whether T5 attends to padding; the diffusion transformer never
    sees it.
    """

    name = "ltx"
    network = "T5EncoderModel"
    default_model = "Lightricks/LTX-Video-0.9.5"

    masked: bool = True

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        encoder = super().from_arguments(args)
        masked, rows = encoder._of_pipeline
        return replace(encoder, masked=masked, max_length=requested_length(args, rows))

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        encoder = super().from_settings(settings)
        if "masked" in settings:
            return replace(encoder, masked=settings["masked"])
        masked, rows = encoder._of_pipeline  # of no card: the pipeline's own
        return replace(encoder, masked=masked, max_length=rows)

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"masked": self.masked}

    @property
    def _of_pipeline(self) -> tuple[bool, int]:
        """Whether T5 gets the mask of padding in this pipeline, and the most tokens of a caption.

        Raises:
            CodecError: the class of the pipeline is unknown.
        """
        found = pipeline_class(self._part(self.network, self.subfolders[0]))
        if found not in _LTX:
            raise CodecError(
                f"--model_name {self.model_name} has the pipeline class {found}, which does not say"
                " how LTX-Video's text encoder reads captions; give a folder or a hub model with"
                f" the model_index.json of {' or '.join(_LTX)}"
            )
        return _LTX[found]

    def embed(self, caption: str) -> dict[str, Tensor]:
        folder, tokenizer = self.subfolders
        ids, mask = self.tokens(caption, tokenizer, self.max_length)
        network = self.load_network(self.network, folder)
        states = network(ids, attention_mask=mask if self.masked else None).last_hidden_state
        return {"text": states[0, : int(mask.sum())]}


_WEIGHT, _BIAS = "crossattn_proj.0.weight", "crossattn_proj.0.bias"


@lru_cache
def projection_of(folder: str) -> tuple[Tensor, Tensor]:
    """Weight and bias of `crossattn_proj` in the Diffusers transformer in `folder`, float32.

    Raises:
        CodecError: the files in the folder cannot be read, or lack one of the two tensors.
    """
    found = dict[str, Tensor]()
    try:
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safetensors.safe_open(path, "pt") as file:
                names = {_WEIGHT, _BIAS} & set(file.keys())
                found |= {name: file.get_tensor(name).float() for name in names}
    except (OSError, SafetensorError) as error:
        raise CodecError(
            f"--text_projection {folder} cannot be read ({explained(error)}); give the folder"
            " transformer of a Cosmos-Predict2.5 pipeline"
        ) from None
    if len(found) < 2:
        raise CodecError(
            f"--text_projection {folder}: no *.safetensors in it has {_WEIGHT} and {_BIAS}; give"
            " the folder transformer of a Cosmos-Predict2.5 pipeline"
        )
    return found[_WEIGHT], found[_BIAS]

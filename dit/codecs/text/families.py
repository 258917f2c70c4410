"""Text encoders of FLUX, Wan, HunyuanVideo 1.5 and Cosmos, used as in their pipelines."""

# L tokens, E width of the embedding

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dit.codecs.text.pretrained_encoder import MaskedTextEncoder, PretrainedTextEncoder


@dataclass(frozen=True, kw_only=True)
class CosmosText(MaskedTextEncoder):
    """T5, masked."""

    name: ClassVar[str] = "cosmos"
    network: ClassVar[str] = "T5EncoderModel"
    default_model: ClassVar[str] = "nvidia/Cosmos-1.0-Diffusion-7B-Text2World"


@dataclass(frozen=True, kw_only=True)
class WanText(MaskedTextEncoder):
    """UMT5, masked, on captions with repaired characters and single spaces."""

    name: ClassVar[str] = "wan"
    network: ClassVar[str] = "UMT5EncoderModel"
    default_model: ClassVar[str] = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"

    def clean(self, caption: str) -> str:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return prompt_clean(caption)


@dataclass(frozen=True, kw_only=True)
class FluxText(PretrainedTextEncoder):
    """Embeddings of T5, and the pooled output of CLIP-L."""

    name: ClassVar[str] = "flux"
    network: ClassVar[str] = "T5EncoderModel"
    subfolders: ClassVar[tuple[str, str]] = ("text_encoder_2", "tokenizer_2")
    default_model: ClassVar[str] = "black-forest-labs/FLUX.1-dev"

    def embed(self, caption: str) -> dict[str, Tensor]:
        ids, mask = self.tokens(caption, "tokenizer_2", self.max_length)
        # No mask: FLUX's pipeline lets T5 attend to the padding. Only the caption's part is kept.
        states = self.load_network("T5EncoderModel", "text_encoder_2")(ids).last_hidden_state
        length = self.load_tokenizer("tokenizer").model_max_length
        ids, _ = self.tokens(caption, "tokenizer", length)
        pooled = self.load_network("CLIPTextModel", "text_encoder")(ids).pooler_output
        return {"text": states[0, : int(mask.sum())], "pooled_text": pooled[0]}


@dataclass(frozen=True, kw_only=True)
class HunyuanText(PretrainedTextEncoder):
    """Qwen2.5-VL on an instruction with the caption, and ByT5 on the words in quotation marks."""

    name: ClassVar[str] = "hunyuan"
    network: ClassVar[str] = "Qwen2_5_VLTextModel"
    default_model: ClassVar[str] = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    default_length: ClassVar[int] = 1000

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

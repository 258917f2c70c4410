"""Text encoders of HiDream-I1, by its pipeline: two CLIPs, T5, and all layers of Llama 3.1.

The published folder does not contain Llama.
"""

# L tokens, E width of the embedding, S hidden states, H width of one of them

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from dit.codecs.pretrained import PipelineComponent, has_component, load, model_config_of
from dit.codecs.text.pretrained_encoder import TEXT_DTYPE, PretrainedTextEncoder

_LLAMA, _LETTERS = "text_encoder_4", "tokenizer_4"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@dataclass(frozen=True, kw_only=True)
class HiDreamText(PretrainedTextEncoder):
    """Text encoders of HiDream: T5, the states of all layers of Llama, and two pooled CLIPs.

    The encoders mask padding, but the network attends to its rows, so all rows are kept.
    """

    name = "hidream"
    network = "T5EncoderModel"
    subfolders = ("text_encoder_3", "tokenizer_3")
    default_model = "HiDream-ai/HiDream-I1-Full"
    default_length = 128
    options = PretrainedTextEncoder.options | {"llama_model"}

    llama_model: str | None = None

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        given = getattr(args, "llama_model", None)
        return replace(super().from_arguments(args), llama_model=given)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        given = settings.get("llama_model")
        return replace(super().from_settings(settings), llama_model=given)

    @property
    def settings(self) -> dict[str, Any]:
        given = {"llama_model": self.llama_model} if self.llama_model else {}
        return super().settings | given

    @property
    def notices(self) -> tuple[str, ...]:
        config = model_config_of(self._llama_part("LlamaForCausalLM", _LLAMA))
        width = config.num_hidden_layers * config.hidden_size
        size = self.max_length * (width + self.width) * TEXT_DTYPE.itemsize
        return (
            f"each caption takes {size / 1e6:.1f} MB: {self.max_length} rows of"
            f" {config.num_hidden_layers} hidden states of Llama and of T5, those of padding too",
        )

    def rows_of(self, caption: str) -> int:
        del caption
        return 2 * self.max_length

    def embed(self, caption: str) -> dict[str, Tensor]:
        alone: Any = {"do_classifier_free_guidance": False, "max_sequence_length": self.max_length}
        t5, _, llama, _, pooled, _ = self._pipeline.encode_prompt(
            caption, device=self.device, **alone
        )
        states_LX = llama[:, 0].transpose(0, 1).flatten(1)
        return {"text": t5[0], "text_2": states_LX, "pooled_text": pooled[0]}

    @property
    def _pipeline(self) -> Any:
        """Diffusers' pipeline with the text encoders and no other component."""
        from diffusers.pipelines.hidream_image.pipeline_hidream_image import HiDreamImagePipeline

        clip, precision = "CLIPTextModelWithProjection", self.precision
        llama = replace(
            self._llama_part("LlamaForCausalLM", _LLAMA), precision=precision, device=self.device
        )
        return self.pipeline_of(
            HiDreamImagePipeline,
            text_encoder=self.load_network(clip, "text_encoder"),
            tokenizer=self.load_tokenizer("tokenizer"),
            text_encoder_2=self.load_network(clip, "text_encoder_2"),
            tokenizer_2=self.load_tokenizer("tokenizer_2"),
            text_encoder_3=self.load_network(self.network, self.subfolders[0]),
            tokenizer_3=self.load_tokenizer(self.subfolders[1]),
            text_encoder_4=load(llama),
            tokenizer_4=load(self._llama_part("AutoTokenizer", _LETTERS)),
        )

    def _llama_part(self, kind: str, subfolder: str) -> PipelineComponent:
        part = self._part(kind, subfolder)
        if self.llama_model is None and has_component(part):
            return part
        apart: Any = {"subfolder": "", "option": "--llama_model"}
        return replace(part, model=self.llama_model or LLAMA, **apart)

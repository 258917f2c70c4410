"""Text encoders of Anima, by functions of its pipeline: Qwen3, with or without conditioner.

The conditioner starts from embeddings of T5's tokens, which attend to the states of Qwen3. Its
output has a row for each token of T5. Training fills these rows up with zeros
(`model.text_pad_to`).
"""

# L tokens of T5, S states of Qwen3, E width of the embedding

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from dit.codecs.pretrained import PipelineComponent, load, model_config_of
from dit.codecs.text.pretrained_encoder import PretrainedTextEncoder
from dit.token_ids import TOKEN_IDS, as_digits


class AnimaText(PretrainedTextEncoder):
    """Text encoder of Anima: Qwen3 and the conditioner, with a row for each token of T5.

    The end token has a row, too.
    """

    name = "anima"
    network = "Qwen3Model"
    default_model = "circlestone-labs/Anima-Base-v1.0-Diffusers"
    subfolders = ("text_encoder", "t5_tokenizer")
    read_by_network = "tokenizer"  # folder of the tokenizer of Qwen3

    @property
    def width(self) -> int:  # type: ignore[override] # the conditioner's configuration has it
        return model_config_of(self._conditioner)["target_dim"]

    @property
    def _conditioner(self) -> PipelineComponent:
        return PipelineComponent.of(self, "diffusers", "AnimaTextConditioner", "text_conditioner")

    @property
    def pipeline(self) -> Any:
        """The components that the encoding step of Diffusers' pipeline reads."""
        return SimpleNamespace(
            text_encoder=self.load_network(self.network, self.subfolders[0]),
            tokenizer=self.load_tokenizer(self.read_by_network),
            t5_tokenizer=self.load_tokenizer(self.subfolders[1]),
        )

    def is_cut(self, caption: str) -> bool:
        ids = self.load_tokenizer(self.read_by_network)(caption, verbose=False).input_ids
        return super().is_cut(caption) or len(ids) > self.max_length

    def read(self, caption: str) -> dict[str, Any]:
        """The states of Qwen3 and the token ids of T5 for `caption`, by the pipeline's names.

        Each has a mask of padding beside it.
        """
        from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep

        return AnimaTextEncoderStep.encode_prompt(
            self.pipeline,
            caption,
            prepare_unconditional_embeds=False,
            max_sequence_length=self.max_length,
            device=self.device,  # type: ignore[arg-type]
        )

    def embed(self, caption: str) -> dict[str, Tensor]:
        read = self.read(caption)
        part = replace(self._conditioner, precision=self.precision, device=self.device)
        mask_1L: Any = read["t5_attention_mask"]
        rows_1LE = load(part)(
            source_hidden_states=read["qwen_prompt_embeds"],
            target_input_ids=read["t5_input_ids"],
            target_attention_mask=mask_1L,
            source_attention_mask=read["qwen_attention_mask"],
        )
        return {"text": rows_1LE[0, : int(mask_1L.sum())]}


class AnimaStates(AnimaText):
    """Text encoder that returns the inputs of Anima's conditioner, for networks that contain it.

    The inputs are the hidden states of Qwen3 and the token ids of T5. The empty caption has no
    token of Qwen3; one row of zeros, which adds nothing in attention, stands for its states.
    """

    name = "anima_states"

    @property
    def width(self) -> int:  # type: ignore[override] # Qwen3's configuration has it
        return super(AnimaText, self).width

    def embed(self, caption: str) -> dict[str, Tensor]:
        read = self.read(caption)
        states_SI, (ids_L,) = read["qwen_prompt_embeds"][0], read["t5_input_ids"]
        return {"text": states_SI, TOKEN_IDS: as_digits(ids_L)}

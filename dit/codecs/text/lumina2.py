"""Text encoders of Lumina Image 2.0 and ERNIE-Image: states of the layer before the last.

Lumina's captions follow an instruction, but its negative prompts and the empty caption do not.
ERNIE-Image has no instruction.
"""

# L tokens, E width of the embedding

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dit.codecs.text.pretrained_encoder import PretrainedTextEncoder, as_stored


class Lumina2Text(PretrainedTextEncoder):
    """The text encoder of Lumina Image 2.0: Gemma 2, whose mask hides padding."""

    name = "lumina2"
    network = "Gemma2Model"
    default_model = "Alpha-VLLM/Lumina-Image-2.0"
    default_length = 256
    longest_text = 299  # Diffusers' network has angles for one place more
    instruction_tokens = 30  # before the caption, about

    @property
    def pipeline(self) -> Any:
        """Diffusers' pipeline with the text encoder and no other component."""
        from diffusers.pipelines.lumina2.pipeline_lumina2 import Lumina2Pipeline

        return self.pipeline_of(Lumina2Pipeline)

    def length_of(self, caption: str) -> int:
        return super().length_of(caption) + self.instruction_tokens * bool(caption)

    def clean(self, caption: str) -> str:
        """`caption` after the instruction of Lumina's pipeline; an empty caption stays empty."""
        return f"{self.pipeline.system_prompt} <Prompt Start> {caption}" if caption else ""

    def embed(self, caption: str) -> dict[str, Tensor]:
        if not caption:
            return self._negative(caption)
        alone: Any = {"do_classifier_free_guidance": False, "max_sequence_length": self.max_length}
        rows_1LE, mask_1L, *_ = self.pipeline.encode_prompt(caption, device=self.device, **alone)
        return {"text": rows_1LE[mask_1L.bool()]}

    def encode_negative(self, prompt: str) -> dict[str, Tensor]:
        with torch.inference_mode():
            return as_stored(self._negative(prompt))

    def _negative(self, prompt: str) -> dict[str, Tensor]:
        *_, rows_1LE, mask_1L = self.pipeline.encode_prompt(
            "", negative_prompt=prompt, device=self.device, max_sequence_length=self.max_length
        )
        return {"text": rows_1LE[mask_1L.bool()]}


class ErnieImageText(PretrainedTextEncoder):
    """Text encoder of ERNIE-Image: Ministral 3; the empty caption is a start token."""

    name = "ernie_image"
    network = "Mistral3Model"
    default_model = "baidu/ERNIE-Image"
    default_length = 1024  # the pipeline cuts nothing

    def embed(self, caption: str) -> dict[str, Tensor]:
        """The rows `text` [L, E] of `caption`, computed as by ErnieImagePipeline."""
        tokenizer = self.load_tokenizer(self.subfolders[1])
        ids = tokenizer(caption, truncation=True, max_length=self.max_length).input_ids
        begins = tokenizer.bos_token_id
        ids_1L = torch.tensor([ids or [begins or 0]], device=self.device)
        network = self.load_network(self.network, self.subfolders[0])
        return {"text": network(ids_1L, output_hidden_states=True).hidden_states[-2][0]}

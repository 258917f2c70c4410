"""Text encoders that take one layer's states of a language model.

Lumina Image 2.0, ERNIE-Image and Z-Image use the layer before the last. Lumina's captions follow an
instruction, but its negative prompts and the empty caption do not; ERNIE-Image has no instruction.
Z-Image's caption is the user's message of a chat, up to where the answer begins. OmniGen2 uses the
last states of Qwen2.5-VL, without pictures: the caption is the user's message after a system prompt
(`OmniGen2Pipeline.encode_prompt` of the published code). The embeddings of Z-Image and OmniGen2
have rows for all tokens of the chat, and negative prompts and the empty caption are chats, too.
"""

# L tokens, E width of the embedding

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dit.codecs.text.pretrained_encoder import PretrainedTextEncoder, as_stored

SYSTEM = (
    "You are a helpful assistant that generates high-quality images based on user instructions."
)


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


class ZImageText(PretrainedTextEncoder):
    """Text encoder of Z-Image: Qwen3, whose mask hides the padding."""

    name = "zimage"
    network = "Qwen3Model"
    default_model = "Tongyi-MAI/Z-Image"
    longest_text = 1504  # what Diffusers' network has angles for
    chat_tokens = 8  # beside the caption, about

    @property
    def pipeline(self) -> Any:
        """Diffusers' pipeline with the text encoder and no other component."""
        from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline

        return self.pipeline_of(ZImagePipeline)

    def length_of(self, caption: str) -> int:
        return super().length_of(caption) + self.chat_tokens

    def clean(self, caption: str) -> str:
        """The chat of `caption` as text, as `ZImagePipeline.encode_prompt` tokenises it."""
        tokenizer = self.load_tokenizer(self.subfolders[1])
        chat: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": caption}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=True,
        )
        return chat

    def embed(self, caption: str) -> dict[str, Tensor]:
        alone: Any = {"do_classifier_free_guidance": False, "max_sequence_length": self.max_length}
        (rows_LE,), _ = self.pipeline.encode_prompt(caption, device=self.device, **alone)
        return {"text": rows_LE}


class OmniGen2Text(PretrainedTextEncoder):
    """Text encoder of OmniGen2: Qwen2.5-VL on a caption without padding."""

    name = "omnigen2"
    network = "Qwen2_5_VLForConditionalGeneration"
    default_model = "OmniGen2/OmniGen2"
    subfolders = ("mllm", "processor")
    default_length = 1024  # as its inference.py asks for
    chat_tokens = 26  # beside the caption, about

    def length_of(self, caption: str) -> int:
        return super().length_of(caption) + self.chat_tokens

    def clean(self, caption: str) -> str:
        """The chat of `caption` as text, as OmniGen2's pipeline tokenises it."""
        turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": caption}]
        tokenizer = self.load_tokenizer(self.subfolders[1])
        chat: Any = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=False
        )
        return chat

    def embed(self, caption: str) -> dict[str, Tensor]:
        tokenizer = self.load_tokenizer(self.subfolders[1])
        given = tokenizer(
            [self.clean(caption)], max_length=self.max_length, truncation=True, return_tensors="pt"
        ).to(self.device)
        # Without the language-model head, whose output nothing reads.
        network = self.load_network(self.network, self.subfolders[0]).model
        states = network(given.input_ids, attention_mask=given.attention_mask)
        return {"text": states.last_hidden_state[0]}

"""Text encoders that read a caption as a chat, as in the pipelines of Z-Image and OmniGen2.

Z-Image uses the states of Qwen3's layer before the last: the caption is the user's turn, and the
answer is begun. OmniGen2 uses the last states of Qwen2.5-VL, without pictures: the caption is the
user's turn after a system prompt (`OmniGen2Pipeline.encode_prompt` of the published code). No rows
are cut off, and negative prompts and the empty caption are chats, too.
"""

# L tokens, E width of the embedding

from __future__ import annotations

from typing import Any

from torch import Tensor

from dit.codecs.text.pretrained_encoder import PretrainedTextEncoder

SYSTEM = (
    "You are a helpful assistant that generates high-quality images based on user instructions."
)


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
        # Without the head that says words, which nothing reads.
        network = self.load_network(self.network, self.subfolders[0]).model
        states = network(given.input_ids, attention_mask=given.attention_mask)
        return {"text": states.last_hidden_state[0]}

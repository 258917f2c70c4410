"""The text encoder of Z-Image: states of the layer before the last of Qwen3, by its pipeline.

Captions, negative prompts and the empty caption are a user's turn, with the answer begun.
"""

# L tokens, E width of the embedding

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from dit.codecs.text.pretrained_encoder import PretrainedTextEncoder


class ZImageText(PretrainedTextEncoder):
    """Qwen3, whose mask hides the padding."""

    name: ClassVar[str] = "zimage"
    network: ClassVar[str] = "Qwen3Model"
    default_model: ClassVar[str] = "Tongyi-MAI/Z-Image"
    chat_tokens: ClassVar[int] = 8  # beside the caption, about

    @property
    def pipeline(self) -> Any:
        """Diffusers' pipeline around the text encoder alone."""
        from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline

        return self.pipeline_of(ZImagePipeline)

    def length_of(self, caption: str) -> int:
        return super().length_of(caption) + self.chat_tokens

    def clean(self, caption: str) -> str:
        """A caption as `ZImagePipeline.encode_prompt` gives it to its tokenizer."""
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

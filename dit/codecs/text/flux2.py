"""Text encoders of FLUX.2: states of three layers side by side, by its pipelines' functions.

Both read a chat with the caption, padded to `max_length` tokens, and mask the padding. The networks
attend to all rows, those of padding too, which depend on the caption; so all are kept.
"""

# L tokens, E width of the embedding

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dit.codecs.pretrained import model_config_of
from dit.codecs.text.pretrained_encoder import WholeTextEncoder

_LAYERS = 3  # whose states are joined, as the pipelines choose them


class Flux2Text(WholeTextEncoder):
    """Mistral3 on a chat that begins with the pipeline's system message."""

    name = "flux2"
    network = "Mistral3ForConditionalGeneration"
    default_model = "black-forest-labs/FLUX.2-dev"
    chat_tokens = 40  # beside the caption, about

    @property
    def width(self) -> int:  # type: ignore[override] # the model's configuration has it
        config = model_config_of(self._part(self.network, self.subfolders[0])).get_text_config()
        return _LAYERS * config.hidden_size

    def length_of(self, caption: str) -> int:
        return super().length_of(caption) + self.chat_tokens

    @property
    def pipeline(self) -> Any:
        """Diffusers' pipeline around the text encoder alone.

        Its tokenizer is Pixtral's without the half that reads pictures and needs torchvision.
        """
        from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline

        return self.pipeline_of(Flux2Pipeline)

    def chat_of(self, caption: str) -> list[int]:
        """Tokens of the whole chat."""
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        (chat,) = format_input([caption])  # with the system message of encode_prompt
        tokenizer = self.load_tokenizer(self.subfolders[1])
        return tokenizer.apply_chat_template(chat, return_dict=False)

    def count(self, caption: str) -> int:
        return len(self.chat_of(caption))

    def embed(self, caption: str) -> dict[str, Tensor]:
        device = torch.device(self.device)
        rows_1LE, _ = self.pipeline.encode_prompt(
            caption, device, max_sequence_length=self.max_length
        )
        return {"text": rows_1LE[0]}


class Flux2KleinText(Flux2Text):
    """Qwen3 on the caption as a user's turn, with the answer begun and no thinking before it."""

    name = "flux2_klein"
    network = "Qwen3ForCausalLM"
    default_model = "black-forest-labs/FLUX.2-klein-base-4B"
    chat_tokens = 12

    @property
    def pipeline(self) -> Any:
        from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline

        return self.pipeline_of(Flux2KleinPipeline)

    def chat_of(self, caption: str) -> list[int]:
        tokenizer = self.load_tokenizer(self.subfolders[1])
        chat: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": caption}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        return tokenizer(chat, verbose=False).input_ids

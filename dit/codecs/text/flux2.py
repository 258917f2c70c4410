"""Text encoders of FLUX.2, FLUX.3 and Ideogram 4, by functions of their pipelines.

The encoders of FLUX.2 and FLUX.3 read a chat with the caption, padded to `max_length` tokens
(FLUX.3: to a multiple of 80), with a mask of the padding. They concatenate the states of some
layers. The networks attend to all rows, also those of padding, which depend on the caption; so
shards hold all rows. Ideogram 4's chat has no padding.
"""

# L tokens, E width of the embedding

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dit.codecs.pretrained import model_config_of, published
from dit.codecs.text.pretrained_encoder import (
    TEXT_DTYPE,
    PretrainedTextEncoder,
    WholeTextEncoder,
)

_IDEOGRAM4 = "diffusers.pipelines.ideogram4.pipeline_ideogram4"


class Flux2Text(WholeTextEncoder):
    """The text encoder of FLUX.2 dev: Mistral3 on a chat with the pipeline's system message."""

    name = "flux2"
    network = "Mistral3ForConditionalGeneration"
    default_model = "black-forest-labs/FLUX.2-dev"
    chat_tokens = 40  # beside the caption, about
    layers: ClassVar[int] = 3  # whose states are joined, as the pipelines choose them

    @property
    def width(self) -> int:  # type: ignore[override] # the model's configuration has it
        config = model_config_of(self._part(self.network, self.subfolders[0])).get_text_config()
        return self.layers * config.hidden_size

    def length_of(self, caption: str) -> int:
        return super().length_of(caption) + self.chat_tokens

    @property
    def pipeline(self) -> Any:
        """Diffusers' pipeline with the text encoder and no other component.

        Its tokenizer is Pixtral's without the part for pictures, which needs torchvision.
        """
        from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline

        return self.pipeline_of(Flux2Pipeline)

    def chat_of(self, caption: str) -> list[int]:
        """Token ids of the whole chat with `caption`."""
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
    """The text encoder of FLUX.2 klein: Qwen3, without thinking.

    The caption is the user's message of a chat, which ends where the answer begins.
    """

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


class Flux3KleinText(Flux2Text):
    """The text encoder of FLUX.3 klein: Qwen3-VL, padded to whole windows of 80 tokens.

    The caption is the user's message of a chat, which ends where the answer begins.
    """

    name = "flux3_klein"
    network = "Qwen3VLForConditionalGeneration"
    default_model = "black-forest-labs/flux-3-image-klein-base"
    default_length = longest_text = 8192
    chat_tokens = 9
    layers = 8
    window: ClassVar[int] = 80  # tokens, as the pipeline has them

    @property
    def notices(self) -> tuple[str, ...]:
        size = self.window * self.width * TEXT_DTYPE.itemsize
        return (
            f"each {self.window} tokens of a caption take {size / 1e6:.1f} MB; the rest of the last"
            f" {self.window} is padding, to which the published networks attend, too: train with"
            " model.text_pad_to=stored",
        )

    def rows_of(self, caption: str) -> int:
        return min(-(-self.length_of(caption) // self.window) * self.window, self.max_length)

    def chat_of(self, caption: str) -> list[int]:
        tokenizer = self.load_tokenizer(self.subfolders[1])
        chat: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": caption}], tokenize=False, add_generation_prompt=True
        )
        return tokenizer(chat, verbose=False).input_ids

    def embed(self, caption: str) -> dict[str, Tensor]:
        step = published("diffusers.modular_pipelines.flux3.encoders:Flux3TextEncoderStep")
        tokenizer = self.load_tokenizer(self.subfolders[1])
        # The half of the published processor that reads no pictures.
        reads: Any = SimpleNamespace(
            tokenizer=tokenizer, apply_chat_template=tokenizer.apply_chat_template
        )
        rows_1LE = step._get_qwen3_vl_prompt_embeds(
            self.load_network(self.network, self.subfolders[0]),
            reads,
            caption,
            torch.device(self.device),
            max_sequence_length=self.max_length,
            pad_multiple=self.window,
        )
        return {"text": rows_1LE[0]}


class Ideogram4Text(PretrainedTextEncoder):
    """The text encoder of Ideogram 4: Qwen3-VL, of which it uses the states of thirteen layers.

    The caption is the user's message of a chat, which ends where the answer begins. The features of
    a token are the first feature of all thirteen layers, then the second one of all layers, and so
    on.
    """

    name = "ideogram4"
    network = "Qwen3VLModel"
    default_model = "ideogram-ai/ideogram-4-fp8"
    default_length = 2048
    chat_tokens = 9  # beside the caption, about

    @property
    def notices(self) -> tuple[str, ...]:
        size = self.width * TEXT_DTYPE.itemsize
        return (f"each token of a caption takes {size / 1e3:.0f} KB",)

    @property
    def width(self) -> int:  # type: ignore[override] # the model's configuration has it
        return len(published(f"{_IDEOGRAM4}:QWEN3_VL_ACTIVATION_LAYERS")) * super().width

    def length_of(self, caption: str) -> int:
        return super().length_of(caption) + self.chat_tokens

    def count(self, caption: str) -> int:
        tokenizer = self.load_tokenizer(self.subfolders[1])
        part = {"type": "text", "text": caption}
        chat: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": [part]}], tokenize=False, add_generation_prompt=True
        )
        return len(tokenizer(chat, add_special_tokens=False, verbose=False).input_ids)

    def embed(self, caption: str) -> dict[str, Tensor]:
        kind = published(f"{_IDEOGRAM4}:Ideogram4Pipeline")
        pipe = self.pipeline_of(kind, unconditional_transformer=None)
        # At the chat's own length there is no padding; no row sees those behind it, which are cut.
        told: Any = {"max_sequence_length": self.count(caption), "device": self.device}
        rows_1LE, *_ = pipe.encode_prompt(caption, grid_h=0, grid_w=0, **told)
        return {"text": rows_1LE[0, : self.max_length]}

"""Text encoders that Transformers loads from the folder of a Diffusers pipeline."""

# L tokens, E width of the embedding

from __future__ import annotations

from abc import abstractmethod
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.codecs.encoder_options import EncoderPadding
from dit.codecs.pretrained import PipelineComponent, load, model_config_of
from dit.codecs.text.encoder import TextEncoder, requested_length

TEXT_DTYPE = torch.bfloat16


def as_stored(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a caption, [L, E] or pooled [E], as in shards: bfloat16 on the CPU."""
    return {name: tensor.to(TEXT_DTYPE).cpu() for name, tensor in found.items()}


@dataclass(frozen=True, kw_only=True)
class PretrainedTextEncoder(TextEncoder):
    """A text encoder with weights; unless a subclass says otherwise, embeddings have no padding."""

    default_model: ClassVar[str]
    network: ClassVar[str]  # class name
    subfolders: ClassVar[tuple[str, str]] = ("text_encoder", "tokenizer")
    default_length: ClassVar[int] = 512
    longest_text: ClassVar[int | None] = None  # rows that networks or pipelines take at most
    options: ClassVar[frozenset[str]] = frozenset(
        ("model_name", "max_sequence_length", "precision", "t5_cache_dir", "tokenizer_cache_dir")
    )
    revision = "1"

    model_name: str
    max_length: int
    precision: str = "float32"
    cache: str | None = None
    tokenizer_cache: str | None = None
    device: str = "cpu"
    local_only: bool = False

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        cache, tokenizer_cache = args.t5_cache_dir, args.tokenizer_cache_dir
        max_length = requested_length(args, cls.default_length)
        if cls.longest_text is not None and max_length > cls.longest_text:
            raise CodecError(
                f"--max_sequence_length {max_length}: pipelines of text encoder {cls.name!r} take"
                f" at most {cls.longest_text}; give a smaller number"
            )
        return cls(
            model_name=args.model_name or cls.default_model,
            max_length=max_length,
            precision=args.precision,
            cache=str(cache) if cache else None,
            tokenizer_cache=str(tokenizer_cache) if tokenizer_cache else None,
        )

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        return cls(
            model_name=settings["model_name"],
            max_length=settings["max_length"],
            precision=settings["precision"],
            cache=settings.get("cache"),
            tokenizer_cache=settings.get("tokenizer_cache"),
            local_only=settings.get("local_only", False),
        )

    @property
    def settings(self) -> dict[str, Any]:
        names = ("name", "width", "revision", "model_name", "max_length", "precision")
        return {name: getattr(self, name) for name in names}

    @property
    def width(self) -> int:  # type: ignore[override] # the model's configuration has it
        part = self._part(self.network, self.subfolders[0])
        config = model_config_of(part).get_text_config()
        return getattr(config, "d_model", None) or config.hidden_size

    def on(self, device: str) -> Self:
        return replace(self, device=device)

    def encode(self, caption: str) -> Tensor:
        return self.encode_all(caption)["text"]

    def encode_all(self, caption: str) -> dict[str, Tensor]:
        with torch.inference_mode():
            return as_stored(self.embed(caption))

    def is_cut(self, caption: str) -> bool:
        # Exact, because encoding loads the tokenizer anyway; a plan of data_prep only estimates.
        return self.count(caption) > self.max_length

    def count(self, caption: str) -> int:
        """Number of tokens of `caption`, including those that the tokenizer adds."""
        tokenizer = self.load_tokenizer(self.subfolders[1])
        return len(tokenizer(self.clean(caption), verbose=False).input_ids)

    def clean(self, caption: str) -> str:
        """`caption` in the form in which the pipeline tokenises it."""
        return caption

    @abstractmethod
    def embed(self, caption: str) -> dict[str, Tensor]:
        """The tensors of `caption` by their names in a shard, in the network's precision."""

    def _part(self, kind: str, subfolder: str) -> PipelineComponent:
        return PipelineComponent.of(self, "transformers", kind, subfolder)

    def load_network(self, kind: str, subfolder: str) -> Any:
        part = self._part(kind, subfolder)
        return load(replace(part, precision=self.precision, device=self.device))

    def load_tokenizer(self, subfolder: str) -> Any:
        cache = self.tokenizer_cache or self.cache
        return load(replace(self._part("AutoTokenizer", subfolder), cache=cache))

    def pipeline_of(self, kind: Any, **more: Any) -> Any:
        """Diffusers' pipeline of class `kind` with the text encoder and the components `more`.

        The scheduler, the VAE and the transformer are None, unless `more` has them.
        """
        parts: Any = dict.fromkeys(("scheduler", "vae", "transformer")) | more
        if "text_encoder" not in more:
            parts["text_encoder"] = self.load_network(self.network, self.subfolders[0])
            parts["tokenizer"] = self.load_tokenizer(self.subfolders[1])
        return kind(**parts)

    def tokens(self, caption: str, subfolder: str, length: int) -> tuple[Tensor, Tensor]:
        """Token ids and mask of `caption`, both [1, length], padded, on the encoder's device.

        `subfolder` is that of the tokenizer in the pipeline's folder.
        """
        given = self.load_tokenizer(subfolder)(
            [caption], padding="max_length", max_length=length, truncation=True,
            return_attention_mask=True, return_tensors="pt",
        )  # fmt: skip
        return given.input_ids.to(self.device), given.attention_mask.to(self.device)


class WholeTextEncoder(PretrainedTextEncoder):
    """A text encoder that returns the rows of padding, too, because networks attend to them.

    The encoder itself masks the padding.
    """

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"padding": str(EncoderPadding.KEEP)}

    @property
    def notices(self) -> tuple[str, ...]:
        size = self.max_length * self.width * TEXT_DTYPE.itemsize
        return (
            f"each caption takes {size / 1e6:.1f} MB: {self.max_length} rows of {self.width:,}"
            " numbers, those of padding too, to which the published networks attend: train with"
            " model.text_pad_to=stored",
        )

    def rows_of(self, caption: str) -> int:
        del caption
        return self.max_length


class MaskedTextEncoder(PretrainedTextEncoder):
    """A text encoder of a single network, which masks padding."""

    padding_rows: ClassVar[int] = 0
    """Number of rows of padding that are stored, because the published network attends to them."""

    def rows_of(self, caption: str) -> int:
        return min(super().rows_of(caption) + self.padding_rows, self.max_length)

    def embed(self, caption: str) -> dict[str, Tensor]:
        folder, tokenizer = self.subfolders
        ids, mask = self.tokens(self.clean(caption), tokenizer, self.max_length)
        states = self.load_network(self.network, folder)(ids, attention_mask=mask)
        # These tokenizers put the padding behind the text.
        return {"text": states.last_hidden_state[0, : int(mask.sum()) + self.padding_rows]}


@dataclass(frozen=True, kw_only=True)
class UnmaskedTextEncoder(PretrainedTextEncoder):
    """A text encoder that does not mask padding, for networks that attend to it.

    `padding` says whether a dataset keeps the hidden states of padding or trims them.
    """

    options: ClassVar[frozenset[str]] = PretrainedTextEncoder.options | {"text_padding"}

    padding: EncoderPadding = EncoderPadding.TRIM

    @classmethod
    def from_arguments(cls, args: Namespace) -> Self:
        padding = EncoderPadding(getattr(args, "text_padding", EncoderPadding.TRIM))
        return replace(super().from_arguments(args), padding=padding)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        padding = EncoderPadding(settings.get("padding", EncoderPadding.TRIM))
        return replace(super().from_settings(settings), padding=padding)

    @property
    def settings(self) -> dict[str, Any]:
        # Datasets of versions without the option were trimmed, and are continued.
        kept = self.padding is EncoderPadding.KEEP
        return super().settings | ({"padding": str(self.padding)} if kept else {})

    @property
    def most_rows(self) -> int:
        """Number of rows of a text whose padding is kept."""
        return self.max_length

    @property
    def notices(self) -> tuple[str, ...]:
        rows, kept = f"{self.most_rows} rows", self.padding is EncoderPadding.KEEP
        if kept:
            return (
                f"texts keep the {rows} that T5 makes, those of padding too, as the published"
                " networks attend to them: train with model.text_pad_to=stored",
            )
        return (
            "texts end where their captions end, for networks of your own: published ones attend to"
            f" T5's padding, too; give --text_padding keep to fine-tune them ({rows} a caption)",
        )

    def rows_of(self, caption: str) -> int:
        return self.most_rows if self.padding is EncoderPadding.KEEP else super().rows_of(caption)

    def stored(self, states_LE: Tensor, mask_1L: Tensor) -> Tensor:
        """The rows of `states_LE` that a shard stores; the mask is 0 on padding."""
        kept = self.padding is EncoderPadding.KEEP
        return states_LE if kept else states_LE[: int(mask_1L.sum())]

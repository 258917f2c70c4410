"""Text encoders of LTX-2: all hidden states of Gemma, projected for each stream, and connectors.

The connectors replace the padding of a caption by learned rows; their output has as many rows as
the pipeline pads captions to. `ltx2` stores the rows before the connectors, one for each token of
the caption, for networks that contain frozen connectors (`model.text_connectors=frozen`).
`ltx2_connected` stores the rows after the connectors.
"""

# L tokens, E width of the projected rows, G width of Gemma, N its hidden states

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from dit.codecs.dataset_card import CodecError
from dit.codecs.pretrained import PipelineComponent, load, model_config_of, published
from dit.codecs.text.pretrained_encoder import TEXT_DTYPE, PretrainedTextEncoder

SOUND_TEXT = "sound_text"
"""Name in a shard of the rows to which the tokens of sound attend."""
_LIBRARY = "diffusers.pipelines.ltx2"
_SCALE = 8
"""Factor by which normalised states are multiplied in LTX-2.0."""


class Ltx2Text(PretrainedTextEncoder):
    """The text encoder of LTX-2, up to the linear projections before the connectors.

    Shards hold `text` [L, E]. Since 2.3 they also hold `sound_text` [L, E] of another width; in 2.0
    the connectors of both streams read `text`.
    """

    name = "ltx2"
    default_model = "Lightricks/LTX-2.5-Diffusers"
    default_length = 1024
    networks = ("Gemma3ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
    """Text encoders of LTX-2.0 and 2.3, and of 2.5."""

    @property
    def network(self) -> str:  # type: ignore[override] # config.json of the text encoder names it
        """The class of the text encoder.

        Raises:
            CodecError: the class is none of those that the pipelines of LTX-2 take.
        """
        return _architecture(self._part(self.networks[0], self.subfolders[0]))

    @property
    def width(self) -> int:  # type: ignore[override] # the connectors' configuration has it
        return self._widths["text"]

    @property
    def _widths(self) -> dict[str, int]:
        """Name of each stored tensor -> its width."""
        config = model_config_of(self._connectors)
        if not config["per_modality_projections"]:
            return {"text": config["caption_channels"]}
        return {"text": config["video_hidden_dim"], SOUND_TEXT: config["audio_hidden_dim"]}

    @property
    def _connectors(self) -> PipelineComponent:
        return PipelineComponent.of(self, _LIBRARY, "LTX2TextConnectors", "connectors")

    def _load_connectors(self) -> Any:
        return load(replace(self._connectors, precision=self.precision, device=self.device))

    def clean(self, caption: str) -> str:
        return caption.strip()

    def states(self, caption: str) -> tuple[Tensor, Tensor]:
        """All hidden states of Gemma [1, L, G * N] and their mask [1, L].

        The pipeline pads the caption in front, to `max_length` tokens.
        """
        pipeline = self.pipeline_of(
            published("diffusers:LTX2Pipeline"), audio_vae=None, vocoder=None, connectors=None
        )
        return pipeline._get_gemma_prompt_embeds(
            caption, max_sequence_length=self.max_length, device=torch.device(self.device)
        )

    def embed(self, caption: str) -> dict[str, Tensor]:
        states_1LX, mask_1L = self.states(caption)
        connectors = self._load_connectors()
        config, norms = connectors.config, f"{_LIBRARY}.connectors"
        # The padding is in front, and nothing of it enters the norms.
        states_1LX = states_1LX[:, -int(mask_1L.sum()) :]
        states_1LGN = states_1LX.unflatten(2, (config.caption_channels, -1))
        if not config.per_modality_projections:
            normed = published(f"{norms}:per_layer_masked_mean_norm")(
                states_1LGN,
                torch.tensor([states_1LGN.shape[1]], device=states_1LGN.device),
                device=states_1LGN.device,
                scale_factor=_SCALE,
            )
            return {"text": connectors.text_proj_in(normed)[0]}
        normed = published(f"{norms}:per_token_rms_norm")(states_1LGN).flatten(2)
        linears = connectors.video_text_proj_in, connectors.audio_text_proj_in
        return {
            name: linear(normed * sqrt(width / config.caption_channels))[0]
            for (name, width), linear in zip(self._widths.items(), linears, strict=True)
        }


class Ltx2ConnectedText(Ltx2Text):
    """The text encoder of LTX-2 with its connectors, for `model.text_connectors=stored`.

    Shards hold `text` [L, E] and `sound_text` [L, E], with L the length to which the pipeline pads
    captions.
    """

    name = "ltx2_connected"

    @property
    def notices(self) -> tuple[str, ...]:
        widths = self._widths
        numbers = widths["text"] + widths.get(SOUND_TEXT, widths["text"])
        size = self.max_length * numbers * TEXT_DTYPE.itemsize
        return (
            f"each caption takes {size / 1e6:.1f} MB ({self.max_length} rows of {numbers:,}"
            " numbers); --processor ltx2 stores the rows before the connectors, for training with"
            " model.text_connectors=frozen",
        )

    def rows_of(self, caption: str) -> int:
        del caption
        return self.max_length

    def embed(self, caption: str) -> dict[str, Tensor]:
        states_1LX, mask_1L = self.states(caption)
        video_1LE, sound_1LE, _ = self._load_connectors()(states_1LX, mask_1L)
        return {"text": video_1LE[0], SOUND_TEXT: sound_1LE[0]}


@lru_cache
def _architecture(part: PipelineComponent) -> str:
    """The class name in the config.json of a text encoder, one of `Ltx2Text.networks`.

    Raises:
        CodecError: there is no config.json, or it names no such class.
    """
    try:
        config = published("transformers:AutoConfig").from_pretrained(part.place, **part.where)
    except (OSError, ValueError) as error:
        raise CodecError(
            f"--model_name {part.model}: {part.subfolder}/ has no config.json of a text encoder"
            f" ({error}); name a folder or a hub model in the layout of Diffusers"
        ) from None
    found = [name for name in config.architectures or () if name in Ltx2Text.networks]
    if not found:
        raise CodecError(
            f"--model_name {part.model}: {part.subfolder}/ is of class {config.architectures}, but"
            f" LTX-2 reads captions with {' or '.join(Ltx2Text.networks)}; give a pipeline of LTX-2"
        )
    return found[0]

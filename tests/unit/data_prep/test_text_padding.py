"""`--text_padding`: T5's states at its padding, against those of Diffusers' FluxPipeline."""

# L tokens, E width

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_prep.cli.parser import main
from data_prep.formats.convert import _as_stored
from dit.codecs.dataset_card import NULL_TEXT_NAME, read_card
from dit.codecs.encoder_options import EncoderPadding
from dit.codecs.text import text_encoder_of_card
from dit.codecs.text.families import CosmosText, FluxText
from dit.sampling.cards import card_of_pipeline
from tests.families import encoding, pipeline_parts
from tests.media_files import image

CAPTION = "a cat jumps"
TOKENS = len(CAPTION) + 1  # one a letter, and the end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline_parts.flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    import transformers
    from diffusers import FluxPipeline

    kinds = {"tokenizer": "AutoTokenizer", "text_encoder": "CLIPTextModel"}
    kinds |= {"tokenizer_2": "AutoTokenizer", "text_encoder_2": "T5EncoderModel"}
    parts = {
        name: getattr(transformers, kind).from_pretrained(folder, subfolder=name)
        for name, kind in kinds.items()
    }
    blank: dict[str, Any] = {"scheduler": None, "transformer": None, "vae": None}
    return FluxPipeline(**blank, **parts)


def encoder(folder: Path, length: int | None, padding: str | None = None) -> FluxText:
    given = {"text_padding": padding} if padding else {}
    return encoding.encoder("flux", folder, max_sequence_length=length, **given)


@pytest.mark.parametrize("caption", [CAPTION, "", "x" * 300], ids=["caption", "null", "cut"])
@pytest.mark.parametrize("length", [None, 256], ids=["dev", "schnell"])
def test_kept_texts_are_those_of_the_pipeline(folder, pipeline, caption, length) -> None:
    """All rows, those at padding too, for which T5 has no mask; CLIP's pooled text beside them."""
    cpu = torch.device("cpu")
    with torch.no_grad():
        expected = pipeline._get_t5_prompt_embeds(caption, 1, length or 512, cpu)[0]
        pooled = pipeline._get_clip_prompt_embeds(caption, 1, cpu)[0]
    ours = encoder(folder, length, "keep")
    found = ours.embed(caption)
    assert len(expected) == len(found["text"]) == (length or 512) == ours.rows_of(caption)
    assert (found["text"] - expected).abs().max() < 1e-6
    assert (found["pooled_text"] - pooled).abs().max() < 1e-6
    trimmed = encoder(folder, length, "trim").embed(caption)["text"]
    assert len(trimmed) == min(len(caption) + 1, length or 512)
    assert (trimmed - expected[: len(trimmed)]).abs().max() < 1e-6
    rest = expected[len(trimmed) :]
    assert not len(rest) or rest.square().mean() > 0.01  # no zeros that could be added later


def test_a_dataset_with_padding(folder, tmp_path: Path, read_samples) -> None:
    """Samples, null text, card and what is rebuilt from it follow one rule."""
    image(tmp_path / "in/a.png", 80, 48, seed=1)
    (tmp_path / "in/a.txt").write_text(CAPTION)
    options = ["--image_dir", tmp_path / "in", "--processor", "flux", "--model_name", folder]
    options += ["--max_sequence_length", 48, "--num_workers", 0, "--split", "1,0,0"]

    def packed(name: str, *more: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        out = tmp_path / name
        assert main(["image", *map(str, [*options, "--output_dir", out]), *more]) == 0
        (sample,) = read_samples(out).values()
        null = load_file(out / NULL_TEXT_NAME)
        assert null.keys() == {"text", "pooled_text"}
        return sample["text"], null["text"], read_card(out)

    kept, null, card = packed("kept", "--text_padding", "keep")
    assert (len(kept), len(null)) == (48, 48)
    assert card["text_encoder"]["padding"] == "keep"
    rebuilt = text_encoder_of_card(card)
    assert torch.equal(rebuilt.encode(CAPTION), kept) and torch.equal(rebuilt.encode(""), null)
    trimmed, null, card = packed("trimmed")
    assert (len(trimmed), len(null)) == (TOKENS, 1)
    assert "padding" not in card["text_encoder"]
    assert torch.equal(text_encoder_of_card(card).encode(CAPTION), kept[:TOKENS])
    # A folder is not continued with the other rule.
    again = [*map(str, [*options, "--output_dir", tmp_path / "kept"])]
    assert main(["image", *again]) == 1


def test_a_plan_and_the_notices_say_it(folder) -> None:
    (kept,) = encoder(folder, None, "keep").notices
    assert "model.text_pad_to=stored" in kept and "512 rows" in kept
    (trimmed,) = encoder(folder, None).notices
    assert "--text_padding keep" in trimmed


def test_other_encoders_do_not_take_the_option(folder, tmp_path: Path, capsys) -> None:
    image(tmp_path / "in/a.png", 32, 32)
    options = ["--image_dir", tmp_path / "in", "--output_dir", tmp_path / "out", "--split", "1,0,0"]
    assert main(["image", *map(str, options), "--num_workers", "0", "--text_padding", "keep"]) == 0
    assert "--text_padding is not used: it means nothing to" in capsys.readouterr().out


def test_a_conversion_finds_out(folder) -> None:
    flux = encoder(folder, 48)
    for rows, padding in (({48}, EncoderPadding.KEEP), ({48, 7}, EncoderPadding.TRIM)):
        stored = _as_stored(flux, rows)
        assert isinstance(stored, FluxText) and stored.padding is padding
    other = CosmosText(model_name=str(folder), max_length=48)
    assert _as_stored(other, {48}) is other


def test_the_card_of_a_pipeline_follows_the_network(folder) -> None:
    """An imported checkpoint has no dataset: `model.text_pad_to` decides."""
    for stored, rows in ((True, 512), (False, TOKENS)):
        card = card_of_pipeline(folder, stored_padding=stored)
        assert card["processor"]["name"] == card["text_encoder"]["name"] == "flux"
        assert len(text_encoder_of_card(card).encode(CAPTION)) == rows

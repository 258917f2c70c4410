"""The words of the captions in a dataset's card, and in what inspect shows."""

import json
from pathlib import Path

from data_prep.cli.parser import main
from dit.codecs.text import WordTable, text_encoder_of_card
from dit.codecs.text.vocabulary import unknown_words


def test_words_of_training_captions(tmp_path: Path, capsys) -> None:
    out, page = tmp_path / "data", tmp_path / "page.html"
    words = ["digits", "--output_dir", str(out), "--num_samples", "40", "--split", "0.8,0.2,0"]
    assert main(words) == 0
    card = json.loads((out / "dataset_card.json").read_text())
    counts = card["words"]["counts"]
    trained = card["splits"]["train"]["samples"]
    assert trained < 40 and counts["a"] == counts["handwritten"] == trained
    assert list(counts)[:2] == ["a", "handwritten"]
    assert card["words"]["distinct"] == len(counts) <= 12  # held-out digits do not count
    assert isinstance(text_encoder_of_card(card), WordTable)
    said = unknown_words(["a handwritten eleven"], text_encoder_of_card(card), card)
    assert said is not None and said.endswith("has: eleven")
    capsys.readouterr()
    assert main(["inspect", str(out), "--html", str(page)]) == 0
    line = f"training captions have {len(counts)} words: a {trained}, handwritten {trained}, "
    assert line in capsys.readouterr().out
    assert f"<td>handwritten</td><td class=n>{trained}</td>" in page.read_text()


def test_bytes_have_no_words(tmp_path: Path, capsys) -> None:
    out = tmp_path / "data"
    words = ["digits", "--output_dir", str(out), "--num_samples", "9", "--text_encoder", "bytes"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "model.crossattn_emb_size=64" in said  # the recipe is for the width of `words`
    card = json.loads((out / "dataset_card.json").read_text())
    assert "words" not in card and card["text_encoder"]["width"] == 64
    assert main(["inspect", str(out)]) == 0 and "training captions" not in capsys.readouterr().out

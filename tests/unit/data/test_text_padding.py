"""`model.text_pad_to=stored` against what the shards' card says of their texts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dit.config import Problems, RunConfig, TextPadding
from dit.config_loading import ConfigError, load_config, read_config, save_config
from dit.convert.cli import _tokens
from dit.data import DataError, check_data
from dit.data.preflight import _padding_faults
from dit.models.registry import VARIABLE
from dit.sizing.passes import data_lines
from dit.train.opening.data import data_notes
from tests.packs import run_config, tiny_model
from tests.toy_family import PLACE, ToyConfig

KEPT = {"name": "flux", "width": 8, "max_length": 48, "padding": "keep"}
TRIMMED = {"name": "flux", "width": 8, "max_length": 48}


@pytest.fixture
def of_model(shards, tmp_path, monkeypatch):
    """A run on good shards, with `model.text_pad_to` and a card that says this of texts."""
    monkeypatch.setenv(VARIABLE, PLACE)
    root = shards.good_set(tmp_path / "set", 10)

    def make(pad_to: Any, encoder: dict[str, Any] | None) -> RunConfig:
        if encoder is not None:
            card = {"format_version": 1, "text_encoder": encoder}
            (root / "dataset_card.json").write_text(json.dumps(card))
        config = shards.config(root, use_train_split_for_val=True)
        model = ToyConfig(text_pad_to=pad_to, crossattn_emb_size=8, in_channels=2)
        return replace(config, model=model)

    return make


@pytest.mark.parametrize("encoder", [TRIMMED, KEPT | {"padding": None}, {"name": "bytes"}])
def test_trimmed_texts_are_refused_by_a_network_that_attends_to_padding(of_model, encoder) -> None:
    config = of_model(TextPadding.STORED, encoder)
    with pytest.raises(DataError, match=r"model\.text_pad_to=stored.*--text_padding keep"):
        check_data(config)
    with pytest.raises(DataError, match="end where their captions end"):
        data_lines(config)  # a dry run says it, too


@pytest.mark.parametrize(("pad_to", "shown"), [(None, "null"), (48, "48")])
def test_kept_padding_is_refused_by_a_network_that_was_not_asked(of_model, pad_to, shown) -> None:
    with pytest.raises(
        DataError,
        match=rf"padding=keep\), but model\.text_pad_to={shown} .* set model\.text_pad_to=stored",
    ):
        check_data(of_model(pad_to, KEPT))


def test_a_family_without_stored_padding_is_not_told_to_set_it() -> None:
    (said,) = _padding_faults(KEPT, run_config().model)
    assert "as dit reads no padding" in said and "text_pad_to=stored" not in said


def test_what_agrees_is_said(of_model) -> None:
    (kept,) = check_data(of_model(TextPadding.STORED, KEPT)).notes
    assert kept == "captions with the padding of their encoder, 48 rows each" + (
        " (model.text_pad_to=stored)"
    )
    (trimmed,) = check_data(of_model(None, TRIMMED)).notes
    assert "captions without the padding of their encoder, as model.text_pad_to=null" in trimmed


@pytest.mark.parametrize("encoder", [None, {"name": "unknown", "width": 8}, {"width": 8}])
def test_data_that_do_not_tell_are_taken_and_it_is_said(of_model, encoder) -> None:
    (note,) = check_data(of_model(TextPadding.STORED, encoder)).notes
    assert "nothing in" in note and "taken as they are" in note


def test_an_unknown_word_in_a_card(of_model) -> None:
    with pytest.raises(DataError, match=r"text_encoder\.padding is 'half', not 'keep'"):
        check_data(of_model(None, KEPT | {"padding": "half"}))


def test_the_run_says_it_in_its_log(of_model, monkeypatch) -> None:
    """The notes of the check are those of the opened data, which the log begins with."""
    monkeypatch.setattr("dit.train.opening.data.forecast_packs", lambda _: None)
    notes = data_notes(of_model(TextPadding.STORED, KEPT))
    assert any("padding of their encoder, 48 rows" in note for note in notes)


def test_only_some_families_take_stored_padding(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(VARIABLE, PLACE)
    with pytest.raises(
        Problems, match="text_pad_to=stored is for families whose published weights"
    ):
        tiny_model(text_pad_to=TextPadding.STORED)
    with pytest.raises(ConfigError, match=r"text_pad_to=\"stored\" .*expected an integer or null"):
        load_config(run_config(), overrides=["model.text_pad_to=stored"])
    config = load_config(run_config(), overrides=["model.family=toy", "model.text_pad_to=stored"])
    assert config.model.text_pad_to is TextPadding.STORED
    assert config.model.text_zeros_to is None
    assert config.model.cost_sizes == replace(config.model, text_pad_to=None).cost_sizes
    save_config(config, tmp_path / "config.yaml")
    assert "text_pad_to: stored" in (tmp_path / "config.yaml").read_text()
    assert read_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("word", ["kept", "1.5", "[1]", "true", "{a: 1}"])
def test_other_words_are_refused_with_what_is_expected(monkeypatch, word) -> None:
    monkeypatch.setenv(VARIABLE, PLACE)
    with pytest.raises(ConfigError) as caught:
        load_config(run_config(), overrides=["model.family=toy", f"model.text_pad_to={word}"])
    (problem,) = caught.value.problems
    assert problem.startswith("model.text_pad_to=")
    assert "expected an integer or stored or null" in problem


def test_words_of_the_conversion() -> None:
    assert (_tokens("none"), _tokens("12")) == (None, 12)
    assert _tokens("stored") is TextPadding.STORED

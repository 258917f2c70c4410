"""The words of captions in a dataset's card, and those of prompts beside them."""

from dit.codecs.text import ByteTable, WordTable
from dit.codecs.text.encoder import MOST_WORDS, unknown_words, vocabulary

WORDS, BYTES = WordTable(width=8), ByteTable(width=8)


def test_a_card_keeps_how_often_each_word_comes() -> None:
    found = vocabulary(["a red cat", "A red, red dog"], WORDS)["words"]
    assert found["distinct"] == 5
    assert list(found["counts"].items()) == [("red", 3), ("a", 2), (",", 1), ("cat", 1), ("dog", 1)]
    assert vocabulary(["a red cat"], BYTES) == {} == vocabulary(["", " "], WORDS)


def test_words_of_a_prompt_that_no_caption_had_are_named_once() -> None:
    card = vocabulary(["a red cat"], WORDS)
    assert unknown_words(["A RED cat", ""], WORDS, card) is None
    said = unknown_words(["a blue cat", "blue zebra"], WORDS, card)
    assert said == "words that no caption of the training data has: blue, zebra"
    # Cards of earlier versions, of other encoders, and of mock data.
    assert unknown_words(["blue"], WORDS, {}) is None
    assert unknown_words(["blue"], BYTES, card) is None


def test_a_list_that_was_cut_claims_no_more_than_it_knows() -> None:
    captions = [f"w{n} w{n}" for n in range(MOST_WORDS)] + ["rare"]
    card = vocabulary(captions, WORDS)
    assert card["words"]["distinct"] == MOST_WORDS + 1
    assert len(card["words"]["counts"]) == MOST_WORDS and "rare" not in card["words"]["counts"]
    said = unknown_words(["rare w5"], WORDS, card)
    assert said == "not among the 10,000 most frequent words of the training data: rare"

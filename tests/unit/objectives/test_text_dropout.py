from itertools import pairwise

import pytest
import torch

from dit.objectives import with_null_text, with_texts

NULL = torch.full((2, 5), 3.0)


def captions(batch):
    return [batch.text_LE[a:b] for a, b in pairwise(batch.text_starts)]


@pytest.mark.parametrize(
    "dropped", [(False, True, False), (True, True, True), (False,) * 3, (True, False, True)]
)
def test_dropped_captions_become_the_null_text_and_others_stay(make_pack, dropped) -> None:
    batch = make_pack(texts=[4, 1, 7])
    after = with_null_text(batch, dropped, NULL)
    assert after.text_starts[-1] == len(after.text_LE)
    for drop, was, now in zip(dropped, captions(batch), captions(after), strict=True):
        assert torch.equal(now, NULL.bfloat16() if drop else was)
    assert after.text_LE.dtype == batch.text_LE.dtype
    assert after.latent_TC is batch.latent_TC and after.pack_id == batch.pack_id


def test_text_starts_are_python_integers(make_pack) -> None:
    after = with_null_text(make_pack(), [True, False, True], NULL)
    assert all(type(start) is int for start in after.text_starts)


def test_captions_of_any_length_replace_all(make_pack) -> None:
    texts = [torch.randn(n, 5).bfloat16() for n in (1, 9, 2)]
    after = with_texts(make_pack(), texts)
    assert after.text_starts == (0, 1, 10, 12)
    assert all(torch.equal(a, b) for a, b in zip(captions(after), texts, strict=True))


@pytest.mark.parametrize("null", [torch.zeros(0, 5), torch.zeros(1, 6), torch.zeros(5)])
def test_a_null_text_that_does_not_fit_is_refused(make_pack, null) -> None:
    with pytest.raises(ValueError, match="text width 5"):
        with_null_text(make_pack(), [True, False, False], null)


def test_one_caption_for_each_sample(make_pack) -> None:
    with pytest.raises(ValueError, match="2 captions for a pack of 3"):
        with_texts(make_pack(), [NULL, NULL])

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from dit.batch import NullTexts
from dit.objectives.pack_draws import with_null_inputs

NULL = torch.full((2, 5), 3.0)


def captions(batch):
    return [batch.text_LE[a:b] for a, b in pairwise(batch.text_starts)]


@pytest.mark.parametrize(
    "dropped", [(False, True, False), (True, True, True), (False,) * 3, (True, False, True)]
)
def test_dropped_captions_become_the_null_text_and_others_stay(make_pack, dropped) -> None:
    batch = make_pack(texts=[4, 1, 7])
    after = with_null_inputs(batch, dropped, {"text": NULL})
    assert after.text_starts[-1] == len(after.text_LE)
    for drop, was, now in zip(dropped, captions(batch), captions(after), strict=True):
        assert torch.equal(now, NULL.bfloat16() if drop else was)
    assert after.text_LE.dtype == batch.text_LE.dtype
    assert after.latent_TC is batch.latent_TC and after.pack_id == batch.pack_id


def test_text_starts_are_python_integers(make_pack) -> None:
    after = with_null_inputs(make_pack(), [True, False, True], {"text": NULL})
    assert all(type(start) is int for start in after.text_starts)


def test_null_inputs_of_every_kind(make_pack) -> None:
    """No rows of a second text, a vector of its own; what the null sample lacks is kept."""
    batch = make_pack()
    second_LE, pooled_NE, kept_NE = torch.ones(6, 2), torch.ones(3, 4), torch.ones(3, 2)
    batch = replace(
        batch.with_text("text_2", second_LE, (0, 1, 1, 6)),
        vectors={"pooled_text": pooled_NE, "image_embed": kept_NE},
    )
    null = {"text": NULL, "text_2": torch.zeros(0, 2), "pooled_text": torch.full((4,), 7.0)}
    after = with_null_inputs(batch, [False, False, True], null)
    assert after.text_offsets == {"text": (0, 1, 3, 5), "text_2": (0, 1, 1, 1)}
    assert torch.equal(after.texts["text_2"], second_LE[:1])
    assert after.vectors["pooled_text"][:, 0].tolist() == [1, 1, 7]
    assert torch.equal(after.vectors["image_embed"], kept_NE)
    assert after.latent_TC is batch.latent_TC


def test_a_null_text_of_another_width_is_refused(make_pack) -> None:
    with pytest.raises(
        ValueError, match=r"`text` has shape \[1, 6\], but the dataset's `text` has width 5"
    ):
        with_null_inputs(make_pack(), [True, False, False], {"text": torch.zeros(1, 6)})


def test_samples_with_null_texts_of_their_own_get_those(make_pack) -> None:
    """Of the main text alone; the third sample has none and gets the common one."""
    batch = make_pack(texts=[4, 1, 7])
    own_LE = torch.arange(15.0).view(3, 5)
    batch = batch.with_method(NullTexts(rows_LE=own_LE, starts=(0, 1, 3, 3)))
    after = with_null_inputs(batch, [False, True, True], {"text": NULL})
    first, second, third = captions(after)
    assert torch.equal(first, captions(batch)[0])
    assert torch.equal(second, own_LE[1:].bfloat16()) and torch.equal(third, NULL.bfloat16())
    assert after.method(NullTexts) is None

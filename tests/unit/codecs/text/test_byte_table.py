"""The text encoder `bytes`: the same numbers everywhere, for any text."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dit.codecs import text
from dit.codecs.dataset_card import CodecError
from dit.codecs.text import ByteTable
from dit.codecs.text.fixed_vectors import byte_table, positions

CARD = {"format_version": 1, "text_encoder": {"name": "bytes", "width": 64, "revision": "1"}}


def test_the_embedding_is_pinned() -> None:
    # A change here makes models that were trained before it blind to their prompts: raise the
    # revision with it. NumPy 1.26 and 2.4, with and without AVX, give these.
    assert zlib.crc32(byte_table(64).tobytes()) == 0x12CAB7B7
    long = ByteTable(width=64).encode("a handwritten seven, œ 👍 " * 30)
    assert zlib.crc32(long.numpy().tobytes()) == 0xA0C0601B
    assert zlib.crc32(ByteTable(width=64).encode("").numpy().tobytes()) == 0xDC70D465


@settings(max_examples=50, deadline=None)
@given(caption=st.text(max_size=300), width=st.sampled_from([8, 64, 96]))
def test_a_token_for_each_byte_after_the_first(caption: str, width: int) -> None:
    encoded = ByteTable(width=width).encode(caption)
    assert encoded.shape == (1 + len(caption.encode()), width)
    assert encoded.dtype == torch.float16
    assert torch.equal(encoded, ByteTable(width=width).encode(caption))
    # Words that begin alike are embedded alike, up to where they differ.
    longer = ByteTable(width=width).encode(caption + "!")
    assert torch.equal(longer[:-1], encoded)


def test_pooled_text_is_stored_where_it_is_asked_for() -> None:
    assert ByteTable(width=64).encode_all("ab").keys() == {"text"}
    encoder = ByteTable(width=64, pooled=True)
    assert ByteTable.from_settings(encoder.settings).pooled
    one, other, null = (encoder.encode_all(caption) for caption in ("ab", "ba", ""))
    assert torch.equal(one["text"], ByteTable(width=64).encode("ab"))
    table = byte_table(64)
    wanted = torch.from_numpy((table[256] + table[97] + table[98]) / 3**0.5)
    assert torch.allclose(one["pooled_text"].double(), wanted, atol=2e-3)
    assert torch.allclose(one["pooled_text"], other["pooled_text"], atol=2e-3)
    assert torch.allclose(null["pooled_text"].double(), torch.from_numpy(table[256]), atol=2e-3)


def test_the_empty_string_is_one_token() -> None:
    assert ByteTable(width=64).encode("").shape == (1, 64)


def test_tokens_have_unit_variance() -> None:
    everything = ByteTable(width=64).encode("".join(map(chr, range(128))) * 4).double()
    assert abs(everything.square().mean() - 1) < 0.05
    assert abs(byte_table(64).mean()) < 0.02 and abs(byte_table(64).std() - 1) < 0.02
    np.testing.assert_allclose(np.square(positions(500, 64)).mean(1), 1)


def test_order_and_bytes_can_be_told_apart() -> None:
    encoder = ByteTable(width=8)
    assert not torch.equal(encoder.encode("ab"), encoder.encode("ba"))
    rows = byte_table(8).astype(np.float16)
    assert len(np.unique(rows, axis=0)) == 257


@pytest.mark.parametrize("width", [0, 6, 63, -2])
def test_a_width_that_has_no_sines_and_cosines_is_an_error(width: int) -> None:
    with pytest.raises(CodecError, match=f"--text_width {width} must be an even number"):
        ByteTable(width=width)


def test_a_card_rebuilds_the_encoder() -> None:
    encoder = text.text_encoder_of_card(CARD)
    assert encoder.settings == CARD["text_encoder"]
    assert torch.equal(encoder.encode("x"), ByteTable(width=64).encode("x"))


def test_a_card_that_does_not_fit_is_an_error() -> None:
    for change, message in (
        ({"name": "t5"}, "no text encoder 't5'.*bytes"),
        ({"revision": "0"}, "revision '0'.*has '1'"),
    ):
        with pytest.raises(CodecError, match=message):
            text.text_encoder_of_card({**CARD, "text_encoder": {**CARD["text_encoder"], **change}})
    with pytest.raises(CodecError, match="lacks 'width'"):
        text.text_encoder_of_card({**CARD, "text_encoder": {"name": "bytes", "revision": "1"}})

"""What inspect says of shards: words of captions, pictures alike, damage; and its page."""

from __future__ import annotations

import io
import json
import re
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import interpolate

from data_prep.cli.parser import main
from data_prep.inspect import dataset_page, html_pages
from data_prep.inspect.duplicates import NEAR, Duplicates, looks_of, near_groups
from data_prep.inspect.html_pages import Row, write_html
from data_prep.inspect.read_shards import inspect_shard, shard_counts
from data_prep.refusals import PrepError
from dit.codecs.dataset_card import CodecError, read_card
from dit.codecs.text import WordTable, text_encoder_of_card
from dit.codecs.text.encoder import unknown_words
from tests.browser import browser
from tests.hostile import damaged, json_bytes, mistaken


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


def picture(seed: int, height: int = 96, width: int = 128) -> torch.Tensor:
    """[1, H, W] of smooth shapes in [-1, 1]."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand((1, 1, 7, 7), generator=rng) * 2 - 1
    return interpolate(coarse, (height, width), mode="bicubic")[0]


def test_the_hash_is_that_of_scipys_transform() -> None:
    from scipy.fft import dctn  # scikit-learn brings it

    grey_1HW = picture(0, 64, 64)
    looks = looks_of(grey_1HW)
    small = grey_1HW[0].numpy().reshape(32, 2, 32, 2).mean((1, 3))
    low = dctn(small, type=2)[1:9, 1:9]
    bits = (low > np.sort(low, axis=None)[31]).flatten()
    assert looks is not None
    assert looks[0] == looks[1] == int("".join("1" if bit else "0" for bit in bits), 2)


def test_scaled_and_noisy_pictures_look_alike_and_others_do_not() -> None:
    found = Duplicates()
    for seed in range(30):
        caption = "a fox" if seed % 2 else f"picture {seed}"
        found.add(f"{seed}.png", caption, looks_of(picture(seed)))
    noise = 0.01 * torch.randn(1, 96, 128, generator=torch.Generator().manual_seed(1))
    found.add("noisy.png", "", looks_of(picture(4) + noise))
    found.add("larger.png", "", looks_of(picture(4, 192, 256)))
    found.add("flat.png", "red", looks_of(torch.full((1, 8, 8), 0.5)))
    found.add("flat too.png", "blue", looks_of(torch.full((1, 8, 8), 0.1)))  # cannot be judged
    found.finish()
    assert [[found.names[one] for one in group] for group in found.groups] == [
        ["4.png", "noisy.png", "larger.png"]
    ]
    assert found.repeated == [("a fox", 15), ("", 2)]
    assert found.summary["near_duplicates"] == 3 and "15" in found.html()
    assert found.lines[0] == "captions that repeat: 2, in 17 of 34 samples"


def test_samples_of_one_file_are_no_duplicates() -> None:
    found = Duplicates()
    for name, caption in (("a", "one"), ("a", "two"), ("b", "red"), ("b", "red"), ("c", "red")):
        found.add(name, caption, looks_of(picture(ord(name) // 98)))  # b and c look alike
    found.finish()
    assert found.groups == [[2, 3, 4]] and found.repeated == [("red", 3)]
    assert [found.repeats_of(caption) for caption in ("one", "red")] == [1, 3]
    alone = Duplicates()
    for _ in range(2):
        alone.add("a", "one", looks_of(picture(1)))
    alone.finish()
    assert not alone.groups and not alone.lines


def test_clips_must_end_alike_too() -> None:
    still, moved = picture(1), picture(2)
    clips = [torch.cat(pair) for pair in ((still, still), (still, moved), (still, moved))]
    assert near_groups([looks_of(clip) for clip in clips]) == [[1, 2]]


def test_all_near_pairs_are_found() -> None:
    """Against a comparison of all with all."""
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**63, 300).tolist()
    for number in range(0, 200, 2):  # neighbours differ in 1 to 6 bits, anywhere
        hashes[number + 1] = hashes[number]
        for bit in rng.choice(63, 1 + number % 6, replace=False).tolist():
            hashes[number + 1] ^= 1 << bit
    found = near_groups([(one, one) for one in hashes])
    expected = {
        (i, j)
        for i in range(300)
        for j in range(i + 1, 300)
        if (hashes[i] ^ hashes[j]).bit_count() <= NEAR
    }
    assert {tuple(group) for group in found} == expected


@pytest.fixture(scope="module")
def shard():
    """Bytes of a shard with two samples, and its offsets."""
    buffer, offsets = io.BytesIO(), [0]
    tensors = {"latent": torch.zeros(2, 1, 2, 2).half(), "text": torch.ones(2, 4).bfloat16()}
    payload = safetensors.torch.save(tensors)
    about = {"crc32": {"safetensors": f"{zlib.crc32(payload):08x}"}}
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key in "ab":
            for part, data in {"safetensors": payload, "json": json.dumps(about).encode()}.items():
                info = tarfile.TarInfo(f"{key}.{part}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            offsets.append(tar.offset)
    return buffer.getvalue(), struct.pack(f"<{len(offsets)}Q", *offsets)


@given(data=st.data(), in_index=st.booleans())
def test_hostile_shards_are_reported(tmp_path, shard, data, in_index):
    content, index = shard
    if in_index:
        index = data.draw(damaged(index) | st.binary(max_size=40))
    else:
        content = data.draw(damaged(content))
    (tmp_path / "x.tar").write_bytes(content)
    (tmp_path / "x.tar.idx").write_bytes(index)
    report = inspect_shard(tmp_path, "x.tar", expected=2)
    assert report.samples == 2 or report.problems
    assert all(problem.startswith("x.tar") for problem in report.problems)


@pytest.mark.parametrize("kind", [b"S", b"x", b"L"])
def test_a_member_of_terabytes_is_reported(tmp_path, shard, kind):
    content = bytearray(shard[0])
    content[156:157], content[124:136] = kind, b"\x80" + b"\x00" * 4 + b"\x7f" + b"\x00" * 6
    content[483:495] = content[124:136]  # what a sparse member says of its real size
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    (tmp_path / "x.tar").write_bytes(bytes(content))
    (tmp_path / "x.tar.idx").write_bytes(shard[1])
    assert inspect_shard(tmp_path, "x.tar", expected=2).problems


INFO = {"shard_counts": {"train/x.tar": 2}}


@given(content=json_bytes(INFO) | mistaken(INFO).map(json.dumps).map(str.encode))
def test_hostile_lists_of_shards_and_cards(tmp_path, content):
    (tmp_path / ".nv-meta").mkdir(exist_ok=True)
    for path, read in (
        (tmp_path / ".nv-meta/.info.json", shard_counts),
        (tmp_path / "dataset_card.json", read_card),
    ):
        path.write_bytes(content)
        try:
            assert isinstance(read(tmp_path), dict)
        except (PrepError, CodecError) as error:
            assert str(path) in str(error)


def rows(count: int) -> list[Row]:
    made: list[Row] = [
        {"name": f"photos/{n}.png", "caption": f"a fox </script> {n}", "bucket": f"{n % 7} x 64"}
        for n in range(count)
    ]
    for number in range(0, count, 1000):
        made[number] |= {"refused": "file is empty", "detail": "0 bytes"}
    return made


def test_a_browser_shows_one_page_of_100_000(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    listed = rows(100_000)
    listed[1]["caption"] = "a long caption " * 500
    write_html(page, "Plan", ["<p>facts</p>"], listed)
    figures = "[...document.querySelectorAll('figure')].map(one => one.textContent)"
    with browser(tmp_path) as tab:
        tab.look(width=390)
        tab.open(f"{page.as_uri()}#q=fox%209&refused=file%20is%20empty")
        shown = tab.run(figures)
        assert len(shown) == 19 and all("file is empty: 0 bytes" in one for one in shown)
        assert any("photos/99000.png" in one and "a fox </script> 99000" in one for one in shown)
        tab.run("location.hash = ''; location.reload()")
        tab.until("document.querySelectorAll('figure').length === 50")
        heights = "[...document.querySelectorAll('figure')].map(one => one.offsetHeight)"
        assert max(tab.run(heights)) < 400  # a long caption scrolls in its place
        tab.click("#after")
        assert "photos/99.png" in tab.run(figures)[-1] and tab.run("location.hash") == "#page=2"
        tab.run("document.getElementById('q').focus()")
        tab.write("99999")
        tab.until("document.querySelectorAll('figure').length === 1")
        milliseconds = tab.run("document.getElementById('list').dataset.milliseconds")
        assert int(milliseconds) < 5000  # about 100 where the machine does nothing else
        assert tab.sideways() == 0 and not tab.errors


def test_a_card_is_read_without_its_long_lists() -> None:
    card = {
        "latent": {"mean": [0.25 * n for n in range(48)], "dtype": "float16"},
        "psnr": {},
        "license": None,
        "sources": ["photos"],
        "settings": {"drop_short": False},
    }
    assert list(dataset_page._facts(card)) == [
        ("latent, mean", "48 values, 0 to 11.75"),
        ("latent, dtype", "float16"),
        ("sources", '["photos"]'),
        ("settings, drop_short", "false"),
    ]


def test_too_many_rows_keep_the_refused_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html_pages, "MOST_ROWS", 30)
    every = rows(5000)
    every[4321]["group"] = 1
    write_html(tmp_path / "page.html", "Plan", [], every)
    text = (tmp_path / "page.html").read_text()
    found = json.loads(re.findall('id="rows">(.*?)</script>', text, re.DOTALL)[0])
    assert "30 of 5,000 samples are listed" in text and len(found) == 30
    assert [row["name"] for row in found if row.get("refused")] == [
        f"photos/{n}.png" for n in range(0, 5000, 1000)
    ]
    assert "photos/4321.png" in [row["name"] for row in found]

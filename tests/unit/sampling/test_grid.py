"""The grid of all pictures: prompts are text, whatever they hold."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dit.sampling import grid
from dit.sampling.grid import Fonts, draw_grid, fonts_for, label, short_label
from tests.hostile import odd_text

PROMPTS = (
    "$\\frac",
    "$x^2$ and ${}$",
    "costs $5 and $x",
    "\\begin{x} _^%#&~{}",
    "a\nb\tc\rd\u2028e",
    "\x00\x07\x1b[31m",
    "W" * 200_000,
    "",
    " ",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u202eabc",
    "\U0001f600 \U0001f469\u200d\U0001f680 \ufe0f",
    "\u4e2d\u6587\u5b57\u5e55" * 40,
    "\ud800 half",
    "e" + "\u0301" * 500,
)


def _ink(prompt: str, folder: Path) -> int:
    """Width of what is written beneath a picture, in pixels."""
    draw_grid([np.zeros((96, 96, 3), np.uint8)], [prompt], folder / "grid.png")
    alpha_HW = np.asarray(Image.open(folder / "grid.png"))[96:, :, 3]
    columns = np.flatnonzero(alpha_HW.any(0))
    return int(columns[-1] - columns[0])


def cells(file: Path) -> tuple[np.ndarray, list[tuple[str, np.ndarray]]]:
    """The grid [H, W, 4], and prompt and pixels [h, w, 3] of each picture that it names."""
    with Image.open(file) as image:
        pixels_HW4, found = np.asarray(image), json.loads(getattr(image, "text")["cells"])  # noqa: B009
    boxes = [(one["prompt"], one["box"]) for one in found["cells"]]
    return pixels_HW4, [(prompt, _at(pixels_HW4, box)) for prompt, box in boxes]


def _at(pixels_HW4: np.ndarray, box: list[int]) -> np.ndarray:
    left, top, right, bottom = box
    return pixels_HW4[top:bottom, left:right, :3]


def test_a_prompt_is_never_mathematics(tmp_path):
    """DejaVu's $ is as wide as its digits; as mathematics, it would not be there at all."""
    plain, mathematics = (_ink(text, tmp_path) for text in ("8xxx8", "$xxx$"))
    assert abs(plain - mathematics) <= 3


def test_any_prompts_are_drawn_in_one_grid(tmp_path):
    pictures = [np.full((8, 8, 3), 9 * i, np.uint8) for i in range(2 * len(PROMPTS))]
    notes = draw_grid(pictures, PROMPTS * 2, tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as image:
        assert image.mode == "RGBA" and max(image.size) < 4_000
    assert all("shown as code points" in note.because for note in notes)


def test_prompts_of_one_picture_wrap_into_columns(tmp_path):
    """They were rows of their own: 32 pictures of 136 x 128 made a grid 4,098 pixels high."""
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (128, 136, 3), np.uint8) for _ in range(32)]
    prompts = [f"a fox that looks at the moon, number {i}" for i in range(32)]
    assert draw_grid(pictures, prompts, tmp_path / "grid.png") == []
    pixels_HW4, found = cells(tmp_path / "grid.png")
    assert pixels_HW4.shape[1] <= 1248 and pixels_HW4.shape[0] < 1100
    assert [prompt for prompt, _ in found] == prompts
    for picture_HW3, (_, drawn_HW3) in zip(pictures, found, strict=True):
        np.testing.assert_array_equal(drawn_HW3, picture_HW3)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=64),
    st.sampled_from([(8, 8), (8, 60), (300, 20), (270, 480), (4, 400)]),
    st.integers(0, 24),
)
def test_any_numbers_of_pictures_have_places_of_their_own(counts, shape, top):
    """Each prompt's stand together and in order; nothing is wider than a page, nor overlaps."""
    shown = {f"p{i}": [np.zeros((*shape, 3), np.uint8)] * count for i, count in enumerate(counts)}
    fonts = Fonts(families=("DejaVu Sans",), missing=frozenset())
    blocks = grid._arranged(shown, fonts, top=top)
    assert [len(block.pictures) for block in blocks] == counts
    boxes = [box for one in blocks for box in (*(box for box, _ in one.pictures), one.label_box)]
    right, bottom = (max(box[side] for box in boxes) for side in (2, 3))
    taken_HW = np.zeros((bottom, right), bool)
    for left, above, end, below in boxes:
        assert end > left and below > above >= top
        part_HW = taken_HW[above:below, left:end]
        assert not part_HW.any()
        part_HW[:] = True
    assert right <= 1248 and bottom < 30_000


def test_a_caption_in_the_middle_of_tex_settings_is_text(tmp_path):
    """Of a user who has `text.usetex: True` in matplotlibrc and no TeX."""
    from matplotlib import rc_context

    with rc_context({"text.usetex": True}):
        assert draw_grid([np.zeros((4, 4, 3), np.uint8)], ["a $x$"], tmp_path / "grid.png") == []


@pytest.mark.parametrize("shape", [(1, 4000), (4000, 1), (1, 1), (700, 1100)])
def test_pictures_of_any_shape_have_their_place(tmp_path, shape):
    pictures = [np.full((*shape, 3), 200, np.uint8), np.full((16, 16, 3), 100, np.uint8)]
    assert draw_grid(pictures, ["a", "b"], tmp_path / "grid.png") == []
    with Image.open(tmp_path / "grid.png") as image:
        pixels = np.asarray(image)
        assert max(image.size) < 65_000
    for level in (200, 100):
        assert (pixels[..., :3] == level).all(-1).any()


def test_a_grid_shows_so_many_and_says_so(tmp_path):
    pictures = [np.zeros((2, 2, 3), np.uint8)] * 100
    (note,) = draw_grid(pictures, [f"p {i}" for i in range(100)], tmp_path / "grid.png")
    assert str(note).startswith("grid.png: shows 64 of 100 samples: the first 64 prompts")
    (note,) = draw_grid(pictures[:20], ["p"] * 20, tmp_path / "grid.png")
    assert "16 of 20 samples" in str(note)


def _font_of(folder: Path, character: str) -> str:
    """A font file that has one character, a box."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for corner in ((0, 700), (700, 700), (700, 0)):
        pen.lineTo(corner)
    pen.closePath()
    font = FontBuilder(1000, isTTF=True)
    font.setupGlyphOrder([".notdef", "box"])
    font.setupCharacterMap({ord(character): "box"})
    font.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "box": pen.glyph()})
    font.setupHorizontalMetrics({".notdef": (800, 0), "box": (800, 0)})
    font.setupHorizontalHeader(ascent=800, descent=-200)
    font.setupNameTable({"familyName": "Box Of Tests", "styleName": "Regular"})
    font.setupOS2(sTypoAscender=800, sTypoDescender=-200, usWinAscent=800, usWinDescent=200)
    font.setupPost()
    content = io.BytesIO()
    font.save(content)
    file = folder / "box.ttf"
    file.write_bytes(content.getvalue())
    return str(file)


def test_an_installed_font_draws_what_the_usual_one_lacks(tmp_path):
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    files = [str(tmp_path / "broken.ttf"), _font_of(tmp_path, "\u4e2d")]
    fonts = fonts_for(["a \u4e2d", "\u6587"], installed=files)
    assert fonts == Fonts(families=("DejaVu Sans", "Box Of Tests"), missing=frozenset("\u6587"))
    assert label("a \u4e2d\u6587", fonts) == "a \u4e2d U+6587"
    from matplotlib.font_manager import findfont

    assert findfont("Box Of Tests") == files[1]


def test_code_points_stand_for_what_no_font_has():
    fonts = fonts_for(["\u4e2d\u6587 a\x00b"], installed=[])
    assert fonts.missing == frozenset("\u4e2d\u6587")
    assert label("\u4e2d\u6587 a\x00b", fonts) == "U+4E2D U+6587 a U+0000 b"


@given(st.text() | odd_text | st.text(st.characters(max_codepoint=0x2FF), min_size=80))
def test_hostile_captions_make_short_labels(caption):
    fonts = fonts_for([caption], installed=[])
    lines = label(caption, fonts).split("\n")
    assert len(lines) <= 4 and all(len(line) <= 40 for line in lines)
    assert all(one.isprintable() for line in lines for one in line if one not in fonts.missing)
    if caption.isascii() and caption.isprintable() and len(caption) < 80:
        assert "".join(lines).replace(" ", "") == caption.replace(" ", "")
    assert len(short_label(caption)) <= 120

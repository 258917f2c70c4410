"""Captions, masks and control pictures of nothing are counted, and the first is named."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from data_prep.cli.parser import main
from data_prep.media.clips import Entry
from tests.media_files import image, video

SPELLINGS = ("caf\u00e9", "cafe\u0301")
PACK = ("--processor", "pixel", "--num_workers", "0", "--split", "1,0,0")
Packed = tuple[dict[str, str], dict[str, int]]
"""Captions by source, and what was ignored."""


@pytest.fixture
def pack(tmp_path: Path) -> Callable[..., Packed]:
    """Packs `in` below the temporary folder with these options."""

    def run(*options: object, command: str = "image") -> Packed:
        out = tmp_path / "out"
        words = [command, "--output_dir", out, "--overwrite", *PACK, *(options or images(tmp_path))]
        assert main(list(map(str, words))) == 0
        entries = map(Entry.from_line, (out / "plan.jsonl").read_text().splitlines())
        ignored = json.loads((out / "dataset_card.json").read_text())["ignored"]
        return {entry.source: entry.caption for entry in entries}, ignored

    return run


def images(folder: Path) -> tuple[object, ...]:
    return "--image_dir", folder / "in"


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        (root / name).write_text(text)


def test_caption_files_of_nothing_are_counted_and_the_first_is_named(tmp_path, pack) -> None:
    root = image(tmp_path / "in/IMG_1.png").parent
    image(root / "a.png")
    image(root / "b.png")
    write(root, **{
        "img_1.txt": "other capitals", "zz.json": "{}", "b.png.txt": "first", "b.txt": "second",
        "prompts.txt": "one\ntwo", "a.TXT": "of a", "a.txt": "of a as well", "old.heic": "",
        "old.txt": "of a photograph that is ignored itself", "a.caption": "of kohya", "t.xlsx": "",
    })  # fmt: skip
    captions, ignored = pack()
    assert captions == {"IMG_1.png": "IMG 1", "a.png": "of a", "b.png": "first"}
    lines = next(what for what in ignored if "finetrainers" in what)
    assert "metadata.csv with the columns file_name,text" in lines and "first prompts.txt" in lines
    assert {what: count for what, count in ignored.items() if what != lines} == {
        "caption file that no medium takes, the first b.txt": 3,
        "*.txt that differs from another in the ending's case": 1,
        "*.heic (convert them to JPEG or PNG)": 1,
        "*.caption (captions are read from .txt and .json; rename them)": 1,
        "*.xlsx (tables of captions are read from .csv, .tsv and .jsonl)": 1,
    }


def test_what_an_option_leaves_out_is_counted(tmp_path, pack) -> None:
    root = image(tmp_path / "in/a.png").parent
    write(root, **{"a.txt": "T", "a.json": '{"caption": "J"}', "m.csv": "file_name,text\na.png,C"})
    folder = ("--image_dir", root)
    captions, ignored = pack(*folder, "--caption_format", "csv")
    assert captions == {"a.png": "C"}
    assert ignored == {"caption file that --caption_format csv leaves out, the first a.json": 2}
    captions, ignored = pack(*folder, "--caption_format", "sidecar", "--caption_field", "")
    assert captions == {"a.png": "T"}
    assert ignored == {
        "caption table that --caption_format sidecar leaves out, the first m.csv": 1,
        "caption file that --caption_field '' leaves out, the first a.json": 1,
    }


def test_members_of_an_archive_are_counted_as_files_are(tmp_path, pack) -> None:
    image(tmp_path / "a.png")
    write(tmp_path, **{"a.txt": "A", "lost.txt": "of nothing"})
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in/x.tar", "w") as tar:
        for name, member in (("a.png", SPELLINGS[0] + ".png"), ("a.txt", SPELLINGS[1] + ".txt")):
            tar.add(tmp_path / name, member)
        tar.add(tmp_path / "lost.txt", "lost.txt")
    captions, ignored = pack()
    assert captions == {f"x.tar/{SPELLINGS[0]}.png": "A"}
    assert ignored == {"caption file that no medium takes, the first x.tar/lost.txt": 1}


TABLES: dict[str, Callable[[str], str]] = {
    "x.jsonl": lambda name: json.dumps({"file_name": f"{name}.png", "text": "C"}),
    "x.csv": lambda name: f"file_name;text\n{name}.png;C\n",
    "captions.json": lambda name: json.dumps({f"{name}.png": "C"}),
    "meta.json": lambda name: json.dumps([{"file_name": f"deep/{name}.png", "caption": "C"}]),
    "meta_cap.json": lambda name: json.dumps({name: {"caption": "C"}}),
    "v_internvl.json": lambda name: json.dumps({"path": name, "internvl": "C"}),
}


@pytest.mark.parametrize("turn", [1, -1], ids=["composed", "decomposed"])
@pytest.mark.parametrize("table", TABLES)
def test_one_name_in_two_spellings_in_tables(tmp_path, pack, table: str, turn: int) -> None:
    file, row = SPELLINGS[::turn]
    image(tmp_path / f"in/deep/{file}.png")
    write(tmp_path / "in", **{table: TABLES[table](row)})
    captions, ignored = pack()
    assert captions == {f"deep/{file}.png": "C"} and ignored == {}


@pytest.mark.parametrize("turn", [1, -1], ids=["composed", "decomposed"])
def test_one_name_in_two_spellings_of_files(tmp_path, pack, read_samples, turn: int) -> None:
    file, other = SPELLINGS[::turn]
    for folder, name in (("in", file), ("masks", other), ("before", other), ("in", "z")):
        image(tmp_path / folder / f"{name}.png")
    image(tmp_path / "masks/none.png")
    image(tmp_path / "before/z.png")
    write(tmp_path / "in", **{f"{other}.json": '{"caption": "C"}', "z.txt": "Z"})
    masks = ("--mask_dir", tmp_path / "masks", "--control_dir", tmp_path / "before")
    captions, ignored = pack("--image_dir", tmp_path / "in", *masks)
    assert captions == {f"{file}.png": "C", "z.png": "Z"}
    assert ignored == {"mask of no file, the first none.png": 1}
    assert {"loss_mask", "reference_latent_0"} <= read_samples(tmp_path / "out")[
        f"{file}.png"
    ].keys()


@pytest.mark.parametrize("turn", [1, -1], ids=["composed", "decomposed"])
def test_an_absolute_path_through_a_folder_in_another_spelling(tmp_path, pack, turn: int) -> None:
    folder, other = SPELLINGS[::turn]
    image(tmp_path / f"in/{folder}/{folder}.png")
    row = {"file_name": f"{tmp_path}/in/{other}/{other}.png", "text": "A"}
    write(tmp_path / f"in/{folder}", **{"m.jsonl": json.dumps(row)})
    captions, ignored = pack()
    assert captions == {f"{folder}/{folder}.png": "A"} and ignored == {}


@pytest.mark.parametrize("turn", [1, -1], ids=["composed", "decomposed"])
def test_a_control_picture_of_a_table_in_two_spellings(tmp_path, pack, turn: int) -> None:
    file, other = SPELLINGS[::turn]
    image(tmp_path / "in/a.png")
    image(tmp_path / f"in/before/{file}.png")
    row = {"file_name": "a.png", "text": "A", "control_path": f"before/{other}.png"}
    write(tmp_path / "in", **{"m.jsonl": json.dumps(row)})
    captions, ignored = pack()
    assert captions == {"a.png": "A"}
    assert ignored == {"control or rejected picture that a table names, no sample itself": 1}


def test_names_that_fit_several_media_are_left_alone_and_counted(tmp_path, pack) -> None:
    """Å has three spellings: two of media, and one of a caption, a mask and a row."""
    one, *media = "\u212b", "\u00c5", "A\u030a"
    for name in media:
        image(tmp_path / f"in/{name}.png")
    image(tmp_path / f"masks/{one}.png")
    write(tmp_path / "in", **{f"{one}.txt": "?", "x.csv": f"file_name,text\n{one}.png,?\n"})
    captions, ignored = pack(*images(tmp_path), "--mask_dir", tmp_path / "masks")
    assert set(captions.values()) == set(media)
    ending = "whose name matches several, because é may be one character or two, the first"
    assert ignored == {
        f"caption file {ending} {one}.txt": 1,
        f"row of a caption table {ending} '{one}.png' in x.csv": 1,
        f"mask {ending} {one}.png": 1,
    }


def test_what_lies_unread_in_a_folder_of_masks_is_counted(tmp_path, pack) -> None:
    image(tmp_path / "in/a.png")
    root = image(tmp_path / "masks/a.png").parent
    write(root, **{"a.npy": "", "a.txt": "", "x.tar": ""})
    _, ignored = pack(*images(tmp_path), "--mask_dir", root)
    assert ignored == {
        "*.npy in --mask_dir": 1,
        "caption file in --mask_dir, which is not read there": 1,
        ".tar in --mask_dir, which is not read there": 1,
    }


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A picture and a clip, each with a caption and a mask; and one file of each kind too many."""
    root = image(tmp_path / "in/picture.png").parent
    video(root / "clips/clip.mp4", 5)
    write(root, **{"picture.txt": "P", "clips/clip.txt": "C", "lost.txt": "", "notes.md": ""})
    write(root, **{"x.csv": "file_name,text\nclips/clip.mp4,C\ngone.png,G\n", ".hidden": ""})
    Image.new("L", (32, 24)).save(image(tmp_path / "masks/picture.png"))
    for name in ("clips/clip", "none"):
        Image.new("L", (64, 48)).save(image(tmp_path / f"masks/{name}.png"))
    return root


@pytest.mark.parametrize("clips", ["in", "in/../in", "link", "in/clips"])
def test_two_options_ignore_nothing_that_either_packs(tmp_path, pack, mixed, clips: str) -> None:
    (tmp_path / "link").symlink_to(mixed)
    masks = ("--video_dir", tmp_path / clips, "--mask_dir", tmp_path / "masks")
    if clips == "in/clips":  # masks have the paths of their media in each folder
        (tmp_path / "masks/clips/clip.png").rename(tmp_path / "masks/clip.png")
        (mixed / "other.mp4").touch()
    captions, ignored = pack(*images(tmp_path), *masks)
    assert sorted(captions.values()) == ["C", "P"]
    assert ignored == {
        "*.md": 1,
        "hidden": 1,
        "caption file that no medium takes, the first lost.txt": 1,
        "row of a caption table that matches no file, the first 'gone.png' in x.csv": 1,
        "mask of no file, the first none.png": 1,
    } | ({"*.mp4": 1} if clips == "in/clips" else {})


def test_one_option_alone_counts_the_other_media(tmp_path, pack, mixed) -> None:
    _, ignored = pack()
    assert ignored["*.mp4"] == 1
    assert ignored["caption file that no medium takes, the first lost.txt"] == 1


@pytest.mark.parametrize(
    ("name", "word"),
    [
        (".clips", "hidden"),
        ("#recycle", "folder #recycle, which a file server or system adds"),
    ],
)
def test_a_folder_that_is_left_out_is_no_part_of_the_one_above(name, word, tmp_path, pack) -> None:
    image(tmp_path / "in/a.png")
    video(tmp_path / "in" / name / "c.mp4", 5)
    write(tmp_path / "in" / name, **{"n.md": ""})
    _, ignored = pack(*images(tmp_path), "--video_dir", tmp_path / "in" / name)
    assert ignored == {word: 1, "*.md": 1}


def test_a_folder_that_a_file_lists_twice_is_counted_once(tmp_path, pack) -> None:
    image(tmp_path / "in/a.png")
    write(tmp_path / "in", **{"lost.txt": ""})
    directories: list[dict[str, Any]] = [{"path": "in"}, {"path": "in", "resolutions": [[16, 16]]}]
    (tmp_path / "d.yaml").write_text(json.dumps({"directory": directories}))
    captions, ignored = pack("--dataset_config", tmp_path / "d.yaml")
    assert len(captions) == 2
    assert ignored == {"caption file that no medium takes, the first lost.txt": 1}


def test_a_plan_notes_animations_as_packing_does(tmp_path, pack, capsys) -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    (tmp_path / "in").mkdir()
    for name in ("a.gif", "b.webp", "c.png"):
        frames[0].save(tmp_path / "in" / name, save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "in/still.gif")
    for plan, headline in (("--plan", "planned"), ("--plan=quick", "planned"), (None, "packed")):
        words = ["image", "--output_dir", tmp_path / headline, *images(tmp_path), *PACK]
        assert main([*map(str, words), *filter(None, [plan])]) == 0
        said = capsys.readouterr().out
        assert f"{headline}: 3 x only the first frame of an animation" in said

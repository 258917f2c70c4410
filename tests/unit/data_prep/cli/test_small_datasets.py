"""Folders of a few files, and what is said of them before they are encoded."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_prep.cli.parser import build_parser, main

KEPT = "all samples ({}) are in train: the default --split 0.9,0.1,0 would leave train, val or test"


def pictures(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    """Files 0.png, 1.png, ... of (width, height)."""
    folder.mkdir(exist_ok=True)
    for index, (width, height) in enumerate(sizes):
        pixels = np.full((height, width, 3), index, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


def pack(source: Path, out: Path, *more: object) -> int:
    words = ["image", "--image_dir", source, "--output_dir", out, "--num_workers", 0, *more]
    return main([str(word) for word in words])


def splits_of(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/*.tar")}


def test_a_small_folder_is_all_for_training(tmp_path, capsys, read_samples):
    source, out = pictures(tmp_path / "in", [(16, 16)] * 5), tmp_path / "out"
    assert pack(source, out, "--plan") == 0
    assert KEPT.format(5) in capsys.readouterr().out
    assert pack(source, out) == 0
    said = capsys.readouterr().out
    assert KEPT.format(5) in said
    assert "dataset.use_train_split_for_val=true" in said.splitlines()[-1]
    assert splits_of(out) == {"train"} and len(read_samples(out)) == 5
    # As soon as there are enough files, some are kept apart, those that were packed before too.
    pictures(source, [(16, 16)] * 60)
    assert pack(source, out) == 0 and pack(source, tmp_path / "fresh") == 0
    said = capsys.readouterr().out
    assert "note:" not in said and "use_train_split_for_val" not in said
    for shard in sorted((tmp_path / "fresh").glob("*/*.tar")):
        again = out / shard.relative_to(tmp_path / "fresh")
        assert again.read_bytes() == shard.read_bytes()
    assert splits_of(out) == {"train", "val"}


def test_a_single_picture_that_would_be_for_validation_is_for_training(tmp_path, capsys):
    """By its key alone `6.png` belongs to val; a dataset without training data is of no use."""
    pictures(tmp_path / "in", [(16, 16)] * 60)
    assert pack(tmp_path / "in", tmp_path / "out") == 0
    (shard,) = (tmp_path / "out" / "val").glob("*.tar")
    with tarfile.open(shard) as tar:
        number = min(int(name.split("_")[0]) for name in tar.getnames())
    (tmp_path / "one").mkdir()
    (tmp_path / "in" / f"{number}.png").rename(tmp_path / "one" / f"{number}.png")
    assert pack(tmp_path / "one", tmp_path / "small") == 0
    assert splits_of(tmp_path / "small") == {"train"}
    assert pack(tmp_path / "one", tmp_path / "given", "--split", "0.9,0.1,0") == 1
    assert "--split asks for 0.9 of the samples in train" in capsys.readouterr().err


def test_a_split_that_is_given_counts(tmp_path, capsys):
    source = pictures(tmp_path / "in", [(16, 16)] * 5)
    assert pack(source, tmp_path / "out", "--split", "0.9,0.1,0") == 1
    assert "--split asks for 0.1 of the samples in val" in capsys.readouterr().err


def dfm_folder(folder: Path, count: int) -> Path:
    """Shards in the layout of DFM, of other samples for each count."""
    folder.mkdir()
    with tarfile.open(folder / "0.tar", "w") as tar:
        for index in range(count):
            for ending, value in (
                ("pth", torch.full((4, 1, 4, 4), float(index))),
                ("pickle", torch.ones(3, 8)),
            ):
                stream = io.BytesIO()
                torch.save(value, stream)
                add(tar, f"{index:06d}.{ending}", stream.getvalue())
            add(tar, f"{index:06d}.json", b'{"image_height": 8, "image_width": 8}')
    return folder


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("count", [1, 3])
def test_a_small_cache_of_another_tool_is_all_for_training(tmp_path, capsys, count):
    source, out = dfm_folder(tmp_path / "theirs", count), tmp_path / "out"
    assert main(["convert", str(source), "--output_dir", str(out)]) == 0
    assert KEPT.format(count) in capsys.readouterr().out
    assert splits_of(out) == {"train"}
    given = ["--output_dir", str(tmp_path / "given"), "--split", "0.001,0.999,0"]
    assert main(["convert", str(source), *given]) == 0
    assert "note: --split 0.001,0.999,0 leaves train without a sample" in capsys.readouterr().out


def test_what_whole_patches_cost_is_said_before_the_work(tmp_path, capsys):
    sizes = [(16, 16), (17, 16), (23, 9), (20, 20), (8, 8), (9, 31)]
    source = pictures(tmp_path / "in", sizes)
    assert pack(source, tmp_path / "a", "--plan") == 0
    said = capsys.readouterr().out
    assert (
        "note: 4 of 6 samples are cropped, which takes 18.5% of the area on average and 38.2% at"
        " most (2.png: 23 x 9 -> 16 x 8); --size_multiple 4 (for model.patch_spatial=1) would take"
    ) in said
    assert pack(source, tmp_path / "a", "--size_multiple", 4, "--overwrite") == 0
    said = capsys.readouterr().out
    assert "note: 3 of 6 samples are cropped, which takes 8.1% of the area" in said
    assert "packed: 3 of 6 samples are cropped" in said
    assert "would take" not in said
    assert main(["inspect", str(tmp_path / "a")]) == 0
    assert "3 of 6 samples are cropped" in capsys.readouterr().out
    assert "cropped | 3 of 6 samples" in (tmp_path / "a/README.md").read_text()
    assert pack(pictures(tmp_path / "whole", [(16, 16)] * 3), tmp_path / "b") == 0
    assert "cropped" not in capsys.readouterr().out


def test_the_words_of_fastvideo():
    """Both commands of its page on training, `--preprocess.` left out."""
    for workload in ("t2v", "i2v"):
        words = f"""video --model_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --mode preprocess
            --workload_type {workload} --dataset_type merged --dataset_path data/your_dataset/
            --dataset_output_dir data/your_dataset_processed/ --video_loader_type torchvision
            --max_height 480 --max_width 832 --num_frames 77 --train_fps 16""".split()
        args = build_parser().parse_args(words)
        assert (args.mode, args.num_frames, args.workload_type) == ("video", 77, workload)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((name, 0) for name in ("--max_items", "--max_sequence_length", "--batch_size")),
        *((name, -1) for name in ("--decode_threads", "--num_workers", "--shard_size")),
        *((name, 2**31) for name in ("--max_items", "--batch_size", "--max_pixels", "--height")),
        ("--max_pixels", 10**30),
        ("--size_multiple", "x"),
        ("--max_shard_bytes", 0),
        ("--max_shard_bytes", "5 apples"),
        ("--max_bad_fraction", "nan"),
    ],
)
def test_numbers_out_of_range_are_named(tmp_path, capsys, option, value):
    source = pictures(tmp_path / "in", [(16, 16)])
    try:
        code = pack(source, tmp_path / "out", option, value)
    except SystemExit as left:
        code = left.code
    assert code in (1, 2)
    said = capsys.readouterr().err.splitlines()[-1]
    assert option in said and str(value) in said


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GiB", 5 * 2**30), ("5GB", 5 * 10**9), ("500 kB", 500_000), ("1.5MiB", 3 * 2**19), ("7", 7)],
)
def test_sizes_in_bytes(text, size):
    words = ["digits", "--output_dir", "x", "--max_shard_bytes", text]
    assert build_parser().parse_args(words).max_shard_bytes == size

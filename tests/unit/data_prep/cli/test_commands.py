"""The command line, as a person types it."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_prep.cli.next_command import training_command
from data_prep.cli.parser import main
from dit.codecs import vae
from dit.codecs.text import WordTable
from dit.command_line import python
from dit.parsing import parse_yaml
from tests import launching
from tests.tables import table


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "data_prep", *map(str, arguments)]
    return launching.run(command)


def image(source: Path, out: Path, *more: str) -> int:
    return main(["image", "--image_dir", str(source), "--output_dir", str(out), *more])


ALL_TRAIN = ("--split", "1,0,0")


def test_digits(tmp_path: Path, read_samples) -> None:
    out = tmp_path / "my digits"
    done = run("digits", "--output_dir", out, "--num_samples", 120)
    assert done.returncode == 0, done.stderr
    samples = read_samples(out)
    assert len(samples) == 120
    assert samples["load_digits/7"]["caption"] == "a handwritten seven"
    assert samples["load_digits/7"]["latent"].shape == (4, 1, 4, 4)
    assert done.stdout.splitlines()[-1] == (
        f"next: {python()} recipes/pretrain_dit.py --config-file conf/dit_digits.yaml"
        f" 'dataset.path={out}'"
    )
    assert "packing 120 of 120" in done.stderr  # plain lines, no bar: this is no terminal
    assert "\r" not in done.stderr and "\x1b" not in done.stderr + done.stdout
    card = json.loads((out / "dataset_card.json").read_text())
    assert card["processor"] == {"name": "pixel", "block": 2, "pixel_channels": 1}
    again = run("digits", "--output_dir", out)
    assert again.returncode == 1 and "--overwrite" in again.stderr
    assert "Traceback" not in again.stderr


@pytest.mark.parametrize("folder", ["2024", "1e5", "null", "a: b # c", "data/my photos", 'a"b'])
def test_the_next_command_names_any_folder(folder: str) -> None:
    words = shlex.split(training_command(Path(folder), "conf/dit_debug.yaml", {}))
    key, _, value = words[-1].partition("=")
    assert key == "dataset.path" and parse_yaml(value).values == folder


def test_a_nested_folder_of_images(tmp_path: Path, picture_folder, read_samples) -> None:
    source, out = picture_folder(40), tmp_path / "out"
    (source / "part0" / "BROKEN.JPG").write_bytes(b"\xff\xd8\xff")
    (source / "part0" / "film.mp4").touch()
    done = run(
        "image", "--image_dir", source, "--output_dir", out, "--processor", "pixel",
        "--pixel_block", 2, "--shard_size", 9, "--split", "0.6,0.3,0.1", "--minutes", 0,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    samples = read_samples(out)
    assert len(samples) == 40
    assert {s["caption"] for s in samples.values()} == {f"picture {index}" for index in range(40)}
    assert len({tuple(s["latent"].shape) for s in samples.values()}) > 5
    codec = vae.codec_of_card(json.loads((out / "dataset_card.json").read_text()))
    for path, sample in samples.items():
        assert (source / path).is_file()  # relative to the input, never absolute
        pixels_HWC = codec.decode(sample["latent"])[0].numpy()
        height, width = sample["original_height"], sample["original_width"]
        assert pixels_HWC.shape == (height - height % 4, width - width % 4, 3)
        top, left = (height % 4) // 2, (width % 4) // 2
        whole = np.asarray(Image.open(source / path))
        inside = whole[top : top + len(pixels_HWC), left : left + pixels_HWC.shape[1]]
        np.testing.assert_array_equal(pixels_HWC, inside)
    for line in (
        "refused: 1 x image is damaged or cut short: part0/BROKEN.JPG (its header cannot be read;"
        " copy or download it again)",
        "ignored: 1 x *.mp4",
        "packed: 40 x caption from the file name",
        f"dataset.path={out} model.in_channels=12 model.crossattn_emb_size=256",
    ):
        assert line in done.stdout
    refused = json.loads((out / "refused.jsonl").read_text())
    assert refused["source"] == "part0/BROKEN.JPG" and refused["reason"] in done.stdout
    inspected = run("inspect", out)
    assert inspected.returncode == 0, inspected.stderr
    assert f"40 samples in {len(list(out.rglob('*.tar')))} shards" in inspected.stdout


def test_nothing_absolute_in_the_output(tmp_path: Path, picture_folder) -> None:
    assert image(picture_folder(6), tmp_path / "out", *ALL_TRAIN) == 0
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes()


def test_equal_names_in_different_folders_are_different_samples(
    tmp_path: Path, image_of, read_samples
) -> None:
    names = ["a/0001.png", "b/0001.png", "b/c/0001.png", "a/0001.bmp", "a.b/0001.v2.PNG"]
    for index, name in enumerate(names):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image_of(index, 16, 16).save(path)
        path.with_name(path.name + ".json").write_text(json.dumps({"caption": f"number {index}"}))
    assert image(tmp_path / "in", tmp_path / "out", *ALL_TRAIN) == 0
    samples = read_samples(tmp_path / "out")
    assert {name: s["caption"] for name, s in samples.items()} == {
        name: f"number {index}" for index, name in enumerate(names)
    }
    assert len({s["key"] for s in samples.values()}) == len(names)


def test_a_file_keeps_its_split_whatever_else_is_packed(
    tmp_path: Path, picture_folder, read_samples
) -> None:
    source = picture_folder(40)
    options = ("--split", "0.5,0.3,0.2")
    assert image(source, tmp_path / "all", *options) == 0
    shutil.rmtree(source / "part1")
    assert image(source, tmp_path / "fewer", *options) == 0
    before, after = read_samples(tmp_path / "all"), read_samples(tmp_path / "fewer")
    assert len(before) == 40 and 20 < len(after) < 40
    for name, sample in after.items():
        assert sample["key"] == before[name]["key"]
        assert sample["shard"].parent.name == before[name]["shard"].parent.name


def test_packing_is_reproducible_and_does_not_depend_on_where(
    tmp_path: Path, picture_folder
) -> None:
    source = picture_folder(12)
    shutil.copytree(source, tmp_path / "moved" / "pictures")
    assert image(source, tmp_path / "one", "--shard_size", "5", *ALL_TRAIN) == 0
    moved = tmp_path / "moved" / "pictures"
    assert image(moved, tmp_path / "two", "--shard_size", "5", *ALL_TRAIN) == 0
    one, two = (
        {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
        for out in (tmp_path / "one", tmp_path / "two")
    )
    assert one == two and len(one) > 9


def test_grey_pixels_and_a_budget(tmp_path: Path, image_of, read_samples) -> None:
    (tmp_path / "in").mkdir()
    image_of(0, 200, 100).save(tmp_path / "in" / "wide.png")
    assert image(
        tmp_path / "in", tmp_path / "out", "--pixel_channels", "1", "--pixel_block", "8",
        "--max_pixels", "5000", "--size_multiple", "8", "--text_width", "32", *ALL_TRAIN,
    ) == 0  # fmt: skip
    (sample,) = read_samples(tmp_path / "out").values()
    assert sample["latent"].shape == (64, 1, 48 // 8, 96 // 8)  # 100 x 50 pixels, cropped
    assert (sample["original_height"], sample["original_width"]) == (100, 200)
    assert (sample["height"], sample["width"]) == (48, 96)
    assert torch.equal(sample["text"], WordTable(width=32).encode("wide"))


def test_upright_size_of_a_rotated_photo(tmp_path: Path, image_of, read_samples) -> None:
    (tmp_path / "in").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    image_of(0, 32, 16).save(tmp_path / "in" / "photo.png", exif=exif)
    assert image(tmp_path / "in", tmp_path / "out", *ALL_TRAIN) == 0
    (sample,) = read_samples(tmp_path / "out").values()
    assert (sample["original_height"], sample["original_width"]) == (32, 16)


@pytest.mark.parametrize(("arguments", "message"), table(__file__, "bad_options"))
def test_bad_options_are_errors_that_touch_nothing(
    tmp_path: Path, picture_folder, capsys, arguments: tuple[str, ...], message: str
) -> None:
    source, out = picture_folder(2), tmp_path / "out"
    assert image(source, out, *ALL_TRAIN, *arguments) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_size_of_shards_is_read_with_its_unit(tmp_path: Path, picture_folder) -> None:
    source = picture_folder(12)
    assert image(source, tmp_path / "out", *ALL_TRAIN, "--max_shard_bytes", "30kB") == 0
    assert len(list((tmp_path / "out/train").glob("*.tar"))) > 1
    card = json.loads((tmp_path / "out/dataset_card.json").read_text())
    assert card["settings"]["max_shard_bytes"] == 30_000
    with pytest.raises(SystemExit, match="2"):
        image(source, tmp_path / "bad", "--max_shard_bytes", "much")


def test_all_files_bad(tmp_path: Path, capsys) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").touch()
    Image.new("RGB", (3, 300)).save(tmp_path / "in" / "b.png")
    assert image(tmp_path / "in", tmp_path / "out", *ALL_TRAIN, "--max_bad_fraction", "1") == 1
    error = capsys.readouterr().err
    assert "nothing was packed: all 2 files were refused" in error
    assert "1 x file is empty" in error and "1 x image is smaller than size_multiple" in error
    assert len((tmp_path / "out/refused.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "out/.nv-meta").exists()


def test_captions_may_be_demanded(tmp_path: Path, picture_folder, capsys) -> None:
    source = picture_folder(3)
    (source / "part0" / "picture_0.txt").write_text("has one")
    options = ("--missing_caption", "refuse", *ALL_TRAIN)
    assert image(source, tmp_path / "out", *options) == 1
    assert "2 x no caption" in capsys.readouterr().err
    options += ("--max_bad_fraction", "0.7")
    assert image(source, tmp_path / "out", *options) == 0


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_it_with_its_exit_code_and_publishes_nothing(
    tmp_path: Path, sent: str
) -> None:
    program = (
        "import os, runpy, signal, sys; from data_prep.sources import digits\n"
        "class Interrupted(digits.Digits):\n"
        "    def read(self, entry):\n"
        f"        if entry.key == 'digits-0030': os.kill(os.getpid(), signal.{sent})\n"
        "        return super().read(entry)\n"
        "from data_prep.cli import commands; commands.Digits = Interrupted\n"
        "sys.argv[1:] = ['digits', '--output_dir', sys.argv[1], '--num_samples', '60']\n"
        "runpy.run_module('data_prep', run_name='__main__')\n"
    )
    done = launching.run([sys.executable, "-c", program, str(tmp_path / "out")])
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1].startswith("interrupted: nothing was published")
    assert "Traceback" not in done.stderr and not (tmp_path / "out/.nv-meta").exists()


def test_help_and_the_list_of_processors() -> None:
    plain = run()
    assert plain.returncode == 0 and "digits" in plain.stdout and "inspect" in plain.stdout
    listed = run("image", "--list_processors")
    assert listed.returncode == 0 and "pixel" in listed.stdout and "none" in listed.stdout
    helped = " ".join(run("image", "--help=all").stdout.split())
    assert "The caption of pictures/old_cat.jpg is, in this order" in helped
    assert "Largest size of a shard" in helped
    helped = " ".join(run("video", "--help=all").stdout.split())
    assert "a clip is a sample" in helped


@pytest.mark.slow
def test_preparing_data_loads_neither_megatron_core_nor_the_model(repo_root: Path) -> None:
    program = (
        "import sys, data_prep.cli.parser, dit.codecs.vae, dit.codecs.text\n"
        "bad = {m for m in sys.modules if m.startswith(('dit.', 'megatron.core'))}\n"
        "shared = ('dit.bin_packing', 'dit.command_line', 'dit.console',"
        " 'dit.distributed', 'dit.launched', 'dit.local_path',"
        " 'dit.parsing', 'dit.progress', 'dit.safe_pickle',"
        " 'dit.safe_writing', 'dit.stored_samples', 'dit.streams', 'dit.system_errors',"
        " 'dit.token_ids', 'dit.codecs')\n"
        "bad = {m for m in bad if not m.startswith(shared)}\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=repo_root)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--hieght", "64"], "--hieght is not an option, --height is"),
        (["--hieght=64"], "--hieght is not an option, --height is"),
        (["of", "mine"], "'of' belongs to no option; put quotes around names with spaces"),
        (
            ["--max_pixels", "many"],
            "argument --max_pixels: 'many' is not a whole number; give one such as 4",
        ),
    ],
)
def test_what_was_typed_wrong_is_one_line(capsys, typed: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        image(Path("in"), Path("out"), *typed)
    help_of = "python -m data_prep image --help=all lists the options"
    assert capsys.readouterr().err == f"error: {said}; {help_of}\n"


def test_a_dataset_inside_the_folder_of_pictures_is_not_packed_again(
    tmp_path: Path, picture_folder, content_of
) -> None:
    source = picture_folder(3)
    options = ("--missing_caption", "filename", *ALL_TRAIN)
    assert image(source, source / "packed", *options) == 0
    once = content_of(source / "packed")
    assert (source / "packed/samples/0.png").is_file()
    assert image(source, source / "packed", *options) == 0
    assert content_of(source / "packed") == once


def test_a_plan_says_that_packing_would_publish_nothing(tmp_path: Path, image_of, capsys) -> None:
    (tmp_path / "in").mkdir()
    image_of(0, 16, 16).save(tmp_path / "in/a.png")
    (tmp_path / "in/b.png").touch()
    said = "1 of 2 files are refused, more than --max_bad_fraction"
    for fraction in ("0.4", "0.5"):
        options = ("--plan", "--max_bad_fraction", fraction)
        assert image(tmp_path / "in", tmp_path / "out", *options) == 0
        assert (said in capsys.readouterr().out) is (fraction == "0.4")


@pytest.mark.slow
def test_a_full_disk_is_named(tmp_path: Path, picture_folder) -> None:
    program = (
        "import resource, sys; from data_prep.cli.parser import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["image", "--image_dir", picture_folder(40), "--output_dir", tmp_path / "out"]
    done = launching.run([sys.executable, "-c", program, *map(str, words)])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"error: {tmp_path / 'out'}/")
    assert "File too large; raise the limit of 3,000 bytes with `ulimit -f unlimited`" in line

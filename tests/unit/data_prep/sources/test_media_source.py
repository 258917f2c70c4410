"""Every source ends where the plan said, and nothing vanishes without a word."""

import json
import tarfile
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from PIL import Image

from data_prep.cli.parser import main
from data_prep.media.clips import Entry
from tests.media_files import image, video

ALL_TRAIN = ("--split", "1,0,0", "--num_workers", "0", "--text_width", "16")


def run(command: str, out: Path, *arguments: object) -> int:
    return main([command, "--output_dir", str(out), *ALL_TRAIN, *map(str, arguments)])


def planned(out: Path) -> list[Entry]:
    return [Entry.from_line(line) for line in (out / "plan.jsonl").read_text().splitlines()]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Images of every mode and odd sizes, real videos, captions of several kinds, broken files."""
    root = tmp_path / "corpus"
    for index, mode in enumerate(("RGB", "L", "RGBA", "P", "1", "I;16", "LA")):
        source = "L" if mode == "I;16" else mode
        image(
            root / f"modes/{mode.replace(';', '_')}.png", 40 + index, 33 + 2 * index, source, index
        )
    image(root / "modes/cmyk.jpg", 50, 37, "CMYK")
    image(root / "modes/SAME.PNG", 64, 64)
    image(root / "other/SAME.PNG", 65, 63)
    image(root / "tiny.png", 3, 90)
    video(root / "films/even.mp4", 23)
    video(root / "films/TURNED.MOV", 9, rotation=90)
    video(root / "films/uneven.mp4", 8, times=[0, 0.1, 0.2, 0.5, 0.6, 1.0, 1.1, 1.2])
    video(root / "films/one.webm", 1)
    cut = video(root / "films/cut.mkv", 23)
    cut.write_bytes(cut.read_bytes()[:-300])
    (root / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not much")
    (root / "films/empty.mp4").touch()
    (root / "notes.md").write_text("ignored")
    (root / "modes/RGB.txt").write_text("a caption")
    (root / "films/meta.json").write_text(
        json.dumps([{"file_name": "even.mp4", "caption": "even frames"}])
    )
    return root


def test_each_file_ends_where_the_plan_said(corpus: Path, tmp_path: Path, read_samples) -> None:
    config = tmp_path / "folders.yaml"
    config.write_text(yaml.dump({"directory": [{"path": "corpus"}]}))
    options = ("--dataset_config", config, "--processor", "pixel", "--max_bad_fraction", "0.5")
    out = tmp_path / "out"
    assert run("video", out, *options, "--plan") == 0
    plan = planned(out)
    assert not list(out.rglob("*.tar")) and "<h1>Plan</h1>" in (out / "plan.html").read_text()
    before = (out / "plan.jsonl").read_bytes()
    assert run("video", out, *options) == 0
    assert (out / "plan.jsonl").read_bytes() == before
    samples = read_samples(out)
    refused = [json.loads(line) for line in (out / "refused.jsonl").read_text().splitlines()]
    assert {e.source: e.refused for e in plan if e.refused} == {
        line["source"]: line["reason"] for line in refused
    }
    assert {line["source"] for line in refused} == {
        "tiny.png", "films/cut.mkv", "films/empty.mp4", "broken.jpg",
    }  # fmt: skip
    packed = {entry.source: entry for entry in plan if not entry.refused}
    assert set(samples) == set(packed) and len(samples) == 14
    for source, sample in samples.items():
        entry = packed[source]
        assert sample["key"] == entry.key and sample["caption"] == entry.caption
        assert (sample["width"], sample["height"]) == entry.size
        assert sample["num_frames"] == max(1, len(entry.keep))
        assert (sample["original_width"], sample["original_height"]) == (entry.width, entry.height)
        _, frames, height, width = sample["latent"].shape
        assert frames * (height // 2) * (width // 2) == entry.tokens
        assert sample["fps"] == entry.kept_fps
    assert samples["modes/RGB.png"]["caption"] == "a caption"
    assert samples["films/even.mp4"]["caption"] == "even frames"
    assert samples["films/TURNED.MOV"]["height"] > samples["films/TURNED.MOV"]["width"]
    assert samples["films/even.mp4"]["num_frames"] == 23


@pytest.mark.parametrize(
    "options",
    [
        ("--target_frames", 5, "--window", "all"),
        ("--mode", "frames", "--num_frames", 3),
        ("--train_fps", 5, "--bucketing", "aspect", "--max_pixels", 2048),
        ("--height", 32, "--width", 64, "--num_frames", 9, "--drop_short"),
        ("--height", 32, "--width", 64, "--no_center_crop", "--resize_mode", "area"),
        ("--frame_buckets", "5,9", "--resolution_preset", "256p"),
    ],
)
def test_videos_become_what_the_options_say(
    corpus: Path, tmp_path: Path, read_samples, options: tuple
) -> None:
    out = tmp_path / "out"
    films = ("--video_dir", corpus / "films", "--max_bad_fraction", 0.8)
    assert run("video", out, *films, *options) == 0
    by_key = {entry.key: entry for entry in planned(out)}
    shapes = Counter()
    for shard in out.glob("*/*.tar"):
        with tarfile.open(shard) as tar:
            for name in tar.getnames():
                if name.endswith(".json"):
                    sample = json.load(tar.extractfile(name))
                    entry = by_key[name.removesuffix(".json")]
                    assert (sample["width"], sample["height"]) == entry.size
                    assert sample["num_frames"] == len(entry.keep)
                    shapes[sample["source"], sample["num_frames"]] += 1
    expected = {
        "--target_frames": {("films/even.mp4", 5): 4, ("films/uneven.mp4", 5): 1},
        "--mode": {("films/even.mp4", 1): 3, ("films/one.webm", 1): 1},
        "--train_fps": {("films/even.mp4", 11): 1},
        "--height": {("films/even.mp4", 9 if "--drop_short" in options else 23): 1},
        "--frame_buckets": {("films/even.mp4", 9): 1, ("films/uneven.mp4", 5): 1},
    }[options[0]]
    for (source, frames), count in expected.items():
        assert shapes[source.removeprefix("films/"), frames] == count
    dropped = "--drop_short" in options or options[0] == "--frame_buckets"
    assert any(source == "one.webm" for source, _ in shapes) != dropped


def test_a_tar_is_a_folder(corpus: Path, tmp_path: Path, read_samples) -> None:
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in/all.tar", "w") as tar:
        tar.add(corpus / "modes", "modes")
    image(tmp_path / "in/beside.png")
    assert run("image", tmp_path / "out", "--image_dir", tmp_path / "in") == 0
    samples = read_samples(tmp_path / "out")
    assert len(samples) == 10 and samples["all.tar/modes/RGB.png"]["caption"] == "a caption"
    plain = tmp_path / "plain"
    assert run("image", plain, "--image_dir", corpus / "modes") == 0
    for source, sample in read_samples(plain).items():
        inside = samples[f"all.tar/modes/{source}"]
        assert inside["latent"].shape == sample["latent"].shape


def test_files_that_a_fraction_of_repeats_leaves_out_are_counted(tmp_path: Path) -> None:
    for number in range(20):
        image(tmp_path / f"a/{number}.png", 32, 32)
    (tmp_path / "half.yaml").write_text("directory: [{path: a, num_repeats: 0.5}]")
    out = tmp_path / "out"
    assert run("image", out, "--dataset_config", tmp_path / "half.yaml") == 0
    (left,) = json.loads((out / "dataset_card.json").read_text())["ignored"].items()
    kept = len(planned(out))
    assert left == ("file that num_repeats 0.5 leaves out", 20 - kept) and 0 < kept < 20


def test_several_folders_with_their_own_settings(tmp_path: Path, read_samples) -> None:
    for name in ("a/x.png", "b/x.png", "c/a/x.png"):
        image(tmp_path / name, 96, 64)
    video(tmp_path / "b/film.mp4", 12)
    settings = {
        "resolutions": [32],
        "directory": [
            {"path": "a", "num_repeats": 3, "caption_prefix": "photo: "},
            {"path": "b", "resolutions": [32, [64, 32]], "ar_buckets": [1.0], "frame_buckets": [9]},
            {"path": "c/a", "size_buckets": [[48, 32, 1]]},
        ],
    }
    (tmp_path / "all.yaml").write_text(yaml.dump(settings))
    out = tmp_path / "out"
    assert run("video", out, "--dataset_config", tmp_path / "all.yaml") == 0
    plan = {}
    for entry in planned(out):
        plan.setdefault(entry.source, []).append(entry)
    assert set(plan) == {"a/x.png", "b/x.png", "b/film.mp4", "a_2/x.png"}
    (repeated,) = plan["a/x.png"]
    assert repeated.repeats == 3 and repeated.caption == "photo: x"
    assert [entry.size for entry in plan["b/x.png"]] == [(32, 32), (40, 40)]
    assert [len(entry.keep) for entry in plan["b/film.mp4"]] == [9, 9]
    assert plan["a_2/x.png"][0].size == (48, 32)
    counts = Counter()
    for shard in out.glob("*/*.tar"):
        with tarfile.open(shard) as tar:
            counts.update(n.split(".")[0] for n in tar.getnames() if n.endswith(".json"))
    assert counts.total() == 3 + 2 + 2 + 1 and max(counts.values()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("directory: [{path: a, num_repeat: 2}]", "'num_repeat'; did you mean 'num_repeats'"),
        (
            "directory: [{path: a, num_repeats: 0}]",
            "folder a: num_repeats: 0 is not a number above 0",
        ),
        ("resolutions: [512]", "needs a list 'directory'"),
        ("directory: [{num_repeats: 2}]", "has no 'path'"),
        ("directory: [{path: a, size_buckets: [[50, 32, 1]]}]", "50 is not a multiple of 8"),
        ("directory: [{path: nowhere}]", "nowhere is not a folder"),
        ("{", "--dataset_config"),
    ],
)
def test_a_dataset_file_says_what_is_wrong(tmp_path: Path, capsys, content, message) -> None:
    image(tmp_path / "a/x.png")
    (tmp_path / "all.yaml").write_text(content)
    assert run("image", tmp_path / "out", "--dataset_config", tmp_path / "all.yaml") == 1
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to pack: give --image_dir"),
        (("--height", "32"), "--height and --width belong together"),
        (("--height", "33", "--width", "32"), "--height 33 must be a multiple of 8"),
        (("--max_pixels", "99", "--resolution_preset", "256p"), "both pixel budgets"),
        (("--dataset_type", "hf"), "belong together"),
        (("--num_frames", "5", "--target_frames", "9"), "are the same option"),
        (("--num_workers", "-1"), "--num_workers -1"),
    ],
)
def test_options_that_contradict_each_other(tmp_path: Path, capsys, arguments, message) -> None:
    source = ("--image_dir", image(tmp_path / "in/x.png").parent) if arguments else ()
    assert run("image", tmp_path / "out", *source, *arguments) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_fastvideo_spelling(tmp_path: Path, read_samples, capsys) -> None:
    video(tmp_path / "set/videos/clip_1.mp4", 40)
    rows = [{"path": "clip_1.mp4", "cap": "A cat"}]
    (tmp_path / "set/videos2caption.json").write_text(json.dumps(rows))
    words = {
        "dataset_type": "merged", "dataset_path": tmp_path / "set", "max_height": 32,
        "max_width": 64, "num_frames": 17, "train_fps": 5,
        "dataset_output_dir": tmp_path / "out", "video_loader_type": "torchvision",
    }  # fmt: skip
    given = [str(word) for name, value in words.items() for word in (f"--preprocess.{name}", value)]
    assert main(["video", *given, *ALL_TRAIN]) == 0
    assert "torchvision no longer decodes videos" in capsys.readouterr().out
    (sample,) = read_samples(tmp_path / "out").values()
    assert sample["caption"] == "A cat" and sample["fps"] == 5
    assert (sample["num_frames"], sample["height"], sample["width"]) == (17, 32, 64)


@pytest.fixture
def server(tmp_path: Path):
    """Serves a PNG; its first answer is an error, one address has none, one is cut short."""
    content = image(tmp_path / "served.png").read_bytes()
    asked = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.path] += 1
            missing = self.path == "/missing.png"
            failing = self.path == "/flaky.png" and asked[self.path] < 3
            self.send_response(404 if missing else 503 if failing else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if not missing and not failing:
                short = self.path == "/short.png" and asked[self.path] < 2
                self.wfile.write(content[: 50 if short else None])

        def log_message(self, *_: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", asked
    running.shutdown()


def test_a_hugging_face_dataset_of_addresses(tmp_path: Path, server, read_samples, capsys) -> None:
    datasets = pytest.importorskip("datasets")
    address, asked = server
    names = ["good", "flaky", "short", "missing"]
    rows = {"image_url": [f"{address}/{n}.png" for n in names], "text": [f"a {n}" for n in names]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "set")
    out = tmp_path / "out"
    options = ("--hf_dataset", tmp_path / "set", "--max_bad_fraction", 0.3)
    assert run("image", out, *options) == 0
    assert {s["caption"] for s in read_samples(out).values()} == {"a good", "a flaky", "a short"}
    assert "1 x address cannot be fetched" in capsys.readouterr().out
    assert asked == {"/good.png": 1, "/flaky.png": 3, "/short.png": 2, "/missing.png": 1}


def test_a_hugging_face_dataset_of_bytes_and_paths(
    tmp_path: Path, read_samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder whose name is the beginning of an address of content to fsspec."""
    monkeypatch.chdir(tmp_path)
    datasets = pytest.importorskip("datasets")
    picture = Image.open(image(tmp_path / "a.png", 40, 32))
    features = datasets.Features({"picture": datasets.Image(), "words": datasets.Value("string")})
    rows = {"picture": [picture, str(tmp_path / "a.png")], "words": ["one", None]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "data:set")
    columns = ("--image_column", "picture", "--caption_column", "words")
    options = ("--hf_dataset", "data:set", "--missing_caption", "empty")
    assert run("image", tmp_path / "out", *options, *columns) == 0
    samples = read_samples(tmp_path / "out")
    assert {s["caption"] for s in samples.values()} == {"one", ""}
    assert {tuple(s["latent"].shape) for s in samples.values()} == {(48, 1, 8, 10)}


@pytest.mark.parametrize(
    ("columns", "reason", "why"),
    [
        (
            {"text": [7]},
            "caption file cannot be used",
            "row 0 has 7 in column 'text'; write a text there, or name another column",
        ),
        (
            {"text": [None]},
            "no caption",
            "row 0 has null in column 'text'; write a text there, or give --missing_caption empty",
        ),
        (
            {},
            "no caption",
            "no column is known to hold captions; name one with --caption_column, or give"
            " --missing_caption empty",
        ),
    ],
)
def test_the_number_of_a_row_is_no_caption(columns, reason, why, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"image": [str(image(tmp_path / "a.png"))], **columns}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "set")
    assert run("image", tmp_path / "out", "--hf_dataset", tmp_path / "set") == 1
    (refused,) = (tmp_path / "out/refused.jsonl").read_text().splitlines()
    assert [json.loads(refused)[name] for name in ("reason", "detail")] == [reason, why]


def test_loss_weights_of_tables_and_columns_come_into_the_shards(
    tmp_path: Path, read_samples, capsys
) -> None:
    for name in ("a", "b", "c", "d"):
        image(tmp_path / f"media/{name}.png", 16, 16, seed=ord(name))
    table = tmp_path / "media/meta.csv"
    table.write_text("file_name,caption,loss_weight\na.png,A,2\nb.png,B,\nc.png,C,-1\nd.png,D,0\n")
    options = ("--image_dir", tmp_path / "media", "--max_bad_fraction", 0.5)
    assert run("image", tmp_path / "out", *options) == 0
    assert "1 x loss_weight is no number" in capsys.readouterr().out
    found = {s["caption"]: s.get("loss_weight") for s in read_samples(tmp_path / "out").values()}
    assert found == {"A": 2.0, "B": None, "D": 0.0}
    datasets = pytest.importorskip("datasets")
    pictures = [str(tmp_path / f"media/{name}.png") for name in "ab"]
    rows = {"image": pictures, "text": ["A", "B"], "loss_weight": [0.25, None]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "set")
    assert run("image", tmp_path / "rows", "--hf_dataset", tmp_path / "set") == 0
    found = {s["caption"]: s.get("loss_weight") for s in read_samples(tmp_path / "rows").values()}
    assert found == {"A": 0.25, "B": None}


def test_a_dataset_that_cannot_be_opened(tmp_path: Path, capsys) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"words": ["x"]}).save_to_disk(tmp_path / "set")
    assert run("image", tmp_path / "out", "--hf_dataset", tmp_path / "set") == 1
    assert "has the columns words; name the one that holds" in capsys.readouterr().err
    options = ("--hf_dataset", tmp_path / "set", "--image_column", "picture")
    assert run("image", tmp_path / "out", *options) == 1
    assert "no column 'picture'; name one of words" in capsys.readouterr().err

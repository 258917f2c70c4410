"""Control pictures of folders and tables, their sizes, their latents in shards."""

from __future__ import annotations

import base64
import io
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data_prep.cli.parser import main
from data_prep.media.clips import Entry, PlannedReference
from data_prep.media.images import to_video
from data_prep.media.resizing import Fit
from data_prep.sources.beside_media import ReferenceRule
from dit.codecs.rgb import ReferenceFit
from dit.codecs.vae import CODECS, codec_of_card
from dit.codecs.vae.flux import Flux
from dit.data.cook import Expected, cook
from dit.data.pack import pack_samples
from dit.models.family import InputKind, SampleInput
from tests.families import pipeline_parts
from tests.media_files import STEP, image, video
from tests.packs import run_config

ALL_TRAIN = ("--split", "1,0,0", "--num_workers", "0")
TEXT = ("--text_width", "16")


def pack(out: Path, *arguments: object, kind: str = "image") -> int:
    return main([kind, "--output_dir", str(out), *ALL_TRAIN, *map(str, arguments)])


def by_name(samples: dict[str, Any]) -> dict[str, Any]:
    return {Path(name).name: one for name, one in samples.items()}


def refused(out: Path) -> dict[str, tuple[str, str]]:
    lines = map(json.loads, (out / "refused.jsonl").read_text().splitlines())
    return {Path(one["source"]).name: (one["reason"], one["detail"]) for one in lines}


def latent_of(out: Path, path: Path, size: tuple[int, int]) -> torch.Tensor:
    """What the codec of a dataset makes of a picture that is scaled to a size."""
    codec = codec_of_card(json.loads((out / "dataset_card.json").read_text()))
    picture = Image.open(path).convert("RGB")
    if picture.size != size:
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    return codec.encode(to_video(picture, colours=3))


def test_two_folders(tmp_path: Path, read_samples, capsys) -> None:
    """Pairs at the same relative paths, whatever the ending; what is missing is refused by name."""
    for name in ("deep/a.png", "b.png", "c.png", "d.png", "e.png"):
        image(tmp_path / "media/after" / name, 48, 32, seed=1)
    image(tmp_path / "media/before/deep/a.webp", 48, 32, seed=2)
    image(tmp_path / "media/before/b.bmp", 48, 32, seed=3)
    (tmp_path / "media/before/d.png").write_bytes(b"no picture")
    image(tmp_path / "media/before/e.png", 16, 16, seed=4)
    image(tmp_path / "media/before/z.png", 16, 16, seed=5)
    options = ("--image_dir", tmp_path / "media", "--size_multiple", 16, *TEXT)
    options += ("--max_bad_fraction", "0.9", "--missing_caption", "empty")
    # The control pictures lie below the folder of the media, and are no samples.
    paired = ("--image_dir", tmp_path / "media/after", "--control_dir", tmp_path / "media/before")
    assert pack(tmp_path / "out", *options, *paired) == 0
    found = by_name(read_samples(tmp_path / "out"))
    assert found.keys() == {"a.png", "b.png", "e.png"}
    for name, path in (("a.png", "deep/a.webp"), ("b.png", "b.bmp")):
        assert found[name]["references"] == [path]
        expected = latent_of(tmp_path / "out", tmp_path / "media/before" / path, (48, 32))
        torch.testing.assert_close(found[name]["reference_latent_0"], expected)
        assert not torch.equal(found[name]["reference_latent_0"], found[name]["latent"])
    assert found["e.png"]["reference_latent_0"].shape == found["e.png"]["latent"].shape
    why = refused(tmp_path / "out")
    assert why.keys() == {"c.png", "d.png"}
    assert why["c.png"][0] == "control picture or video is missing"
    assert "before/c with the ending of a picture (--control_dir)" in why["c.png"][1]
    assert (
        why["d.png"][0] == "control picture or video cannot be used"
        and "d.png: file is no" in (why["d.png"][1])
    )
    said = capsys.readouterr().out
    assert "ignored: 1 x control picture or video of no file, the first z.png" in said
    assert "refused: 1 x control picture or video is missing" in said
    assert "packed: 3 x 1 control pictures" in said


def test_a_folder_of_controls_inside_that_of_the_media(tmp_path: Path, read_samples) -> None:
    image(tmp_path / "media/a.png", seed=1)
    image(tmp_path / "media/before/a.png", seed=2)
    options = ("--image_dir", tmp_path / "media", "--control_dir", tmp_path / "media/before")
    assert pack(tmp_path / "out", *options, *TEXT) == 0
    assert list(read_samples(tmp_path / "out")) == ["a.png"]


def as_csv(rows: list[dict[str, Any]]) -> str:
    lines = [["file_name", "caption", "control_path", "control_path_2"]]
    for row in rows:
        controls = [*row.get("control_path", []), "", ""][:2]
        lines.append([row["file_name"], row["caption"], *controls])
    return "\n".join(map(",".join, lines))


TABLES: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "meta.json": json.dumps,
    "pairs.jsonl": lambda rows: "\n".join(map(json.dumps, rows)),
    "pairs.csv": as_csv,
}


@pytest.mark.parametrize("table", TABLES)
def test_a_column_of_a_table(tmp_path: Path, read_samples, table) -> None:
    """Several pictures, one, none, and a name that does not exist; paths are of the table."""
    root = tmp_path / "media/set"
    for number, name in enumerate(("a.png", "b.png", "c.png", "d.png")):
        image(root / "after" / name, 32, 32, seed=number)
    for number, name in enumerate(("x.png", "y.png")):
        image(root / "before" / name, 32, 32, seed=10 + number)
    rows = [
        {
            "file_name": "after/a.png",
            "caption": "swap",
            "control_path": ["before/y.png", "before/x.png"],
        },
        # b is the control picture of c and a sample, too: it has a row of its own.
        {"file_name": "after/b.png", "caption": "none"},
        {"file_name": "after/c.png", "caption": "one", "control_path": ["after/b.png"]},
        {"file_name": "after/d.png", "caption": "lost", "control_path": ["before/gone.png"]},
    ]
    (root / table).write_text(TABLES[table](rows))
    options = ("--image_dir", tmp_path / "media", "--max_bad_fraction", "0.5", *TEXT)
    assert pack(tmp_path / "out", *options) == 0
    found = by_name(read_samples(tmp_path / "out"))
    assert found.keys() == {"a.png", "b.png", "c.png"}
    a, b, c = (found[name] for name in ("a.png", "b.png", "c.png"))
    assert a["references"] == ["set/before/y.png", "set/before/x.png"]
    assert "references" not in b and "reference_latent_0" not in b
    torch.testing.assert_close(c["reference_latent_0"], b["latent"])
    for number, name in enumerate(("y.png", "x.png")):
        expected = latent_of(tmp_path / "out", root / "before" / name, (32, 32))
        torch.testing.assert_close(a[f"reference_latent_{number}"], expected)
    why = refused(tmp_path / "out")
    reason, detail = why["d.png"]
    assert why.keys() == {"d.png"} and reason == "control picture or video is missing"
    assert detail.startswith("there is no set/before/gone.png below the folder of the media")


def test_a_column_that_holds_no_path(tmp_path: Path) -> None:
    image(tmp_path / "in/a.png")
    image(tmp_path / "in/b.png")
    rows = [{"file_name": "a.png", "caption": "", "control_path": 5}]
    (tmp_path / "in/meta.json").write_text(json.dumps(rows))
    options = ("--image_dir", tmp_path / "in", "--max_bad_fraction", "0.5", *TEXT)
    assert pack(tmp_path / "out", *options) == 0
    reason, detail = refused(tmp_path / "out")["a.png"]
    assert reason == "control picture or video cannot be used"
    assert "meta.json, row 1, has 5 in control_path; write a path there" in detail


def test_several_folders_of_a_dataset_file(tmp_path: Path, read_samples) -> None:
    """diffusion-pipe's `control_path`; a list of folders gives several pictures."""
    for path in ("after/a.png", "before/a.bmp", "pose/a.png", "masks/a.gif"):
        image(tmp_path / path, 32, 32, seed=len(path))
    file = tmp_path / "set.toml"
    keys = 'path = "after"\nmask_path = "masks"\ncontrol_path = ["before", "pose"]\n'
    file.write_text(f"[[directory]]\n{keys}")
    assert pack(tmp_path / "out", "--dataset_config", file, *TEXT) == 0
    (sample,) = read_samples(tmp_path / "out").values()
    assert "loss_mask" in sample
    for number, path in enumerate(("before/a.bmp", "pose/a.png")):
        expected = latent_of(tmp_path / "out", tmp_path / path, (32, 32))
        torch.testing.assert_close(sample[f"reference_latent_{number}"], expected)
    file.write_text('[[directory]]\npath = "after"\ncontrol_path = "gone"\n')
    assert pack(tmp_path / "out2", "--dataset_config", file, *TEXT) == 1


def test_a_video_is_no_control_of_a_picture(tmp_path: Path) -> None:
    for name in "ab":
        image(tmp_path / f"after/{name}.png")
    video(tmp_path / "before/a.mp4", 3)
    image(tmp_path / "before/b.png")
    options = ("--image_dir", tmp_path / "after", "--control_dir", tmp_path / "before", *TEXT)
    assert pack(tmp_path / "out", *options, "--max_bad_fraction", "0.5") == 0
    reason, detail = refused(tmp_path / "out")["a.png"]
    assert reason == "control picture or video cannot be used"
    assert "a.mp4: " in detail and "it is a video, and its sample a picture" in detail


def numbers_of(out: Path, latent_CFHW: torch.Tensor) -> list[int]:
    """Numbers of the frames of a `tests.media_files.video`, by their grey."""
    codec = codec_of_card(json.loads((out / "dataset_card.json").read_text()))
    levels_F = codec.decode(latent_CFHW).float().mean((1, 2, 3)) - 3  # a quarter is brighter by 12
    return [round(float(level - 16) / STEP) for level in levels_F]


def test_videos_of_videos(tmp_path: Path, read_samples, capsys) -> None:
    """A control video has the frames of its clip: by number, else by time; others are refused."""
    for name in "abcdef":
        video(tmp_path / f"after/{name}.mp4", 12, size=(64, 48))
    video(tmp_path / "before/a.mkv", 12, size=(64, 48))
    video(tmp_path / "before/b.mp4", 20, size=(96, 48))  # longer, wider
    video(tmp_path / "before/c.mp4", 4)  # too short for frames 3 to 8
    image(tmp_path / "before/d.png", 64, 48, seed=4)
    (tmp_path / "before/e.mp4").write_bytes(b"no video")
    options = ("--video_dir", tmp_path / "after", "--control_dir", tmp_path / "before", *TEXT)
    options += ("--pixel_block", "2", "--target_frames", "5", "--window", "middle")
    assert pack(tmp_path / "out", *options, "--max_bad_fraction", "0.6", kind="video") == 0
    found = {name[0]: one for name, one in by_name(read_samples(tmp_path / "out")).items()}
    assert found.keys() == set("abd")
    for name, of in found.items():
        target, reference = of["latent"], of["reference_latent_0"]
        assert numbers_of(tmp_path / "out", target) == [3, 4, 5, 6, 7]
        if name != "d":
            assert reference.shape == target.shape
            assert numbers_of(tmp_path / "out", reference) == [3, 4, 5, 6, 7]
    assert found["d"]["reference_latent_0"].shape[1] == 1
    assert found["a"]["references"] == ["a.mkv"]
    why = {name[0]: one for name, one in refused(tmp_path / "out").items()}
    assert why.keys() == set("cef")
    assert "c.mp4: " in why["c"][1] and "it ends after 0.40 s, and its sample has" in why["c"][1]
    assert "e.mp4: " in why["e"][1]
    assert "before/f with the ending of a picture or video (--control_dir)" in why["f"][1]
    said = capsys.readouterr().out
    assert "packed: 2 x 1 control videos" in said and "packed: 1 x 1 control pictures" in said
    told = (*options, "--max_bad_fraction", "0.6")
    for plan in ("--plan", "--plan=quick"):
        assert pack(tmp_path / "planned", *told, plan, kind="video") == 0
        assert widths_of(tmp_path / "planned/plan.html") == {128}
    page = tmp_path / "page.html"
    assert main(["inspect", str(tmp_path / "out"), "--html", str(page)]) == 0
    assert widths_of(page) == {128}


def widths_of(page: Path) -> set[int]:
    """Of the pictures of a page; a clip of 64 x 48 pixels beside its control has 128."""
    found = re.findall(r"data:image/webp;base64,([A-Za-z0-9+/=]+)", page.read_text())
    assert found
    return {Image.open(io.BytesIO(base64.b64decode(one))).width for one in found}


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        (ReferenceFit.OWN, (70, 45), ((70, 45), (64, 32))),
        (ReferenceFit.OWN, (200, 100), ((96, 48), (96, 48))),  # 4,608 pixels of at most 4,700
        (ReferenceFit.TARGET, (200, 100), ((96, 48), (64, 48))),
        (ReferenceFit.TARGET, (32, 24), ((64, 48), (64, 48))),
    ],
)
def test_own_and_target_size(kind, size, expected) -> None:
    rule = ReferenceRule(kind=kind, own=Fit(size_multiple=16, max_pixels=4_700))
    assert rule.place(size, (64, 48)) == expected


def test_published_sizes_are_those_of_kontexts_pipeline(tmp_path: Path) -> None:
    """The pixels that the pipeline would encode, for sizes of many ratios."""
    from diffusers import AutoencoderKL, FluxKontextPipeline
    from diffusers.image_processor import VaeImageProcessor

    folder = pipeline_parts.flux(tmp_path)
    vae = AutoencoderKL.from_pretrained(folder, subfolder="vae")
    blank: dict[str, Any] = dict.fromkeys(
        ("scheduler", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer")
    )
    pipe = FluxKontextPipeline(vae=vae, **blank)
    seen: list[tuple[int, int]] = []

    class SeenError(Exception): ...

    def resized(picture: Image.Image, height: int, width: int) -> None:
        seen.append((width, height))
        raise SeenError

    pipe.vae_scale_factor = 8  # the tiny VAE halves once
    pipe.image_processor = VaeImageProcessor(vae_scale_factor=16)
    pipe.image_processor.resize = resized
    pipe.encode_prompt = lambda **_: (torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.zeros(1, 3))
    rng = np.random.default_rng(0)
    sizes = [(64, 64), (300, 100), (100, 300), (1568, 672), *rng.integers(50, 900, (20, 2))]
    for width, height in sizes:
        with pytest.raises(SeenError):
            pipe(image=Image.new("RGB", (int(width), int(height))), prompt="x", height=16, width=16)
        assert Flux.reference_size(int(width), int(height)) == seen[-1]
    assert len(set(seen)) > 5
    rule = ReferenceRule(kind=ReferenceFit.PUBLISHED, published=Flux.reference_size)
    assert rule.place((100, 100), (16, 16)) == ((1024, 1024), (1024, 1024))


def test_published_sizes_need_a_pipeline_that_edits(tmp_path: Path, capsys) -> None:
    image(tmp_path / "after/a.png")
    options = ("--image_dir", tmp_path / "after", "--reference_size", "published", *TEXT)
    assert pack(tmp_path / "out", *options) == 1
    assert "--reference_size published: the pipeline of processor 'pixel' edits" in (
        capsys.readouterr().err
    )
    assert not CODECS["pixel"].edits_pictures and CODECS["flux"].edits_pictures


def test_own_size_in_a_dataset_continues_only_as_it_began(tmp_path: Path, read_samples) -> None:
    image(tmp_path / "after/a.png", 48, 32, seed=1)
    image(tmp_path / "before/a.png", 100, 80, seed=2)
    options = ("--image_dir", tmp_path / "after", "--control_dir", tmp_path / "before", *TEXT)
    options += ("--size_multiple", 16)
    assert pack(tmp_path / "out", *options, "--reference_size", "own") == 0
    (sample,) = read_samples(tmp_path / "out").values()
    stride = sample["latent"].shape[3] // 3  # cells of 16 pixels
    assert sample["reference_latent_0"].shape[1:] == (1, 5 * stride, 6 * stride)
    assert pack(tmp_path / "out", *options) == 1
    image(tmp_path / "before/a.png", 48, 32, seed=3)  # changed: encoded anew
    assert pack(tmp_path / "out", *options, "--reference_size", "own") == 0
    (after,) = read_samples(tmp_path / "out").values()
    assert after["reference_latent_0"].shape == after["latent"].shape


def test_a_line_of_the_plan_is_read_back() -> None:
    one = PlannedReference(
        name="b.png", folder=0, where="b.png", stamp="1-2", resized=(5, 6), size=(4, 4)
    )
    entry = Entry(key="a", source="a.png", references=(one, replace(one, folder=-1)))
    assert Entry.from_line(entry.to_line()) == entry
    of_video = replace(one, of_file=(9, 8), keep=(0, 5), tick="1/10", numbers=(0, 1))
    entry = replace(entry, references=(of_video,))
    assert Entry.from_line(entry.to_line()) == entry
    plain = Entry(key="a", source="a.png")
    assert "references" not in plain.to_line() and Entry.from_line(plain.to_line()) == plain


def test_training_reads_what_packing_wrote(tmp_path: Path, read_samples) -> None:
    """The tensors are inputs of kind `reference`, by their names, and get tokens of their own."""
    import tarfile

    image(tmp_path / "after/a.png", 32, 32, seed=1)
    for number, size in enumerate(((32, 32), (64, 32))):
        image(tmp_path / f"before{number}/a.png", *size, seed=2 + number)
    folders = [tmp_path / "before0", tmp_path / "before1"]
    options = ("--image_dir", tmp_path / "after", "--reference_size", "own", *TEXT)
    options += tuple(word for folder in folders for word in ("--control_dir", folder))
    assert pack(tmp_path / "out", *options) == 0
    (shard,) = (tmp_path / "out/train").glob("*.tar")
    with tarfile.open(shard) as tar:
        parts = {m.name.partition(".")[2]: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    (sample,) = read_samples(tmp_path / "out").values()
    channels = len(sample["latent"])
    inputs = (
        SampleInput(name="text", kind=InputKind.TEXT, width=16),
        *(
            SampleInput(name=f"reference_latent_{n}", kind=InputKind.REFERENCE, width=channels)
            for n in range(2)
        ),
    )
    expected = Expected.of(run_config())
    expected = replace(
        expected, channels=channels, text_width=16, layout=replace(expected.layout, inputs=inputs)
    )
    packed = pack_samples([cook(parts, expected, key="a")], expected.layout)
    ((first, second),) = packed.references
    (target,) = packed.grids
    assert first == target and second == (1, target[1], 2 * target[2])
    assert Counter(packed.is_target_T.tolist())[True] == target[1] * target[2]

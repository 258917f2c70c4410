"""Videos that are given in generation are those that packing reads of the same files."""

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep.media.captions import ControlPicture
from data_prep.media.frame_selection import KeptFrames
from data_prep.media.resizing import Fit, ResizeMode
from data_prep.media.videos import VideoDecoder, frames, timeline
from data_prep.sources.beside_media import ReferenceRule, find_reference, read_reference
from dit.codecs.rgb import WHITE, ReferenceFit
from dit.models.family import InputKind, SampleInput
from dit.sampling.conditions.clips import first_of_clip, is_video, read_clip
from dit.sampling.given_pictures import GivenPictures
from tests.media_files import turned_by, video, video_of
from tests.unit.data_prep.media.test_changing_videos import HIGH, WIDE, Part, joined


def _turned(folder: Path) -> Path:
    pictures = np.random.default_rng(0).integers(0, 256, (3, 16, 24, 3), dtype=np.uint8)
    return turned_by(video_of(folder / "0.mov", pictures), folder / "a.mov", (0, 1, -1, 0))


def _transparent(folder: Path) -> Path:
    pictures = np.random.default_rng(0).integers(0, 256, (3, 16, 24, 4), dtype=np.uint8)
    return video_of(folder / "a.mov", pictures, pix_fmt="rgba")


FILES = {
    "turned": (_turned, (16, 24)),
    "transparent": (_transparent, (24, 16)),
    "wide_pixels": (lambda f: video(f / "a.mp4", 3, aspect=Fraction(4, 3)), (85, 48)),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_given_clip_shows_what_packing_reads(kind: str, tmp_path: Path) -> None:
    make, (width, height) = FILES[kind]
    path = make(tmp_path)
    packed = [np.asarray(picture) for picture in frames(path, timeline(path).shown)]
    assert first_of_clip(str(path), option="--video").size == (width, height)
    clip = read_clip(str(path), (9, height, width), option="--video")
    found = ((clip + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    assert (found == np.stack(packed)).all() and len(found) == 3


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (Part(4, HIGH), "48 x 96"),
        (Part(4, aspect=Fraction(2)), r"96 x 48 \(pixels of 2:1\)"),
        (Part(4, turn=90), r"96 x 48 \(rotate 90\)"),
    ],
)
def test_a_given_clip_that_changes_is_refused_if_it_is_read_so_far(later, words, tmp_path) -> None:
    path = str(joined(tmp_path / "a.mp4", [Part(5), later]))
    assert len(read_clip(path, (5, 48, 96), option="--video")) == 5
    why = (
        rf"--video .*a.mp4 cannot be read .*from 96 x 48 to {words} at 0.312 s: cut the video there"
    )
    with pytest.raises(ValueError, match=why):
        read_clip(path, (6, 48, 96), option="--video")
    assert first_of_clip(path, option="--video").size == WIDE


@pytest.mark.parametrize("fit", [ReferenceFit.TARGET, ReferenceFit.OWN])
@pytest.mark.parametrize("name", ["a.png", "a.mov"])
def test_a_reference_of_another_shape_is_placed_as_in_packing(fit, name, tmp_path: Path) -> None:
    path, seen = tmp_path / name, list[Any]()
    pictures = np.random.default_rng(0).integers(0, 256, (3, 22, 40, 3), dtype=np.uint8)
    video_of(path, pictures) if name == "a.mov" else Image.fromarray(pictures[0]).save(path)
    decoder = SimpleNamespace(temporal_stride=1, encode=lambda clip: seen.append(clip) or clip)
    wanted = [SampleInput(name="reference_latent_0", kind=InputKind.REFERENCE, width=3)]
    given = GivenPictures(references=(str(path),), reference_size=fit)
    given.inputs(decoder, wanted, size=(3, 24, 16), multiple=8)

    control = ControlPicture(name, name, "stamp")
    found = find_reference(0, control, lambda where: tmp_path / where)
    kept = KeptFrames(found.line.shown if found.line else (), None)
    rule = ReferenceRule(kind=fit, own=Fit(size_multiple=8, max_pixels=None))
    planned = found.planned(rule, (16, 24), found.line, kept)
    packed = read_reference(planned, path, ResizeMode.LANCZOS, WHITE, VideoDecoder.PYAV).placed
    levels = ((seen[0] + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()
    np.testing.assert_array_equal(levels, np.stack([np.asarray(one) for one in packed]))


def test_a_file_with_sound_alone_is_named(tmp_path: Path) -> None:
    import av

    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        sound = container.add_stream("aac", rate=48000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        silence.rate = 48000
        container.mux(sound.encode(silence))
        container.mux(sound.encode())
    with pytest.raises(
        ValueError, match=r"--video .*a\.mp4 cannot be read as a video \(it holds no"
    ):
        first_of_clip(str(tmp_path / "a.mp4"), option="--video")
    assert is_video("A.MTS") and not is_video("a.png")

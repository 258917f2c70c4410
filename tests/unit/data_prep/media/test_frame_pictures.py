"""Frames as a player shows them: turned, mirrored, and with their transparency."""

from __future__ import annotations

import base64
import io
import zlib
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
import pytest
from PIL import Image

from data_prep.media.clips import Clip, Entry
from data_prep.media.frame_selection import FrameRule
from data_prep.media.resizing import Fit
from data_prep.media.videos import VideoDecoder, frames, timeline
from data_prep.packing import Packing
from data_prep.planning.splits import SplitFractions
from data_prep.refusals import PrepError
from data_prep.sources.folders import FolderCollection
from data_prep.sources.listing import VIDEOS
from data_prep.sources.loss_masks import MaskFolder
from data_prep.sources.media_source import Input, MediaSource, TokenGrid
from dit.codecs import frame_pictures
from dit.codecs.dataset_card import read_card
from dit.codecs.text import ByteTable
from dit.codecs.vae import Pixel, codec_of_card
from tests.media_files import turned_by, video, video_of

WIDTH, HEIGHT, COUNT = 24, 16, 5
MATRICES = {  # a, b, c, d of the display matrix
    "upright": (1, 0, 0, 1),
    "mirrored": (-1, 0, 0, 1),
    "turned_180": (-1, 0, 0, -1),
    "upside_down": (1, 0, 0, -1),
    "transposed": (0, 1, 1, 0),
    "turned_90": (0, 1, -1, 0),
    "transversed": (0, -1, -1, 0),
    "turned_270": (0, -1, 1, 0),
}
DECODERS = list(VideoDecoder)


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> VideoDecoder:
    try:
        request.param.check()
    except PrepError as error:
        pytest.skip(str(error))
    return request.param


def stored(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)


def shown(stored_HWC: np.ndarray, matrix: tuple[int, int, int, int]) -> np.ndarray:
    """ISO/IEC 14496-12, 6.2.2: column p and row q come to column a p + c q and row b p + d q."""
    a, b, c, d = matrix
    q_HW, p_HW = np.indices(stored_HWC.shape[:2])
    x_HW, y_HW = a * p_HW + c * q_HW, b * p_HW + d * q_HW
    x_HW, y_HW = x_HW - x_HW.min(), y_HW - y_HW.min()
    found = np.zeros((y_HW.max() + 1, x_HW.max() + 1, 3), np.uint8)
    found[y_HW, x_HW] = stored_HWC
    return found


def levels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture)


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a lossless clip for each of the eight matrices."""
    folder = tmp_path_factory.mktemp("turned")
    plain = video_of(folder / "upright.mov", map(stored, range(COUNT)))
    for name, matrix in MATRICES.items():
        turned_by(plain, folder / f"{name}.mov", matrix)
    return folder


def source_of(
    root: Path, *, masks: Path | None = None, rule: FrameRule | None = None, **given
) -> MediaSource:
    collection = FolderCollection(
        root=root, kinds=VIDEOS, masks=None if masks is None else MaskFolder(root=masks)
    )
    sizings, rule = (Fit(size_multiple=4, max_pixels=None),), rule or FrameRule()
    return MediaSource(
        inputs=(Input(collection=collection, sizings=sizings, frames=rule),),
        grid=TokenGrid(spatial=4, temporal=1, patch=1),
        colours=3,
        **given,
    )


def clips(source: MediaSource) -> dict[str, list[tuple[Entry, Clip]]]:
    """The entries of each file and their clips, by its name without ending."""
    found: dict[str, list[tuple[Entry, Clip]]] = {}
    for entry in source.entries:
        assert not entry.refused, entry.detail
        found.setdefault(Path(entry.source).stem, []).append((entry, source.read(entry)))
    return found


def bytes_of(clip: Clip) -> np.ndarray:
    """uint8 [F, H, W, C]"""
    return ((clip.video_CFHW + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()


def test_all_eight_orientations_are_exact(turned: Path, decoder: VideoDecoder) -> None:
    found = clips(source_of(turned, decoder=decoder))
    assert set(found) == set(MATRICES)
    for name, matrix in MATRICES.items():
        ((entry, clip),) = found[name]
        wanted = np.stack([shown(stored(number), matrix) for number in range(COUNT)])
        assert (entry.height, entry.width) == wanted.shape[1:3]
        np.testing.assert_array_equal(bytes_of(clip), wanted, err_msg=name)


def test_single_frames_are_turned_as_clips_are(turned: Path, decoder: VideoDecoder) -> None:
    found = clips(source_of(turned, decoder=decoder, rule=FrameRule(stills=2)))
    for name, matrix in MATRICES.items():
        assert len(found[name]) == 2
        for entry, clip in found[name]:
            (number,) = [timeline(turned / entry.source).shown.index(at) for at in entry.keep]
            np.testing.assert_array_equal(bytes_of(clip)[0], shown(stored(number), matrix))


def test_masks_are_turned_as_their_clips_are(
    turned: Path, decoder: VideoDecoder, tmp_path: Path
) -> None:
    """A clip is a mask of itself: the weight of a cell is the mean of red over its 16 pixels."""
    found = clips(source_of(turned, masks=turned, decoder=decoder))
    for name, matrix in MATRICES.items():
        ((_, clip),) = found[name]
        red = [shown(stored(number), matrix)[..., 0] / 255 for number in range(COUNT)]
        wanted = [r.reshape(r.shape[0] // 4, 4, -1, 4).mean((1, 3)) for r in red]
        assert clip.loss_mask_1FHW is not None
        np.testing.assert_allclose(clip.loss_mask_1FHW[0], np.stack(wanted), atol=1e-6)
    for name, matrix in MATRICES.items():  # and so are pictures
        Image.fromarray(shown(stored(0), matrix)).save(tmp_path / f"{name}.png")
    for name, ((_, clip),) in clips(source_of(turned, masks=tmp_path)).items():
        assert clip.loss_mask_1FHW is not None and clip.loss_mask_1FHW.shape[1] == COUNT, name


def test_shards_first_frames_and_thumbnails_are_turned(
    turned: Path, tmp_path: Path, options, read_samples
) -> None:
    """Unwhitened by the card, latents of pixels are the pixels."""
    out = tmp_path / "out"
    packing = Packing(
        source=source_of(turned),
        folder=out,
        codec=Pixel.of(block=4, colours=3, image_conditioning=True),
        text=ByteTable(width=8),
        options=options(split=SplitFractions.parse("1,0,0")),
        settings={},
    )
    packing.run()
    codec, samples = codec_of_card(read_card(out)), read_samples(out)
    for name, matrix in MATRICES.items():
        wanted = np.stack([shown(stored(number), matrix) for number in range(COUNT)])
        sample = samples[f"{name}.mov"]
        np.testing.assert_array_equal(codec.decode(sample["latent"]), wanted)
        np.testing.assert_array_equal(codec.decode(sample["first_frame_latent"]), wanted[:1])
    thumbnails = [levels(Image.open(path)) for path in sorted((out / "samples").glob("*.png"))]
    first = [Entry.from_line(line) for line in (out / "plan.jsonl").read_text().splitlines()]
    for picture, entry in zip(thumbnails, first, strict=False):
        wanted = shown(stored(0), MATRICES[Path(entry.source).stem])
        np.testing.assert_array_equal(picture, wanted)
    assert len(thumbnails) == 4


IN_THE_STREAM = {  # ITU-T H.264, display orientation: it is flipped, then turned anticlockwise
    "rotate=90": np.rot90,
    "rotate=180": lambda stored_HWC: stored_HWC[::-1, ::-1],
    "flip=horizontal": np.fliplr,
    "rotate=270:flip=vertical": lambda stored_HWC: np.rot90(np.flipud(stored_HWC), 3),
}


@pytest.mark.parametrize("how", IN_THE_STREAM)
def test_turns_that_the_stream_tells(how: str, decoder: VideoDecoder, tmp_path: Path) -> None:
    """H.264 may tell it beside its first frame alone, and players turn all frames."""
    plain = video(tmp_path / "plain/a.mp4", 12, size=(32, 16))
    (((_, clip),),) = clips(source_of(plain.parent)).values()
    wanted = np.stack([IN_THE_STREAM[how](picture) for picture in bytes_of(clip)])
    (tmp_path / "turned").mkdir()
    with av.open(str(plain)) as source, av.open(str(tmp_path / "turned/a.mp4"), "w") as copy:
        film = source.streams.video[0]
        out = copy.add_stream_from_template(film)
        insert = f"h264_metadata=display_orientation=insert:{how}"
        turning = av.bitstream.BitStreamFilterContext(insert, film, out)
        for packet in source.demux(film):
            for turned in turning.filter(packet if packet.size else None):
                turned.stream = out
                copy.mux(turned)
    (((_, clip),),) = clips(source_of(tmp_path / "turned", decoder=decoder)).values()
    np.testing.assert_array_equal(bytes_of(clip), wanted)
    stills = clips(source_of(tmp_path / "turned", decoder=decoder, rule=FrameRule(stills=2)))
    for entry, clip in stills["a"]:
        number = timeline(tmp_path / "turned/a.mp4").shown.index(entry.keep[0])
        np.testing.assert_array_equal(bytes_of(clip), wanted[number : number + 1])


def test_an_angle_that_is_no_quarter_turn_is_said(turned: Path, tmp_path: Path) -> None:
    """16.16 numbers; cameras write some that are off by a few units."""
    tilted, nearly = (0.5, 0.866, -0.866, 0.5), (0.0001, 1, -1, 0.0001)
    for matrix, said in ((tilted, 1), (nearly, 0)):
        path = turned_by(turned / "upright.mov", tmp_path / "a.mov", matrix)
        line = timeline(path)
        assert len(line.flaws) == said and (line.width, line.height) == (HEIGHT, WIDTH)
        found = levels(next(frames(path, line.shown)))
        np.testing.assert_array_equal(found, shown(stored(0), MATRICES["turned_90"]))
    assert "no quarter turn" in timeline(turned_by(path, path, tilted)).flaws[0]


def clear(number: int, *, alpha: int = 0) -> np.ndarray:
    """RGBA: opaque red on the left; on the right a hidden green, `alpha`; changing a little."""
    picture = np.zeros((32, 32, 4), np.uint8)
    picture[:, :16] = (255, 0, 8 * number, 255)
    picture[:, 16:] = (0, 255, 0, alpha)
    return picture


class Made(NamedTuple):
    """How a clip with transparency is made."""

    ending: str
    codec: str
    pix_fmt: str
    options: dict[str, str] = {}  # noqa: RUF012
    off: int = 0  # levels that the codec moves


VP8 = {"auto-alt-ref": "0", "b": "2000000"}
CLEAR = {
    "png": Made(".mov", "png", "rgba"),
    "png 16": Made(".mov", "png", "rgba64be"),
    "png grey": Made(".mov", "png", "ya8"),
    "png in avi": Made(".avi", "png", "rgba"),
    "animation": Made(".mov", "qtrle", "argb"),
    "prores 4444": Made(".mov", "prores_ks", "yuva444p10le", off=2),
    "ffv1": Made(".mkv", "ffv1", "bgra"),
    "ffv1 yuv": Made(".mkv", "ffv1", "yuva420p", off=3),
    "ffv1 16": Made(".mkv", "ffv1", "gbrap16le", off=1),
    "vp8": Made(".webm", "libvpx", "yuva420p", VP8, 6),
    "vp9": Made(".webm", "libvpx-vp9", "yuva420p", {"b": "2000000", "cpu-used": "8"}, 6),
    "vp9 mkv": Made(".mkv", "libvpx-vp9", "yuva420p", {"b": "2000000", "cpu-used": "8"}, 6),
    "utvideo": Made(".avi", "utvideo", "gbrap"),
    "huffyuv": Made(".avi", "huffyuv", "bgra"),
    "magicyuv": Made(".avi", "magicyuv", "gbrap"),
    "cineform": Made(".mov", "cfhd", "gbrap12le", off=3),
    "jpeg 2000": Made(".mov", "jpeg2000", "rgba", {"pred": "dwt53"}),
    "targa": Made(".mov", "targa", "bgra"),
    "uncompressed": Made(".avi", "rawvideo", "bgra"),
    "uncompressed mov": Made(".mov", "rawvideo", "argb"),
}


def made(folder: Path, name: str, *, alpha: int = 0, count: int = COUNT) -> Path:
    how = CLEAR[name]
    pictures = (clear(number, alpha=alpha) for number in range(count))
    path = folder / f"{name.replace(' ', '_')}{how.ending}"
    return video_of(path, pictures, codec=how.codec, pix_fmt=how.pix_fmt, options=how.options)


@pytest.mark.parametrize("name", CLEAR)
def test_transparent_frames_are_on_the_background(
    name: str, tmp_path: Path, decoder: VideoDecoder
) -> None:
    made(tmp_path, name)
    for background, paper in (("white", (255, 255, 255)), ("#0000ff", (0, 0, 255))):
        source = source_of(tmp_path, decoder=decoder, background=background)
        (((entry, clip),),) = clips(source).values()
        assert f"transparent, on {background} (--background)" in clip.notes
        assert len(entry.keep) == COUNT and entry.notes == clip.notes
        for number, found_HWC in enumerate(bytes_of(clip).astype(int)):
            left = clear(number)[:, :14, :3] if name != "png grey" else found_HWC[:, :14]
            assert np.abs(found_HWC[:, :14] - left).max() <= CLEAR[name].off
            assert np.abs(found_HWC[:, 18:] - paper).max() <= CLEAR[name].off


def test_half_transparent_frames_are_mixed_with_it(tmp_path: Path) -> None:
    line = timeline(path := made(tmp_path, "png", alpha=128))
    assert levels(next(frames(path, line.shown)))[0, -1].tolist() == [127, 255, 127]
    assert levels(next(frames(path, line.shown, (), "black")))[0, -1].tolist() == [0, 128, 0]


@pytest.mark.parametrize("name", ["vp8", "vp9"])
def test_a_window_in_the_middle_has_its_own_transparency(name: str, tmp_path: Path) -> None:
    """Decoding begins at a key frame, of the colours and of the alpha channel."""
    pictures = (clear(number % 30, alpha=8 * number) for number in range(30))
    options = CLEAR[name].options | {"g": "7"}
    path = video_of(
        tmp_path / "a.webm", pictures, codec=CLEAR[name].codec, pix_fmt="yuva420p", options=options
    )
    line = timeline(path)
    for first in (0, 6, 7, 8, 23):
        found = [levels(p) for p in frames(path, line.shown[first : first + 3], (), None)]
        wanted = [8 * number for number in range(first, first + 3)]
        assert (
            np.abs(
                [int(p[8:24, 22:28, 3].mean()) - w for p, w in zip(found, wanted, strict=True)]
            ).max()
            <= 4
        )


@pytest.mark.parametrize("name", ["png", "prores 4444", "ffv1 yuv", "vp9", "uncompressed"])
def test_an_alpha_channel_that_is_opaque_changes_nothing(
    name: str, tmp_path: Path, decoder: VideoDecoder
) -> None:
    path = made(tmp_path, name, alpha=255)
    (((entry, clip),),) = clips(source_of(tmp_path, decoder=decoder, background="black")).values()
    assert not any("transparent" in note for note in clip.notes)
    assert any("transparent" in note for note in entry.notes)  # as far as headers tell
    with av.open(str(path)) as container:
        wanted = [np.asarray(frame.to_image()) for frame in container.decode(video=0)]
    np.testing.assert_array_equal(bytes_of(clip), np.stack(wanted))


def test_an_unused_fourth_byte_is_no_transparency(tmp_path: Path) -> None:
    pictures = [clear(number) for number in range(COUNT)]
    for picture in pictures:
        picture[..., 3] = 0
    path = video_of(tmp_path / "a.avi", pictures, codec="rawvideo", pix_fmt="bgra")
    (((_, clip),),) = clips(source_of(tmp_path)).values()
    np.testing.assert_array_equal(bytes_of(clip), np.stack(pictures)[..., :3])
    assert path.exists() and not any("transparent" in note for note in clip.notes)


def test_transparent_frames_are_turned(tmp_path: Path, decoder: VideoDecoder) -> None:
    plain = made(tmp_path / "plain", "png")
    (tmp_path / "turned").mkdir()
    for name, matrix in MATRICES.items():
        turned_by(plain, tmp_path / f"turned/{name}.mov", matrix)
    for name, ((_, clip),) in clips(source_of(tmp_path / "turned", decoder=decoder)).items():
        picture = clear(0)
        picture[picture[..., 3] == 0] = 255
        np.testing.assert_array_equal(bytes_of(clip)[0], shown(picture[..., :3], MATRICES[name]))


def test_a_palette_of_png_may_be_transparent(tmp_path: Path) -> None:
    """FFmpeg writes none: Pillow makes the frames."""
    picture = Image.new("P", (32, 32), 1)
    picture.putpalette([9, 9, 9, 50, 60, 70])
    picture.paste(0, (16, 0, 32, 32))
    picture.save(content := io.BytesIO(), "png", transparency=b"\x00\xff")
    with av.open(str(tmp_path / "a.mov"), "w") as container:
        stream = container.add_stream("png", rate=8)
        stream.width = stream.height = 32
        stream.pix_fmt = "pal8"
        for number in range(COUNT):
            packet = av.Packet(content.getvalue())
            packet.pts = packet.dts = number
            packet.time_base, packet.stream, packet.is_keyframe = Fraction(1, 8), stream, True
            container.mux(packet)
    (((_, clip),),) = clips(source_of(tmp_path)).values()
    assert (bytes_of(clip)[:, :, :16] == (50, 60, 70)).all()
    assert (bytes_of(clip)[:, :, 16:] == 255).all()


def test_a_decoder_that_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(frame_pictures._WITH_ALPHA, "vp9", "no_such_decoder")
    line = timeline(path := made(tmp_path, "vp9"))
    (flaw,) = line.flaws
    assert "transparency that this PyAV does not decode" in flaw and not line.has_alpha
    found = levels(next(frames(path, line.shown)))
    assert found[0, -1].tolist() == pytest.approx([0, 255, 0], abs=6)
    assert not timeline(video(tmp_path / "plain.webm", 3)).flaws


# Two frames of libx265 with an alpha layer, which PyAV's own libx265 does not write: opaque red on
# the left, hidden green on the right. (zlib, base 85)
HEVC = (
    "c-muNV30{GsVvAW&d+6FU}6B#Kx~v-"
    "U}DI?z`&7Kl$r{p!*Wv+OMtYr2IG3OueHDbAM)8R_oGZ=H}}$iReti@`DJT<0Hp;qI47TN`0^;|qiyN`CC^Us0L8"
    "eN7%y<v2^`D$#RueZGI1_pil4aw#9^M5o1b3>6wJvj%Sd5B0n9Ie#4iR$1`t93MpRYkd<O=+fC-"
    "3RmJ}ss1KBYp*<d@Fv6%J?LnkrzDnKy<gGy>jNimR?NzExPLDKOHp_eH!HzhL>q$4*4-"
    "R~gN1Q<e(fH}GuDLF+jnX=53RAiN5Kz_bQVqQv4Do70zPi|&j8jvAUmJ2o%*_kRS5ILEYqSQ1bNAZ*v<tRYdjAx2"
    "Vl5&8wPjN|c3PKH|O-"
    "5O=A&#H`d0K(N14w(oRPgvDmL)6XWF}P@nVDjX2#Npyf#eCGsm_dy2|(rqu&~?*hChFQ022~F%L1T1<_?TJg8%=6"
    "6flESFoTfX)ET1t<s=vw*;y<sI2agM{y2bTzGN^mFtRcPdY$!H2#jcTCq_mzjSHMOB2&|L8tq)50OErPMn(o%Cr)"
    "&Q9s*5bk&)|s)@3j*0vg5U!g#RwLMH>e3#W&;4aWp^pwl@07?-"
    "jzFw{?I0HyG>%+wrku!tm;6hR}L^8n1R#U<dx01G={BIE$81%@%QI0(xC#gfs)n2_YEP!ltQF(^wy%u3Ej(x(H&w"
    "xua0paf=`n+m2uKoL1H0TW<RVnIO;a>Q_C0#hsifhnF}"
)
ALPHA_USE = b"\x4e\x01\xa5\x04"  # what follows: 3 bits behind the first say what alpha is for


@pytest.mark.parametrize("premultiplied", [False, True])
def test_the_alpha_layer_of_hevc(premultiplied: bool, tmp_path: Path) -> None:
    content = bytearray(zlib.decompress(base64.b85decode(HEVC)))
    content[content.index(ALPHA_USE) + len(ALPHA_USE)] |= premultiplied << 4
    (path := tmp_path / "a.mp4").write_bytes(content)
    with av.open(str(path)) as container:
        assert frame_pictures.is_premultiplied(container.streams.video[0]) == premultiplied
    line = timeline(path)
    left, right = levels(next(frames(path, line.shown)))[16, [4, 28]].tolist()
    assert left == pytest.approx([255, 0, 0], abs=6)
    if int(av.__version__.partition(".")[0]) < 19:
        (flaw,) = line.flaws
        assert "19 or later does, for HEVC" in flaw and right == pytest.approx([0, 255, 0], abs=6)
    else:
        assert line.has_alpha and not line.flaws and right == [255, 255, 255]


def test_premultiplied_colours_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_pictures, "is_premultiplied", lambda video: True)
    picture = clear(0)
    picture[:, 16:] = (0, 100, 0, 128)
    line = timeline(path := video_of(tmp_path / "a.mov", [picture] * 2, pix_fmt="rgba"))
    assert levels(next(frames(path, line.shown)))[0, -1].tolist() == pytest.approx(
        [127, 227, 127], abs=1
    )


def test_transparency_of_a_mask_is_ignored(tmp_path: Path) -> None:
    """Its colours count, as those of a picture do."""
    folder = tmp_path / "masks"
    made(folder, "png")
    made(tmp_path / "films", "png")
    (((_, clip),),) = clips(source_of(tmp_path / "films", masks=folder)).values()
    assert clip.loss_mask_1FHW is not None
    assert (clip.loss_mask_1FHW[..., :4] == 1).all() and not clip.loss_mask_1FHW[..., 4:].any()

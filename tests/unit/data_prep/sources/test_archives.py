"""Tar archives as strangers make them: one bad archive or member costs no other file."""

import gzip
import io
import json
import os
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.cli.parser import main
from data_prep.media.clips import Entry
from data_prep.refusals import PrepError, Reason, RefusedError
from data_prep.sources.archives import member_location, parse_location, read_archive
from data_prep.sources.folders import CaptionOptions, FolderCollection
from data_prep.sources.listing import Ignored
from tests.hostile import damaged
from tests.media_files import image


def member(name: str, content: bytes = b"", **more: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in more.items():
        setattr(info, key, value)
    return info, content


def archive(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


@pytest.fixture
def pictures(tmp_path: Path) -> list[bytes]:
    return [image(tmp_path / f"made/{seed}.png", seed=seed).read_bytes() for seed in range(3)]


@pytest.fixture
def root(tmp_path: Path, pictures: list[bytes]) -> Path:
    """A folder that holds one picture, beside the archives of the test."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/beside.png").write_bytes(pictures[0])
    return tmp_path / "in"


def found(root: Path) -> tuple[dict[str, object], Counter[str]]:
    """Content and caption of each medium, or why it is refused; and what was counted."""
    ignored, result = Ignored(), {}
    collection = FolderCollection(root=root, captions=CaptionOptions())
    for medium in collection.media(ignored):
        try:
            (text,) = medium.captions()
            file = collection.open(medium.where)
            content = file.read_bytes() if isinstance(file, Path) else file.read()
            result[medium.source] = (content, text.text)
        except RefusedError as refused:
            result[medium.source] = refused.detail
    return result, ignored.counts


def test_the_last_member_of_a_name_holds_and_comes_once(root: Path, pictures) -> None:
    first, second, third = pictures
    members = [member("a.png", first), member("a.txt", b"old"), member("b.png", third)]
    members += [member("./a.png", second), member("/a.txt", b"new")]
    (root / "x.tar").write_bytes(archive(*members))
    media, ignored = found(root)
    assert media["x.tar/a.png"] == (second, "new") and media["x.tar/b.png"] == (third, "b")
    assert len(media) == 3
    assert ignored == {"earlier member of the same name in a .tar": 2}


def test_a_sparse_member_is_refused_whatever_it_says_its_size_is(root: Path, pictures) -> None:
    (root / "x.tar").write_bytes(
        _sparse(pictures[0], 32 << 40) + archive(member("a.png", pictures[1]))
    )
    media, _ = found(root)
    assert "stored sparse" in media["x.tar/huge.png"]
    assert media["x.tar/a.png"] == (pictures[1], "a") and "beside.png" in media


def _sparse(content: bytes, size: int) -> bytes:
    """A GNU sparse member huge.png with no end of the archive behind it."""
    info = tarfile.TarInfo("huge.png")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, len(content)
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:398] = b"00000000000\0"  # the one piece: from 0
    header[398:410] = f"{len(content):011o}\0".encode()
    header[483:495] = b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b"        "
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header) + content + bytes(-len(content) % 512)


def test_an_archive_that_is_not_whole_is_refused_alone(root: Path, pictures) -> None:
    whole = archive(member("a.png", pictures[0]), member("b.png", pictures[1]))
    broken = {
        "cut.tar": whole[: len(pictures[0]) // 2 + 512],
        "cut_header.tar": whole[: 512 + -(-len(pictures[0]) // 512) * 512 + 100],
        "zipped.tar": gzip.compress(whole),
        "nothing.tar": b"",
        "words.tar": b"no tar at all" * 100,
        "hole.tar": whole[:512] + bytes(whole[512:]).replace(b"b.png", b"\xff" * 5),
    }
    for name, content in broken.items():
        (root / name).write_bytes(content)
    os.mkfifo(root / "pipe.tar")
    (root / "good.tar").write_bytes(whole)
    media, _ = found(root)
    assert {name for name, what in media.items() if isinstance(what, str)} == {*broken, "pipe.tar"}
    assert set(media) - {*broken, "pipe.tar"} == {"beside.png", "good.tar/a.png", "good.tar/b.png"}
    assert "compressed (gzip)" in media["zipped.tar"] and "cut short" in media["cut.tar"]


def test_members_are_looked_for_where_tar_would_unpack_them(root: Path, pictures) -> None:
    members = [member("/etc/a.png", pictures[0]), member("/etc/a.txt", b"absolute")]
    members += [member("../../out.png", pictures[1]), member("in/../b.png", pictures[2])]
    members += [member("._a.png", b"of a Mac"), member("empty.png"), member("empty.txt")]
    members += [member("in/@eaDir/b.png/SYNOPHOTO_THUMB_M.jpg", pictures[0])]
    (root / "x.tar").write_bytes(archive(*members))
    media, ignored = found(root)
    assert media["x.tar/etc/a.png"] == (pictures[0], "absolute")
    assert media["x.tar/../../out.png"] == "its name leads out of the archive; rename it"
    assert media["x.tar/b.png"] == (pictures[2], "b")
    assert "0 bytes" in media["x.tar/empty.png"] and len(media) == 5
    in_nas = "file in a folder @eaDir, which a file server or system adds"
    assert ignored == {"hidden": 1, in_nas: 1}


def test_an_empty_text_in_an_archive_is_the_empty_caption(root: Path, pictures) -> None:
    (root / "x.tar").write_bytes(archive(member("a.png", pictures[0]), member("a.txt")))
    assert found(root)[0]["x.tar/a.png"] == (pictures[0], "")


def test_links_and_devices(root: Path, pictures) -> None:
    members = [member("a.png", pictures[0])]
    members += [member("same.png", type=tarfile.LNKTYPE, linkname="./a.png")]
    members += [member("lost.png", type=tarfile.LNKTYPE, linkname="nowhere.png")]
    members += [member("soft.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")]
    members += [member("tty.png", type=tarfile.CHRTYPE), member("folder.png", type=tarfile.DIRTYPE)]
    (root / "x.tar").write_bytes(archive(*members))
    media, ignored = found(root)
    assert media["x.tar/same.png"] == (pictures[0], "same")
    assert "hard link to x.tar/nowhere.png" in media["x.tar/lost.png"]
    assert ignored == {"symbolic link in a .tar": 1, "device or unknown member in a .tar": 1}
    assert len(media) == 4


def test_archives_in_archives_and_archives_of_nothing(root: Path, pictures) -> None:
    inner = archive(member("a.png", pictures[0]))
    (root / "outer.tar").write_bytes(archive(member("inner.tar", inner), member("b.png", inner)))
    (root / "zeros.tar").write_bytes(bytes(10240))
    (root / "two.tar").write_bytes(archive(member("c.png", inner)) + inner)
    media, ignored = found(root)
    assert "unpack the outer one" in media["outer.tar/inner.tar"]
    assert set(media) == {"beside.png", "outer.tar/inner.tar", "outer.tar/b.png", "two.tar/c.png"}
    assert ignored["empty .tar"] == 1
    assert ignored["bytes after the end of a .tar, which tar does not read"] == 1


@pytest.mark.parametrize("size", [-512, -(1 << 80), 1 << 40, 1 << 70, 1 << 20], ids=str)
@pytest.mark.parametrize(
    "kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, b"?"]
)
def test_sizes_that_no_archive_has(root: Path, pictures, kind: bytes, size: int) -> None:
    header = bytearray(archive(member("a.png", b"", type=kind))[:512])
    header[124:136] = (size % (1 << 88) | (0x80 if size >= 0 else 0xFF) << 88).to_bytes(12, "big")
    header[148:156] = b"        "
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    whole = archive(member("b.png", pictures[0]))
    end = 512 + -(-len(pictures[0]) // 512) * 512
    (root / "x.tar").write_bytes(whole[:end] + bytes(header) * 3)
    media, _ = found(root)
    assert set(media) == {"beside.png", "x.tar"} and "not a whole tar" in media["x.tar"]


@pytest.mark.parametrize("size", ["-1024", "99999999999999999999", "7", "x"])
def test_pax_headers_that_lie_about_the_size(root: Path, pictures, size: str) -> None:
    info, content = member("a.png", pictures[0])
    info.pax_headers = {"size": size}
    (root / "x.tar").write_bytes(archive((info, content), form=tarfile.PAX_FORMAT))
    media, _ = found(root)
    assert "beside.png" in media and isinstance(media.get("x.tar", ""), str)


def test_headers_that_follow_each_other_without_end(root: Path) -> None:
    long_name = archive(member("n" * 200 + ".png", b""))[:1024]
    (root / "x.tar").write_bytes(long_name * 3000)
    media, _ = found(root)
    assert set(media) == {"beside.png", "x.tar"}


def test_a_place_is_told_from_any_file_name() -> None:
    assert parse_location(member_location("a\nb.tar", 512, 7)) == ("a\nb.tar", 512, 7)
    for name in ("a\nb.png", "a\n5+5.png", "5+5", "a.txt\n"):
        assert parse_location(name) is None


def test_a_run_goes_on_without_what_it_cannot_read(
    root: Path, pictures, tmp_path: Path, read_samples, capsys
) -> None:
    whole = archive(member("a.png", pictures[0]), member("a.png", pictures[1]))
    (root / "good.tar").write_bytes(whole)
    (root / "cut.tar").write_bytes(whole[:700])
    (root / "line\nbreak.png").write_bytes(pictures[2])
    (root / "line\nbreak.tar").write_bytes(archive(member("new\nline.png", pictures[2])))
    odd = os.fsencode(root) + b"/caf\xe9.png"
    Path(os.fsdecode(odd)).write_bytes(pictures[2])
    Path(os.fsdecode(odd)).with_suffix(".txt").write_text("a name of another age")
    out = tmp_path / "out"
    options = ("--output_dir", str(out), "--image_dir", str(root), "--split", "1,0,0")
    options = ("image", *options, "--num_workers", "0", "--max_bad_fraction", "0.5")
    assert main([*options, "--plan"]) == 0
    assert "ignored: 1 x earlier member of the same name in a .tar" in capsys.readouterr().out
    assert "earlier member" in (out / "plan.html").read_text()
    assert main(list(options)) == 0
    shown = capsys.readouterr().out
    assert "refused: 1 x archive is damaged" in shown and "ignored: 1 x earlier member" in shown
    samples = read_samples(out)
    names = {"beside.png", "good.tar/a.png", "line\nbreak.png", "line\nbreak.tar/new\nline.png"}
    assert set(samples) == {*names, "caf\\udce9.png"}
    assert samples["caf\\udce9.png"]["caption"] == "a name of another age"
    (refused,) = (out / "refused.jsonl").read_text().splitlines()
    assert json.loads(refused)["source"] == "cut.tar"
    assert json.loads(refused)["reason"] == str(Reason.BAD_ARCHIVE)
    for line in (out / "plan.jsonl").read_bytes().splitlines():
        Entry.from_line(line).source.encode()


_VALID = archive(
    member("a.png", b"\x89PNG" * 30),
    member("deep/" + "n" * 120 + ".png", b"x" * 600),
    member("a.txt", b"a caption"),
    member("same.png", type=tarfile.LNKTYPE, linkname="a.png"),
)
_PAX, _ = member("b.png", b"")
_PAX.pax_headers = {"mtime": "1.5", "comment": "é", "GNU.sparse.major": "0"}
_FORMS = (_VALID, archive((_PAX, b""), member("c" * 300 + ".png", b"y"), form=tarfile.PAX_FORMAT))
_FORMS += (_sparse(b"z" * 100, 700) + _VALID,)


@given(content=st.sampled_from(_FORMS).flatmap(damaged) | st.binary(max_size=2048))
def test_hostile_archives(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.getbasetemp() / "hostile_archives"
    root.mkdir(exist_ok=True)
    (root / "beside.png").write_bytes(b"another file")
    (root / "x.tar").write_bytes(content)
    try:
        contents = read_archive(root, "x.tar")
    except RefusedError as refused:
        assert refused.reason in (Reason.BAD_ARCHIVE, Reason.EMPTY)
    else:
        for place in contents.places.values():
            archive_, start, size = parse_location(place) or ("", -1, -1)
            assert archive_ == "x.tar" and 0 <= start <= start + size <= len(content)
    media, _ = found(root)
    assert media["beside.png"] == (b"another file", "beside")
    for source in set(media) - {"beside.png"}:
        assert source.startswith("x.tar")


def test_a_folder_of_archives_without_media_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(archive(member("notes.md", b"x")))
    with pytest.raises(PrepError, match="its archives hold no media"):
        found(tmp_path)

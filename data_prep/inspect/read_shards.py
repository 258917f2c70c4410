"""Reads a finished dataset folder: counts, shapes, statistics and checksums."""

# C latent channels, F frames, H rows, W columns, L text tokens, E text width

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from data_prep.inspect.duplicates import Looks, looks_of
from data_prep.media.clips import REJECTED_LATENT
from data_prep.refusals import PrepError, short_repr
from data_prep.writing.dataset_folder import META
from dit.codecs import text, vae
from dit.codecs.dataset_card import NULL_TEXT_NAME, CodecError, read_card
from dit.codecs.normalization import Moments
from dit.codecs.sound import sound_codec_of_card, sound_part
from dit.codecs.text.encoder import WORDS
from dit.codecs.vae import Codec
from dit.parsing import cause, parse_json
from dit.stored_samples import is_mlperf, mlperf_sizes, mlperf_tensors

# Errors of tarfile at damaged headers, which may claim a name of terabytes.
_DAMAGE = (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError, MemoryError)


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedSample:
    """Facts that `inspect` reports about one sample."""

    key: str
    source: str
    caption: str
    bucket: str  # size in pixels and number of frames
    shape: tuple[int, ...]  # [C, F, H, W] of the latent
    looks: Looks | None


@dataclass
class ShardReport:
    """What `inspect` has found in a shard: its samples, their sizes, and defects."""

    name: str  # relative to the dataset folder
    samples: int = 0
    bytes: int = 0
    seen: list[InspectedSample] = field(default_factory=list)
    text_lengths: list[int] = field(default_factory=list)  # tokens
    pairs: int = 0  # samples with a rejected latent
    sounds: list[float] = field(default_factory=list)  # seconds of each sound
    moments: Moments = field(default_factory=Moments)
    problems: list[str] = field(default_factory=list)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The latent's shape [C, F, H, W] of each sample."""
        return [one.shape for one in self.seen]


def shard_counts(folder: Path) -> dict[str, int]:
    """Number of samples of each shard, by the shard's path below `folder`, as `.nv-meta` says.

    Raises:
        PrepError: there is no readable `.nv-meta`.
    """
    path = folder / META / ".info.json"
    try:
        content = parse_json(path.read_bytes())
    except OSError:
        raise PrepError(
            f"{folder} has no {META}/.info.json: it is not a dataset, or packing was interrupted;"
            " give the --output_dir of a finished packing, or run the interrupted command again"
        ) from None
    except ValueError as error:
        raise _damaged(path, f"it is not JSON: {error}") from None
    counts = content.get("shard_counts") if isinstance(content, dict) else None
    if not isinstance(counts, dict):
        raise _damaged(path, "it has no object 'shard_counts' with the samples of each shard")
    for name, count in counts.items():
        if not _is_inside(name):
            raise _damaged(
                path, f"{short_repr(name)} in 'shard_counts' is not a path below the folder"
            )
        if type(count) is not int or count < 0:
            held = f"{short_repr(name)}: {short_repr(count)} in 'shard_counts'"
            raise _damaged(path, f"{held} is not a number of samples")
    return counts


def _damaged(path: Path, why: str) -> PrepError:
    return PrepError(f"{path} is damaged ({why}); pack the data again with --overwrite")


def _is_inside(name: str) -> bool:
    return "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts


def check_encoders(folder: Path) -> list[str]:
    """Checks that the dataset's codecs and text encoder can be rebuilt for generation.

    It also compares the stored null text with the text encoder's output for the empty caption.
    Returns a sentence for each problem that it finds.
    """
    path = folder / NULL_TEXT_NAME
    try:
        card = read_card(folder)
        vae.codec_of_card(card)
        sound_codec_of_card(card)
        encoder = text.text_encoder_of_card(card)
        if not encoder.reads_alone:  # each sample has its own null text
            return []
        stored = safetensors.torch.load(path.read_bytes())
        made = encoder.encode_all("")
        wrong = [name for name, value in made.items() if not torch.equal(stored[name], value)]
        if wrong:
            return [
                f"{path} is not the text encoder's output for the empty caption, in"
                f" {', '.join(wrong)}; pack or convert the data again with --overwrite"
            ]
    except CodecError as error:
        return [str(error)]
    except (OSError, KeyError, SafetensorError) as error:
        return [
            f"{path} cannot be read: {cause(error)}; pack or convert the data again with"
            " --overwrite"
        ]
    return []


def exact_codec(folder: Path) -> Codec | None:
    """The codec of the dataset in `folder` if it restores pixels exactly; else None."""
    try:
        codec = vae.codec_of_card(read_card(folder))
    except CodecError:  # `check_encoders` says why
        return None
    return codec if codec.is_exact else None


def words_of(folder: Path) -> dict[str, Any]:
    """Word frequencies of the captions, from the card of the dataset in `folder`; may be empty."""
    try:
        return read_card(folder).get(WORDS) or {}
    except CodecError:  # which `check_encoders` reports
        return {}


def inspect_shard(
    folder: Path, name: str, *, expected: int, exact: Codec | None = None
) -> ShardReport:
    """Reads every byte of the shard `name`, and reports what it holds; defects are not raised.

    `expected` is its number of samples by `.nv-meta`. With `exact`, a codec that restores pixels
    exactly, duplicates are found by pixels, else by latents.
    """
    report, path = ShardReport(name=name), folder / name
    try:
        report.bytes = path.stat().st_size
        starts = []
        for span, key, parts in read_samples(path):
            starts.append(span.start)
            report.samples += 1
            _check_sample(report, key, parts, exact)
        index = np.fromfile(path.with_suffix(".tar.idx"), np.uint64).tolist()
        if not index or index[:-1] != starts:
            report.problems.append(f"{name}.idx has other offsets than the samples of {name}")
    except _DAMAGE as error:
        report.problems.append(
            f"{name} is damaged or cut short after {report.samples} samples: {cause(error)}"
        )
    if report.samples != expected:
        report.problems.append(f"{name} has {report.samples} samples, {META} says {expected}")
    return report


def read_samples(path: Path, *, ending: str = "") -> Iterator[tuple[range, str, dict[str, bytes]]]:
    """Yields (range of bytes, key, files by part) of each sample of a tar.

    Only files whose names end in `ending` are read; the others are empty.

    Raises:
        tarfile.TarError: the archive is damaged. Samples before the damage have been yielded; the
            last of them may lack files.
        OSError: the file cannot be read.
    """
    start, end, current, parts = 0, 0, None, dict[str, bytes]()
    try:
        for member, content in _tar_files(path, ending):
            key, part = _key_and_part(member.name)
            if key != current:
                if current is not None:
                    yield range(start, end), current, parts
                start, current, parts = member.offset, key, {}
            end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            if content is not None:
                parts[part] = content
    except (tarfile.TarError, OSError):
        if current is not None:
            yield range(start, end), current, parts
        raise
    if current is not None:
        yield range(start, end), current, parts


def _key_and_part(name: str) -> tuple[str, str]:
    """Splits a file name like webdataset into key and part: `a.b/c.d.e` into `a.b/c` and `d.e`."""
    folder, slash, file = name.rpartition("/")
    stem, _, part = file.partition(".")
    return f"{folder}{slash}{stem}", part


@contextmanager
def _headers() -> Iterator[None]:
    """Turns the errors of `tarfile` about damaged header fields into `tarfile.ReadError`."""
    try:
        yield
    except (ValueError, ArithmeticError, LookupError, RuntimeError, MemoryError) as error:
        raise tarfile.ReadError(f"a header is damaged: {error}") from error


def _tar_files(path: Path, ending: str) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """Yields each member of a tar with its content.

    The content is None for links, devices and sparse files, and empty for files that are not to be
    read, as their names do not end in `ending`.

    Raises:
        tarfile.TarError: the archive is damaged, or cut short.
        OSError: the file cannot be read.
    """
    with _headers():
        tar = tarfile.open(path, "r:")  # noqa: SIM115 - it reads the first header
    with tar:
        yield from _members(tar, path.stat().st_size, ending)


def _members(
    tar: tarfile.TarFile, size: int, ending: str
) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    members = iter(tar)
    while True:
        with _headers():
            member = next(members, None)
        if member is None:
            break
        if member.isreg() and not member.issparse():
            content = tar.extractfile(member) if member.size <= size else None
            if content is None:
                raise tarfile.ReadError(
                    f"{member.name!r} has {member.size} bytes by its header, and the whole shard"
                    f" only {size}"
                )
            yield member, content.read() if member.name.endswith(ending) else b""
        elif not member.isdir():
            yield member, None
    # tarfile takes a header that it cannot read, except the first, as the end of the archive.
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise tarfile.ReadError(
            f"byte {tar.offset} begins neither a header nor the end of the archive"
        )


def _check_sample(
    report: ShardReport, key: str, parts: dict[str, bytes], exact: Codec | None
) -> None:
    where = f"{report.name}, key {key}"
    try:
        about = parse_json(parts["json"])
        if is_mlperf(parts):
            tensors = mlperf_tensors(parts)
            about = {"source": about.get("key", key), **mlperf_sizes(tensors["latent"])}
        elif wrong := _wrong_sum(parts, about, "safetensors"):
            report.problems.append(f"{where}: {wrong}")
            return
        else:
            tensors = safetensors.torch.load(parts["safetensors"])
        _add_sound(report, where, parts, about)
        if REJECTED_LATENT in tensors:
            _add_pair(report, where, tensors["latent"], tensors[REJECTED_LATENT])
        if _add(report, where, tensors["latent"], tensors["text"]):
            report.seen.append(_seen(key, about, tensors["latent"], exact))
    except KeyError as missing:
        report.problems.append(f"{where}: {missing} is missing")
    except (ValueError, TypeError, SafetensorError) as error:
        report.problems.append(f"{where}: cannot be read: {cause(error)}")


def _wrong_sum(parts: dict[str, bytes], about: dict[str, Any], part: str) -> str:
    found, wanted = f"{zlib.crc32(parts[part]):08x}", about["crc32"][part]
    return "" if found == wanted else f"checksum of .{part} is {found}, .json says {wanted}"


def _add_sound(
    report: ShardReport, where: str, parts: dict[str, bytes], about: dict[str, Any]
) -> None:
    """Adds the duration of a sample's sound in seconds to `report`, and problems with the sound.

    `where` names the sample in messages.
    """
    if wrong := sound_part.PART in parts and _wrong_sum(parts, about, sound_part.PART):
        report.problems.append(f"{where}: {wrong}")
    elif (sound := sound_part.read_sound(parts, about)) is not None:
        report.sounds.append(sound.seconds)
        if not torch.isfinite(sound.latent_KA).all():
            report.problems.append(f"{where}: NaN or Inf in its sound")


def _seen(
    key: str, about: dict[str, Any], latent_CFHW: Tensor, exact: Codec | None
) -> InspectedSample:
    sides = [about.get(name, "?") for name in ("width", "height", "num_frames")]
    return InspectedSample(
        key=key,
        source=str(about.get("source", key)),
        caption=str(about.get("caption", "")),
        bucket="{} x {}, {} frames".format(*sides).removesuffix(", 1 frames"),
        shape=tuple(latent_CFHW.shape),
        looks=looks_of(_grey(latent_CFHW, exact)),
    )


def _grey(latent_CFHW: Tensor, exact: Codec | None) -> Tensor:
    """Grey values [2, H, W] of the first and the last frame.

    If `exact` is a codec, the frames are decoded to pixels; else they are the latent's frames,
    averaged over channels.
    """
    ends_CFHW = latent_CFHW[:, [0, -1]]
    if exact is None:
        return ends_CFHW.float().mean(0)
    levels_FHWC = exact.decode(ends_CFHW)[..., : exact.pixel_channels]
    return (levels_FHWC.float() / 127.5 - 1).mean(-1)


def _add_pair(report: ShardReport, where: str, latent: Tensor, rejected: Tensor) -> None:
    report.pairs += 1
    if rejected.shape != latent.shape:
        shapes = f"{REJECTED_LATENT} {list(rejected.shape)}, and latent {list(latent.shape)}"
        report.problems.append(f"{where}: {shapes}, which must be equal")
    elif not torch.isfinite(rejected).all():
        report.problems.append(f"{where}: NaN or Inf in {REJECTED_LATENT}")


def _add(report: ShardReport, where: str, latent_CFHW: Tensor, text_LE: Tensor) -> bool:
    """Adds the sample to the statistics of `report`, and returns True.

    If the sample has a defect, a sentence is added to `report.problems` instead, and the result is
    False. `where` names the sample in that sentence.
    """
    if latent_CFHW.dim() != 4 or text_LE.dim() != 2:
        shapes = f"latent {list(latent_CFHW.shape)}, text {list(text_LE.shape)}"
        report.problems.append(
            f"{where}: {shapes}; a latent has 4 axes (channels, frames, rows, columns), a text 2"
        )
        return False
    if not (torch.isfinite(latent_CFHW).all() and torch.isfinite(text_LE).all()):
        report.problems.append(f"{where}: NaN or Inf in its latent or text")
        return False
    report.text_lengths.append(len(text_LE))
    report.moments.add(latent_CFHW)
    return True

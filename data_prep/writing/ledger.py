"""The ledger: a record of written samples, by which the same command continues an interrupted run.

`.ledger/` holds the options of the run (`run.json`), and for each rank a file with one line for
each of its samples, in the order of the plan. A line is written after its sample's bytes, so each
sample with a line is in a shard. Bytes after the last such sample are cut off, and those samples
are written again. `summarize` adds up the lines of all ranks.

When files have changed, packed samples move to `.ledger/earlier-N`. The new run copies those whose
line of the plan is unchanged. So no outdated sample stays, and none is encoded twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from data_prep.planning.splits import Split
from data_prep.refusals import PrepError, Refusals
from data_prep.writing.dataset_folder import LEDGER, META, remove
from dit.safe_writing import TEMPORARY, write_atomically
from dit.system_errors import reason, writing

RUN_NAME, WHITENING_NAME = "run.json", "whitening.json"
_EARLIER = "earlier-"
SIZES_IN_CARD = 20  # most frequent sizes; the first is the default of generation


def ledger_name(rank: int, world: int) -> str:
    return f"rank-{rank:05d}-of-{world:05d}.jsonl"


def digest_of(line: bytes) -> str:
    """A digest of `line`, a line of the plan; lines with the same digest make the same sample."""
    return hashlib.blake2b(line, digest_size=12).hexdigest()


def read_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields each complete line of a ledger, parsed, with the byte offset of its end.

    A truncated last line is left out.
    """
    end = 0
    with path.open("rb") as stream:
        for line in stream:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield json.loads(line), end


@dataclass
class LedgerProgress:
    """What the ledger of one rank records: samples, valid bytes, and the ends of shards."""

    samples: int = 0  # lines of the plan that are done
    size: int = 0  # valid bytes of the ledger
    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # split -> shard -> samples
    ends: dict[str, list[int]] = field(default_factory=dict)
    """Split -> 0 and the byte offsets at which the samples of its last shard end."""

    def add(self, line: Mapping[str, Any]) -> None:
        self.samples += 1
        for split, shard, ends in line.get("in", ()):
            shards = self.counts.setdefault(split, {})
            if shard not in shards:
                self.ends[split] = [0]
            shards[shard] = shards.get(shard, 0) + 1
            self.ends[split].append(ends)


def read_progress(path: Path, *, block: int, total: int) -> LedgerProgress:
    """Reads how many samples of a rank are done, and what the ledger says about them.

    Only complete blocks of `block` samples count, and only samples whose bytes are in the shards.
    `total` is the number of the rank's samples; the last block may be shorter.
    """
    if not path.exists():
        return LedgerProgress()
    size, folder = cache(_size), path.parent.parent

    def is_whole(line: Mapping[str, Any]) -> bool:
        return all(end <= size(folder / split / shard) for split, shard, end in line.get("in", ()))

    samples = sum(1 for _ in takewhile(is_whole, (line for line, _ in read_lines(path))))
    # Workers get whole blocks; only the last block of a plan may be shorter.
    whole = samples if samples >= total else samples - samples % block
    progress = LedgerProgress()
    for line, end in read_lines(path):
        if progress.samples == whole:
            break
        progress.add(line)
        progress.size = end
    return progress


def _size(shard: Path) -> int:
    """The real size of a shard in bytes: after a power cut it may be less than recorded."""
    paths = (shard, shard.with_name(shard.name + TEMPORARY))
    return max((path.stat().st_size for path in paths if path.exists()), default=0)


class Ledger:
    """The ledger of one rank, open for writing."""

    def __init__(self, path: Path, *, keep: int):
        path.parent.mkdir(exist_ok=True)
        self._stream = path.open("r+b" if path.exists() else "wb")
        self._stream.truncate(keep)
        self._stream.seek(keep)

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Appends the lines of a block of samples, whose bytes must be in the shards already."""
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        with writing(Path(self._stream.name)):
            self._stream.write(text.encode())
            self._stream.flush()

    def close(self) -> None:
        self._stream.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerHeader:
    """The options and the plan of a run, as stored in `run.json`."""

    options: Mapping[str, Any]  # all options that decide the samples; JSON values
    plan: str  # digest of the plan
    world: int  # ranks
    generation: int = 0  # number of earlier packings over other files

    def write(self, folder: Path) -> None:
        (folder / LEDGER).mkdir(exist_ok=True)
        content = asdict(self)
        write_atomically(
            folder / LEDGER / RUN_NAME, (json.dumps(content, indent=1) + "\n").encode()
        )

    @classmethod
    def read(cls, folder: Path) -> LedgerHeader | None:
        """Reads the header that an earlier run wrote into `folder`; None if there is none.

        Raises:
            PrepError: the file is damaged.
        """
        path = folder / LEDGER / RUN_NAME
        try:
            return cls(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            no_json = isinstance(error, ValueError)
            why = f"it is not JSON: {error}" if no_json else "its keys are not those of a packing"
            raise PrepError(f"{path} is damaged ({why}); start anew with --overwrite") from None


def changed_options(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The options that differ between `old` and `new`, each as a string `name: old -> new`."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    why = {"block_size": " (of the command: image or video)"}
    return [f"{name}: {old.get(name)!r} -> {new.get(name)!r}{why.get(name, '')}" for name in names]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a run has written, refused and ignored, with statistics for the dataset card."""

    shards: Mapping[Split, Mapping[str, int]]  # samples of each shard by file name
    bytes_written: int
    refusals: Refusals
    ignored: Mapping[str, int]  # files that are no media, by kind
    notes: Mapping[str, int]
    sizes: list[dict[str, int]]
    measured: Mapping[str, float]  # mean and std of the latents
    psnr: Mapping[str, float]  # least, mean, and number of verified samples
    cropped: Mapping[str, Any] = field(default_factory=dict)  # as CropStatistics.summary

    @property
    def refused(self) -> Mapping[str, int]:
        return self.refusals.counts

    @property
    def samples(self) -> Counter[Split]:
        return Counter({split: sum(counts.values()) for split, counts in self.shards.items()})


def _measured(count: int, total: float, square: float) -> dict[str, float]:
    if not count:
        return {}
    mean, square = total / count, square / count
    return {"mean": round(mean, 6), "std": round(math.sqrt(max(0, square - mean**2)), 6)}


def summarize(folder: Path, *, world: int, ignored: Mapping[str, int]) -> Summary:
    """Adds up the ledgers of all `world` ranks; the result names only samples that were refused."""
    shards: dict[Split, dict[str, int]] = {split: {} for split in Split}
    ratios, count, total, square = list[float](), 0, 0.0, 0.0
    notes, sizes, refusals = Counter[str](), Counter[tuple[int, ...]](), Refusals()
    for rank in range(world):
        path = folder / LEDGER / ledger_name(rank, world)
        for line, _ in read_lines(path) if path.exists() else ():
            if "refused" in line:
                refusals.add(line["source"], line["refused"], line["detail"])
                continue
            for split, shard, _ in line["in"]:
                counts = shards[Split(split)]
                counts[shard] = counts.get(shard, 0) + 1
                sizes[tuple(line["size"])] += 1
            notes.update(line["notes"])
            if "psnr" in line:
                ratios.append(line["psnr"])
            numbers, mean, mean_square = line["moments"]
            count += numbers
            total += numbers * mean
            square += numbers * mean_square
    used = {split: dict(sorted(counts.items())) for split, counts in shards.items() if counts}
    return Summary(
        shards=used,
        bytes_written=sum((folder / s / name).stat().st_size for s in used for name in used[s]),
        refusals=refusals,
        ignored=ignored,
        notes=dict(notes),
        sizes=[
            {"num_frames": frames, "height": height, "width": width, "samples": count}
            for (frames, height, width), count in sizes.most_common(SIZES_IN_CARD)
        ],
        measured=_measured(count, total, square),
        psnr=_of_ratios(ratios),
    )


def _of_ratios(ratios: list[float]) -> dict[str, float]:
    if not ratios:
        return {}
    mean = round(sum(ratios) / len(ratios), 2)
    return {"least": min(ratios), "mean": mean, "samples": len(ratios)}


def set_aside(folder: Path, *, generation: int) -> None:
    """Moves the packed samples and ledgers to `.ledger/earlier-N`, where N is `generation`.

    `.nv-meta` is removed. After an interrupted call, another one moves what is left.
    """
    if (folder / META).exists():
        remove(folder / META)
    aside = folder / LEDGER / f"{_EARLIER}{generation}"
    aside.mkdir(exist_ok=True)
    moved = [*(folder / split for split in Split), *(folder / LEDGER).glob("rank-*.jsonl")]
    for path in [*moved, folder / LEDGER / WHITENING_NAME]:
        if path.exists():
            path.rename(aside / path.name)


def remove_earlier(folder: Path) -> None:
    """Removes the samples that `set_aside` moved, once the new dataset is complete."""
    for path in (folder / LEDGER).glob(f"{_EARLIER}*"):
        shutil.rmtree(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class _FoundSample:
    places: tuple[tuple[Path, int, int], ...]  # shard, first byte, end
    about: dict[str, Any]


class EarlierSamples:
    """Samples of earlier runs, found by the digest of their line in the plan."""

    def __init__(self, folder: Path):
        self._found: dict[str, _FoundSample] = {}
        whitening = folder / LEDGER / WHITENING_NAME
        for aside in sorted((folder / LEDGER).glob(f"{_EARLIER}*")):
            # Latents of another whitening cannot be used.
            if _content(aside / WHITENING_NAME) == _content(whitening):
                for path in sorted(aside.glob("rank-*.jsonl")):
                    self._found.update(_samples(aside, path))

    def has(self, line: bytes) -> bool:
        return bool(self._found) and digest_of(line) in self._found

    def copy(self, digest: str) -> tuple[dict[str, Any], list[bytes]]:
        """Returns (about, copies) of the sample with this `digest`.

        `about` is what the ledger says of it, and `copies` has the bytes of each of its copies in
        the shards.

        Raises:
            PrepError: the bytes are lost.
        """
        found = self._found[digest]
        return found.about, [_bytes(*place) for place in found.places]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _samples(aside: Path, ledger: Path) -> Iterator[tuple[str, _FoundSample]]:
    ends: dict[tuple[str, str], int] = {}
    for line, _ in read_lines(ledger):
        places = []
        for split, shard, end in line.pop("in", ()):
            places.append((aside / split / shard, ends.get((split, shard), 0), end))
            ends[split, shard] = end
        if places:
            yield line.pop("of"), _FoundSample(places=tuple(places), about=line)


def _bytes(shard: Path, start: int, end: int) -> bytes:
    path = shard if shard.exists() else shard.with_name(shard.name + TEMPORARY)
    try:
        with path.open("rb") as stream:
            stream.seek(start)
            content = stream.read(end - start)
    except OSError as error:
        raise PrepError(
            f"{path} cannot be read ({reason(error)}); start anew with --overwrite"
        ) from error
    if len(content) != end - start:
        raise PrepError(f"{path} is cut short; start anew with --overwrite")
    return content

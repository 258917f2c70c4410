"""A planned sample, the clip that is read for it, and the interface of sources."""

# C colour channels, F frames, H rows, W columns

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, Self

from PIL import Image
from torch import Tensor

REJECTED_LATENT = "rejected_latent"
"""Name of the rejected sample's latent in a shard. It is also defined in dit/batch, which this
folder must not import; a test compares the two names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMask:
    """File of a sample's loss mask, and the frames to read from it."""

    path: str  # in the folder of masks
    stamp: str  # changes when the file changes
    keep: tuple[int, ...] = ()  # as in Entry; empty for a picture, which is the mask of all frames
    tick: str = ""
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedReference:
    """A control or rejected picture or video of a sample, as planned to be encoded."""

    name: str  # relative path, for people
    folder: int  # index of the folder of controls (0 for a rejected one); -1: the media's folder
    where: str  # path in that folder, or argument of the `open` of the input
    stamp: str  # changes when the file changes
    resized: tuple[int, int]  # width, height before the crop
    size: tuple[int, int]  # width, height that is encoded
    of_file: tuple[int, int] | None = None  # width, height of a video in its file, upright
    keep: tuple[int, ...] = ()  # of a video, as in Entry; empty for a picture
    tick: str = ""
    numbers: tuple[int, ...] = ()

    @property
    def frames(self) -> int:
        """Number of frames that are encoded, 1 for a picture."""
        return max(1, len(self.keep))

    def written(self) -> dict[str, Any]:
        """The fields that differ from their defaults, for a line of the plan."""
        defaults = {f.name: f.default for f in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Creates a reference from the fields that `written` returned, as read from JSON."""
        values: dict[str, Any] = {}
        values |= {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSound:
    """The part of a sound track, in seconds, that a sample gets."""

    begin: float  # seconds on the clock of the file
    seconds: float
    track: int | None = None  # among the sound tracks of the file; None for silence


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One planned sample, before decoding, or the reason why it is refused.

    It is a line of `plan.jsonl`. A file with several windows, captions or resolutions has several
    lines.
    """

    key: str  # of the sample in the shards: unique, no dots
    source: str  # path relative to the input root
    file_key: str = ""  # decides order and split, so that all samples of a file stay together
    folder: int = 0  # number of the input whose settings apply
    where: str = ""  # argument of the `open` of that input
    stamp: str = ""  # changes when the file changes
    kind: str = "image"
    width: int = 0  # of the file, in square pixels, upright
    height: int = 0
    frames: int = 1  # in the file
    fps: float | None = None  # of the file; None for a picture
    duration: float | None = None  # seconds
    caption: str = ""
    caption_from: str = ""
    loss_weight: float | None = None  # multiplies the loss in training; None if none is given
    resized: tuple[int, int] | None = None  # width, height before the crop
    size: tuple[int, int] | None = None  # width, height that is encoded
    keep: tuple[int, ...] = ()  # presentation times of the frames kept, in units of `tick`
    tick: str = ""  # seconds, a fraction
    numbers: tuple[int, ...] = ()  # of the frames kept, where decoded frames have no times
    kept_fps: float | None = None  # of the frames kept
    mask: PlannedMask | None = None  # weights of the loss
    references: tuple[PlannedReference, ...] = ()  # control pictures or videos of an edit
    rejected: PlannedReference | None = None  # the rejected sample of a preference pair
    sound: PlannedSound | None = None
    tokens: int = 0
    repeats: int = 1  # copies of this sample in the shards
    notes: tuple[str, ...] = ()
    refused: str = ""  # reason; empty for a sample that is packed
    detail: str = ""

    @property
    def group(self) -> str:
        """Key that decides order and split; samples of one file share it and stay together."""
        return self.file_key or self.key

    def to_line(self) -> str:
        """The entry as a line of JSON, without fields that have their default values."""
        given = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        if self.mask is not None:
            given["mask"] = asdict(self.mask)
        if self.rejected is not None:
            given["rejected"] = self.rejected.written()
        if self.sound is not None:
            given["sound"] = asdict(self.sound)
        if self.references:
            given["references"] = [one.written() for one in self.references]
        return json.dumps(given, separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes) -> Self:
        given = json.loads(line)
        for name in ("resized", "size", "keep", "numbers", "notes"):
            if name in given:
                given[name] = tuple(given[name])
        if "mask" in given:
            mask = given["mask"]
            lists = {name: tuple(mask[name]) for name in ("keep", "numbers")}
            given["mask"] = PlannedMask(**mask | lists)
        if "rejected" in given:
            given["rejected"] = PlannedReference.read(given["rejected"])
        if "sound" in given:
            given["sound"] = PlannedSound(**given["sound"])
        given["references"] = tuple(map(PlannedReference.read, given.get("references", ())))
        return cls(**given)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """A decoded picture or video, as input of a codec, with its caption."""

    video_CFHW: Tensor  # float32 in [-1, 1]; a picture has one frame
    caption: str
    original_height: int  # pixels, upright, before scaling and cropping
    original_width: int
    fps: float | None = None  # frames per second; None for a picture
    loss_mask_1FHW: Tensor | None = None  # weight of each cell of its latent, in [0, 1]
    references: tuple[Tensor, ...] = ()  # controls of an edit, [C, F, H, W] like `video_CFHW`
    rejected_CFHW: Tensor | None = None  # rejected sample of a preference pair, of the same shape
    # First frames of `references`, before they are scaled and cropped
    originals: tuple[Image.Image, ...] = ()
    sound_CS: Tensor | None = None  # float32, at the rate and channels of the sound codec
    notes: tuple[str, ...] = ()  # the summary counts them; for example the origin of the caption


class Source(Protocol):
    """A source of clips: a folder, a table or a Hugging Face dataset.

    It is pickled for worker processes, which only call `read`.
    """

    @property
    def name(self) -> str:
        """Name of the source, for the dataset card."""
        ...

    @property
    def entries(self) -> Iterable[Entry]:
        """All planned samples, refused ones included; each iteration reads the source again."""
        ...

    @property
    def ignored(self) -> Mapping[str, int]:
        """Number of files that were left out because they are not media, by kind of file."""
        ...

    def file_of(self, entry: Entry) -> Path | None:
        """The file of `entry` that a browser can open; None for archives and datasets."""
        ...

    def read(self, entry: Entry) -> Clip:
        """Reads and decodes the clip of `entry`.

        Raises:
            RefusedError: the sample cannot be packed.
        """
        ...

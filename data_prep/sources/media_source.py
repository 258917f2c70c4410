"""Plans the samples of media, and reads their pixels when they are packed.

The plan decides everything; reading only carries it out.
"""

# C colours, F H W frames, rows, columns

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from data_prep.media.captions import Caption, ControlPicture, SeveralCaptions, TagShuffle
from data_prep.media.clips import Clip, Entry, PlannedReference
from data_prep.media.frame_selection import FrameRule, KeptFrames
from data_prep.media.images import open_image, probe_image, to_rgb, to_rgba, to_video
from data_prep.media.resizing import Placement, ResizeMode, Sizing
from data_prep.media.sounds import SoundRule, is_about_sound
from data_prep.media.videos import Timeline, VideoDecoder, timeline
from data_prep.planning.splits import key_of
from data_prep.refusals import Reason, RefusedError, printable
from data_prep.sources.beside_media import (
    FOLDER,
    ControlFolder,
    FoundPartner,
    FoundReference,
    ReadReference,
    ReferenceRule,
    find_reference,
    read_reference,
)
from data_prep.sources.folders import Collection, Medium, is_itself, path_of
from data_prep.sources.listing import Ignored
from data_prep.sources.loss_masks import CellSize
from data_prep.sources.media_notes import (
    SAME_CONTROL,
    flaws_beside,
    notes_of_controls,
    notes_of_frames,
    notes_of_mask,
)
from dit.codecs.rgb import WHITE, is_transparent

_THREADS = 8  # that probe files, which mostly wait for disks and networks
_AHEAD = 512  # files that are probed at once
_SAME_PAIR = "rejected partner of the same pixels: the pair teaches nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A collection of media, and the settings for its samples."""

    collection: Collection
    prefix: str = ""  # for source paths, where there are several inputs
    sizings: tuple[Sizing, ...] = ()  # each makes a sample
    frames: FrameRule = field(default_factory=FrameRule)
    repeats: float = 1
    caption_prefix: str = ""
    several: SeveralCaptions = SeveralCaptions.ALL
    shuffle: TagShuffle | None = None
    skips_uncaptioned: bool = False
    """Whether media without a caption are ignored instead of refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGrid:
    """Size of a latent cell (pixels, frames), and of a patch (latent cells along a side)."""

    spatial: int  # pixels along one side of a latent cell
    temporal: int  # frames in a latent frame, after the first
    patch: int  # latent cells along one side of a token

    def tokens(self, width: int, height: int, num_frames: int) -> int:
        cell = self.spatial * self.patch
        return (1 + (num_frames - 1) // self.temporal) * (width // cell) * (height // cell)


@dataclass(frozen=True, kw_only=True)
class MediaSource:
    """Source of the clips from every medium of several inputs."""

    inputs: tuple[Input, ...]
    grid: TokenGrid
    colours: int
    resize_mode: ResizeMode = ResizeMode.LANCZOS
    decoder: VideoDecoder = VideoDecoder.PYAV
    background: str = WHITE
    """Colour behind transparent areas, in the form of `dit.codecs.rgb.colour`."""
    reference_rule: ReferenceRule = field(default_factory=ReferenceRule)
    """The rule for the size of control pictures."""
    keeps_originals: bool = False
    """Whether clips also keep control pictures at full size, for text encoders that read them."""
    sound: SoundRule | None = None
    """How the sound of videos is read; None: sound is not read."""
    most: int | None = None  # files
    ignored: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        return printable(", ".join(given.collection.name for given in self.inputs))

    @property
    def entries(self) -> Iterator[Entry]:
        """Yields the samples of all media in the order of the listing; threads probe the files.

        Files that become no sample are counted in `ignored`, which is cleared at the start.
        """
        self.ignored.clear()
        ignored = Ignored(counts=self.ignored)
        with ThreadPoolExecutor(_THREADS) as pool:
            for number, given in enumerate(self.inputs):
                media = islice(given.collection.media(ignored), self.most)
                while batch := list(islice(media, _AHEAD)):
                    for entries in pool.map(partial(self.plan, number), batch):
                        yield from self._counted(given, entries)
        ignored.close()

    def _counted(self, given: Input, entries: list[Entry]) -> list[Entry]:
        """The samples `entries` of a medium, or [] if a setting leaves the medium out.

        A medium that is left out is counted in `ignored`.
        """
        if not entries:
            self.ignored[f"file that num_repeats {given.repeats:g} leaves out"] += 1
        if given.skips_uncaptioned and entries and entries[0].refused == Reason.NO_CAPTION:
            self.ignored["file without a caption, by skip_empty_caption"] += 1
            return []
        return entries

    def plan(self, number: int, medium: Medium) -> list[Entry]:
        """The planned samples of a medium, or one entry that says why it is refused.

        The list is empty if `repeats` of its input leaves the medium out. `number` is the index of
        that input.
        """
        given = self.inputs[number]
        source = f"{given.prefix}{medium.source}"
        key = key_of(source)
        blank = Entry(
            key=key,
            source=printable(
                source
            ),  # a file name need not be valid text; `where` keeps it unchanged
            file_key=key,
            folder=number,
            where=medium.where,
            stamp=medium.stamp,
            kind=medium.kind,
        )
        try:
            captions = _chosen(medium.captions(), given.several, key)
            if given.shuffle is not None:
                captions = given.shuffle.of(captions, key=key)
            named = [
                folder.picture(path, medium.source)
                for folder, path in zip(given.collection.controls, medium.controls, strict=True)
            ]
            entries = list(self._variants(given, blank, captions, medium, named))
        except RefusedError as refused:
            return [replace(blank, refused=str(refused.reason), detail=refused.detail)]
        keyed = (
            replace(entry, key=key if index == 0 else f"{key}-{index}")
            for index, entry in enumerate(entries)
        )
        return [e for e in (_repeated(e, given.repeats) for e in keyed) if e.repeats]

    def _variants(
        self,
        given: Input,
        blank: Entry,
        captions: list[Caption],
        medium: Medium,
        controls: list[ControlPicture],
    ) -> Iterator[Entry]:
        file, line, kept = given.collection.open(blank.where), None, [KeptFrames((), None)]
        flaws: tuple[str, ...] = ()
        if blank.kind == "video":
            line = timeline(file)
            kept = given.frames.choose(line, seed=blank.key)
            size, has_alpha = (line.width, line.height), line.has_alpha
        else:
            size, is_animated, has_alpha, flaws = probe_image(file)
            flaws += ("only the first frame of an animation",) * is_animated
        heard = self.sound.find(file) if self.sound is not None and line is not None else None
        probed, masks, mask = _probed(blank, size, line), given.collection.masks, medium.mask
        found = None if masks is None or mask is None else masks.find(mask, size, line)
        pictures = [_references(given.collection, caption, controls) for caption in captions]
        partners = [_partner(given.collection, caption, medium, size, line) for caption in captions]
        for window in kept:
            for sizing in given.sizings:
                place = sizing.place(*size)
                tokens = self.grid.tokens(*place.size, max(1, len(window.shown)))
                for caption, shown, partner in zip(captions, pictures, partners, strict=True):
                    rule = self.reference_rule
                    references = tuple(one.planned(rule, place.size, line, window) for one in shown)
                    rejected = partner and partner.planned(place, line, window)
                    notes = [f"caption from {caption.origin}", *caption.notes]
                    notes += ["scaled or cropped"] * (place.size != size)
                    of_pair = [*shown, *([] if partner is None else [partner.found])]
                    is_clear = has_alpha or any(one.has_alpha for one in of_pair)
                    notes += [self.on_background] * is_clear
                    notes += (*flaws, *notes_of_frames(line, window))
                    notes += notes_of_mask(given.collection, medium)
                    notes += notes_of_controls(given.collection, medium, shown)
                    notes += ["rejected partner"] * (rejected is not None)
                    notes += flaws_beside(of_pair)
                    notes += heard.notes if heard and window.fps is not None else ()
                    yield replace(
                        probed,
                        caption=given.caption_prefix + caption.text,
                        caption_from=caption.origin,
                        loss_weight=caption.loss_weight,
                        resized=place.resized,
                        size=place.size,
                        keep=window.shown,
                        numbers=line.numbers_of(window.shown) if line and line.by_number else (),
                        kept_fps=window.fps,
                        mask=found.planned(line, window) if found else None,
                        references=references,
                        rejected=rejected,
                        sound=heard.planned(window) if heard else None,
                        tokens=tokens
                        + sum(self.grid.tokens(*one.size, one.frames) for one in references),
                        notes=tuple(notes),
                    )

    @property
    def on_background(self) -> str:
        """The note that is counted for a sample with transparent pixels."""
        if self.keeps_alpha:
            return "transparent, and encoded so"
        return f"transparent, on {self.background} (--background)"

    @property
    def keeps_alpha(self) -> bool:
        """Whether the codec encodes transparency."""
        return self.colours == 4

    def file_of(self, entry: Entry) -> Path | None:
        """The file of a sample; None if it is in an archive or a dataset."""
        return path_of(self.inputs[entry.folder].collection, entry.where)

    def read(self, entry: Entry) -> Clip:
        """Reads and decodes the clip of a planned sample, with its references, mask and sound.

        Raises:
            RefusedError: the file, a control, the rejected sample, the mask or the sound cannot be
                used.
        """
        given, masks = self.inputs[entry.folder], self.inputs[entry.folder].collection.masks
        place = Placement(entry.resized or (0, 0), entry.size or (0, 0))
        video_CFHW, notes = self._pixels(given.collection.open(entry.where), entry, place)
        cell = CellSize(side=self.grid.spatial, frames=self.grid.temporal)
        shown = [self._read(given, one, given.collection.controls) for one in entry.references]
        pair = []
        if entry.rejected is not None:
            pair = [self._read(given, entry.rejected, [given.collection.rejected])]
        notes += [self.on_background] * any(one.is_transparent for one in (*shown, *pair))
        references = tuple(map(self._video, shown))
        rejected_CFHW = self._video(pair[0]) if pair else None
        notes += [SAME_CONTROL] * any(torch.equal(one, video_CFHW) for one in references)
        if rejected_CFHW is not None and torch.equal(rejected_CFHW, video_CFHW):
            notes.append(_SAME_PAIR)
        sound_CS = None
        if self.sound is not None and entry.sound is not None:
            heard = self.sound.read(given.collection.open(entry.where), entry.sound)
            sound_CS, notes = heard[0], [n for n in notes if not is_about_sound(n)] + [*heard[1]]
        return Clip(
            video_CFHW=video_CFHW,
            caption=entry.caption,
            original_height=entry.height,
            original_width=entry.width,
            fps=entry.kept_fps,
            loss_mask_1FHW=masks and masks.read(entry, place, cell, self.decoder),
            references=references,
            rejected_CFHW=rejected_CFHW,
            originals=tuple(one.original for one in shown) if self.keeps_originals else (),
            sound_CS=sound_CS,
            notes=tuple(dict.fromkeys(notes)),
        )

    def _read(
        self, given: Input, one: PlannedReference, folders: Sequence[ControlFolder | None]
    ) -> ReadReference:
        """Reads the control or rejected sample `one`.

        Its file is in `folders[one.folder]`, or in the folder of the media if `one.folder` is
        FOLDER.
        """
        folder = None if one.folder == FOLDER else folders[one.folder]
        file = given.collection.open(one.where) if folder is None else folder.root / one.where
        background = None if self.keeps_alpha else self.background
        return read_reference(one, file, self.resize_mode, background, self.decoder)

    def _video(self, read: ReadReference) -> Tensor:
        return torch.cat([to_video(frame, colours=self.colours) for frame in read.placed], dim=1)

    def _pixels(
        self, file: Path | BinaryIO, entry: Entry, place: Placement
    ) -> tuple[Tensor, list[str]]:
        """Decodes, scales and crops the frames of a sample.

        Returns (video [C, F, H, W], notes); the notes include those that only pixels show.

        Raises:
            RefusedError: the file has changed since it was planned, or cannot be decoded.
        """
        notes = [note for note in entry.notes if note != self.on_background]
        if entry.kind == "video":
            pictures = self.decoder.frames(file, entry)
        else:
            image = open_image(file)
            if image.size != (entry.width, entry.height):
                sizes = f"{entry.width} x {entry.height} pixels, now {image.width} x {image.height}"
                raise RefusedError(Reason.CHANGED, f"it had {sizes}; run the command again")
            pictures = iter([image])
        frames, mode = list[Tensor](), self.resize_mode.filter
        for picture in pictures:
            clear = to_rgba(picture) if self.keeps_alpha else to_rgb(picture, self.background)
            fitted = place.apply(clear, mode)
            frames.append(to_video(fitted, colours=self.colours))
            notes += [self.on_background] * is_transparent(picture)
        return torch.cat(frames, dim=1), notes


def _references(
    collection: Collection, caption: Caption, controls: Sequence[ControlPicture]
) -> list[FoundReference]:
    found = [
        find_reference(number, picture, lambda where, root=folder.root: root / where)
        for number, (folder, picture) in enumerate(zip(collection.controls, controls, strict=True))
    ]
    return found + [find_reference(FOLDER, one, collection.open) for one in caption.controls]


def _partner(
    collection: Collection,
    caption: Caption,
    medium: Medium,
    size: tuple[int, int],
    line: Timeline | None,
) -> FoundPartner | None:
    """The rejected sample of `medium`, from the row of `caption` in a table or else from a folder.

    None if there is none. `size` is the medium's (width, height), and `line` its timeline if it is
    a video.

    Raises:
        RefusedError: the rejected sample is the medium itself, or cannot be used.
    """
    folder, picture = None, caption.rejected
    if picture is None and (folder := collection.rejected) is not None:
        picture = folder.picture(medium.rejected, medium.source)
    if picture is None:
        return None
    root = folder and folder.root
    if is_itself(collection, medium, picture.where, root):
        why = f"{picture.name} is the preferred file itself, and such a pair teaches nothing"
        raise RefusedError(Reason.BAD_REJECTED, f"{why}; name another file")
    if root is None:
        return FoundPartner.of(FOLDER, picture, collection.open, size, line)
    return FoundPartner.of(0, picture, lambda where: root / where, size, line)


def _probed(entry: Entry, size: tuple[int, int], line: Timeline | None) -> Entry:
    entry = replace(entry, width=size[0], height=size[1])
    if line is None:
        return entry
    return replace(
        entry,
        frames=len(line.shown),
        fps=round(line.fps, 6),
        duration=round(line.duration, 6),
        tick=str(Fraction(line.tick)),
    )


def _chosen(captions: list[Caption], several: SeveralCaptions, key: str) -> list[Caption]:
    if several is SeveralCaptions.ALL:
        return captions
    number = _draw(key, b"caption") % len(captions) if several is SeveralCaptions.RANDOM else 0
    return [captions[number]]


def _repeated(entry: Entry, repeats: float) -> Entry:
    """A copy of `entry` with a whole number of repeats, whose mean over all samples is `repeats`.

    A hash of `entry.group` decides whether a fractional part of `repeats` is rounded up.
    """
    whole, part = divmod(repeats, 1)
    extra = _draw(entry.group, b"repeats") % 2**32 < part * 2**32
    return replace(entry, repeats=int(whole) + extra)


def _draw(key: str, purpose: bytes) -> int:
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")

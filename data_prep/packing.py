"""Packs a source of clips into a dataset folder.

1. plan      every sample, before anything is decoded; options and output folder are checked
2. measure   mean and standard deviation of the latents, for codecs that whiten by the dataset
3. encode    sample by sample, in the order of the plan, into the shards of its split
4. publish   only if enough was packed

The same command continues a run that ended early, for whatever reason. The folder then holds what a
single run would have written. If files have changed in the meantime, they are encoded again, and
the samples of unchanged files are copied.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from data_prep.engine.block_worker import BlockWorker, DecodedSample, RefusedResult, Task
from data_prep.engine.processes import Engine, InProcess
from data_prep.engine.ranks import ALONE, Ranks
from data_prep.inspect.html_pages import PageRoom, side_for
from data_prep.media.clips import Entry, Source
from data_prep.media.resizing import Sizing
from data_prep.planning.plan import PackingPlan, read_plan, refuse, write_plan
from data_prep.planning.splits import ALL_IN_TRAIN, Split, all_in_train_notice
from data_prep.planning.statistics import CropStatistics, crop_line
from data_prep.refusals import PrepError, Refusals, RefusedError
from data_prep.writing.dataset_folder import (
    LEDGER,
    META,
    PLAN_NAME,
    REFUSED_NAME,
    prepare_folder,
    publish,
)
from data_prep.writing.ledger import (
    WHITENING_NAME,
    LedgerHeader,
    Summary,
    changed_options,
    remove_earlier,
    set_aside,
    summarize,
)
from data_prep.writing.pack_options import PackOptions
from data_prep.writing.readme import PICTURES, MadeBy, sample_picture
from data_prep.writing.shard_writer import RankBlocks, Writer
from dit.codecs.dataset_card import FORMAT_VERSION
from dit.codecs.normalization import Moments, Whitening
from dit.codecs.sound import SoundCodec, sound_in_card
from dit.codecs.text import TextEncoder
from dit.codecs.text.encoder import vocabulary
from dit.codecs.vae import Codec
from dit.progress import Track, no_progress
from dit.safe_writing import write_atomically

__all__ = ["PackOptions", "Summary", "pack_dataset"]

_LAYOUT = ("split", "shard_size", "max_shard_bytes", "batch_size", "block_size")
_MOST_NAMED = 4  # changed options in a message


@dataclass(kw_only=True)
class Packing:
    """A run that packs the clips of a source into a dataset folder; each process has one."""

    source: Source
    folder: Path
    codec: Codec
    text: TextEncoder
    options: PackOptions
    settings: Mapping[str, Any]
    whitening: Whitening | None = None
    """The whitening to use; None: it is measured on the data, if the codec needs that."""
    sound: SoundCodec | None = None
    """Codec for the sound of videos; None: videos are packed without sound."""
    sound_scale: float | None = None
    """Scale of sound latents to use; None: it is measured on the data, if the codec needs that."""
    engine: Engine = field(default_factory=InProcess)
    ranks: Ranks = ALONE
    track: Track = no_progress
    command: str = ""
    """The shell command that made the dataset, for its README.md."""
    gentler: Mapping[str, Sizing] = field(default_factory=dict)
    """Other rules for sizes that may crop less, by the option that selects them; see
    `gentler_sizings`."""
    notify: Callable[[str], None] = lambda _: None
    """Shows a sentence to the user; called before the encoding begins."""
    decoded: list[DecodedSample | None] = field(default_factory=list)
    """Hashes and thumbnails that `decode_all` finds, in the order of the plan; None for refused
    samples."""
    cropped: Mapping[str, Any] = field(default_factory=dict)
    """Summary of the area lost to cropping, for the dataset card; set by `review`."""

    def run(self) -> Summary:
        """Runs all steps that an earlier run has not finished, and returns what was packed.

        Raises:
            PrepError: the user must change something; after any exception there is no `.nv-meta`.
        """
        if self.ranks.rank == 0:
            prepare_folder(self.folder, overwrite=self.options.overwrite)
            self._check_options()
            plan = self.plan()
            self._set_aside_outdated(plan)
        self.ranks.barrier()
        plan = read_plan(self.folder / PLAN_NAME)
        self._check(self.review(plan), plan)
        self._measure(plan)
        self._encode(plan)
        self.ranks.barrier()
        return self._finish(plan)

    def plan(self) -> PackingPlan:
        """Probes every file and writes the plan: whether and how each sample is packed.

        If the option trust_cache is set, an existing plan is read instead.

        Raises:
            PrepError: two files have the same key, or a split gets no sample.
        """
        path = self.folder / PLAN_NAME
        if self.options.trust_cache and path.exists():
            return read_plan(path)
        with self.track("planning", 0, 0) as advance:
            entries = _counted(self.source.entries, advance)
            given = self.options.split if self.options.split_is_given else None
            return write_plan(entries, path, given)

    def decode_all(self, plan: PackingPlan) -> PackingPlan:
        """Decodes every file without encoding it, and fills `decoded`.

        Rewrites the file of `plan` so that files that fail are refused, and returns the new plan.
        """
        return refuse(plan, self._decode(plan))

    def _decode(self, plan: PackingPlan) -> Iterator[tuple[str, str] | None]:
        blocks, room = plan.blocks(self.options.block_size), PageRoom()
        work = replace(self.work(Task.DECODE), side=side_for(plan.total))
        with self.track(Task.DECODE, plan.total, 0) as advance:
            for outcomes in self.engine.run(work, blocks):
                for outcome in outcomes:
                    if isinstance(outcome, RefusedResult):
                        self.decoded.append(None)
                        yield outcome.reason, outcome.detail
                        continue
                    shown = room.take(outcome.thumbnail)
                    self.decoded.append(replace(outcome, thumbnail=shown))
                    yield None
                advance(len(outcomes))

    @property
    def _identity(self) -> dict[str, Any]:
        """All options that determine the content of the folder, by name."""
        settings = {k: v for k, v in self.settings.items() if k != "max_bad_fraction"}
        identity = {
            "format_version": FORMAT_VERSION,
            **settings,
            **{name: getattr(self.options, name) for name in _LAYOUT},
            "processor": {"name": self.codec.name, **self.codec.settings},
            "text_encoder": self.text.settings,
        }
        if self.whitening is not None:  # a key only then: folders of older versions have none
            identity["whitening"] = asdict(self.whitening)
        if self.sound is not None:
            identity["audio_processor"] = {"name": self.sound.name, **self.sound.settings}
        if self.sound_scale is not None:
            identity["sound_scale"] = self.sound_scale
        return json.loads(json.dumps(identity, default=asdict))

    def _check_options(self) -> None:
        """Raises PrepError if an earlier run began the folder with other options."""
        record = LedgerHeader.read(self.folder)
        changes = changed_options(record.options, self._identity) if record else []
        if changes:
            named = "; ".join(changes[:_MOST_NAMED])
            raise PrepError(
                f"--output_dir {self.folder} is not empty: it holds samples of other options"
                f" ({named}). Give the options that it was begun with, give another folder, or"
                " encode everything anew with --overwrite"
            )

    def _set_aside_outdated(self, plan: PackingPlan) -> None:
        record = LedgerHeader.read(self.folder)
        new = LedgerHeader(options=self._identity, plan=plan.digest, world=self.ranks.world)
        if record is not None and (record.plan, record.world) != (new.plan, new.world):
            set_aside(self.folder, generation=record.generation)
            new = replace(new, generation=record.generation + 1)
        elif record is not None:
            return
        new.write(self.folder)

    def review(self, plan: PackingPlan) -> Refusals:
        """Returns the samples that `plan` refuses; sets `cropped` to the loss by cropping.

        If the default split would leave train, val or test empty, it also changes `options.split`
        so that all samples go to train. Rank 0 notifies the user of the loss and of that change,
        and passes on the notices of the codec and the text encoder.
        """
        refusals, found = Refusals(), Counter[Split]()
        cropping = CropStatistics(others=self.gentler)
        for entry in plan.entries:
            if entry.refused:
                refusals.add(entry.source, entry.refused, entry.detail)
                continue
            found[self.options.split.split_of(entry.group)] += 1
            cropping.add(entry)
        self.cropped = cropping.summary
        line = crop_line(self.cropped)
        notices = [*([line] if line else []), *self.codec.notices, *self.text.notices]
        too_few = found and self.options.split.empty(found)
        if too_few and not self.options.split_is_given:
            self.options = replace(self.options, split=ALL_IN_TRAIN)
            notices.append(all_in_train_notice(found))
        if self.ranks.rank == 0:
            for notice in notices:
                self.notify(notice)
        return refusals

    def _check(self, refusals: Refusals, plan: PackingPlan) -> None:
        """Writes the list of refused samples; raises PrepError if there are too many."""
        if self.ranks.rank == 0:
            refusals.write(self.folder / REFUSED_NAME)
        refusals.check(total=plan.total, max_fraction=self.options.max_bad_fraction)

    def work(self, task: Task) -> BlockWorker:
        """A worker that does `task` with the source, codecs and options of this run."""
        return BlockWorker(
            source=self.source,
            codec=self.codec,
            text=self.text,
            sound=self.sound,
            task=task,
            batch_size=self.options.batch_size,
            decode_threads=self.options.decode_threads,
            verify=self.options.verify,
        )

    def _measure(self, plan: PackingPlan) -> None:
        """Sets the whitening of `codec`, and the scale of `sound`, if they depend on the dataset.

        Rank 0 measures them, unless they are given, and writes them to a file that all ranks read.
        """
        whitens, scales = self.codec.whitens_by_dataset, self._scales_sound
        if not (whitens or scales):
            return
        path = self.folder / LEDGER / WHITENING_NAME
        if self.ranks.rank == 0 and not path.exists():
            content = dict[str, Any]()
            if (whitens and self.whitening is None) or (scales and self.sound_scale is None):
                content = self._fitted(plan)
            if whitens and self.whitening is not None:
                content |= asdict(self.whitening)
            if scales and self.sound_scale is not None:
                content["sound_scale"] = self.sound_scale
            if content:
                write_atomically(path, json.dumps(content).encode())
        self.ranks.barrier()
        if path.exists():
            content = json.loads(path.read_bytes())
            if "mean" in content:
                whitening = Whitening(mean=tuple(content["mean"]), std=tuple(content["std"]))
                self.codec = replace(self.codec, whitening=whitening)
            if self.sound is not None and "sound_scale" in content:
                self.sound = replace(self.sound, scale=content["sound_scale"])

    @property
    def _scales_sound(self) -> bool:
        return self.sound is not None and self.sound.scales_by_dataset

    def _fitted(self, plan: PackingPlan) -> dict[str, Any]:
        """Measures whitening and sound scale on all readable clips; returns a dict for JSON.

        The result is the same for any number of workers.

        Raises:
            PrepError: too few clips can be read.
        """
        moments, heard = Moments(), Moments()
        refusals, size = Refusals(), self.options.block_size
        results = self.engine.run(self.work(Task.MEASURE), plan.blocks(size))
        with self.track(Task.MEASURE, plan.total, 0) as advance:
            for block, outcomes in zip(plan.blocks(size), results, strict=True):
                for line, outcome in zip(block, outcomes, strict=True):
                    if isinstance(outcome, RefusedResult):
                        source = Entry.from_line(line).source
                        refusals.add(source, outcome.reason, outcome.detail)
                        continue
                    # A latent with NaN or Inf is refused when it is encoded.
                    if outcome.video is not None and outcome.video.is_finite:
                        moments.merge(outcome.video)
                    if outcome.sound is not None:
                        heard.merge(outcome.sound)
                advance(len(block))
        self._check(refusals, plan)
        content = dict[str, Any]()
        if moments.count:
            content |= asdict(self.codec.fitted(moments).whitening)
        if self.sound is not None and self._scales_sound:
            content["sound_scale"] = self.sound.fitted(heard).scale
        return content

    def _encode(self, plan: PackingPlan) -> None:
        """Encodes and writes those of this rank's samples that its ledger does not list yet."""
        share = RankBlocks(plan=plan, size=self.options.block_size, ranks=self.ranks)
        writer = Writer(folder=self.folder, options=self.options, ranks=self.ranks)
        progress = writer.progress(share)
        if progress.samples == share.total and (self.folder / META).exists():
            return
        with (
            writer.resumed(progress),
            self.track(Task.ENCODE, share.total, progress.samples) as advance,
        ):
            todo = map(writer.without_earlier, share.after(progress.samples))
            results = self.engine.run(self.work(Task.ENCODE), todo)
            for block, outcomes in zip(share.after(progress.samples), results, strict=True):
                writer.write(block, outcomes)
                advance(len(block))

    def _finish(self, plan: PackingPlan) -> Summary:
        """Adds up what all ranks packed; rank 0 publishes the dataset.

        Raises:
            PrepError: too many samples were refused.
        """
        summary = summarize(self.folder, world=self.ranks.world, ignored=self.source.ignored)
        summary = replace(summary, cropped=self.cropped)
        self._check(summary.refusals, plan)
        if self.options.split_is_given:
            self.options.split.check_found(summary.samples)
        if self.ranks.rank == 0 and not (self.folder / META).exists():
            publish(
                self.folder,
                shards=summary.shards,
                card=self._card(summary) | sound_in_card(self.sound) | self._words(plan, summary),
                # Where the encoder needs pictures, each sample has a null text of its own.
                null_text=self.text.encode_all("") if self.text.reads_alone else {},
                made=MadeBy(command=self.command, pictures=self._pictures(plan, summary)),
            )
            remove_earlier(self.folder)
        self.ranks.barrier()
        return summary

    def _pictures(self, plan: PackingPlan, summary: Summary) -> tuple[tuple[str, bytes], ...]:
        """(caption, PNG file) of the first packed samples, for the dataset's README.md."""
        found = list[tuple[str, bytes]]()
        for entry in self._packed(plan, summary):
            if len(found) == PICTURES:
                break
            with suppress(RefusedError):  # the file may have changed since it was packed
                clip = self.source.read(replace(entry, keep=entry.keep[:1], sound=None))
                found.append((clip.caption, sample_picture(clip)))
        return tuple(found)

    def _words(self, plan: PackingPlan, summary: Summary) -> dict[str, Any]:
        split_of, packed = self.options.split.split_of, self._packed(plan, summary)
        captions = (e.caption for e in packed if split_of(e.group) is Split.TRAIN)
        return vocabulary(captions, self.text)

    def _packed(self, plan: PackingPlan, summary: Summary) -> Iterator[Entry]:
        refused = summary.refusals.sources
        return (one for one in plan.entries if not one.refused and one.source not in refused)

    def _card(self, summary: Summary) -> dict[str, Any]:
        codec, whitening = self.codec, self.codec.whitening
        return {
            "format_version": FORMAT_VERSION,
            "processor": {"name": codec.name, **codec.settings},
            "text_encoder": self.text.settings,
            "latent": {
                "channels": codec.channels,
                "stride": codec.stride,
                "temporal_stride": codec.temporal_stride,
                "dtype": str(codec.latent_dtype).removeprefix("torch."),
                "mean": whitening.mean,
                "std": whitening.std,
                "measured": summary.measured,
            },
            "splits": {
                str(split): {"samples": sum(counts.values()), "shards": len(counts)}
                for split, counts in summary.shards.items()
            },
            "sizes": summary.sizes,
            "sources": [self.source.name],
            "refused": summary.refused,
            "ignored": dict(summary.ignored),
            "notes": summary.notes,
            "cropped": summary.cropped,
            "psnr": summary.psnr,
            "settings": dict(self.settings),
            "license": self.options.license,
        }


def pack_dataset(source: Source, folder: Path, **given: Any) -> Summary:
    """Packs all of `source` into `folder`; `given` are further fields of `Packing`.

    Raises:
        PrepError: the user must change something; after any exception, there is no `.nv-meta`.
    """
    return Packing(source=source, folder=folder, **given).run()


def _counted(items: Iterable[Any], advance: Callable[[int], None]) -> Iterator[Any]:
    for item in items:
        yield item
        advance(1)

"""The number of packs in a pass over the data, forecast before the first step.

1. forecast_packs    how full packs become, from the lengths of some samples
   length_shares     how frequent each length is
2. passes_line       how often the run will see each sample
   fill_line         packs that stay partly empty, and settings that fill them
   route_lines       what a token route saves, and where it is known to harm
3. steps_of_epochs   `train.train_iters` from `train.epochs`
4. data_lines        the lines of a dry run about the data
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from megatron.energon.epathlib import EPath

from dit.bin_packing import MOST_IN_A_PASS, mean_fill
from dit.config import Balance, DatasetConfig, ModelConfig, Problems, RunConfig
from dit.config.sparsity import SHORT_SAMPLE
from dit.data.cook import Expected, size_in_pack
from dit.data.datasets import DatasetSplit, count_samples, data_paths, shards_of, train_leaves
from dit.data.preflight import SIDE_BY_SIDE, check_data, read_data_card
from dit.data.rejections import REMEDIES, DataError, SampleRefused
from dit.progress import brief, counted
from dit.sizing.activations import geometry_tokens
from dit.sizing.flops import forward_flops, work_of_packs

# Heads are read until the mean length is known so well, or so many: 0.1 ms each on a local disk.
_PRECISE, _AT_ONCE, _MOST = 0.0025, 1000, 8000
LEAST_FILL = 0.9
"""Fraction of a pack that must be filled on average, or a warning is given."""
FEW_SAMPLES = 32_000
"""Samples seen in training (with repetition) below which a run from scratch is called short.

Of the digits that the quickstart generates, 9% are recognised after 16,000 samples and 86% after
32,000 (docs/small_data.md).
"""


class Length(NamedTuple):
    """Tokens that a stored sample takes in a pack, with and without padding.

    A preference pair counts as one sample.
    """

    padded: int
    real: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths in tokens of the training samples of a dataset."""

    counts: Counter[Length]
    """Number of examined samples of each length."""
    usable: float
    """Fraction of the samples that fit the model and the pack capacity."""

    @property
    def mean(self) -> float:
        """Mean number of tokens of a sample, padding included."""
        return sum(n.padded * count for n, count in self.counts.items()) / self.counts.total()

    @property
    def real_part(self) -> float:
        """Fraction of the tokens that are not padding."""
        real = sum(n.real * count for n, count in self.counts.items())
        return real / self.counts.total() / self.mean

    def padded_to(self, multiple: int) -> Lengths:
        """Lengths of these samples if each is padded to a multiple of `multiple` tokens."""
        counts = Counter[Length]()
        for length, count in self.counts.items():
            counts[Length(-(-length.real // multiple) * multiple, length.real)] += count
        return replace(self, counts=counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackForecast:
    """Forecast of the packs of one pass through the training samples of a dataset."""

    samples: int
    packs: float
    fill: float
    """Fraction of the capacity that tokens without padding fill, over all packs."""
    lengths: Lengths

    @property
    def samples_a_pack(self) -> float:
        return self.samples * self.lengths.usable / self.packs


def forecast_packs(config: RunConfig) -> PackForecast | None:
    """The forecast of a run's packs, or None if the lengths of samples are unknown.

    They are unknown for mock data, blends, and remote shards whose card lists no sizes.

    Raises:
        DataError: none of the examined samples can be used.
    """
    leaves = train_leaves(config.dataset)
    if len(leaves) != 1:
        return None
    lengths = _lengths(leaves[0], Expected.of_training(config))
    if lengths is None:
        return None
    return _forecast(lengths, config.model, config.dataset, samples=count_samples(leaves[0]))


def _forecast(
    lengths: Lengths, model: ModelConfig, data: DatasetConfig, *, samples: int
) -> PackForecast:
    cost = None
    if data.balance is Balance.FLOPS_TARGET:
        work = work_of_packs(model, data)
        assert work is not None
        cost = lambda n: float(work.flops([n], [0]))  # noqa: E731
    padded, capacity = Counter[int](), data.task_encoder_seq_length
    for length, count in lengths.counts.items():
        padded[length.padded] += count
    fill = mean_fill(
        padded,
        capacity=capacity,
        buffer=data.packing_buffer_size,
        cost=cost,
        one_pass=min(samples, MOST_IN_A_PASS),
    )
    return PackForecast(
        samples=samples,
        packs=samples * lengths.usable * lengths.mean / (capacity * fill),
        fill=fill * lengths.real_part,
        lengths=lengths,
    )


def _lengths(leaf: DatasetSplit, expected: Expected) -> Lengths | None:
    """Lengths of the training samples of `leaf`; None if neither shards nor card have them.

    The card lists only the most frequent sizes, without texts and references.
    """
    if all(shard.path.is_local() for shard in shards_of(leaf)):
        return _read_lengths(leaf, expected)
    try:
        return _listed_lengths(read_data_card(leaf) or {}, expected)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None  # of another tool, or damaged: the check of the data names that


def _read_lengths(leaf: DatasetSplit, expected: Expected) -> Lengths | None:
    """Lengths of samples that are read from `leaf` in random order, until their mean is known.

    At most `_MOST` samples are read. None if `leaf` has no samples.

    Raises:
        DataError: none of the examined samples can be used.
    """
    total = count_samples(leaf)
    order = np.random.default_rng(0).choice(total, min(total, _MOST), replace=False)
    found, refused, looked = list[Length](), list[SampleRefused](), 0
    while looked < len(order):
        chosen = order[looked : looked + _AT_ONCE]
        for one in _read_sizes(leaf, np.sort(chosen), expected):
            if isinstance(one, SampleRefused):
                refused.append(one)
            else:
                found.append(one)
        looked += len(chosen)
        padded = np.array([length.padded for length in found], float)
        if found and padded.std() * math.sqrt(1 / looked - 1 / total) < _PRECISE * padded.mean():
            break
    if not found and refused:
        why = refused[0]
        raise DataError(
            f"{leaf.path}: none of {counted(looked, 'training sample')} that were looked at can be"
            f" used; the first: {why.reason} ({why.detail}); {REMEDIES[why.reason]}"
        )
    if not found:
        return None
    return Lengths(counts=Counter(found), usable=len(found) / looked)


def _read_sizes(
    leaf: DatasetSplit, indices: np.ndarray, expected: Expected
) -> Iterator[Length | SampleRefused]:
    """Yields a result for each of the ascending `indices` of samples in `leaf`.

    It is the length of the sample, or the reason why it is refused.
    """
    shards = [shard for shard in shards_of(leaf) if shard.count]
    ends = np.cumsum([shard.count for shard in shards])
    parts = np.split(indices, np.searchsorted(indices, ends[:-1]))
    firsts = [0, *ends[:-1].tolist()]
    jobs = [
        (str(shard.path.local_path()), (part - first).tolist())
        for shard, part, first in zip(shards, parts, firsts, strict=True)
    ]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        for sizes in threads.map(lambda job: [*_sizes_in_shard(job[0], job[1], expected)], jobs):
            yield from sizes


def _sizes_in_shard(
    path: str, samples: Sequence[int], expected: Expected
) -> Iterator[Length | SampleRefused]:
    from dit.data.energon.shard_reader import read_head  # mock data have no shards
    from dit.data.tar_reader import NotPlain, OpenShards, SampleLocation, ShardError

    layout = expected.layout
    shards = OpenShards(with_sound=layout.sound is not None)
    for sample in samples:
        try:
            start, length = shards.span(path, sample)
            found = read_head(SampleLocation(shards=shards, path=path, start=start, size=length))
            assert found is not None
            size = size_in_pack(found[2], expected)
        except SampleRefused as why:
            yield why
            continue
        except (NotPlain, ShardError, OSError):
            continue  # Energon's reader may read it; the check of the data names what is damaged
        real = size.shape[0] + layout.text_room(size.shape[1]) + size.sound
        yield Length(size.tokens, layout.copies * real)


def _listed_lengths(card: dict[str, Any], expected: Expected) -> Lengths | None:
    """Lengths from the sizes that `card` lists, without texts and references; None if none fits."""
    layout, latent = expected.layout, card["latent"]
    counts, lost = Counter[Length](), 0
    for one in card["sizes"]:
        grid = (
            (1 + (one["num_frames"] - 1) // latent["temporal_stride"]) // layout.patch_temporal,
            one["height"] // latent["stride"] // layout.patch_spatial,
            one["width"] // latent["stride"] // layout.patch_spatial,
        )
        tokens = layout.attended(grid, math.prod(grid))
        length = Length(layout.copies * layout.padded(grid, tokens), layout.copies * tokens)
        if 0 < length.padded <= expected.capacity:
            counts[length] += one["samples"]
        else:
            lost += one["samples"]
    known = counts.total()
    return Lengths(counts=counts, usable=known / (known + lost)) if known else None


def length_shares(config: RunConfig) -> dict[int, float]:
    """Frequency of each number of tokens among samples, as a fraction summed over datasets.

    All datasets have equal weight, so the frequencies add up to the number of datasets. The two
    samples of a preference pair count separately. Text counts if it takes room in packs. Empty for
    mock data, and for remote shards whose cards list no sizes.
    """
    shares, expected = defaultdict[int, float](float), Expected.of_training(config)
    for leaf in dict.fromkeys(train_leaves(config.dataset)):
        with suppress(DataError):  # the check of the data names that
            if lengths := _lengths(leaf, expected):
                for length, count in lengths.counts.items():
                    shares[length.real // expected.layout.copies] += count / lengths.counts.total()
    return shares


def passes_line(config: RunConfig, forecast: PackForecast | None) -> str:
    """Sentence on how often each sample is seen; empty if `forecast` is None.

    If mock data replace `dataset.path`, the sentence says instead that the path is not read.
    """
    if config.dataset.mock and config.dataset.path:
        return f"mock data: dataset.path={config.dataset.path} is not read (dataset.mock=true)"
    if forecast is None:
        return ""
    packs = config.train.train_iters * config.train.global_batch_size
    start = config.checkpoint
    is_new = not (config.lora.enabled or start.load or start.load_hf)
    few = is_new and packs * forecast.samples_a_pack < FEW_SAMPLES
    hint = "; few for a run from scratch: docs/small_data.md" if few else ""
    return (
        f"{config.train.train_iters:,} steps see each of the {forecast.samples:,} training"
        f" samples about {brief(packs / forecast.packs)} times"
        f" (about {brief(forecast.samples_a_pack)} in a pack, {forecast.fill:.0%} full){hint}"
    )


def fill_line(config: RunConfig, forecast: PackForecast | None) -> str:
    """A warning that packs stay partly empty, with settings that fill them; else empty."""
    if forecast is None or forecast.fill >= LEAST_FILL:
        return ""
    better = []
    for name, value in _other_settings(config.dataset, forecast.lengths):
        lengths = forecast.lengths
        with suppress(Problems):  # the layout may ask for another value
            other = replace(config, dataset=replace(config.dataset, **{name: value}))
            if name == "sample_multiple":
                lengths = lengths.padded_to(value)
            fill = _forecast(lengths, other.model, other.dataset, samples=forecast.samples).fill
            if fill > forecast.fill + 0.02:
                better.append(f"dataset.{name}={value} would fill {fill:.0%}")
    how = "; ".join(better) or "no capacity near this one suits the lengths of the samples better"
    return f"WARNING: samples will fill {forecast.fill:.0%} of the packs; {how}"


def route_lines(config: RunConfig, forecast: PackForecast | None) -> list[str]:
    """Lines about the run's token route: FLOPs that it saves, and where it may do harm.

    Empty without a route.
    """
    model, mixture = config.model, config.dataset.mock_samples
    route = model.token_route
    if route is None:
        return []
    tokens = None if forecast is None else round(forecast.lengths.mean * forecast.lengths.real_part)
    text, aside = 0, " without text"
    if config.dataset.mock:
        total = sum(one.weight for one in mixture)
        tokens = round(sum(geometry_tokens(model, one) * one.weight for one in mixture) / total)
        text, aside = round(sum(one.text_length * one.weight for one in mixture) / total), ""
    about = {"tokens": [tokens or SHORT_SAMPLE], "text": [text]}
    part = forward_flops(model, **about) / forward_flops(model.with_all_tokens(), **about)
    lines = [
        f"token routing: layers {route.first} to {route.last} of {model.all_layers} see"
        f" {route.kept} of each {route.run} tokens in training, for about {part:.0%} of the"
        f" operations of a step{aside}"
    ]
    if tokens is not None and tokens < SHORT_SAMPLE:
        lines.append(
            f"WARNING: samples have about {tokens} tokens, and token routing has been seen to harm"
            f" below {SHORT_SAMPLE}; leave model.route_from and model.route_to out"
        )
    if config.lora.enabled:
        lines.append(
            "token routing with adapters: the frozen layers have never seen a part of the tokens,"
            " so that the loss starts higher; rates above 0.35 slow adapters down"
        )
    return lines


def _other_settings(data: DatasetConfig, lengths: Lengths) -> Iterator[tuple[str, int]]:
    """Yields pairs (key of `dataset`, value) with which packs may become fuller."""
    if lengths.real_part < LEAST_FILL:  # padding is in the way
        halves = [data.sample_multiple >> n for n in range(1, 12)]
        fits = (n for n in halves if n and lengths.padded_to(n).real_part >= LEAST_FILL)
        yield "sample_multiple", next(fits, 1)
    capacity, longest = data.task_encoder_seq_length, max(lengths.counts).padded
    usual = max(lengths.counts, key=lengths.counts.__getitem__).padded
    below = capacity // usual * usual
    for other in (below, below + usual, 2 * capacity):
        if longest <= other != capacity:
            yield "task_encoder_seq_length", other
    yield "packing_buffer_size", 4 * data.packing_buffer_size


def steps_of_epochs(config: RunConfig) -> RunConfig:
    """A copy of `config` with `train_iters` computed from `train.epochs`, if that is set.

    Raises:
        Problems: the number of samples in a pack is unknown, or the other keys do not fit that
            number of steps.
        DataError: as `check_data`.
    """
    if config.train.epochs is None:
        return config
    forecast = forecast_packs(config)
    if forecast is None:
        check_data(config)  # which may say more
        raise Problems(
            [
                f"train.epochs={config.train.epochs:g} counts passes through the samples of one"
                " dataset on this machine, or of one whose dataset_card.json lists their sizes"
                " (not mock data or a blend); set train.train_iters"
            ]
        )
    packs = config.train.epochs * forecast.packs
    steps = max(1, math.ceil(packs / config.train.global_batch_size))
    try:
        return replace(config, train=replace(config.train, train_iters=steps))
    except Problems as error:
        named = f"train.epochs={config.train.epochs:g} is {counted(steps, 'step')} of these data"
        raise Problems([f"{named}: {problem}" for problem in error.problems]) from None


def absent_data(dataset: DatasetConfig) -> str:
    """Path of the first dataset that is not on this machine; empty if all are."""
    paths = map(EPath, data_paths(dataset))
    return next((str(path) for path in paths if not (path.is_dir() or path.is_file())), "")


def data_lines(config: RunConfig) -> str:
    """Lines of a dry run, as comments, about data and token route; empty without either.

    A missing folder is no error, because another machine may train.

    Raises:
        DataError: as `check_data`.
    """
    rows, forecast = list[tuple[str, str]](), None
    if data_paths(config.dataset) and not config.dataset.mock:
        if absent := absent_data(config.dataset):
            rows.append(("shards", f"NOT CHECKED: {absent} does not exist here"))
        else:
            rows.append(("shards", str(check_data(config))))
            forecast = forecast_packs(config)
            rows.append(("passes", passes_line(config, forecast)))
            rows.append(("packs", fill_line(config, forecast)))
    rows += [("route", line) for line in route_lines(config, forecast)]
    return "".join(f"# {name:<14}{said}\n" for name, said in rows if said)

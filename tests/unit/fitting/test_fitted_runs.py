"""train.yaml beside shards: valid for every kind, sized to the minutes, honest about them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.cli.parser import main as pack
from data_prep.writing.dataset_folder import check_folder
from dit.config import RunConfig
from dit.config_loading import load_config
from dit.data.rejections import DataError
from dit.fitting import program
from dit.fitting.corpus import Corpus
from dit.fitting.program import fit
from dit.fitting.proposal import Proposal, by_samples, choose, drafts
from dit.fitting.rules import LAST_LEVEL, LEARNED_GUIDANCE, NAMED, SMALL, noise_levels
from dit.fitting.step_time import measured_seconds, planned_seconds
from dit.fitting.train_yaml import file_text
from dit.sizing.flops import forward_flops
from recipes.runs import RECIPES

DRAWINGS = Corpus(
    folder=Path("/data/drawings"),
    samples=1250,
    has_val=True,
    channels=48,
    text_width=256,
    text_rows=4.0,
    shapes=((1, 8, 8),) * 20,
    captions=1.0,
    side=32.0,
    colours=3,
    basis="dct",
)
LATENTS = replace(  # of a VAE, of two sizes
    DRAWINGS,
    channels=16,
    text_width=4096,
    text_rows=77.0,
    shapes=((1, 64, 48), (1, 48, 64)),
    side=443.0,
    colours=None,
    basis="",
)
DIGITS = replace(DRAWINGS, channels=4, shapes=((1, 4, 4),), side=8.0, colours=1, captions=0.0)
CLIPS = replace(DIGITS, shapes=((9, 8, 8),), side=16.0)
ODD = replace(DRAWINGS, shapes=((1, 3, 5), (1, 2, 7)), samples=3, has_val=False)
KINDS = {"drawings": DRAWINGS, "latents": LATENTS, "digits": DIGITS, "clips": CLIPS, "odd": ODD}


def chosen(corpus: Corpus, *, minutes: float, seconds: float = 0.2) -> Proposal:
    """The run on a machine whose smallest network takes so many seconds a step."""
    ladder = drafts(corpus, gpu=False)
    cost = {draft: 4.0**i for i, draft in enumerate(ladder)}
    return choose(corpus, ladder, minutes=minutes, seconds=lambda draft: seconds * cost[draft])


def read(corpus: Corpus, found: Proposal, folder: Path) -> RunConfig:
    """The configuration that pretrain_dit.py reads of the written file."""
    place = folder / "train.yaml"
    place.write_text(file_text(corpus, found, machine="two cores"))
    return load_config(RECIPES["dit_xl"](), config_file=place)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_a_valid_run_for_each_kind_of_shards(kind: str, tmp_path: Path) -> None:
    corpus = KINDS[kind]
    found = chosen(corpus, minutes=40)
    config, draft = read(corpus, found, tmp_path), found.draft
    assert config.model.in_channels == corpus.channels
    assert config.model.crossattn_emb_size == corpus.text_width
    assert config.train.train_iters == found.steps
    assert config.dataset.path == str(corpus.folder)
    assert config.checkpoint.save == f"{corpus.folder}_run"
    assert config.dataset.use_train_split_for_val is not corpus.has_val
    lengths = corpus.lengths(config.model.patch_spatial)
    assert config.dataset.task_encoder_seq_length >= max(lengths)  # every sample fits
    assert corpus.divides(config.model.patch_spatial) and min(lengths) > 0
    assert all(length % draft.multiple == 0 for length in lengths)  # nothing is padding
    assert all(
        "#" in line for line in (tmp_path / "train.yaml").read_text().split("\n") if ": " in line
    )


def test_tokens_and_noise_are_those_that_were_measured() -> None:
    draft = drafts(DRAWINGS, gpu=False)[0]
    assert (draft.patch, draft.tokens, draft.capacity, draft.samples) == (2, 16, 1024, 64)
    assert drafts(DIGITS, gpu=False)[0].patch == 1  # 16 tokens as they are
    assert noise_levels(colours=1, basis="pixels", side=8, own_captions=False).mean == -0.4
    assert noise_levels(
        colours=1, basis="pixels", side=32, own_captions=False
    ).mean == pytest.approx(1.0, abs=0.03)
    at_32 = noise_levels(colours=3, basis="dct", side=32, own_captions=True).mean
    at_64 = noise_levels(colours=3, basis="dct", side=64, own_captions=True).mean
    assert at_64 - at_32 == pytest.approx(math.log(2), abs=0.06)


def test_steps_follow_the_minutes() -> None:
    runs = [chosen(DRAWINGS, minutes=m, seconds=3.0) for m in (5, 10, 20, 40)]
    assert [run.draft.size for run in runs] == [SMALL[0]] * 4  # the slow machine has one choice
    steps = [run.steps for run in runs]
    assert [b - 2 * a for a, b in pairwise(steps)] == [0, 0, 0]
    assert runs[0].minutes == pytest.approx(5, rel=0.02)
    assert runs[-1].passes == pytest.approx(steps[-1] * 64 / 1250)


def test_the_network_grows_with_the_time_and_keeps_its_passes() -> None:
    times = (1, 8, 20, 60, 480, 2000)
    runs = [chosen(DRAWINGS, minutes=m, seconds=0.05) for m in times]
    widths = [run.draft.size.width for run in runs]
    assert widths == sorted(widths) and set(widths) == {128, 192, 256, 384}
    for run in runs:
        assert run.passes >= 140 or run.draft.size == SMALL[0]


FLAT = (0.30, 0.34, 0.48, 1.3, 9.0)  # as where calls and not products take most of a step


@pytest.mark.parametrize(
    ("minutes", "size", "measured"),
    [
        (1, 0, [2, 0]),
        (16, 0, [2, 0, 1]),
        (24, 1, [2, 0, 1]),
        (40, 2, [2, 3]),  # the last would take minutes to measure
        (100, 3, [2, 3, 4]),
        (1000, 4, [2, 3, 4]),
    ],
)
def test_the_ladder_of_networks_is_bisected(minutes: float, size: int, measured: list[int]) -> None:
    ladder, asked = drafts(DRAWINGS, gpu=False), list[int]()
    taken = dict(zip(ladder, FLAT, strict=True))

    def seconds(draft: program.Draft) -> float:
        asked.append(ladder.index(draft))
        return taken[draft]

    found = choose(DRAWINGS, ladder, minutes=minutes, seconds=seconds)
    assert (found.draft.size, found.seconds) == (SMALL[size], FLAT[size]) and asked == measured
    enough = [int(minutes * 54 / one) * 64 / 1250 >= 140 for one in FLAT]
    assert size == max((number for number in range(5) if enough[number]), default=0)
    assert (found.passes >= 140) is any(enough)


def test_a_run_that_cannot_succeed_is_warned_of() -> None:
    def said(corpus: Corpus, minutes: float) -> str:
        return " ".join(chosen(corpus, minutes=minutes, seconds=0.5).warnings)

    assert "too few for recognisable results" in said(DRAWINGS, 2)
    assert "times as many minutes" in said(DRAWINGS, 2)
    assert "many captions will give a wrong picture" in said(DRAWINGS, 16)
    assert said(DRAWINGS, 40) == ""
    assert "32,000" in said(DIGITS, 1) and said(DIGITS, 8) == ""


def test_a_named_size_is_planned_for_a_gpu(tmp_path: Path) -> None:
    ladder = drafts(LATENTS, gpu=True)
    assert [draft.size for draft in ladder] == list(NAMED)
    many = replace(LATENTS, samples=300_000)

    def seconds(draft: program.Draft) -> float:
        found = planned_seconds(program.configuration(LATENTS, draft), "NVIDIA H100 80GB HBM3")
        assert found is not None and 0 < found < 60
        return found

    few, large = (by_samples(one, ladder, seconds=seconds) for one in (LATENTS, many))
    assert (few.draft.size.name, large.draft.size.name) == ("dit_s", "dit_l")
    assert few.passes == pytest.approx(140, rel=0.02) and few.minutes < large.minutes
    config = read(many, large, tmp_path)
    assert (config.model.name, str(config.model.precision)) == ("dit_l", "bf16")
    assert planned_seconds(config, "Imagined 9000") is None


def drawings(folder: Path, count: int) -> Path:
    """Pictures of 32 x 32 pixels, each with a caption of its own."""
    folder.mkdir()
    for number in range(count):
        picture = np.full((32, 32, 3), 255, np.uint8)
        picture[number % 20 : number % 20 + 8, 4:20] = (7 * number % 256, 90, 3 * number)
        Image.fromarray(picture).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"drawing {number}")
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    source, out = drawings(tmp_path / "in", 30), tmp_path / "data"
    words = ["image", "--image_dir", source, "--output_dir", out, "--num_workers", 0]
    assert pack([str(word) for word in words]) == 0
    return out


def test_a_rare_size_of_either_split_fits_the_run(tmp_path: Path, monkeypatch) -> None:
    source, out = drawings(tmp_path / "in", 12), tmp_path / "data"
    words = ["image", "--image_dir", source, "--output_dir", out, "--num_workers", 0]
    words += ["--split", "0.5,0.5,0", "--size_multiple", 4]
    held_out, trained_on = 5, 4  # by the hashes of their names
    Image.new("RGB", (96, 32)).save(source / f"{held_out}.png")
    Image.new("RGB", (32, 68)).save(source / f"{trained_on}.png")
    assert pack([str(word) for word in words]) == 0
    monkeypatch.setattr("dit.fitting.corpus._LOOKED_AT", 1)
    corpus, found = fit(out, minutes=5, seconds=lambda _: 1.0)
    assert corpus.largest == (1, 17, 24)
    assert corpus.held_out.count((1, 8, 24)) == corpus.shapes.count((1, 17, 8)) == 1
    config = read(corpus, found, tmp_path)
    assert list(config.model.max_size) == [1, 17, 24]
    assert config.model.patch_spatial == 1
    assert config.dataset.task_encoder_seq_length >= 8 * 24


def clock(step: float) -> Callable[[], float]:
    """Reads `step` seconds more each time."""
    now = iter(np.arange(0, 1e6, step))
    return lambda: float(next(now))


def test_real_steps_are_timed_by_the_clock(shards: Path) -> None:
    asked = list[RunConfig]()

    def seconds(config: RunConfig) -> float:
        asked.append(config)
        return measured_seconds(config, clock=clock(8.0))

    runs = [fit(shards, minutes=5, seconds=seconds)[1]]
    runs.append(fit(shards, minutes=10, seconds=lambda _: runs[0].seconds)[1])
    assert [run.seconds for run in runs] == [2.0, 2.0]  # four steps in eight seconds
    assert runs[1].steps == 2 * runs[0].steps == 270
    assert asked[0].dataset.path == str(shards)  # with the packs that will be trained on


def test_a_long_pack_is_reckoned_from_a_short_one(shards: Path) -> None:
    corpus, _ = fit(shards, minutes=1, seconds=lambda _: 1.0)
    long = replace(corpus, shapes=((1, 256, 256),))
    config = program.configuration(long, drafts(long, gpu=False)[0])
    model, tokens = config.model, 64 * 64
    ratio = forward_flops(model, tokens=[tokens], text=[round(long.text_rows)])
    assert config.dataset.task_encoder_seq_length == tokens
    config = replace(config, dataset=replace(config.dataset, task_encoder_seq_length=4 * tokens))
    ratio *= 4 / forward_flops(model, tokens=[1024], text=[round(long.text_rows)])
    assert measured_seconds(config, clock=clock(4.0)) == pytest.approx(ratio)


def test_the_command_writes_the_file_and_names_it(shards: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(program, "measured_seconds", lambda _: 1.0)
    assert program.main([str(shards), "--minutes", "10"]) == 0
    said = capsys.readouterr().out
    assert f"--config-file {shards / 'train.yaml'}" in said.splitlines()[-1]
    assert "fitted: 540 steps in about 10 minutes" in said
    config = load_config(RECIPES["dit_xl"](), config_file=shards / "train.yaml")
    assert config.train.train_iters == 540
    for wrong in ("0", "1e+09", "nan"):
        why = re.escape(f"--minutes {wrong} must be more than 0 and at most 1,000,000")
        with pytest.raises(ValueError, match=why):
            program.main([str(shards), "--minutes", wrong])


def test_a_file_that_somebody_has_changed_is_put_aside(shards: Path, capsys, monkeypatch) -> None:
    """And packing again knows it as one of the dataset."""
    monkeypatch.setattr(program, "measured_seconds", lambda _: 1.0)
    place = shards / "train.yaml"
    place.unlink(missing_ok=True)
    for minutes in ("20", "10"):
        program.main([str(shards), "--minutes", minutes])
    assert not list(shards.glob("train_*"))
    for number, end in ((1, "# mine\n"), (2, "# again\n")):
        place.write_text(place.read_text() + end)
        program.main([str(shards), "--minutes", "10"])
        aside = shards / f"train_{number}.yaml"
        assert f"; your old file is now {aside.name}" in capsys.readouterr().out
        assert aside.read_text().endswith(end) and end not in place.read_text()
        assert load_config(RECIPES["dit_xl"](), config_file=aside).train.train_iters == 540
        assert aside in check_folder(shards, overwrite=True)


def test_shards_that_are_not_there(shards: Path) -> None:
    with pytest.raises(DataError):
        fit(shards.parent / "nothing", minutes=1)


def test_pictures_named_by_their_captions_go_without_guidance_once_they_are_learned(
    tmp_path: Path,
) -> None:
    def of(corpus: Corpus, minutes: float) -> tuple[float, float | None]:
        config = read(corpus, chosen(corpus, minutes=minutes, seconds=0.5), tmp_path)
        return config.objective.sigma_min, config.validation.guidance

    assert of(DRAWINGS, 40) == (LAST_LEVEL, LEARNED_GUIDANCE)
    assert of(DRAWINGS, 4) == (LAST_LEVEL, None)  # 2.5, unless the network embeds its own
    # Many pictures have each caption, and what is expected of one is their mean.
    assert of(DIGITS, 40) == (0.002, None)

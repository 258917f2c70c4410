"""Edit pairs of the processor `flux`, with the padding of T5, as a run of Kontext reads them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.cli.parser import main
from dit.config import DatasetConfig, RunConfig, TextPadding
from dit.data import DataError, build_train_loader, check_data, null_inputs
from dit.models.registry import family_named
from tests import tiny_pipelines
from tests.media_files import image
from tests.packs import run_config

ROWS = 24


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pairs whose control pictures keep their own sizes, and the dataset made of them."""
    folder = tmp_path_factory.mktemp("kontext")
    model = tiny_pipelines.flux(folder / "model")
    for number, side in enumerate((16, 24, 32)):
        image(folder / f"after/{number}.png", 16, 16, seed=number)
        image(folder / f"before/{number}.png", side, 16, seed=10 + number)
    options = ["--image_dir", folder / "after", "--control_dir", folder / "before"]
    options += ["--reference_size", "own", "--processor", "flux", "--model_name", model]
    options += ["--text_padding", "keep", "--max_sequence_length", ROWS, "--num_workers", 0]
    options += ["--output_dir", folder / "data", "--split", "1,0,0"]
    assert main(["image", *map(str, options)]) == 0
    return folder / "data"


def kontext(root: Path, **changes: Any) -> RunConfig:
    family = family_named("flux")
    keys = {**family.sizes["flux1_kontext"], **family.tiny["flux1_kontext"], "pooled_size": 16}
    model = family.config(name="custom", **{**keys, **changes})
    data = DatasetConfig(
        path=str(root),
        task_encoder_seq_length=512,
        packing_buffer_size=3,
        num_workers=0,
        use_train_split_for_val=True,
    )
    config = run_config()
    return replace(
        config, model=model, dataset=data, objective=replace(config.objective, name="flow")
    )


def test_a_run_reads_texts_with_padding_and_references(root: Path) -> None:
    config = kontext(root)
    (note,) = check_data(config).notes
    assert note.startswith(f"captions with the padding of their encoder, {ROWS} rows each")
    loader = build_train_loader(config, rank=0, world_size=1)
    seen = set[Any]()
    for pack in islice(loader, 8):  # in an order of their own
        assert pack.text_starts == tuple(ROWS * n for n in range(pack.num_samples + 1))
        # The tiny VAE halves a side once, and a token has two cells along it.
        assert set(pack.grids) == {(1, 4, 4)}
        assert int(pack.is_target_T.sum()) == pack.num_samples * 16
        seen |= set(pack.references)
    loader.close()
    assert seen == {((1, 4, 4),), ((1, 4, 6),), ((1, 4, 8),)}
    null = null_inputs(config, torch.device("cpu"))
    assert len(null["text"]) == ROWS  # the empty caption follows the same rule


def test_a_run_of_the_other_rule_is_refused(root: Path) -> None:
    with pytest.raises(DataError, match=r"set model\.text_pad_to=stored"):
        check_data(kontext(root, text_pad_to=None))
    assert kontext(root).model.text_pad_to is TextPadding.STORED

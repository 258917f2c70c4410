"""The benchmark of the loader runs, and its ways of reading read the same samples."""

import json

import pytest
import torch

from dit.data import build_train_loader
from dit.data.cook import Expected
from recipes.benchmark_loader import (
    KINDS,
    config_of,
    main,
    read_in_order,
    read_packed,
    read_plainly,
    write,
)


def test_all_ways_read_all_samples(tmp_path):
    kind = KINDS[0]
    write(tmp_path, kind, 200)
    config = config_of(tmp_path, kind, buffer=64)
    assert read_plainly(tmp_path, Expected.of(config)) == 200
    assert read_in_order(tmp_path, Expected.of(config)) == 192  # in packs of 64
    loader = build_train_loader(config, rank=0, world_size=1)
    assert read_packed(loader, 192) == 192
    assert torch.equal(next(loader).text_LE[:8], next(loader).text_LE[8:16])
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_tables(tmp_path, capsys, workers):
    small = ["--samples", "70", "13", "--repeats", "1", "--folder", str(tmp_path)]
    small += ["--workers", str(workers)]
    main([*small, "--buffer", "8", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["payload"] for row in found["rates"]] == ["4 kB", "400 kB"]
    assert all(value > 0 for row in found["rates"] for value in list(row.values())[1:])
    said = capsys.readouterr().out
    assert "ours / plain" in said and ("per second" in said) == (workers > 0)

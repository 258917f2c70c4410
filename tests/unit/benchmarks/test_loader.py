"""The benchmark of the loader runs, and its ways of reading read the same samples."""

import json

import torch
from measuring.loader import (
    KINDS,
    config_of,
    read_in_order,
    read_packed,
    read_plainly,
    write_dataset,
)

from benchmarks.benchmark_loader import main
from dit.data import build_train_loader
from dit.data.cook import Expected


def test_all_ways_read_all_samples(tmp_path):
    kind = KINDS[0]
    write_dataset(tmp_path, kind, 200)
    config = config_of(tmp_path, kind, buffer=64)
    assert read_plainly(tmp_path, Expected.of(config)) == 200
    assert read_in_order(tmp_path, Expected.of(config)) == 192  # in packs of 64
    loader = build_train_loader(config, rank=0, world_size=1)
    assert read_packed(loader, 192) == 192
    assert torch.equal(next(loader).text_LE[:8], next(loader).text_LE[8:16])
    loader.close()


def test_the_tables(tmp_path, capsys):
    small = ["--samples", "70", "13", "--repeats", "1", "--folder", str(tmp_path)]
    small += ["--workers", "0", "1"]
    main([*small, "--buffer", "8", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    kinds = [(row["payload"], row["workers"]) for row in found["rates"]]
    assert kinds == [("4 kB", 0), ("4 kB", 1), ("400 kB", 0), ("400 kB", 1)]
    assert all(value > 0 for row in found["rates"] for value in list(row.values())[2:])
    assert "Samples per second" in capsys.readouterr().out

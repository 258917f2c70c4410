"""Every number that a key can be given is accepted with a sense, or refused by the key's name."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from dit.config import Problems, RunConfig, TrainConfig
from dit.config_loading import ConfigError, load_config
from dit.config_loading.schema import Schema, hints, item_type, record_type
from dit.config_loading.settings import Merged
from dit.config_loading.validate import checked_config, plain
from dit.models.dit.family import DitConfig
from dit.sizing.describe import describe
from dit.sizing.memory import check_memory
from tests.packs import run_config

SCHEMA = Schema(DitConfig)
ODD = [math.inf, -math.inf, math.nan, 1e308, -1e308, 1e-320, 2**64, 2**40, -(2**64), -1, 0]
SENSIBLE = (2**40, -1, 0)  # to some key


def is_number(kind: object) -> bool:
    return kind in (int, float) or any(part in (int, float) for part in get_args(kind))


def numbers() -> list[tuple[str, str, object]]:
    """(group, key, what stands for the number in a value of the key) of every number there is."""
    found: list[tuple[str, str, object]] = []
    for key in SCHEMA.all_keys():
        kind, record = SCHEMA.type_of(key), record_type(SCHEMA.type_of(key))
        group, _, name = key.partition(".")
        if record is not None:
            found += [
                (
                    group,
                    name,
                    {"path": "a", one: "NUMBER"} if "path" in hints(record) else {one: "NUMBER"},
                )
                for one, item in hints(record).items()
                if is_number(item)
            ]
        elif is_number(kind) or is_number(item_type(kind, 0)):
            found.append((group, name, "NUMBER" if is_number(kind) else ["NUMBER", 1, 1]))
    return found


def filled(value: object, number: float) -> object:
    if isinstance(value, dict):
        return [{name: number if one == "NUMBER" else one for name, one in value.items()}]
    if isinstance(value, list):
        return [number if one == "NUMBER" else one for one in value]
    return number


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_an_odd_number_is_refused_by_name_or_has_a_sense(odd: float) -> None:
    for group, name, place in numbers():
        tree = plain(run_config())
        tree["dataset"]["mock"] = True
        tree[group][name] = filled(place, odd)
        config, problems = checked_config(
            Merged(tree=tree, origins={}), plain(run_config()), SCHEMA
        )
        if config is not None:
            ranks = config.model.model_parallel_size
            try:
                check_memory(config, world_size=ranks)
                describe(config, world_size=ranks)
            except Problems as error:
                problems = error.problems
        field = next(iter(reversed(place))) if isinstance(place, dict) else name
        if problems:
            assert any(field in problem for problem in problems), (field, problems)
        else:
            assert odd in SENSIBLE, f"{group}.{name} takes {odd}"


def test_the_walk_meets_every_group() -> None:
    found = {(group, name) for group, name, _ in numbers()}
    for one in ("model.rope_scale", "optimizer.lr", "rng.seed", "dataset.blend"):
        assert tuple(one.split(".")) in found
    assert len(found) > 70


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        (["model.hidden_size=1099511627776"], "hidden_size=1099511627776 must be at most 131072"),
        (["model.mlp_ratio=.inf"], "mlp_ratio=inf must be finite"),
        (["optimizer.lr=.inf"], "lr=inf must be finite"),
        (["rng.seed=18446744073709551616"], "seed=18446744073709551616 must be at most 922337"),
        (["ddp.bucket_size=0"], "bucket_size=0 must be at least 1"),
    ],
)
def test_the_remedy_is_named(tokens: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(run_config(), overrides=tokens)
    (problem,) = caught.value.problems
    assert named in problem


def test_sizes_whose_product_fits_no_device_are_refused() -> None:
    wide = DitConfig(hidden_size=2**17, num_attention_heads=2**10, num_layers=10_000)
    with pytest.raises(Problems, match=r"model.hidden_size=131072, .* parameters: .* TiB a device"):
        check_memory(RunConfig(model=wide, train=TrainConfig(global_batch_size=1)), world_size=1)
    long = load_config(run_config(), overrides=["dataset.task_encoder_seq_length=2147483632"])
    with pytest.raises(Problems, match="task_encoder_seq_length=2147483632 tokens of"):
        check_memory(long, world_size=1)

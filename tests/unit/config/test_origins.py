"""Where a value that is wrong was written."""

from __future__ import annotations

import pytest

from dit.config_loading.validate import _origin

ORIGINS = {"model": "recipe", "dataset.blend.0.path": "run.yaml", "train.lr": "command line"}


@pytest.mark.parametrize(
    ("place", "origin"),
    [
        (("train", "lr"), "command line"),
        (("model", "num_layers"), "recipe"),  # of the group that it stands in
        (("dataset", "blend"), "run.yaml"),  # of what stands in it
        (("dataset", "blend", 0), "run.yaml"),
        (("dataset", "ble"), "recipe"),
    ],
)
def test_the_nearest_place_is_named(place, origin):
    assert _origin(place, ORIGINS) == origin

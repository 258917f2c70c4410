"""A path means one checkpoint, or an error that says which to take instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from dit.checkpoint_paths import CheckpointError, find_checkpoint, saved_config
from dit.config_loading import save_config
from tests.packs import run_config

FILES = ("metadata.json", ".metadata", "config.yaml", "null_text.safetensors")


def _run(folder: Path, *steps: int, latest: str | None = None) -> Path:
    """A run folder; its checkpoints are whole by name only."""
    for step in steps:
        place = folder / f"checkpoints/step_{step:08d}"
        place.mkdir(parents=True)
        for name in FILES:
            (place / name).touch()
    if latest is not None:
        (folder / "checkpoints/LATEST").write_text(latest)
    (folder / "config.yaml").touch()  # a run folder has one as well
    return folder / "checkpoints"


def test_latest_decides_and_not_the_number(tmp_path):
    places = _run(tmp_path, 3, 6, latest="step_00000003\n")
    assert find_checkpoint(tmp_path) == places / "step_00000003"


@pytest.mark.parametrize("latest", [None, "step_00000006"])
def test_a_run_killed_before_its_first_pointer_goes_on(tmp_path, latest):
    places = _run(tmp_path, 3, 6, latest=latest)
    for path in (tmp_path, places, places / "LATEST"):
        assert find_checkpoint(path) == places / "step_00000006"


def test_a_copy_of_a_checkpoint_under_another_name_is_none_of_the_run(tmp_path):
    places = _run(tmp_path, 3, 6, latest=None)
    (places / "step_00000006").rename(places / "step_00000006_good")
    assert find_checkpoint(tmp_path) == places / "step_00000003"


def test_a_run_folder_may_have_any_name(tmp_path):
    places = _run(tmp_path / "step_by_step", 3, latest="step_00000003")
    assert find_checkpoint(tmp_path / "step_by_step") == places / "step_00000003"
    (tmp_path / "step_2").mkdir()
    assert find_checkpoint(tmp_path / "step_2") is None


@pytest.mark.parametrize("missing", FILES)
def test_an_incomplete_checkpoint_names_what_it_lacks_and_the_next_best(tmp_path, missing):
    places = _run(tmp_path, 3, 6, latest="step_00000006")
    (places / "step_00000006" / missing).unlink()
    for path in (tmp_path, places / "step_00000006"):
        with pytest.raises(CheckpointError) as error:
            find_checkpoint(path)
        assert f"step_00000006 has no {missing}; write step_00000003 into" in str(error.value)
        assert str(places / "LATEST") in str(error.value)


def test_without_another_checkpoint_a_new_run_is_advised(tmp_path):
    places = _run(tmp_path, 3, latest="step_00000003")
    (places / "step_00000003/metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"no other checkpoint .* another checkpoint.save"):
        find_checkpoint(tmp_path)


def test_a_configuration_that_is_cut_short_is_damage(tmp_path):
    save_config(run_config(), tmp_path / "config.yaml")
    assert saved_config(tmp_path) == run_config()
    whole = (tmp_path / "config.yaml").read_bytes()
    (tmp_path / "config.yaml").write_bytes(whole[: whole.index(b"model:") + 20])
    with pytest.raises(CheckpointError, match=r"config.yaml cannot be read, .* damaged"):
        saved_config(tmp_path)


def test_a_strangers_configuration_of_nested_aliases_is_refused_at_once(tmp_path):
    rows = [
        "a0: &a0 [x]",
        *(f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]" for n in range(1, 30)),
    ]
    (tmp_path / "config.yaml").write_text("\n".join(rows))
    with pytest.raises(CheckpointError, match="aliases, which no run writes"):
        saved_config(tmp_path)

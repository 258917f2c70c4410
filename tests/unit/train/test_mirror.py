"""Copies of checkpoints in an object store: whole after any kill, and the way back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dit.checkpoint_paths import CheckpointError, changed_files, parse_manifest, write_manifest
from dit.config import CheckpointConfig, RunConfig
from dit.config_loading import ConfigError, load_config
from dit.train.checkpoint.mirror import Mirror, restored, to_fetch
from dit.train.checkpoint.object_store import CheckpointStore, fetched_checkpoint
from dit.train.checkpoint.starting_point import named_checkpoint
from dit.train.opening.checks import check_start
from tests.packs import run_config

FILES = ("metadata.json", ".metadata", "config.yaml", "null_text.safetensors", "__0_0.distcp")
WRITES = ("write", "upload_file", "delete_many")
"""What changes a store: a kill falls between two of these."""


@dataclass
class Run:
    """A run folder, and the folder behind the store that mirrors it."""

    folder: Path
    store: Path
    address: str
    keep_last: int = 2

    @property
    def config(self) -> RunConfig:
        return self.config_in(self.folder)

    def config_in(self, folder: Path) -> RunConfig:
        places = {"save": str(folder), "mirror": self.address}
        return run_config(checkpoint=CheckpointConfig(**places, keep_last=self.keep_last))

    def save(self, step: int, *, best: bool = False, seed: int = 0) -> str:
        """Saves and removes as `Saver` does; returns the name of the checkpoint."""
        checkpoints, name = self.folder / "checkpoints", f"step_{step:08d}"
        shutil.rmtree(checkpoints / name, ignore_errors=True)
        (checkpoints / name).mkdir(parents=True)
        chance = Random(f"{step} {seed}")
        for file in FILES:
            (checkpoints / name / file).write_bytes(chance.randbytes(chance.randrange(400)))
        write_manifest(checkpoints / name, {})
        for pointer in ("LATEST", *["LOWEST_VAL"] * best):
            (checkpoints / pointer).write_text(name)
        lowest = checkpoints / "LOWEST_VAL"
        kept = lowest.read_text() if lowest.exists() else ""
        for old in sorted(checkpoints.glob("step_*"))[: -self.keep_last]:
            if old.name != kept:
                shutil.rmtree(old)
        return name

    def copy(self) -> list[str]:
        """Brings the store up to date; returns what the run says."""
        mirror = Mirror(self.config.checkpoint)
        mirror.finish(patience_s=60)
        return list(mirror.lines())


def tree(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    profile = f"mirror-{abs(hash(tmp_path))}"  # MSC keeps a client of each
    provider = {"type": "file", "options": {"base_path": str(tmp_path / "store")}}
    content = {"profiles": {profile: {"storage_provider": provider}}}
    (tmp_path / "msc.json").write_text(json.dumps(content))
    return Run(tmp_path / "run", tmp_path / "store/a:b", f"msc://{profile}/a:b")


def test_the_store_has_what_the_run_folder_has(run: Run) -> None:
    for step in range(1, 6):
        name = run.save(step, best=step == 2)
        (said,) = run.copy()
        assert said.startswith(f"copied {name} to {run.address} in ")
        assert tree(run.store) == tree(run.folder)
    kept = [path.parent.name for path in run.store.glob("checkpoints/*/manifest.json")]
    assert sorted(kept) == ["step_00000002", "step_00000004", "step_00000005"]
    assert run.copy() == []  # nothing is left to do


def killed_after(run: Run, count: int) -> bool:
    """Brings the store up to date in a process that is killed after so many changes."""
    child = os.fork()
    if not child:
        mirror, left = Mirror(run.config.checkpoint), [count]
        client: Any = mirror.store._client

        def counted(change: Callable[..., Any]) -> Callable[..., Any]:
            def then(*arguments: Any) -> None:
                change(*arguments)
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

            return then

        for name in WRITES:
            setattr(client, name, counted(getattr(client, name)))
        mirror._synchronise()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_kill_between_any_two_objects_leaves_a_whole_checkpoint(run: Run, tmp_path) -> None:
    """A new checkpoint, one that is replaced, and one that is removed, in all states between."""
    for step in (1, 2, 3):
        run.save(step, best=step == 1)
    run.copy()
    before, old = tmp_path / "before", tree(run.folder / "checkpoints/step_00000003")
    shutil.copytree(run.store, before)
    run.save(3, seed=1)  # after a return to step 2
    new = run.save(4)
    steps, count, empty = set(), 0, tmp_path / "empty"
    while True:
        count += 1
        shutil.rmtree(run.store)
        shutil.copytree(before, run.store)
        if not killed_after(run, count):
            break
        for whole in run.store.glob("checkpoints/*/manifest.json"):
            assert not changed_files(whole.parent, parse_manifest(whole.read_bytes()))
        shutil.rmtree(empty, ignore_errors=True)
        (said,) = restored(run.config_in(empty).checkpoint)
        latest = (empty / "checkpoints/LATEST").read_text()
        assert said.startswith(f"fetched {latest} from {run.address}")
        wanted = tree(run.folder / f"checkpoints/{new}") if latest == new else old
        assert tree(empty / f"checkpoints/{latest}") == wanted
        assert named_checkpoint(empty, named="x").name == latest
        steps.add(latest)
        run.copy()
        assert tree(run.store) == tree(run.folder)
    assert steps == {"step_00000003", new}
    assert count > 3 * (len(FILES) + 1)


def test_the_best_checkpoint_stays_when_the_disk_is_lost(run: Run) -> None:
    for step in (1, 2, 3):
        run.save(step, best=step == 1)
        run.copy()
    shutil.rmtree(run.folder)
    restored(run.config.checkpoint)
    for step in (4, 5):
        run.save(step)
        run.copy()
    kept = sorted(path.parent.name for path in run.store.glob("checkpoints/*/manifest.json"))
    assert kept == ["step_00000001", "step_00000004", "step_00000005"]
    best = named_checkpoint(f"{run.address}/checkpoints/LOWEST_VAL", named="x")
    assert best.name == "step_00000001"


def test_errors_of_the_store_are_said_counted_and_tried_again(run: Run, monkeypatch) -> None:
    run.save(1)
    mirror = Mirror(run.config.checkpoint)
    upload = Mirror(run.config.checkpoint).store._client.upload_file
    fails = iter([True, True, False])

    def sometimes(*arguments: str) -> None:
        if next(fails, False):
            raise RuntimeError("503 slow down")
        upload(*arguments)

    monkeypatch.setattr(mirror.store._client, "upload_file", sometimes)
    for count in (1, 2):
        mirror.start()
        while mirror.copying:
            pass
        (said,) = mirror.lines()
        assert said.startswith(f"not copied ({count} in a row): {run.address} cannot be used (Runt")
        assert "503 slow down" in said and "tries again at its next save" in said
    mirror.finish(patience_s=60)
    copied, said = mirror.lines()
    assert copied.startswith("copied step_00000001")
    assert said == f"{run.address} has all checkpoints; 2 attempts failed in this run"
    assert tree(run.store) == tree(run.folder)


def test_a_store_that_never_answers_is_given_up_at_the_end(run: Run, monkeypatch) -> None:
    run.save(1)
    mirror, released = Mirror(run.config.checkpoint), threading.Event()
    monkeypatch.setattr(mirror.store._client, "upload_file", lambda *_: released.wait(60))
    mirror.finish(patience_s=0.2)
    (said,) = mirror.lines()
    assert said.startswith(f"{run.address} lacks checkpoints of {run.folder}/checkpoints (it does")
    released.set()


def test_what_arrives_damaged_is_noticed(run: Run, monkeypatch) -> None:
    run.save(1)
    mirror = Mirror(run.config.checkpoint)
    write = mirror.store._client.write

    def upload(path: str, file: str) -> None:
        content = bytearray(Path(file).read_bytes())
        content[0] ^= 1
        write(path, bytes(content))

    monkeypatch.setattr(mirror.store._client, "upload_file", upload)
    mirror.finish(patience_s=60)
    assert "differs from the file" in next(mirror.lines())
    assert not (run.store / "checkpoints/step_00000001/manifest.json").exists()
    monkeypatch.undo()


def test_only_what_is_lacking_is_copied_after_an_interruption(run: Run, monkeypatch) -> None:
    name = run.save(1)
    run.copy()
    place = run.store / "checkpoints" / name
    for lost in ("manifest.json", "config.yaml"):
        (place / lost).unlink()
    (place / ".left_by_a_kill").touch()
    mirror, uploaded = Mirror(run.config.checkpoint), []
    upload = mirror.store._client.upload_file
    monkeypatch.setattr(
        mirror.store._client, "upload_file", lambda *a: (uploaded.append(a[0]), upload(*a))
    )
    mirror.finish(patience_s=60)
    assert [Path(path).name for path in uploaded] == ["config.yaml"]
    assert tree(run.store) == tree(run.folder)


def test_a_checkpoint_that_is_removed_while_it_is_copied_is_no_error(run, monkeypatch) -> None:
    name = run.save(1)
    mirror = Mirror(run.config.checkpoint)

    def upload(*_: str) -> None:
        shutil.rmtree(run.folder / "checkpoints" / name)
        raise FileNotFoundError(name)

    monkeypatch.setattr(mirror.store._client, "upload_file", upload)
    mirror.finish(patience_s=60)
    assert not [*mirror.lines()] and not mirror.failures


def test_damage_in_the_store_is_named_when_it_is_fetched(run: Run, tmp_path: Path) -> None:
    run.save(1)
    name = run.save(2)
    run.copy()
    file = run.store / "checkpoints" / name / ".metadata"
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.raises(CheckpointError, match=r"step_00000002 is damaged, because its \.metadata"):
        restored(run.config_in(tmp_path / "empty").checkpoint)
    assert not (tmp_path / "empty/checkpoints" / name).exists()
    (file.parent / "manifest.json").unlink()  # as the message says
    assert "fetched step_00000001" in restored(run.config_in(tmp_path / "empty").checkpoint)[0]


def test_a_run_with_checkpoints_of_its_own_goes_on_from_them(run: Run, tmp_path: Path) -> None:
    run.save(1)
    assert restored(run.config.checkpoint) == []
    run.save(9)
    run.copy()
    other = Run(tmp_path / "other", run.store, run.address)
    other.save(4)
    (said,) = restored(other.config.checkpoint)
    assert "has step_00000009, but this run goes on from step_00000004 in checkpoint.save" in said
    other.copy()  # the later one stays until this run has passed it
    assert (run.store / "checkpoints/step_00000009/manifest.json").exists()
    assert (run.store / "checkpoints/LATEST").read_text() == "step_00000004"


def test_an_empty_store_and_one_that_is_not_there(run: Run, tmp_path: Path, monkeypatch) -> None:
    assert restored(run.config.checkpoint) == []
    assert to_fetch(run.config.checkpoint) is None
    other = Run(run.folder, run.store, "msc://no-such-profile/x")
    for start in (restored, to_fetch):
        with pytest.raises(CheckpointError, match=r"msc://no-such-profile/x cannot be used .*MSC_"):
            start(other.config.checkpoint)

    def files(_: CheckpointStore) -> None:
        raise CheckpointError("the store is away")

    monkeypatch.setattr(CheckpointStore, "files", files)
    with pytest.raises(CheckpointError, match="is away"):  # it may have what this run made
        restored(run.config.checkpoint)
    run.save(1)
    (said,) = restored(run.config.checkpoint)
    assert said.startswith("checkpoint.mirror: the store is away; the run goes on, and tries again")


def test_a_dry_run_asks_the_store_before_it_misses_a_checkpoint(run: Run, tmp_path: Path) -> None:
    run.save(1)
    run.copy()
    shutil.rmtree(run.folder)
    load = {"load": str(tmp_path / "typo")}
    config = run_config(
        checkpoint=CheckpointConfig(save=str(run.folder), mirror=run.address, **load)
    )
    (said,) = check_start(config, world_size=1, with_data=False)
    assert said.startswith(f"step_00000001 will be fetched from {run.address}")
    shutil.rmtree(run.store)
    with pytest.raises(CheckpointError, match="typo holds no checkpoint"):
        check_start(config, world_size=1, with_data=False)


def test_a_mirror_is_read_by_every_name_of_a_checkpoint(run: Run, tmp_path: Path, caplog) -> None:
    first, last = run.save(1, best=True), run.save(2)
    run.copy()
    at = f"{run.address}/checkpoints"
    for address, name in (
        *((place, last) for place in (run.address, f"{run.address}/", at, f"{at}/LATEST")),
        *((place, first) for place in (f"{at}/LOWEST_VAL", f"{at}/{first}")),
    ):
        path = named_checkpoint(address, named="--checkpoint_path")
        assert path.is_relative_to(tmp_path / "cache") and path.name == name
        assert tree(path) == tree(run.folder / "checkpoints" / name)
    assert len(caplog.messages) == 2  # each is copied once
    for address in (f"{run.address}/nothing", f"{at}/step_00000007"):
        assert fetched_checkpoint(address) is None
        with pytest.raises(CheckpointError, match="--checkpoint_path holds no checkpoint"):
            named_checkpoint(address, named="--checkpoint_path")


def test_a_checkpoint_that_was_replaced_in_the_store_is_fetched_again(run: Run) -> None:
    name = run.save(1)
    run.copy()
    assert tree(named_checkpoint(run.address, named="x")) == tree(run.folder / "checkpoints" / name)
    run.save(1, seed=1)
    run.copy()
    assert tree(named_checkpoint(run.address, named="x")) == tree(run.folder / "checkpoints" / name)


@pytest.mark.parametrize("mirror", ["s3://bucket/run", "runs/copy", "msc:/profile/x", "None"])
def test_a_mirror_is_an_address_of_msc(run: Run, mirror: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.mirror \(command line\): "):
        load_config(run.config, overrides=[f"checkpoint.mirror={mirror}"])


def test_a_mirror_needs_a_run_folder(run: Run) -> None:
    with pytest.raises(ConfigError, match="copies the checkpoints in save, which is null"):
        load_config(run.config, overrides=["checkpoint.save=null"])

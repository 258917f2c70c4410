"""A run that ends early, however it ends, leaves nothing that looks whole and is not."""

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import webdataset

from data_prep.media.clips import Entry
from data_prep.sources.digits import Digits


class Failing(Digits):
    """Digits that do something worse at one sample, the second time it is read."""

    def __init__(self, action):
        super().__init__(num_samples=150)
        self._reads, self._action = Counter(), action

    def read(self, entry: Entry):
        self._reads[entry.source] += 1
        if sum(self._reads.values()) == 250:
            self._action()
        return super().read(entry)


def assert_only_whole_shards(folder: Path) -> None:
    assert not (folder / ".nv-meta").exists()
    shards = list(folder.rglob("*.tar"))
    assert shards
    for shard in shards:
        index = np.fromfile(shard.with_suffix(".tar.idx"), np.uint64)
        found = list(webdataset.WebDataset(str(shard), shardshuffle=False))
        assert len(found) == len(index) - 1 == 20


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
def test_an_interrupted_run_leaves_whole_shards_and_continues(
    packed: Path, tmp_path: Path, error, pack_digits, content_of
) -> None:
    def stop() -> None:
        raise error("stop here")

    with pytest.raises(error):
        pack_digits(tmp_path / "out", Failing(stop))
    assert_only_whole_shards(tmp_path / "out")
    source = Failing(lambda: None)
    pack_digits(tmp_path / "out", source)
    # Measured before, and only what was in flight is packed again.
    assert 0 < sum(source._reads.values()) < 150 - 60
    assert content_of(tmp_path / "out") == content_of(packed)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_killed_run_leaves_whole_shards_and_continues_or_is_replaced(
    packed: Path, tmp_path: Path, repo_root: Path, pack_digits, content_of, overwrite: bool
) -> None:
    shutil.copytree(packed, tmp_path / "out")  # an older dataset that is being replaced
    program = (
        "import os, signal, sys\n"
        "from data_prep.cli import commands, parser\n"
        "from data_prep.sources import digits\n"
        "reads = []\n"
        "class Killed(digits.Digits):\n"
        "    def read(self, entry):\n"
        "        reads.append(entry)\n"
        "        if len(reads) == 250: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().read(entry)\n"
        "commands.Digits = Killed\n"
        "def quietly(args, *names): return {'some': 'setting'}\n"
        "commands._settings = quietly\n"
        "parser.main(['digits', '--output_dir', sys.argv[1], '--num_samples', '150', '--overwrite',"
        " '--split', '0.6,0.3,0.1', '--shard_size', '20', '--text_encoder', 'bytes',"
        " '--text_width', '16'])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "out")]
    assert subprocess.run(command, timeout=120, check=False, cwd=repo_root).returncode == -9
    assert_only_whole_shards(tmp_path / "out")
    assert list(tmp_path.rglob("*.tmp"))  # the shard that was being written
    (tmp_path / "out/.lock").unlink()  # as the command line does, which takes the lock
    pack_digits(tmp_path / "out", overwrite=overwrite)
    assert content_of(tmp_path / "out") == content_of(packed)

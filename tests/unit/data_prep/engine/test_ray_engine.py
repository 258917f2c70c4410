"""Several launched processes, and a Ray cluster, make the samples that one process makes."""

import os
import signal
import sys
from pathlib import Path

import pytest

from data_prep.engine.block_worker import BlockWorker
from data_prep.media.clips import Clip, Entry
from data_prep.sources.digits import Digits
from dit.codecs.text import ByteTable
from dit.codecs.vae import Pixel
from tests.launching import run
from tests.media_files import image

COUNT = 150


def launch(folder: Path, out: Path, ranks: int) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    words = ["-m", *(launcher if ranks > 1 else []), "data_prep", "image"]
    words += ["--image_dir", folder, "--output_dir", out, "--num_workers", "0"]
    words += ["--shard_size", "20", "--split", "0.8,0.2,0", "--text_width", "16"]
    words += ["--minutes", "0"]
    done = run([sys.executable, *map(str, words)])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ranks_share_the_work_and_may_change_in_number(
    tmp_path: Path, read_samples, content_of
) -> None:
    for index in range(COUNT):
        image(tmp_path / f"in/{index}.png", 16 + 8 * (index % 4), 16, seed=index)
    (tmp_path / "in/broken.png").write_bytes(b"no picture")
    launch(tmp_path / "in", tmp_path / "alone", 1)
    launch(tmp_path / "in", tmp_path / "out", 2)
    wanted, found = read_samples(tmp_path / "alone"), read_samples(tmp_path / "out")
    assert len(found) == COUNT and set(found) == set(wanted)
    for source, sample in found.items():
        assert sample["payload"] == wanted[source]["payload"]
        assert sample["key"] == wanted[source]["key"]
        assert sample["shard"].parent.name == wanted[source]["shard"].parent.name
    assert {path.name.split("-")[0] for path in (tmp_path / "out").rglob("*.tar")} == {
        "rank0", "rank1",
    }  # fmt: skip
    # One process goes on with what two have made: samples are copied into the shards of one.
    launch(tmp_path / "in", tmp_path / "out", 1)
    assert content_of(tmp_path / "out") == content_of(tmp_path / "alone")


class DeadlyOnce(Digits):
    """The first worker that reads digit 40 is lost."""

    def __init__(self, marker: Path):
        super().__init__(num_samples=90)
        self.marker = marker

    def read(self, entry: Entry) -> Clip:
        if entry.source == "load_digits/40" and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(entry)


@pytest.mark.slow
def test_a_worker_of_a_ray_cluster_is_lost(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    from data_prep.engine.processes import RayWorkers

    codec, words = Pixel.of(block=2, colours=1), ByteTable(width=16)
    source = DeadlyOnce(tmp_path / "killed")
    lines = [entry.to_line().encode() for entry in source.entries]
    blocks = [tuple(lines[start : start + 6]) for start in range(0, 90, 6)]
    plain = BlockWorker(source=Digits(num_samples=90), codec=codec, text=words).run(blocks)
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        work = BlockWorker(source=source, codec=codec, text=words)
        found = list(RayWorkers(workers=3).run(work, iter(blocks)))
    finally:
        ray.shutdown()
    assert (tmp_path / "killed").exists()
    for ours, theirs in zip(found, plain, strict=True):
        assert [one.parts for one in ours] == [one.parts for one in theirs]

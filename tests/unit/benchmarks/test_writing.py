"""The benchmark of writing shards runs and compares like with like."""

import tarfile
from pathlib import Path

from benchmarks.benchmark_writing import main, planned, write_plainly, write_resumably


def members_of(folder: Path) -> dict[str, bytes]:
    (path,) = folder.rglob("*.tar")
    with tarfile.open(path) as tar:
        streams = {member.name: tar.extractfile(member) for member in tar}
        return {name: stream.read() for name, stream in streams.items() if stream}


def test_both_writers_write_the_same_members(tmp_path: Path) -> None:
    entries = [planned(f"picture_{number}.png") for number in range(50)]
    parts = {"safetensors": b"tensors", "json": b"{}"}
    found = []
    for write in (write_resumably, write_plainly):
        folder = tmp_path / write.__name__
        folder.mkdir()
        assert write(folder, entries, parts) > 0
        found.append(members_of(folder))
    assert found[0] == found[1] and len(found[0]) == 100


def test_the_table(tmp_path: Path, capsys) -> None:
    main(["--samples", "50", "--bytes", "9", "--repeats", "1", "--folder", str(tmp_path)])
    assert "ShardWriter" in capsys.readouterr().out and not list(tmp_path.iterdir())

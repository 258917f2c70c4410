"""refused_samples.jsonl: every sample once, with a bound, cut to where a resume begins."""

import json

import pytest

from dit.data.rejections import RefusedSample
from dit.train.metrics import jsonl
from dit.train.metrics.jsonl import REFUSED_FILE as FILE
from dit.train.metrics.jsonl import RefusedFile


def sample(key, reason="sample is longer than one pack"):
    return RefusedSample(
        key=key, shard="train/x.tar", dataset="/data", reason=reason, detail="64 tokens"
    )


def lines(folder):
    return [json.loads(line) for line in (folder / FILE).read_text().split("\n") if line]


def test_a_sample_is_there_once(tmp_path):
    file = RefusedFile(tmp_path, start=0)
    file.add([sample("a"), sample("b"), sample("a")], step=2)
    file.add([sample("b"), sample("a\u2028\n", "latent has NaN or Inf")], step=4)
    file.close()
    assert [(line["step"], line["key"]) for line in lines(tmp_path)] == [
        (2, "a"),
        (2, "b"),
        (4, "a\u2028\n"),
    ]
    assert lines(tmp_path)[0] == {
        "step": 2,
        "key": "a",
        "shard": "train/x.tar",
        "dataset": "/data",
        "reason": "sample is longer than one pack",
        "detail": "64 tokens",
    }


def test_a_resume_cuts_what_it_will_meet_again_and_repeats_nothing(tmp_path):
    for start in (0, 2, 2):
        file = RefusedFile(tmp_path, start=start)
        file.add([sample("a"), sample("b")], step=2)
        file.add([sample("c")], step=5)
        file.close()
        assert [line["key"] for line in lines(tmp_path)] == ["a", "b", "c"]


def test_it_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MOST_NAMED", 3)
    for start in (0, 1):
        file = RefusedFile(tmp_path, start=start)
        file.add([sample(f"{start}-{number}") for number in range(9)], step=1)
        file.close()
    assert len(lines(tmp_path)) == 3


@pytest.mark.parametrize("damage", [b'{"step": 1}\n', b'{"step": 1, "k'])
def test_damaged_lines_do_not_end_a_run(tmp_path, damage):
    file = RefusedFile(tmp_path, start=0)
    file.add([sample("a")], step=1)
    file.close()
    with (tmp_path / FILE).open("ab") as raw:
        raw.write(damage)
    file = RefusedFile(tmp_path, start=1)
    file.add([sample("a"), sample("b")], step=2)
    file.close()
    content = (tmp_path / FILE).read_bytes()
    assert content.count(b'"key": "a"') == content.count(b'"key": "b"') == 1

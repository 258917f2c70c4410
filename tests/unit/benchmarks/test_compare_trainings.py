"""Variants are trained with each seed and judged once; a second call reads what was found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

import pytest

from recipes.compare_trainings import _losses, main
from tests.warm_python import warm_python

JUDGE = """
import json, sys
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--checkpoint_path") + 1])
said = {"accuracy": float((run / "config.yaml").read_text().count("muon")), "each": [1]}
(run / "evaluation.json").write_text(json.dumps(said))
sys.exit(1)
"""


@pytest.mark.slow
def test_variants_seeds_and_judge(repo_root: Path, tmp_path: Path, monkeypatch) -> None:
    """The first seed is trained by a Python of its own, whose CPU seconds are counted."""
    (tmp_path / "judge.py").write_text(JUDGE)
    words = ["--config_file", str(repo_root / "conf/dit_debug.yaml"), "--output", str(tmp_path)]
    words += ["--judge", str(tmp_path / "judge.py"), "--seeds", "1", "--keys"]
    words += ["dataset.mock=true", "train.train_iters=2", "scheduler.lr_warmup_iters=0"]
    words += ["--variant", "fast", "optimizer.lr=1e-2"]
    main(words)
    monkeypatch.setattr(sys, "executable", warm_python())
    words.insert(words.index("--keys"), "2")
    main(words)
    rows = json.loads((tmp_path / "comparison.json").read_text())
    assert [(row["variant"], row["seed"]) for row in rows] == [
        ("fast", "1"),
        ("fast", "2"),
        ("fast", "mean"),
    ]
    assert "0.01" in (tmp_path / "fast" / "2" / "config.yaml").read_text()
    assert rows[0]["cpu_s"] > 1 and "each" not in rows[0] and rows[0]["accuracy"] >= 0
    losses = [row["val_loss"] for row in rows]
    assert losses[0] != losses[1] and losses[2] == pytest.approx(fmean(losses[:2]))
    before = (tmp_path / "fast" / "1" / "metrics.jsonl").read_bytes()
    main(words)
    assert json.loads((tmp_path / "comparison.json").read_text()) == rows
    assert (tmp_path / "fast" / "1" / "metrics.jsonl").read_bytes() == before
    words[words.index("--judge") + 1] = "-c pass"
    with pytest.raises(ValueError, match=r"--judge -c pass wrote no .*evaluation\.json"):
        main([*words, "--seeds", "3"])
    (tmp_path / "fast" / "2" / "comparison.json").unlink()
    with pytest.raises(ValueError, match="fast/2 was broken off; remove that folder"):
        main(words)


def test_a_run_without_validation_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    with pytest.raises(ValueError, match=r"was never validated; set train\.eval_interval above 0"):
        _losses(tmp_path)

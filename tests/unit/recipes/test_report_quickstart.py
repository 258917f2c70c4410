from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dit.configuring import save_config
from recipes.report_quickstart import main, running_mean, shared_settings
from recipes.runs import dit_debug

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Balances tags and keeps attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text.append(data)


def write_run(folder: Path, *, steps: int = 120, with_validation: bool = True) -> Path:
    folder.mkdir()
    save_config(dit_debug(), folder / "config.yaml")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {
                "step": step,
                "loss": 1.0 / math.sqrt(step),
                "grad_norm": 0.5,
                "lr": 1e-3,
                "consumed_samples": 12 * step,
                "real_tokens": 190,
                "pack_fill": 0.97,
                "refused": 31,
                "step_time_s": 0.5,
                "tokens_per_s": 4321.0,
                "model_tflops": 0.01,
            }
            if with_validation and step % 40 == 0:
                row |= {"val_loss": 1.1 / math.sqrt(step), "val_loss_ema": 1 / math.sqrt(step)}
            file.write(json.dumps(row) + "\n")
    return folder


def write_samples(folder: Path) -> Path:
    folder.mkdir()
    rows = []
    for index, prompt in enumerate(["a <b> & c", "a <b> & c", "two"]):
        pixels = np.full((8, 8, 3), 40 * index, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        rows.append({"file": f"{index}.png", "prompt": prompt, "seed": index, "num_steps": 18})
    (folder / "samples.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture
def page(tmp_path: Path) -> Page:
    run, samples = write_run(tmp_path / "run"), write_samples(tmp_path / "samples")
    output = tmp_path / "new" / "report.html"
    arguments = ["--run_dir", run, "--samples_dir", samples, "--output", output]
    assert main([str(a) for a in arguments]) == 0
    assert Image.open(output.with_name("loss.png")).size == (1200, 720)
    return Page(output.read_text())


def test_page_is_whole_and_fetches_nothing(page: Page) -> None:
    sources = [value for _, name, value in page.attributes if name in {"src", "href"}]
    assert len(sources) == 4  # three pictures and the curve
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "script" not in {tag for tag, _, _ in page.attributes}
    assert ("meta", "name", "viewport") in page.attributes


def test_page_shows_prompts_and_figures(page: Page) -> None:
    text = "".join(page.text)
    assert text.count("a <b> & c") == 1 and "two" in text
    for figure in ("120", "60.0 s", "1,440", "4,321", "97.0%", "31", "num_steps"):
        assert figure in text
    assert "final validation loss" in text


def test_page_without_validation_has_no_such_figure(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, with_validation=False)
    samples, output = write_samples(tmp_path / "samples"), tmp_path / "report.html"
    arguments = ["--run_dir", run, "--samples_dir", samples, "--output", output]
    assert main([str(a) for a in arguments]) == 0
    assert "final validation loss" not in output.read_text()


@pytest.mark.parametrize("missing", ["metrics.jsonl", "samples.json"])
def test_missing_input_is_named(tmp_path: Path, missing: str) -> None:
    run, samples = write_run(tmp_path / "run"), write_samples(tmp_path / "samples")
    (run if missing == "metrics.jsonl" else samples).joinpath(missing).unlink()
    arguments = ["--run_dir", run, "--samples_dir", samples, "--output", tmp_path / "r.html"]
    with pytest.raises(ValueError, match=missing):
        main([str(a) for a in arguments])


def test_running_mean_looks_back_only() -> None:
    assert running_mean([1.0, 2.0, 3.0, 4.0], window=2) == [1.0, 1.5, 2.5, 3.5]


def test_shared_settings_leave_out_what_differs() -> None:
    first = {"file": "a", "prompt": "p", "seed": 1, "height": 8, "num_steps": 18}
    assert shared_settings([first, first | {"height": 16}]) == {"num_steps": 18}

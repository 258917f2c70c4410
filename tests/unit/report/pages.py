"""Folders of runs for reports, and the pages that are made of them."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from PIL import Image

from dit.config_loading import save_config
from dit.report.__main__ import main
from recipes.runs import dit_debug

VOID = {"meta", "img", "br", "wbr", "link", "input", "hr"}


class Page(HTMLParser):
    """Balances tags and keeps attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text += data


def write_run(folder: Path, *, steps: int = 120, seed: int = 1234, **changes) -> Path:
    folder.mkdir(parents=True)
    config = dit_debug()
    object.__setattr__(config.rng, "seed", seed)
    save_config(config, folder / "config.yaml")
    lines = [
        {
            "step": step,
            "loss": 1 / math.sqrt(step) + 0.01 * math.sin(step),
            "loss_q10": 0.5 / math.sqrt(step),
            "grad_norm": 0.5,
            "lr": 1e-3,
            "consumed_samples": 12 * step,
            "real_tokens": 190,
            "pack_fill": 0.97,
            "refused": 0,
            "step_time_s": 0.5,
            "tokens_per_s": 4321.0,
            "model_tflops": 0.01,
            "skipped": False,
            "skipped_steps": 0,
            **({"val_loss": 1.1 / math.sqrt(step)} if step % 40 == 0 else {}),
            **changes,
        }
        for step in range(1, steps + 1)
    ]
    write_lines(folder, lines)
    return folder


def write_lines(folder: Path, lines: list[dict]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_grids(folder: Path, steps: range) -> None:
    for step in steps:
        place = folder / "validation_generation" / f"step_{step:08d}"
        place.mkdir(parents=True)
        for name in ("grid.png", "00000.png"):
            Image.fromarray(np.full((8, 8, 3), step % 255, np.uint8)).save(place / name)


def write_samples(folder: Path) -> Path:
    folder.mkdir()
    rows = []
    for index, prompt in enumerate(["a <b> & c", "a <b> & c", "two"]):
        Image.fromarray(np.full((8, 8, 3), 40 * index, np.uint8)).save(folder / f"{index}.png")
        rows.append({"file": f"{index}.png", "prompt": prompt, "seed": index, "num_steps": 18})
    (folder / "clip.mp4").write_bytes(b"\0\0\0\x18ftypisom")
    rows.append({"file": "clip.mp4", "prompt": "a clip", "seed": 3, "num_steps": 18})
    (folder / "samples.json").write_text(json.dumps(rows))
    return folder


def report(*arguments: Path | str) -> Page:
    output = Path(str(arguments[0])).parent / "new" / "report.html"
    assert main([*map(str, arguments), "--output", str(output)]) == 0
    return Page(output.read_text())

"""Texts of Krea 2 are its pipeline's; folders of Turbo have its levels."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers.pipelines.krea2.pipeline_krea2 import Krea2Pipeline
from transformers import AutoTokenizer, Qwen3VLModel

from dit.convert.import_ import import_weights
from tests.families import encoding, krea2

CAPTIONS = ["a red bird on a roof", "", "x" * 600]


def test_texts_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """Twelve states of each token side by side, without the padding before the last rows."""
    folder = krea2.encoders(tmp_path)
    ours = encoding.encoder("krea2", folder)
    assert (ours.width, ours.max_length) == (12 * 16, 512)
    network = Qwen3VLModel.from_pretrained(folder, subfolder="text_encoder").eval()
    letters = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
    pipe = Krea2Pipeline(None, None, network, letters, None)  # type: ignore[arg-type]
    for caption in CAPTIONS:
        with torch.no_grad():
            rows, mask = pipe.get_text_hidden_states(caption, 512, torch.device("cpu"))
        own = ours.encode(caption)
        assert torch.equal(own, rows[mask].flatten(1).bfloat16())
        assert torch.equal(ours.encode_negative(caption)["text"], own)
        assert ours.is_cut(caption) == (caption == CAPTIONS[2])
    encoding.check_card(ours)


def test_a_folder_of_turbo_has_the_levels_of_its_pipeline(groups, tmp_path: Path) -> None:
    """Its loop shifts pictures of all sizes alike, whatever its scheduler says."""
    krea2.pipeline(tmp_path)
    index = tmp_path / "pipeline" / "model_index.json"
    for distilled, ends in ((False, (0.5, 1.15)), (True, (1.15, 1.15))):
        index.write_text(json.dumps(json.loads(index.read_text()) | {"is_distilled": distilled}))
        done = import_weights(tmp_path / "pipeline", tmp_path / f"ours{distilled}")
        found = done.config.objective
        assert (found.base_shift, found.max_shift) == ends
        assert found.max_image_seq_len == 6400 and bool(done.notices) == distilled

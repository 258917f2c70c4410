"""Caches in the form that AutoModel's own processors write become shards that train.

Keys, shapes and types are those of its tools/diffusion/processors/flux.py and hunyuan.py.
"""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data_prep.cli.parser import main
from dit.config import DatasetConfig, ObjectiveConfig, RunConfig, TrainConfig
from dit.models.flux.family import TINY as FLUX
from dit.models.hunyuan_video_15.family import TINY as HUNYUAN
from dit.models.registry import family_of, named_model
from dit.train import trainer

SIZES = [(16, 32), (32, 16), (16, 32)]  # width and height in pixels
LENGTHS = [(7, 0), (4, 3), (9, 5)]  # tokens of a caption, and of its words in quotation marks


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flux(number: int) -> dict[str, Any]:
    width, height = SIZES[number]
    return {
        "latent": randn(4, height // 8, width // 8, seed=number).half(),
        "clip_tokens": torch.zeros(1, 77, dtype=torch.long),
        "clip_hidden": torch.zeros(1, 77, 10, dtype=torch.bfloat16),
        "pooled_prompt_embeds": randn(1, 10, seed=number).bfloat16(),
        "t5_tokens": torch.zeros(1, 12, dtype=torch.long),
        "prompt_embeds": randn(1, 12, 16, seed=number).bfloat16(),  # states of padding, too
        "crop_offset": (0, 0),
        "image_path": f"/data/{number}.png",
        "model_type": "flux",
    }


def hunyuan(number: int) -> dict[str, Any]:
    width, height = SIZES[number]
    text, words = LENGTHS[number]
    masks = [torch.arange(total)[None] < count for total, count in ((12, text), (8, words))]
    second = randn(1, 8, 20, seed=number) if words else torch.zeros(1, 8, 20)
    return {
        "video_latents": randn(1, 4, 3, height // 8, width // 8, seed=number).half(),
        "text_embeddings": randn(1, 12, 24, seed=number).half(),  # no zeros behind the caption
        "text_mask": masks[0].long(),
        "text_embeddings_2": second.half(),
        "text_mask_2": masks[1].long(),
        "image_embeds": randn(1, 5, 12, seed=number).half(),
        "num_frames": 9,
        "video_path": f"/data/{number}.mp4",
        "deterministic_latents": True,
        "model_version": "hunyuanvideo-1.5",
        "processing_mode": "video",
        "model_type": "hunyuanvideo",
    }


def cache(folder: Path, content: Any, model: str) -> Path:
    """`metadata.json`, one shard of the index, and a file for each sample."""
    rows = []
    for number, (width, height) in enumerate(SIZES):
        about = {
            "original_resolution": [99, 50],
            "bucket_resolution": [width, height],
            "bucket_id": f"{width}x{height}",
            "aspect_ratio": width / height,
            "prompt": f"caption {number}",
        }
        made = content(number)
        file = folder / f"{width}x{height}" / f"{number}_{width}x{height}.meta"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(made | about, file)
        of_media = {n: made[n] for n in ("image_path", "video_path", "num_frames") if n in made}
        rows.append({"cache_file": str(file), **about, **of_media, "model_type": model})
    (folder / "metadata_shard_0000.json").write_text(json.dumps(rows))
    index = {"processor": model, "model_type": model, "total_items": 3, "num_shards": 1}
    index |= {"shards": ["metadata_shard_0000.json"], "shard_size": 10000}
    (folder / "metadata.json").write_text(json.dumps(index))
    return folder


def converted(folder: Path, content: Any, model: str, read_samples: Any) -> dict[str, Any]:
    """The samples by the number in their file's name."""
    words = ["convert", str(cache(folder / "cache", content, model)), "--split", "1,0,0"]
    assert main([*words, "--output_dir", str(folder / "out")]) == 0
    return {int(Path(name).stem): one for name, one in read_samples(folder / "out").items()}


def test_flux_keeps_what_t5_makes_of_padding(groups, tmp_path: Path, read_samples) -> None:
    found = converted(tmp_path, flux, "flux", read_samples)
    for number, sample in found.items():
        given = flux(number)
        assert torch.equal(sample["latent"], given["latent"][:, None])
        assert torch.equal(sample["text"], given["prompt_embeds"][0])
        assert torch.equal(sample["pooled_text"], given["pooled_prompt_embeds"][0])
    trains(tmp_path / "out", "flux1_schnell", FLUX["flux1_schnell"])


def test_hunyuan_has_both_texts_and_a_first_frame(groups, tmp_path: Path, read_samples) -> None:
    found = converted(tmp_path, hunyuan, "hunyuanvideo", read_samples)
    for number, sample in found.items():
        given, (text, words) = hunyuan(number), LENGTHS[number]
        latent = given["video_latents"][0]
        assert torch.equal(sample["latent"], latent)
        assert torch.equal(sample["first_frame_latent"], latent[:, :1])
        assert torch.equal(sample["image_embed"], given["image_embeds"][0])
        assert torch.equal(sample["text"], given["text_embeddings"][0, :text].bfloat16())
        assert torch.equal(sample["text_2"], given["text_embeddings_2"][0, :words].bfloat16())
    trains(tmp_path / "out", "hunyuanvideo_15", HUNYUAN["hunyuanvideo_15"])


def trains(folder: Path, size: str, tiny: Any) -> None:
    """A step with every caption dropped, and one with none: `null_text` fits as well."""
    family = family_of(named_model(size))
    model = family.config(**(family.sizes[size] | dict(tiny) | {"name": "custom", "num_layers": 1}))
    if size.startswith("flux"):
        model = replace(model, num_single_layers=1)
    dataset = DatasetConfig(
        path=str(folder),
        task_encoder_seq_length=256,
        use_train_split_for_val=True,
        num_workers=0,
    )
    for dropout in (0.0, 1.0):
        config = RunConfig(
            model=model,
            dataset=dataset,
            objective=ObjectiveConfig(name="flow", text_dropout=dropout),
            train=TrainConfig(train_iters=1, global_batch_size=1),
        )
        (values,) = trainer.measure_steps(config, warm_up=0, steps=1, around=nullcontext())
        assert values["loss"] > 0


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("text_mask", torch.ones(1, 5), r"text_mask .* must have a number for each of 12 rows"),
        ("text_mask", torch.zeros(1, 12), "text_mask is 0 in all rows"),
        ("text_mask_2", None, r"text_mask_2 '?None'? must have a number for each of 8 rows"),
    ],
)
def test_masks_that_fit_no_text(tmp_path: Path, key: str, value: Any, words: str) -> None:
    folder = cache(tmp_path / "cache", lambda n: hunyuan(n) | {key: value}, "hunyuanvideo")
    assert main(["convert", str(folder), "--output_dir", str(tmp_path / "out")]) == 1
    refused = (tmp_path / "out" / "refused.jsonl").read_text()
    said = " ".join(json.loads(line)["detail"] for line in refused.splitlines())
    assert re.search(words, said)

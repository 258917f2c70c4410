"""The comparison with a plain loop: the same samples, the same arithmetic."""

from __future__ import annotations

import json

import pytest
import torch
from measuring.padded import Batching, Example, rectangles

from benchmarks import compare_padded

TINY = ["model.num_layers=1", "model.hidden_size=48", "model.num_attention_heads=2"]
TINY += ["model.crossattn_emb_size=8", "model.in_channels=2"]
OF_FAMILY = {
    "dit": ["model.adaln_lora_dim=8"],
    "flux": ["model.num_single_layers=1", "model.pooled_size=8", "model.rope_axes=[8,8,8]"],
}


def example(frames: int, side: int, text: int) -> Example:
    generator = torch.Generator().manual_seed(side)
    return Example(
        key="",
        input_CFHW=torch.randn(2, frames, side, side, generator=generator),
        target_CFHW=torch.randn(2, frames, side, side, generator=generator),
        texts={"text": torch.randn(text, 3, generator=generator)},
        vectors={"pooled": torch.randn(3, generator=generator)},
        level=torch.tensor(0.5),
        weight=torch.tensor(2.0),
        fps=float("nan"),
        tokens=frames * side * side,
    )


FOUND = [example(1, 4, 3), example(2, 2, 5), example(1, 4, 1), example(1, 4, 3)]


def test_padding_has_no_weight_and_no_text():
    padded = rectangles(FOUND, Batching.PADDED, batch=3, capacity=64, dtype=torch.float32)
    assert [len(one.samples.level_B) for one in padded] == [3, 1]
    one = padded[0]
    assert one.samples.latent_BCFHW.shape == (3, 2, 2, 4, 4)
    real = 2 * sum(example.tokens for example in FOUND[:3])
    assert one.weight_BCFHW.sum() == 2 * real
    assert one.samples.is_text_BL is not None
    assert one.samples.is_text_BL.sum(1).tolist() == [3, 5, 1]
    assert torch.equal(one.samples.latent_BCFHW[1, :, :2, :2, :2], FOUND[1].input_CFHW)


def test_buckets_pad_nothing_and_hold_no_more_than_a_pack():
    buckets = rectangles(FOUND, Batching.BUCKETS, batch=1, capacity=32, dtype=torch.float32)
    assert sorted(len(one.samples.level_B) for one in buckets) == [1, 1, 2]
    assert all((one.weight_BCFHW == 2).all() for one in buckets)


def test_large_samples_fill_a_gpu_and_are_padded_to_the_video(monkeypatch):
    """A picture wider than the video's frames would be padded to more than either has."""
    asked = []

    def compared(config, options):
        asked.append(config.dataset)
        return {"tokens_per_s": {compare_padded.OURS: 1.0}, "ratio": {}}

    monkeypatch.setattr(compare_padded, "_compare", compared)
    compare_padded.compare(["--large"])
    (dataset,) = asked
    tokens = [one.frames * one.height * one.width // 4 for one in dataset.mock_samples]
    assert tokens == [16_384, 4096, 2304, 1024] and dataset.task_encoder_seq_length == 32_768
    video, *pictures = dataset.mock_samples
    assert all((one.height, one.width) <= (video.height, video.width) for one in pictures)
    packed = 2 * sum(one.weight * n for one, n in zip(dataset.mock_samples, tokens, strict=True))
    assert packed > 3 * 32_768


def test_every_family_has_tiny_sizes_here():
    assert OF_FAMILY.keys() == compare_padded.SMALL.keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", OF_FAMILY)
def test_both_ways_have_the_same_loss_and_all_are_timed(tmp_path, capsys, groups, family):
    """The program itself refuses to compare where the losses differ."""
    file = tmp_path / "numbers.json"
    words = ["--family", family, "--steps", "1", "--cpu-seconds", "--json", str(file)]
    assert compare_padded.main([*words, *TINY, *OF_FAMILY[family]]) == 0
    equal, mixed = json.loads(file.read_text())
    assert equal["real_tokens"] == 24 * 256
    assert set(mixed["ratio"]) == {compare_padded.OURS, *map(str, Batching)}
    assert "mixed" in capsys.readouterr().out
    with pytest.raises(ValueError, match="do not compute the same"):
        losses = {compare_padded.OURS: 1.0, str(Batching.BUCKETS): 1.1}
        compare_padded._check_losses(losses, tolerance=0.05)

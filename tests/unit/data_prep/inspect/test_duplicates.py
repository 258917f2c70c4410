"""Pictures that look alike are found, by a hash that agrees with another's transform."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import interpolate

from data_prep.inspect.duplicates import NEAR, Duplicates, looks_of, near_groups


def picture(seed: int, height: int = 96, width: int = 128) -> torch.Tensor:
    """[1, H, W] of smooth shapes in [-1, 1]."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand((1, 1, 7, 7), generator=rng) * 2 - 1
    return interpolate(coarse, (height, width), mode="bicubic")[0]


def test_the_hash_is_that_of_scipys_transform() -> None:
    from scipy.fft import dctn  # scikit-learn brings it

    grey_1HW = picture(0, 64, 64)
    looks = looks_of(grey_1HW)
    small = grey_1HW[0].numpy().reshape(32, 2, 32, 2).mean((1, 3))
    low = dctn(small, type=2)[1:9, 1:9]
    bits = (low > np.sort(low, axis=None)[31]).flatten()
    assert looks is not None
    assert looks[0] == looks[1] == int("".join("1" if bit else "0" for bit in bits), 2)


def test_scaled_and_noisy_pictures_look_alike_and_others_do_not() -> None:
    found = Duplicates()
    for seed in range(30):
        caption = "a fox" if seed % 2 else f"picture {seed}"
        found.add(f"{seed}.png", caption, looks_of(picture(seed)))
    noise = 0.01 * torch.randn(1, 96, 128, generator=torch.Generator().manual_seed(1))
    found.add("noisy.png", "", looks_of(picture(4) + noise))
    found.add("larger.png", "", looks_of(picture(4, 192, 256)))
    found.add("flat.png", "red", looks_of(torch.full((1, 8, 8), 0.5)))
    found.add("flat too.png", "blue", looks_of(torch.full((1, 8, 8), 0.1)))  # cannot be judged
    found.finish()
    assert [[found.names[one] for one in group] for group in found.groups] == [
        ["4.png", "noisy.png", "larger.png"]
    ]
    assert found.repeated == [("a fox", 15), ("", 2)]
    assert found.summary["near_duplicates"] == 3 and "15" in found.html()
    assert found.lines[0] == "captions that repeat: 2, in 17 of 34 samples"


def test_samples_of_one_file_are_no_duplicates() -> None:
    found = Duplicates()
    for name, caption in (("a", "one"), ("a", "two"), ("b", "red"), ("b", "red"), ("c", "red")):
        found.add(name, caption, looks_of(picture(ord(name) // 98)))  # b and c look alike
    found.finish()
    assert found.groups == [[2, 3, 4]] and found.repeated == [("red", 3)]
    assert [found.repeats_of(caption) for caption in ("one", "red")] == [1, 3]
    alone = Duplicates()
    for _ in range(2):
        alone.add("a", "one", looks_of(picture(1)))
    alone.finish()
    assert not alone.groups and not alone.lines


def test_clips_must_end_alike_too() -> None:
    still, moved = picture(1), picture(2)
    clips = [torch.cat(pair) for pair in ((still, still), (still, moved), (still, moved))]
    assert near_groups([looks_of(clip) for clip in clips]) == [[1, 2]]


def test_all_near_pairs_are_found() -> None:
    """Against a comparison of all with all."""
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**63, 300).tolist()
    for number in range(0, 200, 2):  # neighbours differ in 1 to 6 bits, anywhere
        hashes[number + 1] = hashes[number]
        for bit in rng.choice(63, 1 + number % 6, replace=False).tolist():
            hashes[number + 1] ^= 1 << bit
    found = near_groups([(one, one) for one in hashes])
    expected = {
        (i, j)
        for i in range(300)
        for j in range(i + 1, 300)
        if (hashes[i] ^ hashes[j]).bit_count() <= NEAR
    }
    assert {tuple(group) for group in found} == expected

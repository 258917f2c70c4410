"""The newest families are named in their own files and in a few lists, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dit.models.registry import FAMILIES

NAMES = {
    "ernie_image": r"ernie.?image",
    "flux3": r"flux\.?3",
    "ideogram4": r"ideogram.?4",
    "krea2": r"krea.?2",
    "qwen_image21": r"qwen.?image.?2\.?1",
}
"""Family -> its name, in any letters; what Diffusers calls a pipeline may be the source of a part.
"""
PLACES = ("dit", "data_prep", "recipes", "benchmarks", "tools")
LISTS = ("dit/models/registry.py", "benchmarks/count_traffic.py")
CODECS = "dit/codecs/"
"""Folder of codecs and text encoders: packing knows no networks, so that each stands beside the
nearest other one."""
OWN = {"qwen_image21": ("benchmarks/compare_block_causal.py",)}


@pytest.mark.parametrize("family", NAMES)
def test_shared_files_name_no_family(repo_root: Path, family: str) -> None:
    assert family in FAMILIES
    pattern = re.compile(f"{NAMES[family]}(?!pipeline)", re.IGNORECASE)
    files = [file for place in PLACES for file in sorted((repo_root / place).rglob("*.py"))]
    named = [str(file.relative_to(repo_root)) for file in files if pattern.search(file.read_text())]
    own = (f"dit/models/{family}/", CODECS, *LISTS, *OWN.get(family, ()))
    assert f"dit/models/{family}/family.py" in named
    assert not [file for file in named if not file.startswith(own)]

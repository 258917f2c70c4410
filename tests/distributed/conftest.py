"""Digits that several tests train on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """240 real digits, packed by the command that users type."""
    folder = tmp_path_factory.mktemp("digits") / "data"
    packing = ["-m", "data_prep", "digits", "--num_samples", "240", "--output_dir", str(folder)]
    subprocess.run([sys.executable, *packing], check=True, capture_output=True)
    return folder

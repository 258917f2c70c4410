"""The registration with Megatron-Bridge, exercised by the package as NVIDIA publishes it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from tests.families.dit import PROJECTED, publish, random_model
from tests.families.wan import random_wan
from tests.launching import run

PACKAGES = ("megatron-bridge==0.3.1", "einops")
COSMOS = {"extra_pos_embed_type": "learnable", "concat_padding_mask": True, **PROJECTED}
NETWORKS = {
    "cosmos": lambda: random_model(patch_size=(2, 2, 2), **COSMOS),
    "wan": random_wan,
}


@pytest.fixture(scope="module")
def bridge(tmp_path_factory) -> Path:
    """A folder with the package and what it needs here; most of its dependencies need CUDA."""
    folder = tmp_path_factory.mktemp("bridge") / "site"
    words = ["install", "--no-deps", "--retries", "0", "--timeout", "10", "--target", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, *PACKAGES], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"pip cannot get {PACKAGES[0]} here: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(
    Version(version("megatron-core")) >= Version("0.17"),
    reason="Megatron-Bridge 0.3.1 is for Megatron-Core below 0.17",
)
@pytest.mark.parametrize("network", NETWORKS)
def test_megatron_bridge_converts_as_we_do_on_every_layout(bridge, tmp_path, network):
    publish(tmp_path / "hf", NETWORKS[network](), max_shard_size="200KB")
    paths = ("--hf-path", str(tmp_path / "hf"), "--megatron-path", str(tmp_path / "ours"))
    assert run([sys.executable, "-m", "dit.convert", "import", *paths]).returncode == 0
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = ["-m", "tests.distributed.bridge_worker", paths[1], paths[3], str(bridge)]
    done = run([sys.executable, *launcher, *worker])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 layouts agree" in done.stdout

"""The layouts over NCCL, those of Transformer Engine where it is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch

from tests.launching import ROOT, run_cold

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def _check(*layouts: str) -> None:
    gpus = min(torch.cuda.device_count(), 8)
    if gpus < 2:
        pytest.skip("needs two GPUs: NCCL takes one process on each")
    asked = ["--nproc", str(gpus), *(("--layouts", *layouts) if layouts else ())]
    done = run_cold([sys.executable, str(ROOT / "recipes/check_layouts.py"), *asked], timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_layout_gives_the_numbers_of_one_process():
    _check()


@pytest.mark.skipif(not find_spec("transformer_engine"), reason="needs Transformer Engine")
def test_ring_of_context_ranks_gives_the_numbers_of_one_process():
    _check("cp2+ring+bf16")

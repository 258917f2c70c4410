"""Transformer Engine's stand-in, and packs built by hand."""

from collections.abc import Callable, Sequence

import megatron.core.optimizer as of_megatron
import pytest
import torch
from torch import Tensor

from dit.batch import WHOLE, PackedBatch
from dit.models.attention import kernels
from dit.models.layers import transformer_engine
from dit.models.stacks import stacked_transformer
from dit.train import model_and_optimizer
from tests import stand_in_engine

Grid = tuple[int, int, int]
MakePack = Callable[..., PackedBatch]


@pytest.fixture
def stand_in(monkeypatch):
    """Transformer Engine's place is taken by `tests/stand_in_engine.py`."""
    monkeypatch.setattr(stacked_transformer, "check_engine", lambda model: None)
    for cached in (transformer_engine._linear_class, kernels._engine_module):
        cached.cache_clear()
    yield stand_in_engine.install(monkeypatch)
    for cached in (transformer_engine._linear_class, kernels._engine_module):
        cached.cache_clear()


@pytest.fixture
def engine(stand_in, monkeypatch):
    """A machine with Transformer Engine and a GPU, as far as the optimizer asks."""
    monkeypatch.setattr(model_and_optimizer, "check_moments", lambda config: None)
    for module in (of_megatron, of_megatron.distrib_optimizer):
        monkeypatch.setattr(module, "Adam", stand_in_engine.FusedAdam)
    monkeypatch.setattr(of_megatron, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr("megatron.core.utils._te_version", None)
    return stand_in


@pytest.fixture(scope="session")
def make_pack() -> MakePack:
    """Builds a pack; the same grids and seed give the same real tokens at any alignment."""

    def make(
        grids: Sequence[Grid] = ((1, 2, 3), (2, 2, 2), (1, 1, 1)),
        *,
        width: int = 4,
        multiple: int = 4,
        pack_id: int = 7,
        seed: int = 0,
        texts: Sequence[int] | None = None,
        latents: Callable[[int, int, torch.Generator], Tensor] | None = None,
    ) -> PackedBatch:
        rng = torch.Generator().manual_seed(seed)
        counts = [f * h * w for f, h, w in grids]
        padded = [-(-n // multiple) * multiple for n in counts]
        starts = [sum(padded[:i]) for i in range(len(padded) + 1)]
        latent_TC = torch.full((starts[-1], width), torch.nan)  # padding must never be read
        is_real_T = torch.zeros(starts[-1], dtype=torch.bool)
        segment_T = torch.repeat_interleave(torch.arange(len(grids)), torch.tensor(padded))
        for n, start in zip(counts, starts[:-1], strict=True):
            drawn = latents(n, width, rng) if latents else torch.randn(n, width, generator=rng)
            latent_TC[start : start + n] = drawn
            is_real_T[start : start + n] = True
        lengths = list(texts) if texts else [i + 1 for i in range(len(grids))]
        return PackedBatch(
            latent_TC=latent_TC,
            position_TA=torch.zeros(starts[-1], 3),
            segment_T=segment_T,
            is_real_T=is_real_T,
            is_target_T=is_real_T,
            level_row_T=segment_T,
            texts={"text": torch.randn(sum(lengths), 5, generator=rng).bfloat16()},
            fps_N=torch.full((len(grids),), torch.nan),
            grids=tuple(grids),
            starts=tuple(starts),
            text_offsets={"text": tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))},
            keys=tuple(f"k{i}" for i in range(len(grids))),
            pack_id=pack_id,
            share=WHOLE,
            captions=(),
            methods={},
        )

    return make

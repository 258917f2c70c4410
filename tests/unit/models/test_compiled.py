"""The network with `model.compile` against the one without."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir

from dit.config import Recompute
from dit.models import compilation
from dit.models.compilation import check_compiler, missing_for_compilation
from dit.models.dit.family import ExtraPosition
from dit.models.dit.model import DiT
from dit.models.layers import packed_attention, per_sample
from dit.train.model_and_optimizer import randomise
from tests.packs import random_pack, tiny_model

WIDTH = 24  # of a head of `tiny_model`
PACKS = [
    [(1, 4, 6), (3, 2, 5)],
    [(1, 4, 6)] * 5,
    [(1, 4, 4), (1, 2, 2), (3, 3, 3)],
    [(2, 5, 5)],
]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_compilation()), reason=missing_for_compilation())
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "recompute_granularity": Recompute.FULL,
            "extra_pos_embed": ExtraPosition.LEARNABLE,
            "max_size": (8, 16, 16),
        },
    ],
    ids=["plain", "recomputed"],
)
def test_compiled_network_gives_the_same_predictions_and_gradients(groups, changes):
    torch._dynamo.reset()
    counters.clear()
    model = tiny_model(num_layers=3, **changes)
    networks = [DiT(replace(model, compile=compiled), groups).train() for compiled in (False, True)]
    for grids in PACKS:
        pack = random_pack(grids, [3 + i for i in range(len(grids))], model=model)
        level_N = torch.linspace(-0.5, 0.5, len(grids))
        found = []
        for network in networks:
            randomise(network, seed=7)
            network.zero_grad()
            out_TC = network(pack.latent_TC, level_N, pack)
            (out_TC * pack.latent_TC).sum().backward()
            found.append([out_TC.detach(), *(p.grad.clone() for p in network.parameters())])
        for plain, compiled in zip(*found, strict=True):
            assert (compiled - plain).norm() <= 1e-5 * plain.norm() + 1e-7
    # Three regions, and again for the other hooks of recomputation: none per pack or layer.
    assert counters["stats"]["unique_graphs"] <= 6


def test_regions_are_compiled_once_with_tokens_of_any_number_and_fixed_widths(groups, monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    shapes = []

    def note(graph, inputs):
        shapes.append([x.shape for x in inputs if isinstance(x, torch.Tensor)])
        return make_boxed_func(graph.forward)

    plain = partial(per_sample.compiled, backend=aot_autograd(fw_compiler=note))
    for module in (per_sample, packed_attention):
        monkeypatch.setattr(module, "compiled", plain)
    model = tiny_model(num_layers=3, compile=True)
    network = DiT(model, groups).train()
    randomise(network, seed=7)
    for grids in PACKS:
        pack = random_pack(grids, [3 + i for i in range(len(grids))], model=model)
        out_TC = network(pack.latent_TC, torch.linspace(-0.5, 0.5, len(grids)), pack)
        out_TC.sum().backward()
    assert counters["stats"]["unique_graphs"] == 3  # modulation, gate, rotation
    sizes = [size for region in shapes for shape in region for size in shape]
    widths = {int(size) for size in sizes if not isinstance(size, torch.SymInt)}
    assert widths - {1} == {model.hidden_size, model.num_attention_heads, WIDTH}
    rows = [shape[0] for region in shapes for shape in region if len(shape) > 1]
    assert all(isinstance(size, torch.SymInt) for size in rows)


def test_rows_of_any_number_are_one_kernel_and_a_single_row_is_its_own():
    torch._dynamo.reset()
    counters.clear()
    scaled = per_sample.compiled(lambda x_TD, scale_ND: x_TD * scale_ND[:1], backend="eager")
    for rows, graphs in ((1, 1), (2, 2), (3, 2), (7, 2), (1, 2)):
        x_TD, scale_ND = torch.rand(rows, 4), torch.rand(1, 4)
        assert torch.equal(scaled(x_TD, scale_ND), x_TD * scale_ND)
        assert counters["stats"]["unique_graphs"] == graphs, rows


def test_kernels_are_kept_by_the_instructions_that_they_use(monkeypatch, tmp_path):
    """Those of another processor may end in an illegal instruction."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    folders = []
    for instructions in ("AVX512", "AVX512", "DEFAULT", "AVX512"):
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda name=instructions: name)
        compilation._name_of_processor.cache_clear()
        compilation.compile_here(lambda x: x + 1, backend="eager")
        folders.append(Path(cache_dir()))
    compilation._name_of_processor.cache_clear()
    assert folders[0] == folders[1] == folders[3] != folders[2]
    assert {folder.parent for folder in folders} == {tmp_path}


def test_a_missing_compiler_is_said_before_anything_is_built(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    with pytest.raises(ValueError, match=r"model\.compile=true needs .* no g\+\+, clang\+\+ or"):
        check_compiler()


def test_missing_headers_are_said(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / name))
    with pytest.raises(ValueError, match=r"no .*include/Python\.h"):
        check_compiler()

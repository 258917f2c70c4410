"""Converts with the real Megatron-Bridge, on two processes; `test_convert_bridge.py` starts them.

Of its dependencies, Transformer Engine and triton need CUDA even to be imported: names of theirs
become objects that do nothing. None of them takes part in a conversion of a DiT.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from dit.models.dit.family import DitConfig

ABSENT = ("transformer_engine", "triton")


class _Nothing:
    """A class, a decorator and an object that does nothing."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if given else self

    def __getattr__(self, name: str) -> Any:
        return _made(name, _Nothing())


def _made(name: str, value: Any) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return value


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        return _made(name, _Meta(name, (_Nothing,), {}))


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _made(name, _Meta(name, (_Nothing,), {}))


class Absent(MetaPathFinder, Loader):
    """Makes packages, and the modules in them, whose names do nothing."""

    def __init__(self, *packages: str):
        self.inside = tuple(f"{name}." for name in packages)

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        return (
            ModuleSpec(name, self, is_package=True) if f"{name}.".startswith(self.inside) else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


LAYOUTS = (
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2},
)


def work(hf: Path, ours: Path) -> None:
    import torch

    from dit.distributed.process_groups import process_groups, start_processes
    from dit.models.registry import family_of
    from dit.train.checkpoint.state_dict import load_weights

    start_processes(seed=1, model=DitConfig())
    sys.meta_path.insert(0, Absent(*ABSENT))  # after Megatron-Core has found that they are absent
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge

    from dit.convert.bridge import DiffusersSource, NetworkBridge, NetworkProvider, register

    for _ in range(2):  # again where two programs of one process ask for it
        register()
    source = DiffusersSource(hf)
    theirs = source.folder.config["_class_name"]
    for layout in LAYOUTS:
        bridge = get_model_bridge(theirs)
        assert isinstance(bridge, NetworkBridge)
        provider = bridge.provider_bridge(source)
        assert isinstance(provider, NetworkProvider)
        for name, value in layout.items():
            setattr(provider, name, value)
        provider.finalize()
        start_processes(seed=1, model=provider.configured())
        chunks = provider.provide_distributed_model(wrap_with_ddp=False)
        bridge.load_weights_hf_to_megatron(source, chunks)

        groups = process_groups()
        wanted = family_of(source.config).network()(provider.configured(), groups)
        load_weights(ours, [wanted], groups, averaged=False)
        for (name, one), (_, two) in zip(
            chunks[0].named_parameters(), wanted.named_parameters(), strict=True
        ):
            assert torch.equal(one, two), f"{layout}: {name}"
        exported = bridge.stream_weights_megatron_to_hf(chunks, source, show_progress=False)
        back = {name: tensor.clone() for name, tensor in exported}
        assert back.keys() == source.folder.headers.keys(), layout
        for name, tensor in back.items():
            assert torch.equal(tensor, source.state[name]), f"{layout}: {name}"
    if torch.distributed.get_rank() == 0:
        sys.stdout.write(f"{len(LAYOUTS)} layouts agree\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.path.append(sys.argv[3])
    work(Path(sys.argv[1]), Path(sys.argv[2]))

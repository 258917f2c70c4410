"""What `dit.convert.bridge` does to Megatron-Bridge, whose place a recorder takes here."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from dit.models.registry import diffusers_classes
from tests.distributed.bridge_worker import Absent

PACKAGE, OURS = "megatron.bridge", "dit.convert.bridge"


def test_importing_the_bridge_registers_nothing(monkeypatch) -> None:
    registered: list[str] = []

    class Recorder:
        @staticmethod
        def register_bridge(*, source: str, **_: Any) -> Any:
            registered.append(source)
            return lambda made: made

    for name in [one for one in sys.modules if f"{one}.".startswith((f"{PACKAGE}.", f"{OURS}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(PACKAGE), *sys.meta_path])
    theirs = import_module(f"{PACKAGE}.models.conversion.model_bridge")
    monkeypatch.setattr(theirs, "MegatronModelBridge", Recorder)
    try:
        ours = import_module(OURS)
        assert not registered
        ours.register()
        assert registered == list(diffusers_classes())
    finally:
        for name in [one for one in sys.modules if f"{one}.".startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
        sys.modules.pop(OURS, None)

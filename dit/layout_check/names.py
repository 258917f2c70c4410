"""Names of parallel layouts, such as `tp2+sp+cp2`, and their settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from dit.config import (
    ContextComm,
    DdpConfig,
    LoraConfig,
    ModelConfig,
    Precision,
    Recompute,
    RecomputeMethod,
    RunConfig,
)

WORDS = {
    "tpN": "N tensor ranks",
    "sp": "sequence parallelism on the tensor ranks",
    "cpN": "N context ranks that exchange heads (a2a)",
    "ag": "context ranks gather keys and values instead",
    "ring": "keys and values go round instead (p2p, Transformer Engine's, with bf16)",
    "ppN": "N pipeline stages",
    "vppN": "N virtual stages on each",
    "dpN": "N data-parallel ranks",
    "packsN": "N packs in a step, over all data-parallel ranks",
    "hsdpN": "N groups of data-parallel ranks that each have the optimizer state",
    "overlap": "gradients reduced and weights gathered while the passes go on",
    "whole": "without the distributed optimizer",
    "full": "activations of every layer computed again",
    "block": "activations of the first layer of each stage computed again",
    "selective": "attention computed again",
    "compiled": "work between matrix products fused by torch.compile",
    "bf16": "bfloat16 weights with float32 master copies",
    "drop": "the input of adapters is dropped at a rate of 0.1",
    "lora": "adapters on every linear of the layers are trained, and no other weight",
    "lastlora": "adapters in the last layer alone, so that other stages train nothing",
}
"""The words of a layout's name, joined by +."""

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
}
_MODEL: dict[str, dict[str, Any]] = {
    "sp": {"sequence_parallel": True},
    "ag": {"cp_comm_type": ContextComm.ALL_GATHER},
    "ring": {"cp_comm_type": ContextComm.P2P},
    "full": {"recompute_granularity": Recompute.FULL},
    "block": {
        "recompute_granularity": Recompute.FULL,
        "recompute_method": RecomputeMethod.BLOCK,
    },
    "selective": {"recompute_granularity": Recompute.SELECTIVE},
    "compiled": {"compile": True},
    "bf16": {"precision": Precision.BF16},
}
_DDP: dict[str, dict[str, Any]] = {
    "overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "whole": {"use_distributed_optimizer": False},
}
_ADAPTERS = ("lora", "lastlora")
ONE = "one"
"""The layout that all others are compared with: one process, every option off."""

LAYOUTS = (
    *("full", "block", "selective"),
    *("tp2", "tp2+sp", "cp2", "cp2+ag", "pp2", "pp2+vpp2"),
    "pp2+vpp2+packs2",  # the fewest packs possible: the schedule has no steady state
    *(
        "dp2+whole",
        "dp2+overlap",
        "dp4+hsdp2+overlap",
        "tp2+sp+whole",
        "pp2+whole+full",
        "cp2+overlap+selective",
    ),
    *("tp2+sp+cp2", "tp2+sp+pp2", "dp2+cp2", "dp2+pp2+vpp2+overlap", "tp4", "cp4+ag", "pp4+block"),
    *("tp2+sp+cp2+ag+full", "tp2+cp2+whole", "tp2+dp2+overlap", "tp2+sp+compiled"),
    *("tp2+sp+cp2+pp2", "tp2+sp+pp2+vpp2+dp2+overlap+full"),
)
"""The layouts that are checked by default, where there are enough processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedLayout:
    """One way to spread a run over processes."""

    name: str
    size: int  # processes
    model: dict[str, Any]
    ddp: dict[str, Any]
    packs: int | None = None  # in a step; None leaves the run's own number
    adapters: str | None = None  # a word of `_ADAPTERS`
    drop: bool = False

    @property
    def bf16(self) -> bool:
        return self.model.get("precision") is Precision.BF16

    @property
    def reference(self) -> str:
        """The layout that must give the same numbers: one process, same precision and packs."""
        packs = None if self.packs is None else f"packs{self.packs}"
        bf16, drop = "bf16" if self.bf16 else None, "drop" if self.drop else None
        words = (ONE, bf16, self.adapters, drop, packs)
        return "+".join(filter(None, words))

    def of(self, config: RunConfig) -> RunConfig:
        """The configuration of a run on this layout; options that the name lacks are off.

        Raises:
            Problems: its sizes do not divide.
        """
        off: dict[str, Any] = dict.fromkeys(_SIZES.values(), 1)
        off |= {"sequence_parallel": False, "cp_comm_type": ContextComm.A2A}
        off |= {"recompute_granularity": Recompute.NONE, "precision": Precision.FP32}
        off |= {"compile": False}
        model: ModelConfig = replace(config.model, **(off | self.model))
        train = replace(
            config.train, global_batch_size=self.packs or config.train.global_batch_size
        )
        ddp, lora = replace(DdpConfig(), **self.ddp), self._lora(model)
        return replace(config, model=model, train=train, ddp=ddp, lora=lora)

    def _lora(self, model: ModelConfig) -> LoraConfig:
        """Adapters of a rank that no number of tensor ranks divides."""
        if self.adapters is None:
            return LoraConfig()
        layer = "*" if self.adapters == "lora" else model.all_layers - 1
        dropout = 0.1 if self.drop else 0.0
        return LoraConfig(rank=3, alpha=4.0, targets=(f"*blocks.{layer}.*",), dropout=dropout)


def parse_layout(name: str) -> NamedLayout:
    """The layout of a name.

    Raises:
        ValueError: a word of it is unknown.
    """
    size, packs, adapters, drop, model, ddp = 1, None, None, False, {}, {}
    for word in name.split("+"):
        sized = re.fullmatch(r"(tp|cp|pp|vpp|dp|packs|hsdp)([1-9]\d*)", word)
        if sized:
            kind, number = sized[1], int(sized[2])
            packs = number if kind == "packs" else packs
            size *= 1 if kind in ("vpp", "packs", "hsdp") else number
            ddp |= {"dp_replicate_size": number} if kind == "hsdp" else {}
            model |= {_SIZES[kind]: number} if kind in _SIZES else {}
        elif word in _MODEL:
            model |= _MODEL[word]
        elif word in _DDP:
            ddp |= _DDP[word]
        elif word == "drop":
            drop = True
        elif word in _ADAPTERS:
            adapters = word
        elif word != ONE:
            known = ", ".join(WORDS)
            raise ValueError(f"--layouts {name}: unknown word {word!r}; join words of {known} by +")
    kinds: dict[str, Any] = {"packs": packs, "adapters": adapters, "drop": drop}
    return NamedLayout(name=name, size=size, model=model, ddp=ddp, **kinds)

"""Names of parallel layouts and of tiny networks, as settings of a run.

1. NamedLayout    parallel layouts, such as `tp2+sp+cp2`
2. kind_settings  tiny networks of each kind that the families have
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dit.config import (
    BaseType,
    ContextComm,
    DdpConfig,
    DistillConfig,
    DistillMethod,
    LoraConfig,
    MockGeometry,
    ModelConfig,
    OptimizerKind,
    ParameterGroup,
    Precision,
    Preference,
    Problems,
    Recompute,
    RecomputeMethod,
    RunConfig,
    SamplingLevels,
    Sharding,
)
from dit.models.family import Family
from dit.models.registry import families

if TYPE_CHECKING:
    from dit.lora.targets import Adapters

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
    "overlap": "gradients are reduced and weights gathered during the passes",
    "fsdp": "sharded weights and gradients; each layer gathers its weights for a pass",
    "once": "with fsdp: gradients are summed over ranks once a step, not after each pack",
    "kept": "with fsdp: layers stay gathered from the forward pass to the backward pass",
    "whole": "without the distributed optimizer",
    "full": "activations of every layer are recomputed",
    "block": "activations of the first layer of each stage are recomputed",
    "selective": "attention is recomputed",
    "compiled": "operations between matrix products are fused by torch.compile",
    "bf16": "bfloat16 weights with float32 master copies",
    "muon": "the matrices of attention and feed-forward are updated by Muon",
    "route": "layers in the middle see every second token",
    "sparse": "sparse attention (Wan): each cube of tokens attends to fewer cubes at each step",
    "levels": "half of the tokens of each sample have a noise level of their own",
    "cfg": "targets with guidance by the network's own predictions (objective.cfg_target)",
    "drift": "with adapters: predictions are kept close to those without adapters",
    "dpo": "with adapters: pairs of a preferred and a rejected latent",
    "opd": "distillation by a teacher's mean velocity (the adapters' base, or another network)",
    "dmd": "distillation by DMD2; student and critic are both adapters or both whole networks",
    "drop": "with adapters: dropout of their input at a rate of 0.1",
    "frozen": "the first layer of each stack is frozen, and MLPs learn at half the rate",
    "lora": "adapters on every linear of the layers are trained, and no other weight",
    "lastlora": "adapters only in the last layer, so that other stages train nothing",
    "frozenlora": "as lora, with frozen adapters of attention and MLPs besides",
    "fp8base": "with adapters: the frozen matrices of the layers are in 8 bits",
    "swap": "with adapters: up to two frozen blocks of each stage stay in host memory",
}
"""Words of which the name of a layout consists, joined by `+`, with their meaning."""

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
}
_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "sp": {"model": {"sequence_parallel": True}},
    "ag": {"model": {"cp_comm_type": ContextComm.ALL_GATHER}},
    "ring": {"model": {"cp_comm_type": ContextComm.P2P}},
    "full": {"model": {"recompute_granularity": Recompute.FULL}},
    "block": {
        "model": {
            "recompute_granularity": Recompute.FULL,
            "recompute_method": RecomputeMethod.BLOCK,
        }
    },
    "selective": {"model": {"recompute_granularity": Recompute.SELECTIVE}},
    "compiled": {"model": {"compile": True}},
    "bf16": {"model": {"precision": Precision.BF16}},
    "fsdp": {"ddp": {"sharding": Sharding.WEIGHTS}},
    "once": {"ddp": {"reduce_each_pack": False}},
    "kept": {"ddp": {"reshard_after_forward": False}},
    "overlap": {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    "muon": {"optimizer": {"kind": OptimizerKind.MUON}},
    "whole": {"ddp": {"use_distributed_optimizer": False}},
}
"""Settings of each word without a number: group of keys, then key, then value."""
_ADAPTERS = ("lora", "lastlora", "frozenlora")
_FROZEN = (
    ParameterGroup(pattern="*.mlp.*", lr_factor=0.5),
    ParameterGroup(pattern="*layers.0.*", frozen=True),
)
_PATCH = 2
"""Latent cells along one side of a token, for sizes of mock samples."""
_UNKEYED = ("route", "sparse", "levels", "cfg", "drift", "dpo", "opd", "dmd", "drop", "frozen")
_UNKEYED += ("fp8base", *_ADAPTERS)
_OTHER_NUMBERS = ("bf16", "muon", *_UNKEYED)
"""Words that change the computed numbers: the reference is one process with the same words."""
ONE = "one"
"""Name of the reference layout: one process, all options off."""

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
"""Layouts that are checked by default, if there are enough processes."""
MATRIX = (
    *("full", "tp2+sp", "tp4", "cp2", "cp2+ag", "cp4", "cp4+ag", "pp2", "pp2+vpp2", "dp2"),
    *("tp2+cp2+pp2", "tp2+sp+cp2+pp2"),
)
"""Layouts on which `--family` checks every kind of network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedLayout:
    """One way to distribute a run over processes."""

    name: str
    size: int  # processes
    settings: Mapping[str, Mapping[str, Any]]  # group of the run's keys -> keys
    packs: int | None = None  # in a step; None leaves the run's own number

    @property
    def adapters(self) -> str | None:
        """The word of the name that is in `_ADAPTERS`; None if no adapters are trained."""
        return next((word for word in self.words if word in _ADAPTERS), None)

    @property
    def words(self) -> list[str]:
        return self.name.split("+")

    @property
    def pairs(self) -> bool:
        """Whether samples are pairs of a preferred and a rejected latent."""
        return "dpo" in self.words

    @property
    def bf16(self) -> bool:
        return "bf16" in self.words

    @property
    def reference(self) -> str:
        """Name of the layout that must give the same numbers: one process, with the same packs."""
        same = [word for word in self.words if word in _OTHER_NUMBERS]
        packs = [] if self.packs is None else [f"packs{self.packs}"]
        return "+".join([ONE, *same, *packs])

    def of(self, config: RunConfig) -> RunConfig:
        """The configuration `config` on this layout; options that the name lacks are off.

        Raises:
            Problems: the layout's sizes do not divide the network.
        """
        model = self._model(config.model)
        passes: dict[str, Any] = {"cfg_target": 2.0} if "cfg" in self.words else {}
        passes |= {"drift_weight": 0.5} if "drift" in self.words else {}
        # A small factor, because a large one multiplies the effect of rounding on the margin.
        passes |= {"dpo_beta": 1.0} if self.pairs else {}
        # Student and critic of DMD take the steps of LCM, which add noise.
        passes |= {"sampling_levels": SamplingLevels.LCM} if "dmd" in self.words else {}
        passes["preference"] = Preference.DPO if self.pairs else None
        passes["second_level_rate"] = 0.5 if "levels" in self.words else 0.0
        optimizer = {
            "groups": _FROZEN if "frozen" in self.words else (),
            **self.settings["optimizer"],
        }
        # One pack must hold a pair, which has twice the tokens of a sample.
        length = config.dataset.task_encoder_seq_length * (2 if self.pairs else 1)
        # Replaced at once, because options are checked together: Muon of one layout and adapters of
        # another would be refused if they met.
        return replace(
            config,
            dataset=replace(config.dataset, task_encoder_seq_length=length),
            ddp=DdpConfig(**self.settings["ddp"]),
            distill=self._distill(),
            lora=self._lora(model),
            model=model,
            objective=replace(config.objective, **passes),
            optimizer=replace(config.optimizer, **optimizer),
            train=replace(config.train, **self.settings["train"]),
        )

    def _distill(self) -> DistillConfig:
        """Options of distillation; without adapters the teacher has random weights."""
        word = next((word for word in self.words if word in [*DistillMethod]), None)
        if word is None:
            return DistillConfig()
        teacher = "random" if self.adapters is None else None
        return DistillConfig(
            method=DistillMethod(word),
            steps=3,
            teacher=teacher,
            teacher_guidance=2.0,
            teacher_steps=2,
            student_every=2,
        )

    def _model(self, model: ModelConfig) -> ModelConfig:
        off: dict[str, Any] = dict.fromkeys(_SIZES.values(), 1)
        off |= {"sequence_parallel": False, "cp_comm_type": ContextComm.A2A}
        off |= {"recompute_granularity": Recompute.NONE, "precision": Precision.FP32}
        off |= {"compile": False, "route_from": None, "route_to": None, "blocks_to_swap": 0}
        model = replace(model, **(off | dict(self.settings["model"])))
        model = replace(model, blocks_to_swap=self._swapped(model))
        if "route" in self.words:
            # The route crosses the borders between two or four stages, and between two stacks.
            last = max(1, model.all_layers - 2)
            model = replace(model, route_from=(model.all_layers - 1) // 3, route_to=last)
        return _sparse(model) if "sparse" in self.words else model

    def frozen_adapters(self, model: ModelConfig) -> Adapters | None:
        """Frozen adapters for `frozenlora`, of another rank than the trained ones; else None."""
        if self.adapters != "frozenlora":
            return None
        from dit.lora.targets import chosen_adapters

        return chosen_adapters(model, LoraConfig(rank=2, alpha=1.0))

    def _swapped(self, model: ModelConfig) -> int:
        """Number of blocks to swap: at most 2, and fewer than the blocks of any stage."""
        stages = model.pipeline_model_parallel_size * model.virtual_stages
        return min(2, model.all_layers // stages - 1) if "swap" in self.words else 0

    def _lora(self, model: ModelConfig) -> LoraConfig:
        """Options of adapters, of rank 3, which neither 2 nor 4 tensor ranks divide."""
        if self.adapters is None:
            return LoraConfig()
        from dit.models.linears import matrices_of_linears, their_modules

        linears = [pair for pair in matrices_of_linears(model) if pair.layer is not None]
        if self.adapters == "lastlora":
            (*_, last) = linears
            stack = last.ours.partition(".")[0]
            linears = [
                p for p in linears if p.layer == last.layer and p.ours.startswith(f"{stack}.")
            ]
        targets = tuple(name for pair in linears for name in their_modules(pair))
        return LoraConfig(
            rank=3,
            alpha=4.0,
            targets=targets,
            dropout=0.1 if "drop" in self.words else 0.0,
            base_dtype=BaseType.FLOAT8_E4M3 if "fp8base" in self.words else None,
        )


def _sparse(model: ModelConfig) -> ModelConfig:
    """A copy of `model` with sparse attention, whose share of cubes falls from the first step on.

    Raises:
        Problems: the family has no sparse attention.
    """
    if not hasattr(model, "sparse_attention"):
        raise Problems(
            [f"sparse: attention of model.family={model.family} is dense; leave this word out"]
        )
    shares: Any = {"sparse_share": 0.2, "sparse_share_step": 0.3, "sparse_share_interval": 1}
    return replace(model, sparse_attention=True, **shares)


def parse_layout(name: str) -> NamedLayout:
    """The layout with this `name`.

    Raises:
        ValueError: a word of the name is unknown.
    """
    size, packs = 1, None
    settings: dict[str, dict[str, Any]] = {"model": {}, "ddp": {}, "train": {}, "optimizer": {}}
    for word in name.split("+"):
        sized = re.fullmatch(r"(tp|cp|pp|vpp|dp|packs|hsdp)([1-9]\d*)", word)
        if sized:
            kind, number = sized[1], int(sized[2])
            size *= 1 if kind in ("vpp", "packs", "hsdp") else number
            if kind == "packs":
                packs = settings["train"]["global_batch_size"] = number
            elif kind == "hsdp":
                settings["ddp"]["dp_replicate_size"] = number
            elif kind in _SIZES:
                settings["model"][_SIZES[kind]] = number
        elif word in _OPTIONS:
            for group, values in _OPTIONS[word].items():
                settings[group] |= values
        elif word not in (ONE, "swap", *_UNKEYED):
            known = ", ".join(WORDS)
            raise ValueError(f"--layouts {name}: unknown word {word!r}; join words of {known} by +")
    return NamedLayout(name=name, size=size, settings=settings, packs=packs)


ALL = "all"
"""Word that stands for every kind of network of every family."""


def chosen_sizes(words: Sequence[str]) -> list[str]:
    """Names of the sizes with tiny networks that `words` stand for, each once.

    `words` are names of families or sizes, or `ALL`.

    Raises:
        ValueError: a word is none of these.
    """
    tiny = {family.name: [*family.tiny] for family in families()}
    every = [size for sizes in tiny.values() for size in sizes]
    named = {ALL: every, **{size: [size] for size in every}, **tiny}
    for word in words:
        if word not in named:
            raise ValueError(f"--family {word}: unknown; use some of {', '.join(named)}")
    return list(dict.fromkeys(size for word in words for size in named[word]))


def kind_settings(size: str, mixture: Sequence[MockGeometry]) -> list[str]:
    """Settings KEY=VALUE of the tiny network of a named `size`, and of its samples.

    Other settings are those of the size. The samples of `mixture` are shortened for networks with a
    limited number of frames, and resized to about as many tokens for networks whose sides are
    multiples of several tokens.
    """
    family: Family = next(one for one in families() if size in one.tiny)
    settings: dict[str, Any] = {"family": family.name, "name": size, **family.tiny[size]}
    lines = [f"model.{key}={json.dumps(value)}" for key, value in settings.items()]
    model = family.config(**{**family.sizes[size], **settings})
    most, samples = model.largest_latent, list(mixture)
    if most is not None and max(one.frames for one in mixture) > most[0]:
        samples = [replace(one, frames=min(one.frames, most[0]), fps=None) for one in mixture]
    if (cells := model.side_cells) > (patch := model.patch_spatial):
        step = _PATCH * cells // patch  # in cells of `mixture`
        sides = [[max(side // step, 1) * cells for side in (s.height, s.width)] for s in samples]
        samples = [
            replace(one, height=height, width=width)
            for one, (height, width) in zip(samples, sides, strict=True)
        ]
    if samples == [*mixture]:
        return lines
    return [*lines, f"dataset.mock_samples={json.dumps([asdict(one) for one in samples])}"]

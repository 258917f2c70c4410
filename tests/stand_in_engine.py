"""What this project calls of Transformer Engine, computed by torch: for machines without a GPU.

Names and arguments are those of Transformer Engine 2.8; `tests/gpu` runs the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

_OF_LINEAR = {"bias", "params_dtype", "parallel_mode", "sequence_parallel", "tp_group", "tp_size"}
_OF_LINEAR |= {"init_method", "device"}
_OF_ATTENTION = {"attention_dropout", "qkv_format", "attn_mask_type"}
_OF_PACKS = {"qkv_format", "attn_mask_type", "cu_seqlens_q", "cu_seqlens_kv"}
_OF_PACKS |= {"max_seqlen_q", "max_seqlen_kv"}


class Format(Enum):
    E4M3 = 1
    HYBRID = 2


@dataclass(frozen=True)
class Recipe:
    fp8_format: Format


class Float8CurrentScaling(Recipe): ...


class Float8BlockScaling(Recipe): ...


class MXFP8BlockScaling(Recipe): ...


@dataclass
class Seen:
    """The recipe in force at each product, and the number of packs attended to."""

    recipes: list[Recipe | None] = field(default_factory=list)
    attended: int = 0
    fused: int = 0  # gradients of weights that a product has added to `main_grad`


class _Fused(torch.autograd.Function):
    """A product that adds the gradient of its weight to `main_grad`, as Megatron-Core wants it."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: nn.Parameter, seen: Seen) -> Tensor:
        ctx.save_for_backward(inp, weight)
        ctx.weight, ctx.seen = weight, seen
        return nn.functional.linear(inp, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        inp, weight = ctx.saved_tensors
        ctx.weight.main_grad.add_(gradients[0].t().float() @ inp.float())
        ctx.weight.grad_added_to_main_grad = True
        ctx.seen.fused += 1
        return gradients[0] @ weight, torch.zeros_like(weight), None


class FusedAdam(torch.optim.Optimizer):
    """AdamW whose moments have a type and, unless that is float32 or bfloat16, a factor.

    8-bit moments are float8_e4m3fn here, and tensors of its own class there.
    """

    largest: ClassVar = {torch.float16: 65504 / 2, torch.uint8: 448.0}

    def __init__(  # noqa: PLR0913  # Megatron-Core looks at these names
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        capturable: bool = False,
    ):
        assert adam_w_mode and not (master_weights or use_decoupled_grad or capturable)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)
        self.types = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.factors: dict[Tensor, dict[str, Tensor]] = {}

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        for name, kind in self.types.items():
            kept = torch.float8_e4m3fn if kind is torch.uint8 else kind
            self.state[param][name] = torch.zeros_like(param, dtype=kept)
            self.factors.setdefault(param, {})[name] = torch.ones(1)

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        kept = self.state[param][state_name]
        if kept.dtype is torch.float32:
            return kept
        return kept.float() * self.factors[param][state_name]

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        assert unscaled_state.dtype is torch.float32
        largest = self.largest.get(self.types[state_name])
        if largest is not None:
            factor = unscaled_state.abs().max() / largest
            self.factors[param][state_name].copy_(factor)
            unscaled_state = unscaled_state * (1 / factor)  # NaN where all are zero
        self.state[param][state_name].copy_(unscaled_state)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), step = group["betas"], group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.get_unscaled_state(p, "exp_avg").lerp(p.grad, 1 - beta1)
                square = self.get_unscaled_state(p, "exp_avg_sq").lerp(p.grad.square(), 1 - beta2)
                root = (square / (1 - beta2**step)).sqrt() + group["eps"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] / (1 - beta1**step) * mean / root)
                self.set_scaled_state(p, "exp_avg", mean)
                self.set_scaled_state(p, "exp_avg_sq", square)


class StandIn:
    """The package, while it is installed."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.recipe: Recipe | None = None

    @contextmanager
    def fp8_autocast(self, *, enabled: bool, fp8_recipe: Recipe) -> Iterator[None]:
        before, self.recipe = self.recipe, fp8_recipe if enabled else None
        try:
            yield
        finally:  # recomputation ends by an exception once it has what it needs
            self.recipe = before

    def linear(self) -> type[nn.Module]:
        engine = self

        class Linear(nn.Module):
            def __init__(self, in_features: int, out_features: int, **options: Any):
                super().__init__()
                assert set(options) == _OF_LINEAR
                assert not options["sequence_parallel"]
                ranks = options["tp_size"]
                assert options["tp_group"].size() == ranks
                sides = {"column": (out_features // ranks, in_features)}
                sides["row"] = (out_features, in_features // ranks)
                made = torch.empty(
                    sides[options["parallel_mode"]],
                    dtype=options["params_dtype"],
                    device=options["device"],
                )
                self.weight = nn.Parameter(made)
                options["init_method"](self.weight)
                self.fuse_wgrad_accumulation = False
                self.bias = None
                if options["bias"]:
                    self.bias = nn.Parameter(made.new_empty(made.shape[0]))

            def get_extra_state(self) -> Tensor:
                return torch.zeros(0)

            def set_extra_state(self, state: Any) -> None: ...

            def forward(self, inp: Tensor) -> Tensor:
                engine.seen.recipes.append(engine.recipe)
                if self.fuse_wgrad_accumulation:
                    assert self.bias is None
                    return _Fused.apply(inp, self.weight, engine.seen)
                return nn.functional.linear(inp, self.weight, self.bias)

        return Linear

    def attention(self) -> type[nn.Module]:
        engine = self

        class DotProductAttention(nn.Module):
            def __init__(self, num_attention_heads: int, kv_channels: int, **options: Any):
                super().__init__()
                assert set(options) == _OF_ATTENTION
                assert (options["attention_dropout"], options["qkv_format"]) == (0.0, "thd")

            def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
                assert set(options) == _OF_PACKS
                assert (options["qkv_format"], options["attn_mask_type"]) == ("thd", "padding")
                assert all(x.is_contiguous() for x in (q, k, v))
                cu_q, cu_kv = options["cu_seqlens_q"], options["cu_seqlens_kv"]
                lengths, key_lengths = cu_q.diff().tolist(), cu_kv.diff().tolist()
                assert (sum(lengths), sum(key_lengths)) == (len(q), len(k))
                assert len(lengths) % 16 == 0
                longest = options["max_seqlen_q"], options["max_seqlen_kv"]
                assert longest[0] >= max(lengths) and longest[1] >= max(key_lengths)
                engine.seen.attended += 1
                parts = [
                    nn.functional.scaled_dot_product_attention(
                        *(x.transpose(0, 1)[None] for x in (q, k, v))
                    )[0].transpose(0, 1)
                    for q, k, v in zip(
                        q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True
                    )
                ]
                return torch.cat(parts).flatten(1)

        return DotProductAttention


def install(monkeypatch: Any) -> StandIn:
    """Puts the stand-in where the package would be."""
    engine = StandIn()
    names = ("", ".pytorch", ".pytorch.optimizers", ".common", ".common.recipe")
    made = {name: ModuleType(f"transformer_engine{name}") for name in names}
    recipes = (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, Format)
    for one in recipes:
        setattr(made[".common.recipe"], one.__name__, one)
    made[".common"].recipe = made[".common.recipe"]  # type: ignore[attr-defined]
    made[".pytorch"].Linear = engine.linear()  # type: ignore[attr-defined]
    made[".pytorch"].DotProductAttention = engine.attention()  # type: ignore[attr-defined]
    made[".pytorch"].fp8_autocast = engine.fp8_autocast  # type: ignore[attr-defined]
    made[""].__version__ = "2.8.0"  # type: ignore[attr-defined]
    made[".pytorch.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    for module in made.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return engine

"""Optimization and processes: steps, optimizer, learning rate, EMA, DDP, seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dit.config.checks import Rule, at_least_one, check, not_negative, numbers, positive, within
from dit.config.resume import AtStart, Live, OfData, Refused


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run and size of its steps."""

    train_iters: Live[int] = 10_000
    """Steps of the run, skipped steps included."""
    epochs: Live[float | None] = None
    """Passes through the data, instead of `train_iters`; steps are computed from the lengths of
    samples in the shards."""
    global_batch_size: Live[int] = 8
    """Packs in one optimizer step, over all ranks and accumulated micro-batches."""
    micro_batch_size: Refused[int] = 1
    """Packs in one forward pass; always 1, because a pack holds many samples."""
    eval_interval: Live[int] = 1000
    """Steps between validations; 0 never validates."""
    eval_iters: Live[int] = 32
    """Packs in one validation, over all ranks; 0 never validates."""
    deterministic: Live[bool] = False
    """Use only kernels that give bit-identical results every time."""
    max_skipped_steps: Live[int] = 20
    """Consecutive steps with a NaN or infinite loss or gradient before the run saves and stops."""
    warm_start_ema: AtStart[bool] = False
    """Continue the EMA of the weights from which the run starts, and its count of updates."""
    manual_gc: Live[bool] = True
    """Collect Python's garbage only at fixed steps, the same on all ranks."""
    manual_gc_interval: Live[int] = 100
    """Steps between two manual garbage collections; 0 never collects."""

    def __post_init__(self) -> None:
        check(
            *at_least_one(self, "train_iters", "global_batch_size", "max_skipped_steps"),
            *positive(self, "epochs"),
            (
                self.micro_batch_size == 1,
                f"micro_batch_size={self.micro_batch_size} must be 1: a micro-batch is one pack."
                " Raise dataset.task_encoder_seq_length for more tokens per pass",
            ),
            *not_negative(self, "eval_interval", "eval_iters", "manual_gc_interval"),
            *numbers(self, global_batch_size=2**24, epochs=2**24),
        )


class OptimizerKind(StrEnum):
    """The optimizer of matrices in attention and feed-forward; AdamW updates all other weights."""

    ADAMW = "adamw"
    MUON = "muon"


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Weights with settings of their own; the last group whose pattern matches a weight applies."""

    pattern: Refused[str]
    """Pattern with * and ? for names of weights, those of this program or of Diffusers:
    *.attn2.to_out.0.*, *.self_attention.*."""
    lr: Refused[float | None] = None
    """Largest learning rate of the group's weights; all groups follow the same schedule."""
    lr_factor: Refused[float | None] = None
    """Largest learning rate of the group's weights, as a multiple of `optimizer.lr`."""
    weight_decay: Refused[float | None] = None
    """Weight decay of the group's matrices; norms, biases and embeddings have none."""
    kind: Refused[OptimizerKind | None] = None
    """adamw: with `optimizer.kind=muon`, update the group's matrices by AdamW as well."""
    frozen: Refused[bool] = False
    """Whether the group's weights are frozen, without gradients, moments or EMA."""

    def __post_init__(self) -> None:
        own = (self.lr, self.lr_factor, self.weight_decay, self.kind)
        said = any(setting is not None for setting in own)
        check(
            (self.pattern != "", "pattern='' names no weight; '*' means all"),
            *positive(self, "lr", "lr_factor"),
            (
                self.lr is None or self.lr_factor is None,
                f"lr={self.lr} and lr_factor={self.lr_factor} say the same; leave one of them out",
            ),
            (
                said != self.frozen,
                f"pattern={self.pattern}: set lr, lr_factor, weight_decay or kind, or frozen=true"
                " alone",
            ),
            (
                self.kind is not OptimizerKind.MUON,
                f"pattern={self.pattern}: kind=muon is not for single groups: optimizer.kind=muon"
                " takes the matrices of attention and feed-forward; write kind=adamw, or leave it"
                " out",
            ),
            *not_negative(self, "weight_decay"),
            *numbers(self, lr=1000, lr_factor=1e6, weight_decay=1000),
        )


class NewtonSchulz(StrEnum):
    """Coefficients of the Newton-Schulz iterations that orthogonalise a matrix."""

    SIMPLE = "simple"
    QUINTIC = "quintic"
    POLAR_EXPRESS = "polar_express"


class MomentType(StrEnum):
    """Dtype in which a moment of Adam is stored between updates."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"

    @classmethod
    def _missing_(cls, value: object) -> MomentType | None:
        """The member for torch's name of a dtype, as in files of Megatron-Bridge (uint8 is fp8)."""
        return _OF_TORCH.get(str(value).removeprefix("torch."))

    @property
    def bytes(self) -> int:
        return {MomentType.FP32: 4, MomentType.FP8: 1}.get(self, 2)


_OF_TORCH = {
    "float32": MomentType.FP32,
    "bfloat16": MomentType.BF16,
    "float16": MomentType.FP16,
    "uint8": MomentType.FP8,
}


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's states: moving averages of the gradient and of its square."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStates:
    """State that an optimizer stores for each trained number, besides its float32 main copy."""

    names: tuple[str, ...]
    """Names of the states in a checkpoint, which holds each in float32."""
    bytes: int
    """Bytes of all states for each trained number, between two updates."""
    of_matrices: tuple[str, ...] | None = None
    """Names of the states of matrices that Muon updates; None if AdamW updates all weights."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay (arXiv:1711.05101), or Muon with AdamW."""

    kind: Refused[OptimizerKind] = OptimizerKind.ADAMW
    """adamw; or muon for the matrices of attention and feed-forward, adamw for all other weights.
    Muon orthogonalises the momentum of whole matrices, each linear separately
    (arXiv:2502.16982)."""
    lr: Live[float] = 1e-4
    """Largest learning rate, after warm-up."""
    min_lr: Live[float] = 0.0
    """Learning rate at the end of decay."""
    weight_decay: Live[float] = 0.01
    """Weight decay of matrices; norms, biases and embeddings have none."""
    adam_beta1: Live[float] = 0.9
    """Decay per step of the moving average of gradients."""
    adam_beta2: Live[float] = 0.95
    """Decay per step of the moving average of squared gradients."""
    adam_eps: Live[float] = 1e-8
    """Epsilon, added to the root of the averaged squared gradient."""
    clip_grad: Live[float] = 1.0
    """Norm of all gradients together above which they are scaled down; 0: no clipping."""
    optimizer_cpu_offload: Live[bool] = False
    """Keep Adam's moments in host memory, and copy them to the GPU for each update."""
    exp_avg_dtype: Live[MomentType] = MomentType.FP32
    """Dtype of the averaged gradient: fp32, or with Transformer Engine bf16, fp16 or fp8."""
    exp_avg_sq_dtype: Live[MomentType] = MomentType.FP32
    """Dtype of the averaged squared gradient: fp32, or with Transformer Engine bf16, fp16 or
    fp8."""
    muon_momentum: Live[float] = 0.95
    """Muon: decay per step of the moving average of gradients."""
    muon_nesterov: Live[bool] = True
    """Muon: Nesterov momentum, which adds the step's gradient to the average once more."""
    muon_coefficients: Live[NewtonSchulz] = NewtonSchulz.QUINTIC
    """Muon: coefficients of the iterations. quintic maps singular values to 0.97 to 1.11, simple
    (Jordan's) to 0.68 to 1.20; polar_express is from arXiv:2505.16932."""
    muon_steps: Live[int] = 5
    """Muon: number of iterations; the last coefficients repeat from the sixth on."""
    muon_period: Live[int] = 1
    """Muon: updates from one orthogonalisation to the next; other updates only normalise each row
    of the momentum (arXiv:2608.20818)."""
    groups: Refused[tuple[ParameterGroup, ...]] = ()
    """Groups of weights with another lr, lr_factor or weight_decay, or frozen."""

    def __post_init__(self) -> None:
        check(
            *positive(self, "lr", "adam_eps"),
            (
                0 <= self.min_lr <= self.lr,
                f"min_lr={self.min_lr} must lie between 0 and lr={self.lr}",
            ),
            (0 <= self.adam_beta1 < 1, f"adam_beta1={self.adam_beta1} must lie in [0, 1)"),
            (0 <= self.adam_beta2 < 1, f"adam_beta2={self.adam_beta2} must lie in [0, 1)"),
            *not_negative(self, "clip_grad", "weight_decay"),
            (0 <= self.muon_momentum < 1, f"muon_momentum={self.muon_momentum} must lie in [0, 1)"),
            *at_least_one(self, "muon_steps", "muon_period"),
            within(self, "muon_steps", 1, 100),
            *self._of_muon(),
            (
                not (self.narrow_moments and self.optimizer_cpu_offload),
                f"exp_avg_dtype={self.exp_avg_dtype} and exp_avg_sq_dtype={self.exp_avg_sq_dtype}"
                " need an optimizer on the GPU; leave them out, or optimizer_cpu_offload",
            ),
            *(
                (
                    self.weight_decay > 0 or not group.weight_decay,
                    f"weight_decay=0 switches off the weight_decay={group.weight_decay} of"
                    f" groups[{index}]: set weight_decay={group.weight_decay}, and put a group with"
                    " pattern='*' and weight_decay=0 before that group",
                )
                for index, group in enumerate(self.groups)
            ),
            *numbers(self, lr=1000, weight_decay=1000, adam_eps=1000, clip_grad=1e12),
        )

    def _of_muon(self) -> list[Rule]:
        """Rules about options that Muon excludes."""
        without = {
            "optimizer_cpu_offload=true": self.optimizer_cpu_offload,
            f"exp_avg_dtype={self.exp_avg_dtype} and exp_avg_sq_dtype={self.exp_avg_sq_dtype}": (
                self.narrow_moments
            ),
        }
        return [
            (
                self.kind is OptimizerKind.ADAMW or not wanted,
                f"{setting} needs the moments of AdamW, which kind=muon lacks; leave it out, or set"
                " kind=adamw",
            )
            for setting, wanted in without.items()
        ]

    @property
    def narrow_moments(self) -> bool:
        """Whether a moment is stored in fewer bits than float32."""
        return self.exp_avg_dtype.bytes + self.exp_avg_sq_dtype.bytes < 2 * MomentType.FP32.bytes

    @property
    def states(self) -> OptimizerStates:
        """The optimizer's states, for memory estimate, planner and checkpoints."""
        return OptimizerStates(
            names=MOMENTS,
            bytes=self.exp_avg_dtype.bytes + self.exp_avg_sq_dtype.bytes,
            of_matrices=MOMENTS[:1] if self.kind is OptimizerKind.MUON else None,
        )


class Decay(StrEnum):
    """Shape of the learning-rate schedule after warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"
    LINEAR = "linear"


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Learning rate as a function of the update; a skipped step is not an update."""

    lr_decay_style: Live[Decay] = Decay.COSINE
    """Shape after warm-up: constant, cosine or linear."""
    lr_warmup_iters: Live[int] = 0
    """Updates in which the learning rate rises from 0 to `optimizer.lr`."""
    lr_decay_iters: Live[int | None] = None
    """Update at which the learning rate reaches `optimizer.min_lr`; null: train.train_iters."""

    def __post_init__(self) -> None:
        check(
            *not_negative(self, "lr_warmup_iters"),
            *at_least_one(self, "lr_decay_iters"),
            *numbers(self),
        )


class EmaKind(StrEnum):
    """Profile of the weights' moving average (EMA)."""

    POWER = "power"
    CONSTANT = "constant"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """The moving average of the weights (EMA), in float32; generation uses it."""

    kind: Live[EmaKind] = EmaKind.POWER
    """Profile: power (EDM2), constant decay, or none."""
    sigma_rel: Live[float] = 0.10
    """Relative width of the power profile (EDM2, arXiv:2312.02696, Sec. 3.1)."""
    decay: Live[float] = 0.9999
    """Decay per step of the constant profile."""

    def __post_init__(self) -> None:
        check(
            (0 < self.decay < 1, f"decay={self.decay} must be above 0 and below 1"),
            (0 < self.sigma_rel < 0.28, f"sigma_rel={self.sigma_rel} must lie in (0, 0.28)"),
            within(self, "sigma_rel", 1e-3, 0.28),
            *numbers(self),
        )


class Sharding(StrEnum):
    """What data-parallel ranks shard: the optimizer state, or weights and gradients as well."""

    OPTIMIZER = "optimizer"
    WEIGHTS = "weights"


WHEN_GATHERED: dict[str, Any] = {
    "reduce_each_pack": True,
    "reshard_after_forward": True,
    "prefetch_layers": 1,
}
"""Keys of `DdpConfig` that only sharded weights read, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class DdpConfig:
    """Data parallelism of Megatron-Core."""

    sharding: Live[Sharding] = Sharding.OPTIMIZER
    """What data-parallel ranks shard: the optimizer state (optimizer), or weights and gradients as
    well (weights, by FSDP2: each layer gathers its weights for a pass)."""
    use_distributed_optimizer: Refused[bool] = True
    """Shard optimizer state and float32 weights over data-parallel ranks."""
    overlap_grad_reduce: Live[bool] = False
    """Reduce gradients while the backward pass goes on."""
    overlap_param_gather: Live[bool] = False
    """Gather updated weights while the next forward pass goes on."""
    grad_reduce_in_fp32: Live[bool] = True
    """Accumulate and reduce gradients in float32, whatever the precision of the model."""
    bucket_size: Live[int | None] = None
    """Parameters per communication bucket; null: Megatron-Core's default."""
    dp_replicate_size: Live[int] = 1
    """Number of replica groups of data-parallel ranks; the optimizer state (with FSDP, the weights)
    is sharded inside each group (HSDP)."""
    reduce_each_pack: Live[bool] = True
    """With sharding=weights, reduce gradients over ranks after each pack; false: once a step, until
    which each rank keeps whole gradients."""
    reshard_after_forward: Live[bool] = True
    """With sharding=weights, free a layer's gathered weights after its forward pass and gather them
    again for the backward pass; false: all layers stay gathered in between."""
    prefetch_layers: Live[int] = 1
    """With sharding=weights, number of layers that are gathered ahead of the computed one."""

    def __post_init__(self) -> None:
        check(
            *self._of_shares(),
            (
                not self.overlap_param_gather
                or (self.use_distributed_optimizer and self.overlap_grad_reduce),
                "overlap_param_gather=true needs use_distributed_optimizer=true and"
                " overlap_grad_reduce=true",
            ),
            (
                self.dp_replicate_size == 1 or self.use_distributed_optimizer,
                f"dp_replicate_size={self.dp_replicate_size} replicates a sharded optimizer; set"
                " use_distributed_optimizer=true, or leave dp_replicate_size out",
            ),
            *at_least_one(self, "dp_replicate_size", "bucket_size", "prefetch_layers"),
            *numbers(self, bucket_size=2**62, dp_replicate_size=2**20, prefetch_layers=2**10),
        )

    def sums(self, packs: int) -> int:
        """How often a step of `packs` packs reduces the gradients of sharded weights."""
        return packs if self.reduce_each_pack else 1

    def _of_shares(self) -> list[Rule]:
        """Rules about options that sharded weights exclude."""
        whole = self.sharding is Sharding.OPTIMIZER
        return [
            (
                whole or self.use_distributed_optimizer,
                "sharding=weights also shards the optimizer state; set"
                " use_distributed_optimizer=true",
            ),
            *(
                (
                    whole or not getattr(self, name),
                    f"{name}=true works with sharding=optimizer; with sharding=weights each layer"
                    " gathers its weights and reduces its gradients while others are computed:"
                    f" leave {name} out",
                )
                for name in ("overlap_grad_reduce", "overlap_param_gather")
            ),
            *(
                (
                    not whole or getattr(self, name) == usual,
                    f"{name}={str(getattr(self, name)).lower()} has an effect only with"
                    f" sharding=weights: set that, or leave {name} out",
                )
                for name, usual in WHEN_GATHERED.items()
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class DistConfig:
    """The processes of a run."""

    distributed_timeout_minutes: Live[float] = 10.0
    """Minutes without progress of one rank after which all ranks end with a message that names that
    rank."""

    def __post_init__(self) -> None:
        minutes = self.distributed_timeout_minutes
        check(
            (
                0 < minutes < math.inf,
                f"distributed_timeout_minutes={minutes} must be positive and finite",
            ),
            within(self, "distributed_timeout_minutes", 1e-3, 366 * 24 * 60),
        )


@dataclass(frozen=True, kw_only=True)
class RngConfig:
    """The one seed for initial weights, data order, noise and dropout."""

    seed: OfData[int] = 1234
    """The seed, an integer from 0 to 2^63 - 1."""

    def __post_init__(self) -> None:
        check(*not_negative(self, "seed"), *numbers(self, seed=2**63 - 1))

"""One tree of dataclasses describes a run; every check lives in a `__post_init__`.

Precedence, weakest first: recipe function, YAML file, command line (`dit.configuring`). Names are
those that Megatron-Bridge and DFM users know. A checkpoint stores the whole tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Problems(ValueError):  # noqa: N818 - it is what it holds
    """Every contradiction found in a configuration, one line each."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))


def _check(*rules: tuple[bool, str]) -> None:
    """Raises `Problems` with the message of every rule that does not hold."""
    broken = [message for holds, message in rules if not holds]
    if broken:
        raise Problems(broken)


def _at_least_one(group: object, *names: str) -> list[tuple[bool, str]]:
    """Rules that the named fields are 1 or more."""
    values = {name: getattr(group, name) for name in names}
    return [(value >= 1, f"{name}={value} must be at least 1") for name, value in values.items()]


def _positive(group: object, *names: str) -> list[tuple[bool, str]]:
    """Rules that the named fields are above zero, which NaN is not."""
    values = {name: getattr(group, name) for name in names}
    return [
        (value is None or value > 0, f"{name}={value} must be positive")
        for name, value in values.items()
    ]


def _set(group: object, *names: str) -> list[str]:
    """Those of the named fields that are not None."""
    return [name for name in names if getattr(group, name) is not None]


class Precision(StrEnum):
    """Type of the weights in matrix products; levels, positions and loss are always float32."""

    FP32 = "fp32"
    BF16 = "bf16"


class ExtraPosition(StrEnum):
    """Learnable positions added before every layer (Cosmos), or none."""

    NONE = "none"
    LEARNABLE = "learnable"


class Recompute(StrEnum):
    """Which activations the backward pass computes again instead of keeping."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class RecomputeMethod(StrEnum):
    """How full recomputation picks layers: all in groups, or the first few."""

    UNIFORM = "uniform"
    BLOCK = "block"


class ContextComm(StrEnum):
    """How context ranks exchange tokens: heads (a2a), or keys and values (all_gather)."""

    A2A = "a2a"
    ALL_GATHER = "all_gather"


_COSMOS = {
    "adaln_lora_dim": 256,
    "in_channels": 16,
    "crossattn_emb_size": 1024,
    "text_pad_to": 512,
    "rope_scale": (2.0, 1.0, 1.0),
    "extra_pos_embed": ExtraPosition.LEARNABLE,
    "concat_padding_mask": True,
}

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "dit_s": {"num_layers": 12, "hidden_size": 384, "num_attention_heads": 6},
    "dit_b": {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
    "dit_l": {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
    "dit_xl": {"num_layers": 28, "hidden_size": 1152, "num_attention_heads": 16},
    "cosmos_7b": {"num_layers": 28, "hidden_size": 4096, "num_attention_heads": 32, **_COSMOS},
    "cosmos_14b": {"num_layers": 36, "hidden_size": 5120, "num_attention_heads": 40, **_COSMOS},
}
"""What each `model.name` sets (DiT: arXiv:2212.09748, Table 1; Cosmos: arXiv:2501.03575)."""

CUSTOM_SIZE = "custom"
"""The `model.name` that sets nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The DiT: sizes, positions, precision and how it is spread over devices."""

    name: str = "dit_xl"
    """A named size (dit_s, dit_b, dit_l, dit_xl, cosmos_7b, cosmos_14b) or `custom`."""
    num_layers: int = 28
    """Transformer layers."""
    hidden_size: int = 1152
    """Width of a token inside the model; a multiple of num_attention_heads."""
    num_attention_heads: int = 16
    """Heads of self- and cross-attention."""
    mlp_ratio: float = 4.0
    """Width of the MLP over the hidden size."""
    adaln_lora_dim: int = 256
    """Rank of each modulation (adaLN)."""
    in_channels: int = 16
    """Channels of the latent, as the shards hold it."""
    patch_spatial: int = 2
    """Rows and columns of the latent in one token."""
    patch_temporal: int = 1
    """Frames of the latent in one token."""
    crossattn_emb_size: int = 1024
    """Width of the text embedding in the shards."""
    text_pad_to: int | None = None
    """Null attends to the true text length; a number appends zeros up to it (Cosmos: 512)."""
    rope_scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """NTK scale of the rotary frequencies for frames, rows and columns."""
    base_fps: float = 24.0
    """A frame's rotary position is frame * base_fps / fps of the clip."""
    extra_pos_embed: ExtraPosition = ExtraPosition.NONE
    """Learnable positions added before every layer, beside the rotary ones (Cosmos: learnable)."""
    max_size: tuple[int, int, int] = (128, 240, 240)
    """Latent frames, rows, columns covered by learnable positions."""
    concat_padding_mask: bool = False
    """Append Cosmos's padding-mask channel (always zero here) to the latent."""
    precision: Precision = Precision.BF16
    """Type of weights and matrix products; levels, positions and loss are always float32."""
    tensor_model_parallel_size: int = 1
    """Ranks that share every matrix."""
    sequence_parallel: bool = False
    """Tensor ranks also share the tokens between the matrices."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of every sample."""
    cp_comm_type: ContextComm = ContextComm.A2A
    """What context ranks exchange: heads (a2a), or keys and values (all_gather)."""
    pipeline_model_parallel_size: int = 1
    """Stages that share the layers."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Groups of layers on each pipeline stage; null is one."""
    recompute_granularity: Recompute = Recompute.NONE
    """Activations the backward pass computes again: none, attention only (selective), or full."""
    recompute_method: RecomputeMethod = RecomputeMethod.UNIFORM
    """How full recomputation picks layers: all in groups (uniform), or the first few (block)."""
    recompute_num_layers: int = 1
    """Layers in one recomputed group (uniform), or how many are recomputed (block)."""
    init_method_std: float | None = None
    """Standard deviation of the initial weights; null is 1 / sqrt(inputs) for each matrix."""
    vae_cache_folder: str | None = None
    """Folder of the VAE that decodes pictures; the embedded `pixel` codec needs none."""

    def __post_init__(self) -> None:
        heads, tp = self.num_attention_heads, self.tensor_model_parallel_size
        sizes = ("num_layers", "hidden_size", "num_attention_heads", "adaln_lora_dim")
        sizes += ("in_channels", "patch_spatial", "patch_temporal", "crossattn_emb_size")
        sizes += ("tensor_model_parallel_size", "context_parallel_size", "recompute_num_layers")
        sizes += ("pipeline_model_parallel_size",)
        names = (*MODEL_SIZES, CUSTOM_SIZE)
        _check(
            (self.name in names, f"name={self.name} is no known size; use {', '.join(names)}"),
            *_at_least_one(self, *sizes),
            *_at_least_one(self, *_set(self, "text_pad_to")),
            *_at_least_one(self, *_set(self, "virtual_pipeline_model_parallel_size")),
            *_positive(self, "mlp_ratio", "base_fps", *_set(self, "init_method_std")),
            (min(self.rope_scale) > 0, f"rope_scale={self.rope_scale} must be positive"),
            (min(self.max_size) >= 1, f"max_size={self.max_size} must be at least 1"),
        )
        width = self.hidden_size // heads
        _check(
            (
                self.hidden_size % heads == 0,
                f"hidden_size={self.hidden_size} does not divide into"
                f" num_attention_heads={heads}; choose a multiple of {heads}",
            ),
            (
                self.hidden_size % heads > 0 or (width % 2 == 0 and width // 6 >= 2),
                f"hidden_size={self.hidden_size} / num_attention_heads={heads} gives heads of"
                f" width {width}; 3-D rotary positions need an even width of at least 12",
            ),
            (
                heads % tp == 0,
                f"num_attention_heads={heads} does not divide by"
                f" tensor_model_parallel_size={tp}; choose a divisor of {heads}",
            ),
            (
                not self.sequence_parallel or tp > 1,
                "sequence_parallel=true needs tensor_model_parallel_size > 1; set it to false",
            ),
            (
                self.ffn_hidden_size % tp == 0,
                f"the MLP width {self.ffn_hidden_size} (hidden_size * mlp_ratio) does not divide by"
                f" tensor_model_parallel_size={tp}",
            ),
            *(
                (
                    size == 1,
                    f"{name}={size} is not supported yet; set it to 1 and use data parallelism",
                )
                for name, size in (
                    ("tensor_model_parallel_size", tp),
                    ("context_parallel_size", self.context_parallel_size),
                    ("pipeline_model_parallel_size", self.pipeline_model_parallel_size),
                    (
                        "virtual_pipeline_model_parallel_size",
                        self.virtual_pipeline_model_parallel_size or 1,
                    ),
                )
            ),
        )

    @property
    def ffn_hidden_size(self) -> int:
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def patch_features(self) -> int:
        """Numbers in one token of the latent: channels * frames * rows * columns."""
        return self.in_channels * self.patch_temporal * self.patch_spatial**2

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold one replica of the model."""
        return (
            self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.pipeline_model_parallel_size
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MockGeometry:
    """One kind of synthetic sample, in latent units."""

    frames: int = 1
    """Frames of the latent; 1 for an image."""
    height: int = 64
    """Rows of the latent."""
    width: int = 64
    """Columns of the latent."""
    text_length: int = 512
    """Text tokens."""
    fps: float | None = None
    """Frames per second; null for an image."""
    weight: float = 1.0
    """Relative frequency in the mixture."""

    def __post_init__(self) -> None:
        _check(
            *_at_least_one(self, "frames", "height", "width", "text_length"),
            (self.weight > 0, f"weight={self.weight} must be positive"),
            (self.fps is None or self.fps > 0, f"fps={self.fps} must be positive or null"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendEntry:
    """One dataset of a blend."""

    path: str
    """Folder with shards and `.nv-meta`."""
    weight: float = 1.0
    """Relative probability that the next sample comes from here."""

    def __post_init__(self) -> None:
        _check((self.weight > 0, f"weight={self.weight} must be positive"))


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    """Where samples come from and how they share a pack."""

    path: str | None = None
    """Folder with shards and `.nv-meta`, or an Energon metadataset YAML."""
    blend: tuple[BlendEntry, ...] = ()
    """Several datasets with weights, instead of `path`."""
    mock: bool = False
    """Seeded synthetic samples instead of files (`--mock`)."""
    mock_samples: tuple[MockGeometry, ...] = (MockGeometry(),)
    """The mixture of geometries that mock data draws from."""
    task_encoder_seq_length: int = 15360
    """Tokens in one pack, all samples together."""
    packing_buffer_size: int = 100
    """Samples looked at to fill packs."""
    sample_multiple: int = 16
    """Each sample is padded to a multiple of this many tokens, whatever the layout."""
    num_workers: int = 2
    """Loader processes per data-parallel rank; 0 reads in the training process."""
    use_train_split_for_val: bool = False
    """Validate on the training split where a dataset has no `val` split."""
    shuffle_buffer_size: int = 100
    """Samples held for shuffling, before packing."""
    max_samples_per_sequence: int = 100
    """Samples read in a row from one shard before another is tried."""
    max_bad_fraction: float = 0.01
    """Part of the samples read that may fail to decode before the run stops with an error."""
    checkpoint_every_sec: float = 10.0
    """Seconds between a loader's own snapshots: less means a faster resume."""

    def __post_init__(self) -> None:
        capacity, multiple = self.task_encoder_seq_length, self.sample_multiple
        _check(
            (multiple >= 1, f"sample_multiple={multiple} must be at least 1"),
            (
                capacity >= 1 and capacity % max(multiple, 1) == 0,
                f"task_encoder_seq_length={capacity} must be a positive multiple of"
                f" sample_multiple={multiple}",
            ),
            (
                self.packing_buffer_size >= 1,
                f"packing_buffer_size={self.packing_buffer_size} must be at least 1",
            ),
            (self.num_workers >= 0, f"num_workers={self.num_workers} must not be negative"),
            (
                self.shuffle_buffer_size >= 0,
                f"shuffle_buffer_size={self.shuffle_buffer_size} must not be negative",
            ),
            (
                0 <= self.max_bad_fraction <= 1,
                f"max_bad_fraction={self.max_bad_fraction} must lie in [0, 1]",
            ),
            (
                not (self.path and self.blend),
                "path and blend are both set; keep one of them",
            ),
            (len(self.mock_samples) > 0, "mock_samples is empty; give at least one geometry"),
            *_at_least_one(self, "max_samples_per_sequence"),
            *_positive(self, "checkpoint_every_sec"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length of the run and size of its steps."""

    train_iters: int = 10_000
    """Optimizer steps."""
    global_batch_size: int = 8
    """Packs in one optimizer step, over all ranks and accumulations."""
    micro_batch_size: int = 1
    """Packs in one forward pass; packing wants exactly 1."""
    eval_interval: int = 1000
    """Steps between validations; 0 never validates."""
    eval_iters: int = 32
    """Packs in one validation, over all ranks; 0 never validates."""
    deterministic: bool = False
    """Only kernels that give the same bits every time."""
    max_skipped_steps: int = 20
    """Steps in a row with a NaN or infinite gradient before the run stops."""

    def __post_init__(self) -> None:
        _check(
            (self.train_iters >= 1, f"train_iters={self.train_iters} must be at least 1"),
            (
                self.global_batch_size >= 1,
                f"global_batch_size={self.global_batch_size} must be at least 1",
            ),
            (
                self.micro_batch_size == 1,
                f"micro_batch_size={self.micro_batch_size} must be 1: a micro-batch is one pack."
                " Raise dataset.task_encoder_seq_length for more tokens per pass",
            ),
            (self.eval_interval >= 0, f"eval_interval={self.eval_interval} must not be negative"),
            (self.eval_iters >= 0, f"eval_iters={self.eval_iters} must not be negative"),
            (
                self.max_skipped_steps >= 1,
                f"max_skipped_steps={self.max_skipped_steps} must be at least 1",
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay (arXiv:1711.05101)."""

    lr: float = 1e-4
    """Largest learning rate, after warm-up."""
    min_lr: float = 0.0
    """Where decay ends."""
    weight_decay: float = 0.01
    """On matrices only: norms, biases and embeddings have none."""
    adam_beta1: float = 0.9
    """Part of the mean gradient that stays each step."""
    adam_beta2: float = 0.95
    """Part of the mean squared gradient that stays each step."""
    adam_eps: float = 1e-8
    """Added to the root of the mean squared gradient."""
    clip_grad: float = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        _check(
            *_positive(self, "lr", "adam_eps"),
            (
                0 <= self.min_lr <= self.lr,
                f"min_lr={self.min_lr} must lie between 0 and lr={self.lr}",
            ),
            (0 <= self.adam_beta1 < 1, f"adam_beta1={self.adam_beta1} must lie in [0, 1)"),
            (0 <= self.adam_beta2 < 1, f"adam_beta2={self.adam_beta2} must lie in [0, 1)"),
            (self.clip_grad >= 0, f"clip_grad={self.clip_grad} must not be negative"),
            (self.weight_decay >= 0, f"weight_decay={self.weight_decay} must not be negative"),
        )


class Decay(StrEnum):
    """Shape of the learning rate after warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"
    LINEAR = "linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Learning rate over the steps."""

    lr_decay_style: Decay = Decay.COSINE
    """Shape after warm-up: constant, cosine or linear."""
    lr_warmup_iters: int = 0
    """Steps from 0 to `optimizer.lr`."""
    lr_decay_iters: int | None = None
    """Step at which decay reaches `optimizer.min_lr`; null follows train.train_iters."""

    def __post_init__(self) -> None:
        _check(
            (
                self.lr_warmup_iters >= 0,
                f"lr_warmup_iters={self.lr_warmup_iters} must not be negative",
            ),
            *_at_least_one(self, *_set(self, "lr_decay_iters")),
        )


class EmaKind(StrEnum):
    """Profile of the weight average."""

    POWER = "power"
    CONSTANT = "constant"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaConfig:
    """Average of the weights over the steps, in float32; generation uses it."""

    kind: EmaKind = EmaKind.POWER
    """Profile: power (EDM2), constant decay, or none."""
    sigma_rel: float = 0.10
    """Relative width of the power profile (EDM2, arXiv:2312.02696, Sec. 3.1)."""
    decay: float = 0.9999
    """Weight kept per step by the constant profile."""

    def __post_init__(self) -> None:
        _check(
            (0 < self.decay < 1, f"decay={self.decay} must lie between 0 and 1"),
            (0 < self.sigma_rel < 0.28, f"sigma_rel={self.sigma_rel} must lie in (0, 0.28)"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpConfig:
    """Data parallelism of Megatron-Core."""

    use_distributed_optimizer: bool = True
    """Shard optimizer state and float32 weights over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass goes on."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in float32, whatever the precision of the model."""
    bucket_size: int | None = None
    """Parameters per communication bucket; null is Megatron-Core's choice."""

    def __post_init__(self) -> None:
        _check(
            (
                not self.overlap_param_gather
                or (self.use_distributed_optimizer and self.overlap_grad_reduce),
                "overlap_param_gather=true needs use_distributed_optimizer=true and"
                " overlap_grad_reduce=true",
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When and where the run is saved, and what it starts from."""

    save: str | None = None
    """Run folder: checkpoints, logs, metrics and the resolved configuration."""
    load: str | None = None
    """Run folder or checkpoint to continue from, when it holds one; null means `save`."""
    save_interval: int = 1000
    """Steps between checkpoints; there is always one at the end."""
    keep_last: int = 3
    """Newest checkpoints that stay; 0 keeps all."""

    def __post_init__(self) -> None:
        _check(
            (self.save_interval >= 1, f"save_interval={self.save_interval} must be at least 1"),
            (self.keep_last >= 0, f"keep_last={self.keep_last} must not be negative"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerConfig:
    """What is written down while the run goes on."""

    log_interval: int = 10
    """Steps between lines in the terminal, TensorBoard and W&B; metrics.jsonl has every step."""
    tensorboard_dir: str | None = None
    """Null is `tensorboard` in the run folder."""
    wandb_project: str | None = None
    """Project in W&B; null does not log there."""
    wandb_exp_name: str | None = None
    """Name of the run in W&B; null is the name of the run folder."""
    wandb_entity: str | None = None
    """User or team in W&B; null is the account's own."""

    def __post_init__(self) -> None:
        _check((self.log_interval >= 1, f"log_interval={self.log_interval} must be at least 1"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RngConfig:
    """The one seed from which initial weights, data order, noise and dropout follow."""

    seed: int = 1234
    """Any integer from 0."""

    def __post_init__(self) -> None:
        _check((self.seed >= 0, f"seed={self.seed} must not be negative"))


class ObjectiveName(StrEnum):
    """Which regression the network learns."""

    EDM = "edm"
    FLOW = "flow"


class LevelDensity(StrEnum):
    """Density from which flow matching draws t (arXiv:2403.03206, Sec. 3.1)."""

    UNIFORM = "uniform"
    LOGIT_NORMAL = "logit_normal"
    MODE = "mode"


class Weighting(StrEnum):
    """Weight of the flow-matching error at t."""

    NONE = "none"
    LINEAR = "linear"


class LossMean(StrEnum):
    """What counts once in the mean loss: a real token, or a sample."""

    TOKEN = "token"
    SAMPLE = "sample"


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """Noise levels, preconditioning and weights; symbols as in the papers."""

    name: ObjectiveName = ObjectiveName.EDM
    """The regression that the network learns: edm (arXiv:2206.00364) or flow (arXiv:2403.03206)."""
    loss_mean: LossMean = LossMean.TOKEN
    """What counts once in the mean loss: a real token, or a sample."""
    text_dropout: float = 0.1
    """Probability, per sample, that training sees the null text (classifier-free guidance)."""
    sigma_data: float = 0.5
    """EDM: standard deviation that latents are scaled to."""
    p_mean: float = 0.0
    """EDM: mean of ln(sigma) in training."""
    p_std: float = 1.0
    """EDM: standard deviation of ln(sigma) in training."""
    sigma_min: float = 0.002
    """EDM: smallest level of the samplers."""
    sigma_max: float = 80.0
    """EDM: largest level of the samplers."""
    rho: float = 7.0
    """EDM: curvature of the samplers' levels."""
    density: LevelDensity = LevelDensity.LOGIT_NORMAL
    """Flow: how t is drawn."""
    logit_mean: float = 0.0
    """Flow: mean of logit(t)."""
    logit_std: float = 1.0
    """Flow: standard deviation of logit(t)."""
    mode_scale: float = 1.29
    """Flow: s of the `mode` density."""
    flow_shift: float = 1.0
    """Flow: t becomes s t / (1 + (s - 1) t), in training and sampling; above 1 means more noise."""
    shift_base_tokens: int | None = None
    """Flow: with a number, the shift of a sample of T tokens is flow_shift * sqrt(T / number)."""
    timestep_scale: float = 1000.0
    """Flow: the network is told timestep_scale * t."""
    weighting: Weighting = Weighting.NONE
    """Flow: none, or 1 + flow_shift * t (linear)."""

    def __post_init__(self) -> None:
        _check(
            (
                0 <= self.text_dropout <= 1,
                f"text_dropout={self.text_dropout} must lie in [0, 1]",
            ),
            (
                0 < self.sigma_min < self.sigma_max,
                f"sigma_min={self.sigma_min} must be positive and below sigma_max={self.sigma_max}",
            ),
            *_positive(self, "sigma_data", "p_std", "rho"),
            *_positive(self, "logit_std", "flow_shift", "timestep_scale"),
            *_at_least_one(self, *_set(self, "shift_base_tokens")),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    ddp: DdpConfig = field(default_factory=DdpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    rng: RngConfig = field(default_factory=RngConfig)

    def __post_init__(self) -> None:
        warmup, horizon = self.scheduler.lr_warmup_iters, self.decay_iters
        mixture = self.dataset.mock_samples if self.dataset.mock else ()
        _check(
            (
                warmup < horizon,
                f"scheduler.lr_warmup_iters={warmup} must lie below the decay horizon {horizon}"
                " (scheduler.lr_decay_iters, else train.train_iters); lower the first",
            ),
            *(
                (not wrong, f"dataset.mock_samples[{index}]: {wrong}")
                for index, geometry in enumerate(mixture)
                for wrong in [self._mock_problem(geometry)]
            ),
        )

    def _mock_problem(self, geometry: MockGeometry) -> str:
        """Why no pack could hold this mock sample; empty if one can."""
        model, capacity = self.model, self.dataset.task_encoder_seq_length
        size = (geometry.frames, geometry.height, geometry.width)
        shape = "frames={} height={} width={}".format(*size)
        patch = (model.patch_temporal, model.patch_spatial, model.patch_spatial)
        if any(side % part for side, part in zip(size, patch, strict=True)):
            return (
                f"{shape} does not divide into patches of model.patch_temporal={patch[0]} and"
                f" model.patch_spatial={patch[1]}"
            )
        learnable = model.extra_pos_embed is ExtraPosition.LEARNABLE
        if learnable and any(side > end for side, end in zip(size, model.max_size, strict=True)):
            return f"{shape} exceeds the learnable positions, model.max_size={model.max_size}"
        if self.mock_tokens(geometry) > capacity:
            return (
                f"{shape} needs {self.mock_tokens(geometry)} tokens, more than"
                f" dataset.task_encoder_seq_length={capacity}"
            )
        return ""

    @property
    def decay_iters(self) -> int:
        """Step at which the learning rate reaches its end."""
        return self.scheduler.lr_decay_iters or self.train.train_iters

    def mock_tokens(self, geometry: MockGeometry) -> int:
        """Tokens of one mock sample, padded to `dataset.sample_multiple`."""
        spatial, multiple = self.model.patch_spatial, self.dataset.sample_multiple
        tokens = geometry.frames // self.model.patch_temporal
        tokens *= (geometry.height // spatial) * (geometry.width // spatial)
        return -(-tokens // multiple) * multiple

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model on `world_size` processes.

        Raises:
            Problems: the processes do not divide, or the global batch does not.
        """
        parts = self.model.model_parallel_size
        _check(
            (
                world_size % parts == 0,
                f"{world_size} processes do not divide by tensor * context * pipeline = {parts};"
                f" start a multiple of {parts} (--nproc-per-node, --nnodes)",
            )
        )
        replicas = world_size // parts
        batch = self.train.global_batch_size
        _check(
            (
                batch % replicas == 0,
                f"train.global_batch_size={batch} packs do not divide over {replicas}"
                f" data-parallel ranks; use a multiple of {replicas}",
            )
        )
        return replicas

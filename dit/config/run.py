"""The whole configuration, checkpoints and logs, and the checks that concern several groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from dit.config.checks import Rule, at_least_one, check, not_negative, numbers, positive
from dit.config.choices import ContextComm, Implementation, Precision
from dit.config.data import DatasetConfig, MockGeometry
from dit.config.lora import LoraConfig
from dit.config.model import ModelConfig
from dit.config.objective import ObjectiveConfig
from dit.config.resume import AtStart, Live
from dit.config.token_route import share_rules
from dit.config.training import (
    DdpConfig,
    DistConfig,
    EmaConfig,
    EmaKind,
    OptimizerConfig,
    OptimizerKind,
    RngConfig,
    SchedulerConfig,
    Sharding,
    TrainConfig,
)
from dit.config.validation import ValidationConfig
from dit.local_path import LocalPath, StoreAddress

GUIDANCE = 2.5
"""Guidance of networks that have no guidance embedding; docs/small_data.md has figures."""


class Weights(StrEnum):
    """Which weights of a checkpoint: the trained ones, or their average (EMA)."""

    MODEL = "model"
    EMA = "ema"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When and where checkpoints are saved, and from which checkpoint the run starts."""

    save: Live[LocalPath | None] = None
    """Run folder: checkpoints, logs, metrics and the resolved configuration."""
    load: AtStart[LocalPath | None] = None
    """Run folder or checkpoint that a new run continues from; null means `save`."""
    mirror: Live[StoreAddress | None] = None
    """Object store, msc://PROFILE/PATH, that gets a copy of each checkpoint in the background."""
    load_hf: AtStart[LocalPath | None] = None
    """Diffusers folder, of a transformer or a pipeline, whose weights a new run starts from."""
    load_data_position: Live[bool] = True
    """Continue the data where the checkpoint left them; false starts them anew, once (new data)."""
    save_interval: Live[int] = 1000
    """Steps between checkpoints; there is always one at the end."""
    keep_last: Live[int] = 3
    """Newest checkpoints to keep, beside the one of lowest validation loss; 0 keeps all."""
    async_save: Live[bool] = False
    """Write in the background; the run waits only for the copy to host memory."""
    also_save_hf: Live[bool] = False
    """Export each checkpoint for Hugging Face Diffusers as well, to `diffusers` in `save`."""
    finetune: AtStart[bool] = False
    """Take only the weights from `load`, and start a new run in `save` at step 0."""
    finetune_weights: AtStart[Weights] = Weights.MODEL
    """Which weights `finetune` takes: the trained ones (model), or their average (ema)."""

    def __post_init__(self) -> None:
        check(
            *at_least_one(self, "save_interval"),
            *not_negative(self, "keep_last"),
            (
                not self.also_save_hf or self.save is not None,
                "also_save_hf=true exports into save, which is null; set checkpoint.save",
            ),
            (
                self.mirror is None or self.save is not None,
                f"mirror={self.mirror} copies the checkpoints in save, which is null; set"
                " checkpoint.save",
            ),
            (
                not self.finetune or (self.load is not None and self.load != self.save),
                f"finetune=true takes weights from load={self.load} into a new run in"
                f" save={self.save}; set both, to different folders",
            ),
            (
                self.load_hf is None or self.load is None,
                f"load_hf={self.load_hf} and load={self.load} both say where the weights of a new"
                f" run come from{' (finetune=true)' if self.finetune else ''}; leave one of them"
                " out. A run goes on from the checkpoints in save by itself",
            ),
            *numbers(self),
        )


class WandbMode(StrEnum):
    """Whether W&B is logged to directly, into the run folder for `wandb sync`, or not at all."""

    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerConfig:
    """Logging of metrics: terminal, metrics.jsonl, TensorBoard, W&B."""

    log_interval: Live[int] = 10
    """Steps between lines in the terminal, TensorBoard and W&B; metrics.jsonl has every step."""
    tensorboard_dir: Live[LocalPath | None] = None
    """Null is `tensorboard` in the run folder."""
    wandb_project: Live[str | None] = None
    """Project in W&B; null does not log there."""
    wandb_exp_name: Live[str | None] = None
    """Name of the run in W&B; null is the name of the run folder."""
    wandb_entity: Live[str | None] = None
    """User or team in W&B; null is the account's own."""
    wandb_mode: Live[WandbMode | None] = None
    """online, offline (kept in the run folder), or disabled; null is $WANDB_MODE, else online."""
    price_per_gpu_hour: Live[float | None] = None
    """Price of one device for an hour; a run ends with what it cost since its start."""
    watts_per_gpu: Live[float | None] = None
    """Watts that one device takes with its part of the machine; a run ends with its energy."""

    def __post_init__(self) -> None:
        check(
            *at_least_one(self, "log_interval"),
            *positive(self, "price_per_gpu_hour", "watts_per_gpu"),
            *numbers(self, price_per_gpu_hour=2**30, watts_per_gpu=2**30),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole run. Its network is of one family, so that `model` has no default."""

    model: ModelConfig
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    ddp: DdpConfig = field(default_factory=DdpConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    rng: RngConfig = field(default_factory=RngConfig)

    def __post_init__(self) -> None:
        warmup, horizon = self.scheduler.lr_warmup_iters, self.decay_iters
        ends = "train.train_iters" if self.scheduler.lr_decay_iters is None else None
        mixture = self.dataset.mock_samples if self.dataset.mock else ()
        multiple, context = self.dataset.sample_multiple, self.model.context_parallel_size
        ring = context > 1 and self.model.cp_comm_type is ContextComm.P2P
        parts = 2 * context if ring else context
        check(
            (
                warmup < horizon,
                f"scheduler.lr_warmup_iters={warmup} must lie below the decay horizon {horizon}"
                f" ({ends or 'scheduler.lr_decay_iters'});"
                f" set scheduler.lr_warmup_iters={horizon // 10}, or more steps",
            ),
            (
                multiple % parts == 0,
                f"model.context_parallel_size={context} ranks share the tokens of every sample, and"
                f" dataset.sample_multiple={multiple} does not divide by"
                f" {f'{parts}, for cp_comm_type=p2p gives each two pieces' if ring else 'it'}; use"
                f" dataset.sample_multiple={math.lcm(multiple, parts)} from the start of the run,"
                " or other ranks",
            ),
            *share_rules(self, parts),
            (
                # Transformer Engine refuses it for packs, or pays for it with memory of T x T.
                not (ring and self.train.deterministic),
                "train.deterministic=true has no kernel for model.cp_comm_type=p2p, Transformer"
                " Engine's ring; leave it out, or use cp_comm_type=a2a or all_gather",
            ),
            (
                not self.samples or self.objective.covers_all_levels,
                f"objective.level_range={list(self.objective.level_range or ())} trains the"
                " expert of these levels alone, and samples need all levels; leave"
                " validation.prompts_file and validation.num_captions unset",
            ),
            (
                not self.optimizer.narrow_moments or self.ddp.use_distributed_optimizer,
                f"optimizer.exp_avg_dtype={self.optimizer.exp_avg_dtype} and"
                f" optimizer.exp_avg_sq_dtype={self.optimizer.exp_avg_sq_dtype} are Megatron-Core's"
                " distributed optimizer's; set ddp.use_distributed_optimizer=true, or leave them"
                " out",
            ),
            (
                self.lora.base_dtype is None or self.model.fp8 is None,
                f"model.fp8={self.model.fp8} rounds whole weights for products of Transformer"
                f" Engine, and lora.base_dtype={self.lora.base_dtype} keeps none; leave one of"
                " them out",
            ),
            (
                not self.model.blocks_to_swap
                or self.lora.enabled
                or any(group.frozen for group in self.optimizer.groups),
                f"model.blocks_to_swap={self.model.blocks_to_swap} lets frozen weights wait on the"
                " host, and all weights are trained; set lora.rank, or freeze blocks with"
                " optimizer.groups, or model.cpu_offloading_num_layers for activations",
            ),
            (
                self.lora.enabled or self.objective.drift_weight == 0,
                f"objective.drift_weight={self.objective.drift_weight:g} is a distance to the"
                " network without its adapters, and all weights are trained; set lora.rank, or"
                " leave it out",
            ),
            (
                self.lora.enabled or self.objective.preference is None,
                f"objective.preference={self.objective.preference} compares with the network"
                " without its adapters, and all weights are trained, so that it would take a"
                " second network; set lora.rank, or leave it out",
            ),
            (
                self.objective.preference is None
                or (self.model.token_route is None and self.objective.level_share is None),
                f"objective.preference={self.objective.preference} compares errors of whole"
                " samples, and model.route_from and route_to leave tokens out, or"
                " objective.second_level_rate parts them; leave one of them out",
            ),
            (
                not (self.lora.enabled and self.optimizer.groups),
                "optimizer.groups names weights, and lora.rank or lora.init_from trains adapters"
                " in their place; leave optimizer.groups out. lora.targets says which linears get"
                " one, lora.plus_ratio how much faster B learns than A",
            ),
            (
                not (self.lora.enabled and self.optimizer.kind is OptimizerKind.MUON),
                "optimizer.kind=muon makes a full-size step of the second matrix of an adapter,"
                " which starts at zero, and lora.rank or lora.init_from trains adapters; leave"
                " optimizer.kind out",
            ),
            *self._warm_start(),
            *self._weights_in_shares(),
            *(
                (
                    not value or not self.dataset.mock,
                    f"validation.{name}={value} needs a text encoder, and mock data have none;"
                    " leave it unset, and use validation.num_captions instead",
                )
                for name in ("prompts_file", "negative_prompt")
                for value in [getattr(self.validation, name)]
            ),
            *(
                (not wrong, f"dataset.mock_samples[{index}]: {wrong}")
                for index, geometry in enumerate(mixture)
                for wrong in [self._mock_problem(geometry)]
            ),
        )

    def _warm_start(self) -> list[Rule]:
        """What `train.warm_start_ema` needs."""
        if not self.train.warm_start_ema:
            return []
        c, kind = self.checkpoint, self.ema.kind
        return [
            (
                kind is not EmaKind.NONE,
                "train.warm_start_ema=true is of an average, and ema.kind=none keeps none; set"
                " ema.kind, or leave it out",
            ),
            (
                c.finetune or c.load_hf is not None,
                "train.warm_start_ema=true goes on with the average of other weights, and the run"
                " starts from none; set checkpoint.finetune=true and checkpoint.load, or"
                " checkpoint.load_hf, or leave it out",
            ),
            (
                c.load_hf is None or kind is not EmaKind.POWER,
                f"train.warm_start_ema=true with ema.kind={kind} needs the number of updates behind"
                f" the weights, which checkpoint.load_hf={c.load_hf} does not say; set"
                " ema.kind=constant, or leave it out",
            ),
        ]

    def _weights_in_shares(self) -> list[Rule]:
        """What `ddp.sharding=weights` cannot have."""
        if self.ddp.sharding is Sharding.OPTIMIZER:
            return []
        model, optimizer = self.model, self.optimizer
        narrower = self.lora.dtype is Precision.BF16 and model.precision is Precision.FP32
        virtual = model.virtual_pipeline_model_parallel_size
        engine = model.transformer_impl is Implementation.TRANSFORMER_ENGINE
        moments = (
            f"optimizer.exp_avg_dtype={optimizer.exp_avg_dtype} and"
            f" optimizer.exp_avg_sq_dtype={optimizer.exp_avg_sq_dtype}"
        )
        without = [  # what a run wants, its keys, and what to set instead
            (
                model.virtual_stages > 1,
                f"model.virtual_pipeline_model_parallel_size={virtual}",
                "leave it out: stages that are not virtual go with it",
            ),
            (
                model.gradient_accumulation_fusion,
                "model.gradient_accumulation_fusion=true",
                "leave it out: gradients are summed as rows",
            ),
            (
                model.blocks_to_swap > 0,
                f"model.blocks_to_swap={model.blocks_to_swap}",
                "leave it out: each rank has rows of the frozen blocks",
            ),
            (
                model.cpu_offloading_num_layers > 0,
                f"model.cpu_offloading_num_layers={model.cpu_offloading_num_layers}",
                "set model.recompute_granularity=full for fewer activations",
            ),
            (
                engine,
                f"model.transformer_impl={model.transformer_impl}",
                "set model.transformer_impl=local; model.attention_backend may be any",
            ),
            (
                narrower,
                f"lora.dtype={self.lora.dtype} below model.precision={model.precision}",
                "leave lora.dtype out",
            ),
            (
                optimizer.narrow_moments,
                moments,
                "set optimizer.optimizer_cpu_offload=true, which keeps moments in host memory",
            ),
        ]
        return [
            (
                not wanted,
                f"{setting} does not go with ddp.sharding=weights: {instead}; or set"
                " ddp.sharding=optimizer",
            )
            for wanted, setting, instead in without
        ]

    @property
    def samples(self) -> bool:
        """Whether the run generates samples at validations; that needs a run folder to write to."""
        train, c = self.train, self.validation
        validates = train.eval_interval > 0 and train.eval_iters > 0
        return validates and c.samples and self.checkpoint.save is not None

    @property
    def guidance(self) -> float:
        """Scale g in uncond + g (cond - uncond) of what is generated, if none is asked for."""
        if self.validation.guidance is not None:
            return self.validation.guidance
        return GUIDANCE if self.objective.guidance is None else 1.0

    def _mock_problem(self, geometry: MockGeometry) -> str:
        """Why this mock sample fits in no pack; empty if it fits."""
        model, capacity = self.model, self.dataset.task_encoder_seq_length
        size = (geometry.frames, geometry.height, geometry.width)
        shape = "frames={} height={} width={}".format(*size)
        patch = (model.patch_temporal, model.patch_spatial, model.patch_spatial)
        if any(side % part for side, part in zip(size, patch, strict=True)):
            return (
                f"{shape} does not divide into patches of model.patch_temporal={patch[0]} and"
                f" model.patch_spatial={patch[1]}"
            )
        most = model.largest_latent
        if most and any(side > end for side, end in zip(size, most, strict=True)):
            return f"{shape} exceeds the largest latent of the network, {most} (model.max_size)"
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

    @property
    def sample_multiple(self) -> int:
        """Each sample is padded to a multiple of this many tokens, attended padding included."""
        return math.lcm(self.dataset.sample_multiple, self.model.attended_multiple)

    def mock_tokens(self, geometry: MockGeometry) -> int:
        """Tokens of one mock sample, padded to `sample_multiple`."""
        multiple = self.sample_multiple
        tokens = self.model.tokens_of(geometry.frames, geometry.height, geometry.width)
        return -(-tokens // multiple) * multiple

    def optimizer_ranks(self, replicas: int) -> int:
        """Ranks over which one copy of the optimizer state is sharded, of so many model replicas.

        Context ranks have the same weights, so they share the state as well.
        """
        if not self.ddp.use_distributed_optimizer:
            return 1
        return replicas * self.model.context_parallel_size // self.ddp.dp_replicate_size

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model on `world_size` processes.

        Raises:
            Problems: the processes do not divide, or the global batch does not.
        """
        parts = self.model.model_parallel_size
        check(
            (
                world_size % parts == 0,
                f"{world_size} processes do not divide by tensor * context * pipeline = {parts};"
                f" start a multiple of {parts} (--nproc-per-node, --nnodes)",
            )
        )
        replicas = world_size // parts
        copies, ranks = self.ddp.dp_replicate_size, replicas * self.model.context_parallel_size
        check(
            (
                ranks % copies == 0,
                f"ddp.dp_replicate_size={copies} does not divide the {ranks} data-parallel and"
                " context ranks",
            )
        )
        batch = self.train.global_batch_size
        stages = self.model.pipeline_model_parallel_size if self.model.virtual_stages > 1 else 1
        check(
            (
                batch % replicas == 0,
                f"train.global_batch_size={batch} packs do not divide over {replicas}"
                f" data-parallel ranks; use a multiple of {replicas}",
            ),
            (
                batch % (replicas * stages) == 0,
                f"train.global_batch_size={batch} packs over {replicas} data-parallel ranks are"
                f" {batch / replicas:g} each, and virtual pipeline stages need a multiple of"
                f" model.pipeline_model_parallel_size={stages}; use a multiple of"
                f" {replicas * stages}",
            ),
        )
        return replicas

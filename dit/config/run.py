"""The whole configuration of a run, and the rules between its groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dit.config.checks import Rule, check
from dit.config.choices import (
    ContextComm,
    DistillMethod,
    Implementation,
    LossKind,
    ObjectiveName,
    Precision,
    Sampler,
    SamplingLevels,
)
from dit.config.data import MockGeometry
from dit.config.groups import DistillConfig, RunGroups
from dit.config.training import EmaConfig, EmaKind, OptimizerKind, Sharding


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunGroups):
    """The whole configuration of a run; `model` has no default, because families differ."""

    def __post_init__(self) -> None:
        check(*_rules(self))

    @property
    def of_critic(self) -> RunConfig:
        """The run's configuration, with learning rate, schedule and EMA of DMD's critic."""
        c, optimizer, ema = self.distill, self.optimizer, EmaConfig(kind=EmaKind.NONE)
        if (rate := c.critic_lr) is not None:
            floor = optimizer.min_lr * rate / optimizer.lr
            optimizer = replace(optimizer, lr=rate, min_lr=floor)
        told = {
            "lr_decay_style": c.critic_lr_decay_style,
            "lr_warmup_iters": c.critic_lr_warmup_iters,
        }
        told = {key: value for key, value in told.items() if value is not None}
        scheduler, train = (
            replace(self.scheduler, **told),  # type: ignore[arg-type]
            replace(self.train, warm_start_ema=False),
        )
        if c.critic_ema_decay is not None:
            ema = EmaConfig(kind=EmaKind.CONSTANT, decay=c.critic_ema_decay)
        return replace(self, optimizer=optimizer, scheduler=scheduler, ema=ema, train=train)

    def of_network(self, *, critic: bool) -> RunConfig:
        """The configuration of the trained network, or with `critic` that of DMD's critic.

        The critic's configuration has no distillation.
        """
        return replace(self.of_critic, distill=DistillConfig()) if critic else self

    def data_parallel_size(self, world_size: int) -> int:
        """Number of replicas of the model on `world_size` processes.

        Raises:
            Problems: the parallel sizes do not divide the processes, ddp.dp_replicate_size does not
                divide the data ranks, or the global batch does not divide over replicas and virtual
                stages.
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
                f" context ranks; choose a divisor of {ranks}",
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


def _rules(run: RunGroups) -> Iterator[Rule]:
    """All rules that concern several groups of `run`."""
    yield from _steps(run)
    yield from _validation(run)
    yield _guidance(run)
    yield from _tokens(run)
    yield from _memory(run)
    yield from _adapters(run)
    yield from _distillation(run)
    yield from _warm_start(run)
    yield from _weights_in_shares(run)
    yield from _mock_data(run)


def _steps(run: RunGroups) -> list[Rule]:
    """Rules that warm-up ends before the decay horizon, and that samples need all noise levels."""
    warmup, horizon = run.scheduler.lr_warmup_iters, run.decay_iters
    ends = "train.train_iters" if run.scheduler.lr_decay_iters is None else None
    return [
        (
            warmup < horizon,
            f"scheduler.lr_warmup_iters={warmup} must lie below the decay horizon {horizon}"
            f" ({ends or 'scheduler.lr_decay_iters'});"
            f" set scheduler.lr_warmup_iters={horizon // 10}, or more steps",
        ),
        (
            not run.samples or run.objective.covers_all_levels,
            f"objective.level_range={list(run.objective.level_range or ())} trains the"
            " expert of these levels alone, and samples need all levels; leave"
            " validation.prompts_file and validation.num_captions unset",
        ),
    ]


def _validation(run: RunGroups) -> list[Rule]:
    """Rules about fixed noise levels, the target of the validation loss, and MLPerf's log."""
    target, train = run.validation.target, run.train
    return [
        (
            not run.validation.fixed_levels or run.objective.name == "flow",
            "validation.fixed_levels=true needs the noise levels of flow matching, and"
            f" objective.name={run.objective.name}; set objective.name=flow, or leave"
            " validation.fixed_levels out",
        ),
        (
            target is None or (train.eval_interval > 0 and train.eval_iters > 0),
            f"validation.target={target} is a validation loss, and"
            f" train.eval_interval={train.eval_interval} with train.eval_iters={train.eval_iters}"
            " never validates; set both above 0, or validation.target=null",
        ),
        (
            run.logger.mlperf_division is None or target is not None,
            f"logger.mlperf_division={run.logger.mlperf_division} logs the way to a target; set"
            " validation.target, or logger.mlperf_division=null",
        ),
    ]


def _guidance(run: RunGroups) -> Rule:
    """The rule that a network distilled to need no guidance is validated without it."""
    scale, unguided = run.validation.guidance, run.model.unguided_by
    return (
        scale in (None, 1) or unguided is None,
        f"validation.guidance={scale}: the network was distilled to steps without guidance"
        f" ({unguided}); set it to 1 or null",
    )


def _tokens(run: RunGroups) -> list[Rule]:
    """Rules about the tokens of a sample, for parallelism and methods of training."""
    multiple, context = run.dataset.sample_multiple, run.model.context_parallel_size
    ring = context > 1 and run.model.cp_comm_type is ContextComm.P2P
    parts = 2 * context if ring else context
    return [
        (
            multiple % parts == 0,
            f"model.context_parallel_size={context} ranks share the tokens of every sample, and"
            f" dataset.sample_multiple={multiple} does not divide by"
            f" {f'{parts}, for cp_comm_type=p2p gives each two pieces' if ring else 'it'}; use"
            f" dataset.sample_multiple={math.lcm(multiple, parts)} from the start of the run,"
            " or another model.context_parallel_size",
        ),
        *_shares_of_samples(run, parts),
        (
            # Transformer Engine refuses it for packs, or pays for it with memory of T x T.
            not (ring and run.train.deterministic),
            "train.deterministic=true has no kernel for model.cp_comm_type=p2p, Transformer"
            " Engine's ring; set it to false, or use model.cp_comm_type=a2a or all_gather",
        ),
        (
            run.objective.preference is None
            or (run.model.token_route is None and run.objective.level_share is None),
            f"objective.preference={run.objective.preference} compares errors of whole"
            " samples: leave out model.route_from and route_to, which skip tokens, and"
            " objective.second_level_rate, which divides a sample; or objective.preference",
        ),
    ]


def _shares_of_samples(run: RunGroups, parts: int) -> list[Rule]:
    """Rules about token routes and two noise levels, which divide the tokens of a sample.

    Some families exclude two levels. Each of the `parts` shards of a sample must consist of whole
    runs of neighbouring tokens.
    """
    model, objective, multiple = run.model, run.objective, run.dataset.sample_multiple
    rules = [
        (
            objective.level_share is None or not model.attends_to_padding,
            f"objective.second_level_rate={objective.second_level_rate} divides the tokens of a"
            f" sample, and model.family={model.family} attends to its padding; set"
            " objective.second_level_rate=0",
        ),
        (
            objective.level_share is None or model.whole_samples_by is None,
            f"objective.second_level_rate={objective.second_level_rate} divides the tokens of a"
            f" sample, and {model.whole_samples_by} needs all of them together; set"
            " objective.second_level_rate=0",
        ),
    ]
    pieces = f" in each of {parts} pieces of a sample" if parts > 1 else ""
    for key, rate, share in (
        ("model.route_rate", model.route_rate, model.token_route),
        ("objective.second_level_rate", objective.second_level_rate, objective.level_share),
    ):
        if share is None:
            continue
        parts *= share.run  # pieces of the parts of a sample are whole runs of the route
        rules.append(
            (
                multiple % parts == 0,
                f"{key}={rate} sets {share.run - share.kept} of {share.run} neighbouring tokens"
                f" apart{pieces}, and dataset.sample_multiple={multiple} does not divide by"
                f" {parts}; use dataset.sample_multiple={math.lcm(multiple, parts)} from the start"
                " of the run, or a rate of fewer digits such as 0.5",
            )
        )
    return rules


def _memory(run: RunGroups) -> list[Rule]:
    """Rules about options that save memory."""
    return [
        (
            not run.optimizer.narrow_moments or run.ddp.use_distributed_optimizer,
            f"optimizer.exp_avg_dtype={run.optimizer.exp_avg_dtype} and"
            f" optimizer.exp_avg_sq_dtype={run.optimizer.exp_avg_sq_dtype} need Megatron-Core's"
            " distributed optimizer; set ddp.use_distributed_optimizer=true, or leave them"
            " out",
        ),
        (
            run.lora.base_dtype is None or run.model.fp8 is None,
            f"model.fp8={run.model.fp8} rounds bfloat16 weights for each product, and"
            f" lora.base_dtype={run.lora.base_dtype} keeps them in 8 bits already; leave one of"
            " them out",
        ),
        (
            not run.model.blocks_to_swap
            or run.lora.enabled
            or any(group.frozen for group in run.optimizer.groups),
            f"model.blocks_to_swap={run.model.blocks_to_swap} keeps frozen weights on the"
            " host, and all weights are trained; set lora.rank, or freeze blocks with"
            " optimizer.groups, or model.cpu_offloading_num_layers for activations",
        ),
    ]


def _adapters(run: RunGroups) -> list[Rule]:
    """Rules about options that need adapters, and options that exclude them."""
    return [
        (
            run.lora.enabled or run.objective.drift_weight == 0,
            f"objective.drift_weight={run.objective.drift_weight:g} is a distance to the"
            " network without its adapters, and all weights are trained; set lora.rank, or"
            " leave it out",
        ),
        (
            run.lora.enabled or run.objective.preference is None,
            f"objective.preference={run.objective.preference} compares with the network"
            " without its adapters, and all weights are trained, so that it would take a"
            " second network; set lora.rank, or leave it out",
        ),
        (
            not (run.lora.enabled and run.optimizer.groups),
            "optimizer.groups names weights, and lora.rank or lora.init_from trains adapters"
            " in their place; leave optimizer.groups out. lora.targets says which linears get"
            " one, lora.plus_ratio how much faster B learns than A",
        ),
        (
            not (run.lora.enabled and run.optimizer.kind is OptimizerKind.MUON),
            "optimizer.kind=muon makes a full-size step of the second matrix of an adapter,"
            " which starts at zero, and lora.rank or lora.init_from trains adapters; leave"
            " optimizer.kind out",
        ),
    ]


def _distillation(run: RunGroups) -> list[Rule]:
    """Rules about a student and its teacher, and about methods that exclude distillation."""
    c, objective = run.distill, run.objective
    if c.method is None:
        return []
    said = f"distill.method={c.method}"
    listed = objective.sampling_timesteps
    others = [  # whether it is set, its key, and what to do
        (objective.preference is not None, f"objective.preference={objective.preference}"),
        (objective.cfg_target is not None, f"objective.cfg_target={objective.cfg_target}"),
        (objective.drift_weight > 0, f"objective.drift_weight={objective.drift_weight:g}"),
        (objective.level_share is not None, "objective.second_level_rate"),
        (objective.level_range is not None, "objective.level_range"),
        (run.model.token_route is not None, "model.route_from"),
        (run.lora.frozen_adapter is not None, "lora.frozen_adapter"),
    ]
    if c.method is DistillMethod.DMD:
        others += [
            (objective.loss is LossKind.HUBER, f"objective.loss={objective.loss}"),
            (run.lora.dropout > 0, f"lora.dropout={run.lora.dropout:g}"),
            (run.model.blocks_to_swap > 0, f"model.blocks_to_swap={run.model.blocks_to_swap}"),
        ]
    return [
        (
            objective.name == ObjectiveName.FLOW,
            f"{said} needs flow matching, and objective.name={objective.name}; distil a network of"
            " objective.name=flow",
        ),
        (
            c.teacher is not None or run.lora.enabled,
            f"{said} with all weights trained needs a teacher beside the student; set"
            " distill.teacher to its run folder, checkpoint or Diffusers folder, or set lora.rank:"
            " then the base is the teacher",
        ),
        *_levels_of_student(run),
        (
            (c.critic_lr_warmup_iters or 0) < run.decay_iters,
            f"distill.critic_lr_warmup_iters={c.critic_lr_warmup_iters} must lie below the decay"
            f" horizon {run.decay_iters}; lower it, or take more steps",
        ),
        (
            listed is None or len(listed) == c.steps,
            f"distill.steps={c.steps}: objective.sampling_timesteps lists {len(listed or ())}"
            " timesteps, one for each step; make them equal",
        ),
        *(
            (
                not wanted,
                f"{key} does not go with {said}, whose targets are the teacher's; leave it out",
            )
            for wanted, key in others
        ),
    ]


def _levels_of_student(run: RunGroups) -> list[Rule]:
    """Rules about the noise levels that a student's sampler visits."""
    c, levels = run.distill, run.objective.sampling_levels
    lcm, noisy = levels is SamplingLevels.LCM, c.sampler is Sampler.LCM
    by_euler = run.objective.steps_evenly or levels is SamplingLevels.LINEAR_QUADRATIC
    return [
        (
            by_euler and (noisy or not lcm),
            f"distill.method={c.method} takes Euler's steps, and objective.sampling_levels={levels}"
            " belongs to another sampler; set objective.sampling_levels=linear, or even where the"
            " pipeline hands its own levels to the scheduler (FLUX, Qwen-Image)",
        ),
        (
            not noisy or lcm,
            f"distill.student_sampler={c.student_sampler} makes new noise at each level, as"
            f" FlowMatchLCMScheduler does, and objective.sampling_levels={levels} is exported as"
            " another scheduler; set objective.sampling_levels=lcm, or"
            " distill.student_sampler=ode",
        ),
    ]


def _warm_start(run: RunGroups) -> list[Rule]:
    """Rules about `train.warm_start_ema`."""
    if not run.train.warm_start_ema:
        return []
    c, kind = run.checkpoint, run.ema.kind
    return [
        (
            kind is not EmaKind.NONE,
            "train.warm_start_ema=true goes on with an average, and ema.kind=none keeps none; set"
            " ema.kind, or leave train.warm_start_ema out",
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


def _weights_in_shares(run: RunGroups) -> list[Rule]:
    """Rules about options that FSDP (`ddp.sharding=weights`) excludes."""
    if run.ddp.sharding is Sharding.OPTIMIZER:
        return []
    model, optimizer = run.model, run.optimizer
    narrower = run.lora.dtype is Precision.BF16 and model.precision is Precision.FP32
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
            "leave it out (pipeline stages without virtual ones are allowed)",
        ),
        (
            model.gradient_accumulation_fusion,
            "model.gradient_accumulation_fusion=true",
            "leave it out (gradients are sharded by rows)",
        ),
        (
            model.blocks_to_swap > 0,
            f"model.blocks_to_swap={model.blocks_to_swap}",
            "leave it out (each rank holds only some rows of the frozen blocks)",
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
            f"lora.dtype={run.lora.dtype} below model.precision={model.precision}",
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


def _mock_data(run: RunGroups) -> Iterator[Rule]:
    """Rules about mock data, which have no text encoder and must fit into packs."""
    if not run.dataset.mock:
        return
    for name in ("prompts_file", "negative_prompt"):
        value = getattr(run.validation, name)
        yield (
            not value,
            f"validation.{name}={value} needs a text encoder, and mock data have none; leave it"
            " unset, and use validation.num_captions instead",
        )
    for index, geometry in enumerate(run.dataset.mock_samples):
        wrong = _mock_problem(run, geometry)
        yield not wrong, f"dataset.mock_samples[{index}]: {wrong}"


def _mock_problem(run: RunGroups, geometry: MockGeometry) -> str:
    """Reason why the network or a pack cannot take this mock sample; empty if both can."""
    model, capacity = run.model, run.dataset.task_encoder_seq_length
    size = (geometry.frames, geometry.height, geometry.width)
    shape = "frames={} height={} width={}".format(*size)
    patch = (model.patch_temporal, model.patch_spatial, model.patch_spatial)
    if any(side % part for side, part in zip(size, patch, strict=True)):
        return (
            f"{shape} does not divide into patches of model.patch_temporal={patch[0]} and"
            f" model.patch_spatial={patch[1]}; choose multiples of these"
        )
    if any(side % model.side_cells for side in size[1:]):
        return (
            f"{shape}: model.family={model.family} takes heights and widths that are multiples of"
            f" {model.side_cells}; choose such sizes"
        )
    most = model.largest_latent
    if most and any(side > end for side, end in zip(size, most, strict=True)):
        return (
            f"{shape} exceeds the largest latent of the network, {most}; lower it, or raise"
            " model.max_size"
        )
    if run.mock_tokens(geometry) > capacity:
        return (
            f"{shape} needs {run.mock_tokens(geometry)} tokens of model.family={model.family},"
            f" more than dataset.task_encoder_seq_length={capacity}; lower the size, or raise that"
            " key"
        )
    return ""

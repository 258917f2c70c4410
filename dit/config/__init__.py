"""The configuration of a run: one tree of dataclasses, each checked in its `__post_init__`.

    run        RunConfig, the whole tree, and the rules between its groups
    groups     checkpoints, distillation, logs; all groups side by side, and what follows from them
    model      fields that the networks of all families share; a family adds its own in its folder
    sparsity   methods that use a part of the tokens or keys: token routing, two noise levels,
               sparse attention
    data       sources of samples, real or synthetic, and how samples are packed
    objective  EDM and flow matching: noise levels, preconditioning, loss weights
    lora       low-rank adapters: ranks, adapted linears, storage of the frozen weights
    training   steps, AdamW, learning rate, EMA, data parallelism, seed
    validation sets of held-out samples, and the samples that are generated during a run
    choices    enums of the keys of network and objective
    resume     effect of a changed key on a run that resumes from its checkpoint
    checks     Problems, and rules that several groups use

Precedence, weakest first: recipe function, YAML file, command line (`dit.config_loading`). Keys
have the names that users of Megatron-Bridge and DFM know. A checkpoint stores the whole tree. The
sentence below each field is its help text.
"""

from dit.config.checks import Problems
from dit.config.choices import (
    AttentionBackend,
    ContextComm,
    DistillMethod,
    FlowPrediction,
    Fp8,
    Fp8Recipe,
    Implementation,
    InitMethod,
    LevelDensity,
    LevelSpacing,
    LossKind,
    LossMean,
    ObjectiveName,
    Precision,
    Preference,
    Recompute,
    RecomputeMethod,
    Rollout,
    Sampler,
    SamplingLevels,
    SoundLevels,
    StudentSampler,
    TargetSchedule,
    TextPadding,
    TimeShift,
    Weighting,
)
from dit.config.data import Balance, BlendEntry, DatasetConfig, MockGeometry
from dit.config.groups import CheckpointConfig, DistillConfig, LoggerConfig, WandbMode, Weights
from dit.config.lora import BaseType, LoraConfig, LoraStreams, LoraTargets
from dit.config.model import CUSTOM_SIZE, OTHER_NETWORKS, ModelConfig
from dit.config.objective import MODE_SCALES, OBJECTIVES, EdmConfig, FlowConfig, ObjectiveConfig
from dit.config.run import RunConfig
from dit.config.training import (
    DdpConfig,
    Decay,
    DistConfig,
    EmaConfig,
    EmaKind,
    MomentType,
    OptimizerConfig,
    OptimizerKind,
    ParameterGroup,
    RngConfig,
    SchedulerConfig,
    Sharding,
    TrainConfig,
)
from dit.config.validation import ValidationConfig, ValidationSet

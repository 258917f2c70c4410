"""One tree of dataclasses describes a run; every check lives in a `__post_init__`.

    run        RunConfig: the whole tree, checkpoints and logs, and the rules between groups
    data       samples, real or synthetic, and how they share a pack
    model      what the networks of all families share; a family adds fields in its own folder
    choices    values that settings of the network choose from
    objective  noise levels, preconditioning, loss weights
    training   steps, AdamW, learning rate, EMA, data parallelism, validation, seed
    checks     `Problems`, and rules that several groups use
    loading    recipe, YAML file and command line -> the tree

Precedence, weakest first: recipe function, YAML file, command line. Key names are those that
Megatron-Bridge and DFM users know. A checkpoint stores the whole tree. The sentence below a field
is its help text.
"""

from dit.config.checks import Problems
from dit.config.choices import (
    ContextComm,
    Fp8,
    Fp8Recipe,
    Implementation,
    Precision,
    Recompute,
    RecomputeMethod,
    WandbMode,
)
from dit.config.data import Balance, BlendEntry, DatasetConfig, MockGeometry
from dit.config.model import (
    CUSTOM_SIZE,
    ModelConfig,
)
from dit.config.objective import (
    MODE_SCALES,
    LevelDensity,
    LossMean,
    ObjectiveConfig,
    ObjectiveName,
    Sampler,
    Weighting,
)
from dit.config.run import CheckpointConfig, LoggerConfig, RunConfig, Weights
from dit.config.training import (
    DdpConfig,
    Decay,
    DistConfig,
    EmaConfig,
    EmaKind,
    OptimizerConfig,
    RngConfig,
    SchedulerConfig,
    TrainConfig,
    ValidationConfig,
    ValidationSet,
)

__all__ = [
    "CUSTOM_SIZE",
    "MODE_SCALES",
    "Balance",
    "BlendEntry",
    "CheckpointConfig",
    "ContextComm",
    "DatasetConfig",
    "DdpConfig",
    "Decay",
    "DistConfig",
    "EmaConfig",
    "EmaKind",
    "Fp8",
    "Fp8Recipe",
    "Implementation",
    "LevelDensity",
    "LoggerConfig",
    "LossMean",
    "MockGeometry",
    "ModelConfig",
    "ObjectiveConfig",
    "ObjectiveName",
    "OptimizerConfig",
    "Precision",
    "Problems",
    "Recompute",
    "RecomputeMethod",
    "RngConfig",
    "RunConfig",
    "Sampler",
    "SchedulerConfig",
    "TrainConfig",
    "ValidationConfig",
    "ValidationSet",
    "WandbMode",
    "Weighting",
    "Weights",
]

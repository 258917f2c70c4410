"""One tree of dataclasses describes a run; every check lives in a `__post_init__`.

    run        RunConfig: the whole tree, and what must hold between its groups
    model      sizes of the network, precision, and how it is spread over devices
    data       samples, real or synthetic, and how they share a pack
    objective  noise levels, preconditioning, weights
    training   steps, AdamW, learning rate, EMA, parallelism, seed
    records    checkpoints and logs
    checks     Problems, and the rules that the groups share

Precedence, weakest first: recipe function, YAML file, command line (`dit.config.loading`). Names
are those that Megatron-Bridge and DFM users know. A checkpoint stores the whole tree. The sentence
below each field is its help text.
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
from dit.config.outputs import CheckpointConfig, LoggerConfig, Weights
from dit.config.run import RunConfig
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

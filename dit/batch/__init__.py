"""The data types that pass between folders, from shard to network.

1. sample        `LatentSample`: one encoded sample of a shard
2. methods       types of what a training method, or a kind of input, adds to a pack
3. token_stream  `TokenStream`: the tokens of one modality
4. packed_batch  `PackedBatch`: what the loader passes to the step, streams of the same samples
5. problem       `Problem`: the regression that an objective sets for the network

All are frozen.
"""

from dit.batch.methods import (
    AdapterDropout,
    CleanTokens,
    ConditionLevels,
    FixedLevels,
    GuidanceInput,
    KeptTokens,
    LatentVariance,
    NoisyTokens,
    NullTexts,
    Pairs,
    Parts,
    Perturbation,
    PictureTexts,
    ReferenceGrids,
    Route,
    StepEnd,
    TokenWeights,
    by_type,
)
from dit.batch.packed_batch import LATENTS, PackedBatch
from dit.batch.problem import Problem
from dit.batch.sample import (
    NULL_TEXT,
    REJECTED_LATENT,
    SOUND,
    TEXT,
    Grid,
    LatentSample,
    NullInputs,
    pack_identity,
)
from dit.batch.token_stream import WHOLE, SequenceShard, TokenStream

__all__ = [
    "LATENTS",
    "NULL_TEXT",
    "REJECTED_LATENT",
    "SOUND",
    "TEXT",
    "WHOLE",
    "AdapterDropout",
    "CleanTokens",
    "ConditionLevels",
    "FixedLevels",
    "Grid",
    "GuidanceInput",
    "KeptTokens",
    "LatentSample",
    "LatentVariance",
    "NoisyTokens",
    "NullInputs",
    "NullTexts",
    "PackedBatch",
    "Pairs",
    "Parts",
    "Perturbation",
    "PictureTexts",
    "Problem",
    "ReferenceGrids",
    "Route",
    "SequenceShard",
    "StepEnd",
    "TokenStream",
    "TokenWeights",
    "by_type",
    "pack_identity",
]

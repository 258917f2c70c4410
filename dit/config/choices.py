"""Enums of the configuration keys that take one of several words: model first, then objective."""

from __future__ import annotations

from enum import StrEnum


class Precision(StrEnum):
    """Dtype of weights and matrix products; levels, positions and loss are always float32."""

    FP32 = "fp32"
    BF16 = "bf16"


class Recompute(StrEnum):
    """Activations that the backward pass recomputes instead of the forward pass storing them."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    AUTO = "auto"


class RecomputeMethod(StrEnum):
    """How full recomputation picks layers: all, in groups (uniform), or the first few (block)."""

    UNIFORM = "uniform"
    BLOCK = "block"


class InitMethod(StrEnum):
    """Initialisation of matrices that do not start at zero."""

    NORMAL = "normal"
    XAVIER = "xavier"


class Implementation(StrEnum):
    """The library whose linear layers are used."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"


class AttentionBackend(StrEnum):
    """Attention kernels, those of the newest GPUs first; auto picks the fastest installed one."""

    AUTO = "auto"
    FLASH_4 = "flash_4"  # the extra `attention`
    FLASH_3 = "flash_3"
    TRANSFORMER_ENGINE = "transformer_engine"  # whatever `transformer_impl` is
    CUDNN = "cudnn"  # the extra `cudnn`
    FLASH_2 = "flash_2"  # torch's own
    SDPA = "sdpa"  # torch's own, sample by sample: on CPUs, and in float32


class Fp8(StrEnum):
    """Formats of 8-bit matrix products: e4m3, or e4m3 with gradients in e5m2 (hybrid)."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Fp8Recipe(StrEnum):
    """Scale factors of FP8: one per tensor, per block of 128 numbers, or per 32 (Blackwell)."""

    TENSORWISE = "tensorwise"
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"


class ContextComm(StrEnum):
    """What context-parallel ranks exchange: attention heads (a2a), or keys and values.

    Keys and values go to all ranks at once (all_gather) or around a ring (p2p, which needs
    Transformer Engine).
    """

    A2A = "a2a"
    ALL_GATHER = "all_gather"
    P2P = "p2p"


class TextPadding(StrEnum):
    """Kinds of caption padding that attention treats as text."""

    STORED = "stored"  # what the text encoder makes of its padding, as the shards hold it


class ObjectiveName(StrEnum):
    """Names of the built-in objectives; `OBJECTIVES` has those that others registered, too."""

    EDM = "edm"
    FLOW = "flow"


class LevelDensity(StrEnum):
    """The density from which flow matching draws t (arXiv:2403.03206, Sec. 3.1)."""

    UNIFORM = "uniform"
    LOGIT_NORMAL = "logit_normal"
    MODE = "mode"


class FlowPrediction(StrEnum):
    """Quantity that a flow-matching network predicts for a noisy state."""

    VELOCITY = "velocity"  # noise - latent
    X = "x"  # the latent


class Weighting(StrEnum):
    """Loss weight of flow matching as a function of t."""

    NONE = "none"
    LINEAR = "linear"


class SamplingLevels(StrEnum):
    """Noise levels of a flow-matching sampler's steps."""

    LINEAR = "linear"  # even steps from 1 to 1/1000, then shifted, then 0
    # Even steps from 1 to 1 / number of steps, then shifted, then 0: what the pipelines of FLUX,
    # Qwen-Image and HunyuanVideo hand to Diffusers' scheduler.
    EVEN = "even"
    # The steps of EVEN, with a shift that depends on the numbers of tokens and steps and not on the
    # shift of training: what the pipelines of FLUX.2 hand to Diffusers' scheduler.
    EMPIRICAL = "empirical"
    # sigma / (1 + sigma) for sigma of arXiv:2206.00364, Eq. 5, then 0, as in Cosmos-Predict2.5
    KARRAS = "karras"
    # The levels of KARRAS without the final 0, so that noise of the last level stays, as in
    # Cosmos-Predict2. The first state is noise times the first level; with KARRAS it is the noise.
    KARRAS_TO_SIGMA_MIN = "karras_to_sigma_min"
    # The levels of Diffusers' UniPCMultistepScheduler with use_flow_sigmas, as in Wan: even steps
    # from 1 that leave 1/1000 out, shifted once, then 0. Timesteps are whole thousandths.
    UNIPC = "unipc"
    # Half of the steps from 1 to 0.975, then quadratic ones to 0, without a shift: what
    # LTXConditionPipeline hands to Diffusers' scheduler.
    LINEAR_QUADRATIC = "linear_quadratic"
    # Even quantiles of the density of training, shifted, from 0.9999 to 0.0006 at most, then 0:
    # what Ideogram4Pipeline hands to Diffusers' scheduler.
    QUANTILES = "quantiles"
    # As linear, for networks whose steps end in new noise: what FlowMatchLCMScheduler visits
    LCM = "lcm"


class LevelSpacing(StrEnum):
    """How a sampler's noise levels are spaced, as in Diffusers' `use_..._sigmas`."""

    KARRAS = "karras"  # arXiv:2206.00364, Eq. 5, with rho = 7 and t for sigma
    EXPONENTIAL = "exponential"  # even in ln t
    BETA = "beta"  # quantiles of a beta distribution, arXiv:2407.12173: more at both ends


class TimeShift(StrEnum):
    """Dependence of the time shift on the number of target tokens, as in Diffusers' pipelines."""

    EXPONENTIAL = "exponential"  # exp(mu)
    LINEAR = "linear"  # mu


class ValidationLatents(StrEnum):
    """Latents that validation takes where a dataset stores distributions: their mean, or a draw."""

    MEAN = "mean"
    DRAWN = "drawn"


class Sampler(StrEnum):
    """Solver of the sampling ODE; lcm solves none, and is for networks distilled for it."""

    EULER = "euler"  # one network call a step, first order
    HEUN = "heun"  # two calls a step, second order (arXiv:2206.00364, Algorithm 1 without churn)
    DPMPP = "dpm++"  # one call a step, second order, multistep (arXiv:2211.01095, 2M)
    UNIPC = "unipc"  # one call a step, second order, predictor-corrector (arXiv:2302.04867)
    LCM = "lcm"  # one call a step: the predicted latent, with new noise (arXiv:2310.04378)

    @property
    def calls_a_step(self) -> int:
        """Network calls in each step but the last, which needs one."""
        return 2 if self is Sampler.HEUN else 1


class LossKind(StrEnum):
    """Loss of one predicted number, as a function of e, its difference from the target."""

    MSE = "mse"  # e²
    HUBER = "huber"  # pseudo-Huber: sqrt(e² + huber_c²) - huber_c


class LossMean(StrEnum):
    """Unit with equal weight in the mean loss: a real token, or a sample."""

    TOKEN = "token"
    SAMPLE = "sample"


class SoundLevels(StrEnum):
    """Noise level of a sample's sound, relative to that of its frames."""

    OWN = "own"  # drawn apart from that of its frames
    SAME = "same"  # at the same quantile as the level of its frames


class Preference(StrEnum):
    """Loss for preference pairs of latents."""

    DPO = "dpo"


class DistillMethod(StrEnum):
    """Method by which a network learns to generate in few steps."""

    OPD = "opd"  # the teacher's mean velocity over each step of the network's own trajectory
    DMD = "dmd"  # DMD2 (arXiv:2405.14867), whose critic learns the student's current distribution


class Rollout(StrEnum):
    """Source of the noisy states on which a student is trained."""

    SIMULATE = "simulate"  # its own steps from noise
    DATA = "data"  # latents of the data, with noise


class StudentSampler(StrEnum):
    """Transition from one sampling step of a student to the next."""

    ODE = "ode"  # along its velocity, by Euler's method
    SDE = "sde"  # the predicted latent, with new noise: LCM


class TargetSchedule(StrEnum):
    """Dependence of the guidance scale of `cfg_target` on the noise level t."""

    CONSTANT = "constant"  # w
    LEVEL = "level"  # 1 + (w - 1) t

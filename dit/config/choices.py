"""What keys choose between: those of the network, then those of the objective."""

from __future__ import annotations

from enum import StrEnum


class Precision(StrEnum):
    """Type of the weights in matrix products; levels, positions and loss are always float32."""

    FP32 = "fp32"
    BF16 = "bf16"


class Recompute(StrEnum):
    """Which activations the backward pass computes again instead of keeping."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    AUTO = "auto"


class RecomputeMethod(StrEnum):
    """How full recomputation picks layers: all in groups, or the first few."""

    UNIFORM = "uniform"
    BLOCK = "block"


class InitMethod(StrEnum):
    """How matrices are drawn that do not start at zero."""

    NORMAL = "normal"
    XAVIER = "xavier"


class Implementation(StrEnum):
    """Library whose linear layers are used."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"


class AttentionBackend(StrEnum):
    """Kernels of attention, those of the newest GPUs first; auto is the best that is here."""

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
    """Numbers that share a scaling factor: a tensor, a block of 128, or 32 (Blackwell)."""

    TENSORWISE = "tensorwise"
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"


class ContextComm(StrEnum):
    """How context ranks exchange tokens: heads (a2a), or keys and values (all_gather; p2p, a ring).

    p2p needs Transformer Engine.
    """

    A2A = "a2a"
    ALL_GATHER = "all_gather"
    P2P = "p2p"


class TextPadding(StrEnum):
    """Rows behind a caption that are attended to and are no zeros."""

    STORED = "stored"  # what the text encoder makes of its padding, as the shards hold it


class ObjectiveName(StrEnum):
    """The objectives that come with this project; `OBJECTIVES` has every registered one."""

    EDM = "edm"
    FLOW = "flow"


class LevelDensity(StrEnum):
    """Density from which flow matching draws t (arXiv:2403.03206, Sec. 3.1)."""

    UNIFORM = "uniform"
    LOGIT_NORMAL = "logit_normal"
    MODE = "mode"


class FlowPrediction(StrEnum):
    """What the network of flow matching says of a noisy state."""

    VELOCITY = "velocity"  # noise - latent
    X = "x"  # the latent


class Weighting(StrEnum):
    """Weight of the squared error of flow matching at t."""

    NONE = "none"
    LINEAR = "linear"


class SamplingLevels(StrEnum):
    """Levels that samplers of flow matching visit."""

    LINEAR = "linear"  # even steps from 1 to 1/1000, then shifted, then 0
    # Even steps from 1 to 1 / number of steps, then shifted, then 0: what the pipelines of FLUX,
    # Qwen-Image and HunyuanVideo hand to Diffusers' scheduler.
    EVEN = "even"
    # The same steps, shifted by a law of their own, in tokens and steps, whatever shift training
    # has: what the pipelines of FLUX.2 hand to Diffusers' scheduler.
    EMPIRICAL = "empirical"
    # sigma / (1 + sigma) for sigma of arXiv:2206.00364, Eq. 5, then 0, as of Cosmos-Predict2.5
    KARRAS = "karras"
    # The same without 0, so that noise of the last level stays, as of Cosmos-Predict2. The state
    # begins as noise times the first level; that of 2.5 as the noise itself.
    KARRAS_TO_SIGMA_MIN = "karras_to_sigma_min"
    # Those of Diffusers' UniPCMultistepScheduler with use_flow_sigmas, as of Wan: even steps from 1
    # that leave 1/1000 out, shifted once, then 0. The network is told whole numbers of 1000.
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
    """Levels between the first and the last one of a sampler, as `use_..._sigmas` of Diffusers."""

    KARRAS = "karras"  # arXiv:2206.00364, Eq. 5, with rho = 7 and t for sigma
    EXPONENTIAL = "exponential"  # even in ln t
    BETA = "beta"  # quantiles of a beta distribution, arXiv:2407.12173: more at both ends


class TimeShift(StrEnum):
    """Shift by the number of tokens of the target, as Diffusers' pipelines have it."""

    EXPONENTIAL = "exponential"  # exp(mu)
    LINEAR = "linear"  # mu


class ValidationLatents(StrEnum):
    """Latents that are validated, of a dataset that holds distributions of them."""

    MEAN = "mean"
    DRAWN = "drawn"


class Sampler(StrEnum):
    """Solver of the sampling ODE; lcm is none, but for networks that were distilled to it."""

    EULER = "euler"  # one network call a step, first order
    HEUN = "heun"  # two calls a step, second order (arXiv:2206.00364, Algorithm 1 without churn)
    DPMPP = "dpm++"  # one call a step, second order, multistep (arXiv:2211.01095, 2M)
    UNIPC = "unipc"  # one call a step, second order, predictor-corrector (arXiv:2302.04867)
    LCM = "lcm"  # one call a step: the predicted latent, with new noise (arXiv:2310.04378)

    @property
    def calls_a_step(self) -> int:
        """Network calls of each step but the last, which has one."""
        return 2 if self is Sampler.HEUN else 1


class LossKind(StrEnum):
    """Error of one number that the network says."""

    MSE = "mse"  # e²
    HUBER = "huber"  # pseudo-Huber: sqrt(e² + huber_c²) - huber_c


class LossMean(StrEnum):
    """What counts once in the mean loss: a real token, or a sample."""

    TOKEN = "token"
    SAMPLE = "sample"


class Preference(StrEnum):
    """What is learned of pairs of a preferred and a rejected latent."""

    DPO = "dpo"


class DistillMethod(StrEnum):
    """How a network learns to generate in few steps."""

    OPD = "opd"  # the teacher's mean velocity over each step of the network's own trajectory
    DMD = (
        "dmd"  # DMD2 (arXiv:2405.14867): a critic learns what it makes, and it follows the teacher
    )


class Rollout(StrEnum):
    """Where the states come from at which a student learns."""

    SIMULATE = "simulate"  # its own steps from noise
    DATA = "data"  # latents of the data, with noise


class StudentSampler(StrEnum):
    """How a student goes from one of its steps to the next."""

    ODE = "ode"  # along its velocity, by Euler's method
    SDE = "sde"  # the predicted latent, with new noise: LCM


class TargetSchedule(StrEnum):
    """How far `cfg_target` moves the target at a level."""

    CONSTANT = "constant"  # w
    LEVEL = "level"  # 1 + (w - 1) t

"""Options of `generate_dit.py`: dataclasses, and the parser of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from dit.codecs.rgb import ReferenceFit
from dit.command_line import add_options, option
from dit.config import Sampler
from dit.config.validation import MOST_GUIDANCE
from dit.distributed.entry import Parser
from dit.local_path import CheckpointPath, LocalPath
from dit.sampling.commands.load_options import EncoderPlaces, NetworkOptions
from dit.sampling.conditions.stream_scales import StreamGuidance
from dit.sampling.latent_sizes import MOST_PIXELS
from dit.sampling.media_files import RATES

FPS = 24.0
_MOST = {
    "height": MOST_PIXELS,
    "width": MOST_PIXELS,
    "num_video_frames": MOST_PIXELS,
    "num_steps": 1000,
}
_PARTS = {
    "guidance_rescale": "0 is no rescaling, 0.7 is usual",
    "guidance_steps": "1 guides at all steps",
    "guidance_least_norm": "1 keeps the norm of the guided prediction",
}
"""Options in [0, 1], and what their values mean."""
_BESIDE_GUIDERS = {
    "guidance_rescale": 0,
    "guidance_steps": 1,
    "guidance_after": 1,
    "guidance_least_norm": 0,
    "guidance_interval": None,
    "reference_guidance": 1,
}
"""Options that have no effect with --guider, and the values at which they are accepted; None is
accepted for all of them."""
_HAS_ITS_OWN = "has a rescaling and steps of its own; leave out"
MOST_TOLD = 1000
MOST_SAMPLES = 1_000_000
"""Most samples that one call generates."""


@dataclass(frozen=True, kw_only=True)
class ContentOptions:
    """Options for the content of pictures and videos besides the prompt, and for their size."""

    negative_prompt: str = ""
    """Text of what the picture should not show. (default: none)"""
    image: tuple[LocalPath, ...] = option((), metavar="FILE")
    """First frame of each video (image-to-video); with --at_frame (LTX-Video) repeatable."""
    video: tuple[LocalPath, ...] = option((), metavar="FILE")
    """Clip shown in each video from --at_frame on (LTX-Video); repeatable."""
    at_frame: tuple[int, ...] = option((), metavar="N")
    """Frame of the video at which an --image or a --video begins, from 0: one for each image, then
    for each clip. (default: 0)"""
    strength: tuple[float, ...] = option((), metavar="S")
    """Strength from 0 to 1 of each --image and --video, in the order of --at_frame; 1 shows it
    unchanged. (default: 1)"""
    condition_noise: float = 0.0
    """Noise added at each step to pictures and clips of strength 1, times the square of the noise
    level; 0.15 in Diffusers' LTXConditionPipeline. (default: %(default)s)"""
    last_image: LocalPath | None = option(None, metavar="FILE")
    """Last frame of each video, for networks with first and last frame."""
    reference: tuple[LocalPath, ...] = option((), metavar="FILE")
    """Picture that the prompt edits (FLUX.1 Kontext); repeatable if the network takes several."""
    reference_video: tuple[LocalPath, ...] = option((), metavar="FILE")
    """Video that the prompt edits (LTX-Video); listed after --reference, and repeatable."""
    reference_size: Annotated[str, ReferenceFit] = str(ReferenceFit.TARGET)
    """Size of references: their own, that of the target, or that of the published pipeline; use the
    one of the training data. (default: %(default)s)"""
    frames_of: LocalPath | None = option(None, metavar="FILE")
    """Video whose frames are given, so that its sound is generated (networks with sound)."""
    sound_of: LocalPath | None = option(None, metavar="FILE")
    """WAV, or a video, whose sound is given, so that frames are generated (networks with sound)."""
    height: int | None = None
    """Height in pixels. Default: the most frequent one in the dataset."""
    width: int | None = None
    """Width in pixels. Default: the most frequent one in the dataset."""
    num_video_frames: int | None = None
    """Frames of the video; 1 makes a picture. Default: the most frequent one in the dataset."""
    fps: float | None = None
    """Frames per second of a video, 0.01 to 1000. (default: 24)"""


@dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """Options of the sampler and of guidance."""

    num_steps: int | None = None
    """Steps of the sampler. (default: 35, or the steps of a student that the run distilled)"""
    sigmas: tuple[float, ...] = option((), nargs="+", action="extend", metavar="SIGMA")
    """Noise level at which each step begins, falling, from 1 down to above 0 (flow matching), in
    place of --num_steps: for distilled networks. (default: those of the run)"""
    upsampler: LocalPath | None = option(None, metavar="DIR")
    """Folder of LTX-2's latent upsampler: frames are generated smaller, at the size that it
    enlarges to --height and --width, and get noise and --upsampled_sigmas of the second stage."""
    upsampled_sigmas: tuple[float, ...] = option((), nargs="+", action="extend", metavar="SIGMA")
    """Noise levels of the second stage, as --sigmas; frames and sound get noise of the first.
    (default: 0.909375 0.725 0.421875, those of LTX-2's distilled networks)"""
    guidance: float | None = None
    """Guidance scale g in uncond + g (cond - uncond); 1: no guidance. (default: that of --guider,
    or of the run, validation.guidance: 2.5, or 1 if the network has a guidance embedding or is a
    student of few steps)"""
    guider: LocalPath | None = option(None, metavar="DIR")
    """Folder of a Diffusers guider, or of a pipeline with one (HunyuanVideo 1.5), which combines
    the predictions with and without the prompt."""
    distilled_guidance: float | None = None
    """Guidance scale for the guidance embedding of a distilled network, such as 3.5 (FLUX.1 dev).
    (default: as in training, objective.guidance)"""
    guidance_interval: tuple[float, float] | None = option(None, metavar=("LOW", "HIGH"))
    """Noise levels with guidance: sigma for EDM, t for flow matching. (default: all)"""
    reference_guidance: float | None = None
    """Scale i in none + i (references - none) + g (both - references), for networks whose guidance
    also moves away from samples without references; at most 1: none + g (both - none). (default:
    that of the run, validation.reference_guidance: 1)"""
    guidance_rescale: float = 0.0
    """Guidance rescale phi, 0 to 1: 1 restores the standard deviation without guidance. (default:
    %(default)s)"""
    guidance_steps: float = 1.0
    """Fraction of the steps, from the first on, with guidance, in both calls of heun
    (`cfg_trunc_ratio` of Lumina Image 2.0). (default: %(default)s)"""
    guidance_after: float = 1.0
    """Guidance scale of the steps after --guidance_steps; 1: none. (default: %(default)s)"""
    guidance_least_norm: float = 0.0
    """0 to 1, for networks whose guidance restores the norm of the prediction (Lumina Image 2.0,
    LongCat, Qwen-Image): least fraction of the guided norm that remains; 1 leaves the guided
    norm unchanged. (default: %(default)s)"""
    sampler: Annotated[str, Sampler] | None = None
    """Sampler: heun calls the network twice a step, the others once. euler is first order, heun,
    dpm++ and unipc are second order; lcm is for networks distilled for it. (default: heun, or that
    of a student that the run distilled)"""
    weights: str = option("ema", choices=("ema", "model"))
    """Weights to use: ema (average) or model (last ones). (default: %(default)s)"""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(SamplerOptions, StreamGuidance, ContentOptions):
    """All options that determine a generated picture, except prompt and seed."""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if (value := getattr(self, name)) is not None:
                check_count(name, value, most=most)
        if self.fps is not None and not RATES[0] <= self.fps <= RATES[1]:
            raise ValueError(
                f"--fps {self.fps} must lie between {RATES[0]} and {RATES[1]} frames a second"
            )
        for name, known in (("sampler", Sampler), ("reference_size", ReferenceFit)):
            if (choice := getattr(self, name)) not in (None, *known):
                raise ValueError(f"--{name} {choice} is unknown; choose one of {', '.join(known)}")
        if not 0 <= self.condition_noise <= 1:
            raise ValueError(
                f"--condition_noise {self.condition_noise} must lie in [0, 1]; 0 adds no noise"
            )
        self._check_sigmas()
        self._check_guidance()
        self._check_steps_of_guidance()
        self.check_scales()

    def _check_sigmas(self) -> None:
        for name in ("sigmas", "upsampled_sigmas"):
            levels = getattr(self, name)
            if levels and not (levels[0] <= 1 and all(a > b for a, b in pairwise((*levels, 0)))):
                raise ValueError(
                    f"--{name} {' '.join(map(str, levels))} must be falling noise levels above 0,"
                    " the first at most 1, such as 1 0.75 0.5 0.25"
                )
        if self.sigmas and self.num_steps not in (None, len(self.sigmas)):
            raise ValueError(
                f"--num_steps {self.num_steps} is not the number of --sigmas ({len(self.sigmas)});"
                " leave it out"
            )
        if self.upsampled_sigmas and self.upsampler is None:
            raise ValueError(
                "--upsampled_sigmas are those of a second stage; give --upsampler, too, or leave"
                " them out"
            )

    def _check_guidance(self) -> None:
        for name in ("guidance", "reference_guidance", "guidance_after"):
            if (scale := getattr(self, name)) is not None and not abs(scale) <= MOST_GUIDANCE:
                most = f"[-{MOST_GUIDANCE}, {MOST_GUIDANCE}]"
                raise ValueError(f"--{name} {scale} must lie in {most}; 1 is no guidance")
        told = self.distilled_guidance
        if told is not None and not 0 <= told <= MOST_TOLD:
            raise ValueError(
                f"--distilled_guidance {told} must lie in [0, {MOST_TOLD}]; FLUX.1 dev takes 3.5"
            )
        for name, meaning in _PARTS.items():
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"--{name} {value} must lie in [0, 1]; {meaning}")
        if self.guidance_interval is not None:
            low, high = self.guidance_interval
            if not 0 <= low <= high:
                raise ValueError(
                    f"--guidance_interval {low} {high} must be two noise levels from 0 on, the"
                    " lower first: sigma for EDM, t for flow matching"
                )

    def _check_steps_of_guidance(self) -> None:
        for name, none in _BESIDE_GUIDERS.items():
            if self.guider is not None and getattr(self, name) not in (None, none):
                raise ValueError(f"--guider {self.guider} {_HAS_ITS_OWN} --{name}")
        if self.guidance_after != 1 and self.guidance_steps == 1:
            raise ValueError(
                f"--guidance_after {self.guidance_after} has no effect, as --guidance_steps 1 lets"
                " all steps use --guidance; give --guidance_steps below 1, such as 0.5"
            )


def check_count(name: str, value: int, *, most: int) -> None:
    """Checks the value of the option `name`, a count.

    Raises:
        ValueError: the value is below 1 or above `most`.
    """
    if not 1 <= value <= most:
        raise ValueError(f"--{name} {value} must be at least 1, and at most {most}")


def check_seed(seed: int, *, count: int) -> None:
    """Checks that torch accepts the seeds of `count` samples, from `seed` on.

    Raises:
        ValueError: the seed is too small or too large.
    """
    if not -(2**63) <= seed <= 2**64 - count:
        raise ValueError(
            f"--seed {seed} must lie in [-2**63, 2**64 - {count}]: sample i of {count} uses"
            " seed + i"
        )


@dataclass(frozen=True, kw_only=True)
class _CheckpointOptions:
    """Options that choose the network."""

    checkpoint_path: CheckpointPath
    """Run folder, checkpoint folder, or LATEST file of a run; or msc://PROFILE/PATH of its
    checkpoint.mirror."""


@dataclass(frozen=True, kw_only=True)
class _PromptOptions:
    """The prompts, or a file of prompts; exactly one of these options must be given."""

    prompt: tuple[str, ...] | None = None
    """Text of the picture; repeatable."""
    prompts_file: Path | None = None
    """A prompt on each line, or .json or .jsonl with captions, sizes, negatives, pictures."""


@dataclass(frozen=True, kw_only=True)
class _SampleOptions:
    """Options for the number of samples of each prompt, and their seeds."""

    num_images_per_prompt: int = 1
    """Samples of each prompt. (default: 1)"""
    seed: int = 0
    """The first sample's seed; the i-th sample has seed + i."""


@dataclass(frozen=True, kw_only=True)
class _FileOptions:
    """Files and folders that generation reads and writes."""

    config: Path | None = option(None, metavar="FILE")
    """YAML file of options; those typed here override it."""
    save_latents: bool = False
    """Keep latents for decode_latents.py; without a VAE, show them in false colours."""
    save_wav: bool = False
    """Write the sound of videos as WAV, too. MP4 files have it as AAC."""
    output_dir: Path = option(Path("samples"), "--video_save_path")
    """Folder for the files, grid.png and samples.json. (default: %(default)s)"""


def parser() -> Parser:
    parser = Parser(
        description="Generates pictures (PNG) and videos (MP4) from prompts and a checkpoint."
    )
    parser.first = ("checkpoint_path", "prompt", "height", "width")
    parser.first += ("num_video_frames", "seed", "num_steps", "guidance", "lora", "output_dir")
    add_options(parser, _CheckpointOptions)
    what = parser.add_argument_group("what to generate")
    add_options(what.add_mutually_exclusive_group(required=True), _PromptOptions)
    add_options(what, ContentOptions, _SampleOptions)
    how = parser.add_argument_group("how to sample")
    add_options(how, SamplerOptions, StreamGuidance, NetworkOptions)
    add_options(parser.add_argument_group("files"), _FileOptions, EncoderPlaces)
    return parser

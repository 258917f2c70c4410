"""Prompts -> pictures and videos, from a checkpoint.

1. open_checkpoint  configuration, weights, text encoder and decoder of the run
2. generate         prompts -> uint8 pictures, packed together, shared by all processes
3. write            PNG or MP4 files, a grid, samples.json (picture_files.py)
"""

# F H W 3 frames, rows, columns, colours of one picture

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from recipes.entry import Parser, run
from recipes.picture_files import make_folder, write

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from data_prep.processors import Processor
    from data_prep.text import TextEncoder
    from dit.config import RunConfig

FPS = 24.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that decides a picture, beside its prompt and its seed."""

    height: int | None = None  # pixels; None is the most frequent size of the dataset
    width: int | None = None
    num_video_frames: int | None = None  # pixel frames; 1 is a picture
    fps: float | None = None  # of a video; None is FPS
    num_steps: int = 35
    guidance: float = 1.5
    sampler: str = "heun"
    weights: str = "ema"
    negative_prompt: str = ""

    def __post_init__(self) -> None:
        for name in ("height", "width", "num_video_frames", "num_steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} {value} must be at least 1")
        if self.fps is not None and not (self.fps > 0 and math.isfinite(self.fps)):
            raise ValueError(f"--fps {self.fps} must be positive and finite")
        if not math.isfinite(self.guidance):
            raise ValueError(f"--guidance {self.guidance} must be a finite number; 1 is none")


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint that is ready to generate."""

    path: Path
    config: RunConfig
    model: nn.Module
    encoder: TextEncoder
    decoder: Processor
    null_text_LE: Tensor
    card: dict[str, Any] = field(repr=False)


def open_checkpoint(checkpoint_path: str | Path, *, weights: str) -> Opened:
    """Loads the model and the encoders that its dataset was made with.

    Raises:
        ValueError: there is no checkpoint, or it was trained without a text encoder.
    """
    from safetensors.torch import load_file

    from data_prep import processors, text
    from dit.model.dit import DiT
    from dit.parallel.groups import device, process_groups, start_processes
    from dit.train.checkpoint import load_weights
    from dit.train.locate import CheckpointError, find_checkpoint, saved_config

    path = find_checkpoint(Path(checkpoint_path))
    if path is None:
        raise CheckpointError(
            f"--checkpoint_path {checkpoint_path} holds no checkpoint; give a run folder, a"
            " checkpoints/step_... folder or a LATEST file"
        )
    config = saved_config(path)
    card_file = path / "dataset_card.json"
    if not card_file.is_file():
        raise CheckpointError(
            f"{path} was trained without a text encoder (mock data, or shards without"
            " dataset_card.json), so it cannot read a prompt; train on a dataset that"
            " `python -m data_prep` packed"
        )
    card = json.loads(card_file.read_text())
    size = config.model.on_one_rank()  # whatever layout it was trained on
    start_processes(seed=config.rng.seed, model=size)
    model = DiT(size, process_groups()).to(device())
    load_weights(path, [model], averaged=weights == "ema")
    return Opened(
        path=path,
        config=config,
        model=model.eval(),
        encoder=text.from_card(card),
        decoder=processors.from_card(card),
        null_text_LE=load_file(path / "null_text.safetensors")["text"],
        card=card,
    )


def generate(
    checkpoint_path: str | Path, prompts: Sequence[str], *, seed: int = 0, **options: Any
) -> list[np.ndarray]:
    """One uint8 [F, H, W, 3] picture or video for each prompt, in order.

    The noise of the i-th comes from seed + i. `options` are the fields of `Options`.
    """
    chosen = Options(**options)
    opened = open_checkpoint(checkpoint_path, weights=chosen.weights)
    return generate_opened(opened, prompts, seed=seed, options=chosen)


def generate_opened(
    opened: Opened, prompts: Sequence[str], *, seed: int, options: Options
) -> list[np.ndarray]:
    """As `generate`, with a checkpoint that is open already.

    Under a launcher, each process makes its share and the first one returns all; the others
    return an empty list.
    """
    import torch.distributed as dist

    from dit.generation import Request, SamplingSettings, generate_latents
    from dit.objective import Sampler

    options = with_dataset_size(options, opened)
    negative_LE = opened.null_text_LE
    if options.negative_prompt:
        negative_LE = opened.encoder.encode(options.negative_prompt)
    fps = math.nan if options.num_video_frames == 1 else options.fps or FPS
    requests = [
        Request(
            text_LE=opened.encoder.encode(prompt),
            negative_LE=negative_LE,
            latent_FHW=_latent_size(options, opened),
            fps=fps,
            seed=seed + i,
        )
        for i, prompt in enumerate(prompts)
    ]
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = SamplingSettings(
        num_steps=options.num_steps, guidance=options.guidance, sampler=Sampler(options.sampler)
    )
    mine = generate_latents(
        opened.model, requests[rank::world], config=opened.config, settings=settings
    )
    pictures = [opened.decoder.decode(latent).numpy() for latent in mine]
    shares: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(pictures, shares)
    if shares is None:
        return []
    return [shares[i % world][i // world] for i in range(len(prompts))]


def with_dataset_size(options: Options, opened: Opened) -> Options:
    """Fills a size that was not asked for with the dataset's most frequent one, and the rate.

    Raises:
        ValueError: the dataset card knows none.
    """
    sizes = opened.card.get("sizes") or [{}]
    found = {
        "num_video_frames": options.num_video_frames or sizes[0].get("num_frames"),
        "height": options.height or sizes[0].get("height"),
        "width": options.width or sizes[0].get("width"),
    }
    missing = [f"--{name}" for name, value in found.items() if value is None]
    if missing:
        raise ValueError(
            f"give {', '.join(missing)}: the dataset card in {opened.path} lists no sizes"
        )
    return replace(options, **found, fps=options.fps or FPS)


def _latent_size(options: Options, opened: Opened) -> tuple[int, int, int]:
    stride = opened.decoder.stride
    height, width, frames = options.height, options.width, options.num_video_frames
    assert height and width and frames
    step = stride * opened.config.model.patch_spatial
    if height % step or width % step:
        raise ValueError(
            f"--height {height} --width {width} must be multiples of {step} pixels (the decoder's"
            f" {stride} times the patch's {opened.config.model.patch_spatial})"
        )
    return frames, height // stride, width // stride


def parser() -> Parser:
    defaults = Options()
    parser = Parser(
        description="Generates pictures (PNG) and videos (MP4) from prompts and a checkpoint."
    )
    parser.add_argument(
        "--checkpoint_path",
        required=True,
        help="Run folder, checkpoint folder, or LATEST file of a run.",
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", help="What to show; repeatable.")
    prompts.add_argument("--prompts_file", type=Path, help="Text file, a prompt on each line.")
    parser.add_argument(
        "--negative_prompt", default="", help="What guidance leads away from. (default: nothing)"
    )
    size = "Default: the most frequent of the dataset."
    parser.add_argument("--height", type=int, help=f"Rows, in pixels. {size}")
    parser.add_argument("--width", type=int, help=f"Columns, in pixels. {size}")
    parser.add_argument(
        "--num_video_frames", type=int, help=f"Frames of the video; 1 makes a picture. {size}"
    )
    parser.add_argument("--fps", type=float, help="Frames per second of a video. (default: 24)")
    parser.add_argument(
        "--num_steps",
        type=int,
        default=defaults.num_steps,
        help="Steps of the sampler. (default: %(default)s)",
    )
    parser.add_argument(
        "--guidance",
        type=float,
        default=defaults.guidance,
        help="g in uncond + g (cond - uncond); 1 is none. (default: %(default)s)",
    )
    order = "Second or first order. (default: %(default)s)"
    parser.add_argument(
        "--sampler", choices=("heun", "euler"), default=defaults.sampler, help=order
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="Of the first sample; the i-th takes seed + i."
    )
    parser.add_argument(
        "--weights",
        choices=("ema", "model"),
        default=defaults.weights,
        help="Average of the weights, or the last ones. (default: %(default)s)",
    )
    parser.add_argument(
        "--output_dir",
        "--video_save_path",
        type=Path,
        default=Path("samples"),
        help="Folder for the files, grid.png and samples.json. (default: %(default)s)",
    )
    return parser


def read_prompts(file: Path) -> list[str]:
    """The lines of a file that are not empty.

    Raises:
        ValueError: there is no such file, it is not UTF-8, or it has no prompt.
    """
    if not file.is_file():
        raise ValueError(f"--prompts_file {file} is not there; check the path")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts_file {file} is no text ({error}); save it as UTF-8") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts_file {file} has no prompt; write one on each line")
    return prompts


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    prompts = args.prompt or read_prompts(args.prompts_file)
    names = set(Options.__dataclass_fields__)
    options = Options(**{k: v for k, v in vars(args).items() if k in names})
    make_folder(args.output_dir)
    opened = open_checkpoint(args.checkpoint_path, weights=options.weights)
    options = with_dataset_size(options, opened)
    pictures = generate_opened(opened, prompts, seed=args.seed, options=options)
    if pictures:
        settings = asdict(options) | {"checkpoint": str(opened.path)}
        grid = write(pictures, prompts, folder=args.output_dir, seed=args.seed, settings=settings)
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"{len(pictures)} samples, {grid.name} and samples.json in {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))

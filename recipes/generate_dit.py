"""Prompts -> pictures and videos, from a checkpoint.

1. open_checkpoint  configuration, weights, text encoder and decoder of the run
2. generate         prompts -> uint8 pictures, packed together, shared by all processes
3. write            PNG or MP4 files, a grid, samples.json
"""

# F H W 3 frames, rows, columns, colours of one picture

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from data_prep.processors import Processor
    from data_prep.text import TextEncoder
    from dit.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that decides a picture, beside its prompt and its seed."""

    height: int | None = None  # pixels; None is the most frequent size of the dataset
    width: int | None = None
    num_video_frames: int | None = None  # pixel frames; 1 is a picture
    fps: float | None = None  # of a video; None is 24
    num_steps: int = 35
    guidance: float = 1.5
    sampler: str = "heun"
    weights: str = "ema"
    negative_prompt: str = ""


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
    start_processes(seed=config.rng.seed, model=config.model)
    model = DiT(config.model, process_groups()).to(device())
    load_weights(path, model, averaged=weights == "ema")
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
    fps = math.nan if options.num_video_frames == 1 else options.fps or 24.0
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
    """Fills a size that was not asked for with the dataset's most frequent one.

    Raises:
        ValueError: the dataset card knows none.
    """
    from dataclasses import replace

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
    return replace(options, **found)


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


def write(
    pictures: Sequence[np.ndarray],
    prompts: Sequence[str],
    *,
    folder: Path,
    seed: int,
    options: Options,
    checkpoint: Path,
) -> Path:
    """Writes every picture (PNG) or video (MP4), grid.png and samples.json; returns the grid."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for i, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
        name = f"{i:05d}.png" if len(picture) == 1 else f"{i:05d}.mp4"
        if len(picture) == 1:
            _write_png(folder / name, picture[0], prompt=prompt, seed=seed + i, options=options)
        else:
            _write_mp4(folder / name, picture, fps=options.fps or 24.0)
        entries.append(
            {"file": name, "prompt": prompt, "seed": seed + i}
            | asdict(options)
            | {"checkpoint": str(checkpoint)}
        )
    grid = folder / "grid.png"
    draw_grid(pictures, prompts, grid)
    (folder / "samples.json").write_text(json.dumps(entries, indent=1) + "\n")
    return grid


def _write_png(
    path: Path, picture_HW3: np.ndarray, *, prompt: str, seed: int, options: Options
) -> None:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    note = PngInfo()
    note.add_text("prompt", prompt)
    note.add_text("settings", json.dumps({"seed": seed} | asdict(options)))
    Image.fromarray(picture_HW3).save(path, pnginfo=note)


def _write_mp4(path: Path, video_FHW3: np.ndarray, *, fps: float) -> None:
    try:
        import av
    except ImportError as error:
        raise ValueError("writing MP4 needs the package av: install the extra `prep`") from error
    from fractions import Fraction

    with av.open(str(path), "w") as container:
        rate = Fraction(fps).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate)
        stream.height, stream.width = video_FHW3.shape[1:3]
        # 4:2:0 needs even sides; 4:4:4 takes any and keeps the colours of small pictures.
        stream.pix_fmt = "yuv444p"
        for picture_HW3 in video_FHW3:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture_HW3, format="rgb24")))
        container.mux(stream.encode())


def draw_grid(pictures: Sequence[np.ndarray], prompts: Sequence[str], path: Path) -> None:
    """First frames of all pictures, a row for each prompt, which stands beside it."""
    from matplotlib.figure import Figure

    rows: dict[str, list[np.ndarray]] = {}
    for picture, prompt in zip(pictures, prompts, strict=True):
        rows.setdefault(prompt, []).append(picture[0])
    columns = min(max(map(len, rows.values())), 16)
    figure = Figure(figsize=(2.4 + 0.8 * columns, 0.8 * len(rows)), dpi=120)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for row, (prompt, shown) in zip(axes, rows.items(), strict=True):
        for place in row:
            place.set_axis_off()
        for place, picture_HW3 in zip(row, shown, strict=False):
            place.imshow(picture_HW3)
        row[0].text(-0.15, 0.5, prompt, ha="right", va="center", transform=row[0].transAxes)
    figure.savefig(path, bbox_inches="tight")


def parser() -> argparse.ArgumentParser:
    defaults = Options()
    parser = argparse.ArgumentParser(
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
    parser.add_argument(
        "--sampler",
        choices=("heun", "euler"),
        default=defaults.sampler,
        help="Second or first order. (default: %(default)s)",
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
        ValueError: there is no such file, or it has no prompt.
    """
    if not file.is_file():
        raise ValueError(f"--prompts_file {file} is not there")
    prompts = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts_file {file} has no prompt; write one on each line")
    return prompts


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    prompts = args.prompt or read_prompts(args.prompts_file)
    names = set(Options.__dataclass_fields__)
    options = Options(**{k: v for k, v in vars(args).items() if k in names})
    opened = open_checkpoint(args.checkpoint_path, weights=options.weights)
    options = with_dataset_size(options, opened)
    pictures = generate_opened(opened, prompts, seed=args.seed, options=options)
    if pictures:
        grid = write(
            pictures,
            prompts,
            folder=args.output_dir,
            seed=args.seed,
            options=options,
            checkpoint=opened.path,
        )
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"{len(pictures)} samples, {grid.name} and samples.json in {args.output_dir}")
    return 0


if __name__ == "__main__":
    from recipes.entry import run

    sys.exit(run(main))

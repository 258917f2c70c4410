"""Clips of moving digits with a tone: packed, and read from what a run generates.

1. pack      the clips of `python -m data_prep digits --moving`, three in four with their tone
2. evaluate  200 clips of captions; 200 tones of given frames and 200 clips of given tones, without
             a caption, compared with the clip that was given, with another one, and with what is
             made when frames and sound do not attend to each other

    python examples/digits/sounding_digits.py pack runs/sounding_digits/data
    python recipes/pretrain_dit.py --config-file conf/sounding_digits.yaml
    python examples/digits/sounding_digits.py evaluate runs/sounding_digits/run
"""

# F H W 3 frames, rows, columns, colours of a clip; S samples of a waveform

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # examples/ is not installed

from rich.table import Table

from dit.command_line import OptionParser
from dit.config import Sampler
from dit.console import Console
from dit.distributed.entry import run
from dit.local_path import checkpoint_place
from dit.sampling.commands.evaluation import generation_options, report_folder
from dit.sampling.prompts import Prompt
from examples.digits.judges import DIRECTIONS, MOTIONS, ClipJudge, Motion, pixels_of
from examples.digits.kinds import written_clips
from examples.digits.likeness import Components, spread
from examples.digits.tones import FPS, RATE, digit_of, is_rising, rises, tone

if TYPE_CHECKING:
    from dit.sampling.media_files import Picture
    from dit.sampling.open_checkpoint import OpenCheckpoint

WAVE_FRAME = 500  # samples in a latent frame of sound
SILENT_OF = 4  # one of so many directions of each digit has no sound
EACH = 5  # clips of each of 40 captions
READ_OF = 3  # one of so many training clips is enough for the judge of digits and directions
GIVEN = 200  # held-out clips whose frames or sound are given

BARS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "caption": {
        "digit": (0.95, 1),
        "direction": (0.9, 1),
        "pitch": (0.95, 1),
        "loudness": (0.95, 1),
        "spread": (0.6, 2),
    },
    "given": {"digit": (0.9, 1), "pitch": (0.9, 1), "loudness": (0.9, 1)},
    "other clip": {"digit": (0, 0.2), "pitch": (0, 0.2), "loudness": (0, 0.15)},
    "streams apart": {"digit": (0, 0.2), "pitch": (0, 0.2), "loudness": (0.4, 0.6)},
}
"""(least, largest) allowed fraction that is as asked, by name, for each part of the evaluation.

`spread` is that of `spread_of_real`."""

Parts = dict[str, dict[str, float]]


class SoundingClip(NamedTuple):
    """A clip of the dataset; `wave_S` is None without sound."""

    motion: Motion
    frames_FHW3: np.ndarray
    wave_S: np.ndarray | None


def pack(folder: Path, *, digits: int | None) -> None:
    """Packs clips of moving digits with tones; one of four directions of each digit has no tone."""
    import torch  # late: --help answers without torch

    from data_prep.cli.terminal import show_summary
    from data_prep.media.clips import Clip, Entry
    from data_prep.packing import PackOptions, pack_dataset
    from data_prep.planning.splits import DEFAULT_SPLIT, SplitFractions
    from data_prep.sources.digits import MovingDigits
    from dit.codecs.sound import Wave
    from dit.codecs.text import WordTable
    from dit.codecs.vae import Pixel

    class SoundingDigits(MovingDigits):
        """Source of moving digits, each with the tone of its digit and direction."""

        def read(self, entry: Entry) -> Clip:
            clip = super().read(entry)
            _, index, direction = entry.key.split("-")
            if (int(index) + DIRECTIONS.index(direction)) % SILENT_OF == 0:
                return replace(clip, notes=(*clip.notes, "without sound"))
            wave_S = torch.from_numpy(tone(self._labels[int(index)], direction))
            return replace(clip, sound_CS=wave_S[None], notes=(*clip.notes, "with sound"))

    summary = pack_dataset(
        SoundingDigits(num_samples=digits),
        folder,
        codec=Pixel.of(block=2, colours=1),
        sound=Wave(wave_rate=RATE, wave_channels=1, frame=WAVE_FRAME),
        text=WordTable(width=WordTable.usual_width, max_length=64),
        options=PackOptions(split=SplitFractions.parse(DEFAULT_SPLIT), max_bad_fraction=0),
        settings={"num_samples": digits},
        command="python examples/digits/sounding_digits.py pack FOLDER",
    )
    show_summary(Console(), summary, folder)


def sounding_clips(folder: Path, split: str) -> Iterator[SoundingClip]:
    """Yields the clips of a split that `pack` has written, decoded by the codecs of its card."""
    import safetensors.torch

    from data_prep.inspect.read_shards import read_samples
    from dit.codecs import sound, vae
    from dit.codecs.dataset_card import read_card
    from dit.codecs.sound.sound_part import read_sound

    card = read_card(folder)
    codec, of_sound = vae.codec_of_card(card), sound.sound_codec_of_card(card)
    known = {motion.caption: motion for motion in MOTIONS}
    for tar in sorted((folder / split).glob("*.tar")):
        for _, _, parts in read_samples(tar):
            about = json.loads(parts["json"])
            latent_CFHW = safetensors.torch.load(parts["safetensors"])["latent"]
            stored, wave_S = read_sound(parts, about), None
            if stored is not None and of_sound is not None:
                wave_S = stored.waveform(of_sound)[0].numpy()
            frames_FHW3 = codec.decode(latent_CFHW.float()).numpy()
            yield SoundingClip(known[about["caption"]], frames_FHW3, wave_S)


def partners(motions: Sequence[Motion], *, seed: int) -> list[int]:
    """For each of `motions` the index of a random one with another digit and the other loudness."""
    drawn, rng = [], random.Random(seed)
    for own in motions:
        others = [
            number
            for number, other in enumerate(motions)
            if other.digit != own.digit and is_rising(other) != is_rising(own)
        ]
        drawn.append(rng.choice(others))
    return drawn


def parts_right(
    judge: ClipJudge,
    motions: Sequence[Motion],
    *,
    clips: Sequence[np.ndarray] = (),
    waves: Sequence[np.ndarray] = (),
) -> dict[str, float]:
    """Fractions of clips and sounds that agree with `motions`, by name.

    They are digit and direction for uint8 `clips` [F, H, W, 3], pitch and loudness for waveforms
    `waves` [S].
    """
    found: dict[str, list[bool]] = {}
    if clips:
        read = [*zip(judge.read(clips), motions, strict=True)]
        found["digit"] = [one.digit == own.digit for one, own in read]
        found["direction"] = [one.direction == own.direction for one, own in read]
    if waves:
        heard = [*zip(waves, motions, strict=True)]
        found["pitch"] = [digit_of(wave_S) == own.digit for wave_S, own in heard]
        found["loudness"] = [rises(wave_S) == is_rising(own) for wave_S, own in heard]
    return {name: float(np.mean(right)) for name, right in found.items()}


def spread_of_real(
    real: Sequence[SoundingClip], motions: Sequence[Motion], clips: Sequence[np.ndarray]
) -> dict[str, float]:
    """The variance within uint8 `clips` [F, H, W, 3] of a caption over that within `real` ones.

    It is the spread of `likeness.Components`, by the name `spread`; nothing if no motion has two
    clips.
    """
    components = Components.of(
        pixels_of([one.frames_FHW3 for one in real]), [one.motion for one in real]
    )
    made = spread(components.places(pixels_of(clips)), motions)
    of_real = spread(components.real_ND, components.real_labels)
    return {} if made is None or not of_real else {"spread": made / of_real}


def part_streams(opened: OpenCheckpoint) -> None:
    """Separates frames and sound in an open network: neither attends to the other any more.

    The output weights of the attention between them are set to zero in place, in all layers.
    """
    import torch

    from dit.models.layers.across_attention import AcrossAttention

    crossing = [one for one in opened.model.modules() if isinstance(one, AcrossAttention)]
    assert crossing, "the network has attention between its streams"
    with torch.no_grad():
        for layer in crossing:
            for weight in layer.linear_proj.parameters():
                weight.zero_()


def evaluate(args: argparse.Namespace) -> Parts:
    """Generates and judges clips; returns {part of the evaluation: {name: fraction right}}.

    Clips of captions also have the `spread` of `spread_of_real`.

    The parts are clips of captions, clips and tones of given ones, these compared with other clips,
    those of a network whose streams do not attend to each other, and held-out clips.
    """
    from dit.sampling.commands.generate_media import generate_opened
    from dit.sampling.commands.generate_program import shown_progress
    from dit.sampling.open_checkpoint import open_checkpoint

    opened = open_checkpoint(args.checkpoint_path, weights=args.weights)
    options = replace(generation_options(args), fps=FPS)
    data = args.dataset_path or Path(opened.config.dataset.path or "")
    train = [*islice(sounding_clips(data, "train"), None, None, READ_OF)]
    judge = ClipJudge.trained_on(*zip(*(one[:2] for one in train), strict=True))
    held_out = [one for one in sounding_clips(data, "val") if one.wave_S is not None]
    given = random.Random(args.seed).sample(held_out, min(args.given, len(held_out)))
    motions = [one.motion for one in given]
    others = [motions[number] for number in partners(motions, seed=args.seed)]

    def made(prompts: Sequence[Prompt], **changed: Any) -> list[Picture]:
        told: Any = {"seed": args.seed, "options": replace(options, **changed)}
        return generate_opened(opened, prompts, track=shown_progress(), **told)

    captioned = [motion for motion in MOTIONS for _ in range(args.per_prompt)]
    pictures = made([Prompt(text=motion.caption) for motion in captioned])
    of_captions = shown_and_heard(pictures)
    parts = {"caption": parts_right(judge, captioned, **of_captions)}
    parts["caption"] |= spread_of_real(train, captioned, of_captions["clips"])
    with tempfile.TemporaryDirectory() as folder:
        of_frames, of_sound = given_prompts(given, Path(folder))
        # Without a caption there is nothing that guidance could lead away from.
        tones, clips = made(of_frames, guidance=1.0), made(of_sound, guidance=1.0)
        pairs = {
            "clips": shown_and_heard(clips)["clips"],
            "waves": shown_and_heard(tones)["waves"],
        }
        parts["given"] = parts_right(judge, motions, **pairs)
        parts["other clip"] = parts_right(judge, others, **pairs)
        part_streams(opened)
        tones, clips = made(of_frames, guidance=1.0), made(of_sound, guidance=1.0)
    apart = {"clips": shown_and_heard(clips)["clips"], "waves": shown_and_heard(tones)["waves"]}
    parts["streams apart"] = parts_right(judge, motions, **apart)
    real = {"clips": [one.frames_FHW3 for one in held_out], "waves": [one[2] for one in held_out]}
    parts["held-out clips"] = parts_right(judge, [one.motion for one in held_out], **real)
    return parts


def given_prompts(clips: Sequence[SoundingClip], folder: Path) -> tuple[list[Prompt], list[Prompt]]:
    """Returns (prompts that give the frames of `clips`, prompts that give their sound).

    The prompts have no caption. The frames and sounds are written into `folder`.
    """
    from dit.codecs.sound.files import wav_file

    films, sounds = written_clips([one.frames_FHW3 for one in clips], folder), []
    for number, clip in enumerate(clips):
        assert clip.wave_S is not None
        sounds.append(folder / f"{number:05d}.wav")
        sounds[-1].write_bytes(wav_file(clip.wave_S[None], RATE))
    of_frames = [Prompt(text="", frames_of=file) for file in films]
    return of_frames, [Prompt(text="", sound_of=str(file)) for file in sounds]


def shown_and_heard(pictures: Sequence[Picture]) -> dict[str, list[np.ndarray]]:
    """Splits generated clips into {"clips": frames [F, H, W, 3], "waves": waveforms [S]}.

    A clip without sound has no waveform.
    """
    waves = [one.sound.samples_CS[0] for one in pictures if one.sound is not None]
    return {"clips": [one.frames_FHW3 for one in pictures], "waves": waves}


def conclude(parts: Parts, args: argparse.Namespace) -> int:
    """Writes evaluation.json and prints a table; returns 1 if a fraction is not in BARS, else 0."""
    console, folder = Console(), report_folder(args)
    settings = {name: str(value) for name, value in vars(args).items()}
    text = json.dumps(parts | {"settings": settings}, indent=2)
    (folder / "evaluation.json").write_text(text + "\n")
    names = ("digit", "direction", "pitch", "loudness", "spread")
    table = Table("", *names)
    for part, values in parts.items():
        table.add_row(part, *(f"{values[n]:.1%}" if n in values else "" for n in names))
    console.print(table)
    console.print(f"written: {folder / 'evaluation.json'}")
    missed = 0
    for part, bars in BARS.items():
        for name, (least, most) in bars.items():
            found = parts[part].get(name)  # no spread of one clip for each caption
            if found is None or not least <= found <= most:
                missed += 1
                read = "unknown" if found is None else f"{found:.1%}"
                said = f"{part}: {name} {read} is not in {least:.0%} to {most:.0%}"
                console.print(said, style="red")
    return int(bool(missed))


def main(argv: Sequence[str] | None = None) -> int:
    """Packs clips, or evaluates a run; returns the exit code.

    It is 1 if a fraction is outside BARS and --no_bars is not given, else 0.
    """
    parser = OptionParser(description=(__doc__ or "").splitlines()[0])
    parser.first = ("per_prompt", "given", "num_steps", "guidance", "sampler", "output_dir")
    add = parser.add_argument
    add("action", choices=("pack", "evaluate"))
    add("folder", type=checkpoint_place, help="to pack into; run or checkpoint to evaluate")
    add("--digits", type=int, help="to pack (default: all)")
    add("--per_prompt", type=int, default=EACH, help="clips of a caption (default: %(default)s)")
    add("--given", type=int, default=GIVEN, help="clips that are given (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the first clip; the i-th takes seed + i")
    add("--num_steps", type=int, default=18, help="steps of the sampler (default: %(default)s)")
    add("--guidance", type=float, help="of captions (default: that of the run)")
    add("--sampler", choices=[str(one) for one in Sampler], help="as for generate_dit.py")
    add("--weights", choices=("ema", "model"), default="ema")
    add("--output_dir", type=Path, help="folder for evaluation.json (default: the run)")
    add("--dataset_path", type=Path, help="folder of the clips (default: the run's)")
    add("--no_bars", action="store_true", help="demand nothing: exit code 0")
    args = parser.parse_args(argv)
    if args.action == "pack":
        pack(Path(args.folder), digits=args.digits)
        return 0
    args.checkpoint_path = args.folder
    missed = conclude(evaluate(args), args)
    return 0 if args.no_bars else missed


if __name__ == "__main__":
    sys.exit(run(main))

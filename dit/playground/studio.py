"""Open checkpoints -> pictures, and the way from noise to them."""

# C latent channels; F H W 3 frames, rows, columns, colours of one picture

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from PIL import Image

from dit.codecs.text.vocabulary import unknown_words
from dit.parsing import parse_json
from dit.playground.requests import Wish
from dit.sampling.commands.generate_media import (
    generate_opened,
    options_of_network,
    options_of_prompt,
)
from dit.sampling.commands.options import FPS, GenerationOptions
from dit.sampling.media_files import LISTING
from dit.sampling.open_checkpoint import LoadOptions, OpenCheckpoint, open_checkpoint
from dit.sampling.prompts import Prompt

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

MOST_SHOWN = 12
"""Pictures of the way from noise, beside the last one."""
_SILENCE_S = 1.0
_EXAMPLES, _LONG_EXAMPLE = 5, 120  # prompts that the page proposes, and characters of one


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What can be compared: a checkpoint, perhaps with adapters."""

    name: str
    opened: OpenCheckpoint


def open_variants(
    checkpoints: Sequence[str], *, weights: str, options: LoadOptions
) -> list[Variant]:
    """Each checkpoint; the first one also with the adapters of `options.lora`.

    Raises:
        ValueError: as `open_checkpoint`.
    """
    plain = replace(options, lora=())
    opened = [open_checkpoint(place, weights=weights, options=plain) for place in checkpoints]
    found = [Variant(name=str(one.path), opened=one) for one in opened]
    if options.lora:
        one = open_checkpoint(checkpoints[0], weights=weights, options=options)
        found.insert(1, Variant(name=f"{one.path} with {', '.join(one.lora)}", opened=one))
    return found


def example_prompts(checkpoint: Path) -> list[str]:
    """Some captions that the run of a checkpoint has sampled at its validations."""
    folder = checkpoint.parent.parent / "validation_generation"
    for listing in sorted(folder.glob(f"step_*/{LISTING}"), reverse=True):
        try:
            prompts = [one["prompt"] for one in parse_json(listing.read_bytes())]
        except (OSError, ValueError, TypeError, KeyError):
            continue
        told = (one for one in prompts if isinstance(one, str) and 0 < len(one) <= _LONG_EXAMPLE)
        return list(dict.fromkeys(told))[:_EXAMPLES]
    return []


class _LeftError(Exception):
    """Nobody reads the messages any more."""


class Studio:
    """Generates the requests of all visitors, one after the other."""

    def __init__(self, variants: Sequence[Variant], *, weights: str):
        self.variants = variants
        self.weights = weights
        self._one_at_a_time = Lock()

    def about(self) -> dict[str, Any]:
        """What the page shows before anything is asked: names, and what is usual."""
        first = self.variants[0].opened
        usual = options_of_prompt(
            options_of_network(_with_size(first), first), Prompt(text=""), first
        )
        names = ("height", "width", "num_video_frames", "num_steps", "guidance", "sampler")
        return {
            "variants": [one.name for one in self.variants],
            "usual": {name: getattr(usual, name) for name in names},
            "examples": example_prompts(first.path),
        }

    def make(self, wish: Wish) -> Generator[dict[str, Any], None, None]:
        """A message for each step, some with a picture; the last one has the result.

        Where nobody reads on (`close`), the wish ends before its next step. In between, a message
        says whether it waits for another wish: sending it is how the server finds out who left.

        Raises:
            ValueError: the network or its decoder does not take the options.
        """
        messages: SimpleQueue[dict[str, Any] | Exception] = SimpleQueue()
        begun, left = Event(), Event()

        def tell(message: dict[str, Any]) -> None:
            if left.is_set():
                raise _LeftError
            messages.put(message)

        def work() -> None:
            with self._one_at_a_time:
                begun.set()
                try:
                    if not left.is_set():
                        tell(self._generate(wish, tell))
                except Exception as error:  # noqa: BLE001  the asking thread raises it
                    messages.put(error)

        Thread(target=work, daemon=True).start()
        try:
            while True:
                try:
                    message = messages.get(timeout=_SILENCE_S)
                except Empty:
                    message = {"waiting": not begun.is_set()}
                if isinstance(message, Exception):
                    raise message
                yield message
                if "picture" in message:
                    return
        finally:
            left.set()

    def _generate(self, wish: Wish, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        opened, done, steps = self.variants[wish.variant].opened, 0, wish.options.num_steps
        options = wish.options
        if not opened.card.get("sizes"):
            options = replace(_with_size(opened), **_given(options))

        def watch(latents: list[Tensor]) -> None:
            """Of the predicted latent [C, F, H, W] of the one prompt, at each step."""
            nonlocal done
            shown = done * MOST_SHOWN // steps > (done - 1) * MOST_SHOWN // steps
            done += 1
            message: dict[str, Any] = {"step": done, "steps": steps}
            if shown and opened.decoder is not None:
                # Its first frame alone: a long clip would take as long as the sampling.
                frames = opened.decoder.decode(latents[0][:, :1].cpu()).numpy()
                message["way"] = data_url(frames, fps=FPS)
            tell(message)

        (made,) = generate_opened(
            opened, [Prompt(text=wish.prompt)], seed=wish.seed, options=options, watch=watch
        )
        frames, settings = made.frames_FHW3, made.settings
        fps = settings["fps"] or FPS
        note = unknown_words([wish.prompt], opened.encoder, opened.card)
        return {
            "picture": data_url(frames, fps=fps),
            **({"still": data_url(frames[:1], fps=fps)} if len(frames) > 1 else {}),
            "height": frames.shape[1],
            "width": frames.shape[2],
            "guidance": settings["guidance"],
            **({"note": note} if note else {}),
        }


def _with_size(opened: OpenCheckpoint) -> GenerationOptions:
    """The usual options; 32 latent cells a side where the dataset card lists no sizes."""
    if opened.card.get("sizes"):
        return GenerationOptions()
    _, height, width = opened.latent_stride.pixels((1, 32, 32))
    return GenerationOptions(height=height, width=width, num_video_frames=1)


def _given(options: GenerationOptions) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if value is not None}


def data_url(frames_FHW3: np.ndarray, *, fps: float) -> str:
    """A PNG, or of several frames an animated WebP, which a page shows as it is."""
    first, *others = (Image.fromarray(frame) for frame in frames_FHW3)
    stored, kind = io.BytesIO(), "webp" if others else "png"
    moving = {"save_all": True, "append_images": others, "duration": round(1000 / fps), "loop": 0}
    first.save(stored, kind, **(moving if others else {}))
    return f"data:image/{kind};base64,{base64.b64encode(stored.getvalue()).decode()}"

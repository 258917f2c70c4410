"""Generates pictures, and some of the steps from noise to them, for requests of the page.

Requests are JSON of unknown origin, so they are checked.
"""

# C latent channels; F H W 3 frames, rows, columns, colours of one picture

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from PIL import Image

from dit.codecs.sound.files import Waveform, page_sound, waveform_picture
from dit.codecs.text.encoder import unknown_words
from dit.parsing import parse_json
from dit.sampling.commands.generate_media import (
    generate_opened,
    options_of_network,
    options_of_prompt,
)
from dit.sampling.commands.load_options import LoadOptions
from dit.sampling.commands.options import FPS, GenerationOptions, check_seed
from dit.sampling.media_files import LISTING
from dit.sampling.open_checkpoint import OpenCheckpoint, open_checkpoint
from dit.sampling.prompts import Prompt

_LONGEST = 10_000  # characters of a prompt
_BITS = 64  # of an integer, such as a seed
# Name on the page -> types. Fields of `GenerationOptions` may be null, which means the default.
_OPTIONS: dict[str, tuple[type, ...]] = {
    "height": (int,),
    "width": (int,),
    "num_video_frames": (int,),
    "num_steps": (int,),
    "guidance": (int, float),
    "sampler": (str,),
    "negative_prompt": (str,),
}
_OWN: dict[str, tuple[type, ...]] = {"prompt": (str,), "seed": (int,), "variant": (int,)}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A request of the page for a picture or video: prompt, seed, variant and options."""

    prompt: str
    seed: int
    variant: int
    """Index of the chosen network in the list of variants."""
    options: GenerationOptions


def read_wish(body: bytes, *, weights: str, variants: int) -> Wish:
    """Parses the `body` of a request.

    `weights` is the option of that name, and `variants` the number of networks to choose from.

    Raises:
        ValueError: `body` is not a JSON object, or a value is missing, unknown, of a wrong type or
            out of range; the message is for the person at the page.
    """
    content = parse_json(body)
    if not isinstance(content, dict):
        raise ValueError(
            f"the request is a {type(content).__name__}, not a JSON object; send an object with"
            f" {', '.join(_OWN)}"
        )
    known = _OPTIONS | _OWN
    if unknown := sorted(map(str, content.keys() - known.keys())):
        raise ValueError(
            f"the request has the unknown keys {', '.join(unknown)}; leave them out:"
            f" known are {', '.join(known)}"
        )
    if missing := sorted(_OWN.keys() - content.keys()):
        raise ValueError(f"the request lacks {', '.join(missing)}; add what is missing")
    given = {name: value for name, value in content.items() if value is not None}
    for name, value in given.items():
        if type(value) not in known[name]:
            kinds = " or ".join(kind.__name__ for kind in known[name])
            raise ValueError(f"{name}={value!r:.40} must be of type {kinds}; correct it")
        if type(value) is int and value.bit_length() > _BITS:
            raise ValueError(f"{name} is too large; give a number below 2**{_BITS}")
    return _checked(given, weights=weights, variants=variants)


def _checked(given: Mapping[str, Any], *, weights: str, variants: int) -> Wish:
    prompt, seed, variant = (given.get(name) for name in _OWN)
    if prompt is None or seed is None or variant is None:
        raise ValueError(f"{', '.join(_OWN)} must not be null; give a value for each")
    if any(
        len(one) > _LONGEST or "\0" in one for one in (prompt, given.get("negative_prompt", ""))
    ):
        raise ValueError(
            f"prompt or negative_prompt is too long, or holds a NUL character; give at most"
            f" {_LONGEST} characters"
        )
    if not 0 <= variant < variants:
        raise ValueError(
            f"variant={variant} must lie in 0 to {variants - 1}: the number of an open network"
        )
    check_seed(seed, count=1)
    options = {name: given[name] for name in _OPTIONS if name in given}
    return Wish(
        prompt=prompt,
        seed=seed,
        variant=variant,
        options=GenerationOptions(weights=weights, **options),
    )


if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

MOST_SHOWN = 12
"""Most intermediate pictures that a request gets, besides the final one."""
_SILENCE_S = 1.0
_EXAMPLES, _LONG_EXAMPLE = 5, 120  # prompts that the page proposes, and characters of one


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A network that the page offers: a checkpoint, perhaps with adapters."""

    name: str
    opened: OpenCheckpoint


def open_variants(
    checkpoints: Sequence[str], *, weights: str, options: LoadOptions
) -> list[Variant]:
    """Opens the networks of all `checkpoints`, in their order.

    With --lora the first checkpoint is opened again with the adapters, and is the second variant.

    Raises:
        ValueError: a checkpoint cannot be opened for generation (see `open_checkpoint`).
    """
    plain = replace(options, lora=())
    opened = [open_checkpoint(place, weights=weights, options=plain) for place in checkpoints]
    found = [Variant(name=str(one.path), opened=one) for one in opened]
    if options.lora:
        one = open_checkpoint(checkpoints[0], weights=weights, options=options)
        found.insert(1, Variant(name=f"{one.path} with {', '.join(one.lora)}", opened=one))
    return found


def example_prompts(checkpoint: Path) -> list[str]:
    """Up to five short prompts that the run of `checkpoint` sampled at its newest validation.

    Empty if there was none.
    """
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
    """An exception that ends a generation whose messages are no longer read."""


class Studio:
    """Generates pictures for all requests, one after the other."""

    def __init__(self, variants: Sequence[Variant], *, weights: str):
        self.variants = variants
        self.weights = weights
        self._one_at_a_time = Lock()

    def about(self) -> dict[str, Any]:
        """What the page shows at first: `variants`, `usual` and `examples`.

        They are the names of the networks, the default options by name, and example prompts.
        """
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
        """Generates a picture or video; yields a dict for each step, then one with the result.

        If the generator is closed, because the reader has left, generation stops at its next step.
        A dict {"waiting": ...} is yielded every second without news, because the server notices
        only while it sends that a reader has left.

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
        opened, options, done = self.variants[wish.variant].opened, wish.options, 0
        if not opened.card.get("sizes"):
            options = replace(_with_size(opened), **_given(options))
        steps = options_of_network(options, opened).num_steps
        assert steps is not None

        def watch(latents: list[Tensor]) -> None:
            """Sends a message at each step; some have a picture of the predicted latent.

            `latents` has the latent of the only sample.
            """
            nonlocal done
            shown = done * MOST_SHOWN // steps > (done - 1) * MOST_SHOWN // steps
            done += 1
            message: dict[str, Any] = {"step": done, "steps": steps}
            if shown and opened.decoder is not None:
                # Only the first frame: decoding a long clip would take as long as the sampling.
                frames = opened.decoder.decode(latents[0][:, :1].cpu()).numpy()
                message["way"] = data_url(frames, fps=FPS)
            tell(message)

        (made,) = generate_opened(
            opened, [Prompt(text=wish.prompt)], seed=wish.seed, options=options, watch=watch
        )
        frames, settings = made.frames_FHW3, made.settings
        fps = settings["fps"] or FPS
        used = (settings[name] for name in ("num_steps", "sampler", "guidance"))
        notes = [unknown_words([wish.prompt], opened.encoder, opened.card)]
        note = "; ".join(filter(None, [*notes, opened.config.unlike_student(*used)]))
        return {
            "picture": data_url(frames, fps=fps),
            **({"still": data_url(frames[:1], fps=fps)} if len(frames) > 1 else {}),
            **({} if made.sound is None else heard(made.sound)),
            "height": frames.shape[1],
            "width": frames.shape[2],
            "guidance": settings["guidance"],
            **({"note": note} if note else {}),
        }


def _with_size(opened: OpenCheckpoint) -> GenerationOptions:
    """Default options, with a size of 32 latent cells a side if the dataset card lists no sizes."""
    if opened.card.get("sizes"):
        return GenerationOptions()
    _, height, width = opened.latent_stride.pixels((1, 32, 32))
    return GenerationOptions(height=height, width=width, num_video_frames=1)


def _given(options: GenerationOptions) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if value is not None}


def heard(sound: Waveform) -> dict[str, str]:
    """The sound of a video as two `data:` URIs: `waveform`, a picture, and `sound`, an MP4 file."""
    drawn, played = waveform_picture(sound.samples_CS), page_sound(sound.samples_CS, sound.rate)
    kinds = {"waveform": ("image/webp", drawn), "sound": ("audio/mp4", played)}
    return {
        name: f"data:{kind};base64,{base64.b64encode(content).decode()}"
        for name, (kind, content) in kinds.items()
    }


def data_url(frames_FHW3: np.ndarray, *, fps: float) -> str:
    """Frames as a `data:` URI of a PNG file, or of an animated WebP file for several frames."""
    first, *others = (Image.fromarray(frame) for frame in frames_FHW3)
    stored, kind = io.BytesIO(), "webp" if others else "png"
    moving = {"save_all": True, "append_images": others, "duration": round(1000 / fps), "loop": 0}
    first.save(stored, kind, **(moving if others else {}))
    return f"data:image/{kind};base64,{base64.b64encode(stored.getvalue()).decode()}"

"""What the page asks for, as JSON of unknown origin -> checked options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dit.parsing import parse_json
from dit.sampling.commands.options import GenerationOptions, check_seed

_LONGEST = 10_000  # characters of a prompt
_BITS = 64  # of an integer, as those of a seed
# Name on the page -> types. Those of `GenerationOptions` may be null: then they are as usual.
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
    """One picture or video that the page wants."""

    prompt: str
    seed: int
    variant: int
    """Number of the checkpoint, or of the checkpoint with its adapters."""
    options: GenerationOptions


def read_wish(body: bytes, *, weights: str, variants: int) -> Wish:
    """The wish in a request.

    Raises:
        ValueError: it is no JSON object, or a value is missing, unknown, of a wrong type or out of
            range; the message is for the person at the page.
    """
    content = parse_json(body)
    if not isinstance(content, dict):
        raise ValueError("the request is no JSON object")
    known = _OPTIONS | _OWN
    if unknown := sorted(map(str, content.keys() - known.keys())):
        raise ValueError(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    if missing := sorted(_OWN.keys() - content.keys()):
        raise ValueError(f"{', '.join(missing)} is missing")
    given = {name: value for name, value in content.items() if value is not None}
    for name, value in given.items():
        if type(value) not in known[name]:
            kinds = " or ".join(kind.__name__ for kind in known[name])
            raise ValueError(f"{name}={value!r:.40} must be of type {kinds}")
        if type(value) is int and value.bit_length() > _BITS:
            raise ValueError(f"{name} has more than {_BITS} bits")
    return _checked(given, weights=weights, variants=variants)


def _checked(given: Mapping[str, Any], *, weights: str, variants: int) -> Wish:
    prompt, seed, variant = (given.get(name) for name in _OWN)
    if prompt is None or seed is None or variant is None:
        raise ValueError(f"{', '.join(_OWN)} must not be null")
    if any(
        len(one) > _LONGEST or "\0" in one for one in (prompt, given.get("negative_prompt", ""))
    ):
        raise ValueError(f"a prompt has at most {_LONGEST} characters, and no NUL")
    if not 0 <= variant < variants:
        raise ValueError(f"variant={variant} is none of the {variants} that are open")
    check_seed(seed, count=1)
    options = {name: given[name] for name in _OPTIONS if name in given}
    return Wish(
        prompt=prompt,
        seed=seed,
        variant=variant,
        options=GenerationOptions(weights=weights, **options),
    )

"""Files of prompts: one on each line, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZES = ("height", "width", "num_frames")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What to show; a size that is None is whatever the others have."""

    text: str
    height: int | None = None
    width: int | None = None
    num_video_frames: int | None = None
    negative: str | None = None  # what guidance leads away from; None is what the others have
    unused: tuple[str, ...] = ()  # what else its entry in a file says


def unused(prompts: Sequence[Prompt]) -> str:
    """What is said where entries of a file ask for more than a caption at a size; else empty."""
    names = sorted({name for prompt in prompts for name in prompt.unused})
    return f"not used, of the file of prompts: {', '.join(names)}" if names else ""


def unguided(negatives: Iterable[str], *, guidance: float) -> str:
    """What is said where nothing leads away from negative prompts; else empty."""
    return (
        "guidance 1 is none: negative prompts are not used"
        if guidance == 1 and any(negatives)
        else ""
    )


def read_prompts(file: Path, *, option: str = "--prompts_file") -> list[Prompt]:
    """The prompts of a file, in order; errors call it by `option`.

    JSON is `{"data": [{"caption": ..., "height": ..., "width": ..., "num_frames": ...}, ...]}`,
    sizes in pixels and as wanted, or the list alone, or a list of strings. `negative_prompt` is
    another key.

    Raises:
        ValueError: there is no such file, it is not UTF-8, or it has no prompt.
    """
    if not file.is_file():
        raise ValueError(f"{option} {file} is not there; check the path")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file} is no text ({error}); save it as UTF-8") from error
    if file.suffix == ".json":
        prompts = _from_json(text, f"{option} {file}")
    else:
        prompts = [Prompt(text=line.strip()) for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{option} {file} has no prompt; write one on each line")
    return prompts


def _from_json(text: str, where: str) -> list[Prompt]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON ({error}); correct it there") from error
    items = content.get("data") if isinstance(content, dict) else content
    if not isinstance(items, list):
        raise ValueError(f'{where} has no list; write {{"data": [{{"caption": "..."}}]}}')
    return [_prompt(item, f"{where}, entry {number}") for number, item in enumerate(items)]


def _prompt(item: Any, where: str) -> Prompt:
    entry: Any = {"caption": item} if isinstance(item, str) else item
    caption = entry.get("caption", entry.get("prompt")) if isinstance(entry, dict) else None
    if not isinstance(caption, str):
        raise ValueError(f'{where} has no "caption"; write {{"caption": "..."}}')
    sizes: dict[str, Any] = {name: entry.get(name) for name in _SIZES}
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f'{where}: "{name}": {size!r} must be a number of at least 1')
    negative = entry.get("negative_prompt")
    if not isinstance(negative, str | None):
        raise ValueError(f'{where}: "negative_prompt": {negative!r} must be a text')
    sizes["num_video_frames"] = sizes.pop("num_frames")
    known = {"caption", "prompt", "negative_prompt", *_SIZES}
    more = tuple(name for name, value in entry.items() if name not in known and value is not None)
    return Prompt(text=caption, negative=negative, unused=more, **sizes)

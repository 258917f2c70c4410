"""Reads files of prompts: one on each line, or JSON, or a JSON entry on each line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dit.parsing import parse_json
from dit.progress import first_of
from dit.sampling.latent_sizes import MOST_PIXELS
from dit.system_errors import reason

_SIZES = ("height", "width", "num_frames")
_CAPTIONS = ("caption", "prompt")  # the first key that exists counts
_PICTURES = {"image_path": "image", "last_image_path": "last_image"}  # as FastVideo names them
_STREAMS = {"frames_path": "frames_of", "sound_path": "sound_of"}  # of networks with sound
_REFERENCES = ("reference_path", "control_path")  # the second as in tables of data_prep
_SHOWN = 12
_LINE_ENDS = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt, with the size, pictures and negative prompt that its file states for it."""

    text: str
    height: int | None = None
    width: int | None = None
    num_video_frames: int | None = None
    # None, or no references: the value of the command line is used
    image: str | None = None  # file of the first frame
    last_image: str | None = None
    references: tuple[str, ...] = ()  # files of the pictures that the prompt edits
    frames_of: str | None = None  # video whose frames are given
    sound_of: str | None = None  # file whose sound is given
    negative: str | None = None  # negative prompt
    unused: tuple[str, ...] = ()  # keys of its entry in the file that nothing reads
    place: str = field(default="", compare=False)  # position in its file, for error messages

    def size(self, asked: Any, usual: Mapping[str, int]) -> dict[str, int | None]:
        """Height, width and number of frames by name: the prompt's own, or those in `asked`.

        Numbers that neither states are taken from `usual`, or are None.
        """
        names = {"num_video_frames": "num_frames", "height": "height", "width": "width"}
        return {
            name: getattr(self, name) or getattr(asked, name) or usual.get(known)
            for name, known in names.items()
        }


def unused(prompts: Sequence[Prompt]) -> str:
    """A notice of keys in a file of prompts that nothing reads; empty if there are none."""
    names = sorted({name for prompt in prompts for name in prompt.unused})
    shown = first_of([repr(name)[1:-1] for name in names], _SHOWN)
    return f"keys in the file of prompts that are not used: {shown}" if names else ""


def unguided(
    negatives: Iterable[str], *, guidance: float, audio_guidance: float | None = None
) -> str:
    """A notice that negative prompts are not used, for `guidance` 1.

    The notice is empty with another guidance of frames or of sound, or if all of `negatives` are
    empty. None for the sound means `guidance`.
    """
    return (
        "negative prompts are not used, because there is no guidance (guidance is 1)"
        if guidance == 1 and audio_guidance in (None, 1) and any(negatives)
        else ""
    )


def read_prompts(file: Path, *, option: str = "--prompts_file") -> list[Prompt]:
    """Reads the prompts of a file, in their order; error messages call the file by `option`.

    .json is `{"data": [{"caption": ..., "height": ..., "width": ..., "num_frames": ...}, ...]}`,
    with optional sizes in pixels, or the list alone, or a list of strings. Other keys of an entry
    are `negative_prompt` and paths, which are relative to the folder of the prompts or to the
    current one: `image_path` and `last_image_path` are files of the first and the last frame,
    `reference_path` (or `control_path`) is the picture that the prompt edits, or a list of them,
    and `frames_path` and `sound_path` are files whose frames or sound the sample takes over. .jsonl
    has one such entry on each line. Any other file has a prompt on each line.

    Raises:
        ValueError: the file does not exist, is a table or not UTF-8, an entry is wrong, a picture
            is missing, or there is no prompt.
    """
    where = f"{option} {file}"
    text = _text(file, where)
    match file.suffix.lower():
        case ".json":
            prompts = _from_json(text, where)
        case ".jsonl" | ".ndjson":
            # U+2028 and similar characters are legal inside a JSON line: only a line feed ends it.
            entries = ((f"{where}, line {i}", _bare(s)) for i, s in enumerate(text.split("\n"), 1))
            prompts = [_prompt(_parsed(line, place), place) for place, line in entries if line]
        case ".csv" | ".tsv":  # names of files and the first line would be parts of prompts
            raise ValueError(
                f"{where} is a table, whose columns are not read; write prompts into a .txt file,"
                ' one on each line, or into a .jsonl file, such as {"caption": "a cat"}'
            )
        case _:
            lines = enumerate(map(_bare, _LINE_ENDS.split(text)), 1)
            prompts = [Prompt(text=line, place=f"{where}, line {i}") for i, line in lines if line]
    if not prompts:
        raise ValueError(f"{where} has no prompt; write at least one, each on a line of its own")
    for prompt in prompts:
        if any("\0" in text for text in (prompt.text, prompt.negative or "")):
            raise ValueError(f"{prompt.place} holds a NUL character; remove it")
    return [_with_places(prompt, file.parent) for prompt in prompts]


def _with_places(prompt: Prompt, folder: Path) -> Prompt:
    """The prompt with the paths of its pictures, relative to the current folder."""
    given = {name: getattr(prompt, name) for name in (*_PICTURES.values(), *_STREAMS.values())}
    found: dict[str, Any] = {
        name: _found(file, prompt, folder) for name, file in given.items() if file is not None
    }
    references = tuple(_found(file, prompt, folder) for file in prompt.references)
    return replace(prompt, references=references, **found)


def _found(file: str, prompt: Prompt, folder: Path) -> str:
    """The path of a file in the folder of the prompts, else in the current one.

    Raises:
        ValueError: the file is in neither folder.
    """
    for path in (str(folder / file), file):
        if os.path.isfile(path):  # unlike pathlib, False for impossible file names
            return path
    what = "file" if file in (prompt.frames_of, prompt.sound_of) else "picture"
    raise ValueError(
        f"{prompt.place}: the {what} {_shown(file)} is neither in {folder} nor in the current"
        " folder; correct its path"
    )


def _text(file: Path, where: str) -> str:
    """The text of `file`, without the byte order mark that some editors write first.

    Raises:
        ValueError: the file does not exist, cannot be read, or is not UTF-8.
    """
    if not file.is_file():
        raise ValueError(f"{where} does not exist; check the path")
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(
            f"{where} cannot be read ({reason(error)}); check its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text ({error}); save it as UTF-8") from error


def _from_json(text: str, where: str) -> list[Prompt]:
    content, more = _parsed(text, where), ()
    if isinstance(content, dict):
        more = tuple(key for key in content if key != "data")
        content = content.get("data")
    if not isinstance(content, list):
        raise ValueError(
            f'{where} must hold a list of prompts; write {{"data": [{{"caption": "..."}}]}}'
        )
    found = [_prompt(item, f"{where}, entry {number}") for number, item in enumerate(content)]
    return [replace(one, unused=(*one.unused, *more)) for one in found]


def _bare(line: str) -> str:
    # A file made by concatenation has byte order marks in the middle, too.
    return line.strip().strip("\ufeff").strip()


def _parsed(text: str, where: str) -> Any:
    """Parses the JSON in `text`; `where` names it in messages.

    Raises:
        ValueError: `text` is not JSON, or an object has the same key twice.
    """
    try:
        parse_json(text)
        return json.loads(text, object_pairs_hook=_object)
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON ({error}); correct it there") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for name, value in pairs:
        if name in entry:
            raise ValueError(f"the key {name!r} occurs twice in one entry; remove one of the two")
        entry[name] = value
    return entry


def _prompt(item: Any, where: str) -> Prompt:
    entry: Any = {"caption": item} if isinstance(item, str) else item
    said = [entry.get(key) for key in _CAPTIONS] if isinstance(entry, dict) else []
    key, caption = next(
        ((k, text) for k, text in zip(_CAPTIONS, said, strict=False) if text is not None),
        ("", None),
    )
    if not isinstance(caption, str):
        raise ValueError(f'{where} has no "caption"; write {{"caption": "..."}}')
    sizes: dict[str, Any] = {name: entry.get(name) for name in _SIZES}
    for name, size in sizes.items():
        # To Python True is the integer 1; and 480.0 is not accepted as a number of pixels.
        if size is not None and (type(size) is not int or not 1 <= size <= MOST_PIXELS):
            raise ValueError(
                f'{where}: "{name}": {_shown(size)} must be a whole number from 1 to {MOST_PIXELS}'
            )
    negative = entry.get("negative_prompt")
    if not isinstance(negative, str | None):
        raise ValueError(
            f'{where}: "negative_prompt": {_shown(negative)} must be a text in quotation marks'
        )
    files: dict[str, Any] = {}
    for name, ours in (_PICTURES | _STREAMS).items():
        files[ours] = next(iter(_pictures(entry, name, where, several=False)), None)
    changed = next((name for name in _REFERENCES if entry.get(name) is not None), _REFERENCES[0])
    files["references"] = _pictures(entry, changed, where, several=True)
    sizes["num_video_frames"] = sizes.pop("num_frames")
    known = {key, "negative_prompt", changed, *_SIZES, *_PICTURES, *_STREAMS}
    more = tuple(name for name, value in entry.items() if name not in known and value is not None)
    return Prompt(text=caption, negative=negative, unused=more, place=where, **sizes, **files)


def _pictures(entry: dict[str, Any], name: str, where: str, *, several: bool) -> tuple[str, ...]:
    """The files that the key `name` of an entry names: none, one, or a list if `several`.

    Raises:
        ValueError: the value is something else.
    """
    value = entry.get(name)
    files = value if several and isinstance(value, list) else [value] if value is not None else []
    if any(not isinstance(file, str) or "\0" in file for file in files):
        what = "file" if name in _STREAMS else "picture"
        more = ", or a list of them" if several else ""
        raise ValueError(f'{where}: "{name}": {_shown(value)} must name a {what}{more}')
    return tuple(files)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}..."

"""Reads `dataset_card.json`: what a dataset holds, and how to rebuild its encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dit.parsing import parse_json
from dit.system_errors import reason

FORMAT_VERSION = 1
CARD_NAME = "dataset_card.json"
NULL_TEXT_NAME = "null_text.safetensors"


class CodecError(ValueError):
    """A codec or text encoder cannot be used; the message says what to change."""


def part_of_card(card: dict[str, Any], part: str) -> dict[str, Any]:
    """The settings in a dataset card under the key `part`.

    Raises:
        CodecError: the part is missing, or the card has another format version.
    """
    version = card.get("format_version")
    if version != FORMAT_VERSION:
        raise CodecError(
            f"{CARD_NAME} has format_version {version!r}, but this version of data_prep reads"
            f" {FORMAT_VERSION}; use the version that packed the data, or pack it again"
        )
    if not isinstance(card.get(part), dict):
        raise CodecError(f"{CARD_NAME} has no object {part!r}; pack the data again")
    return card[part]


def read_card(folder: Path) -> dict[str, Any]:
    """Reads the card of the dataset in `folder`.

    Raises:
        CodecError: there is no card, or it is not a JSON object.
    """
    path = folder / CARD_NAME
    try:
        card = parse_json(path.read_bytes())
    except OSError as error:
        raise CodecError(
            f"{path} cannot be read ({reason(error)}); give the folder of a packed dataset"
        ) from None
    except ValueError as error:
        raise CodecError(f"{path} is not JSON ({error}); pack the data again") from None
    if not isinstance(card, dict):
        raise CodecError(
            f"{path} holds a {type(card).__name__}, not a JSON object; pack the data again"
        )
    return card

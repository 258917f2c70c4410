"""JSON of unknown origin -> plain values, with one kind of error."""

from __future__ import annotations

import json
import re
from typing import Any

_SURROGATE = re.compile(r"[\ud800-\udfff]")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON document: json.loads with one kind of error for any bytes.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or holds half of a surrogate pair, which
            no file can hold.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    try:
        value = json.loads(text)
        if "\\u" in text or _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("the JSON holds half of a surrogate pair, which is no text") from None
    return value

"""What is wrong with words of a command line that no option takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def not_an_option(words: Sequence[str], options: Iterable[str]) -> str:
    """About the first of `words`, which argparse has left over; names the option most like it."""
    if not words[0].startswith("-"):
        return f"{words[0]!r} belongs to no option; put quotes around names with spaces"
    name = words[0].partition("=")[0]
    near = get_close_matches(name, list(options), n=1, cutoff=0.7)
    return f"{name} is no option" + "".join(f", {option} is" for option in near)

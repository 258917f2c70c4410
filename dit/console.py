"""A console that prints text unchanged, and a function that hides warnings of libraries.

Rich turns `:ok:` into an emoji and `[bold]` into a style, also in paths, prompts and commands to
copy, and breaks long lines. `Console` does none of this; it prints all lines, tables and bars of
this project.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import rich.console
from rich.segment import Segment, Segments
from rich.text import Text

_WIDE = 240  # columns of a pipe or a file, where a folded table could not be searched
_OBEYED = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}
"""Characters that would control a terminal -> the escape that is shown for each."""


class Console(rich.console.Console):
    """A console of rich that shows lines, cells and titles unchanged.

    Two kinds of characters are shown as escapes: those that would control a terminal, and those
    that the encoding of the output lacks, such as bytes of file names that are not text.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)
        if not self.is_terminal and "width" not in options:
            self.width = _WIDE

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints texts unchanged, each on its own line, and objects of rich such as tables."""
        # As Segments, because rich's Text makes spaces of tabs.
        lines = (
            Segments([Segment(f"{self._shown(one)}\n")]) if isinstance(one, str) else one
            for one in objects
        )
        super().print(*lines, **options)

    def on_broken_pipe(self) -> None:
        """Stops printing when nobody reads the output any more; rich would end the program."""
        self.quiet = True

    def render_str(self, text: str, **options: Any) -> Text:
        """Makes a table cell or title of `text`, unchanged."""
        return super().render_str(self._shown(text), **options)

    def _shown(self, text: str) -> str:
        return (
            text.translate(_OBEYED).encode(self.encoding, "backslashreplace").decode(self.encoding)
        )


def hide_library_warnings() -> None:
    """Hides warnings of Megatron-Core and torch about themselves, which a user cannot act on."""
    for module in (r"megatron\.", r"torch\."):
        warnings.filterwarnings("ignore", module=module)
    for message in (r"The \.grad attribute of a Tensor", "Please use DTensor instead"):
        warnings.filterwarnings("ignore", message=message)
    # Megatron-Core raises every error that it logs, so its log would only repeat the exception.
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)

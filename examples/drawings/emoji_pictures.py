"""Writes 1,400 small coloured drawings with transparency and captions: Noto Color Emoji.

    python examples/drawings/emoji_pictures.py runs/emoji/pictures --font NotoColorEmoji.ttf

The font has a picture of 136 x 128 pixels for each character (its table CBDT), and Unicode a name,
such as `dog face`, which becomes the caption. The font's licence is SIL OFL 1.1. It comes with the
Debian package fonts-noto-color-emoji, as /usr/share/fonts/truetype/noto/NotoColorEmoji.ttf.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unicodedata import name

from fontTools.ttLib import TTFont

from dit.command_line import OptionParser

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
_DIGITS = 0x100  # characters below are the digits of keycaps, drawn empty


def emoji(font: Path) -> Iterator[tuple[int, str, bytes]]:
    """Yields code point, name in lower case, and PNG file of each character that has a name."""
    opened = TTFont(font)
    pictures = opened["CBDT"].strikeData[0]
    for code, glyph in sorted((opened.getBestCmap() or {}).items()):
        caption = name(chr(code), "").lower()
        if code >= _DIGITS and caption and glyph in pictures:
            yield code, caption, pictures[glyph].imageData


def main(argv: list[str] | None = None) -> int:
    """Writes FOLDER/1f436.png and so on, and FOLDER/captions.jsonl; returns the exit code."""
    parser = OptionParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="to write into")
    parser.add_argument("--font", type=Path, default=FONT, help="(%(default)s)")
    args = parser.parse_args(argv)
    if args.folder.exists():
        parser.error(f"{args.folder} is there already; name a new folder, or remove it")
    if not args.font.is_file():
        parser.error(
            f"--font {args.font} does not exist; name its file, or install fonts-noto-color-emoji"
            " (Debian)"
        )
    args.folder.mkdir(parents=True)
    rows = []
    for code, caption, content in emoji(args.font):
        file = f"{code:x}.png"
        (args.folder / file).write_bytes(content)
        rows.append({"file_name": file, "caption": caption})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (args.folder / "captions.jsonl").write_text(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

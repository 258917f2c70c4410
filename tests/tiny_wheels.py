"""Wheels of a few hundred bytes, for tests of what pip makes of them."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    needs: Sequence[str] = (),
    tag: str = "py3-none-any",
    fill: int = 0,
) -> Path:
    """A wheel with one module of the package's name; `fill` bytes make it larger."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    pure = "true" if tag.endswith("any") else "false"
    texts = {
        f"{name}/__init__.py": f"version = {version!r}\n" + "#" * fill,
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: {pure}\nTag: {tag}\n",
    }
    record = [f"{place},," for place in (*texts, f"{info}/RECORD")]
    with zipfile.ZipFile(file, "w") as archive:
        for place, text in texts.items():
            archive.writestr(place, text)
        archive.writestr(f"{info}/RECORD", "\n".join(record) + "\n")
    return file

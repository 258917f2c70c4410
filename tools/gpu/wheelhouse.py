"""Collects the wheels that a machine without internet lacks.

1. present  its `pip list --format=freeze` becomes an environment in which pip finds the same
2. resolve  pip says what it would add there for training, benchmarks and tests/gpu
3. fetch    these wheels and nothing else; what has no wheel is built here
4. sizes    of the wheels, which are often carried over a narrow way

It runs under the Python version of that machine, because pip judges conditions such as
`python_version >= "3.12"` by the Python that it runs in. Nothing but pip is needed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

from dit.command_line import OptionParser
from tools.gpu.install import ROOT, write_metadata

EXTRAS = ("pytest", "pytest-timeout", "hypothesis", "diffusers", "accelerate")
"""Of the optional dependencies: what tests/gpu and compare_padded.py import."""
ALONE = ("nvidia-cudnn-frontend>=1.32,<1.33",)
"""Fetched without what they declare: 92 MB of compilers that attention by cuDNN's graphs, which the
machine's torch brings the library for, does not import."""
UNUSED = {"s3fs": "9999"}
"""Taken to be there: what Megatron-Energon declares, and no run imports; S3 is read by others."""
PINNED = ("megatron-core",)
GLIBC = (2, 28)
"""Newest C library that a wheel may ask for."""
_FIXED = re.compile(r"torch|(pytorch-)?triton|(nvidia|cuda)-(?!cutlass-|cudnn-frontend).*")
"""Packages that are never fetched: they belong to the driver of the machine."""
_LINE = re.compile(r"([A-Za-z0-9][\w.-]*)==(\S+)")


def main(argv: Sequence[str] | None = None) -> int:
    options, pip_flags = _parser().parse_known_args(argv)
    try:
        asked, mine = options.python_version, ".".join(map(str, sys.version_info[:2]))
        if asked not in (None, mine):
            raise ValueError(
                f"Python {mine} runs this program, and the machine has {asked}: pip judges wheels"
                f" by its own. Name one: make wheelhouse PYTHON=/path/python{asked}"
            )
        present = read_present(options.present)
        with tempfile.TemporaryDirectory() as folder:
            needed = requirements(ROOT, options.also)
            found = resolve(present | UNUSED, needed, Path(folder), pip_flags)
            if fixed := [f"{n}=={v}" for n, (v, _) in found.items() if _FIXED.fullmatch(n)]:
                raise ValueError(
                    f"{', '.join(fixed)} would be fetched, and {options.present} does not list it:"
                    " torch, Triton and CUDA are those of the machine; install them there, or give"
                    " the list of a machine that has them"
                )
            found |= resolve(present, ALONE, Path(folder), ["--no-deps", *pip_flags])
            wheels = _fetch([url for _, url in found.values()], Path(folder), pip_flags)
            _check_sizes(wheels, limit_mb=options.limit_mb)
            for old in options.output.glob("*.whl"):
                old.unlink()
            shutil.copytree(Path(folder) / "wheels", options.output, dirs_exist_ok=True)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"written: {options.output}; there: make gpu WHEELHOUSE={options.output}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m tools.gpu.wheelhouse",
        description=(__doc__ or "").splitlines()[0],
        epilog="All other arguments are those of pip install.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--present", type=Path, required=True, help="pip list --format=freeze of that machine")
    add("--python-version", help="of that machine, such as 3.12; checked against this Python")
    add(
        "--also", action="append", default=[], metavar="PACKAGE", help="an optional dependency, too"
    )
    add("--output", type=Path, default=Path("runs/wheelhouse"), help="folder (%(default)s)")
    add("--limit-mb", type=float, default=45.0, help="of all wheels (%(default)s)")
    return parser


def read_present(file: Path) -> dict[str, str]:
    """Package -> version, from lines `name==version`.

    Raises:
        ValueError: another kind of line, or no torch.
    """
    found = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{file}:{number}: {text!r} is not name==version; the file is what"
                " `pip list --format=freeze` prints on the machine"
            )
        found[_normalised(match[1])] = match[2]
    if "torch" not in found:
        raise ValueError(f"{file} lists no torch, and a wheelhouse never brings it")
    return found


def _normalised(name: str) -> str:
    """The one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(checkout: Path, also: Sequence[str] = ()) -> list[str]:
    """What the project needs to train, and of its optional dependencies EXTRAS and `also`.

    Packages of PINNED have the version that the image has, so that both measure one program.

    Raises:
        ValueError: one of `also` is no optional dependency.
    """
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    pins = (checkout / "docker/requirements.txt").read_text().splitlines()
    optional = [one for extra in project["optional-dependencies"].values() for one in extra]
    by_name = {_normalised(re.split(r"[^\w.-]", one)[0]): one for one in optional}
    pinned = (pin for pin in pins if pin.partition("==")[0] in PINNED)
    if unknown := [name for name in also if name not in by_name]:
        raise ValueError(f"--also {unknown[0]}: pyproject.toml has {', '.join(sorted(by_name))}")
    return [*project["dependencies"], *(by_name[name] for name in (*EXTRAS, *also)), *pinned]


def resolve(
    present: dict[str, str], needed: Sequence[str], folder: Path, pip_flags: Sequence[str] = ()
) -> dict[str, tuple[str, str]]:
    """Package -> (version, address): what pip would add where `present` is installed.

    pip keeps what is there wherever that satisfies everything. A package of the machine that does
    not is in the result with another version; torch, Triton and CUDA never are.

    Raises:
        ValueError: there is no solution, with what pip says of it.
    """
    if not needed:
        return {}
    python, report, fixed = _stand_in(present, folder / "env"), folder / "report", folder / "fixed"
    fixed.write_text("".join(f"{n}=={v}\n" for n, v in present.items() if _FIXED.fullmatch(n)))
    asked = ["install", "--dry-run", "--report", str(report), "--constraint", str(fixed)]
    _pip(["--python", str(python), *asked, *pip_flags, *needed])
    found = {}
    for entry in json.loads(report.read_text())["install"]:
        source, metadata = entry["download_info"], entry["metadata"]
        url = f"{source['url']}#{source['archive_info'].get('hash', '')}".rstrip("#")
        found[_normalised(metadata["name"])] = (metadata["version"], url)
    return found


def _stand_in(present: dict[str, str], folder: Path) -> Path:
    """The interpreter of an environment that says of itself that it has these packages."""
    venv.create(folder, with_pip=False, clear=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name, version in present.items():
        write_metadata(packages, name, version)
    # The file by which a distribution tells pip what C library it has (PEP 600).
    (packages / "_manylinux.py").write_text(
        f"def manylinux_compatible(*wanted):\n    return wanted[:2] <= {GLIBC}\n"
    )
    return folder / "bin/python"


def _pip(arguments: Sequence[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    if done.returncode:
        _, why, details = done.stdout.partition("The conflict is caused by:")
        said = "\n".join(filter(None, ((why + details).strip(), done.stderr.strip())))
        raise ValueError(
            f"pip found no way:\n{said}\nIf torch, Triton or CUDA of the machine is in the way, the"
            " project does not run there as it is"
        )


def _fetch(urls: Sequence[str], folder: Path, pip_flags: Sequence[str]) -> list[Path]:
    """The wheels in a folder of `folder`; those that are built here are pure Python."""
    (place := folder / "wheels").mkdir()
    if urls:
        _pip(["wheel", "--no-deps", "--wheel-dir", str(place), *pip_flags, *urls])
    wheels = sorted(place.glob("*.whl"))
    if built := [wheel.name for wheel in wheels if "-linux_" in wheel.name]:
        raise ValueError(
            f"{', '.join(built)}: was compiled here, as there is no wheel of it, and may need a"
            " newer C library than the machine has; choose a version with a wheel"
        )
    return wheels


def _check_sizes(wheels: Sequence[Path], *, limit_mb: float) -> None:
    """Says the size of each wheel, the largest first, and refuses too much."""
    sizes = {" ".join(one.name.split("-")[:2]): one.stat().st_size / 1e6 for one in wheels}
    total = sum(sizes.values())
    rows = sorted(sizes.items(), key=lambda row: -row[1])
    for name, size in (*rows, (f"{len(wheels)} wheels", total)):
        sys.stdout.write(f"{size:8.2f} MB  {name}\n")
    if total > limit_mb:
        raise ValueError(
            f"the wheels are {total:.1f} MB, and {limit_mb:.1f} MB may be carried (--limit-mb);"
            " install the largest of the list above on the machine and add them to the file of"
            " present packages"
        )


if __name__ == "__main__":
    sys.exit(main())

"""Collects the wheels that a machine without internet lacks, and installs them there."""

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
from functools import partial
from pathlib import Path

from dit.command_line import OptionParser
from tools.gpu.plan import ROOT

EXTRAS = ("pytest", "pytest-timeout", "hypothesis", "diffusers", "accelerate")
"""Optional dependencies that tests/gpu and compare_padded.py import."""
ALONE = ("nvidia-cudnn-frontend>=1.32,<1.33",)
"""Packages that are fetched without their declared dependencies of 92 MB; cuDNN's library is
torch's."""
UNUSED = {"s3fs": "9999"}
"""Packages that are not fetched, with a version that satisfies Megatron-Energon, which declares
them. No run imports them: S3 is read by other packages."""
MINE = ".".join(map(str, sys.version_info[:2]))
GLIBC = (2, 28)
"""Newest version of the C library (glibc) that a wheel may need."""
_FIXED = re.compile(r"torch|(pytorch-)?triton|(nvidia|cuda)-(?!cutlass-|cudnn-frontend).*")
"""Pattern of packages that are never fetched, because they must fit the machine's driver."""


def main(argv: Sequence[str] | None = None) -> int:
    options, pip_flags = _parser().parse_known_args(argv)
    try:
        if (asked := options.python_version) != MINE:
            raise ValueError(
                f"Python {MINE} runs this program, and the machine has {asked}: pip judges wheels"
                f" by its own. Name one: make wheelhouse PYTHON=/path/python{asked}"
            )
        present = read_present(options.present)
        with tempfile.TemporaryDirectory() as folder:
            machine = StandIn(present | UNUSED, Path(folder), pip_flags)
            found = machine.resolve(*requirements(ROOT, options.also))
            if fixed := [f"{n}=={v}" for n, v in found.items() if _FIXED.fullmatch(n)]:
                raise ValueError(
                    f"{', '.join(fixed)} would be fetched, but torch, Triton and CUDA are those of"
                    f" the machine: install it there, or list it in {options.present}"
                )
            wheels = machine.fetch(found | machine.resolve("--no-deps", *ALONE))
            _check_sizes(wheels, limit_mb=options.limit_mb)
            options.output.mkdir(parents=True, exist_ok=True)
            for old in options.output.glob("*.whl"):
                old.unlink()
            for wheel in wheels:
                shutil.copy(wheel, options.output)
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
    add("--python-version", default=MINE, help="of that machine, which this Python must have")
    add("--also", action="append", default=[], metavar="NAME", help="an optional dependency, too")
    add("--output", type=Path, default=Path("runs/wheelhouse"), help="folder (%(default)s)")
    add("--limit-mb", type=float, default=45.0, help="of all wheels (%(default)s)")
    return parser


def read_present(file: Path) -> dict[str, str]:
    """Reads the packages of a machine from lines `name==version`, as a dict of versions.

    Raises:
        ValueError: a line has another form, or torch is missing.
    """
    found = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        name, equals, version = line.partition("#")[0].strip().partition("==")
        if name and not equals:
            raise ValueError(
                f"{file}:{number}: {line!r} is not name==version; the file is what"
                " `pip list --format=freeze` prints on the machine"
            )
        if name:
            found[_normalised(name)] = version
    if "torch" not in found:
        raise ValueError(
            f"{file} lists no torch, and a wheelhouse never brings it; install it on that machine,"
            " and list its packages again"
        )
    return found


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(checkout: Path, also: Sequence[str] = ()) -> list[str]:
    """Requirements of training, and of the optional dependencies EXTRAS and `also`.

    Megatron-Core has the version of the Docker image, so that both measure the same program.

    Raises:
        ValueError: a name in `also` is not an optional dependency.
    """
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    image = (checkout / "docker/requirements.txt").read_text()
    optional = [one for extra in project["optional-dependencies"].values() for one in extra]
    by_name = {_normalised(re.split(r"[^\w.-]", one)[0]): one for one in optional}
    if unknown := [name for name in also if name not in by_name]:
        raise ValueError(
            f"--also {unknown[0]} is not an optional dependency in pyproject.toml; give"
            f" one of {', '.join(sorted(by_name))}"
        )
    pinned = re.findall(r"^megatron-core==.+", image, re.MULTILINE)
    return [*project["dependencies"], *(by_name[name] for name in (*EXTRAS, *also)), *pinned]


class StandIn:
    """An environment whose metadata claim that the packages `present` are installed.

    pip, run in it, resolves requirements as it would on that machine.

    Raises:
        ValueError: pip fails; every method raises it, with pip's output.
    """

    def __init__(self, present: dict[str, str], folder: Path, pip_flags: Sequence[str] = ()):
        self.folder, fixed = folder, folder / "fixed"
        self.pip = partial(_pip, "--python", str(folder / "env/bin/python"))
        self.flags = [f"--constraint={fixed}", *pip_flags]
        fixed.write_text("".join(f"{n}=={v}\n" for n, v in present.items() if _FIXED.fullmatch(n)))
        venv.create(folder / "env", with_pip=False)
        (packages,) = folder.glob("env/lib/python*/site-packages")
        for name, version in present.items():
            write_metadata(packages, name, version)
        # The file by which a distribution tells pip what C library it has (PEP 600).
        (packages / "_manylinux.py").write_text(
            f"def manylinux_compatible(*wanted):\n    return wanted[:2] <= {GLIBC}\n"
        )

    def resolve(self, *needed: str) -> dict[str, str]:
        """The packages that pip would add for the requirements `needed`, with their versions.

        pip keeps a package of the machine if it satisfies every requirement. One that does not is
        in the result with another version; torch, Triton and CUDA never are.
        """
        report = self.folder / "report"
        self.pip("install", "--dry-run", f"--report={report}", *self.flags, *needed)
        found = (entry["metadata"] for entry in json.loads(report.read_text())["install"])
        return {_normalised(one["name"]): one["version"] for one in found}

    def fetch(self, versions: dict[str, str]) -> list[Path]:
        """Fetches or builds wheels of `versions` (name -> version); returns their files.

        Raises:
            ValueError: a wheel was compiled, and may need a newer C library than the machine has.
        """
        if versions:
            exact = (f"{name}=={version}" for name, version in versions.items())
            place = f"--wheel-dir={self.folder / 'wheels'}"
            self.pip("wheel", "--no-deps", place, *self.flags, *exact)
        wheels = sorted(self.folder.glob("wheels/*.whl"))
        if built := [wheel.name for wheel in wheels if "-linux_" in wheel.name]:
            raise ValueError(
                f"{', '.join(built)}: was compiled here, as there is no wheel of it, and may need a"
                " newer C library than the machine has; choose a version with a wheel"
            )
        return wheels


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    if done.returncode:
        _, why, details = done.stdout.partition("The conflict is caused by:")
        said = "\n".join(filter(None, ((why + details).strip(), done.stderr.strip())))
        raise ValueError(
            f"pip found no solution:\n{said}\nIf torch, Triton or CUDA of the machine is in"
            " the way, the"
            " project does not run there as it is"
        )


def _check_sizes(wheels: Sequence[Path], *, limit_mb: float) -> None:
    """Prints the size of each wheel, the largest first, and checks their sum.

    Raises:
        ValueError: the sum is above `limit_mb`, in units of 10^6 bytes.
    """
    sizes = {" ".join(one.name.split("-")[:2]): one.stat().st_size / 1e6 for one in wheels}
    total = sum(sizes.values())
    rows = sorted(sizes.items(), key=lambda row: -row[1])
    for name, size in (*rows, (f"{len(wheels)} wheels", total)):
        sys.stdout.write(f"{size:8.2f} MB  {name}\n")
    if total > limit_mb:
        raise ValueError(
            f"the wheels are {total:.1f} MB, and {limit_mb:.1f} MB may be carried (--limit-mb);"
            " install the largest of these on the machine, and add them to its list of packages"
        )


def install(wheelhouse: Path, site: Path) -> int:
    """Unpacks the wheels in `wheelhouse` into `site`, and returns their number.

    `site` is emptied before, unless it was unpacked from exactly these wheels; then nothing is
    done.

    Raises:
        ValueError: there are no wheels, pip fails, or a wheel would replace the machine's torch.
    """
    wheels = sorted(wheelhouse.glob("*.whl"))
    if not wheels:
        raise ValueError(
            f"{wheelhouse} has no wheels; run `make wheelhouse` on a machine with"
            " internet, and copy its folder here"
        )
    listed = "".join(f"{wheel.name} {wheel.stat().st_size}\n" for wheel in wheels)
    stamp = site / "wheels.txt"
    if stamp.is_file() and stamp.read_text() == listed:
        return len(wheels)
    shutil.rmtree(site, ignore_errors=True)
    flags = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--quiet"]
    _pip("install", *flags, "--target", str(site), *map(str, wheels))
    if found := [name for name in ("torch", "triton") if (site / name).exists()]:
        raise ValueError(
            f"{wheelhouse} has wheels of {' and '.join(found)}, which would replace those"
            " installed on this machine; remove these wheels from the folder"
        )
    # This project is run from its checkout, and asks for its own version.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    write_metadata(site, project["name"], project["version"])
    stamp.write_text(listed)
    return len(wheels)


def write_metadata(site: Path, name: str, number: str) -> None:
    """Writes metadata by which pip and `importlib.metadata` take a package for installed."""
    folder = site / f"{name.replace('-', '_')}-{number}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    (folder / "RECORD").touch()


if __name__ == "__main__":
    sys.exit(main())

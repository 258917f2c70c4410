from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What NVIDIA's image brings, built for each other.
OF_THE_IMAGE = {
    *("torch", "torchvision", "torchaudio", "triton", "pytorch-triton", "numpy"),
    *("transformer-engine", "transformer-engine-torch", "apex", "flash-attn"),
}


@pytest.fixture(scope="module")
def instructions(repo_root: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) with comments dropped and continued lines joined."""
    text = (repo_root / "docker" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, arguments) for name, arguments in pairs]


@pytest.fixture(scope="module")
def pins(repo_root: Path) -> dict[str, Requirement]:
    lines = (repo_root / "docker" / "requirements.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


def test_base_is_nvidias_image_by_version(instructions: list[tuple[str, str]]) -> None:
    bases = [arguments for name, arguments in instructions if name == "FROM"]
    assert len(bases) == 1
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:2[5-9]\.\d\d-py3", bases[0])


def test_every_install_leaves_dependencies_alone(instructions: list[tuple[str, str]]) -> None:
    installs = [
        command
        for name, arguments in instructions
        if name == "RUN"
        for command in re.split(r"&&|;", arguments)
        if re.search(r"\bpip3? install\b", command)
    ]
    assert len(installs) == 2
    for command in installs:
        assert "--no-deps" in command
        words = set(re.split(r"[\s=<>~!\[]+", command))
        assert not words & OF_THE_IMAGE, command


def test_every_pin_is_exact_and_none_is_the_images(pins: dict[str, Requirement]) -> None:
    assert pins and not set(pins) & OF_THE_IMAGE
    assert all(re.fullmatch(r"==[^*]+", str(pin.specifier)) for pin in pins.values())


def test_pins_meet_what_the_package_asks_for(repo_root: Path, pins: dict[str, Requirement]) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *extras["prep"], *extras["log"]]:
        wanted = Requirement(line)
        if canonicalize_name(wanted.name) in OF_THE_IMAGE:
            continue
        (pin,) = pins[canonicalize_name(wanted.name)].specifier
        assert pin.version in wanted.specifier, f"{wanted} is not met by {pin}"


def test_copied_files_exist(repo_root: Path, instructions: list[tuple[str, str]]) -> None:
    for name, arguments in instructions:
        if name == "COPY":
            *files, _ = arguments.split()
            assert all((repo_root / file).exists() for file in files)

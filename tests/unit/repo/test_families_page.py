"""docs/families.md: a row for every family and size, a test behind every cell, and who has none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dit.codecs.dataset_card import CodecError
from dit.codecs.text import TEXT_ENCODERS
from dit.codecs.vae import CODECS, codec_named
from dit.config.loading import ConfigError, load_config
from dit.models.family import FAMILIES, diffusers_families, family_named
from dit.other_networks import OTHER_NETWORKS, why_not_trained
from recipes.runs import dit_debug

COLUMNS = ["sizes", "pretrain", "fine-tune", "LoRA", "conversion", "generation", "layouts"]
LINK = re.compile(r"\]\(([^)#]+\.py)#(\w+)\)")


@pytest.fixture(scope="module")
def page(repo_root: Path) -> Path:
    return repo_root / "docs/families.md"


def rows(page: Path, header: str) -> list[list[str]]:
    """The cells of the table that begins with a header, below it."""
    _, found, rest = page.read_text().partition(f"| {header} |")
    assert found, header
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_family_and_size_has_one_row(page: Path) -> None:
    found = rows(page, "`model.family` | `model.name`")
    named = [(family.strip("`"), re.findall(r"`([^`]+)`", sizes)) for family, sizes, *_ in found]
    pairs = [(family, size) for family, sizes in named for size in sizes]
    assert sorted(pairs) == sorted((f, size) for f in FAMILIES for size in family_named(f).sizes)


def test_every_cell_links_a_test_that_exists(page: Path) -> None:
    for family, sizes, *cells in rows(page, "`model.family` | `model.name`"):
        assert len(cells) == len(COLUMNS)
        for column, cell in zip(COLUMNS, cells, strict=True):
            links = LINK.findall(cell)
            assert links or cell == "not yet tested", (family, sizes, column)
            for file, name in links:
                defined = ast.walk(ast.parse((page.parent / file).read_text()))
                names = {node.name for node in defined if isinstance(node, ast.FunctionDef)}
                assert name.startswith("test_") and name in names, f"{file} has no {name}"


def test_other_networks_are_those_of_the_list(page: Path) -> None:
    found = {tuple(cells) for cells in rows(page, "network | what it needs")}
    assert found == {(one.title, one.lacks) for one in OTHER_NETWORKS}


def test_what_is_trained_is_none_of_them() -> None:
    sizes = [size for name in FAMILIES for size in family_named(name).sizes]
    known = [*FAMILIES, *sizes, *CODECS, *TEXT_ENCODERS, *diffusers_families()]
    assert not [name for name in known if why_not_trained(name)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sdxl", "SDXL is not trained here: it needs a UNet"),
        ("Z-Image-Turbo", "Z-Image is not trained here"),
        ("FLUX.2-dev", "FLUX.2 is not trained here: it needs a modulation that all layers"),
        ("LTX2VideoTransformer3DModel", "LTX-2 is not trained here: it needs a stream of audio"),
    ],
)
def test_their_names_are_errors_that_say_what_is_lacking(name: str, words: str) -> None:
    for key in ("model.name", "model.family"):
        with pytest.raises(ConfigError) as caught:
            load_config(dit_debug(), overrides=[f"{key}={name}"])
        assert words in str(caught.value)
    with pytest.raises(CodecError, match=re.escape(words)):
        codec_named(name)
    assert why_not_trained("no-such-network") is None

"""docs/families.md: a row for every family and size, a test behind every cell, and who has none."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from dit.codecs.dataset_card import CodecError
from dit.codecs.vae import codec_named
from dit.config_loading import ConfigError, load_config
from dit.models.registry import FAMILIES, family_named
from recipes.runs import dit_debug

COLUMNS = ["sizes", "pretrain", "fine-tune", "LoRA", "conversion", "generation", "layouts"]
LINK = re.compile(r"\]\(([^)#]+\.py)#(\w+)\)")


def _test(word: str, place: str) -> str:
    return f"[{word}](../tests/{place})"


_ON_LAYOUTS = "distributed/test_stacks_on_layouts.py#test_every_tensor_is_that_of_one_process"
_DESCRIPTION = "contract/test_description.py#test"
USUAL = (
    f"{_test('parameters', f'{_DESCRIPTION}_named_sizes_have_the_tensors_of_diffusers')},"
    f" {_test('operations', f'{_DESCRIPTION}_operations_are_those_of_diffusers')}",
    _test("yes", _ON_LAYOUTS),
    _test("yes", "contract/test_finetuning.py#test_losses_are_those_of_diffusers_and_torch"),
    _test("yes", "contract/test_lora.py#test_our_folder_computes_it_in_diffusers_and_peft"),
    _test("yes", "contract/test_parity.py#test_forward_gradients_and_the_way_back"),
    _test("yes", "contract/test_generation.py#test_pictures_of_texts_and_the_way_back"),
    _test("yes", _ON_LAYOUTS),
)
"""Cells of a family that all contracts have."""


def _linked(family: str) -> str:
    """The name of a family, which leads to its page."""
    pages = {"dit": "diffusers", "sound_dit": "sound"}
    return f"[`{family}`]({pages.get(family, family)}.md)"


def _sizes(family: str) -> str:
    return ", ".join(f"`{size}`" for size in family_named(family).sizes)


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
    """A family without one gets it with UPDATE_GOLDEN=1, with the tests that all families have."""
    text, last = page.read_text(), "\n\nAny other size is "
    if os.environ.get("UPDATE_GOLDEN"):
        missing = [name for name in FAMILIES if f"\n| {_linked(name)} |" not in text]
        new = [f"\n| {_linked(name)} | {_sizes(name)} | {' | '.join(USUAL)} |" for name in missing]
        page.write_text(text.replace(last, "".join(new) + last))
    found = rows(page, "`model.family` | `model.name`")
    named = [(re.findall(r"`(\w+)`", one)[0], sizes) for one, sizes, *_ in found]
    assert all(re.fullmatch(r"\[`\w+`\]\(\w+\.md\)", one) for one, *_ in found), "no page"
    pairs = [(family, size) for family, sizes in named for size in re.findall(r"`([^`]+)`", sizes)]
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


def test_what_is_trained_is_none_of_the_other_networks(page: Path) -> None:
    def folded(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    known = {folded(n) for f in FAMILIES for n in (f, *family_named(f).sizes)}
    assert not known & {folded(title) for title, _ in rows(page, "network | what it needs")}


@pytest.mark.parametrize("key", ["model.name", "model.family"])
def test_errors_about_unknown_networks_name_the_page(key: str) -> None:
    with pytest.raises(ConfigError, match=r"docs/families\.md"):
        load_config(dit_debug(), overrides=[f"{key}=sdxl"])


def test_errors_about_unknown_codecs_name_the_page() -> None:
    with pytest.raises(CodecError, match=r"docs/families\.md"):
        codec_named("sdxl")

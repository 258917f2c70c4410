"""The pages as a site: links to headings, and that no page is left out."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from markdown.extensions.toc import slugify

from tests.doc_commands import pages


def headings(page: Path) -> list[str]:
    """The words of all headings, as they are shown."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    shown = [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h) for h in re.findall(r"^#+ (.+)$", text, re.M)
    ]
    return [re.sub("[`*]", "", heading).strip() for heading in shown]


def of_github(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def of_mkdocs(heading: str) -> str:
    return slugify(heading, "-")


def anchored(page: Path) -> Iterator[tuple[Path, str]]:
    """The pages and headings that a page links to."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        if "://" not in target and (not target or target.endswith(".md")):
            yield (page.parent / target if target else page), anchor


@pytest.mark.parametrize("anchor_of", [of_github, of_mkdocs])
def test_links_lead_to_headings(repo_root: Path, anchor_of: Any) -> None:
    """On GitHub and on the site, which make anchors by rules of their own."""
    every = [*pages(repo_root), repo_root / "CHANGELOG.md"]
    found = [(page, *link) for page in every for link in anchored(page)]
    broken = [
        f"{page.name}: {target.name}#{anchor}"
        for page, target, anchor in found
        if anchor not in map(anchor_of, headings(target))
    ]
    assert found and not broken


def test_the_site_has_every_page_once(repo_root: Path) -> None:
    def leaves(tree: Any) -> Iterator[str]:
        for entry in tree:
            yield from leaves(next(iter(entry.values()))) if isinstance(entry, dict) else [entry]

    site = yaml.safe_load((repo_root / "mkdocs.yml").read_text())
    written = [page.name for page in pages(repo_root) if page.parent.name == site["docs_dir"]]
    assert sorted(leaves(site["nav"])) == sorted(written)
    assert site["theme"]["font"] is False  # which would be fetched from elsewhere


@pytest.mark.parametrize("repo_url", [None, "https://example.org/us/it/"])
def test_the_site_has_no_link_out_of_docs(repo_root: Path, repo_url: str | None) -> None:
    """They go to the repository, where one is configured; those inside of docs/ stay."""
    hook = runpy.run_path(str(repo_root / "docs/site_links.py"))["on_page_markdown"]
    said = "[a](../tests/a.py#test_b) [c](../flux.md) [d](wan.md) ![e](../f.png)"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="benchmarks/cpu.md"))
    shown = hook(said, page=page, config=SimpleNamespace(repo_url=repo_url))
    assert shown == said  # from a folder of docs/, both are pages of it
    page.file.src_uri = "wan.md"
    shown = hook(said, page=page, config=SimpleNamespace(repo_url=repo_url))
    base = "https://example.org/us/it/blob/HEAD"
    out = f"[a]({base}/tests/a.py#test_b) [c]({base}/flux.md)" if repo_url else "a c"
    assert shown == f"{out} [d](wan.md) ![e](../f.png)"


@pytest.mark.slow
def test_the_site_is_built(repo_root: Path, tmp_path: Path) -> None:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install --editable '.[docs]'")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=repo_root, check=True, timeout=200)
    assert "first_run" in (tmp_path / "search/search_index.json").read_text()

"""On the site, links that lead out of docs/ go to `repo_url` of mkdocs.yml, or are plain text."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^]]+)\]\((\.\./[^)]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """A page as the site shows it; mkdocs calls this for each."""
    folder = posixpath.dirname(page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if not path.startswith("../"):
            return link[0]
        # The form of GitHub and of Forgejo; HEAD is whatever branch is the default.
        url = config.repo_url and f"{config.repo_url.rstrip('/')}/blob/HEAD/{path[3:]}"
        return f"[{text}]({url})" if url else text

    return _LINK.sub(rewritten, markdown)

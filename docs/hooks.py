"""The changes that MkDocs makes to the pages before it renders them.

The pages can be read on GitHub without a build. GitHub's syntax is translated here where MkDocs has another: alerts become
admonitions. A page that stands for a file of the repository has a link to the file between two comments,
``<!-- include: FILE -->`` and ``<!-- end of include -->``, which the file's text replaces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]

_INCLUDE = re.compile(r"^<!-- include: (\S+) -->\n.*?^<!-- end of include -->$", re.MULTILINE | re.DOTALL)
_ALERT = re.compile(r"^> \[!(NOTE|TIP|WARNING)\]\n((?:>.*\n?)+)", re.MULTILINE)
_LINK = re.compile(r"\[([^\]\n]+)\]\(([^)\s]+)\)")
_ELSEWHERE = re.compile(r"https?:|#")

#: The pages that show files of the repository.
_PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
}

#: How much the sections of a page count in the search, if not 1. The first pattern that fits decides.
_BOOSTS = {
    "quickstart.md": 3,
    "troubleshooting.md": 2,  # a search that describes a symptom finds this page first
    "reference/api/*": 0.6,
    "reference/errors.md": 0.6,
    "architecture*": 0.1,
    "contributing.md": 0.1,
}

#: A heading, and the comment below it with words that readers search for, as in ``<!-- search: ENOSPC, disk is full -->``.
_WORDS = re.compile(r'<h[1-6] id="([^"]+)"|<!-- search: (.*?) -->')
#: The words of the sections, by their locations.
_words: dict[str, str] = {}


def _include(name: str, link: Callable[[str], str | None]) -> str:
    """A file of the repository without its title. Links to other files lead to their pages; of a link to a file without
    a page only the text stays."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    text = re.sub(r"\A# .*\n+", "", text)

    def follow(match: re.Match[str]) -> str:
        label, target = match.groups()
        address = target if _ELSEWHERE.match(target) else link(target)
        return label if address is None else f"[{label}]({address})"

    return _LINK.sub(follow, text)


def expand(markdown: str, link: Callable[[str], str | None]) -> str:
    """Return the page with the files that it stands for. `link` gives the address of a file's page, None if it has none."""
    return _INCLUDE.sub(lambda request: _include(request[1], link), markdown)


def admonitions(markdown: str) -> str:
    """Return the page with an admonition in place of each alert."""

    def translate(alert: re.Match[str]) -> str:
        lines = [line.removeprefix(">").removeprefix(" ") for line in alert[2].splitlines()]
        return f"!!! {alert[1].lower()}\n\n" + "\n".join(f"    {line}".rstrip() for line in lines) + "\n"

    return _ALERT.sub(translate, markdown)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by MkDocs for each page."""
    up = "../" * page.file.src_uri.count("/")
    boost = next((boost for pattern, boost in _BOOSTS.items() if fnmatch(page.file.src_uri, pattern)), 1)
    page.meta["search"] = {"boost": boost}

    def link(target: str) -> str | None:
        path, mark, anchor = target.partition("#")
        if path in _PAGES:
            return up + _PAGES[path] + mark + anchor
        if path.startswith("docs/"):
            return up + path.removeprefix("docs/") + mark + anchor
        return None

    return admonitions(expand(markdown, link))


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> None:
    """Called by MkDocs for each page, as HTML. Collects the words of its sections."""
    location = page.url  # that of the first heading, the page's title
    for number, (anchor, words) in enumerate(_WORDS.findall(html)):
        if words:
            _words[location] = words
        elif number:
            location = f"{page.url}#{anchor}"


def on_post_build(*, config: Any) -> None:
    """Called by MkDocs after the search has written its index, and before the plug-in `offline` copies it.

    Adds the words of the sections to the index, as a field that is not shown. Removes the sections of the changelog, because
    they mention everything.
    """
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["docs"] = [entry for entry in index["docs"] if not entry["location"].startswith("changelog.html#")]
    for entry in index["docs"]:
        entry["words"] = _words.get(entry["location"], "")
    path.write_text(json.dumps(index), encoding="utf-8")

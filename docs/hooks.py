"""The changes that MkDocs makes to the pages before it renders them.

The pages can be read on GitHub without a build. GitHub's syntax is translated here where MkDocs has another: alerts become
admonitions. A page that stands for a file of the repository has a link to the file between two comments,
``<!-- include: FILE -->`` and ``<!-- end of include -->``, which the file's text replaces.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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

#: Words that people search for, and the page that they should find first.
_SEARCHED = {
    "guides/engines.md": ["sleep", "wake up", "kv cache", "huggingface"],
    "guides/out-of-memory.md": ["OOM", "out of memory"],
    "guides/pytest.md": ["simulated"],
    "guides/shared-backups.md": ["restart"],
    "guides/training-and-rollout.md": ["optimizer state"],
    "quickstart.md": ["pause", "resume", "release", "free", "offload", "Ctrl-C"],
    "reference/api/regions.md": ["manage"],
    "simulated-gpu.md": ["simulated"],
    "troubleshooting.md": ["shm", "ENOSPC", "space"],
}


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
    page.meta["tags"] = _SEARCHED.get(page.file.src_uri)  # the search ranks tags before titles, and titles before texts
    if page.file.src_uri == "troubleshooting.md":
        page.meta["search"] = {"boost": 2}  # a search that describes a symptom finds this page first

    def link(target: str) -> str | None:
        path, mark, anchor = target.partition("#")
        if path in _PAGES:
            return up + _PAGES[path] + mark + anchor
        if path.startswith("docs/"):
            return up + path.removeprefix("docs/") + mark + anchor
        return None

    return admonitions(expand(markdown, link))

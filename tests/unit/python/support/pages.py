"""What tests of HTML pages share: their elements, that they stand alone, and what Chromium makes of them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from browser import BROWSER

__all__ = ["HOSTILE", "Elements", "assert_only_own_code_runs", "assert_stands_alone", "data_of", "opened"]

HOSTILE = "</script><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">.py"
_SECONDS = 120


class Elements(HTMLParser):
    """The elements of a page, and the text inside each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        self._inside = tag
        self.texts.setdefault(tag, []).append("")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def data_of(page: str) -> dict[str, Any]:
    """The data of a page."""
    data: dict[str, Any] = json.loads(Elements(page).texts["script"][0])
    return data


def assert_stands_alone(page: str) -> None:
    """The page names no other file and no address, and makes no markup of texts."""
    elements = Elements(page)
    assert not {"link", "img", "iframe", "base"} & set(elements.names)
    assert not {"src", "href", "srcset"} & {name for name, _ in elements.attributes}
    style, script = elements.texts["style"][0], elements.texts["script"][1]
    assert not re.search(r"url\(|@import|https?://|fetch\(|XMLHttpRequest|innerHTML|insertAdjacent|eval\(", style + script)


def assert_only_own_code_runs(page: str) -> None:
    """Its policy allows its own script and style, and nothing else."""
    elements = Elements(page)
    policy = next(value for name, value in elements.attributes if name == "content" and value and "default-src" in value)
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert parts["default-src"] == "'none'"
    for kind, text in (("script", elements.texts["script"][1]), ("style", elements.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert parts[f"{kind}-src"] == f"'sha256-{digest}'"


def opened(page: Path) -> str:
    """The document once Chromium has run its script, which raised nothing."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={page.parent}/profile",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=True,
    )
    assert "Uncaught" not in done.stderr, done.stderr
    return done.stdout

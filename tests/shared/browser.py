"""Chromium, which runs the scripts of HTML pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["BROWSER", "needs_browser"]

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def needs_browser(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that starts the browser. It is slow, because a browser takes a second of two cores to start."""
    skip = pytest.mark.skipif(BROWSER is None, reason="needs Chromium, to run the page's script")
    marked: Callable[..., Any] = pytest.mark.slow(skip(test))
    return marked

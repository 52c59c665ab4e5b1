"""Guards that the site of `make docs` can be searched when it is opened as files, and that the right page is found first."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from document_blocks import REPOSITORY

if importlib.util.find_spec("material") is None:
    pytest.skip("mkdocs-material is not installed", allow_module_level=True)

_BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300)
    return folder


def test_no_page_loads_a_script_from_elsewhere(site: Path) -> None:
    loaded = [
        re.findall(r'<(?:script|link)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text()) for page in site.rglob("*.html")
    ]
    assert len(loaded) > 20 and not any(loaded)


@pytest.mark.skipif(_BROWSER is None, reason="needs Chromium, to run the page's script")
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("kv cache", "guides/engines.html"),
        ("release memory", "quickstart.html"),
        ("out of memory", "guides/out-of-memory.html"),
        ("host memory for backups", "guides/host-memory.html"),
        ("gpu memory not released", "troubleshooting.html"),
        ("memory does not decrease", "troubleshooting.html"),
        ("torch.cuda.mem_get_info", "guides/memory-views.html"),
        ("device_memory", "guides/pytest.html"),
        ("node_store.publish", "reference/api/node-store.html"),
        ("--shm-size", "troubleshooting.html"),
        ("restart engine without loading weights", "guides/shared-backups.html"),
        ("optimizer state offload", "guides/training-and-rollout.html"),
        ("AMD ROCm", "limits.html"),
    ],
)
def test_a_search_in_files_finds_the_right_page_first(site: Path, tmp_path: Path, words: str, page: str) -> None:
    address = f"{(site / 'index.html').as_uri()}?q={quote(words)}"
    command = [str(_BROWSER), *_FLAGS, f"--user-data-dir={tmp_path}", address]
    opened = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    found = re.findall(r'href="([^"]*)" class="md-search-result__link"', opened)
    assert found and found[0] == (site / page).as_uri(), found

"""Guards that the site of `make docs` can be searched when it is opened as files, and that it finds the right section."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from browser import BROWSER, needs_browser
from document_blocks import REPOSITORY

if importlib.util.find_spec("material") is None:
    pytest.skip("mkdocs-material is not installed", allow_module_level=True)

_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom")

_FOLDER = "troubleshooting#the-folder-of-shared-backups-cannot-be-used"
_PUBLISHED = "guides/shared-backups#weights-that-outlive-their-process"
_TURNS = "guides/several-gpus-and-processes#processes-that-share-a-gpu"

#: What people search for, and where the first result leads: a page, or a section of it.
_SEARCHED = {
    "kv cache": "guides/engines",
    "pause": "quickstart",
    "release memory": "quickstart",
    "restore": "quickstart",
    "out of memory": "guides/out-of-memory",
    "out of host memory": "troubleshooting#out-of-host-memory-or-memory-that-is-not-pinned",
    "host memory for backups": "guides/host-memory",
    "host memory usage": "guides/host-memory",
    "gpu memory not released": "troubleshooting#gpu-memory-is-not-released-after-a-pause",
    "pause does nothing": "troubleshooting#gpu-memory-is-not-released-after-a-pause",
    "memory does not decrease": "troubleshooting#memory-does-not-decrease-after-a-tensor-was-deleted",
    "memory grows every step": "troubleshooting#memory-grows-with-each-step",
    "nan after resume": "troubleshooting#contents-are-wrong-after-a-resume",
    "resume fails": "troubleshooting#a-resume-is-out-of-memory",
    "cudaErrorIllegalAddress": "troubleshooting#an-illegal-memory-access-or-invalid-argument",
    "deadlock": "troubleshooting#a-call-or-the-exit-hangs",
    "operation not permitted": "troubleshooting#a-receiver-cannot-open-a-tensor",
    "libcudnn.so.9 cannot open shared object file": "quickstart#without-a-gpu",
    "--shm-size": _FOLDER,
    "docker shm-size": _FOLDER,
    "pinned memory": "guides/host-memory",
    "how do I free the kv cache": "guides/engines",
    "python versions supported": "limits#requirements",
    "no space left on device": _FOLDER,
    "/dev/shm full": _FOLDER,
    "kubernetes": "guides/shared-backups#containers",
    "hugepages": "guides/shared-backups#huge-pages",
    "restart": _PUBLISHED,
    "restart engine without loading weights": _PUBLISHED,
    "wrong identity": _PUBLISHED,
    "torch.cuda.mem_get_info": "guides/memory-views",
    "device_memory": "guides/pytest",
    "unit tests": "guides/pytest",
    "node_store": "reference/api/node-store",
    "node_store.publish": "reference/api/node-store",
    "ranks.pause": "guides/several-gpus-and-processes#all-ranks-or-none",
    "exclusive": _TURNS,
    "two engines on one GPU": _TURNS,
    "two terminals": _TURNS,
    "wait for memory": _TURNS,
    "tensor parallel": "guides/several-gpus-and-processes",
    "cuda ipc": "guides/several-gpus-and-processes#sending-tensors-to-other-processes",
    "sglang": "guides/engines#sglang",
    "--enable-memory-saver": "guides/engines#sglang",
    "enable_memory_saver": "guides/engines#sglang",
    "optimizer state offload": "guides/training-and-rollout",
    "disk backup": "guides/backups",
    "finding leaks": "guides/finding-leaks",
    "expandable_segments": "limits#expandable-segments",
    "AMD ROCm": "limits#requirements",
    "grafana": "guides/events#metrics",
    "changelog": "changelog",
    "license": "index",
    "manage": "guides/training-and-rollout#manage-the-memory-in-which-a-trainer-computes",
}

#: A page that sends each query to the site's search, as the pages of the site do, and shows where the first results lead.
_ASKING = """<!doctype html><meta charset="utf-8"><body>
<script src="scripts/iframe-worker.js"></script>
<script src="scripts/search-query.js"></script>
<script src="search/search_index.js"></script>
<script>
const queries = QUERIES;
const found = [];
let sent = 0;
const search = new Worker("SCRIPT");
search.addEventListener("message", ({ data }) => {
  if (data.data) found.push(data.data.items[0]?.[0].location ?? "nothing");
  while (sent < Math.min(found.length + AT_ONCE, queries.length)) search.postMessage({ type: 2, data: queries[sent++] });
  if (found.length === queries.length) document.body.textContent = "found " + JSON.stringify(found);
});
search.postMessage({ type: 0, data: { ...__index, options: {} } });
</script>
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300)
    return folder


def _opened(address: str, profile: Path) -> str:
    """The page after its scripts have run."""
    command = [str(BROWSER), *_FLAGS, f"--user-data-dir={profile}", address]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def test_no_page_loads_a_script_from_elsewhere(site: Path) -> None:
    loaded = [
        re.findall(r'<(?:script|link)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text()) for page in site.rglob("*.html")
    ]
    assert len(loaded) > 20 and not any(loaded)


def test_each_comment_with_words_is_in_the_index(site: Path) -> None:
    written = [
        words
        for page in (REPOSITORY / "docs").rglob("*.md")
        for words in re.findall(r"^<!-- search: (.*) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert len(written) > 60
    assert sorted(entry["words"] for entry in entries if entry["words"]) == sorted(written)
    location = _FOLDER.replace("#", ".html#")
    assert any("ENOSPC" in entry["words"] for entry in entries if entry["location"] == location)


def _ask(site: Path, profile: Path, queries: list[str], at_once: int = 1) -> list[str]:
    """Where the first result of each query leads, in the order of the answers. `at_once`: queries that are under way."""
    (script,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    page = site / "asking.html"
    filled = {"QUERIES": json.dumps(queries), "SCRIPT": script.relative_to(site).as_posix(), "AT_ONCE": str(at_once)}
    page.write_text(re.sub("|".join(filled), lambda found: filled[found[0]], _ASKING))
    answer = re.search(r"found (\[.*?\])", _opened(page.as_uri(), profile))
    assert answer is not None
    return [place.replace(".html", "") for place in json.loads(answer[1])]


@needs_browser
def test_a_search_finds_the_right_section_first(site: Path, tmp_path: Path) -> None:
    found = dict(zip(_SEARCHED, _ask(site, tmp_path, list(_SEARCHED)), strict=True))
    wrong = {
        query: found[query]
        for query, wanted in _SEARCHED.items()
        if found[query] != wanted and ("#" in wanted or found[query].partition("#")[0] != wanted)
    }
    assert wrong == {}


@needs_browser
def test_results_of_an_older_query_are_not_shown_last(site: Path, tmp_path: Path) -> None:
    found = _ask(site, tmp_path, ["unheardof expandable_segments", "enable_memory_saver"], at_once=2)
    assert found == ["nothing", "guides/engines#sglang"]


@needs_browser
@pytest.mark.parametrize(
    ("words", "first"), [("--shm-size", _FOLDER), ("unheardof expandable_segments", "limits#expandable-segments")]
)
def test_the_box_of_a_page_shows_the_first_result(site: Path, tmp_path: Path, words: str, first: str) -> None:
    """Without a network. If no section has all words, those that have some are shown."""
    opened = _opened(f"{(site / 'index.html').as_uri()}?q={quote(words)}", tmp_path)
    found = re.findall(r'href="([^"]*)" class="md-search-result__link"', opened)
    page, _, anchor = first.partition("#")
    assert found[:2] == [(site / f"{page}.html").as_uri(), f"{(site / f'{page}.html').as_uri()}#{anchor}"]

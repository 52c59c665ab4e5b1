"""Guards that PyTorch's own tools read a snapshot of this package as one of their own: the commands and functions of
torch.cuda._memory_viz, and the reader of the page memory_viz, which knows few opcodes."""

from __future__ import annotations

import base64
import json
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import pytest
from gpu_programs import subprocess_run
from gpu_support import MIB, empty, saver, torch

from torch_memory_saver.observe import memory

KEY = "torch_memory_saver"
#: What the function `unpickle` of PyTorch's torch/utils/viz/MemoryViz.js reads, by the opcodes' characters.
OPCODES_OF_THE_PAGE = set("aehJKM}]\x95\x8aj(\x94\x80u\x8c.\x86\x89qX)\x88NGt\x85\x87rlds")
#: The pickle protocols that it reads.
PROTOCOLS_OF_THE_PAGE = (2, 3, 4)
#: The snapshot in a page of trace_plot or segment_plot.
_LOCAL_FILES = re.compile(r"local_files = (\[.*\])")


def cache_of_images(kept: list[Any]) -> None:
    """What the tools must name."""
    kept.append(empty(3 * MIB))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A snapshot with managed memory, of which some is paused, and with a history."""
    memory.record_history(1000, clear_history=True)
    try:
        with saver.region(tag="kv_cache"):
            kv_cache = empty(4 * MIB)
        with saver.region(tag="weights", enable_cpu_backup=True):
            weights = empty(2 * MIB)
        kept: list[Any] = []
        cache_of_images(kept)
        cache_of_images(kept)
        del kept[0]
        saver.pause("kv_cache")
        path = memory.write_snapshot(tmp_path / "snapshot.pickle", step=70_000, role="engine")
        saver.resume("kv_cache")
        assert kv_cache.numel() == 4 * MIB and weights.numel() == 2 * MIB
        return path
    finally:
        memory.stop_history()


def content_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = pickle.loads(path.read_bytes())
    return content


def test_the_page_can_read_the_file(written: Path) -> None:
    operations = list(pickletools.genops(written.read_bytes()))
    assert {operation.code for operation, _, _ in operations} <= OPCODES_OF_THE_PAGE
    first, protocol, _ = operations[0]
    assert first.name == "PROTO" and protocol in PROTOCOLS_OF_THE_PAGE


def test_the_page_finds_what_it_draws(written: Path) -> None:
    content = content_of(written)
    assert KEY in content
    for segment in content["segments"]:
        assert {"device", "address", "total_size", "stream", "blocks"} <= set(segment)
        assert all({"state", "size", "requested_size"} <= set(block) for block in segment["blocks"])
    events = content["device_traces"][0]
    assert {"alloc", "free_completed"} <= {event["action"] for event in events}
    assert all({"action", "addr", "size", "stream"} <= set(event) for event in events)


def test_pytorch_shows_the_same_as_without_our_key(written: Path) -> None:
    from torch.cuda import _memory_viz as viz

    ours = content_of(written)
    theirs = {name: value for name, value in content_of(written).items() if name != KEY}

    def lines(text: str) -> str:  # instead of flamegraph.pl, which PyTorch downloads
        return text

    for show in (viz.segsum, viz.trace, lambda data: viz.segments(data, lines), lambda data: viz.memory(data, lines)):
        assert show(ours) == show(theirs)
    assert "cache_of_images" in viz.segments(ours, lines)
    assert "cache_of_images" in viz.memory(ours, lines)


@pytest.mark.parametrize("kind", ["trace_plot", "segment_plot"])
def test_pytorchs_pages_hold_the_snapshot(written: Path, kind: str) -> None:
    """Their script comes from a server, so that they are not opened here."""
    from torch.cuda import _memory_viz as viz

    page = getattr(viz, kind)(content_of(written))
    found = _LOCAL_FILES.search(page)
    assert found is not None
    (file,) = json.loads(found[1])
    assert pickle.loads(base64.b64decode(file["base64"])) == content_of(written)


@pytest.mark.outer
@pytest.mark.parametrize("command", ["stats", "trace"])
def test_pytorchs_commands_read_the_file(written: Path, command: str) -> None:
    from torch.cuda import _memory_viz as viz

    done = subprocess_run(["-m", "torch.cuda._memory_viz", command, str(written)]).check()
    if command == "stats":
        reserved = sum(segment["total_size"] for segment in content_of(written)["segments"])
        assert f"total_reserved: {viz.Bytes(reserved)}" in done.output  # other tests may have left more than 1 GiB
    else:
        entries = len(content_of(written)["device_traces"][torch.cuda.current_device()])
        assert f"{entries} entries" in done.output

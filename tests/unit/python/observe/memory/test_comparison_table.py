"""Guards the table of a comparison: it fits its width, and names the process, the bytes with their signs and the
program's frames."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from snapshots import MIB, RECORDED, Row, block, free, segment, snapshot

from torch_memory_saver._stacks import own_frames, title
from torch_memory_saver._text import mebibytes, signed_mebibytes
from torch_memory_saver.observe.memory import Comparison, compare
from torch_memory_saver.observe.memory.model import CallStack, Frame, Origin
from torch_memory_saver.observe.memory.snapshot_reader import parse

LONG = f"/srv/{'very/' * 30}long/path.py"
TORCH = "/opt/env/lib/python3.11/site-packages/torch"
BASE = 1 << 40


def moments(segments: Iterable[Row]) -> Comparison:
    """One segment at each moment."""
    return compare(*(parse(snapshot(row, role="engine", rank=1, pid=7), "") for row in segments))


def growing(*blocks: Row) -> Comparison:
    """The blocks are leaked once more in each of three moments."""
    return moments(segment(BASE, *blocks * step) for step in (1, 2, 3))


@pytest.mark.parametrize("width", [60, 80, 140])
def test_no_line_is_longer_than_the_terminal(width: int) -> None:
    lines = compare(RECORDED).table(width, varying=True).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("\x1b" in line or "\N{NO-BREAK SPACE}" in line for line in lines)


def test_a_long_file_name_keeps_its_end() -> None:
    text = growing(block(MIB, (LONG, 12, "load"))).table(80)
    (line,) = [line for line in text.splitlines() if "load" in line and " at " in line]
    assert len(line) <= 80
    assert line.strip().startswith("at .../") and line.endswith("long/path.py:12 load")


def test_a_leak_names_its_process_bytes_and_frames() -> None:
    text = str(growing(block(5 * MIB // 4, ("/srv/engine/images.py", 88, "to_gpu"))))
    assert "leak: engine, rank 1, pid 7, device 0: +2.5 in 1 call stack; the largest: images.py:88 to_gpu" in text
    assert "+2.5  (+1.2 +1.2)  1 -> 3 blocks" in text
    assert "at /srv/engine/images.py:88 to_gpu" in text


def test_the_frame_of_pytorch_and_those_of_the_program() -> None:
    lines = [line.strip() for line in str(compare(RECORDED)).splitlines()]
    at = lines.index("in torch/optim/adam.py:182 _init_group")
    assert lines[at + 1 : at + 3] == ["at /program/record_snapshots.py:95 train", "by /program/record_snapshots.py:69 step"]


def test_nothing_found_is_said() -> None:
    lines = str(moments([segment(BASE, block(MIB))] * 3)).splitlines()
    assert lines[lines.index("Findings") + 1] == "  none"


def test_rows_that_are_left_out_are_counted() -> None:
    text = growing(*(block(MIB, ("/srv/a.py", line, "leak")) for line in range(5))).table(100, top=2)
    assert text.count("/srv/a.py") == 2
    assert "and 3 more" in text


def test_what_varies_is_listed_on_request_only() -> None:
    compared = moments(segment(BASE, *[block(MIB, ("/srv/a.py", 1, "vary"))] * number) for number in (1, 3, 2))
    assert "vary" not in compared.table(100)
    assert "at /srv/a.py:1 vary" in compared.table(100, varying=True)


def test_sizes_have_signs_and_digits() -> None:
    assert [signed_mebibytes(size) for size in (MIB, -MIB, 0, 512)] == ["+1.0", "-1.0", "0.0", "+0.0005"]
    assert mebibytes(3 * MIB // 2) == "1.5"


def test_the_frames_of_the_program() -> None:
    inner = Frame(f"{TORCH}/nn/functional.py", 1, "linear")
    standard = Frame("/usr/lib/python3.11/threading.py", 2, "run")
    own = Frame("/srv/a.py", 3, "mine")
    stack = CallStack((inner, own, standard), Origin.PYTHON)
    assert own_frames(stack) == (own,)
    assert title(stack) == "a.py:3 mine"
    assert own_frames(CallStack((inner, standard), Origin.PYTHON)) == (inner, standard)


def test_the_frames_of_the_simulated_gpu_are_left_out() -> None:
    simulated = ("/srv/clone/torch_memory_saver/_simulate/operators/launch.py", 7, "run")
    text = str(growing(block(MIB, simulated, ("/srv/a.py", 3, "mine")), block(2 * MIB, simulated)))
    assert "at /srv/a.py:3 mine" in text
    assert "launch.py" not in text


def test_a_comprehension_is_its_function_s() -> None:
    comprehension, function = Frame("/srv/a.py", 3, "<listcomp>"), Frame("/srv/a.py", 3, "load")
    assert title(CallStack((comprehension, function), Origin.PYTHON)) == "a.py:3 load"
    assert own_frames(CallStack((comprehension,), Origin.PYTHON)) == (comprehension,)


def test_what_a_release_gives_back_is_said() -> None:
    text = str(moments(segment(BASE, free(step * 40 * MIB)) for step in (1, 2, 3)))
    assert "of it cached 120.0 (release_cached() gives it back), held 0.0" in text


def test_cpp_frames_are_counted() -> None:
    native = (("??", 0, "torch::unwind::unwind()"), ("??", 0, "at::native::empty()"))
    text = str(growing(block(MIB, *native, ("/srv/a.py", 3, "mixed")), block(MIB, *native)))
    assert text.count("(C++ frames: 2)") == 2
    assert "at C++ at::native::empty()" in text
    assert "unwind" not in text

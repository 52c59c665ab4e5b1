"""Guards the lines of `top`: what they say, their width, the order and the filter."""

from __future__ import annotations

import pytest
from made_pages import MIB, make_page, make_row

from torch_memory_saver.observe._nvml import DeviceProcess, Gpu, Gpus
from torch_memory_saver.observe._processes.names import width_of
from torch_memory_saver.observe._processes.shared_pages import Page, Pages
from torch_memory_saver.observe._processes.table import ORDERS, lines_of
from torch_memory_saver.observe._processes.view import Program, StoreView, View, make_view

S = 1_000_000_000


def make(*pages: Page, used: tuple[tuple[int, int], ...] = ((7, 3 * MIB),), missing: str = "") -> View:
    processes = tuple(DeviceProcess(*process) for process in used)
    gpu = Gpu(0, "GPU-0", "NVIDIA H100", 100 * MIB, 60 * MIB, 40 * MIB, processes)
    return make_view(Pages(pages, {}), Gpus((gpu,), missing), 100 * S, {7: Program("python", "root")})


def texts(view: View, width: int = 80, **options: str) -> list[str]:
    return [line.text for line in lines_of(view, width, **options)]


JOB = make_page(
    12345,
    make_row("weights", resident_bytes=20 * MIB, host_backup_bytes=MIB, last_pause_ended=40 * S, last_resume_ended=97 * S),
    make_row("kv_cache", paused_bytes=30 * MIB, disk_backup_bytes=2 * MIB, failed_pauses_total=3),
    make_row("adapters", paused_bytes=8 * MIB, shared_backup_bytes=8 * MIB),
    name="trainer",
    rank=3,
    counters={"failed_pauses_total": 3, "last_pause_ended": 40 * S},
)


def test_everything_is_on_it() -> None:
    assert texts(make(JOB)) == [
        "GPU 0  NVIDIA H100  GPU-0",
        "  total 100 MiB  used 60 MiB  free 40 MiB",
        "  managed: resident 20 MiB  paused 38 MiB  other 40 MiB",
        "    PID NAME            STATE      USED RESIDENT PAUSED BACKUP PAUSE RESUME FAIL",
        "  12345 trainer #3      partly        ?      20M    38M    11M    1m      -    3",
        "      kv_cache          paused                 0    30M     2M     -      -    3",
        "      weights           resident             20M      0     1M    1m     3s    0",
        "      adapters          paused                 0     8M     8M     -      -    0",
        "      7 python (root)   -            3M        -      -      -     -      -    -",
    ]


def test_the_smallest_of_many_tags_share_a_line() -> None:
    rows = [make_row(f"layer{number}", resident_bytes=number * MIB, failed_pauses_total=1) for number in range(1, 13)]
    others = make_row("", -1, paused_bytes=5 * MIB, host_backup_bytes=MIB)
    lines = texts(make(make_page(1, *rows, others), used=()))[5:]
    names = [*(f"layer{number}" for number in range(12, 4, -1)), "(others)", "layer4", "and"]
    assert [line.split()[0] for line in lines] == names
    assert lines[-1] == "      and 3 more                              6M      0      0     -      -    3"


def test_the_columns_are_no_further_apart_than_the_names_need() -> None:
    assert texts(make(JOB), 200)[3:] == texts(make(JOB))[3:]
    named = make(make_page(1, make_row("a-tag-of-29-characters-in-all", resident_bytes=MIB)), used=())
    assert "      a-tag-of-29-characters-in-all resident" in texts(named, 200)[-1]


def test_slack_is_shown_where_there_is_any() -> None:
    view = make(make_page(1, make_row("a", resident_bytes=20 * MIB, slack_bytes=4 * MIB)))
    assert "  managed: resident 20 MiB  paused 0  slack 4 MiB  other 36 MiB" in texts(view)


def test_the_shared_store_counts_once() -> None:
    """Two processes hold the same objects."""
    rows = [make_row("weights", paused_bytes=64 * MIB, shared_backup_bytes=64 * MIB)]
    pages = Pages((make_page(1, *rows), make_page(2, *rows)), {})
    store = StoreView("/dev/shm/store", 64 * MIB, objects=1, processes=2)
    lines = texts(make_view(pages, Gpus((), ""), 0, {}, store), 100)
    assert [line.split()[-4] for line in lines if "weights" in line] == ["64M", "64M"]
    assert lines[-1] == "shared store: 64 MiB in 1 object, each counted once, for 2 processes: /dev/shm/store"
    unused = make_view(pages, Gpus((), ""), 0, {}, StoreView("/dev/shm/store", 0, objects=0, processes=0))
    assert not any("shared store" in line for line in texts(unused))


def test_the_title_of_a_mig_device() -> None:
    mig = Gpu(2, "MIG-5d5b", "NVIDIA H100 MIG 1g.10gb", None, None, None, (), mig=1)
    assert texts(make_view(Pages((), {}), Gpus((mig,), ""), 0, {}))[0] == "GPU 2 MIG 1  NVIDIA H100 MIG 1g.10gb  MIG-5d5b"


@pytest.mark.parametrize("width", [1, 80, 200])
def test_lines_are_as_wide_as_the_terminal(width: int) -> None:
    long = make_page(
        12345, make_row("x" * 60, resident_bytes=1), name="a-very-long-name-of-a-program-that-nobody-can-read", rank=12
    )
    view = make(long, missing="a sentence that is so long that it needs two lines of a terminal " * 2)
    lines = texts(view, width)
    assert max(len(line) for line in lines) <= max(width, 80)
    process = next(line for line in lines if line.startswith("  12345"))
    assert "#12" in process, "the end of the name is left out, not the rank"
    if width == 80:
        assert "a-very-lon~ #12" in process
        assert "~" in next(line for line in lines if "xxx" in line)


def test_columns_are_columns_of_the_terminal() -> None:
    """A Chinese character takes two, an accent of its own none."""
    rows = [make_row(tag, resident_bytes=5 * MIB) for tag in ("weights", "模型权重", "模" * 40, "e\u0301" * 9, "x" * 40)]
    lines = [line for line in texts(make(make_page(1, *rows))) if line.startswith("      ") and "  5M" in line]
    assert len(lines) == 5
    before = [line.partition(" resident")[0] for line in lines]
    assert [width_of(text.rstrip()) for text in before] == [13, 14, 23, 15, 23], "the end of the third and the last is cut"
    assert {width_of(text) for text in before} == {23}
    assert [text.rstrip()[-1] for text in before] == ["s", "重", "~", "\u0301", "~"]


def test_a_long_name_of_a_user_leaves_room_for_that_of_the_program() -> None:
    gpu = Gpu(0, "GPU-0", "NVIDIA H100", None, None, None, (DeviceProcess(7, MIB),))
    view = make_view(Pages((), {}), Gpus((gpu,), ""), 0, {7: Program("VLLM::EngineCore", "a-user-of-a-large-company")})
    assert texts(view)[-1] == "      7 VLLM::E~ (a-us~ -            1M        -      -      -     -      -    -"
    assert "VLLM::EngineCore (a-user-of-a-large-company)" in texts(view, 140)[-1]


def test_orders() -> None:
    small = make_page(1, make_row("a", resident_bytes=1, paused_bytes=9), name="b")
    large = make_page(2, make_row("a", resident_bytes=5), name="c", counters={"failed_pauses_total": 1})
    view = make(small, large, used=())

    def order(sort: str) -> list[str]:
        return [line.split()[0] for line in texts(view, sort=sort) if line.split()[1:2] in (["b"], ["c"])]

    assert {sort: order(sort) for sort in ORDERS} == {
        "memory": ["2", "1"],
        "paused": ["1", "2"],
        "pid": ["1", "2"],
        "name": ["1", "2"],
        "failures": ["2", "1"],
    }
    assert next(iter(ORDERS)) == "memory", "the default of --sort"


def test_the_filter_finds_names_numbers_and_tags() -> None:
    def shown(pattern: str) -> list[str]:
        return [line.text.split()[0] for line in lines_of(make(JOB), 80, pattern=pattern) if line.kind in ("process", "tag")]

    assert shown("TRAIN") == ["12345", "kv_cache", "weights", "adapters"]
    assert shown("234") == ["12345", "kv_cache", "weights", "adapters"]
    assert shown("kv") == ["12345", "kv_cache"]
    assert shown("python") == ["7"]
    assert shown("(ROOT)") == ["7"], "its user"
    assert shown("nothing") == []
    assert "  no process has 'nothing'" in texts(make(JOB), pattern="nothing")


def test_what_is_foreign_or_unknown_is_said() -> None:
    foreign = make_page(9, make_row("a", resident_bytes=1), foreign=True)
    lines = texts(make(foreign, missing="NVML is missing"))
    assert any(line.startswith("     9* job") for line in lines)
    assert lines[-2:] == [
        "* in another PID namespace, such as a container's: the number is the one there",
        "note: NVML is missing",
    ]
    nothing = make_view(Pages((), {}), Gpus((), "NVML is missing"), 0, {})
    assert texts(nothing) == ["no GPU and no process with a page is known", "note: NVML is missing"]

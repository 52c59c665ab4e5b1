"""Guards the view: which process is on which GPU, what is unknown, and what adds up."""

from __future__ import annotations

import dataclasses
import json

from made_pages import MIB, make_page, make_row

from torch_memory_saver.observe._nvml import DeviceProcess, Gpu, Gpus
from torch_memory_saver.observe._processes.shared_pages import Pages
from torch_memory_saver.observe._processes.view import Program, StoreView, as_json, make_view, pages_on

S = 1_000_000_000


def gpu(index: int, *processes: tuple[int, int | None], used: int | None = None) -> Gpu:
    free = None if used is None else 100 * MIB - used
    total = None if used is None else 100 * MIB
    rows = tuple(DeviceProcess(*process) for process in processes)
    return Gpu(index, f"GPU-{index}", "a GPU", total, used, free, rows)


def test_pages_and_nvml_by_gpu() -> None:
    ours = make_page(
        10,
        make_row(
            "weights", 0, allocations=2, resident_bytes=30 * MIB, slack_bytes=3 * MIB, last_pause_ended=2 * S, pauses_total=1
        ),
        make_row("cache", 1, allocations=1, paused_bytes=40 * MIB, failed_resumes_total=2),
        uuids=("GPU-1", "GPU-0"),
        counters={"failed_resumes_total": 2, "last_pause_ended": 3 * S},
    )
    gpus = Gpus((gpu(0, (10, 5 * MIB), (11, 7 * MIB), used=20 * MIB), gpu(1, (10, 35 * MIB), used=50 * MIB)), "")
    view = make_view(Pages((ours,), {}), gpus, 5 * S, {10: Program("other", "bob"), 11: Program("python", "alice")})
    first, second = view.gpus
    assert (first.total_bytes, first.used_bytes, first.free_bytes) == (100 * MIB, 20 * MIB, 80 * MIB)
    assert (first.resident_bytes, first.paused_bytes, first.other_bytes) == (0, 40 * MIB, 20 * MIB)
    assert (second.resident_bytes, second.paused_bytes, second.other_bytes) == (30 * MIB, 0, 17 * MIB)
    assert [(each.pid, each.managed, each.used_bytes, each.name, each.user) for each in first.processes] == [
        (10, True, 5 * MIB, "job", "bob"),
        (11, False, 7 * MIB, "python", "alice"),
    ]
    (process,) = second.processes
    assert (process.state, process.last_pause_age, process.last_resume_age, process.failures_total) == (
        "resident",
        2,
        None,
        2,
    )
    (tag,) = process.tags
    assert (tag.tag, tag.allocations, tag.last_pause_age, tag.pauses_total) == ("weights", 2, 3, 1)
    assert first.processes[0].tags[0].failures_total == 2
    assert json.loads(json.dumps(as_json(view)))["gpus"][1]["processes"][0]["tags"][0]["tag"] == "weights"


def test_the_shared_store_is_not_the_sum_of_the_processes() -> None:
    rows = [make_row("a", shared_backup_bytes=3 * MIB), make_row("b", shared_backup_bytes=4 * MIB)]
    pages = Pages((make_page(10, *rows), make_page(11, *rows)), {})
    store = StoreView("/memory", 7 * MIB, objects=2, processes=2)
    view = make_view(pages, Gpus((), ""), 0, {}, store, {"/other": "it is refused"})
    assert [process.shared_backup_bytes for process in view.gpus[0].processes] == [7 * MIB, 7 * MIB]
    assert as_json(view)["store"] == {"path": "/memory", "bytes": 7 * MIB, "objects": 2, "processes": 2}
    assert as_json(view)["gpus"][0]["processes"][0]["tags"][1]["shared_backup_bytes"] == 4 * MIB
    assert view.notes == ("/other is not shown: it is refused",)
    assert as_json(make_view(pages, Gpus((), ""), 0, {}))["store"] is None


def test_without_nvml_totals_come_from_the_driver_of_a_process() -> None:
    view = make_view(Pages((make_page(10, make_row("a", resident_bytes=MIB)),), {}), Gpus((), "why"), 0, {})
    (only,) = view.gpus
    assert (only.index, only.uuid, only.total_bytes) == (None, "GPU-0", 100 * MIB)
    assert (only.used_bytes, only.free_bytes, only.other_bytes) == (None, None, None)
    assert only.processes[0].used_bytes is None
    assert view.notes == ("why",)


def test_pages_of_processes_on_other_gpus_only_are_left_out() -> None:
    row = make_row("a", resident_bytes=MIB)
    here, there, both = (
        make_page(pid, row, uuids=uuids) for pid, uuids in ((10, ("GPU-0",)), (11, ("GPU-8",)), (12, ("GPU-8", "GPU-1")))
    )
    unknown = make_page(13, row, uuids=())
    found = pages_on(Pages((here, there, both, unknown), {"/x": "why"}), Gpus((gpu(0), gpu(1)), ""))
    assert found == Pages((here, both, unknown), {"/x": "why"})


def test_a_process_of_another_namespace_is_not_the_one_with_its_number() -> None:
    foreign = make_page(10, make_row("a", resident_bytes=MIB), foreign=True)
    view = make_view(
        Pages((foreign,), {}), Gpus((gpu(0, (10, 9 * MIB), used=9 * MIB),), ""), 0, {10: Program("sshd", "alice")}
    )
    assert [(row.name, row.managed, row.foreign, row.used_bytes) for row in view.gpus[0].processes] == [
        ("job", True, True, None),
        ("sshd", False, False, 9 * MIB),
    ]


def test_states() -> None:
    resident, paused = make_row("a", resident_bytes=1), make_row("b", paused_bytes=1)
    damaged, empty = make_row("c", damaged=1, allocations=1), make_row("d", pauses_total=1)

    def state(*rows: object, **fields: object) -> str:
        view = make_view(Pages((make_page(1, *rows, **fields),), {}), Gpus((), ""), 0, {})  # type: ignore[arg-type]
        return view.gpus[0].processes[0].state

    assert state(resident, empty) == "resident"
    assert state(paused) == "paused"
    assert state(resident, paused) == "partly"
    assert state(resident, damaged) == "damaged"
    assert state(empty) == "empty"
    assert state(paused, running="resume") == "resuming"


def test_rows_beyond_the_bound_count_where_only_one_gpu_is_possible() -> None:
    others = make_row("", -1, resident_bytes=MIB, allocations=1)
    one = make_view(Pages((make_page(1, others),), {}), Gpus((), ""), 0, {})
    assert one.gpus[0].processes[0].tags[0].tag == ""
    two = make_view(Pages((make_page(1, others, uuids=("GPU-0", "GPU-1")),), {}), Gpus((), ""), 0, {})
    assert two.gpus == ()


def test_unreadable_pages_are_named() -> None:
    view = make_view(Pages((), {"/pages/x": "it has format 2"}), Gpus((), ""), 0, {})
    assert view.notes == ("/pages/x is not shown: it has format 2",)


def test_what_has_no_row_is_named_where_its_gpu_is_not_known() -> None:
    """The page does not say on which GPU it is. Where the process sees one GPU, it is there."""
    others = make_row("", -1, allocations=3, resident_bytes=5 * MIB, paused_bytes=7 * MIB)
    rows = (make_row("a", 0, allocations=1, resident_bytes=MIB), others)
    (only,) = make_view(Pages((make_page(10, *rows),), {}), Gpus((), ""), 0, {}).gpus
    assert only.resident_bytes == 6 * MIB
    view = make_view(Pages((make_page(10, *rows, uuids=("GPU-0", "GPU-1")),), {}), Gpus((), ""), 0, {})
    assert [gpu.resident_bytes for gpu in view.gpus] == [MIB]
    assert view.notes == (
        "process 10 has 3 more allocations (resident 5 MiB, paused 7 MiB), which no GPU shows: its page has no line left "
        "for their tags, and does not say on which of its GPUs they are",
    )
    freed = make_page(10, make_row("a", 0, resident_bytes=MIB), make_row("", -1, pauses_total=1), uuids=("GPU-0", "GPU-1"))
    assert make_view(Pages((freed,), {}), Gpus((), ""), 0, {}).notes == (), "they were freed"


def test_a_mig_device_is_the_gpu_of_its_processes() -> None:
    """CUDA does not say that it is one: the page has "GPU-" where NVML has "MIG-"."""
    mig = dataclasses.replace(gpu(3, (10, 9 * MIB), used=20 * MIB), uuid="MIG-5d5b-1", mig=1)
    page = make_page(10, make_row("a", resident_bytes=4 * MIB), uuids=("GPU-5d5b-1",))
    (only,) = make_view(Pages((page,), {}), Gpus((mig,), ""), 0, {}).gpus
    assert (only.index, only.mig, only.uuid, only.resident_bytes, only.other_bytes) == (
        3,
        1,
        "MIG-5d5b-1",
        4 * MIB,
        16 * MIB,
    )
    assert [(process.pid, process.managed, process.used_bytes) for process in only.processes] == [(10, True, 9 * MIB)]


def test_a_process_that_nvml_lists_twice() -> None:
    view = make_view(Pages((), {}), Gpus((gpu(0, (7, 3), (7, 4), (8, 1), (8, None), used=9),), ""), 0, {})
    assert [(process.pid, process.used_bytes) for process in view.gpus[0].processes] == [(7, 7), (8, None)]

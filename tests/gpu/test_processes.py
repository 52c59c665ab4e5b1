"""Guards what needs fresh processes: import, exit, the first CUDA call, environment variables, children, ranks of torchrun.

Programs of both hook modes are started together, because most of their time is torch's import.
"""

from __future__ import annotations

import json

import pytest
from gpu_programs import Finished, Program, run_programs, run_ranks, subprocess_run
from gpu_support import PROGRAMS, SIMULATED, torch

pytestmark = pytest.mark.outer

#: tests/torch/test_exit.py has the other states on the simulated GPU.
STATES = [
    "active",
    "paused",
    "inside_region",
    "inside_paused_region",
    "thread_in_region",
    "graph",
    "work_in_flight",
][-1 if SIMULATED else 0 :]
EVERYTHING = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
#: Seconds that `import torch_memory_saver` may take where torch is imported already.
IMPORT_LIMIT_S = 0.03


def failures(finished: list[Finished], accept: dict[str, int] | None = None) -> list[str]:
    wanted = accept or {}
    return [
        f"{done.name}: status {done.status}\n{done.output}{done.error}"
        for done in finished
        if done.status != wanted.get(done.name, 0)
    ]


def test_the_interpreter_exits_in_every_state_silently_with_the_programs_status() -> None:
    programs = [Program("exit_state.py", ("control", "7"))]
    for preload in (False, True):
        for index, state in enumerate(STATES):
            programs.append(Program("exit_state.py", (state, str(index % 2 * 7)), preload=preload))
    # At most eight at a time: each has a context of its own on the GPU.
    finished = [done for first in range(0, len(programs), 8) for done in run_programs(programs[first : first + 8])]
    wanted = {program.name: int(program.arguments[1]) for program in programs}
    assert failures(finished, wanted) == []
    assert {done.output for done in finished} == {"ready\n"}
    control = finished[0].error
    assert {done.name: done.error for done in finished if done.error != control} == {}


def test_import_touches_no_gpu(record_property: pytest.RecordProperty) -> None:
    finished = [run_programs([Program("import_only.py", preload=preload)])[0] for preload in (False, True, False)]
    assert failures(finished) == []
    seen = [json.loads(done.output) for done in finished]
    for result in seen:
        assert result["initialized"] is False
        assert result["devices"] == []
        assert result["drivers"] == []
        assert result["threads"] == 0
    milliseconds = sorted(round(result["seconds"] * 1000, 1) for result in seen)
    record_property("import_milliseconds", milliseconds)
    print(f"import torch_memory_saver: {milliseconds} ms (limit of the project: {IMPORT_LIMIT_S * 1000:.0f})")


def test_expandable_segments() -> None:
    """Expandable segments, in both hook modes."""
    expandable = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    programs = [
        Program("expandable.py", environment=(expandable,)),
        Program("expandable.py", environment=(expandable,), preload=True),
    ]
    assert failures([run_programs([program])[0] for program in programs]) == []


@pytest.mark.parametrize("preload", [False, True], ids=["torch", "preload"])
def test_pytorch_without_caching(preload: bool) -> None:
    """The preload library manages each cudaMalloc. Without it, a warning says that regions manage nothing."""
    if not hasattr(torch.cuda.memory, "caching_allocator_enable"):
        pytest.skip("needs PyTorch 2.8 or later")
    by_variable = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
    programs = [
        Program("uncached.py", environment=by_variable, preload=preload),
        Program("uncached.py", ("off",), (), preload),
    ]
    assert failures(run_programs(programs)) == []


def test_the_first_cuda_call_is_cuda_malloc() -> None:
    enable, kept = ("TMS_INIT_ENABLE", "1"), ("TMS_INIT_ENABLE_CPU_BACKUP", "1")
    programs = [Program("first_call.py", (how,), environment=(enable, kept), preload=True) for how in ("local", "global")]
    assert failures([run_programs([program])[0] for program in programs]) == []


@pytest.mark.parametrize(
    "environment",
    [
        (),
        (("TMS_INIT_ENABLE_CPU_BACKUP", "1"),),
        (("TMS_INIT_ENABLE_CPU_BACKUP", "1"), ("TMS_INIT_CPU_BACKUP_BACKEND", "mmap")),
        (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),),
        (("PYTORCH_ALLOC_CONF", "expandable_segments:True"), ("TMS_INIT_ENABLE_CPU_BACKUP", "1")),
    ],
    ids=["discard", "cpu backup", "mmap backup", "expandable segments", "expandable segments, new name"],
)
def test_init_enable(environment: tuple[tuple[str, str], ...]) -> None:
    program = Program("init_enable.py", (), (("TMS_INIT_ENABLE", "1"), *environment), preload=True)
    run_programs([program])[0].check()


@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_a_process_and_its_child_pause_in_turn(how: str, shared_device: None) -> None:
    done = subprocess_run([str(PROGRAMS / "children.py"), how], EVERYTHING, preload=True).check()
    assert (done.output, done.error) == ("paused in turn\n", "")


@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    ("preload", "ranks"), [(False, 4), (True, 2), (True, 4)], ids=["regions, 4", "everything, 2", "everything, 4"]
)
def test_ranks_of_torchrun_pause(preload: bool, ranks: int, shared_device: None) -> None:
    """Two ranks with regions, in both hook modes: test_multi_gpu.py."""
    managed = "everything" if preload else "regions"
    environment = EVERYTHING if preload else {}
    outputs = run_ranks("torchrun_pauses.py", (managed,), ranks, environment, preload, timeout=300)
    assert outputs == ["ok\n"] * ranks

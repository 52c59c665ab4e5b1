"""Guards TMS_DISABLE: the core manages nothing, every public call gives its type and zeros, and wrong arguments still raise.

The switch is read once in a process, so each test starts one."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import Program

#: What TMS_DISABLE has to overrule, or has to keep from acting.
EVERYTHING = {
    "TMS_DISABLE": "1",
    "TMS_INIT_ENABLE": "1",
    "TMS_INIT_ENABLE_CPU_BACKUP": "1",
    "TMS_DEBUG": "events,snapshots,history,oom",
    "TMS_METRICS_FILE": "metrics",
    "TMS_RELEASE_CACHED": "pause",
}
LINE = "TMS_DISABLE is set: torch_memory_saver does nothing in this process"

both_modes = pytest.mark.parametrize("preloaded", [False, True], ids=["torch", "preload"])


def test_the_preload_library_passes_everything_on(program: Program, tmp_path: Path) -> None:
    done = program(
        """
library = ctypes.CDLL(None)
library.tms_get_interesting_region.restype = ctypes.c_bool
library.tms_set_interesting_region(True)
assert not library.tms_get_interesting_region()
address = cuda_malloc(4 * MIB)
assert list(_core.segments()) == [] and _core.find(address) is None
fill(address, MIB, 7)
assert library.tms_pause(None) == 0 and library.tms_resume(b"weights") == 0
assert read(address, MIB) == bytes([7]) * MIB
stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
assert runtime.cudaStreamCreate(ctypes.byref(stream)) == 0
assert runtime.cudaStreamBeginCapture(stream, 0) == 0
assert _core.counters()["visible_captures"] == 0
assert runtime.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
before = free_bytes()
cuda_free(address)
assert free_bytes() == before + 4 * MIB
""",
        TMS_SHARED_PAGE=str(tmp_path),
        **EVERYTHING,
    )
    assert done.stderr.count(LINE) == 1
    assert list(tmp_path.iterdir()) == []


@both_modes
def test_torchs_allocator_gives_ordinary_memory(program: Program, preloaded: bool) -> None:
    done = program(
        """
import ctypes
from torch_memory_saver import _core
library = ctypes.CDLL(_core.library_path)
for name in ("tms_torch_malloc", "tms_torch_default_malloc", "tms_torch_ordinary_malloc"):
    getattr(library, name).restype = ctypes.c_void_p
for allocate, free in (
    (library.tms_torch_malloc, library.tms_torch_free),
    (library.tms_torch_default_malloc, library.tms_torch_default_free),
):
    before = _core.device_memory(0).free
    address = allocate(ctypes.c_ssize_t(4 << 20), 0, None)
    assert address and _core.find(address) is None
    assert _core.device_memory(0).free == before - (4 << 20)
    free(ctypes.c_void_p(address), ctypes.c_ssize_t(4 << 20), 0, None)
    assert _core.device_memory(0).free == before
""",
        preloaded=preloaded,
        **EVERYTHING,
    )
    assert done.stderr.count(LINE) == 1


@both_modes
def test_each_call_gives_its_type_and_zeros(program: Program, preloaded: bool, tmp_path: Path) -> None:
    program(
        f"""
import os
os.chdir({str(tmp_path)!r})
from torch_memory_saver import PendingResume, _core, errors, reports
from torch_memory_saver import torch_memory_saver as saver
def never(*_):
    raise AssertionError("called")
saver.on_pause(None, "before", never)
saver.on_resume(None, "after", never)
with saver.region("weights", backup="host"), saver.disable(), saver.region("weights"):
    assert _core.region_current().depth == 0
with saver.disable():  # also outside of every region
    pass
@saver.region("weights")
def add(a, b):
    return a + b
assert add(1, 2) == 3 and saver.bind_region(add) is add
assert saver.pause("weights", progress=never) == reports.PauseReport()
assert saver.resume("weights", exclusive=True) == reports.ResumeReport()
pending = saver.resume(wait=False)
assert isinstance(pending, PendingResume) and pending.done and pending.wait() == reports.ResumeReport()
pending.wait_stream(0)
stats = saver.stats("weights")
assert stats.total.allocations == stats.pauses.calls == stats.resumes.calls == 0
assert saver.preserved() == () and saver.patches() == ()
assert saver.check_fresh(whole=True) == reports.FreshReport(whole=True)
saver.set_disk_backup_dir("folder")
saver.reserve_host_memory(1 << 30)
saver.release_host_memory(); saver.enable_peer_access(); saver.empty_cache(); saver.reset_peaks()
assert _core.counters()["host_pooled_bytes"] == 0
saver.guard, saver.host_memory, saver.memory_margin_bytes = True, "pool", 5
assert (saver.guard, saver.host_memory, saver.memory_margin_bytes) == (True, "pool", 5)
assert saver.hook_mode == {"preload" if preloaded else "torch"!r} and saver.enabled
assert os.listdir() == []
""",
        preloaded=preloaded,
        TMS_LOCK_DIR=str(tmp_path / "locks"),
        TMS_SHARED_PAGE=str(tmp_path / "pages"),
        **EVERYTHING,
    )


def test_wrong_arguments_raise(program: Program) -> None:
    program(
        """
from torch_memory_saver import errors
from torch_memory_saver import torch_memory_saver as saver
async def deferred(): ...
for call in (
    lambda: saver.region(tag=""),
    lambda: saver.region(backup="tape"),
    lambda: saver.region(runs=1),
    lambda: saver.pause(3),
    lambda: saver.pause(timeout=-1),
    lambda: saver.resume(host_memory="x"),
    lambda: saver.resume(wait=False).wait_stream("x"),
    lambda: saver.bind_region(3),
    lambda: saver.preserve(3),
    lambda: saver.check_fresh(3),
    lambda: saver.stats(device="x"),
    lambda: saver.set_disk_backup_dir(""),
    lambda: saver.reserve_host_memory(-1),
    lambda: saver.reserve_host_memory(1, 99),
    lambda: setattr(saver, "guard", 3),
    lambda: setattr(saver, "hook_mode", "unknown"),
):
    try:
        call()
    except errors.InvalidArgumentError:
        continue
    raise AssertionError("no error")
for call in (lambda: saver.bind_region(deferred), lambda: saver.region()(deferred)):
    try:
        call()
    except TypeError:
        continue
    raise AssertionError("no error")
""",
        preloaded=False,
        TMS_DISABLE="1",
    )


def test_a_hook_mode_of_the_program_is_not_used(program: Program) -> None:
    program(
        """
import torch_memory_saver as package
def never():
    raise AssertionError("called")
package.register_hook_mode("own", never)
package.hook_mode = "own"
with package.region():
    pass
""",
        preloaded=False,
        TMS_DISABLE="1",
    )


def test_python_uses_the_value_that_the_core_has_read(program: Program) -> None:
    for first, second in (("0", "1"), ("1", "0")):
        program(
            f"""
import os
from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver
_core.get_memory_margin()  # makes the state, which reads the environment
os.environ["TMS_DISABLE"] = "{second}"
assert type(saver._use()).__name__ == {"DisabledEngine" if first == "1" else "Engine"!r}
""",
            preloaded=False,
            TMS_DISABLE=first,
        )


def test_the_plugin_of_vllm_does_not_offer_itself(program: Program) -> None:
    shared = Path(__file__).resolve().parents[3] / "shared"
    program(
        f"""
import sys
sys.path.insert(0, {str(shared)!r})
from importlib import import_module
from vllm_engine import load_plugin, stand_in
with stand_in():
    modules = [import_module(name) for name in ("vllm.device_allocator", "vllm.v1.worker.worker_base", "vllm.config")]
    before = [dict(vars(module)) for module in modules]
    load_plugin()
    assert [dict(vars(module)) for module in modules] == before
    backends = import_module("vllm.device_allocator.sleep_mode_backend").SleepModeBackendFactory
    assert list(backends._places) == ["cumem"]
    loaders = import_module("vllm.model_executor.model_loader")
    assert "torch_memory_saver" in loaders._LOAD_FORMAT_TO_MODEL_LOADER, "an engine that selects the load format starts"
""",
        preloaded=False,
        TMS_DISABLE="1",
    )

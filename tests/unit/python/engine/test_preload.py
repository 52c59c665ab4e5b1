"""Guards the package in preloaded processes without torch, and the ways to preload a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import SIMULATOR, Program, environment

from torch_memory_saver import configure_subprocess, errors
from torch_memory_saver._engine import preload


def test_configure_subprocess_sets_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(preload.library_path())
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with configure_subprocess():
        assert os.environ["LD_PRELOAD"] == path
        with configure_subprocess():
            assert os.environ["LD_PRELOAD"] == path
        assert os.environ["LD_PRELOAD"] == path
    assert "LD_PRELOAD" not in os.environ


def test_configure_subprocess_keeps_other_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "one.so two.so:three.so")
    with pytest.raises(ZeroDivisionError), configure_subprocess():
        assert os.environ["LD_PRELOAD"] == f"{preload.library_path()}:one.so:two.so:three.so"
        raise ZeroDivisionError
    assert os.environ["LD_PRELOAD"] == "one.so two.so:three.so"


@pytest.mark.parametrize(("name", "exists", "words"), [("a b.so", True, "space"), ("a.so", False, "not installed")])
def test_a_library_that_cannot_be_preloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, exists: bool, words: str
) -> None:
    if exists:
        (tmp_path / name).touch()
    monkeypatch.setattr(preload, "library_path", lambda: tmp_path / name)
    before = os.environ.get("LD_PRELOAD")
    with pytest.raises(errors.InvalidStateError, match=words), configure_subprocess():
        pytest.fail("nothing may be run")
    assert os.environ.get("LD_PRELOAD") == before


@pytest.mark.parametrize(("exists", "why"), [(True, "is not the library of this package"), (False, "there is no such file")])
def test_a_wrong_library_in_ld_preload_is_a_warning(tmp_path: Path, exists: bool, why: str) -> None:
    wrong = tmp_path / preload.LIBRARY_NAME
    if exists:
        shutil.copy(SIMULATOR, wrong)
    text = "import torch_memory_saver as tms; [tms.torch_memory_saver.stats() for _ in range(2)]; print(tms.hook_mode)"
    variables = environment(False) | {"LD_PRELOAD": str(wrong)}
    done = subprocess.run([sys.executable, "-c", text], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "torch\n"
    assert done.stderr.count("LD_PRELOAD names") == 1
    assert f"LD_PRELOAD names {wrong}, " in done.stderr and f" {why}, so this process is in hook mode torch" in done.stderr
    text = "from torch_memory_saver import torch_memory_saver as saver; saver.hook_mode = 'preload'; saver.stats()"
    done = subprocess.run([sys.executable, "-c", text], env=variables, capture_output=True, text=True, check=False)
    assert f"was started without (LD_PRELOAD names {wrong}, " in done.stderr and f" {why}): start the process" in done.stderr
    assert f"start it with LD_PRELOAD={preload.library_path()}" in done.stderr


def test_a_child_started_inside_is_preloaded(program: Program) -> None:
    text = """
import subprocess, sys
from torch_memory_saver import configure_subprocess
command = [sys.executable, "-c", "from torch_memory_saver import _core; print(_core.preloaded, _core.library_path)"]
with configure_subprocess():
    print(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
print(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
"""
    inside, outside = program(text, preloaded=False).stdout.splitlines()
    assert inside == f"True {preload.library_path()}"
    assert outside.startswith("False ")


def test_tasks_that_interleave_keep_what_they_allocate(program: Program) -> None:
    text = """
import asyncio, warnings
made = {}
async def main():
    inside_a, inside_b, left_a = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async def a():
        with torch_memory_saver.region("a"):
            made["a"] = cuda_malloc(2 * MIB)
            inside_a.set()
            await inside_b.wait()
        left_a.set()
    async def b():
        await inside_a.wait()
        with torch_memory_saver.region("b", enable_cpu_backup=True):
            made["b1"] = cuda_malloc(2 * MIB)
            inside_b.set()
            await left_a.wait()
            made["b2"] = cuda_malloc(2 * MIB)
    await asyncio.gather(a(), b())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    asyncio.run(main())
made["outside"] = cuda_malloc(2 * MIB)
found = {name: _core.find(address) for name, address in made.items()}
print({name: row and (row.tag, row.backup == _core.BACKUP_PINNED) for name, row in found.items()})
print([(warning.category.__name__, "'a'" in str(warning.message), "'b'" in str(warning.message)) for warning in caught])
"""
    tags, warned = program(text).stdout.splitlines()
    assert tags == "{'a': ('a', False), 'b1': ('b', True), 'b2': ('b', True), 'outside': None}"
    assert warned == "[('RuntimeWarning', True, True)]"


def test_a_cycle(program: Program) -> None:
    text = """
with torch_memory_saver.region("weights", enable_cpu_backup=True):
    weights = cuda_malloc(4 * MIB)
with torch_memory_saver.region("kv_cache"):
    cache = cuda_malloc(8 * MIB)
outside = cuda_malloc(2 * MIB)
fill(weights, 4 * MIB, 3); fill(outside, 2 * MIB, 5)
before = free_bytes()
report = torch_memory_saver.pause()
assert (report.allocations, report.bytes, report.copied_bytes) == (2, 12 * MIB, 4 * MIB), report
assert free_bytes() - before == 12 * MIB
assert read(outside, 2 * MIB) == bytes([5]) * (2 * MIB)
torch_memory_saver.resume("weights")
assert free_bytes() - before == 8 * MIB
assert read(weights, 4 * MIB) == bytes([3]) * (4 * MIB)
with torch_memory_saver.region("kv_cache"):
    fresh = cuda_malloc(2 * MIB)
fill(fresh, 2 * MIB, 7)
torch_memory_saver.resume()
fill(cache, 8 * MIB, 9)
assert read(fresh, 2 * MIB) == bytes([7]) * (2 * MIB)
for address in (weights, cache, outside, fresh):
    cuda_free(address)
assert torch_memory_saver.stats().total.allocations == 0
assert torch_memory_saver.hook_mode == "preload"
assert "torch" not in sys.modules
"""
    program(text)


def test_hook_modes(program: Program) -> None:
    text = """
torch_memory_saver.hook_mode = "torch"
with torch_memory_saver.region("a"):
    address = cuda_malloc(2 * MIB)
assert torch_memory_saver.stats().tags["a"].bytes == 2 * MIB, "the preload library holds the state all the same"
assert torch_memory_saver.hook_mode == "preload"
for mode in ("torch", "preload", "auto"):
    torch_memory_saver.hook_mode = mode
"""
    program(text)


def test_disable_and_init_enable(program: Program) -> None:
    text = """
first = cuda_malloc(2 * MIB)
with torch_memory_saver.disable():
    second = cuda_malloc(2 * MIB)
    with torch_memory_saver.region("a"):
        third = cuda_malloc(2 * MIB)
rows = {row.address: (row.tag, row.backup) for row in torch_memory_saver.stats().allocations}
assert rows == {first: ("default", "mmap"), third: ("a", "none")}, rows
assert torch_memory_saver.pause().reusable_bytes == 0
"""
    program(text, TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_CPU_BACKUP="1", TMS_INIT_CPU_BACKUP_BACKEND="mmap")


def test_out_of_memory_at_resume_can_be_repeated(program: Program) -> None:
    text = """
with torch_memory_saver.region("a", enable_cpu_backup=True):
    address = cuda_malloc(40 * MIB)
fill(address, 40 * MIB, 9)
torch_memory_saver.pause()
other = cuda_malloc(480 * MIB)
for _ in range(2):
    try:
        torch_memory_saver.resume()
    except module.OutOfMemoryError as error:
        assert error.device == 0 and error.driver_call == "cuMemCreate" and "CUDA_ERROR_OUT_OF_MEMORY" in str(error), error
    else:
        raise AssertionError
    assert torch_memory_saver.stats().tags["a"].paused_bytes == 40 * MIB
cuda_free(other)
torch_memory_saver.resume()
assert read(address, 40 * MIB) == bytes([9]) * (40 * MIB)
"""
    program(text)


def test_a_forked_child_gets_a_clear_error(program: Program) -> None:
    text = """
with torch_memory_saver.region("a"):
    cuda_malloc(2 * MIB)
child = os.fork()
if child == 0:
    try:
        torch_memory_saver.pause()
    except module.errors.ForkedProcessError:
        os._exit(7)
    os._exit(8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert torch_memory_saver.pause().allocations == 1
"""
    program(text)


def test_exit_inside_a_region(program: Program) -> None:
    text = """
region = torch_memory_saver.region("a")
region.__enter__()
cuda_malloc(2 * MIB)
sys.exit(5)
"""
    assert program(text, status=5).stderr == ""

"""Guards the import paths, the C functions and the private interfaces of the C++ package that programs use."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from fake_torch import FakeTorch
from processes import SIMULATOR, Program

import torch_memory_saver as module
from torch_memory_saver import _core, binary_wrapper, entrypoint, errors, testing_utils, utils
from torch_memory_saver._compat import cpp_package
from torch_memory_saver._engine import preload
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.hooks import base, mode_preload, mode_torch
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


def test_old_import_paths() -> None:
    assert entrypoint.TorchMemorySaver is TorchMemorySaver
    assert issubclass(mode_preload.HookUtilModePreload, base.HookUtilBase)
    assert issubclass(mode_torch.HookUtilModeTorch, base.HookUtilBase)
    assert entrypoint.HookUtilBase is base.HookUtilBase
    assert binary_wrapper.BinaryWrapper is entrypoint.BinaryWrapper is cpp_package.BinaryWrapper
    assert get_args(base.HookMode) == ("auto", "preload", "torch")
    assert utils.is_xpu() is testing_utils.is_xpu() is entrypoint.is_xpu() is False
    assert testing_utils.get_device() == "cuda"


def test_hook_helpers(fake_torch: FakeTorch) -> None:
    assert base.HookUtilBase.create("preload").get_path_binary() == str(preload.library_path())
    assert base.HookUtilBase.create("torch").get_path_binary() == _core.library_path
    assert base.HookUtilBase.create("auto").get_path_binary() == _core.library_path
    assert base.HookUtilBase.create("preload").get_allocator() is None
    with pytest.raises(errors.InvalidArgumentError):
        base.HookUtilBase.create("other")


def test_the_preload_library_is_where_programs_look_for_it() -> None:
    path = utils.get_binary_path_from_package("torch_memory_saver_hook_mode_preload")
    assert path == Path(module.__file__).absolute().parent.parent / "torch_memory_saver_hook_mode_preload.abi3.so"
    assert b"TMS_INIT_ENABLE_DISK_BACKUP" in path.read_bytes()
    assert utils.get_binary_path_from_package("_core").name == "_core.abi3.so"
    with pytest.raises(errors.InvalidStateError, match="nothing_of_that_name"):
        utils.get_binary_path_from_package("nothing_of_that_name")


@pytest.mark.parametrize(
    ("torch", "there", "found"),
    [
        (SimpleNamespace(cuda="12.9", hip=None), ["stem_cu12.abi3.so", "stem_cu13.abi3.so"], "stem_cu12.abi3.so"),
        (SimpleNamespace(cuda="13.0", hip=None), ["stem.abi3.so", "stem_cu12.abi3.so", "stem_cu13.so"], "stem_cu13.so"),
        (SimpleNamespace(cuda="13.0", hip=None), ["stem_cu12.abi3.so", "stem.abi3.so"], "stem.abi3.so"),
        (SimpleNamespace(cuda=None, hip="7.2.0"), ["stem_cu12.abi3.so", "stem.abi3.so"], "stem.abi3.so"),
        (None, ["stem_cu12.abi3.so", "stem_cu13.abi3.so", "stem.abi3.so"], "stem_cu13.abi3.so"),
        (SimpleNamespace(cuda="12.9", hip=None), ["stem_cu13.abi3.so", "stem_other.so", "stem.txt"], None),
    ],
)
@pytest.mark.parametrize("beside", [True, False], ids=["in the package", "beside the package"])
def test_a_binary_is_looked_for_in_the_package_and_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch: object, there: list[str], found: str | None, beside: bool
) -> None:
    package = tmp_path / "torch_memory_saver"
    package.mkdir()
    monkeypatch.setattr(cpp_package, "__file__", str(package / "_compat" / "cpp_package.py"))
    monkeypatch.setitem(sys.modules, "torch", None if torch is None else SimpleNamespace(version=torch))
    directory = package if beside else tmp_path
    for name in there:
        (directory / name).touch()
    if found is None:
        with pytest.raises(errors.InvalidStateError, match=f"'stem' in {package} or {tmp_path}"):
            utils.get_binary_path_from_package("stem")
    else:
        assert utils.get_binary_path_from_package("stem") == directory / found


@pytest.mark.parametrize(
    ("before", "inside"),
    [(None, "/their/tms.so"), ("/a.so", "/their/tms.so:/a.so"), ("/a.so /b.so", "/their/tms.so:/a.so:/b.so")],
)
def test_a_program_may_replace_the_preload_library(monkeypatch: pytest.MonkeyPatch, before: str | None, inside: str) -> None:
    monkeypatch.setattr(mode_preload, "get_binary_path_from_package", lambda stem: Path("/their/tms.so"))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    if before is not None:
        monkeypatch.setenv("LD_PRELOAD", before)
    with mode_preload.configure_subprocess():
        assert os.environ["LD_PRELOAD"] == inside
    assert os.environ.get("LD_PRELOAD") == before


def test_the_old_configure_subprocess_finds_our_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with mode_preload.configure_subprocess():
        old = os.environ["LD_PRELOAD"]
    with module.configure_subprocess():
        assert os.environ["LD_PRELOAD"] == old == str(preload.library_path())


@pytest.mark.parametrize("backend", ["pinned", "mmap"])
def test_a_backend_needs_a_cpu_backup(saver: TorchMemorySaver, backend: str) -> None:
    with pytest.raises(ValueError, match=r"cpu_backup_backend requires enable_cpu_backup=True"):
        saver.region(cpu_backup_backend=backend)


def test_backends_of_other_platforms(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that has set another platform in entrypoint gets the error at region()."""
    monkeypatch.setattr(entrypoint, "is_xpu", lambda: True)
    for backend in ("pinned", "mmap"):
        with pytest.raises(ValueError, match="not supported on XPU"):
            saver.region(enable_cpu_backup=True, cpu_backup_backend=backend)
    with saver.region(enable_cpu_backup=True):
        fake_torch.free(fake_torch.allocate(2 * MIB))
    monkeypatch.setattr(entrypoint, "is_xpu", lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(hip="6.2.0")))
    with pytest.raises(ValueError, match="not supported on ROCm"):
        saver.region(enable_cpu_backup=True, cpu_backup_backend="mmap")
    with saver.region(enable_cpu_backup=True, cpu_backup_backend="pinned"):
        fake_torch.free(fake_torch.allocate(2 * MIB))


def test_change_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_VARIABLE", raising=False)
    with utils.change_env("SOME_VARIABLE", "1"):
        assert os.environ["SOME_VARIABLE"] == "1"
        with utils.change_env("SOME_VARIABLE", "2"):
            assert os.environ["SOME_VARIABLE"] == "2"
        assert os.environ["SOME_VARIABLE"] == "1"
    assert "SOME_VARIABLE" not in os.environ


def test_impl_appears_at_the_first_use(saver: TorchMemorySaver, simulator: object) -> None:
    assert vars(saver)["_impl"] is None
    saver.pause()
    assert isinstance(saver._impl, entrypoint._TorchMemorySaverImpl)
    assert isinstance(saver._impl._binary_wrapper.cdll, ctypes.CDLL)
    saver._impl.attribute_of_theirs = []  # type: ignore[attr-defined]


def test_the_implementation_takes_a_hook_mode(simulator: object) -> None:
    assert entrypoint._TorchMemorySaverImpl(hook_mode="torch").hook_mode == "torch"
    with pytest.raises(errors.InvalidStateError):
        entrypoint._TorchMemorySaverImpl(hook_mode="preload")


def test_every_c_function_is_there_and_declared(simulator: object) -> None:
    cdll = cpp_package.binary_wrapper().cdll
    assert cdll.tms_get_interesting_region() is False
    for name, (result, arguments) in cpp_package._SIGNATURES.items():
        function = getattr(cdll, name)
        assert function.restype is result
        assert function.argtypes == arguments


def test_the_region_flag_can_be_toggled(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    saver.pause()
    wrapper = saver._impl._binary_wrapper
    cdll = wrapper.cdll
    with saver.region("a", enable_cpu_backup=True):
        assert cdll.tms_get_interesting_region() is True
        assert cdll.tms_get_current_tag() == b"a"
        assert cdll.tms_get_enable_cpu_backup() is True
        cdll.tms_set_interesting_region(False)
        assert _core.region_current().managed is False
        cdll.tms_set_interesting_region(True)
        wrapper.set_config(tag="b", interesting_region=True, enable_cpu_backup=False)
        assert _core.region_current() == ("b", _core.BACKUP_NONE, True, 1, True)
    assert _core.region_current().depth == 0


def test_settings_of_a_region_without_a_pool(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    saver.pause()
    with saver.region("outer"):
        routed = list(fake_torch.routings)
        with saver._impl._with_region_config(tag="a", enable_cpu_backup=True, cpu_backup_backend="mmap"):
            assert _core.region_current() == ("a", _core.BACKUP_MMAP, True, 2, True)
            assert fake_torch.routings == routed
        with pytest.raises(ZeroDivisionError), saver._impl._with_region_config("b", False, None, enable_disk_backup=True):
            assert _core.region_current() == ("b", _core.BACKUP_DISK, True, 2, True)
            raise ZeroDivisionError
        assert _core.region_current().tag == "outer"
    assert _core.region_current().depth == 0


def test_idle_pools_by_their_old_names(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    def allocate(**region: Any) -> int:
        with saver.region(**region):
            return fake_torch.allocate(2 * MIB)

    plain = allocate(tag="a")
    allocate(tag="a", enable_cpu_backup=True, cpu_backup_backend="mmap")
    allocate(tag="a", enable_disk_backup=True)
    allocate(tag="b", enable_cpu_backup=True)
    pools = saver._impl._mem_pools
    names = {
        ("a", False, False, "", 0),
        ("a", True, False, "mmap", 0),
        ("a", False, True, "", 0),
        ("b", True, False, "pinned", 0),
    }
    assert set(pools) == names
    assert len(pools) == 4
    taken = pools[("a", False, False, "", 0)]
    assert taken.id == fake_torch.pool_of(plain)
    assert pools.pop(("a", False, False, "", 0)) is taken
    assert set(pools) == names - {("a", False, False, "", 0)}
    assert pools.pop(("a", False, False, "", 0), None) is None
    with pytest.raises(KeyError):
        pools.pop(("a", False, False, "", 0))
    fake_torch.free(plain)
    pool = taken.id
    del taken
    gc.collect()
    fake_torch.empty_cache()
    assert pool not in fake_torch.alive
    assert saver.stats().tags["a"].allocations == 2
    pools.clear()
    assert len(saver._impl._mem_pools) == 0


def test_the_hook_mode_and_its_helper(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    saver.hook_mode = "torch"
    saver.pause()
    assert saver._impl._hook_mode == "torch"
    assert isinstance(saver._impl._hook_util, mode_torch.HookUtilModeTorch)
    with pytest.raises(AttributeError, match="_nothing_of_that_name"):
        saver._impl._nothing_of_that_name  # noqa: B018
    saver._impl._hook_util = replacement = mode_torch.HookUtilModeTorch()
    assert saver._impl._hook_util is replacement


def test_the_devices_that_a_tag_is_on(saver: TorchMemorySaver, simulator: object) -> None:
    def allocate(tag: str, device: int) -> int:
        level = _core.region_enter(tag, _core.BACKUP_NONE, True)
        address = _core.allocate(2 * MIB, device)
        _core.region_leave(level)
        return address

    allocated = [allocate("both", 1), allocate("both", 0), allocate("second", 1)]
    saver.pause("both")
    affected = saver._impl._affected_devices
    assert (affected("both"), affected("second"), affected("none"), affected(None)) == ([0, 1], [1], [], [0, 1])
    for address in allocated:
        assert _core.free(address)
    assert affected(None) == []


def test_the_library_exports_the_functions_of_the_cuda_runtime(program: Program) -> None:
    """Of a runtime that is loaded for the whole program, and of one that is loaded for one library only."""
    text = """
torch_memory_saver.pause()
cdll = torch_memory_saver._impl._binary_wrapper.cdll
count = ctypes.c_int()
cdll.cudaGetDeviceCount.argtypes = [ctypes.POINTER(ctypes.c_int)]
assert cdll.cudaGetDeviceCount(ctypes.byref(count)) == 0
assert count.value == 1
assert cdll.cudaGetDeviceCount is cdll.cudaGetDeviceCount
for name in ("cudaNothingOfThatName", "tms_nothing_of_that_name"):
    try:
        getattr(cdll, name)
    except AttributeError as error:
        assert name in str(error)
    else:
        raise AssertionError(name)
"""
    program(text)
    program(text, preloaded=True, LD_PRELOAD=str(SIMULATOR))


def test_the_library_finds_a_runtime_that_is_not_global(program: Program, tmp_path: Path) -> None:
    runtime = tmp_path / "libcudart.so.13"
    shutil.copy(SIMULATOR, runtime)  # a link would be known by the name of its target
    text = f"""
import ctypes, os
from torch_memory_saver._compat import cpp_package
cdll = cpp_package.binary_wrapper().cdll
assert not hasattr(cdll, "cudaGetDeviceCount")
ctypes.CDLL({str(runtime)!r}, mode=os.RTLD_LOCAL)
assert cdll.cudaGetLastError() == 0
"""
    program(text, preloaded=False, TMS_CUDA_DRIVER="/nothing")


def test_pause_through_the_c_functions(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a"):
        used = fake_torch.allocate(2 * MIB)
    cdll = cpp_package.binary_wrapper().cdll
    assert cdll.tms_pause(b"a") == 0
    assert saver.stats().tags["a"].paused_bytes == 2 * MIB
    fake_torch.free(used)
    with saver.region("a"):
        assert fake_torch.allocate(2 * MIB) != used, "such a pause, too, keeps its pools from being entered"
    assert cdll.tms_resume(None) == 0
    assert saver.stats().tags["a"].paused_bytes == 0


def test_an_empty_tag_is_every_tag(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    for tag in ("a", "b"):
        with saver.region(tag):
            fake_torch.allocate(2 * MIB)
    cdll = cpp_package.binary_wrapper().cdll
    assert cdll.tms_pause(b"") == 0
    assert saver.stats().total.paused_bytes == 4 * MIB
    assert cdll.tms_resume(b"") == 0
    assert saver.stats().total.paused_bytes == 0
    assert saver.pause("").allocations == 2
    assert saver.resume("").allocations == 2


def test_the_preload_library_holds_the_state_of_a_preloaded_process(program: Program) -> None:
    text = """
torch_memory_saver.pause()
cdll = torch_memory_saver._impl._binary_wrapper.cdll
process = ctypes.CDLL(None)
process.tms_get_interesting_region.restype = ctypes.c_bool
cdll.tms_set_interesting_region(True)
assert process.tms_get_interesting_region() is True
cdll.tms_set_current_tag(b"theirs")
address = cuda_malloc(2 * MIB)
cdll.tms_set_interesting_region(False)
assert [row.tag for row in torch_memory_saver.stats().allocations] == ["theirs"]
with torch_memory_saver.region("a"), torch_memory_saver.disable():
    cdll.tms_set_interesting_region(True)
    cuda_malloc(2 * MIB)
    cdll.tms_set_interesting_region(False)
    cuda_malloc(2 * MIB)
assert len(torch_memory_saver.stats().allocations) == 2
"""
    program(text)


def test_memory_is_printed_and_returned(simulator: object, capsys: pytest.CaptureFixture[str]) -> None:
    memory = _core.device_memory(0)
    assert testing_utils.get_and_print_gpu_memory("now") == memory.total - memory.free
    assert "(now)" in capsys.readouterr().out

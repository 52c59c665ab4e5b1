"""The private corners of the C++ package that programs in the field use."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from conftest import Program
from fake_torch import FakeTorch

import torch_memory_saver as module
from torch_memory_saver import _core, compat, entrypoint, errors, preload, testing_utils, utils
from torch_memory_saver.hooks import base, mode_preload, mode_torch
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


def test_old_import_paths() -> None:
    assert entrypoint.TorchMemorySaver is TorchMemorySaver
    assert issubclass(mode_preload.HookUtilModePreload, base.HookUtilBase)
    assert issubclass(mode_torch.HookUtilModeTorch, base.HookUtilBase)
    assert mode_preload.configure_subprocess is module.configure_subprocess
    assert utils.is_xpu() is False
    assert testing_utils.get_device() == "cuda"


def test_hook_helpers(fake_torch: FakeTorch) -> None:
    assert base.HookUtilBase.create("preload").get_path_binary() == str(preload.library_path())
    assert base.HookUtilBase.create("torch").get_path_binary() == _core.library_path
    assert base.HookUtilBase.create("auto").get_path_binary() == _core.library_path
    assert base.HookUtilBase.create("preload").get_allocator() is None
    with pytest.raises(errors.InvalidArgumentError):
        base.HookUtilBase.create("other")


def test_the_preload_library_lies_where_programs_look_for_it() -> None:
    path = utils.get_binary_path_from_package("torch_memory_saver_hook_mode_preload")
    assert path == Path(module.__file__).absolute().parent.parent / "torch_memory_saver_hook_mode_preload.abi3.so"
    assert b"TMS_INIT_ENABLE_DISK_BACKUP" in path.read_bytes()
    assert utils.get_binary_path_from_package("_core").name == "_core.abi3.so"
    with pytest.raises(errors.InvalidStateError, match="nothing_of_that_name"):
        utils.get_binary_path_from_package("nothing_of_that_name")


def test_change_env(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

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
    cdll = compat.binary_wrapper().cdll
    assert cdll.tms_get_interesting_region() is False
    for name, (result, arguments) in compat._SIGNATURES.items():
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
        assert _core.region_current()[2] is False
        cdll.tms_set_interesting_region(True)
        wrapper.set_config(tag="b", interesting_region=True, enable_cpu_backup=False)
        assert _core.region_current()[:3] == ("b", _core.BACKUP_NONE, True)
    assert _core.region_current()[3] == 0


def test_pause_through_the_c_functions(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a"):
        used = fake_torch.allocate(2 * MIB)
    cdll = compat.binary_wrapper().cdll
    assert cdll.tms_pause(b"a") == 0
    assert saver.stats().tags["a"].paused_bytes == 2 * MIB
    fake_torch.free(used)
    with saver.region("a"):
        assert fake_torch.allocate(2 * MIB) != used, "such a pause, too, keeps its pools from being entered"
    assert cdll.tms_resume(None) == 0
    assert saver.stats().tags["a"].paused_bytes == 0


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
    free, total = _core.device_memory(0)
    assert testing_utils.get_and_print_gpu_memory("now") == total - free
    assert "(now)" in capsys.readouterr().out

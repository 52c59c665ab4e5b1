"""The extension module itself: its surface, its arguments, its errors, and what it does with the GIL and with references.

What the native core does behind it is tested in tests/c, and through the package in the other files here.
"""

from __future__ import annotations

import ast
import errno
import gc
import importlib.util
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import wait_until

from torch_memory_saver import _core, errors

MIB = 1 << 20
STUB = Path(_core.__file__).with_name("_core.pyi")
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def run_python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh process that imports the same package."""
    environment = os.environ | variables
    environment["PYTHONPATH"] = os.pathsep.join([str(STUB.parent.parent), *filter(None, [environment.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)


def stub_functions() -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.FunctionDef)}


# The surface.


def test_stub_and_module_name_the_same_things() -> None:
    stub = ast.parse(STUB.read_text()).body
    named = {node.name for node in stub if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    named |= {node.target.id for node in stub if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assert named == {name for name in vars(_core) if not name.startswith("__")}


@pytest.mark.parametrize("name", sorted(stub_functions()))
def test_signature_is_the_stub_s(name: str) -> None:
    arguments = stub_functions()[name].args
    defaults = [inspect.Parameter.empty] * (len(arguments.args) - len(arguments.defaults))
    defaults += [ast.literal_eval(default) for default in arguments.defaults]
    expected = list(zip([argument.arg for argument in arguments.args], defaults, strict=True))
    signature = inspect.signature(getattr(_core, name))
    assert [(parameter.name, parameter.default) for parameter in signature.parameters.values()] == expected
    assert getattr(_core, name).__doc__


def test_constants_are_those_of_the_c_interface() -> None:
    assert [_core.BACKUP_NONE, _core.BACKUP_PINNED, _core.BACKUP_MMAP, _core.BACKUP_DISK] == [0, 1, 2, 3]
    states = [_core.STATE_ACTIVE, _core.STATE_PAUSING, _core.STATE_PAUSED, _core.STATE_RESUMING, _core.STATE_DAMAGED]
    assert states == [0, 1, 2, 3, 4]
    assert [_core.HOST_DEFAULT, _core.HOST_RELEASE, _core.HOST_POOL, _core.HOST_RETAIN] == [0, 1, 2, 3]


def test_state_lives_in_the_extension_where_nothing_is_preloaded() -> None:
    assert _core.preloaded is False
    assert os.path.isabs(_core.library_path)
    assert os.path.samefile(_core.library_path, _core.__file__)


def test_two_copies_of_the_module_share_the_state(simulator: Any) -> None:
    specification = importlib.util.spec_from_file_location("torch_memory_saver._core", _core.__file__)
    assert specification is not None and specification.loader is not None
    copy: ModuleType = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(copy)
    address = _core.allocate(MIB, 0)
    assert copy is not _core
    assert copy.HostBuffer is not _core.HostBuffer
    assert copy.find(address) == _core.find(address)
    del copy
    gc.collect()
    assert _core.free(address)


# Arguments.


@pytest.mark.parametrize(
    ("function", "arguments", "exception", "message"),
    [
        ("allocate", (), TypeError, r"allocate\(\) missing required argument 'size'"),
        ("allocate", (1, 0, 0), TypeError, r"allocate\(\) takes at most 2 arguments \(3 given\)"),
        ("allocate", (1.0,), TypeError, r"allocate\(\): size must be an int, not <class 'float'>"),
        ("allocate", ("1",), TypeError, "size must be an int"),
        ("allocate", (-1,), ValueError, r"size must be from 0 to 2\*\*64 - 1, not -1"),
        ("allocate", (1 << 64,), ValueError, r"size must be from 0 to 2\*\*64 - 1"),
        ("allocate", (1, 1 << 31), ValueError, "device must fit 32 bits, not be 2147483648"),
        ("allocate", (1, -(1 << 70)), ValueError, "device must fit 32 bits"),
        ("allocate", (1, None), TypeError, "device must be an int"),
        ("free", (None,), TypeError, r"free\(\): address must be an int"),
        ("free", (-4096,), ValueError, "address must be from 0"),
        ("region_push", ("", 0, True), ValueError, r"region_push\(\): a tag must be a str that is not empty"),
        ("region_push", ("a\0b", 0, True), ValueError, "has no NUL character"),
        ("region_push", ("\ud800", 0, True), UnicodeEncodeError, "surrogates not allowed"),
        ("region_push", (b"a", 0, True), TypeError, "tag must be a str, not <class 'bytes'>"),
        ("region_push", (None, 0, True), TypeError, "tag must be a str"),
        ("region_push", ("a", "pinned", True), TypeError, "backup must be an int"),
        ("region_push", ("a", 4, True), ValueError, "backup"),
        ("region_push", ("a", 0, 1), TypeError, "managed must be a bool"),
        ("region_set", ("", 0, True), ValueError, r"region_set\(\): a tag"),
        ("region_pop", ("1",), TypeError, "depth must be an int"),
        ("region_enter", ("", 0, True), ValueError, r"region_enter\(\): a tag must be a str that is not empty"),
        ("region_enter", ("a", 4, True), ValueError, "backup"),
        ("region_leave", ("1",), TypeError, "level must be an int"),
        ("region_leave", (-1,), (ValueError, OverflowError), "level"),
        ("pause", ("weights", None), TypeError, "tags must be a tuple of str or None, not <class 'str'>"),
        ("pause", (["weights"], None), TypeError, "tags must be a tuple of str or None, not <class 'list'>"),
        ("pause", (("a", 1), None), TypeError, "tags must be a tuple of str or None, not <class 'int'>"),
        ("pause", (("a", ""), None), ValueError, r"pause\(\): a tag"),
        ("pause", (None,), TypeError, "missing required argument 'stream'"),
        ("resume", (None, "0"), TypeError, r"resume\(\): stream must be an int or None"),
        ("resume", (None, -1), ValueError, "stream must be from 0"),
        ("pause", (None, None, 1), TypeError, r"pause\(\): interruptible must be a bool"),
        ("resume", (None, None, False, "1"), TypeError, r"resume\(\): timeout must be a number"),
        ("resume", (None, None, False, -0.5), ValueError, "timeout must be a number of seconds that is not negative"),
        ("resume", (None, None, False, float("nan")), ValueError, "not negative, not nan"),
        ("resume", (None, None, False, 0.0, 1), TypeError, "exclusive must be a bool"),
        ("pause", (None, None, False, "host"), TypeError, r"pause\(\): backup must be an int"),
        ("pause", (None, None, False, None, 1), TypeError, r"pause\(\): find_live must be callable or None"),
        ("pause", (None, None, False, None, None, 1), TypeError, r"pause\(\): progress must be callable or None"),
        ("resume", (None, None, False, 0.0, False, "pool"), TypeError, "host_policy must be an int"),
        ("resume", (None, None, False, 0.0, False, 0, 1), TypeError, "zero must be a bool"),
        ("resume", (None, None, False, 0.0, False, 0, False, "x"), TypeError, "progress must be callable or None"),
        ("region_push", ("a", 0, True, "pool"), TypeError, "host_policy must be an int"),
        ("region_push", ("a", 0, True, 4), ValueError, "host"),
        ("region_set", ("a", 0, True, -1), ValueError, "host"),
        ("capture_begin", ("a", 0, 4), ValueError, "host"),
        ("set_host_policy", (0,), ValueError, "host"),
        ("set_host_policy", (4,), ValueError, "host"),
        ("set_host_policy", ("pool",), TypeError, "policy must be an int"),
        ("reserve_host_memory", (-1,), ValueError, "size must be from 0"),
        ("reserve_host_memory", (1 << 20, 2), ValueError, "device"),
        ("reserve_host_memory", (1 << 20, -2), ValueError, "device"),
        ("host_backup", (0,), TypeError, "missing required argument 'size'"),
        ("set_memory_margin", (-1,), ValueError, "size must be from 0"),
        ("set_retain_backup", ("no",), TypeError, "retain must be a bool"),
        ("set_disk_directory", (3,), TypeError, "str, bytes or os.PathLike"),
        ("set_disk_directory", ("a\0b",), ValueError, "null byte"),
        ("capture_begin", (3, 0), TypeError, "tag must be a str"),
        ("capture_begin_on", ("x",), TypeError, "stream must be an int"),
        ("capture_end", ("x",), TypeError, "identity must be an int"),
        ("capture_end", (1, 1), TypeError, "unless_it_goes_on must be a bool"),
        ("tag_info", ("",), ValueError, r"tag_info\(\): a tag"),
        ("find", ("x",), TypeError, "address must be an int"),
        ("device_memory", (0.0,), TypeError, "device must be an int"),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(
    function: str, arguments: tuple[Any, ...], exception: type[Exception], message: str, simulator: Any
) -> None:
    before = (_core.counters(), _core.region_current())
    with pytest.raises(exception, match=message):
        getattr(_core, function)(*arguments)
    assert (_core.counters(), _core.region_current()) == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _core.pause(None, None, backup=4), "backup"),
        (lambda: _core.pause(None, None, backup=_core.BACKUP_MMAP), "backup"),
        (lambda: _core.pause(None, None, backup=-1), "backup"),
        (lambda: _core.resume(None, None, host_policy=4), "policy"),
        (lambda: _core.resume(None, None, host_policy=-1), "policy"),
    ],
)
def test_choices_that_there_are_not_change_nothing(simulator: Any, call: Callable[[], Any], message: str) -> None:
    _core.allocate(MIB, 0)
    before = _core.segments()
    with pytest.raises(errors.InvalidArgumentError, match=message):
        call()
    assert _core.segments() == before


def test_bad_keywords_are_named() -> None:
    with pytest.raises(TypeError, match=r"find\(\) got an unexpected keyword argument 'size'"):
        _core.find(address=1, size=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"find\(\) got multiple values for argument 'address'"):
        _core.find(1, address=2)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"counters\(\) takes no"):
        _core.counters(all=True)  # type: ignore[call-arg]


def test_arguments_may_be_keywords_and_what_is_an_integer(simulator: Any) -> None:
    class Integer:
        def __index__(self) -> int:
            return MIB

    address = _core.allocate(device=0, size=Integer())  # type: ignore[arg-type]
    row = _core.find(address=address)
    assert row is not None and row[1] == MIB
    depth = _core.region_push(managed=True, tag="keywords", backup=_core.BACKUP_NONE)
    assert _core.region_current() == ("keywords", _core.BACKUP_NONE, True, depth)
    _core.region_pop(depth=depth)


# Memory.


def test_pause_and_resume_with_bytes_through_the_module(simulator: Any) -> None:
    size = 3 * MIB
    reserved = 4 * MIB
    depth = _core.region_push("module bytes", _core.BACKUP_PINNED, True)
    address = _core.allocate(size, 1)
    _core.region_pop(depth)
    content = bytes(range(256)) * (size // 256)
    simulator.write(address, content)
    active = (address, size, reserved, 0, 1, _core.STATE_ACTIVE, _core.BACKUP_PINNED, "module bytes")
    assert _core.find(address + size - 1) == active
    assert _core.segments() == [active]
    assert _core.tag_info("module bytes") == (0, 0)

    report = _core.pause(("module bytes", "nobody"), None)
    assert report[:4] == (1, reserved, size, 1)
    assert isinstance(report[4], float) and report[4] >= 0
    assert simulator.usage(1).physical_bytes == 0
    row = _core.find(address)
    assert row is not None
    assert row[3:] == (size, 1, _core.STATE_PAUSED, _core.BACKUP_PINNED, "module bytes")
    assert _core.tag_info("module bytes") == (1, 1)

    assert _core.resume(None, 0)[:4] == (1, reserved, size, 0)
    assert simulator.read(address, size) == content
    assert simulator.usage(1).physical_bytes == reserved
    assert _core.tag_info("module bytes") == (0, 1)
    assert _core.free(address) is True
    assert _core.free(address) is False
    assert _core.find(address) is None
    assert simulator.usage(1).handles == 0


def test_no_tags_selects_nothing_and_none_selects_everything(simulator: Any) -> None:
    _core.allocate(MIB, 0)
    assert _core.pause((), None)[:4] == (0, 0, 0, 0)
    assert simulator.usage(0).handles == 1
    assert _core.pause(None, None)[:2] == (1, 2 * MIB)
    assert simulator.usage(0).handles == 0


def test_size_zero_and_absurd_sizes(simulator: Any) -> None:
    assert _core.allocate(0, 0) == 0
    assert _core.segments() == []
    for size in (simulator.device_memory + 1, 1 << 46, (1 << 64) - 1):
        with pytest.raises(errors.OutOfMemoryError) as failure:
            _core.allocate(size, 0)
        assert failure.value.bytes == size
    assert simulator.usage(0).reservations == 0


def test_segments_lists_more_than_it_first_has_room_for(simulator: Any) -> None:
    addresses = [_core.allocate(MIB, 0) for _ in range(100)]
    assert [row[0] for row in _core.segments()] == addresses


def test_free_of_what_is_not_managed(simulator: Any) -> None:
    address = _core.allocate(4 * MIB, 0)
    assert _core.free(0xDEAD000) is False
    with pytest.raises(errors.InvalidArgumentError):
        _core.free(address + MIB)
    assert _core.free(address) is True


def test_settings_of_allocations(simulator: Any, tmp_path: Path) -> None:
    _core.set_memory_margin(simulator.device_memory)
    assert _core.get_memory_margin() == simulator.device_memory
    with pytest.raises(errors.OutOfMemoryError):
        _core.allocate(MIB, 0)
    _core.set_memory_margin(0)
    _core.set_retain_backup(True)
    assert _core.get_retain_backup() is True
    _core.set_retain_backup(False)
    assert _core.get_retain_backup() is False
    for policy in (_core.HOST_POOL, _core.HOST_RETAIN, _core.HOST_RELEASE):
        _core.set_host_policy(policy)
        assert _core.get_host_policy() == policy
        assert _core.get_retain_backup() is (policy == _core.HOST_RETAIN)
    _core.set_retain_backup(True)
    assert _core.get_host_policy() == _core.HOST_RETAIN
    _core.set_retain_backup(False)
    assert _core.get_host_policy() == _core.HOST_RELEASE
    _core.set_disk_directory(tmp_path / "made here")  # type: ignore[arg-type]
    assert (tmp_path / "made here").is_dir()


def test_devices(simulator: Any) -> None:
    assert _core.device_count() == simulator.devices
    _core.allocate(MIB, 1)
    assert _core.active_devices() & 2
    free, total = _core.device_memory(1)
    assert (total - free, total) == (2 * MIB, simulator.device_memory)
    _core.refresh_peers()
    with pytest.raises(errors.InvalidArgumentError, match="device"):
        _core.device_memory(simulator.devices)


def test_counters_follow(simulator: Any) -> None:
    before = _core.counters()
    address = _core.allocate(MIB, 0)
    _core.pause(None, None)
    after = _core.counters()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed == {"allocations": 1, "allocations_total": 1, "paused_bytes": 2 * MIB, "pauses_total": 1}
    _core.free(address)
    assert _core.counters()["frees_total"] == before["frees_total"] + 1


# Regions and captures.


def test_regions_nest_and_belong_to_their_thread() -> None:
    outside = _core.region_current()
    outer = _core.region_push("outer", _core.BACKUP_MMAP, True)
    inner = _core.region_push("inn\u00e9r", _core.BACKUP_NONE, False)
    assert _core.region_current() == ("inn\u00e9r", _core.BACKUP_NONE, False, inner)
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(_core.region_current()))
    thread.start()
    thread.join()
    assert seen == [outside]
    _core.region_set("changed", _core.BACKUP_DISK, True)
    assert _core.region_current() == ("changed", _core.BACKUP_DISK, True, inner)
    _core.region_pop(inner)
    assert _core.region_current() == ("outer", _core.BACKUP_MMAP, True, outer)
    _core.region_push("left open", _core.BACKUP_NONE, True)
    _core.region_pop(outer)
    assert _core.region_current() == outside
    assert outside[3] == 0


def test_regions_are_left_in_any_order_on_their_thread() -> None:
    outside = _core.region_current()
    outer = _core.region_enter("outer", _core.BACKUP_MMAP, True)
    inner = _core.region_enter(tag="inner", backup=_core.BACKUP_NONE, managed=False, host_policy=_core.HOST_POOL)
    assert len({0, outer, inner}) == 3
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(_core.region_leave(outer)))
    thread.start()
    thread.join()
    assert seen == [-1]
    assert _core.region_leave(outer) == 1
    assert _core.region_current() == ("inner", _core.BACKUP_NONE, False, 1)
    assert _core.region_leave(level=inner) == 0
    assert _core.region_leave(inner) == -1
    assert _core.region_current() == outside


def test_capture_refuses_pause_and_lends_its_settings(simulator: Any) -> None:
    _core.capture_begin("cuda_graph", _core.BACKUP_NONE)
    address = _core.allocate(MIB, 0)
    row = _core.find(address)
    assert row is not None and row[7] == "cuda_graph"
    with pytest.raises(errors.CaptureInProgressError):
        _core.pause(None, None)
    assert _core.counters()["visible_captures"] == 1
    _core.capture_begin(None, _core.BACKUP_NONE)
    _core.capture_end()
    _core.capture_end()
    assert _core.counters()["visible_captures"] == 0
    assert _core.pause(None, None)[0] == 1


def test_each_capture_ends_by_its_own_name(simulator: Any) -> None:
    first = _core.capture_begin("cuda_graph", _core.BACKUP_NONE)
    second = _core.capture_begin("other", _core.BACKUP_NONE)
    assert first and second and first != second
    assert _core.capture_end(first)
    assert not _core.capture_end(first)
    address = _core.allocate(MIB, 0)
    row = _core.find(address)
    assert row is not None and row[7] == "other"
    begun = _core.capture_begin_on(1 << 40)  # The announced one, of this thread.
    assert _core.counters()["visible_captures"] == 1
    assert _core.capture_end(second) and _core.counters()["visible_captures"] == 1
    assert _core.capture_end(identity=begun, unless_it_goes_on=True) and _core.counters()["visible_captures"] == 0
    _core.free(address)


# Host buffers.


def test_host_buffer_outlives_its_allocation(simulator: Any) -> None:
    depth = _core.region_push("weights", _core.BACKUP_PINNED, True)
    address = _core.allocate(MIB, 0)
    _core.region_pop(depth)
    simulator.write(address, b"\x5a" * MIB)
    assert _core.host_backup(address, MIB) is None
    _core.pause(None, None)
    buffer = _core.host_backup(address + 4096, 8192)
    assert buffer is not None
    assert simulator.read(buffer.address, 8192) == b"\x5a" * 8192
    _core.free(address)
    assert simulator.usage(0).host_bytes >= MIB
    assert simulator.read(buffer.address, 8192) == b"\x5a" * 8192
    del buffer
    wait_until(lambda: simulator.usage(0).host_bytes == 0)


def test_host_buffers_are_made_by_host_backup_only(simulator: Any) -> None:
    with pytest.raises(TypeError, match="cannot create"):
        _core.HostBuffer()
    address = _core.allocate(MIB, 0)
    with pytest.raises(errors.InvalidArgumentError):
        _core.host_backup(address, 2 * MIB)
    with pytest.raises(errors.NotManagedError):
        _core.host_backup(4096, 1)


def test_host_buffer_s_type_is_freed_with_the_last_object(simulator: Any) -> None:
    depth = _core.region_push("weights", _core.BACKUP_MMAP, True)
    address = _core.allocate(MIB, 0)
    _core.region_pop(depth)
    _core.pause(None, None)
    before = sys.getrefcount(_core.HostBuffer)
    buffers = [_core.host_backup(address, MIB) for _ in range(10)]
    during = sys.getrefcount(_core.HostBuffer)
    del buffers
    after = sys.getrefcount(_core.HostBuffer)
    assert (during, after) == (before + 10, before)


# Errors.


def test_errors_carry_what_the_core_knows(simulator: Any) -> None:
    simulator.fail_after("cuMemCreate", 0, 100, OUT_OF_MEMORY)
    depth = _core.region_push("kv_cache", _core.BACKUP_NONE, True)
    with pytest.raises(errors.OutOfMemoryError, match="cuMemCreate") as failure:
        _core.allocate(3 * MIB, 1)
    _core.region_pop(depth)
    error = failure.value
    assert (error.operation, error.driver_call, error.error_name) == ("allocate", "cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")
    assert (error.driver_result, error.device, error.bytes, error.tag) == (OUT_OF_MEMORY, 1, 3 * MIB, "kv_cache")


def test_system_errors_carry_errno(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.BackupIOError) as failure:
        _core.set_disk_directory(str(tmp_path / "file" / "below"))
    assert failure.value.os_error == errno.ENOTDIR


def test_a_tag_cut_in_the_middle_of_a_character_is_still_text(simulator: Any) -> None:
    simulator.fail_after("cuMemCreate", 0, 100, OUT_OF_MEMORY)
    tag = "x" + "\u00e9" * 100  # two bytes a character: the error value's field ends inside one
    depth = _core.region_push(tag, _core.BACKUP_NONE, True)
    with pytest.raises(errors.OutOfMemoryError) as failure:
        _core.allocate(MIB, 0)
    _core.region_pop(depth)
    assert failure.value.tag.startswith("x\u00e9\u00e9")


def test_failure_without_the_errors_module_is_a_runtime_error() -> None:
    program = """
import sys
from torch_memory_saver import _core
sys.modules["torch_memory_saver.errors"] = None
try:
    _core.device_memory(77)
except RuntimeError as error:
    assert type(error) is RuntimeError, type(error)
    assert "77" in str(error), error
    assert isinstance(error.__cause__, ImportError), error.__cause__
    print("raised")
"""
    done = run_python(program)
    assert (done.stdout, done.returncode) == ("raised\n", 0), done.stderr


def test_make_error_that_makes_no_exception_is_told() -> None:
    program = """
from torch_memory_saver import _core, errors
errors.make_error = lambda *arguments: "no exception"
try:
    _core.device_memory(77)
except RuntimeError as error:
    assert "'no exception', not an exception" in str(error.__cause__), error.__cause__
    print("raised")
"""
    done = run_python(program)
    assert (done.stdout, done.returncode) == ("raised\n", 0), done.stderr


# The GIL.


def test_other_threads_run_python_while_pause_waits_for_the_device() -> None:
    # In a process of its own: a pause that keeps the GIL would stop this one for ever.
    program = """
import ctypes, os, threading
from torch_memory_saver import _core
simulator = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])
simulator.tms_sim_launch_add.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_int)
address = _core.allocate(1 << 20, 0)
context = ctypes.c_void_p()
assert simulator.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert simulator.cuCtxPushCurrent_v2(context) == 0
assert simulator.tms_sim_launch_add(None, address, 1 << 20, 1, 1) == 0
thread = threading.Thread(target=_core.pause, args=(None, None))
thread.start()
simulator.tms_sim_wait_until_synchronizing()
print("running", _core.find(address)[5] == _core.STATE_PAUSING, flush=True)
simulator.tms_sim_open_gate(1)
thread.join()
print("paused", _core.find(address)[5] == _core.STATE_PAUSED)
"""
    done = run_python(program)
    assert (done.stdout, done.returncode) == ("running True\npaused True\n", 0), done.stderr

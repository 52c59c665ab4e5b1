"""Guards the extension module: its interface is that of the stub, and it refuses bad arguments of its functions."""

from __future__ import annotations

import ast
import gc
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torch_memory_saver import _core, errors

MIB = 1 << 20
STUB = Path(_core.__file__).with_name("_core.pyi")


def stub_functions() -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.FunctionDef)}


# The interface.


def test_stub_and_module_name_the_same_things() -> None:
    stub = ast.parse(STUB.read_text()).body
    named = {node.name for node in stub if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    named |= {node.target.id for node in stub if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    # A new kind needs no line in the stub.
    kinds = {f"BACKUP_{name.upper()}" for name in _core.BACKUP_KINDS}
    assert {"BACKUP_NONE", "BACKUP_PINNED", "BACKUP_MMAP", "BACKUP_DISK"} <= named & kinds
    assert named | kinds == {name for name in vars(_core) if not name.startswith("__")}


@pytest.mark.parametrize("name", sorted(stub_functions()))
def test_documentation_is_the_stub_s(name: str) -> None:
    declared = stub_functions()[name]
    documentation = ast.get_docstring(declared)
    signature, _, text = getattr(_core, name).__doc__.partition("\n\n")
    (given,) = ast.parse(f"def {signature}: ...").body
    assert documentation is not None and text.split() == documentation.split()
    assert isinstance(given, ast.FunctionDef)
    declared.body = given.body
    assert ast.unparse(given) == ast.unparse(declared)


@pytest.mark.parametrize("name", sorted(stub_functions()))
def test_parameters_are_the_stub_s(name: str) -> None:
    arguments = stub_functions()[name].args
    names = [argument.arg for argument in arguments.args]
    required = names[: len(names) - len(arguments.defaults)]

    def failure(*positional: Any, **keywords: Any) -> str:
        with pytest.raises((TypeError, AttributeError)) as failed:
            getattr(_core, name)(*positional, **keywords)
        return str(failed.value)

    if not names:
        assert "takes no arguments" in failure(None)
        return
    if arguments.vararg is None:
        assert f"{name}() takes at most {len(names)} arguments" in failure(None, *names)
    for index, parameter in enumerate(names):
        assert failure(*names[: index + 1], **{parameter: None}).endswith(f"multiple values for argument '{parameter}'")
    if required:
        assert f"missing required argument '{required[-1]}'" in failure(*required[:-1])
        assert "missing" not in failure(*[object()] * len(required))


def test_rows_have_the_fields_of_the_stub() -> None:
    rows = {
        node.name: [
            field.target.id for field in node.body if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        ]
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["NamedTuple"]
    }
    assert set(rows) == {
        "Segment",
        "Usage",
        "Export",
        "Report",
        "TagInfo",
        "DeviceMemory",
        "DeviceInfo",
        "RegionSettings",
    } | {
        "Event",
        "EventLevel",
        "EventsCopy",
        "Library",
    }
    for name, fields in rows.items():
        kind = getattr(_core, name)
        assert issubclass(kind, tuple)
        assert kind.__module__ == "torch_memory_saver._core"
        assert list(kind.__match_args__) == fields
        row = kind(range(len(fields)))
        assert [getattr(row, field) for field in fields] == list(range(len(fields)))


def test_constants_are_those_of_the_c_interface() -> None:
    assert [_core.BACKUP_NONE, _core.BACKUP_PINNED, _core.BACKUP_MMAP] == [0, 1, 2]
    assert [_core.BACKUP_DISK, _core.BACKUP_SHARED] == [3, 4]
    assert dict(_core.BACKUP_KINDS) == {"none": 0, "pinned": 1, "mmap": 2, "disk": 3, "shared": 4}
    for name, number in _core.BACKUP_KINDS.items():
        assert getattr(_core, f"BACKUP_{name.upper()}") == number
    with pytest.raises(TypeError):
        _core.BACKUP_KINDS["none"] = 1
    states = [_core.STATE_ACTIVE, _core.STATE_PAUSING, _core.STATE_PAUSED, _core.STATE_RESUMING]
    assert [*states, _core.STATE_DAMAGED, _core.STATE_REPAIRING] == [0, 1, 2, 3, 4, 5]
    assert [_core.HOST_DEFAULT, _core.HOST_RELEASE, _core.HOST_POOL, _core.HOST_RETAIN] == [0, 1, 2, 3]


def test_the_extension_holds_the_state_if_nothing_is_preloaded() -> None:
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
        ("region_enter", ("", 0, True), ValueError, r"region_enter\(\): a tag must be a str that is not empty"),
        ("region_enter", ("a\0b", 0, True), ValueError, "has no NUL character"),
        ("region_enter", ("\ud800", 0, True), UnicodeEncodeError, "surrogates not allowed"),
        ("region_enter", (b"a", 0, True), TypeError, "tag must be a str, not <class 'bytes'>"),
        ("region_enter", (None, 0, True), TypeError, "tag must be a str"),
        ("region_enter", ("a", "pinned", True), TypeError, "backup must be an int"),
        ("region_enter", ("a", 5, True), ValueError, "backup"),
        ("region_enter", ("a", 0, 1), TypeError, "managed must be a bool"),
        ("region_set", ("", 0, True), ValueError, r"region_set\(\): a tag"),
        ("region_leave", ("1",), TypeError, "region must be an int"),
        ("region_leave", (-1,), (ValueError, OverflowError), "region"),
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
        ("resume", (None, None, False, 0.0, False, "pool"), TypeError, "host_memory must be an int"),
        ("resume", (None, None, False, 0.0, False, 0, 1), TypeError, "zero must be a bool"),
        ("resume", (None, None, False, 0.0, False, 0, False, "x"), TypeError, "progress must be callable or None"),
        ("region_enter", ("a", 0, True, "pool"), TypeError, "host_policy must be an int"),
        ("region_enter", ("a", 0, True, 4), ValueError, "host"),
        ("region_set", ("a", 0, True, -1), ValueError, "host"),
        ("capture_begin", ("a", 0, 4), ValueError, "host"),
        ("region_enter", ("a", 0, True, 0, None), TypeError, r"region_enter\(\): runs must be a bool"),
        ("region_set", ("a", 0, True, 0, "0"), TypeError, r"region_set\(\): runs must be a bool"),
        ("capture_begin", ("a", 0, 0, 0), TypeError, r"capture_begin\(\): runs must be a bool"),
        ("set_host_policy", (0,), ValueError, "host"),
        ("set_host_policy", (4,), ValueError, "host"),
        ("set_host_policy", ("pool",), TypeError, "policy must be an int"),
        ("reserve_host_memory", (-1,), ValueError, "size must be from 0"),
        ("reserve_host_memory", (1 << 20, 2), ValueError, "device"),
        ("reserve_host_memory", (1 << 20, -2), ValueError, "device"),
        ("host_backup", (0,), TypeError, "missing required argument 'size'"),
        ("set_memory_margin", (-1,), ValueError, "size must be from 0"),
        ("set_retain_backup", ("no",), TypeError, "retain must be a bool"),
        ("set_guard", (1,), TypeError, "on must be a bool"),
        ("set_guard", (), TypeError, "missing required argument 'on'"),
        ("set_disk_directory", (3,), TypeError, "str, bytes or os.PathLike"),
        ("set_disk_directory", ("a\0b",), ValueError, "null byte"),
        ("capture_begin", (3, 0), TypeError, "tag must be a str"),
        ("capture_begin_on", ("x",), TypeError, "stream must be an int"),
        ("capture_end", ("x",), TypeError, "identity must be an int"),
        ("capture_end", (1, 1), TypeError, "unless_it_goes_on must be a bool"),
        ("tag_info", ("",), ValueError, r"tag_info\(\): a tag"),
        ("find", ("x",), TypeError, "address must be an int"),
        ("device_memory", (0.0,), TypeError, "device must be an int"),
        ("device_info", ("0",), TypeError, "device must be an int"),
        ("reserve_host_memory", (1 << 20, "0"), TypeError, "device must be an int"),
        ("host_backup", ("0", 1), TypeError, "address must be an int"),
        ("host_backup", (0, "1"), TypeError, "size must be an int"),
        ("capture_begin", ("a", 0, "pool"), TypeError, "host_policy must be an int"),
        ("capture_begun", ("x",), TypeError, "identity must be an int"),
        ("resume", (None, None, False, -1.0), ValueError, "not negative"),
        ("resume", (None, None, False, 10**400), OverflowError, "int too large"),
        ("count_guard_bytes", (None, None), TypeError, "missing required argument 'ranges'"),
        ("count_guard_bytes", ("a", None, b""), TypeError, "tags must be a tuple of str or None"),
        ("count_guard_bytes", (None, "0", b""), TypeError, "stream must be an int or None"),
        ("count_guard_bytes", (None, None, [1, 2]), TypeError, "bytes"),
        ("count_guard_bytes", (None, None, bytes(24)), ValueError, "ranges must be bytes in groups of 16, not 24"),
        ("count_guard_bytes", (None, None, bytes(16)), ValueError, "ranges must be in order, and not overlap"),
        ("count_guard_bytes", (None, None, b"", 1), TypeError, "interruptible must be a bool"),
        ("check_pause", ("a", None), TypeError, "tags must be a tuple of str or None"),
        ("check_pause", (None, "0"), TypeError, r"check_pause\(\): stream must be an int or None"),
        ("check_pause", (None, None, 1), TypeError, "interruptible must be a bool"),
        ("check_pause", (None, None, False, "host"), TypeError, "backup must be an int"),
        ("check_pause", (None, None, False, None, 1), TypeError, "find_live must be"),
        ("check_pause", (None, None, False, None, None, None, 1), TypeError, "preserves must be a bool"),
        ("resume_begin", (None, "0"), TypeError, r"resume_begin\(\): stream must be an int or None"),
        ("resume_begin", (None, None, False, "1"), TypeError, "timeout must be a number"),
        ("resume_begin", (None, None, False, 0.0, 1), TypeError, "exclusive must be a bool"),
        ("resume_begin", (None, None, False, 0.0, False, "pool"), TypeError, "host_memory must be an int"),
        ("resume_begin", (None, None, False, 0.0, False, 0, 1), TypeError, "zero must be a bool"),
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
        (lambda: _core.pause(None, None, backup=5), "backup"),
        (lambda: _core.pause(None, None, backup=-1), "backup"),
        (lambda: _core.resume(None, None, host_memory=4), "policy"),
        (lambda: _core.resume(None, None, host_memory=-1), "policy"),
    ],
)
def test_unknown_choices_change_nothing(simulator: Any, call: Callable[[], Any], message: str) -> None:
    _core.allocate(MIB, 0)
    before = _core.segments()
    with pytest.raises(errors.InvalidArgumentError, match=message):
        call()
    assert _core.segments() == before


@pytest.mark.parametrize("name", sorted(stub_functions()))
def test_an_argument_too_many_is_named_with_its_function(name: str, simulator: Any) -> None:
    before = (_core.counters(), _core.region_current())
    with pytest.raises(TypeError, match=rf"{name}\(\) (got an unexpected keyword argument 'surplus'|takes no)"):
        getattr(_core, name)(surplus=1)
    assert (_core.counters(), _core.region_current()) == before


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
    assert row is not None and row.bytes == MIB
    identity = _core.region_enter(managed=True, tag="keywords", runs=False, backup=_core.BACKUP_NONE)
    assert _core.region_current() == ("keywords", _core.BACKUP_NONE, True, 1, False)
    assert _core.region_leave(region=identity) == 0

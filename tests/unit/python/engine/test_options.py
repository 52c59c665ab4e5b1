"""Guards that the options of a region, a pause or a resume are one frozen object, and the native core gets all of it."""

from __future__ import annotations

import math
import time
from typing import Any
from unittest.mock import ANY

import pytest

from torch_memory_saver import _core
from torch_memory_saver._engine import engine
from torch_memory_saver._torch.base import region_settings
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError
from torch_memory_saver.options import PauseOptions, RegionOptions, ResumeOptions
from torch_memory_saver.saver import TorchMemorySaver


def tell(done: int, total: int) -> None:
    pass


REGION = RegionOptions.check("a", "mmap", "pool", False)
PAUSE = PauseOptions.check(["a", "b", "a"], backup="host", live_only=1, progress=tell, if_shared="wait", timeout=3)
RESUME = ResumeOptions.check("a", timeout=math.inf, exclusive=1, host_memory="pool", zero=1, progress=tell, wait=1)
#: What the core gets of them.
CORE_PAUSE = {"backup": _core.BACKUP_PINNED, "progress": ANY}
CORE_RESUME = {"timeout": math.inf, "exclusive": True, "host_memory": _core.HOST_POOL, "zero": True, "progress": ANY}


def test_one_timeout_bounds_all_waiting() -> None:
    before = time.monotonic()
    assert before + 5 <= PauseOptions.check(timeout=5).deadline <= time.monotonic() + 5
    assert before + 10 <= PauseOptions.check().deadline <= time.monotonic() + 10
    assert PauseOptions.check(timeout=None).deadline <= time.monotonic()
    assert PauseOptions.check(timeout=math.inf, if_shared="wait").deadline == math.inf
    assert (RESUME.core_now, RESUME.at_once().core_now) == (CORE_RESUME, CORE_RESUME | {"timeout": 0.0})
    waits = ResumeOptions.check(timeout=5)
    assert 0 < waits.core_now["timeout"] <= 5, "what remains for the native core"
    assert waits._replace(deadline=before).core_now == {"timeout": 0.0}
    for none in (ResumeOptions.check(), ResumeOptions.check(timeout=None, zero=False, progress=None)):
        assert (none.core_now, none.deadline) == ({}, math.inf)


def test_an_option_that_does_not_exist_is_a_type_error() -> None:
    for check in (PauseOptions.check, ResumeOptions.check):
        with pytest.raises(TypeError, match="unexpected keyword argument 'surplus'"):
            check(None, surplus=1)


def test_options_are_checked_values_that_stay() -> None:
    assert RegionOptions("a", _core.BACKUP_MMAP, True, _core.HOST_POOL, runs=False) == REGION
    assert RegionOptions.check("a", "mmap", "pool") != REGION, "pools are kept by the options"
    assert PauseOptions(("a", "b"), PAUSE.deadline, CORE_PAUSE, True, "wait") == PAUSE
    assert ResumeOptions(("a",), math.inf, CORE_RESUME, True) == RESUME
    options: Any
    for options in (REGION, PAUSE, RESUME):
        for name in type(options).__annotations__:
            with pytest.raises(AttributeError):
                setattr(options, name, None)


@pytest.mark.parametrize(
    "arguments",
    [
        ("",),
        ("a", "pinned"),
        ("a", "discard"),
        ("a", 1),
        ("a", None, "keep"),
        ("a", None, None, 0),
        ("a", None, None, None),
        ("a", None, None, True, True, True),
        ("a", None, None, True, False, False, "pinned"),
        ("a", "host", None, True, True),
    ],
)
def test_a_region_that_makes_no_sense_has_no_options(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgumentError):
        RegionOptions.check(*arguments)


def test_regions_of_the_same_arguments_are_checked_once() -> None:
    def entries_checked() -> int:
        return engine._known_options.cache_info().misses

    saver = TorchMemorySaver()
    saver.region(tag="checked once", backup="mmap")
    before = entries_checked()
    saver.region(tag="checked once", backup="mmap")
    assert entries_checked() == before
    saver.region(tag="checked once", backup="host")
    assert entries_checked() == before + 1


@pytest.mark.parametrize(
    "wrong", [{"runs": 1}, {"enable_cpu_backup": 1.0}, {"backup": ["host"]}, {"tag": ["a"]}, {"tag": {}}]
)
def test_wrong_arguments_are_refused_after_valid_ones_that_are_equal(wrong: dict[str, Any]) -> None:
    saver = TorchMemorySaver()
    saver.region(tag="a", runs=True, enable_cpu_backup=True)
    saver.region(tag="a", backup="host")
    for _ in range(2):
        with pytest.raises(InvalidArgumentError) as raised:
            saver.region(**{"tag": "a"} | wrong)
        assert raised.value.__context__ is None, "the message is not about a hash"


def test_options_of_ordinary_memory() -> None:
    assert REGION.unmanaged() == RegionOptions("a", _core.BACKUP_MMAP, False, _core.HOST_POOL, runs=False)
    assert RegionOptions.disabled("a") == RegionOptions("a", _core.BACKUP_NONE, False, _core.HOST_DEFAULT)


def test_a_pause_that_keeps_nothing_requests_no_live_bytes() -> None:
    assert PAUSE.asks_for_live
    assert PauseOptions.check().asks_for_live
    assert not PauseOptions.check(backup="discard").asks_for_live
    assert not PauseOptions.check(backup="host", live_only=False).asks_for_live


def test_progress_without_waiting_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^resume: progress needs a call that waits"):
        ResumeOptions.check(progress=tell, wait=False)


def test_a_region_and_a_capture_give_the_core_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("region_enter", "capture_begin"):
        monkeypatch.setattr(_core, name, lambda *arguments, name=name: (name, arguments))
    levels: list[Any] = []
    for options in (REGION, REGION.unmanaged()):
        region_settings.enter_region(levels, options)
    region_settings.enter_region(levels, REGION, follows=True)
    in_order = ("a", _core.BACKUP_MMAP, True, _core.HOST_POOL, False)
    assert levels == [
        ("region_enter", (*in_order, False)),
        ("region_enter", (*in_order[:2], False, *in_order[3:], False)),
        ("region_enter", (*in_order, True)),
    ]
    announcement = region_settings.AnnouncedCapture(REGION)
    announcement._begin()
    assert announcement._identities == [("capture_begin", ("a", _core.BACKUP_MMAP, _core.HOST_POOL, False))]
    monkeypatch.setattr(_core, "capture_end", lambda identity: True)
    announcement._end()


def test_the_end_of_an_inner_capture_leaves_the_outer_one_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "capture_begin", lambda *arguments: 1)
    monkeypatch.setattr(_core, "capture_end", lambda identity: True)
    outer, inner = region_settings.AnnouncedCapture(REGION), region_settings.AnnouncedCapture(None)
    for first, second in ((inner, outer), (outer, inner)):
        outer._begin()
        inner._begin()
        first._end()
        assert region_settings.has_announced_capture()
        second._end()
        assert not region_settings.has_announced_capture()


def test_pauses_and_resumes_give_the_core_every_field(monkeypatch: pytest.MonkeyPatch, saver: TorchMemorySaver) -> None:
    calls: list[Any] = []

    def recorded(name: str, result: Any) -> None:
        def call(*positional: Any, **named: Any) -> Any:
            calls.append((name, positional, named))
            return result

        monkeypatch.setattr(_core, name, call)

    for name in ("pause", "resume"):
        recorded(name, _core.Report((0, 0, 0, 0, 0.0, 0, {})))

    def begin(*positional: Any, **named: Any) -> Any:
        calls.append(("resume_begin", positional, named))
        raise InvalidStateError("no resume has begun")

    monkeypatch.setattr(_core, "resume_begin", begin)
    saver.pause(("a", "b"), backup="host", live_only=False, progress=tell)
    named = {"timeout": math.inf, "exclusive": True, "host_memory": _core.HOST_POOL, "zero": True}
    saver.resume("a", timeout=math.inf, exclusive=True, host_memory="pool", zero=True, progress=tell)
    with pytest.raises(InvalidStateError, match="no resume has begun"):
        saver.resume("a", timeout=math.inf, exclusive=True, host_memory="pool", zero=True, wait=False)
    assert calls == [
        (
            "pause",
            (("a", "b"), None),
            {"interruptible": True, "backup": _core.BACKUP_PINNED, "find_live": None, "progress": ANY, "preserves": False},
        ),
        ("resume", (("a",), None), {**named, "interruptible": True, "progress": ANY}),
        ("resume_begin", (("a",), None), named),
    ]

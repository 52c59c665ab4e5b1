"""Guards the NCCL hook for communicators by handle, on the simulated NCCL: libraries have versions and functions of their
own, and what its owner suspends or destroys is left alone."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from nccl_stubs import HELD, Backend, Group, Nccl
from recorded_hooks import Recorder

from torch_memory_saver import nccl
from torch_memory_saver._engine.calls import hooks as hooks_module
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.distributed import nccl_communicators
from torch_memory_saver.errors import InvalidArgumentError, TorchMemorySaverError

INVALID_USAGE = 5
SUSPEND, RESUME = "ncclCommSuspend", "ncclCommResume"


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module torch without process groups of its own."""
    distributed = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: False)
    module = SimpleNamespace(__version__="2.12.0", device=lambda kind: kind, distributed=distributed)
    monkeypatch.setattr(layer, "imported", lambda: module)
    return module


@pytest.fixture
def in_use(hooks: Recorder, request: pytest.FixtureRequest) -> None:
    """A GPU that this thread uses, with memory for a pause."""
    hooks.allocate("w")
    request.getfixturevalue("context")


@pytest.fixture
def register(hooks: Recorder, in_use: None) -> Any:
    """Registers a hook."""

    def on_pause(*groups: Any) -> nccl.NcclHook:
        made = nccl.suspend_on_pause(groups=groups)
        hooks.keep(made)  # type: ignore[arg-type]  # it has remove(), too
        return made

    return on_pause


@pytest.fixture
def library() -> Nccl:
    return Nccl()


@pytest.fixture
def make(in_use: None) -> Iterator[Callable[..., list[ctypes.c_void_p]]]:
    """Makes a communicator for each device, of ranks in this process, as PyNccl holds them."""
    made: list[tuple[ctypes.CDLL, int]] = []

    def communicators(library: ctypes.CDLL, count: int = 1) -> list[ctypes.c_void_p]:
        handles = (ctypes.c_void_p * count)()
        assert library.ncclCommInitAll(handles, count, None) == 0
        made.extend((library, handle) for handle in handles)
        return [ctypes.c_void_p(handle) for handle in handles]

    yield communicators
    for library, handle in made:
        library.ncclCommAbort(ctypes.c_void_p(handle))


def name_of(handle: ctypes.c_void_p) -> str:
    return hex(handle.value or 0)


def test_a_pause_releases_their_memory(hooks: Recorder, register: Any, make: Any, library: Nccl, simulator: Any) -> None:
    handles = make(library, 2)
    hook = register(*((handle, library) for handle in handles))
    managed = [simulator.usage(device).physical_bytes - HELD for device in range(2)]
    hooks.saver.pause()
    assert hook.suspended == (name_of(handles[0]), name_of(handles[1]))
    assert simulator.usage(0).physical_bytes < managed[0] and simulator.usage(1).physical_bytes == managed[1]
    hooks.saver.resume()
    assert [simulator.usage(device).physical_bytes - HELD for device in range(2)] == managed
    assert hook.suspended == () and hook.what_stays() is None


def test_a_handle_may_be_a_number(hooks: Recorder, register: Any, make: Any, library: Nccl) -> None:
    (handle,) = make(library)
    hook = register((handle.value, library))
    hooks.saver.pause()
    assert hook.suspended == (name_of(handle),)


def test_groups_and_handles_in_the_given_order(
    hooks: Recorder, register: Any, make: Any, library: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    (handle,) = make(library)
    for call in ("suspend", "resume"):
        original = getattr(nccl_communicators.HandleCommunicator, call)

        def record(communicator: Any, call: str = call, original: Any = original) -> None:
            log.append(f"{call} {communicator.name}")
            original(communicator)

        monkeypatch.setattr(nccl_communicators.HandleCommunicator, call, record)
    names = ["world", name_of(handle), "data"]
    hook = register(Group("world", Backend(log, "world")), (handle, library), Group("data", Backend(log, "data")))
    hooks.saver.pause()
    assert hook.suspended == tuple(names)
    hooks.saver.resume()
    assert log == [f"{call} {name}" for call in ("suspend", "resume") for name in names]


def test_an_old_library_beside_a_new_one(
    hooks: Recorder, register: Any, make: Any, simulator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions belong to libraries. The ledger and the log name what stays."""
    old, new = Nccl("/old/libnccl.so.2.28.9", version=22809), Nccl("/new/libnccl.so.2")
    (of_old,), (second,), (of_new,) = (make(each) for each in (old, old, new))
    hook = register((of_old, old), (of_new, new), (second, old))
    sentence = (
        f"The NCCL communicators {name_of(of_old)}, {name_of(second)} keep their device memory during a pause: NCCL 2.28.9 "
        "(libnccl.so.2.28.9) has no ncclCommSuspend, which NCCL 2.29.7 has."
    )
    for _ in range(2):
        hooks.saver.pause()
        assert hook.suspended == (name_of(of_new),)
        assert hooks.saver.ledger().remarks == (sentence,)
        hooks.saver.resume()
    assert hook.what_stays() == sentence
    assert [record.getMessage() for record in caplog.records] == [sentence], "logged once"
    assert simulator.calls(SUSPEND) == simulator.calls(RESUME) == 2
    second.value = None  # its owner has destroyed it
    (remark,) = hooks.saver.ledger().remarks
    assert remark.startswith(f"The NCCL communicator {name_of(of_old)} keeps its device memory")
    hook.remove()
    hook.remove()
    assert hooks.saver.ledger().remarks == ()


@pytest.mark.parametrize("missing", [SUSPEND, RESUME, "ncclCommMemStats"])
def test_a_library_without_a_function(hooks: Recorder, register: Any, make: Any, simulator: Any, missing: str) -> None:
    library = Nccl(without={missing})
    (handle,) = make(library)
    hook = register((handle, library))
    hooks.saver.pause()
    assert simulator.calls(SUSPEND) == 0 and hook.suspended == ()
    assert hook.what_stays() == (
        f"The NCCL communicator {name_of(handle)} keeps its device memory during a pause: NCCL 2.29.7 (libnccl.so.2) has no "
        f"{missing}."
    )


@pytest.mark.parametrize(("code", "version"), [(2804, "2.8.4"), (20903, "2.9.3"), (22906, "2.29.6")])
def test_versions_of_libraries_that_are_too_old(register: Any, make: Any, code: int, version: str) -> None:
    library = Nccl(version=code)
    hook = register((make(library)[0], library))
    assert f"NCCL {version} (libnccl.so.2) has no" in hook.what_stays()


@pytest.mark.parametrize("handle", [0x1234, 0, ctypes.c_void_p(), ctypes.c_void_p(0x1234)])
def test_a_handle_that_is_not_a_communicator(register: Any, library: Nccl, handle: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is not a communicator of libnccl\.so\.2"):
        register((handle, library))
    assert hooks_module._hooks == {"pause": [], "resume": []}


@pytest.mark.parametrize(
    "pair", [("0x1234", "library"), (0x1234, "/opt/nccl/libnccl.so.2"), (0x1234,), (1, "library", 2), (None, "library")]
)
def test_a_pair_of_other_types(register: Any, library: Nccl, pair: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"a pair in groups must be.*pynccl\.nccl\.lib"):
        register(tuple(library if each == "library" else each for each in pair))
    assert hooks_module._hooks == {"pause": [], "resume": []}


def test_a_library_that_is_not_nccl(register: Any, make: Any) -> None:
    library = Nccl("/lib/libother.so", without={"ncclGetVersion"})
    with pytest.raises(InvalidArgumentError, match=r"libother\.so has no ncclGetVersion, so it is not an NCCL library"):
        register((make(library)[0], library))


@pytest.mark.parametrize("tells", [False, True], ids=["refused by NCCL", "without a value"])
@pytest.mark.parametrize("when", ["active", "suspended"])
def test_a_communicator_that_is_destroyed_meanwhile(
    hooks: Recorder, register: Any, make: Any, library: Nccl, caplog: pytest.LogCaptureFixture, when: str, tells: bool
) -> None:
    """The others are suspended and resumed."""
    first, second = make(library), make(library)
    hook = register((first[0], library), (second[0], library))
    name = name_of(first[0])
    if when == "suspended":
        hooks.saver.pause()
        assert len(hook.suspended) == 2
    library.ncclCommDestroy(first[0])
    if tells:
        first[0].value = None
    if when == "active":
        hooks.saver.pause()
        assert hook.suspended == (name_of(second[0]),)
    hooks.saver.resume()
    hooks.saver.pause()
    assert hook.suspended == (name_of(second[0]),)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (0 if tells else 1)
    assert tells or f"NCCL communicator {name} of libnccl.so.2 was destroyed" in warnings[0]


def test_what_its_owner_suspends_is_left_alone(
    hooks: Recorder, register: Any, make: Any, library: Nccl, simulator: Any
) -> None:
    """As vLLM does with enable_nccl_comm_suspend, before a pause and after its resume."""
    (handle,) = make(library)
    hook = register((handle, library))
    assert library.ncclCommSuspend(handle, 1) == 0
    hooks.saver.pause()
    assert hook.suspended == ()
    hooks.saver.resume()
    assert (simulator.calls(SUSPEND), simulator.calls(RESUME)) == (1, 0), "its owner resumes it"
    assert library.ncclCommResume(handle) == 0


def test_what_its_owner_has_resumed_is_not_resumed_again(
    hooks: Recorder, register: Any, make: Any, library: Nccl, simulator: Any
) -> None:
    (handle,) = make(library)
    hook = register((handle, library))
    hooks.saver.pause()
    assert library.ncclCommResume(handle) == 0
    hooks.saver.resume()
    assert hook.suspended == () and simulator.calls(RESUME) == 1
    hooks.saver.pause()
    assert hook.suspended == (name_of(handle),)


def test_two_hooks_with_one_communicator(hooks: Recorder, register: Any, make: Any, library: Nccl, simulator: Any) -> None:
    (handle,) = make(library)
    both = [register((handle, library)) for _ in range(2)]
    hooks.saver.pause()
    assert sorted(hook.suspended for hook in both) == [(), (name_of(handle),)]
    hooks.saver.resume()
    assert simulator.calls(SUSPEND) == simulator.calls(RESUME) == 1


def test_a_suspension_that_fails(hooks: Recorder, register: Any, make: Any, library: Nccl, simulator: Any) -> None:
    """The error says which communicator, of which library, and why."""
    handles = [make(library)[0] for _ in range(2)]
    hook = register(*((handle, library) for handle in handles))
    simulator.fail_after(SUSPEND, 1, 1, INVALID_USAGE)
    with pytest.raises(TorchMemorySaverError) as caught:
        hooks.saver.pause()
    assert str(caught.value).startswith(
        f"ncclCommSuspend of NCCL communicator {name_of(handles[1])} (libnccl.so.2) returned 5 (invalid usage (run with "
        "NCCL_DEBUG=WARN for details)). NCCL's last error: ncclCommSuspend: injected failure"
    )
    assert caught.value.driver_call == SUSPEND
    assert hook.suspended == (name_of(handles[0]),)
    hooks.saver.resume()
    assert hook.suspended == () and simulator.calls(RESUME) == 1


def test_a_resume_that_fails_is_repeated(hooks: Recorder, register: Any, make: Any, library: Nccl, simulator: Any) -> None:
    handles = [make(library)[0] for _ in range(2)]
    hook = register(*((handle, library) for handle in handles))
    hooks.saver.pause()
    simulator.fail_after(RESUME, 0, 1, INVALID_USAGE)
    with pytest.raises(TorchMemorySaverError, match="ncclCommResume of NCCL communicator"):
        hooks.saver.resume()
    assert hook.suspended == tuple(map(name_of, handles))
    hook.resume()
    assert hook.suspended == () and simulator.calls(RESUME) == 3


def test_a_sentence_says_what_nccl_keeps(
    hooks: Recorder, register: Any, make: Any, simulator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The ledger makes no call of NCCL for that, because the communicator may have been destroyed."""
    library = Nccl(kept_bytes=24 << 20)
    (handle,) = make(library)
    hook = register((handle, library))
    assert hook.what_stays() is None
    with caplog.at_level("INFO", "torch_memory_saver"):
        hooks.saver.pause()
    sentence = (
        f"The NCCL communicator {name_of(handle)} keeps 24 MiB of device memory while suspended: NCCL releases no "
        "persistent memory, such as buffers of NVLS."
    )
    assert sentence in [record.getMessage() for record in caplog.records]
    simulator.start_trace()
    assert hook.what_stays() == sentence
    assert hooks.saver.ledger().remarks == (sentence,)
    assert not [call for call in simulator.trace() if call.startswith("nccl")]
    hooks.saver.resume()
    assert hooks.saver.ledger().remarks == ()


def test_a_communicator_that_does_not_block(hooks: Recorder, register: Any, make: Any) -> None:
    """The hook waits until it is suspended."""
    library = Nccl(in_progress=3)
    (handle,) = make(library)
    hook = register((handle, library))
    hooks.saver.pause()
    assert library.polled == 3 and hook.suspended == (name_of(handle),)

"""Guards the NCCL hook against a stub of PyTorch's process groups: which communicators are suspended, in which order on all
ranks, what a failure leaves, and the sentence about those that stay."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from interruptions import every_interruption
from nccl_stubs import Backend, Gloo, Group, OldBackend
from recorded_hooks import Recorder

from torch_memory_saver import _core, nccl
from torch_memory_saver._engine.calls import hooks as hooks_module
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.distributed import nccl_communicators
from torch_memory_saver.errors import InvalidArgumentError, OutOfHostMemoryError

TIMEOUT_S = 60
OLD = (2, 28, 9)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module torch whose process groups the tests make."""
    groups: dict[Group, Any] = {}
    world = SimpleNamespace(pg_map=groups)
    distributed = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: bool(groups),
        distributed_c10d=SimpleNamespace(_world=world),
    )
    module = SimpleNamespace(__version__="2.12.0", device=lambda kind: kind, distributed=distributed)
    monkeypatch.setattr(layer, "imported", lambda: module)
    module.groups = groups
    return module


def add(torch: Any, *groups: Group) -> None:
    torch.groups.update(dict.fromkeys(groups))


@pytest.fixture
def register(hooks: Recorder) -> Any:
    def make(*arguments: Any, **options: Any) -> nccl.NcclHook:
        made = nccl.suspend_on_pause(*arguments, **options)
        hooks.keep(made)  # type: ignore[arg-type]  # it has remove(), too
        return made

    return make


def test_all_groups_in_the_order_of_their_creation(hooks: Recorder, torch: Any, register: Any, log: list[str]) -> None:
    add(torch, *(Group(name, Backend(log, name)) for name in ("world", "data", "tensor")))
    hooks.allocate("w")
    hook = register()
    hooks.saver.pause()
    assert log == ["suspend world", "suspend data", "suspend tensor"]
    assert hook.suspended == ("world", "data", "tensor")
    hooks.saver.resume()
    assert log[3:] == ["resume world", "resume data", "resume tensor"]
    assert hook.suspended == ()
    assert hook.what_stays() is None


def test_a_communicator_follows_the_memory(hooks: Recorder, torch: Any, register: Any, log: list[str]) -> None:
    """Suspended when the memory has gone, and resumed when it is there again."""
    backend = Backend(log, "world")
    add(torch, Group("world", backend))
    hooks.allocate("w")
    seen: list[tuple[str, bool]] = []
    for register_callback in (hooks.saver.on_pause, hooks.saver.on_resume):
        callback = lambda call: seen.append((call.operation, backend.is_suspended))  # noqa: E731
        hooks.keep(register_callback(None, "before", callback))
    register()
    for register_callback in (hooks.saver.on_pause, hooks.saver.on_resume):
        hooks.keep(register_callback(None, "after", lambda call: seen.append((call.operation, backend.is_suspended))))
    hooks.saver.pause()
    hooks.saver.resume()
    # Registered last, the after-callbacks here come first.
    assert seen == [("pause", False), ("pause", False), ("resume", True), ("resume", True)]
    assert log == ["suspend world", "resume world"]


def test_a_pause_that_fails_suspends_nothing(hooks: Recorder, torch: Any, register: Any, log: list[str]) -> None:
    add(torch, Group("world", Backend(log, "world")))
    hooks.allocate("w")
    register()
    hooks.on_pause("p")
    hooks.raises["p", "before"] = OutOfHostMemoryError("no")
    with pytest.raises(OutOfHostMemoryError):
        hooks.saver.pause()
    assert log == []
    hooks.raises.clear()
    hooks.saver.pause()
    assert log == ["suspend world"]


def test_with_several_tags_the_first_pause_suspends_and_the_first_resume_resumes(
    hooks: Recorder, torch: Any, register: Any, log: list[str]
) -> None:
    add(torch, Group("world", Backend(log, "world")))
    hooks.allocate("w", "kv", "other")
    register([hooks.tag("w"), hooks.tag("kv")])
    hooks.saver.pause(hooks.tag("other"))
    assert log == []
    hooks.saver.pause(hooks.tag("kv"))
    hooks.saver.pause(hooks.tag("w"))
    assert log == ["suspend world"]
    hooks.saver.resume(hooks.tag("w"))
    hooks.saver.resume()
    assert log == ["suspend world", "resume world"]


def test_given_groups_in_the_given_order(hooks: Recorder, torch: Any, register: Any, log: list[str]) -> None:
    groups = [Group(name, Backend(log, name)) for name in ("world", "data", "tensor")]
    add(torch, *groups)
    hooks.allocate("w")
    register(groups=iter([groups[2], groups[0]]))
    hooks.saver.pause()
    hooks.saver.resume()
    assert log == ["suspend tensor", "suspend world", "resume tensor", "resume world"]


def test_groups_without_a_communicator_are_left_alone(hooks: Recorder, torch: Any, register: Any, log: list[str]) -> None:
    """Groups of other backends, for the CPU only, and those that nothing was sent with yet."""
    lazy = Backend(log, "lazy")
    lazy.pointer = 0
    add(torch, Group("cpu", None), Group("gloo", Gloo()), Group("lazy", lazy), Group("world", Backend(log, "world")))
    hooks.allocate("w")
    hook = register()
    hooks.saver.pause()
    assert log == ["suspend world"]
    lazy.pointer = 1
    hooks.saver.resume()
    assert log == ["suspend world", "resume world"], "only what was suspended is resumed"
    assert hook.what_stays() is None


@pytest.mark.parametrize(
    ("names", "subject"), [("a", "communicator of process group 'a' keeps its"), ("ab", "'a', 'b' keep their")]
)
def test_without_the_interface_one_sentence_says_what_stays(
    hooks: Recorder, torch: Any, register: Any, names: str, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.__version__ = "2.11.0"
    add(torch, *(Group(name, OldBackend()) for name in names))
    hooks.allocate("w")
    hook = register()
    sentence = hook.what_stays()
    assert sentence is not None and subject in sentence
    assert sentence.endswith("PyTorch 2.11.0 has no suspend() of a process group's backend, which PyTorch 2.12 has.")
    for _ in range(2):
        hooks.saver.pause()
        hooks.saver.resume()
    assert [record.getMessage() for record in caplog.records] == [sentence], "logged once"
    assert hook.suspended == ()


def test_an_old_nccl_is_not_asked(hooks: Recorder, torch: Any, register: Any, log: list[str]) -> None:
    add(torch, Group("old", Backend(log, "old", version=OLD)), Group("new", Backend(log, "new")))
    hooks.allocate("w")
    hook = register()
    hooks.saver.pause()
    assert log == ["suspend new"]
    assert hook.what_stays() == (
        "The NCCL communicator of process group 'old' keeps its device memory during a pause: NCCL 2.28.9 has no "
        "ncclCommSuspend, which NCCL 2.29.7 has."
    )


def test_what_its_owner_has_suspended_is_left_alone(hooks: Recorder, torch: Any, register: Any, log: list[str]) -> None:
    theirs, ours = Backend(log, "theirs"), Backend(log, "ours")
    add(torch, Group("theirs", theirs), Group("ours", ours))
    hooks.allocate("w")
    hook = register()
    theirs.suspend()
    hooks.saver.pause()
    assert hook.suspended == ("ours",)
    ours.resume()
    hooks.saver.resume()
    assert hook.suspended == () and theirs.is_suspended
    assert log == ["suspend theirs", "suspend ours", "resume ours"]


def test_a_sentence_says_what_nccl_keeps_of_a_suspended_group(
    hooks: Recorder, torch: Any, register: Any, log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    backends = [Backend(log, name) for name in ("a", "b")]
    for backend in backends:
        backend.kept_bytes = 12 << 20
    add(torch, *(Group(backend.own_name, backend) for backend in backends))
    hooks.allocate("w")
    hook = register()
    assert hook.what_stays() is None, "not known before a suspension"
    with caplog.at_level("INFO", "torch_memory_saver"):
        hooks.saver.pause()
    sentence = (
        "The NCCL communicators of process groups 'a', 'b' keep 24 MiB of device memory while suspended: NCCL releases no "
        "persistent memory, such as buffers of NVLS."
    )
    assert hook.what_stays() == sentence
    assert [record.getMessage() for record in caplog.records if "NCCL" in record.getMessage()] == [sentence]
    hooks.saver.resume()
    assert hook.what_stays() is None


def test_the_second_backend_of_pytorch(hooks: Recorder, torch: Any, register: Any, log: list[str]) -> None:
    """PyTorch 2.15 makes it by default, and it does not tell the version of NCCL."""
    backend = Backend(log, "world")
    backend.type_name, backend.get_runtime_nccl_version = "nccl2", None  # type: ignore[method-assign,assignment]
    add(torch, Group("world", backend))
    hooks.allocate("w")
    hook = register()
    hooks.saver.pause()
    assert hook.suspended == ("world",) and hook.what_stays() is None
    hooks.saver.resume()
    assert log == ["suspend world", "resume world"]


def test_nothing_where_there_are_no_groups(
    hooks: Recorder, torch: Any, register: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks.allocate("w")
    hook = register()
    hooks.saver.pause()
    assert hook.suspended == () and hook.what_stays() is None
    monkeypatch.setattr(layer, "imported", lambda: None)
    hooks.saver.resume()
    assert hook.what_stays() is None


def test_a_group_that_fails_to_suspend(hooks: Recorder, torch: Any, register: Any, log: list[str]) -> None:
    """The pause is complete, and the next resume resumes those before it."""
    groups = [Group(name, Backend(log, name)) for name in ("world", "data", "tensor")]
    add(torch, *groups)
    hooks.allocate("w")
    hook = register()
    groups[1].backend.raises = RuntimeError("NCCL error")
    with pytest.raises(RuntimeError, match="NCCL error"):
        hooks.saver.pause()
    assert hooks.states() == {_core.STATE_PAUSED}
    assert hook.suspended == ("world",)
    hooks.saver.resume()
    assert log == ["suspend world", "resume world"]


@pytest.mark.parametrize("exception", [KeyboardInterrupt, TimeoutError])
def test_a_signal_at_the_end_of_a_suspension(
    hooks: Recorder, torch: Any, register: Any, log: list[str], exception: type[BaseException]
) -> None:
    """The call blocks until all ranks have made it, so a handler runs when it returns."""
    backend = Backend(log, "world")
    add(torch, Group("world", backend))
    hooks.allocate("w")
    hook = register()
    backend.raises_after = exception()
    with pytest.raises(exception):
        hooks.saver.pause()
    assert backend.is_suspended and hook.suspended == ("world",)
    backend.raises_after = None
    hooks.saver.resume()
    assert (log, hook.suspended) == (["suspend world", "resume world"], ())


def test_a_signal_at_the_end_of_a_resume_changes_no_order(torch: Any, register: Any, log: list[str]) -> None:
    """The ranks resume in the same order: each call waits for the others."""
    backends = [Backend(log, name) for name in ("world", "data")]
    add(torch, *(Group(backend.own_name, backend) for backend in backends))
    hook = register()
    hook.suspend()
    backends[1].raises_after = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        hook.resume()
    backends[1].raises_after = None
    hook.suspend()
    assert hook.suspended == ("world", "data")


def test_every_interruption_of_a_suspension(torch: Any, register: Any, log: list[str]) -> None:
    """After each of them, all that is suspended is resumed, and the lock is free."""
    backends = [Backend(log, name) for name in ("world", "data")]
    add(torch, *(Group(backend.own_name, backend) for backend in backends))
    hook = register()
    for _ in every_interruption(hook.suspend):
        assert hook.suspended or not any(backend.is_suspended for backend in backends)
        hook.resume()
        assert not any(backend.is_suspended for backend in backends)
    assert hook.suspended == ("world", "data")
    for _ in every_interruption(hook.resume):
        hook.suspend()
    assert hook.suspended == () and not any(backend.is_suspended for backend in backends)


def test_a_finalizer_may_resume_during_a_suspension(torch: Any, register: Any, log: list[str]) -> None:
    """The garbage collector may run one on a thread that suspends."""
    backends = [Backend(log, name) for name in ("world", "data")]
    add(torch, *(Group(backend.own_name, backend) for backend in backends))
    hook = register()
    backends[1].before = hook.resume
    hook.suspend()
    assert (log, hook.suspended) == (["suspend world", "resume world", "suspend data"], ("data",))


def test_a_group_that_fails_to_resume(hooks: Recorder, torch: Any, register: Any, log: list[str]) -> None:
    groups = [Group(name, Backend(log, name)) for name in ("world", "data", "tensor")]
    add(torch, *groups)
    hooks.allocate("w")
    hook = register()
    hooks.saver.pause()
    groups[1].backend.raises = RuntimeError("NCCL error")
    with pytest.raises(RuntimeError, match="NCCL error"):
        hooks.saver.resume()
    assert hooks.states() == {_core.STATE_ACTIVE}
    assert hook.suspended == ("data", "tensor")
    groups[1].backend.raises = None
    hook.resume()
    assert log[3:] == ["resume world", "resume data", "resume tensor"]


def test_remove_leaves_what_is_suspended(hooks: Recorder, torch: Any, register: Any, log: list[str]) -> None:
    add(torch, Group("world", Backend(log, "world")))
    hooks.allocate("w")
    hook = register()
    hooks.saver.pause()
    hook.remove()
    hooks.saver.resume()
    assert hook.suspended == ("world",)
    hook.resume()
    hooks.saver.pause()
    assert log == ["suspend world", "resume world"]
    assert hooks_module._hooks == {"pause": [], "resume": []}


def test_all_ranks_suspend_in_the_same_order(hooks: Recorder, torch: Any, register: Any) -> None:
    """Each waits in each call for the other, as NCCL does: another order would be a deadlock."""
    barriers = {name: threading.Barrier(2) for name in ("world", "data", "tensor")}
    logs: list[list[str]] = [[], []]
    hooks.allocate("rank0", "rank1")
    for rank, log in enumerate(logs):
        groups = [Group(name, Backend(log, name, barrier)) for name, barrier in barriers.items()]
        register(hooks.tag(f"rank{rank}"), groups=groups)
    with ThreadPoolExecutor(2) as pool:
        for operation in (hooks.saver.pause, hooks.saver.resume):
            for call in [pool.submit(operation, hooks.tag(f"rank{rank}")) for rank in range(2)]:
                call.result(TIMEOUT_S)
    assert logs[0] == logs[1] == [f"{call} {name}" for call in ("suspend", "resume") for name in barriers]


def test_a_rank_whose_pause_fails_is_waited_for(hooks: Recorder, torch: Any, register: Any) -> None:
    barrier = threading.Barrier(2)
    logs: list[list[str]] = [[], []]
    hooks.allocate("rank0", "rank1")
    for rank, log in enumerate(logs):
        register(hooks.tag(f"rank{rank}"), groups=[Group("world", Backend(log, "world", barrier))])
    hooks.on_pause("p", hooks.tag("rank1"))
    hooks.raises["p", "before"] = OutOfHostMemoryError("no")
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(hooks.saver.pause, hooks.tag("rank0"))
        with pytest.raises(OutOfHostMemoryError):
            hooks.saver.pause(hooks.tag("rank1"))
        assert logs == [[], []]
        hooks.raises.clear()
        hooks.saver.pause(hooks.tag("rank1"))
        other.result(TIMEOUT_S)
    assert logs == [["suspend world"], ["suspend world"]]


def test_two_threads_that_pause_different_tags_suspend_once(
    hooks: Recorder, torch: Any, register: Any, log: list[str]
) -> None:
    add(torch, Group("world", Backend(log, "world")))
    hooks.allocate("a", "b")
    register()
    with ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(hooks.saver.pause, hooks.tag(name)) for name in "ab"]:
            call.result(TIMEOUT_S)
    assert log == ["suspend world"]


def test_what_cannot_be_registered(torch: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="tag must be"):
        nccl.suspend_on_pause(3)  # type: ignore[arg-type]
    assert hooks_module._hooks == {"pause": [], "resume": []}


def test_the_memory_that_nccl_tells_of(hooks: Recorder, torch: Any, register: Any, log: list[str]) -> None:
    """In the ledger, of each communicator that tells its figure; what was suspended is not held."""
    hooks.allocate("w")
    assert nccl_communicators.describe_held() is None
    backend = Backend(log, "world")
    backend.kept_bytes = 4 << 20
    add(torch, Group("world", backend), Group("old", Backend(log, "old", version=OLD)), Group("cpu", Gloo()))
    sentence = "The NCCL communicator of process group 'world' holds 20 MiB of device memory by NCCL's own figure."
    assert nccl_communicators.describe_held() == sentence
    assert sentence in str(hooks.saver.ledger()).splitlines()
    register()
    hooks.saver.pause()
    assert str(nccl_communicators.describe_held()).startswith("The NCCL communicator of process group 'world' holds 4 MiB")
    backend.kept_bytes = 0
    assert nccl_communicators.describe_held() is None


def test_a_communicator_that_ends_meanwhile_has_no_figure(torch: Any, log: list[str]) -> None:
    first, second = Backend(log, "first"), Backend(log, "second")
    add(torch, Group("first", first), Group("second", second))
    first.memory_stats = _aborted  # type: ignore[method-assign]
    assert "'second' holds" in str(nccl_communicators.describe_held())


def _aborted() -> dict[str, int]:
    raise RuntimeError("NCCL communicator was aborted")

"""Guards entries and exits of regions against signals whose handler raises, between any two bytecodes of this package."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
from fake_torch import DEFAULT, FakeGraph, FakeTorch
from interruptions import Interruption, every_interruption, interrupted
from other_threads import in_thread

from torch_memory_saver import _core
from torch_memory_saver._engine import engine
from torch_memory_saver._torch.memory.pause_preparation import PausePreparation
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


class Checks:
    """What must hold after each interruption: no region is in force, and everything can be used."""

    def __init__(self, saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
        self._saver = saver
        self._torch = fake_torch
        self._store = store
        self._alive: set[Any] | None = None
        with saver.region("a"):
            fake_torch.allocate(2 * MIB)

    def keep_pools(self) -> None:
        """From now on every pool is used again, and none is lost."""
        self._alive = self._torch.alive

    def check(self, place: int) -> None:
        torch, store = self._torch, self._store
        assert _core.region_current().depth == 0, place
        assert store.regions.stack() == [], place
        assert torch.routings == [], place
        assert store.regions._admission.frames == {}, place
        assert torch.threads_without_autograds == set(), place
        ordinary = torch.allocate(2 * MIB)
        assert torch.pool_of(ordinary) == DEFAULT, place
        torch.free(ordinary)
        idle = [pool.id for pool in store.idle_pools.select()]
        assert len(idle) == len(set(idle)), place
        if self._alive is not None:
            assert self._alive == set(idle), place
        # A pause by another thread neither waits nor fails, and a region can be entered after it.
        in_thread(self._pause)
        self._saver.resume("a")
        assert store.regions._admission.pauses == [], place

    def _pause(self) -> None:
        for lock in (self._store.idle_pools.lock, engine.graph_pools._lock):
            assert lock.acquire(blocking=False), "an interruption has left a lock held"
            lock.release()
        self._saver.pause("a")


#: From one interruption to the next, in places: of ordinary runs, and of the variant that `make faults` runs with each.
STEP, SHORT_STEP = 17, 5


@pytest.fixture(
    params=[
        pytest.param(((2, 14), STEP), id="torch-2.14"),
        pytest.param(((2, 14), None), id="torch-2.14, more bytecodes", marks=[pytest.mark.slow, pytest.mark.faults]),
        pytest.param(((2, 11), STEP), id="torch-2.11", marks=pytest.mark.slow),
        pytest.param(((2, 8), STEP), id="torch-2.8", marks=pytest.mark.slow),
    ]
)
def variant(request: pytest.FixtureRequest) -> tuple[tuple[int, int], int | None]:
    """A release of PyTorch, and the places from one interruption to the next."""
    variant: tuple[tuple[int, int], int | None] = request.param
    return variant


@pytest.fixture
def release(variant: tuple[tuple[int, int], int | None]) -> tuple[int, int]:
    """In place of conftest.py's."""
    return variant[0]


@pytest.fixture
def step(variant: tuple[tuple[int, int], int | None], full: bool) -> int:
    return variant[1] or (1 if full else SHORT_STEP)


@pytest.fixture
def checks(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> Checks:
    return Checks(saver, fake_torch, store)


def _nothing() -> None:
    pass


def _fail() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("devices", "body"),
    [
        (1, _nothing),
        (2, _fail),
        pytest.param(1, _fail, marks=pytest.mark.slow),
        pytest.param(2, _nothing, marks=pytest.mark.slow),
    ],
)
def test_a_region(
    saver: TorchMemorySaver, fake_torch: FakeTorch, checks: Checks, devices: int, body: Callable[[], None], step: int
) -> None:
    fake_torch.devices = devices
    region = saver.region("a")

    def use() -> None:
        with contextlib.suppress(ZeroDivisionError), region:
            body()

    use()
    checks.keep_pools()
    for place in every_interruption(use, step):
        checks.check(place)
        assert region._frames == []  # type: ignore[attr-defined]
    checks.check(-1)
    assert place > 100


@pytest.mark.slow
def test_nested_regions(saver: TorchMemorySaver, fake_torch: FakeTorch, checks: Checks, step: int) -> None:
    def use() -> None:
        with saver.region("a"), saver.region("b"), saver.region("a"):
            pass

    use()
    checks.keep_pools()
    for place in every_interruption(use, step):
        checks.check(place)


def test_the_outer_region_stays_in_force(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, checks: Checks, step: int
) -> None:
    """An interrupted entry or exit of an inner region changes nothing about the outer one."""

    def use() -> None:
        with inner:
            pass

    inner = saver.region("b")
    with saver.region("a"):
        use()
        routed, stack = list(fake_torch.routings), list(store.regions.stack())
        for place in every_interruption(use, step):
            assert fake_torch.routings == routed, place
            assert store.regions.stack() == stack, place
            assert _core.region_current()[:1] == ("a",), place
            assert _core.region_current().depth == 1, place
            assert len(fake_torch.threads_without_autograds) == 1, place
    checks.check(-1)


def test_disable(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, checks: Checks, step: int) -> None:
    def use() -> None:
        with saver.disable():
            fake_torch.free(fake_torch.allocate(2 * MIB))

    at, interruptions = 0, True
    while interruptions:
        with saver.region("a"):
            routed = list(fake_torch.routings)
            interruptions = interrupted(use, at)
            assert fake_torch.routings == routed, at
            assert _core.region_current().managed, at
        # What an interrupted exit could not give back has been given back now.
        assert len([row for row in fake_torch.rows if row.pool != DEFAULT]) == 1, at
        checks.check(at)
        at += step
    assert at > 100


def test_a_first_entry_makes_pools(saver: TorchMemorySaver, fake_torch: FakeTorch, checks: Checks, step: int) -> None:
    fake_torch.devices = 2
    fresh = iter(range(10**6))

    def use() -> None:
        with saver.region(f"tag {next(fresh)}"):
            pass

    for place in every_interruption(use, step):
        checks.check(place)
        assert fake_torch.device == 0, place


def test_an_entry_while_the_tag_is_paused(saver: TorchMemorySaver, fake_torch: FakeTorch, checks: Checks, step: int) -> None:
    """The pool with paused memory stays idle, and an empty one is found."""

    def use() -> None:
        with saver.region("a"):
            pass

    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
        with saver.region("a"):
            pass
    saver.pause("a")
    use()
    checks.keep_pools()
    for place in every_interruption(use, step):
        checks.check(place)
        saver.pause("a")


def test_a_pause_keeps_no_region_from_being_entered(store: PoolStore, checks: Checks, step: int) -> None:
    def use() -> None:
        with PausePreparation(store, None, ("a",)):
            pass

    for place in every_interruption(use, step):
        checks.check(place)


def test_suspended_routings_are_in_force_again(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, checks: Checks, step: int
) -> None:
    fake_torch.devices = 2
    with saver.region("a"), saver.region("b"):
        routed = sorted(fake_torch.routings)
        for place in every_interruption(lambda: store.empty_torch_cache(fake_torch), step):  # type: ignore[arg-type]
            assert sorted(fake_torch.routings) == routed, place


@pytest.mark.parametrize("release", [(2, 11)], ids=["torch-2.11"])
def test_pools_without_memory(fake_torch: FakeTorch, store: PoolStore, checks: Checks) -> None:
    """An interruption may cost an empty pool of each device. It leaves nothing routed, and no pool with two uses."""
    fake_torch.devices = 2
    idle = {pool.id for pool in store.idle_pools.select()}
    for place in every_interruption(lambda: store.empty_retired(fake_torch)):  # type: ignore[arg-type]
        spare = [pool.id for pools in store._spare_pools for pool in pools]
        assert len(spare) == len(set(spare)), place
        checks.check(place)
        assert {pool.id for pool in store.idle_pools.select()} == idle, place
    assert store._spare_pools


def test_a_decorated_function(saver: TorchMemorySaver, fake_torch: FakeTorch, checks: Checks, step: int) -> None:
    @saver.region("a")  # type: ignore[operator]
    def use() -> None:
        pass

    use()
    checks.keep_pools()
    for place in every_interruption(use, step):
        checks.check(place)


def test_a_capture(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, checks: Checks, step: int) -> None:
    """Nothing of an interrupted one stays: no capture, stream, level, announcement, or stopped collector."""
    before = gc.get_threshold()

    graphs: list[FakeGraph] = []  # their end is not what is interrupted

    def use() -> None:
        graphs.append(FakeGraph())
        with saver.cuda_graph(graphs[-1], tag="graphs"):
            pass

    use()
    for place in every_interruption(use, step):
        graphs.clear()
        assert fake_torch.capturing == [], place
        assert fake_torch.stream == "main stream", place
        assert _core.counters()["visible_captures"] == 0, place
        assert gc.get_threshold() == before, place
        checks.check(place)
    assert place > 500
    graphs.clear()
    gc.collect()
    store.idle_pools.retire_postponed(fake_torch)  # type: ignore[arg-type]
    assert not engine.graph_pools._by_id


def test_a_capture_inside_a_region(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, checks: Checks, step: int
) -> None:
    graphs: list[FakeGraph] = []

    def use() -> None:
        graphs.append(FakeGraph())
        with saver.cuda_graph(graphs[-1], tag="graphs"):
            pass

    with saver.region("a"):
        use()
        routed = list(fake_torch.routings)
        for place in every_interruption(use, step):
            graphs.clear()
            assert fake_torch.routings == routed, place
            assert _core.region_current()[:1] == ("a",), place
            assert _core.region_current().depth == 1, place
    checks.check(-1)


def test_a_pool_whose_routing_cannot_be_ended(
    saver: TorchMemorySaver, fake_torch: FakeTorch, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised, after everything else has been left."""
    fake_torch.devices = 2
    end, failed = fake_torch.end_routing, []

    def end_routing(device: int, pool: Any) -> None:
        end(device, pool)
        if not failed:
            failed.append(device)
            raise RuntimeError("end: injected failure")

    with pytest.raises(RuntimeError, match="end: injected failure"), saver.region("a"):
        monkeypatch.setattr(fake_torch, "end_routing", end_routing)
    assert failed == [0]
    checks.check(-1)


def test_a_handler_that_raises_in_the_handling_of_an_error(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    """Ctrl-C while a failed entry is undone replaces the error, which is its context."""
    fake_torch.fail_begin_of_new_pools_on = 0
    raised: list[BaseException] = []

    def use() -> None:
        try:
            saver.region("a").__enter__()
        except RuntimeError:
            pass
        except Interruption as error:
            raised.append(error)
            raise

    at = 0
    while interrupted(use, at):
        at += 1
    assert any(isinstance(error.__context__, RuntimeError) for error in raised)

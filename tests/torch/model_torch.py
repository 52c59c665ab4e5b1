"""Random operations on tensors in regions against a plain Python model, through PyTorch's CUDA build on the simulated GPU.

The machine of tests/model, one layer up: what the pools of PyTorch do with regions, pauses and each other. test_model.py
lets hypothesis choose; as a program it runs for a long time (`make torch-soak`):

    python -m torch_memory_saver simulate -- python tests/torch/model_torch.py --seconds 600
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torch_memory_saver
from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "model"))

from model_choice import RandomChoice
from model_machine import OPERATING_SYSTEM, OUT_OF_MEMORY, Machine
from model_tensors import (
    MAX_TENSORS,
    POLICIES,
    SIZES,
    TAGS,
    drop,
    empty_cache,
    empty_torch_cache,
    enter_disable,
    enter_region,
    leave,
    make,
    make_on_another_thread,
    payload,
    write,
)
from torch_world import TorchWorld

# Pause and resume.


def choose_tags(choose: Any) -> tuple[str, ...] | None:
    kind = choose.integer(0, 3)
    return None if kind == 0 else (choose.pick(TAGS),) if kind < 3 else tuple({choose.pick(TAGS), choose.pick(TAGS)})


def pause(world: TorchWorld, choose: Any) -> bool:
    tags = choose_tags(choose)
    selected = world.selected(tags, True)
    options: dict[str, Any] = {}
    if choose.integer(0, 2) == 0:
        options["backup"] = choose.pick(("host", "mmap", "disk", "discard"))
    if choose.integer(0, 2) == 0:
        options["live_only"] = False
    paused = world.selected(tags, False) if options.get("backup") == "discard" else []
    world.pausing = options
    call = f"pause({tags}, {options})"
    try:
        report = world.act(lambda: saver.pause(tags, **options))
    except errors.TorchMemorySaverError as error:
        world.say(f"{call} -> {error}")
        assert world.rule is not None, error
        for each in paused:
            if saver.get_cpu_backup(each.tensor) is None:
                world.gave_up(each)
        world.observe()
        return True
    world.say(f"{call} -> {report}")
    assert bool(report.allocations) >= bool(selected)
    for each in paused:
        world.gave_up(each)
    for each in selected:
        world.paused(each)
    return True


def call_resume(tags: tuple[str, ...] | None, options: dict[str, Any], how: int) -> Any:
    """`how` 0: what is queued on the current stream meanwhile runs after it; 1: waited for later."""
    if how > 1:
        return saver.resume(tags, **options)
    pending = saver.resume(tags, wait=False, **options)
    if how == 0:
        pending.wait_stream()
    return pending.wait()


def resume(world: TorchWorld, choose: Any) -> bool:
    tags = choose_tags(choose)
    selected = world.selected(tags, False)
    options: dict[str, Any] = {}
    if choose.integer(0, 2) == 0:
        options["zero"] = True
    if choose.integer(0, 2) == 0:
        options["host_memory"] = choose.pick(POLICIES)
    world.resuming = options
    how = choose.integer(0, 3)
    call = f"resume({tags}, {options}), {('pending, after it', 'pending')[how] if how < 2 else 'waiting'}"
    try:
        report = world.act(lambda: call_resume(tags, options, how))
    except errors.TorchMemorySaverError as error:
        world.say(f"{call} -> {error}")
        assert world.rule is not None, error
        world.observe()
        return True
    world.say(f"{call} -> {report}")
    for each in selected:
        world.resumed(each)
    if world.rule is not None:
        world.observe()
    return True


def set_host_memory(world: TorchWorld, choose: Any) -> bool:
    world.memory = choose.pick(POLICIES)
    world.say(f"host_memory = {world.memory}")
    saver.host_memory = world.memory
    return True


def reserve_host_memory(world: TorchWorld, choose: Any) -> bool:
    """In the background, concurrently with other operations."""
    size = choose.integer(0, 32) << 20
    world.say(f"reserve_host_memory({size})")
    saver.reserve_host_memory(size)
    return True


def pause_of_an_inhabited_tag(world: TorchWorld, choose: Any) -> bool:
    """While another thread is inside a region of the tag the pause is refused, and nothing changes."""
    tag = choose.pick(TAGS)
    inside, done = threading.Event(), threading.Event()

    def work() -> None:
        world.entered.add(tag)
        with saver.region(tag=tag):
            inside.set()
            done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    world.say(f"pause({tag}), in which another thread is")
    try:
        saver.pause(tag, timeout=0)
    except errors.InvalidStateError:
        return True
    finally:
        done.set()
        thread.join()
    raise AssertionError("paused what another thread allocates in")


def pause_held(world: TorchWorld, choose: Any) -> bool:
    """Another thread's pause waits for the device; meanwhile tensors of its tag are freed, and this thread allocates."""
    candidates = [each for each in world.tensors if each.tag is not None and each.active]
    taken = {tag for _, tag, *_ in world.levels}
    candidates = [each for each in candidates if each.tag not in taken]
    if not candidates or len(world.tensors) >= MAX_TENSORS:
        return False
    victim = choose.pick(candidates)
    selected = world.selected((str(victim.tag),), True)
    gate = world.machine.new_gate()
    torch.cuda.synchronize()
    # Otherwise the pause would begin with that, and wait for the device while it holds the mutex of PyTorch's allocator.
    torch_memory_saver.empty_cache()
    world.machine.add(0, victim.tensor.data_ptr(), victim.tensor.numel(), 1, gate=gate)
    assert victim.contents is not None
    victim.contents = bytes((byte + 1) % 256 for byte in victim.contents)
    world.pausing = {}
    reports: list[Any] = []
    thread = threading.Thread(target=lambda: reports.append(saver.pause(victim.tag)))
    world.say(f"another thread: pause({victim.tag}), held")
    thread.start()
    tensor = None
    other = choose.pick([tag for tag in TAGS if tag != victim.tag])
    size, dropped = choose.pick(SIZES), choose.integer(0, 1)
    try:
        world.machine.wait_until_synchronizing()
        if _core.find(victim.tensor.data_ptr()).state == _core.STATE_PAUSING:
            world.entered.add(other)
            with saver.region(tag=other, enable_cpu_backup=True):
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        if tensor is not None and dropped:
            world.tensors.remove(victim)
            selected.remove(victim)
            world.say(f"drop {victim}, which is being paused")
            del victim
    finally:
        world.machine.open(gate)
        thread.join()
    world.say(f"another thread: -> {reports}")
    assert reports, "the pause failed"
    for each in selected:
        world.paused(each)
    if tensor is None:
        return True
    data = payload(choose, size)[:size]
    tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    world.say(f"made meanwhile: {world.add(tensor, other, 'pinned', data)}")
    return True


#: Calls that PyTorch itself does not make.
CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemAddressReserve")
COPIES = (
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuMemcpyBatchAsync",
    "cuMemGetAccess",
    "cuStreamCreate",
    "cuCtxSynchronize",
    "cuMemAddressFree",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuEventCreate",
)


def fault(world: TorchWorld, choose: Any) -> bool:
    call = choose.pick((*CALLS, *COPIES))
    rule = (call, choose.integer(0, 3), choose.pick((1, 2, 1000)), choose.pick((OUT_OF_MEMORY, OPERATING_SYSTEM)))
    operation = choose.pick((pause, pause, resume, resume, make, empty_cache))
    world.say(f"fault: {rule}")
    world.rule = rule
    try:
        done: bool = operation(world, choose)
    finally:
        world.rule = None
    _core.resume((), None)  # damaged memory becomes paused again
    world.observe()
    return done


Operation = Callable[[TorchWorld, Any], bool]
OPERATIONS: dict[Operation, int] = {
    enter_region: 10,
    enter_disable: 3,
    leave: 9,
    make: 22,
    make_on_another_thread: 5,
    write: 14,
    drop: 14,
    empty_cache: 3,
    empty_torch_cache: 3,
    pause: 14,
    resume: 16,
    set_host_memory: 3,
    reserve_host_memory: 1,
    pause_of_an_inhabited_tag: 1,
    pause_held: 3,
    fault: 12,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="random operations on tensors in regions, for a long time")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--episode", type=int, default=500, help="operations an episode (500)")
    parser.add_argument("--check-every", type=int, default=4, help="operations between two comparisons (4)")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    logging.disable(logging.CRITICAL)
    torch.zeros(1, device="cuda")
    machine, began, operations, episodes = Machine(), time.monotonic(), 0, 0
    names, weights = list(OPERATIONS), list(OPERATIONS.values())
    print(f"seed {seed}, hook mode {saver.hook_mode}", flush=True)
    while episodes == 0 or time.monotonic() - began < arguments.seconds:
        world, choose = TorchWorld(machine), RandomChoice(seed + episodes)
        try:
            for number in range(arguments.episode):
                operations += choose.weighted(names, weights)(world, choose)
                if number % arguments.check_every == 0:
                    world.check()
            world.check()
            world.end()
        except Exception:
            traceback.print_exc()
            print("the last steps:", *world.steps, sep="\n  ")
            print(
                f"FAILED with seed {seed + episodes}; again: --seed {seed + episodes} --seconds 0 --check-every 1",
                flush=True,
            )
            return 1
        episodes += 1
    elapsed = time.monotonic() - began
    print(
        f"{operations} operations in {episodes} episodes and {elapsed:.0f} seconds ({operations / elapsed:.0f} a second), "
        f"{machine.fired()} injected failures; no byte wrong"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

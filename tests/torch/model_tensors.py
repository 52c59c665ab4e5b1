"""Operations of the model on regions and tensors: creation, writes, frees, and releasing memory."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch_world import TorchWorld

import torch_memory_saver
from torch_memory_saver import torch_memory_saver as saver

TAGS = ("weights", "kv_cache", "cuda_graph")
#: region()'s arguments, by a name.
BACKUPS: dict[str, dict[str, Any]] = {
    "none": {},
    "pinned": {"enable_cpu_backup": True},
    "mmap": {"enable_cpu_backup": True, "cpu_backup_backend": "mmap"},
    "disk": {"enable_disk_backup": True},
}
POLICIES = ("release", "pool", "retain")
SIZES = (1, 1000, 1 << 16, 1 << 20, 2 << 20, 3 << 20, 12 << 20)
MAX_TENSORS = 12
MAX_LEVELS = 4


def payload(choose: Any, size: int) -> bytes:
    seed = choose.integer(0, 255)
    return bytes((seed + index * 5) % 256 for index in range(256)) * (size // 256 + 1)


# Regions.


def enter_region(world: TorchWorld, choose: Any) -> bool:
    if len(world.levels) >= MAX_LEVELS:
        return False
    tag, backup = choose.pick(TAGS), choose.pick(list(BACKUPS))
    memory = choose.pick((None, None, None, *POLICIES))
    manager = saver.region(tag=tag, host_memory=memory, **BACKUPS[backup])
    world.say(f"region({tag}, {backup}, {memory})")
    manager.__enter__()
    world.levels.append((manager, tag, backup, memory))
    world.entered.add(tag)
    return True


def enter_disable(world: TorchWorld, choose: Any) -> bool:
    if not world.levels or len(world.levels) >= MAX_LEVELS:
        return False
    world.say("disable()")
    manager = saver.disable()
    manager.__enter__()
    world.levels.append((manager, None, "none", None))
    return True


def leave(world: TorchWorld, choose: Any) -> bool:
    """The innermost; sometimes an outer one first, which takes those inside it along."""
    if not world.levels:
        return False
    index = len(world.levels) - 1 if choose.integer(0, 5) else choose.integer(0, len(world.levels) - 1)
    world.say(f"leave level {index + 1} of {len(world.levels)}")
    for manager, *_ in [world.levels[index], *world.levels[index + 1 :]]:
        manager.__exit__(None, None, None)
    del world.levels[index:]
    return True


# Tensors.


def make(world: TorchWorld, choose: Any) -> bool:
    if len(world.tensors) >= MAX_TENSORS:
        return False
    _, tag, backup, memory = world.levels[-1] if world.levels else (None, None, "none", None)
    size = choose.pick(SIZES)
    data = payload(choose, size)[:size]
    host = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        tensor = world.act(lambda: torch.empty(size, dtype=torch.uint8, device="cuda"))
    except RuntimeError as error:
        world.say(f"make {size} bytes -> {type(error).__name__}")
        assert world.rule is not None, error
        return True
    tensor.copy_(host)
    world.say(f"make {world.add(tensor, tag, backup, data, memory)}")
    return True


def make_on_another_thread(world: TorchWorld, choose: Any) -> bool:
    """In a region of that thread; the regions of this one do not apply."""
    if len(world.tensors) >= MAX_TENSORS:
        return False
    tag, backup, size = choose.pick(TAGS), choose.pick(list(BACKUPS)), choose.pick(SIZES)
    data = payload(choose, size)[:size]
    made: list[torch.Tensor] = []

    def work() -> None:
        with saver.region(tag=tag, **BACKUPS[backup]):
            made.append(torch.frombuffer(bytearray(data), dtype=torch.uint8).to("cuda"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    world.entered.add(tag)
    world.say(f"another thread: make {world.add(made.pop(), tag, backup, data)}")
    return True


def write(world: TorchWorld, choose: Any) -> bool:
    active = [each for each in world.tensors if each.active]
    if not active:
        return False
    each = choose.pick(active)
    size = each.tensor.numel()
    if choose.integer(0, 1):
        value = choose.integer(0, 255)
        world.say(f"fill {each} with {value}")
        each.tensor.fill_(value)
        each.contents = bytes([value]) * size
    else:
        world.say(f"copy to {each}")
        each.contents = payload(choose, size)[:size]
        each.tensor.copy_(torch.frombuffer(bytearray(each.contents), dtype=torch.uint8))
    return True


def drop(world: TorchWorld, choose: Any) -> bool:
    if not world.tensors:
        return False
    each = world.tensors.pop(choose.integer(0, len(world.tensors) - 1))
    world.say(f"drop {each}")
    return True


def empty_cache(world: TorchWorld, choose: Any) -> bool:
    world.say("empty_cache()")
    world.act(torch_memory_saver.empty_cache)
    return True


def empty_torch_cache(world: TorchWorld, choose: Any) -> bool:
    """PyTorch's own, also while tags are paused."""
    world.say("torch.cuda.empty_cache()")
    torch.cuda.empty_cache()
    return True

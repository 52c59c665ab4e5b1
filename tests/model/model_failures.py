"""Operations with a failure: those of model_operations.py while a call of the driver fails, or a signal comes."""

from __future__ import annotations

import os
import signal
from typing import Any

from model_allocations import ACTIVE, PauseChoice
from model_machine import OPERATING_SYSTEM, OUT_OF_MEMORY, UNKNOWN
from model_operations import allocate, end_capture, free, launch
from model_pausing import pause, renewed_in_vain, resume
from model_settings import Operation
from model_world import World

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

#: Calls of the driver that a rule makes fail; "*" is each of them.
CALLS = (
    "*",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuThreadExchangeStreamCaptureMode",
    "cuMemsetD8Async",
    "cuEventCreate",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuMemcpyBatchAsync",
    "cuMemGetAccess",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamDestroy",
    "cuCtxSynchronize",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxGetState",
    "cuMemGetInfo",
)


def fault(world: World, choose: Any) -> bool:
    """Another operation while a call of the driver fails, once or several times; then usually everything is retried."""
    call = choose.pick(CALLS)
    after = choose.integer(0, 40 if call == "*" else 3)
    times = choose.pick((1, 1, 2, 1000))
    code = choose.pick((OUT_OF_MEMORY, OPERATING_SYSTEM, UNKNOWN))
    operation = choose.pick((pause, pause, resume, resume, allocate, free, end_capture))
    world.say(f"fault: {call} fails {times} times after {after} with {code}")
    before, was_clean = world.machine.fired(), world.clean
    world.rule = (call, after, times, code)
    try:
        done = operation(world, choose)
    finally:
        world.rule = None
    fired = world.machine.fired() - before
    world.say(f"fault: fired {fired} times")
    world.clean = was_clean and not fired
    if choose.integer(0, 3):
        world.settle()
    return done


# Signals.


def interrupt_pause(world: World, choose: Any) -> bool:
    """Ctrl-C while a pause waits for the device: nothing has changed."""
    if world.captures or not world.clean or world.deferred:
        return False
    active = world.with_state(ACTIVE)
    if not active:
        return False
    allocation = choose.pick(active)
    gate = world.machine.new_gate()
    launch(world, allocation, 1, gate)

    def interrupt() -> None:
        world.machine.wait_until_synchronizing()
        world.machine.wait_for(lambda: _core.find(allocation.address).state == _core.STATE_PAUSING)
        os.kill(os.getpid(), signal.SIGINT)

    world.say(f"pause({allocation.tag!r}), interrupted")
    world.pausing = PauseChoice()
    join = world.actors[1].worker.start(interrupt)
    interrupted = False
    try:
        saver.pause(allocation.tag)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        world.machine.open(gate)
    join()
    world.machine.synchronize(allocation.device)
    assert interrupted, "the pause did not wait"
    for other in world.selected((allocation.tag,), ACTIVE):
        renewed_in_vain(world, other)
    return True


#: Each with how often the long runs do it.
FAILING: dict[Operation, int] = {fault: 20, interrupt_pause: 1}

"""Guards a GPU that the process first uses after it has allocated managed memory on another one, in torch mode."""

from __future__ import annotations

from collections import Counter

import pytest
from gpu_programs import Program, run_programs
from gpu_support import SIMULATED

from torch_memory_saver._torch.binding import layer

pytestmark = [pytest.mark.multigpu, pytest.mark.outer]

#: Ways of programs/late_device.py to use a GPU first, by the process that tries them: copies, places, and what comes
#: afterwards.
WAYS = (
    ("to", "copy_into", "copy_into_on_the_devices_stream"),
    ("kernel_into", "gradients", "broadcast"),
    ("another_thread", "inside_disable", "inside_a_region", "during_pauses", "paused_memory"),
    ("the_watch_leaves_nothing", "the_device_keeps_its_own_pool", "a_pool_of_the_program", "a_graph"),
)


@pytest.fixture(autouse=True)
def watched_releases() -> None:
    if not layer.require().last_routed_wins:
        pytest.skip("PyTorch before 2.10: a device that is used later needs enable_peer_access()")


def test_a_gpu_that_is_used_later_reaches_managed_memory_without_a_call() -> None:
    for ways, done in zip(WAYS, run_programs(Program("late_device.py", ways) for ways in WAYS), strict=True):
        assert done.check().output.split() == [word for way in ways for word in (way, "ok")]


def test_without_the_watch_a_copy_fails() -> None:
    (done,) = run_programs([Program("late_device.py", ("unwatched",))])
    done.check()


@pytest.mark.skipif(not SIMULATED, reason="counts the calls of the simulated GPU")
def test_a_process_that_uses_one_gpu_makes_the_same_calls_as_without_the_watch() -> None:
    programs = [Program("calls_of_a_cycle.py", arguments) for arguments in ((), ("unwatched",))]
    watched, unwatched = (Counter(done.check().output.split()) for done in run_programs(programs))
    assert watched["cuMemCreate"] >= 3, "the calls are counted"
    assert watched == unwatched


@pytest.mark.skipif(not SIMULATED, reason="needs GPUs that cannot access each other")
def test_gpus_that_cannot_access_each_other() -> None:
    environment = (("TMS_SIMULATED_PEERS", "0"),)
    (done,) = run_programs([Program("late_device.py", ("to",), environment)])
    done.check()

"""Guards what PyTorch sees of a simulated device: random numbers, streams, events, identity, messages about its memory."""

from __future__ import annotations

import os
import re
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from warm_python import torch_programs

RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal_": lambda each: each.normal_(),
    "uniform_": lambda each: each.uniform_(),
    "bernoulli_": lambda each: each.bernoulli_(0.5),
    "exponential_": lambda each: each.exponential_(),
    "random_": lambda each: each.random_(0, 10),
}


def allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_operator_allocates_nothing(name: str) -> None:
    values = torch.empty(100, device="cuda")
    before = allocations()
    torch.manual_seed(5)
    first = RANDOM[name](values).tolist()
    assert allocations() == before
    torch.manual_seed(5)
    assert RANDOM[name](values).tolist() == first
    assert RANDOM[name](values).tolist() != first


def test_a_random_operator_allocates_nothing_in_a_capture() -> None:
    values = torch.zeros(100, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = allocations()
        values.normal_()
        assert allocations() == before
    drawn = set()
    for _ in range(3):
        graph.replay()
        drawn.add(tuple(values.tolist()))
    assert len(drawn) == 3


def test_random_operators_of_two_streams_do_not_disturb_each_other() -> None:
    """Each draws before it is enqueued."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        tensors = [torch.zeros(1000, device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        for place, each in enumerate(tensors):
            with torch.cuda.stream(streams[place % 2]):
                each.normal_()
        torch.cuda.synchronize()
        found.append(torch.stack(tensors))
    assert torch.equal(*found) and found[0].unique(dim=0).shape[0] == 8


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_no_time_lies_between_events_of_two_devices() -> None:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for device, event in enumerate(events):
        with torch.cuda.device(device):
            event.record()
        torch.cuda.synchronize(device)
    with pytest.raises(RuntimeError, match="invalid resource handle"):
        events[0].elapsed_time(events[1])
    assert events[0].elapsed_time(events[0]) == 0


def test_pytorch_and_nvml_agree_on_a_device_s_uuid() -> None:
    nvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetUUID(handle) == f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def test_pytorch_can_ask_for_clocks_power_and_temperature() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    assert torch.cuda.clock_rate() == 1980
    assert torch.cuda.power_draw() == 70_000
    assert torch.cuda.temperature() == 25
    assert torch.cuda.utilization() == torch.cuda.memory_usage() == 0


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    process = torch_programs.start(["-c", program], {**os.environ, **variables}, Path.cwd())
    output, error = process.communicate(300)
    return subprocess.CompletedProcess(program, process.wait(), output, error)


def test_processes_of_another_run_have_other_uuids() -> None:
    program = "import torch; print(torch.cuda.get_device_properties(0).uuid)"
    same = run(program)
    other = run(program, TMS_SIMULATED_SHARED=f"test_uuids_{os.getpid()}")
    here = str(torch.cuda.get_device_properties(0).uuid)
    assert uuid.UUID(same.stdout.strip()) == uuid.UUID(here), same.stderr
    assert uuid.UUID(other.stdout.strip()) != uuid.UUID(here), other.stderr


BACKWARD = """
import torch
from torch_memory_saver import torch_memory_saver as saver
x = torch.ones(1 << 20, device="cuda", requires_grad=True)
with saver.region("activations"):
    loss = x.exp().sum()
saver.pause()
try:
    loss.backward()
    torch.cuda.synchronize()
except RuntimeError as error:
    print(error)
"""


def test_a_backward_after_the_pause_of_its_forward_says_what_to_do() -> None:
    done = run(BACKWARD)
    assert "in memory of the tag 'activations', which was paused" in done.stdout, done.stderr
    assert "also before a backward that needs what a forward in its region has saved" in done.stdout


SLEEP = """
import os, torch
asleep, awake, ended = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
with torch.cuda.stream(asleep):
    torch.cuda._sleep(2**62)  # a century
    ended.record()
with torch.cuda.stream(awake):
    torch.cuda._sleep(1)
awake.synchronize()
print(ended.query(), asleep.query(), flush=True)
os._exit(0)
"""


def test_a_sleep_occupies_its_stream_and_no_other() -> None:
    done = run(SLEEP)
    assert done.stdout == "False False\n", done.stderr


ACCESS = """
import torch
from torch_memory_saver import torch_memory_saver as saver
with saver.region("weights"):
    weights = torch.ones(1 << 20, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    doubled = weights * 2
saver.pause("weights")
try:
    {access}
    torch.cuda.synchronize()
except RuntimeError as error:
    print(error)
"""
#: An access, the operation that is named, and the class of error.
ACCESSES = {
    "weights + 1": ("aten::add.Tensor", "an illegal memory access was encountered"),
    "weights.normal_()": ("aten::normal_", "an illegal memory access was encountered"),
    "weights.nonzero()": ("aten::nonzero", "an illegal memory access was encountered"),
    "graph.replay()": ("aten::mul.Tensor", "an illegal memory access was encountered"),
    "weights.cpu()": ("cudaMemcpyAsync", "invalid argument"),
}


@pytest.mark.parametrize("access", ACCESSES)
def test_an_access_to_paused_memory_names_the_operator_the_tag_and_the_time_of_the_pause(access: str) -> None:
    operation, kind = ACCESSES[access]
    done = run(ACCESS.format(access=access))
    explanation = (
        re.escape(operation)
        + r" accesses 0x[0-9a-f]+ in memory of the tag 'weights', which was paused \d+\.\d{3} s before, "
        r"at \d\d:\d\d:\d\d; resume the tag first, also before a backward "
        r"that needs what a forward in its region has saved\n"
    )
    assert "accesses" not in done.stderr, "it is said once"
    assert re.match(f"CUDA error: {kind}: {explanation}", done.stdout), done.stdout

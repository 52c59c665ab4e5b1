"""Guards that PyTorch's CUDA build works on the simulated GPU, and that the package is in the requested mode."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from warm_programs import run

import torch_memory_saver
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    saver.resume()
    torch_memory_saver.empty_cache()
    assert all(tag.resident_bytes == 0 for tag in torch_memory_saver.stats().tags.values())


def test_the_machine_is_as_requested() -> None:
    assert torch.cuda.device_count() == int(os.environ["TMS_SIMULATED_DEVICES"])
    for device in range(torch.cuda.device_count()):
        assert torch.cuda.mem_get_info(device)[1] == int(os.environ["TMS_SIMULATED_MEMORY"])


def test_the_hook_mode_is_as_requested() -> None:
    preloaded = "torch_memory_saver_hook_mode_preload" in os.environ["LD_PRELOAD"]
    with saver.region(tag="mode"):
        pass
    assert saver.hook_mode == ("preload" if preloaded else "torch")


def test_bytes_round_trip() -> None:
    there = torch.arange(MIB, dtype=torch.int64)
    assert torch.equal(there.cuda().cpu(), there)


def test_a_tensor_survives_a_pause() -> None:
    values = torch.arange(MIB, dtype=torch.int32)
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = values.to("cuda")
    address = tensor.data_ptr()
    free = torch.cuda.mem_get_info()[0]
    saver.pause("weights")
    assert torch.cuda.mem_get_info()[0] >= free + 4 * MIB
    saver.resume("weights")
    assert tensor.data_ptr() == address
    assert torch.equal(tensor.cpu(), values)
    del tensor


def test_a_child_process_uses_the_memory_of_the_same_devices() -> None:
    free = torch.cuda.mem_get_info()[0]
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    text = """if True:
        import torch
        print(torch.cuda.mem_get_info()[0], flush=True)
        tensor = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        print(torch.cuda.mem_get_info()[0], flush=True)
        input()
    """
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        assert int(child.stdout.readline()) <= free - 64 * MIB
        with_both = int(child.stdout.readline())
        assert with_both <= free - 96 * MIB
        assert torch.cuda.mem_get_info()[0] == with_both
        child.communicate("\n")
    assert child.returncode == 0
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free


@pytest.mark.parametrize(("visible", "places"), [("1,0", [1, 0]), ("1", [1]), ("", []), ("-1", [])])
def test_visible_devices(visible: str, places: list[int]) -> None:
    """CUDA_VISIBLE_DEVICES has the real driver's meaning; the last byte of a UUID is a device's place."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    text = (
        "import torch\n"
        "properties = [torch.cuda.get_device_properties(device) for device in range(torch.cuda.device_count())]\n"
        "print([int(str(each.uuid)[-2:], 16) for each in properties], torch.cuda.is_available())\n"
        "tensors = [torch.ones(3, device=device) for device in range(torch.cuda.device_count())]\n"
        "print([tensor.sum().item() for tensor in tensors])\n"
    )
    output, _ = run(text, CUDA_VISIBLE_DEVICES=visible)
    assert output.splitlines() == [f"{places} {bool(places)}", str([3.0] * len(places))]


#: Prints free memory, in MiB less than before: during the region, paused, and after everything has been released.
OTHER_THREAD = """
import threading, torch, torch_memory_saver
from torch_memory_saver import torch_memory_saver as saver

def taken():
    return free - torch.cuda.mem_get_info()[0] >> 20

def allocate():
    tensors.append(torch.empty(32 << 20, dtype=torch.uint8, device="cuda"))

tensors = [torch.zeros(1, device="cuda")]
free = torch.cuda.mem_get_info()[0]
with saver.region():
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    allocate()
print(taken())
saver.pause()
print(taken())
tensors[1].zero_()
assert tensors[1].sum().item() == 0
saver.resume()
del tensors[1:]
torch_memory_saver.empty_cache()
print(taken(), saver.hook_mode)
"""


def test_allocations_of_another_thread_during_a_region() -> None:
    """It is not paused, and it is freed. In a process of its own, because PyTorch 2.6 and 2.7 keep a pool in which another
    thread's memory lies, unless the preload library frees it."""
    output, _ = run(OTHER_THREAD)
    kept = 64 if hasattr(torch._C, "_MemPoolContext") and saver.hook_mode == "torch" else 0
    assert output.split() == ["64", "32", str(kept), saver.hook_mode]


def test_child_processes_are_simulated_too() -> None:
    text = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_name(0))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == os.environ["TMS_SIMULATED_DEVICES"]
    assert "Simulated GPU" in done.stdout

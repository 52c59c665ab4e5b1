"""Guards programs that use operators on the simulated GPU: their output, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from warm_programs import run


def test_an_unknown_release_is_refused_at_its_import() -> None:
    """Another interpreter than the one that ``simulate`` was started for may have another PyTorch."""
    program = """
        import sys
        import types
        from torch_memory_saver._simulate.operators import install
        from torch_memory_saver.errors import TorchUnavailableError
        sys.modules["torch"] = types.SimpleNamespace(__version__="2.99.0")
        try:
            install.install()
        except TorchUnavailableError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout == "the simulated GPU does not support PyTorch 2.99.0: install one of the releases 2.8 to 2.15\n"
    assert done.stderr == ""


def test_kernels_of_the_program_fail_and_are_named() -> None:
    """They are no operators. PyTorch's own kernel is launched here through the CPU's dispatch key, which is not replaced."""
    stdout, stderr = run(
        """
        import torch
        ones = torch.ones(4, device="cuda")
        cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        try:
            torch.ops.aten.fill_.Scalar.redispatch(cpu, ones, 2)
        except RuntimeError as error:
            print(error)
        print((ones + 1).cpu().tolist())
        """
    )
    assert "CUDA error: operation not supported" in stdout
    assert stdout.endswith("[2.0, 2.0, 2.0, 2.0]\n"), "such an error is not sticky"
    assert stderr.count("simulated GPU: the launch of a kernel failed") == 1
    assert "FillFunctor" in stderr


def test_a_backward_that_begins_with_a_product_warns_of_nothing() -> None:
    """Its thread has launched no kernel before, so it has no context yet."""
    stdout, stderr = run(
        """
        import torch
        weight = torch.ones(4, 4, device="cuda", requires_grad=True)
        (torch.ones(2, 4, device="cuda") @ weight).sum().backward()
        print(weight.grad.sum().item())
        """
    )
    assert (stdout, stderr) == ("32.0\n", "")


STEP = """
import torch
from torch import nn
convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 8))
layers = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.LayerNorm(8), nn.Dropout())
modules = nn.ModuleList([convolutions, layers, nn.LSTM(8, 4, 2)]).cuda()
optimizer, scaler = torch.optim.AdamW(modules.parameters(), fused=True), torch.amp.GradScaler()
images = torch.randn(2, 3, 8, 8).pin_memory().to("cuda", non_blocking=True)
for _ in range(2):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found, _ = modules[2](layers(convolutions(images)[:, None]))
        loss = nn.functional.cross_entropy(found[:, 0], torch.tensor([1, 2], device="cuda"))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
torch.cuda.synchronize()
print(loss.item() > 0)
"""


def test_an_ordinary_training_step_prints_nothing() -> None:
    assert run(STEP) == ("True\n", "")


def test_questions_about_versions_are_answered() -> None:
    """With the version that PyTorch requires; it raises an error for one that is older than it was compiled for."""
    stdout, stderr = run(
        """
        import torch
        assert torch.backends.cudnn.is_available()
        found = torch.backends.cudnn.version()
        major, minor, patch = torch._C._cudnn.getCompileVersion()
        assert 10000 * (major + 1) > found >= 10000 * major + 100 * minor + patch, found
        assert "CuDNN" in torch.__config__.show()
        print(torch.backends.cudnn.is_acceptable(torch.ones(1, device="cuda")))
        """
    )
    assert (stdout, stderr) == ("False\n", "")


MEASURE = """
import ctypes, gc, os, struct
os.setpgrp()
import torch
driver = ctypes.CDLL(None)
def held():
    "What the device process has mapped of devices, and how many files it has open."
    for name in filter(str.isdigit, os.listdir("/proc")):
        if int(name) != os.getpid() and os.getpgid(int(name)) == os.getpid():
            with open(f"/proc/{name}/maps") as maps:
                mapped = [line.split()[0].split("-") for line in maps if "memfd:simulated" in line]
            return sum(int(end, 16) - int(start, 16) for start, end in mapped), len(os.listdir(f"/proc/{name}/fd"))
def call(name, *arguments):
    assert getattr(driver, name)(*arguments) == 0, name
class Exported:
    "Memory that is exported, which makes it a file of its own, in a range of addresses that stays."
    address = ctypes.c_uint64()
    def __init__(self, size):
        self.size, self.handle, file = ctypes.c_size_t(size), ctypes.c_uint64(), ctypes.c_int()
        call("cuMemCreate", ctypes.byref(self.handle), self.size, struct.pack("iiiiQQ", 1, 1, 1, 0, 0, 0), ctypes.c_uint64())
        call("cuMemMap", self.address, self.size, ctypes.c_size_t(), self.handle, ctypes.c_uint64())
        call("cuMemSetAccess", self.address, self.size, struct.pack("iii", 1, 0, 3), ctypes.c_size_t(1))
        call("cuMemExportToShareableHandle", ctypes.byref(file), self.handle, 1, ctypes.c_uint64())
        os.close(file.value)
        where = {"shape": (size // 4,), "typestr": "<f4", "data": (self.address.value, False), "version": 3}
        self.__cuda_array_interface__ = where
    def free(self):
        torch.cuda.synchronize()
        call("cuMemUnmap", self.address, self.size)
        call("cuMemRelease", self.handle)
def use(mebibytes):
    torch.ones(mebibytes << 18, device="cuda").add_(1)
    torch.cuda.synchronize()
def use_exported(mebibytes):
    memory = Exported(mebibytes << 20)
    torch.as_tensor(memory, device="cuda").fill_(1).add_(1)
    memory.free()
use(1)
none = ctypes.c_size_t()
call("cuMemAddressReserve", ctypes.byref(Exported.address), ctypes.c_size_t(64 << 20), none, ctypes.c_uint64(), none)
before = held()
for mebibytes in range(20, 60, 2):
    USE(mebibytes)
    gc.collect()
    torch.cuda.empty_cache()
use(1)
print(*before, *held())
"""


@pytest.mark.parametrize("function", ["use", "use_exported"])
def test_the_device_process_releases_freed_memory(function: str) -> None:
    """Of ranges of addresses, and of files that were exported: they would stay for as long as the program."""
    stdout, _ = run(MEASURE.replace("USE", function))
    mapped, files, mapped_afterwards, files_afterwards = map(int, stdout.split())
    assert mapped > 0
    assert mapped_afterwards <= mapped + (4 << 20)
    assert files_afterwards <= files

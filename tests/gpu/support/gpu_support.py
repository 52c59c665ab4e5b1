"""Shared by the GPU tests: lazily imported modules, sizes, memory readings, contents, and fresh processes.

Nothing here imports torch or uses a GPU before a test runs, so that the folder can be collected (and skipped, with the
reason) on a machine that has neither.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

MIB = 1 << 20
GIB = 1 << 30
#: Whether the GPU is the simulated one, as under `python -m torch_memory_saver simulate`.
SIMULATED = os.path.basename(os.environ.get("TMS_CUDA_DRIVER", "")) == "_simulated_cuda.so"
#: A size that is large for the device, bytes: the used part of the simulated one is memory of the host.
LARGE = 64 * MIB if SIMULATED else GIB
#: Clock cycles of a spinning kernel, a good part of a second on any current GPU.
SPIN_CYCLES = 600_000_000
#: The driver's granularity of physical memory, bytes.
GRANULARITY = 2 * MIB
HERE = Path(__file__).resolve().parent.parent
PROGRAMS = HERE / "programs"
REPOSITORY = HERE.parent.parent
HOOK = "hook_mode_preload"
#: Whether this process was started with our library preloaded, by `run --preload` or `simulate --preload`.
STARTED_PRELOADED = HOOK in os.environ.get("LD_PRELOAD", "")
#: How many operations a random run of them does: fewer on the simulated GPU, whose kernels the host computes, and in the
#: second hook mode.
RANDOM_OPERATIONS = 400 if SIMULATED else 3_000 if STARTED_PRELOADED else 10_000


class _Lazy:
    """Stands for a module, or an attribute of one, imported at the first use."""

    def __init__(self, module: str, attribute: str | None = None) -> None:
        object.__setattr__(self, "_where", (module, attribute))

    def _target(self) -> Any:
        module, attribute = object.__getattribute__(self, "_where")
        found = importlib.import_module(module)
        return found if attribute is None else getattr(found, attribute)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target(), name, value)


if TYPE_CHECKING:
    import torch

    import torch_memory_saver as tms
    from torch_memory_saver import _core as core
    from torch_memory_saver import errors
    from torch_memory_saver import torch_memory_saver as saver
else:
    torch = _Lazy("torch")
    tms = _Lazy("torch_memory_saver")
    core = _Lazy("torch_memory_saver._core")
    errors = _Lazy("torch_memory_saver.errors")
    saver = _Lazy("torch_memory_saver", "torch_memory_saver")


# -- memory readings ---------------------------------------------------------------------------------------------------


def free_bytes(device: int = 0) -> int:
    """Free physical memory of a device, bytes, as cudaMemGetInfo reports it."""
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])


def process_bytes(device: int = 0) -> int | None:
    """Device memory of this process, bytes, as nvidia-smi would show it; None if NVML does not report it."""
    if SIMULATED:
        return None
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(core.device_info(device).uuid)  # NVML counts hidden devices, too
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
    except Exception:  # an optional second opinion: any failure of NVML means that it has none
        return None
    return None


def assert_close_to(actual: int, expected: int, what: str, slack: int | None = None) -> None:
    """Bytes may differ by `slack`: by default 16 MiB or a thousandth, for page tables and the driver's own bookkeeping."""
    slack = max(16 * MIB, expected // 1000) if slack is None else slack
    assert abs(actual - expected) <= slack, (
        f"{what}: {actual / MIB:.1f} MiB instead of {expected / MIB:.1f} MiB (allowed difference {slack / MIB:.1f} MiB)"
    )


def resident_bytes() -> int:
    """Resident memory of this process on the host, bytes. The simulated GPU's memory, which is in files, does not count."""
    if SIMULATED:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- tensors -----------------------------------------------------------------------------------------------------------


def empty(size: int, device: int = 0) -> torch.Tensor:
    """An uninitialised tensor of `size` bytes on a GPU."""
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")


def take_all_but(left: int, device: int = 0) -> torch.Tensor:
    """An ordinary tensor that leaves `left` bytes of the device free."""
    size = (free_bytes(device) - left) // GRANULARITY * GRANULARITY
    return empty(size, device)


def fill_random(tensor: torch.Tensor, seed: int) -> None:
    """Random bytes. The size must be a multiple of 8 bytes."""
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(seed)
    tensor.view(torch.int64).random_(generator=generator)


def checksum(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Three sums over different parts of the contents, computed on the GPU with negligible temporary memory."""
    words = tensor.view(torch.int64)
    return (int(words.sum()), int(words[::3].sum()), int(words[: words.numel() // 2].sum()))


def fill_normal(tensor: torch.Tensor, seed: int, std: float = 1.0) -> None:
    """Normally distributed numbers that the host makes, the same on every device."""
    numbers = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * std
    tensor.copy_(numbers.to(tensor.dtype))


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal within the tolerance of torch.testing, compared on the host."""
    torch.testing.assert_close(actual.cpu(), expected.cpu())


def segment_of(tensor: torch.Tensor) -> core.Segment:
    """The managed allocation that a tensor lies in."""
    found = core.find(tensor.data_ptr())
    assert found is not None, f"the tensor at {tensor.data_ptr():#x} is not managed"
    return found


def is_managed(tensor: torch.Tensor) -> bool:
    return core.find(tensor.data_ptr()) is not None


def state_of(tensor: torch.Tensor) -> int:
    return segment_of(tensor).state


def assert_usable(tensor: torch.Tensor) -> None:
    """Checks the state before any kernel accesses the memory: an access to paused memory would lose the whole context."""
    found = core.find(tensor.data_ptr())
    assert found is None or found.state == core.STATE_ACTIVE, (
        f"memory of tag {found.tag!r} in state {found.state} was handed out"
    )


def write_and_check(tensor: torch.Tensor, value: int) -> None:
    """Writes and reads back every byte, without a temporary tensor that torch would keep in its cache."""
    assert_usable(tensor)
    tensor.fill_(value)
    assert int(tensor.min()) == int(tensor.max()) == value


_gates = itertools.count(1 << 20)


def release() -> tuple[int, ...]:
    """PyTorch's release, such as (2, 11)."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def skip_where_the_outer_pool_wins() -> None:
    """Skips a test that puts one pool of PyTorch's into another. Before pytorch#168382 the outer pool served both."""
    if release() < (2, 11):
        pytest.skip(f"PyTorch {torch.__version__} serves a pool inside another from the outer one")


def hold_stream() -> None:
    """Queues work on the current stream that is still in flight when this returns: a long kernel on a real GPU. On the
    simulated one, a kernel that ends only after a thread has begun to wait for the device, or for a stream of it."""
    if not SIMULATED:
        torch.cuda._sleep(SPIN_CYCLES)
        return
    control = ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])
    gate = next(_gates)
    target = torch.empty(512, dtype=torch.uint8, device="cuda")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    launched = control.tms_sim_launch_add(
        stream, ctypes.c_uint64(target.data_ptr()), ctypes.c_uint64(512), ctypes.c_uint8(0), ctypes.c_int(gate)
    )
    assert launched == 0, f"launch failed with CUresult {launched}"

    def open_when_waited_for() -> None:
        control.tms_sim_wait_until_synchronizing()
        control.tms_sim_open_gate(ctypes.c_int(gate))

    threading.Thread(target=open_when_waited_for, daemon=True).start()


class _RawMemory:
    """Memory at an address, as the array interface that torch understands."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def tensor_at(address: int, size: int, device: int = 0) -> torch.Tensor:
    """A tensor over memory that has no other owner, for instance of `_core.allocate`. It does not keep the memory."""
    return torch.as_tensor(_RawMemory(address, size), device=f"cuda:{device}")


def release_everything() -> None:
    """Releases every byte that no tensor uses to the driver, managed or not."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    tms.empty_cache()
    torch.cuda.empty_cache()


def pool_snapshot(token: tuple[int, int]) -> list[dict[str, Any]]:
    """torch.cuda.memory_snapshot(token). PyTorch 2.11 drops a reference to each number of the token that it does not own, so
    each gets one more: numbers above 256 would be destroyed while pools use them."""
    for number in token:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    rows: list[dict[str, Any]] = torch.cuda.memory_snapshot(token)
    return rows


def driver() -> ctypes.CDLL:
    """The driver library, for queries that neither torch nor the package answers."""
    return ctypes.CDLL("libcuda.so.1")


def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded. A look-up in it finds the runtime's own functions, never interposed ones."""
    torch.cuda.init()
    if SIMULATED:
        return ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"])
    with open("/proc/self/maps", encoding="utf-8") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if "/libcudart" in line}
    assert len(paths) == 1, f"one CUDA runtime expected, found {sorted(paths)}"
    return ctypes.CDLL(paths.pop())

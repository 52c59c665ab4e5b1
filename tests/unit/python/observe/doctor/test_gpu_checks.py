"""Guards the checks of the driver and the GPUs: what they find on machines that are planted."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from findings import assert_complete
from processes import SIMULATOR

from torch_memory_saver.observe._doctor import gpu_checks
from torch_memory_saver.observe._doctor.check import Device, DriverFacts, Finding, Status, TorchFacts

GIB = 1 << 30


def gpu(ordinal: int, **other: object) -> Device:
    """One that has everything, among two."""
    values: dict[str, object] = {
        "name": "GPU of a test",
        "total_bytes": 80 * GIB,
        "free_bytes": 79 * GIB,
        "virtual_memory": True,
        "exportable": True,
        "rdma": True,
        "granularity_bytes": 2 << 20,
        "pci": f"0000:{ordinal + 1:02x}:00.0",
        "peers": [1 - ordinal],
    }
    return Device(ordinal, **(values | other))  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The root of planted files. The driver has two GPUs; PyTorch is built for CUDA 13.0."""
    monkeypatch.setattr(gpu_checks, "ROOT", tmp_path)
    monkeypatch.delenv("TMS_CUDA_DRIVER", raising=False)
    plant(monkeypatch, gpu(0), gpu(1))
    monkeypatch.setattr(gpu_checks, "torch_facts", lambda: TorchFacts(version="2.11.0", cuda="13.0"))
    return tmp_path


def plant(monkeypatch: pytest.MonkeyPatch, *devices: Device, **facts: object) -> None:
    values: dict[str, object] = {"cuda_version": 13000, "devices": devices}
    planted = DriverFacts(**(values | facts))  # type: ignore[arg-type]
    monkeypatch.setattr(gpu_checks, "driver_facts", lambda: planted)


def write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_driver_with_its_versions(machine: Path) -> None:
    finding = gpu_checks.driver()
    assert_complete(finding, Status.OK)
    assert finding.found == "libcuda.so.1 supports CUDA 13.0"
    write(
        machine,
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\nGCC version: 12.3.0",
    )
    assert gpu_checks.driver().found == "libcuda.so.1 supports CUDA 13.0, kernel module 570.86.15"


@pytest.mark.parametrize(
    ("facts", "status", "found", "advice"),
    [
        ({"loaded": False, "problem": "x could not be loaded"}, Status.FAIL, "x could not be loaded", "--gpus all"),
        ({"problem": "cuInit failed with CUDA_ERROR_SYSTEM_NOT_READY"}, Status.FAIL, "cuInit", "nvidia-fabricmanager"),
        ({"problem": "cuInit failed with CUDA_ERROR_UNKNOWN"}, Status.FAIL, "CUDA_ERROR_UNKNOWN", "nvidia-smi"),
        ({"cuda_version": None}, Status.FAIL, "does not tell its version", "again"),
        ({"cuda_version": 11080}, Status.WARN, "CUDA 11.8", "update the driver"),
    ],
)
def test_a_driver_with_a_problem(
    machine: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, object], status: str, found: str, advice: str
) -> None:
    plant(monkeypatch, **facts)
    finding = gpu_checks.driver()
    assert_complete(finding, status)
    assert found in finding.found and advice in finding.advice


@pytest.mark.parametrize(
    ("driver", "torch", "status"),
    [
        (13000, "13.0", Status.OK),
        (12080, "12.9", Status.OK),  # CUDA's minor versions are compatible
        (13000, "12.8", Status.OK),
        (12080, "13.0", Status.FAIL),
        (None, "13.0", Status.SKIP),
        (13000, None, Status.SKIP),
    ],
)
def test_the_versions_of_cuda(
    machine: Path, monkeypatch: pytest.MonkeyPatch, driver: int | None, torch: str | None, status: str
) -> None:
    plant(monkeypatch, cuda_version=driver)
    monkeypatch.setattr(gpu_checks, "torch_facts", lambda: TorchFacts(cuda=torch))
    assert_complete(gpu_checks.versions(), status)


def test_the_gpus_have_a_line_each(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = gpu_checks.gpus()
    assert_complete(finding, Status.OK)
    assert finding.found == "2 GPUs"
    assert finding.details == (
        "GPU 0: GPU of a test, 80 GiB, 79 GiB free",
        "GPU 1: GPU of a test, 80 GiB, 79 GiB free",
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    expected = "2 GPUs, chosen and numbered by CUDA_VISIBLE_DEVICES=3,1"
    assert gpu_checks.gpus().found == expected, "nvidia-smi has other numbers"


def test_a_gpu_that_cannot_be_used(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "cuDevicePrimaryCtxRetain failed with CUDA_ERROR_OUT_OF_MEMORY"
    plant(monkeypatch, gpu(0), gpu(1, problem=problem))
    finding = gpu_checks.gpus()
    assert_complete(finding, Status.FAIL)
    assert finding.found == "1 of 2 GPUs cannot be used" and "processes that hold" in finding.advice
    assert finding.details[1] == f"GPU 1: GPU of a test: {problem}"
    assert_complete(gpu_checks.peers(), Status.SKIP)  # one is left


@pytest.mark.parametrize(("visible", "advice"), [("", "unset CUDA_VISIBLE_DEVICES"), (None, "--gpus all")])
def test_no_gpu(machine: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, advice: str) -> None:
    plant(monkeypatch)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    finding = gpu_checks.gpus()
    assert_complete(finding, Status.FAIL)
    assert advice in finding.advice


def test_without_a_driver_the_rest_is_skipped(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, loaded=False, problem="x could not be loaded", cuda_version=None)
    for look in (
        gpu_checks.versions,
        gpu_checks.gpus,
        gpu_checks.virtual_memory,
        gpu_checks.pause,
        gpu_checks.rdma,
        gpu_checks.peers,
    ):
        assert_complete(look(), Status.SKIP)
    assert gpu_checks.pause().found == "there is no usable GPU"


@pytest.mark.parametrize(
    ("missing", "status", "found"),
    [
        ({}, Status.OK, "in units of 2 MiB, and can be exported"),
        ({"virtual_memory": False}, Status.FAIL, "GPU 1: no virtual memory management"),
        ({"exportable": False}, Status.WARN, "memory of GPU 1 cannot be exported"),
    ],
)
def test_virtual_memory(
    machine: Path, monkeypatch: pytest.MonkeyPatch, missing: dict[str, object], status: str, found: str
) -> None:
    plant(monkeypatch, gpu(0), gpu(1, **missing))
    finding = gpu_checks.virtual_memory()
    assert_complete(finding, status)
    assert found in finding.found


@pytest.fixture
def simulated(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that a check starts have two simulated GPUs."""
    monkeypatch.setenv("TMS_CUDA_DRIVER", str(SIMULATOR))
    monkeypatch.setenv("TMS_SIMULATED_DEVICES", "2")


def test_a_pause_frees_memory(simulated: None) -> None:
    finding = gpu_checks.pause()
    assert_complete(finding, Status.OK)
    assert "64 MiB" in finding.found


#: Functions that stand before those of the simulated driver: KEPT is the condition under which a release frees nothing, and
#: OTHER what other programs have freed, in units of 64 MiB, at a call with the number `calls`.
DRIVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
typedef unsigned long long handle_t;
static int last, calls;
int cuMemCreate(handle_t *handle, unsigned long size, const int *properties, handle_t flags) {
    int (*real)(handle_t *, unsigned long, const int *, handle_t) = dlsym(RTLD_NEXT, "cuMemCreate");
    last = properties[3];
    return real(handle, size, properties, flags);
}
int cuMemRelease(handle_t handle) {
    int (*real)(handle_t) = dlsym(RTLD_NEXT, "cuMemRelease");
    return KEPT ? 0 : real(handle);
}
int cuMemGetInfo_v2(unsigned long *available, unsigned long *total) {
    int (*real)(unsigned long *, unsigned long *) = dlsym(RTLD_NEXT, "cuMemGetInfo_v2");
    int result = real(available, total);
    calls++;
    *available += (OTHER) * (64l << 20);
    return result;
}
"""


@pytest.fixture
def plant_driver(simulated: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    def build(kept: str, other: str) -> None:
        driver = tmp_path / "driver.so"
        macros = [f"-DKEPT={kept}", f"-DOTHER={other}"]
        link = ["-xnone", "-Wl,--no-as-needed", SIMULATOR, f"-Wl,-rpath,{SIMULATOR.parent}", "-ldl"]
        command = ["cc", "-shared", "-fPIC", *macros, "-o", driver, "-xc", "-", *link]
        subprocess.run(command, input=DRIVER, text=True, check=True)
        monkeypatch.setenv("TMS_CUDA_DRIVER", str(driver))

    return build


@pytest.mark.parametrize(
    ("kept", "other", "named"),
    [
        ("1", "0", ["GPU 0", "GPU 1"]),
        ("last == 1", "0", ["GPU 1"]),
        ("1", "calls", ["GPU 0", "GPU 1"]),  # the memory of other programs is not taken for that of the pause
    ],
)
def test_a_driver_that_frees_nothing(
    plant_driver: Callable[[str, str], None], kept: str, other: str, named: list[str]
) -> None:
    plant_driver(kept, other)
    finding = gpu_checks.pause()
    assert_complete(finding, Status.FAIL)
    assert "does not free memory" in finding.found and "another release of the driver" in finding.advice
    assert finding.details == tuple(f"{name}: 0 B freed" for name in named)


def test_another_program_that_allocates_during_the_trial(plant_driver: Callable[[str, str], None]) -> None:
    plant_driver("0", "calls < 2")
    assert_complete(gpu_checks.pause(), Status.OK)


@pytest.mark.parametrize(
    ("fault", "found", "advice"),
    [
        ("cuMemRelease:0:99:999", "cuMemRelease failed with CUDA_ERROR_UNKNOWN", "nvidia-smi"),
        (
            "cuMemCreate:0:99:2",
            "cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY",
            "end the processes",
        ),  # another program took it meanwhile
    ],
)
def test_a_pause_that_fails(simulated: None, monkeypatch: pytest.MonkeyPatch, fault: str, found: str, advice: str) -> None:
    monkeypatch.setenv("TMS_SIMULATED_FAULT", fault)
    finding = gpu_checks.pause()
    assert_complete(finding, Status.FAIL)
    assert found in finding.found and "device 0" in finding.found and advice in finding.advice


def test_a_pause_is_tried_where_there_is_memory(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_SIMULATED_FAULT", "cuMemCreate:0:99:2")
    plant(monkeypatch, gpu(0, free_bytes=63 << 20), gpu(1, virtual_memory=False))
    finding = gpu_checks.pause()
    assert_complete(finding, Status.SKIP)
    assert "64 MiB" in finding.found


@pytest.mark.parametrize(
    ("values", "files", "status", "text"),
    [
        ({}, [], Status.SKIP, "no network card"),
        ({"rdma": False}, [], Status.WARN, "managed memory of GPU 1 cannot be registered"),
        ({}, ["sys/class/infiniband/mlx5_0"], Status.WARN, "modprobe nvidia_peermem"),
        ({}, ["sys/class/infiniband/mlx5_0", "sys/module/nvidia_peermem"], Status.OK, "mlx5_0"),
        ({"dma_buf": True}, ["sys/class/infiniband/mlx5_0"], Status.WARN, "modprobe"),  # GPU 0 has it not
    ],
)
def test_rdma(
    machine: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, object], files: list[str], status: str, text: str
) -> None:
    plant(monkeypatch, gpu(0), gpu(1, **values))
    for path in files:
        (machine / path).mkdir(parents=True)
    finding = gpu_checks.rdma()
    assert_complete(finding, status)
    assert text in f"{finding.found} {finding.advice}"


def test_rdma_by_dma_buf(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    plant(monkeypatch, gpu(0, dma_buf=True), gpu(1, dma_buf=True))
    assert_complete(gpu_checks.rdma(), Status.OK)


def test_peers(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_complete(gpu_checks.peers(), Status.OK)
    plant(monkeypatch, gpu(0), gpu(1, peers=[]))
    finding = gpu_checks.peers()
    assert_complete(finding, Status.WARN)
    assert finding.details == ("GPU 1 cannot access the memory of GPU 0",)
    plant(monkeypatch, gpu(0, peers=[]))
    assert_complete(gpu_checks.peers(), Status.SKIP)


def numa(root: Path, *nodes: int, allowed: str = "0-1") -> Finding:
    """With two nodes, and the GPUs on these."""
    write(root, "sys/devices/system/node/online", "0-1\n")
    write(root, "proc/self/status", f"Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t{allowed}\n")
    for ordinal, node in enumerate(nodes):
        write(root, f"sys/bus/pci/devices/0000:{ordinal + 1:02x}:00.0/numa_node", f"{node}\n")
    return gpu_checks.numa()


def test_one_numa_node(machine: Path) -> None:
    assert_complete(gpu_checks.numa(), Status.OK)
    write(machine, "sys/devices/system/node/online", "0\n")
    assert gpu_checks.numa().found == "the machine has one NUMA node"


@pytest.mark.parametrize(
    ("nodes", "allowed", "status", "text"),
    [
        ((0, 1), "0-1", Status.OK, "may use 0, 1"),
        ((0, 1), "0", Status.WARN, "cross the link"),
        ((1, 1), "1", Status.OK, "may use 1"),
        ((0, -1), "0-1", Status.WARN, "is unknown"),
        ((0,), "0-1", Status.WARN, "is unknown"),
    ],
)
def test_several_numa_nodes(machine: Path, nodes: tuple[int, ...], allowed: str, status: str, text: str) -> None:
    finding = numa(machine, *nodes, allowed=allowed)
    assert_complete(finding, status)
    assert text in finding.found
    assert finding.details[0] == f"GPU 0: node {nodes[0]}"

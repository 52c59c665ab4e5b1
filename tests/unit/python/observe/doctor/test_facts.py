"""Guards what the doctor asks in processes of their own: a driver or a PyTorch that crashes or fails is an answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import SIMULATOR

from torch_memory_saver.observe._doctor import check, driver_probe


@pytest.fixture(autouse=True)
def queried_again() -> Iterator[None]:
    """What other tests have asked, and what these ask, is forgotten."""
    for ask in (check.driver_facts, check.torch_facts):
        ask.cache_clear()
    yield
    for ask in (check.driver_facts, check.torch_facts):
        ask.cache_clear()


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_CUDA_DRIVER", str(SIMULATOR))
    monkeypatch.setenv("TMS_SIMULATED_DEVICES", "2")
    monkeypatch.setenv("TMS_SIMULATED_MEMORY", "512MiB")
    monkeypatch.delenv("TMS_SIMULATED_VISIBLE", raising=False)


def test_the_driver_describes_each_device(simulated: None) -> None:
    found = check.driver_facts()
    assert (found.problem, found.loaded, found.cuda_version) == (None, True, 13000)
    first, second = found.devices
    assert (first.ordinal, second.ordinal, first.peers, second.peers) == (0, 1, [1], [0])
    assert (first.problem, first.total_bytes, first.free_bytes, first.granularity_bytes) == (
        None,
        512 << 20,
        512 << 20,
        2 << 20,
    )
    assert first.virtual_memory and first.exportable and first.rdma
    assert first.name and first.pci != second.pci


def test_no_device_is_no_problem_of_the_driver(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_SIMULATED_DEVICES", "0")
    found = check.driver_facts()
    assert (found.problem, found.loaded, list(found.devices)) == (None, True, [])


def test_a_driver_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_CUDA_DRIVER", "/nonexistent.so")
    found = check.driver_facts()
    assert not found.loaded and found.problem is not None and "/nonexistent.so could not be loaded" in found.problem


def library(folder: Path, text: str) -> str:
    """A driver whose functions are those of the C text."""
    path = folder / "driver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-xc", "-o", path, "-"], input=text, text=True, check=True)
    return str(path)


VERSION = "int cuDriverGetVersion(int *v) { *v = 12080; return 0; } "


def test_a_driver_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = 'int cuInit(unsigned f) { return 802; } int cuGetErrorName(int r, const char **n) { *n = "CUDA_NAME"; return 0; }'
    monkeypatch.setenv("TMS_CUDA_DRIVER", library(tmp_path, VERSION + text))
    found = check.driver_facts()
    assert (found.problem, found.loaded, found.cuda_version) == ("cuInit failed with CUDA_NAME", True, 12080)


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMS_CUDA_DRIVER", library(tmp_path, VERSION + "int cuInit(unsigned f) { return 0; }"))
    problem = check.driver_facts().problem
    assert problem is not None and problem.startswith("cuDeviceGetCount failed with no such function")


def test_a_driver_that_crashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMS_CUDA_DRIVER", library(tmp_path, "int cuDriverGetVersion(int *v) { return *(volatile int *)0; }"))
    assert check.driver_facts().problem == "the process was ended by SIGSEGV"


def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "#include <unistd.h>\nint cuDriverGetVersion(int *v) { for (;;) pause(); }"
    monkeypatch.setenv("TMS_CUDA_DRIVER", library(tmp_path, text))
    monkeypatch.setattr(check, "_PATIENCE_S", 0.5)
    assert check.driver_facts().problem == "there was no answer within 0.5 seconds"


def test_a_device_that_cannot_be_used(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(driver: driver_probe._Driver, device: object) -> int:
        raise driver_probe._CallError("cuDevicePrimaryCtxRetain", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(driver_probe, "_free_memory", fail)
    found = driver_probe.probe(str(SIMULATOR))
    assert found["problem"] is None
    problems = {row["problem"] for row in found["devices"]}
    assert problems == {"cuDevicePrimaryCtxRetain failed with CUDA_ERROR_OUT_OF_MEMORY"}
    assert all(row["total_bytes"] and row["name"] for row in found["devices"])


@pytest.fixture
def planted_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that `import torch` runs."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "torch.py"


def test_what_pytorch_is_built_for(planted_torch: Path) -> None:
    planted_torch.write_text("class version: cuda = '12.8'\n__version__ = '2.9.0+cu128'\nprint('a banner')")
    found = check.torch_facts()
    assert (found.problem, found.version, found.cuda, found.hip) == (None, "2.9.0+cu128", "12.8", None)
    assert list(found.runtimes) == []


def test_what_others_print_is_not_the_answer(planted_torch: Path) -> None:
    """Such as a sitecustomize that logs JSON, and a library that says goodbye."""
    planted_torch.write_text("class version: cuda = '12.8'\n__version__ = '2.9.0'\n")
    first = """print('{"level": "info"}\\n{"x": 1} no end', end='', flush=True)\n"""
    last = """import atexit; atexit.register(print, '{"bye": 1}')\n"""
    (planted_torch.parent / "sitecustomize.py").write_text(first + last)
    found = check.torch_facts()
    assert (found.problem, found.version) == (None, "2.9.0")


def test_a_process_that_a_signal_without_a_name_ends() -> None:
    assert check.run_child("-c", "import os; os.kill(os.getpid(), 40)")[2] == "the process was ended by signal 40"


def test_an_import_that_fails(planted_torch: Path) -> None:
    planted_torch.write_text("raise ImportError('libcudart.so.13: cannot open\\nshared object file')")
    found = check.torch_facts()
    assert (found.problem, found.missing) == ("ImportError: libcudart.so.13: cannot open shared object file", False)
    planted_torch.write_text("import no_such_module")
    check.torch_facts.cache_clear()
    found = check.torch_facts()
    assert (found.problem, found.missing) == ("No module named 'no_such_module'", False)


def test_pytorch_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys._base_executable} -I -S "$@"\n')  # type: ignore[attr-defined]
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    found = check.torch_facts()
    assert (found.problem, found.missing) == ("No module named 'torch'", True)


def test_an_import_that_ends_the_process(planted_torch: Path) -> None:
    planted_torch.write_text("import os; os.abort()")
    assert check.torch_facts().problem == "the process was ended by SIGABRT"


def test_python_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    for problem in (check.torch_facts().problem, check.driver_facts().problem):
        assert problem is not None and "/nonexistent/python could not be started" in problem

"""Guards the checks of what is installed and loaded: PyTorch, the CUDA runtime, LD_PRELOAD, the hook mode."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from findings import assert_complete
from processes import SIMULATOR, Program

from torch_memory_saver import __version__, _core, simulate
from torch_memory_saver._engine import preload
from torch_memory_saver._engine.engine import Engine
from torch_memory_saver.observe._doctor import installation_checks
from torch_memory_saver.observe._doctor.check import Status, TorchFacts

OURS = str(preload.library_path())


def test_the_package_and_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert_complete(installation_checks.package(), Status.OK)
    assert sys.executable in installation_checks.python().found
    monkeypatch.setattr(simulate, "simulator_path", lambda: tmp_path / "none.so")
    finding = installation_checks.package()
    assert_complete(finding, Status.FAIL)
    assert f"there is no {tmp_path}/none.so" in finding.found


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that the doctor takes for the one in which this package is installed."""
    library = tmp_path / preload.LIBRARY_NAME
    shutil.copy(OURS, library)
    monkeypatch.setattr(preload, "library_path", lambda: library)
    (tmp_path / f"torch_memory_saver-{__version__}.dist-info").mkdir()
    return tmp_path


@pytest.mark.parametrize("record", [f"torch_memory_saver-0.0.9+ours.{__version__}.dist-info", None])
def test_the_version_that_pip_knows(site: Path, record: str | None) -> None:
    found = f"torch_memory_saver {__version__}"
    if record is not None:
        (site / f"torch_memory_saver-{__version__}.dist-info").rename(site / record)
        found += f", which pip knows as 0.0.9+ours.{__version__}"
    finding = installation_checks.package()
    assert_complete(finding, Status.OK)
    assert finding.found == found


@pytest.mark.parametrize(
    "name",
    [
        "torch_memory_saver_hook_mode_preload_cu12.abi3.so",
        "torch_memory_saver_hook_mode_torch.abi3.so",
        "torch_memory_saver-0.0.9.dist-info",
    ],
)
def test_files_that_the_cpp_package_has_left(site: Path, name: str) -> None:
    (site / name).touch()
    finding = installation_checks.package()
    assert_complete(finding, Status.WARN)
    assert "such as the C++ package, lie beside this one" in finding.found
    assert "run pip uninstall torch_memory_saver until it finds none" in finding.advice
    assert finding.details[2:] == (str(site / name),)


def test_another_package_in_another_folder(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    for name in (f"torch_memory_saver-{__version__}.dist-info", "torch_memory_saver-0.0.9.dist-info"):
        (other / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "none"), str(other)])
    finding = installation_checks.package()
    assert_complete(finding, Status.WARN)
    assert "such as the C++ package, lie in another folder of sys.path" in finding.found
    assert finding.details[2:] == (str(other / name),)


def test_the_first_use_warns_once_of_libraries_of_the_cpp_package(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    preload.warn_of_another_package()
    assert caplog.messages == []
    names = ("torch_memory_saver_hook_mode_preload_cu12.abi3.so", "torch_memory_saver_hook_mode_preload_cu13.abi3.so")
    for name in names:
        (site / name).touch()
    Engine()
    Engine()
    (message,) = caplog.messages
    assert message.startswith(f"{site} has libraries of the C++ package torch_memory_saver: {', '.join(names)}. ")
    assert "instead of the library of this package: delete them." in message


def test_a_folder_that_cannot_be_listed_has_no_libraries_of_the_cpp_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has changed its user may not list the folder of the package."""

    def refuse(folder: Path, pattern: str) -> NoReturn:
        raise PermissionError(folder)

    monkeypatch.setattr(Path, "glob", refuse)
    assert preload.libraries_of_another_package() == []


@pytest.mark.parametrize(("built_in", "status"), [(1, Status.OK), (0, Status.SKIP)])
def test_nvtx(monkeypatch: pytest.MonkeyPatch, built_in: int, status: str) -> None:
    monkeypatch.setattr(_core, "NVTX", built_in)
    assert_complete(installation_checks.nvtx(), status)


@pytest.mark.parametrize(
    ("facts", "status", "text"),
    [
        (TorchFacts(version="2.11.0+cu130", cuda="13.0"), Status.OK, "2.11.0+cu130, built for CUDA 13.0"),
        (TorchFacts(version="2.5.1", cuda="12.4"), Status.FAIL, "install PyTorch 2.8 or later"),
        (TorchFacts(version="2.11.0+cpu"), Status.WARN, "the CPU only"),
        (TorchFacts(version="2.99.0a0", cuda="13.0"), Status.WARN, "the newest tested release"),
        (TorchFacts(version="2.11.0", hip="6.3"), Status.WARN, "ROCm 6.3"),
        (TorchFacts(problem="No module named 'torch'", missing=True), Status.WARN, "not installed"),
        (TorchFacts(problem="ImportError: no libcudnn"), Status.FAIL, "cannot be imported: ImportError: no libcudnn"),
    ],
)
def test_pytorch(monkeypatch: pytest.MonkeyPatch, facts: TorchFacts, status: str, text: str) -> None:
    monkeypatch.setattr(installation_checks, "torch_facts", lambda: facts)
    finding = installation_checks.pytorch()
    assert_complete(finding, status)
    assert text in f"{finding.found} {finding.advice}"


def test_the_simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMS_SIMULATED_SHARED", raising=False)
    monkeypatch.setattr(installation_checks, "torch_facts", lambda: TorchFacts(problem="no", missing=True))
    finding = installation_checks.simulated_gpu()
    assert_complete(finding, Status.OK)
    assert finding.found.startswith("programs run on it")
    monkeypatch.setattr(installation_checks, "_ASK_DRIVER", "import sys; sys.exit('it broke')")
    finding = installation_checks.simulated_gpu()
    assert_complete(finding, Status.FAIL)
    assert "status 1: it broke" in finding.found


def test_the_simulated_gpu_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a CUDA build that cannot be imported, because the machine has no CUDA libraries."""
    monkeypatch.delenv("TMS_SIMULATED_SHARED", raising=False)
    monkeypatch.setattr(installation_checks, "_ASK_TORCH", "print('A GPU')")
    for facts in (TorchFacts(version="2.11.0", cuda="13.0"), TorchFacts(problem="ImportError: no libcudnn")):
        monkeypatch.setattr(installation_checks, "torch_facts", lambda facts=facts: facts)
        finding = installation_checks.simulated_gpu()
        assert_complete(finding, Status.OK)
        assert finding.found == "PyTorch runs on it, under simulate: A GPU"
    monkeypatch.setenv("TMS_SIMULATED_SHARED", "machine")
    assert installation_checks.simulated_gpu().found == "this process runs on it"


@pytest.mark.parametrize(
    ("facts", "status", "lines"),
    [
        (TorchFacts(version="2.11.0", cuda="13.0", runtimes=["/a/libcudart.so.13"]), Status.OK, 0),
        (TorchFacts(version="2.11.0", cuda="13.0", runtimes=["/a/libcudart.so.13", "/b/libcudart.so.12"]), Status.WARN, 2),
        (TorchFacts(version="2.11.0", cuda="13.0"), Status.WARN, 0),
        (TorchFacts(version="2.11.0"), Status.SKIP, 0),
        (TorchFacts(problem="no"), Status.SKIP, 0),
    ],
)
def test_the_cuda_runtime(monkeypatch: pytest.MonkeyPatch, facts: TorchFacts, status: str, lines: int) -> None:
    monkeypatch.setattr(installation_checks, "torch_facts", lambda: facts)
    finding = installation_checks.runtime()
    assert_complete(finding, status)
    assert len(finding.details) == lines


@pytest.mark.parametrize(
    ("value", "in_force", "status", "text"),
    [
        ("", False, Status.OK, "is not in LD_PRELOAD"),
        (str(SIMULATOR), False, Status.OK, "is not in LD_PRELOAD"),
        (OURS, True, Status.OK, "of this package"),
        (f"{OURS}:{SIMULATOR}", True, Status.OK, "of this package"),
        (f"{SIMULATOR} {OURS}", True, Status.WARN, "comes first, and has cudaMalloc"),
        (OURS, False, Status.FAIL, "was not loaded"),
        ("/nonexistent/libx.so", False, Status.FAIL, "take it out"),
        (f"/nonexistent/{preload.LIBRARY_NAME}", False, Status.FAIL, f"set LD_PRELOAD to {OURS}"),
        ("libname.so", False, Status.OK, "is not in LD_PRELOAD"),
    ],
)
def test_ld_preload(monkeypatch: pytest.MonkeyPatch, value: str, in_force: bool, status: str, text: str) -> None:
    monkeypatch.setenv("LD_PRELOAD", value)
    monkeypatch.setattr(_core, "preloaded", in_force)
    finding = installation_checks.preloaded()
    assert_complete(finding, status)
    assert text in f"{finding.found} {finding.advice}"
    assert len(finding.details) == (2 if SIMULATOR.name in value and OURS in value else 0)


def test_the_library_of_another_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_core, "preloaded", True)
    other = tmp_path / preload.LIBRARY_NAME
    shutil.copy(OURS, other)
    monkeypatch.setenv("LD_PRELOAD", str(other))
    assert_complete(installation_checks.preloaded(), Status.OK)  # a copy is as good
    other.write_bytes(b"of another release")
    finding = installation_checks.preloaded()
    assert_complete(finding, Status.FAIL)
    assert f"{other} is not the library of this package" in finding.found
    monkeypatch.setenv("LD_PRELOAD", f"{OURS} {other}")
    assert "several hook libraries" in installation_checks.preloaded().found


@pytest.mark.parametrize(
    ("value", "preloaded", "status"),
    [("1", False, Status.WARN), ("YES", False, Status.WARN), ("0", False, Status.OK), ("1", True, Status.OK)],
)
def test_managing_everything_needs_the_hook_library(
    monkeypatch: pytest.MonkeyPatch, value: str, preloaded: bool, status: str
) -> None:
    monkeypatch.setenv("TMS_INIT_ENABLE", value)
    monkeypatch.setattr(_core, "preloaded", preloaded)
    finding = installation_checks.hook_mode()
    assert_complete(finding, status)
    assert finding.found.startswith("preload" if preloaded else "torch")


HOOKS, DRIVER, RUNTIME = f"/a/{preload.LIBRARY_NAME}", "/lib/libcuda.so.570.1", "/b/libcudart.so.13"


@pytest.mark.parametrize(
    ("mapped", "status", "text"),
    [
        ([], Status.OK, "none is running"),
        ([[DRIVER]], Status.OK, "none is running"),
        ([[HOOKS], [HOOKS, DRIVER, RUNTIME], [HOOKS, DRIVER, "/b/libcudart-a1.so.12"]], Status.OK, "3 running, none"),
        ([[HOOKS, DRIVER, RUNTIME], [HOOKS, DRIVER]], Status.WARN, "process 2 (train) has no shared libcudart"),
        ([[HOOKS, DRIVER], ["/a/libother.so", HOOKS, DRIVER]], Status.WARN, "2 processes have no"),
    ],
)
def test_preloaded_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mapped: list[list[str]], status: str, text: str
) -> None:
    monkeypatch.setattr(installation_checks, "_PROCESSES", tmp_path)
    (tmp_path / "3").mkdir(exist_ok=True)  # one that has ended
    for number, paths in enumerate(mapped, start=1):
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        lines = ["7f00-7f01 rw-p 00000000 00:00 0", *(f"7f01-7f02 r-xp 00000000 fe:01 12    {path}" for path in paths)]
        (folder / "maps").write_text("\n".join(lines))
        (folder / "comm").write_text("train\n")
    finding = installation_checks.preloaded_programs()
    assert_complete(finding, status)
    assert text in finding.found
    assert finding.details == (("1 (train)", "2 (train)") if text.startswith("2 processes") else ())


@pytest.mark.parametrize(
    ("variables", "status", "text"),
    [
        ({}, Status.OK, "off"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, Status.OK, "off"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, Status.OK, "on"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:True"}, Status.OK, "on"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, Status.FAIL, "no memory pools"),
    ],
)
def test_the_allocator_of_pytorch(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], status: str, text: str
) -> None:
    for name in installation_checks._ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    finding = installation_checks.allocator()
    assert_complete(finding, status)
    assert text in finding.found
    assert finding.details == tuple(f"{name}={value}" for name, value in variables.items())


def test_in_a_process_that_is_preloaded(program: Program) -> None:
    text = "from torch_memory_saver.observe._doctor import installation_checks as checks; import json\n"
    done = program(text + "print(json.dumps([checks.preloaded(), checks.hook_mode()]))")
    library, mode = json.loads(done.stdout)
    assert library[0] == Status.OK and mode[1] == "preload"

"""Guards the stub libraries: how an installed torch is read, what is generated for it, and the behaviour of the cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_build import LIBRARIES, VERSION, make_torch, needs_compiler
from processes import PACKAGE, environment

from torch_memory_saver import simulate
from torch_memory_saver._simulate import stubs
from torch_memory_saver._simulate.elf import read_library
from torch_memory_saver._simulate.stubs import source_of, version_script_of
from torch_memory_saver._simulate.torch_build import (
    TorchBuild,
    Wanted,
    check_release,
    cudnn_versions,
    find_torch,
    read_wanted,
)
from torch_memory_saver.errors import InvalidStateError, TorchUnavailableError

#: Calls a function of the fake torch in a simulated process and prints its result.
CALLER = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in sys.argv[2:]:
    function = getattr(library, name)
    function.restype = {"call_text": ctypes.c_char_p, "call_pointer": ctypes.c_void_p}.get(name, ctypes.c_int)
    print(name, function())
"""

#: A user that no system has.
ANOTHER_USER = 54321

Simulate = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own; returns the folder that the stubs' folders will be in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / "torch_memory_saver"


@pytest.fixture
def fake_site(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages with the fake torch in it, found before any other."""
    site = tmp_path / "site"
    make_torch(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return site


@pytest.fixture
def run_simulated(tmp_path: Path) -> Simulate:
    """Runs ``simulate`` with `arguments` in a fresh process, with the packages in `site` found first."""

    def run(site: Path, *arguments: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        result = environment(False) | {"XDG_CACHE_HOME": str(tmp_path / "cache")} | variables
        del result["CUDA_VISIBLE_DEVICES"]
        result["PYTHONPATH"] = os.pathsep.join([str(site), result["PYTHONPATH"]])
        done = subprocess.run(
            [sys.executable, "-m", "torch_memory_saver", "simulate", *arguments],
            env=result,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
        return done

    return run


# The installed torch


def package(site: Path, version: str, cuda: str | None) -> Path:
    folder = site / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError\n")
    (folder / "version.py").write_text(f"__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n")
    return folder


def test_torch_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    folder = package(tmp_path, "2.8.0+cu126", "12.6")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_torch() == TorchBuild("2.8.0+cu126", "12.6", folder / "lib")
    assert "torch" not in sys.modules


def test_a_build_without_cuda_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    package(tmp_path, "2.13.0+cpu", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TorchUnavailableError, match=r"\(2\.13\.0\+cpu\) is built without CUDA.*--no-deps torch==2\.13\.0 "):
        find_torch()


@pytest.mark.parametrize("version", ["2.7.1+cu126", "1.13.0", "2.16.0a0+git1", "3.0.0", "main"])
def test_an_unknown_release_is_refused_with_the_supported_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    package(tmp_path, version, "13.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = f"the simulated GPU does not support PyTorch {version}: install one of the releases 2.8 to 2.15"
    with pytest.raises(TorchUnavailableError, match=re.escape(message)):
        find_torch()


@pytest.mark.parametrize("version", ["2.8.0", "2.10.0+cu128", "2.15.0a0+git1"])
def test_known_releases_are_supported(version: str) -> None:
    check_release(version)


def test_a_folder_named_torch_is_not_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "torch").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_torch() is None


def test_a_torch_of_another_shape_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    folder = package(tmp_path, "2.11.0", "13.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    (folder / "lib").rmdir()
    with pytest.raises(TorchUnavailableError, match="no folder lib"):
        find_torch()
    (folder / "version.py").write_text("nothing = 1\n")
    with pytest.raises(TorchUnavailableError, match="which version"):
        find_torch()
    (folder / "version.py").unlink()
    with pytest.raises(TorchUnavailableError, match="not an installed PyTorch"):
        find_torch()


# Required versions


@needs_compiler
def test_functions_are_sorted_under_the_libraries_that_have_them(fake_site: Path) -> None:
    build = find_torch()
    assert build is not None
    wanted = {library.soname: library.functions for library in read_wanted(build, {"cuInit", "cudaMalloc"})}
    # cuFancy, which the simulated driver lacks, must be in some library: the driver's name is the simulated GPU's own.
    assert wanted.pop("libcudart.so.13") == {
        "cudaMalloc": "libcudart.so.13",
        "cudaFree": "libcudart.so.13",
        "cudaFancy": "libcudart.so.13",
        "cuFancy": "",
    }
    assert wanted == {
        "libnccl.so.2": {"ncclFancy": "", "ncclFancyErrorString": ""},
        "libcufile.so.0": {"cuFileFancy": ""},
        "libnvshmem_host.so.3": {"nvshmem_malloc": "NVSHMEM"},
        "libcurand.so.10": {},
    }


def test_the_text_of_a_result_of_cupti_is_written() -> None:
    """PyTorch's profiler prints it without a look at the status, and would print a null pointer."""
    source = source_of(Wanted("libcupti.so.13", {"cuptiGetResultString": "", "cuptiGetVersion": ""}), ())
    assert "WRITES_TEXT(cuptiGetResultString)\n" in source
    assert "RETURNS_STATUS(cuptiGetVersion)\n" in source


def test_generated_text() -> None:
    wanted = Wanted("libcublas.so.13", {"cublasCreate_v2": "N", "cublasGetStatusString": "N", "cublasOld": "N", "plain": ""})
    source = source_of(wanted, {"cublasOld"})
    assert "RETURNS_STATUS(cublasCreate_v2)\n" in source
    assert "RETURNS_TEXT(cublasGetStatusString)\n" in source
    assert "RETURNS_STATUS(plain)\n" in source
    assert "cublasOld" not in source
    assert "return 15;" in source
    assert version_script_of(wanted, {"cublasOld"}) == "N {\n    global: cublasCreate_v2; cublasGetStatusString;\n};\n"
    # A version must be there even where the simulated GPU has all its functions: the dynamic linker looks for it.
    assert version_script_of(Wanted("libx.so.1", {"x": "NODE"}), {"x"}) == "NODE {\n};\n"


def metadata(site: Path, requirement: str) -> None:
    folder = site / "torch-2.11.0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Name: torch\nRequires-Dist: filelock\nRequires-Dist: {requirement}\n")


@pytest.mark.parametrize(
    ("requirement", "version", "number", "bad_parameter"),
    [
        ('nvidia-cudnn-cu13==9.19.0.56; platform_system == "Linux"', "9, 19, 0", 91900, 2000),
        ('nvidia-cudnn-cu12 (==9.1.0.70) ; platform_system == "Linux"', "9, 1, 0", 90100, 2000),
        ("nvidia-cudnn-cu12==8.9.2.26", "8, 9, 2", 8902, 3),
    ],
)
def test_versions_are_those_that_torch_requires(
    tmp_path: Path, requirement: str, version: str, number: int, bad_parameter: int
) -> None:
    metadata(tmp_path, requirement)
    texts = cudnn_versions(tmp_path / "torch", "12.4")
    assert f"cudnnGetVersion(void) {{ return {number}; }}" in texts["cudnnGetVersion"]
    assert "cudnnGetCudartVersion(void) { return 12040; }" in texts["cudnnGetCudartVersion"]
    assert f"{{{version}}}" in texts["cudnnGetProperty"] and f"return {bad_parameter};" in texts["cudnnGetProperty"]
    source = source_of(Wanted("libcudnn.so.9", {"cudnnGetVersion": "", "cudnnCreate": ""}, texts), ())
    assert f"return {number};" in source and "RETURNS_STATUS(cudnnCreate)" in source
    assert "RETURNS_STATUS(cudnnGetVersion)" not in source and "cudnnGetProperty" not in source


def test_a_version_that_is_not_required_is_not_invented(tmp_path: Path) -> None:
    assert cudnn_versions(tmp_path / "torch", "13.0") == {}
    metadata(tmp_path, "nvidia-cudnn-frontend==1.2.3")
    assert cudnn_versions(tmp_path / "torch", "13.0") == {}


def test_only_names_of_functions_get_into_generated_text() -> None:
    with pytest.raises(InvalidStateError, match="not the name of a C function"):
        source_of(Wanted("libx.so.1", {"x){}": ""}), ())


# A program that is linked with them


@needs_compiler
def test_a_program_linked_with_cuda_runs_on_the_simulated_gpu(fake_site: Path, run_simulated: Simulate) -> None:
    library = str(fake_site / "torch" / "lib" / "libtorch_cuda.so")
    names = ["call_malloc_and_free", "call_driver", "call_fancy", "call_fancy", "call_nccl", "call_text", "call_file"]
    names += ["call_pointer", "call_fancy_driver", "call_optional"]
    # curl is not ours: the real one is used.
    curl = str(fake_site / "real")
    done = run_simulated(fake_site, "--", "python", "-c", CALLER, library, *names, "call_curl", LD_LIBRARY_PATH=curl)
    assert done.stdout.splitlines() == [
        "call_malloc_and_free 0",
        "call_driver 0",
        "call_fancy 801",
        "call_fancy 801",
        "call_nccl 1",
        "call_text b'not simulated'",
        "call_file 1",
        "call_pointer None",
        "call_fancy_driver 801",
        "call_optional -1",
        "call_curl 4242",
    ]
    assert done.stderr.count("cudaFancy (libcudart.so.13) is not simulated") == 1
    for name in ("ncclFancy", "ncclFancyErrorString", "cuFileFancy", "nvshmem_malloc", "cuFancy"):
        assert done.stderr.count(f"simulated GPU: {name} (") == 1, done.stderr
    assert len(done.stderr.splitlines()) == 6


@needs_compiler
def test_real_packages_beside_torch_are_not_used(tmp_path: Path, cache: Path, run_simulated: Simulate) -> None:
    site = tmp_path / "packages"
    library = make_torch(site, rpath="$ORIGIN/../../nvidia/cu13/lib")
    installed = site / "nvidia" / "cu13" / "lib"
    installed.mkdir(parents=True)
    for soname in ("libcudart.so.13", "libnccl.so.2"):
        shutil.copy(site / "real" / soname, installed)
    calls = ["call_malloc_and_free", "call_fancy", "call_nccl", "call_driver"]
    done = run_simulated(site, "--", "python", "-c", CALLER, str(library), *calls, LD_LIBRARY_PATH=str(site / "real"))
    assert done.stdout.split() == ["call_malloc_and_free", "0", "call_fancy", "801", "call_nccl", "1", "call_driver", "0"]
    show = "import os; print(os.environ['LD_PRELOAD'])"
    entries = run_simulated(site, "--", "python", "-c", show).stdout.strip().split(":")
    assert [Path(entry).name for entry in entries] == ["_simulated_cuda.so", "libcudart.so.13", "libnccl.so.2"]


@needs_compiler
def test_the_runtime_opened_by_name_is_the_simulated_one(fake_site: Path, run_simulated: Simulate) -> None:
    text = (
        "import ctypes\n"
        "for name in ('libcudart.so.13', 'libcudart.so.12', 'libcuda.so.1'):\n"
        "    library = ctypes.CDLL(name)\n"
        "    library.tms_sim_calls.restype = ctypes.c_uint64\n"
        "    assert library.cuInit(0) == 0\n"
        "    print(library.tms_sim_calls(b'cuInit'))\n"
        "count = ctypes.c_uint()\n"
        "assert ctypes.CDLL('libnvidia-ml.so.1').nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0\n"
        "print('managed', count.value)\n"
    )
    # One and the same loaded object: its counter continues.
    assert run_simulated(fake_site, "--", "python", "-c", text).stdout == "1\n2\n3\nmanaged 1\n"


@needs_compiler
def test_a_stub_has_the_name_and_the_versions_of_the_real_library(fake_site: Path, cache: Path) -> None:
    folder = Path(simulate.environment(base={})["LD_LIBRARY_PATH"])
    assert folder.parent == cache
    names = {path.name for path in folder.iterdir()}
    assert names == {*LIBRARIES, "libcudart.so.12", "libnvidia-ml.so.1"} - {"libcurl.so.4"}
    stub = read_library(folder / "libcudart.so.13", ("cuda",))
    assert stub.soname == "libcudart.so.13"
    assert "libcuda.so.1" in stub.needed
    defined = {symbol.name: symbol.version for symbol in stub.symbols if symbol.defined}
    assert defined == {"cudaFancy": "libcudart.so.13"}
    assert os.path.samefile(folder / "libcuda.so.1", PACKAGE / "_simulated_cuda.so")


# The cache


@needs_compiler
def test_stubs_are_compiled_once(fake_site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = simulate.environment(base={})
    monkeypatch.setenv("CC", "false")
    assert simulate.environment(base={})["LD_LIBRARY_PATH"] == first["LD_LIBRARY_PATH"]
    (folder,) = cache.iterdir()
    assert folder.name.startswith(f"simulate-torch-{VERSION}-")


@needs_compiler
def test_another_torch_gets_other_stubs(fake_site: Path, cache: Path) -> None:
    simulate.environment(base={})
    with (fake_site / "torch" / "lib" / "libtorch_cuda.so").open("ab") as file:
        file.write(b"\0")
    simulate.environment(base={})
    assert len(list(cache.iterdir())) == 2


@needs_compiler
def test_the_cached_folder_depends_on_the_package_and_on_the_simulated_gpu(tmp_path: Path) -> None:
    simulator, other = tmp_path / "a.so", tmp_path / "b.so"
    folders = {
        stubs.cached_folder(None, simulator, ["cuInit"], "1"),
        stubs.cached_folder(None, other, ["cuInit"], "1"),
        stubs.cached_folder(None, simulator, ["cuInit", "cuMemCreate"], "1"),
        stubs.cached_folder(None, simulator, ["cuInit"], "2"),
    }
    assert len(folders) == 4
    assert stubs.cached_folder(None, simulator, {"cuInit"}, "1") in folders


@needs_compiler
@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        ("false", "the C compiler failed on the stub of lib"),
        ("no-such-compiler -O2", "'no-such-compiler', was not found"),
    ],
)
def test_a_compiler_that_fails_leaves_nothing(
    fake_site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, words: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(InvalidStateError, match=words):
        simulate.environment(base={})
    assert list(cache.iterdir()) == []


@needs_compiler
def test_no_compiler_is_an_error_with_the_remedy(
    fake_site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidStateError, match=r"(?s)no C compiler was found.*apt-get install gcc"):
        simulate.environment(base={})
    assert list(cache.iterdir()) == []


@needs_compiler
def test_two_processes_may_fill_the_cache_at_once(fake_site: Path, cache: Path, tmp_path: Path) -> None:
    variables = environment(False) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    del variables["CUDA_VISIBLE_DEVICES"]
    variables["PYTHONPATH"] = os.pathsep.join([str(fake_site), variables["PYTHONPATH"]])
    command = [sys.executable, "-m", "torch_memory_saver", "simulate", "--", "python", "-c", CALLER]
    command += [str(fake_site / "torch" / "lib" / "libtorch_cuda.so"), "call_malloc_and_free"]
    variables["LD_LIBRARY_PATH"] = str(fake_site / "real")
    processes = [subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == ["call_malloc_and_free 0\n"] * 3
    assert len(list(cache.iterdir())) == 1


def test_a_folder_made_meanwhile_by_another_process_stays(cache: Path, tmp_path: Path) -> None:
    folder = cache / "folder"

    def slower() -> list[Wanted]:
        folder.mkdir(parents=True)
        (folder / "theirs").touch()
        return []

    stubs.make_folder(folder, slower, tmp_path / "simulator.so", ())
    assert [path.name for path in cache.iterdir()] == ["folder"]
    assert [path.name for path in folder.iterdir()] == ["theirs"]


def test_the_cache_is_where_the_user_sets_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stubs.cache_root() == tmp_path / "torch_memory_saver"
    # The specification says to ignore paths that are not absolute.
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert stubs.cache_root() == tmp_path / ".cache" / "torch_memory_saver"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "home")
    assert stubs.cache_root() == tmp_path / "home" / ".cache" / "torch_memory_saver"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("changed", ["home/cache/stubs", "home/cache", "home"])
@pytest.mark.parametrize("way", ["owner", "mode"])
def test_a_cache_that_another_user_can_change_is_refused(tmp_path: Path, changed: str, way: str) -> None:
    """The programs of `simulate` load the libraries of the cache."""
    folder = tmp_path / "home" / "cache" / "stubs"
    folder.mkdir(parents=True)
    stubs.make_folder(folder, list, tmp_path / "simulator.so", ())
    if way == "owner":
        os.chown(tmp_path / changed, ANOTHER_USER, -1)
    else:
        (tmp_path / changed).chmod(0o777)
    with pytest.raises(PermissionError, match=str(tmp_path / changed)):
        stubs.make_folder(folder, list, tmp_path / "simulator.so", ())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_no_cache_is_made_in_a_folder_of_another_user(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "cache" / "stubs"
    (tmp_path / "home").mkdir()
    os.chown(tmp_path / "home", ANOTHER_USER, -1)
    with pytest.raises(PermissionError):
        stubs.make_folder(folder, list, tmp_path / "simulator.so", ())
    assert not folder.exists()

"""Guards setup.py: how it finds cuda.h, what it compiles and how, and the contents of a source distribution."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zlib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest
from built import LIBRARIES, REPOSITORY, needs_source_tree
from wheels import PYTHONS

import torch_memory_saver

#: Versions of the installed package, looked up before a fixture empties sys.path. Empty without an installed package.
INSTALLED = [each.version for each in importlib.metadata.distributions(name="torch_memory_saver")]

# cuda.h.


@pytest.fixture
def setup_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, on a machine where nothing is in PATH and no toolkit is named."""
    path = REPOSITORY / "setup.py"
    if not path.is_file():
        pytest.skip("needs the source tree")
    pytest.importorskip("setuptools", reason="needs setuptools")
    specification = importlib.util.spec_from_file_location("tms_setup", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    for variable in ("CUDA_HOME", "CUDA_PATH", "PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(REPOSITORY)  # as installers do
    monkeypatch.setattr(sys, "path", [])
    return module


def make_toolkit(home: Path, include: str = "include") -> Path:
    header = home / include / "cuda.h"
    header.parent.mkdir(parents=True)
    header.touch()
    return header.parent


def make_nvcc(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "nvcc").touch(mode=0o755)
    return folder


def test_cuda_h_is_taken_from_the_most_wanted_place(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_pip = make_toolkit(tmp_path / "site-packages" / "nvidia" / "cu13")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    candidates = [str(path) for path in setup_script.cuda_include_candidates()]
    assert candidates == ["/usr/local/cuda/include", str(from_pip)]

    beside_nvcc = make_toolkit(tmp_path / "toolkit")
    monkeypatch.setenv("PATH", str(make_nvcc(tmp_path / "toolkit" / "bin")))
    assert setup_script.find_cuda_include() == str(beside_nvcc)

    from_path = make_toolkit(tmp_path / "cuda_path")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda_path"))
    assert setup_script.find_cuda_include() == str(from_path)

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "without"))
    assert setup_script.find_cuda_include() == str(from_path)
    from_home = make_toolkit(tmp_path / "cuda_home")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda_home"))
    assert setup_script.find_cuda_include() == str(from_home)


def test_cuda_h_is_found_through_a_link_to_nvcc(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    include = make_toolkit(tmp_path / "toolkit", "targets/x86_64-linux/include")
    compiler = make_nvcc(tmp_path / "toolkit" / "bin") / "nvcc"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(compiler)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert setup_script.find_cuda_include() == str(include)


def test_nvtx_is_taken_from_the_most_wanted_place_or_left_out(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, nvtx = make_toolkit(tmp_path / "toolkit"), tmp_path / "nvidia" / "nvtx" / "include"
    monkeypatch.setattr(setup_script, "cuda_include_candidates", lambda: iter([cuda, nvtx]))
    assert setup_script.find_nvtx_include() is None
    assert setup_script.include_options() == ["-isystem", str(cuda)]
    for folder in (nvtx, cuda):
        (folder / "nvtx3").mkdir(parents=True)
        (folder / "nvtx3" / "nvToolsExt.h").touch()
        assert setup_script.find_nvtx_include() == str(folder)
        assert setup_script.include_options() == [
            option for path in dict.fromkeys([cuda, folder]) for option in ("-isystem", str(path))
        ]


def test_cuda_h_not_found_is_one_sentence(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_script, "cuda_include_candidates", lambda: iter([]))
    with pytest.raises(SystemExit) as end:
        setup_script.find_cuda_include()
    message = str(end.value)
    assert message.startswith("error: cuda.h was not found: set CUDA_HOME")
    assert "pip install nvidia-cuda-runtime" in message
    assert "\n" not in message


def test_free_threaded_python_is_refused_in_one_sentence(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    monkeypatch.setattr(setup_script, "setup", lambda **_: ran.append(True))
    monkeypatch.setattr(setup_script.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    with pytest.raises(SystemExit) as end:
        setup_script.main()
    message = str(end.value)
    assert message.startswith("error: free-threaded builds of Python are not supported")
    assert "\n" not in message
    assert ran == []
    monkeypatch.setattr(setup_script.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 0}.get)
    setup_script.main()
    assert ran == [True]


@needs_source_tree
def test_a_stub_that_does_not_fit_the_c_code_is_one_sentence(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("csrc/include", "torch_memory_saver", "tools"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.chdir(tmp_path)
    declarations = tmp_path / "torch_memory_saver" / "_core.pyi"
    assert setup_script.interface() == zlib.crc32(declarations.read_bytes())
    header = tmp_path / "csrc" / "include" / "tms.h"
    header.write_text(header.read_text().replace("uint64_t unknown_tags;", "uint32_t unknown_tags;"))
    with pytest.raises(SystemExit) as end:
        setup_script.interface()
    assert str(end.value).endswith("_core.pyi does not declare what csrc/include has: run 'make stub'.")


# Compiling.


#: A compiler that records what it compiles, and creates empty files except for `FAILS`.
COMPILER = """#!/bin/sh
for argument; do
    case "$argument" in *.c) echo "$argument" >>"$LOG"; [ "${argument##*/}" != "$FAILS" ] || exit 1 ;; esac
    [ "$before" != -o ] || : >"$argument"
    before=$argument
done
"""


@needs_source_tree
@pytest.mark.parametrize("command", ["dist_info", "bdist_wheel"])
def test_a_setuptools_that_cannot_make_wheels_is_one_sentence(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    there = {"setuptools.command.bdist_wheel": False, "wheel": False}
    monkeypatch.setattr(setup_script, "find_spec", lambda name: object() if there[name] else None)
    monkeypatch.setattr(setup_script, "version", lambda name: "65.5.0")
    with pytest.raises(SystemExit) as end:
        setup_script.require_wheel(["setup.py", command, "--output-dir", "x"])
    text = str(end.value)
    assert "setuptools 65.5.0 needs the package wheel" in text
    assert "pip install wheel" in text
    assert "\n" not in text
    setup_script.require_wheel(["setup.py", "-q", "build_ext", "--inplace"])
    for name in there:
        there[name] = True
        setup_script.require_wheel(["setup.py", command])
        there[name] = False


@pytest.mark.slow
@needs_source_tree
def test_each_file_is_compiled_once(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="needs setuptools")
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    make_toolkit(tmp_path / "cuda")
    tree = tmp_path / "tree"  # a build puts its libraries beside the sources
    for name in ("csrc", "torch_memory_saver"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("*.so"))
    (tree / "tools").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "tools/core_stub.py"):
        shutil.copy(REPOSITORY / name, tree / name)
    folders = ("--build-temp", str(tmp_path / "objects"), "--build-lib", str(tmp_path / "libraries"))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force", *folders]
    environment = os.environ | {
        "CC": str(compiler),
        "LDSHARED": str(compiler),
        "LOG": str(log),
        "CUDA_HOME": str(tmp_path / "cuda"),
    }
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "csrc").rglob("*.c")]
    assert sorted(log.read_text().split()) == sorted(expected)
    made = {path.name for path in (tmp_path / "libraries").rglob("*.so")}
    assert made == {path.name for path in LIBRARIES.values()}
    assert {path.name for path in tree.rglob("*.so")} == made
    failed = subprocess.run(
        command, cwd=tree, env=environment | {"FAILS": "saver.c"}, capture_output=True, text=True, check=False
    )
    assert failed.returncode != 0
    assert "failed" in failed.stderr


@pytest.mark.parametrize(
    ("compiler", "level"),
    [
        ('case "$*" in *_FORTIFY_SOURCE=3*) exit 1 ;; esac', "2"),
        ("exit 0", "3"),
    ],
)
def test_calls_are_fortified_as_far_as_the_compiler_knows(
    setup_script: ModuleType, tmp_path: Path, compiler: str, level: str
) -> None:
    path = make_compiler(tmp_path / "compiler", compiler)
    assert setup_script.fortify([path]) == ["-U_FORTIFY_SOURCE", f"-D_FORTIFY_SOURCE={level}"]


@needs_source_tree
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("variant", ["plain", "asan"])
def test_objects_of_the_c_tests_are_not_fortified(variant: str) -> None:
    command = ["make", "--dry-run", "--always-make", "ctest-build", f"VARIANT={variant}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    compiled = [line for line in done.stdout.splitlines() if " -c csrc/" in line]
    others = ("python", "preload")
    native = {path for path in (REPOSITORY / "csrc").rglob("*.c") if path.parent.name not in others}
    assert {Path(line.split(" -c ")[1].split()[0]) for line in compiled} >= {path.relative_to(REPOSITORY) for path in native}
    assert [line for line in compiled if "-U_FORTIFY_SOURCE" not in line or "-D_FORTIFY_SOURCE" in line] == []


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("gcc -shared -L/p/lib -Wl,-rpath,/p/lib", "gcc -shared -L/p/lib"),
        ("gcc -Wl,-rpath=/p -Wl,--rpath=/q -Wl,-z,now", "gcc -Wl,-z -Wl,now"),
        ("gcc -Wl,-O1,-rpath,/p,-z,relro", "gcc -Wl,-O1 -Wl,-z -Wl,relro"),
        ("gcc -Wl,-rpath -Wl,/p -Wl,--rpath -Wl,/q -O2", "gcc -O2"),
        ("gcc -Xlinker -rpath -Xlinker /p -Xlinker -z -Xlinker now", "gcc -Wl,-z -Wl,now"),
        ("gcc -Wl,-R,/p -Wl,-R/q -Wa,--x,--y", "gcc -Wa,--x,--y"),
    ],
)
def test_run_paths_are_not_linked(setup_script: ModuleType, command: str, kept: str) -> None:
    assert setup_script.without_run_paths(command.split()) == kept.split()


def reason_of_no_compiler(setup_script: ModuleType, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        setup_script.require_compiler(["setup.py", *arguments])
    message = str(end.value)
    begin, end_ = "error: the libraries of torch_memory_saver cannot be compiled, because ", ": install a C compiler and "
    assert message.startswith(begin) and "\n" not in message and "set CC" in message
    return message.removeprefix(begin).partition(end_)[0]


def make_compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("command", ["bdist_wheel", "build_ext", "editable_wheel"])
def test_no_compiler_is_one_sentence(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("CC", f"{tmp_path}/gcc -pthread")
    expected = f"the C compiler {tmp_path}/gcc cannot be started (No such file or directory)"
    assert reason_of_no_compiler(setup_script, "-q", command) == expected
    make_compiler(tmp_path / "gcc", "echo '<stdin>: in:' >&2; echo 'fatal error: Python.h' >&2; echo note >&2; exit 1")
    expected = f"{tmp_path}/gcc says 'fatal error: Python.h'"
    assert reason_of_no_compiler(setup_script, command) == expected
    make_compiler(tmp_path / "gcc", "exit 2")
    assert reason_of_no_compiler(setup_script, command) == f"{tmp_path}/gcc fails with the status 2"
    make_compiler(tmp_path / "gcc", 'case "$*" in *-pthread*-I*-fsyntax-only*) grep -q Python.h ;; *) exit 3 ;; esac')
    setup_script.require_compiler(["setup.py", command])


def test_what_compiles_nothing_needs_no_compiler(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nonexistent/gcc")
    for command in ("sdist", "dist_info", "egg_info"):
        setup_script.require_compiler(["setup.py", "-q", command])


# The distribution.


@needs_source_tree
def test_version_has_one_source(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMS_PINNED_VERSION", raising=False)
    assert setup_script.package_version() == torch_memory_saver.__version__
    files = [REPOSITORY / "pyproject.toml", *REPOSITORY.glob("*.py"), *(REPOSITORY / "torch_memory_saver").rglob("*.py")]
    having = [path.name for path in files if f'"{torch_memory_saver.__version__}"' in path.read_text()]
    assert having == ["_interface.py"]
    # The wheel of a release for an engine's pin has a prefix.
    assert {each.rpartition("+ours.")[2] for each in INSTALLED} <= {torch_memory_saver.__version__}


@needs_source_tree
def test_a_pinned_version_has_the_own_one_as_its_local_part(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    for given, expected in {"": "", "0.0.9": "0.0.9+ours.", "0.0.9.post1": "0.0.9.post1+ours."}.items():
        monkeypatch.setenv("TMS_PINNED_VERSION", given)
        assert setup_script.package_version() == expected + torch_memory_saver.__version__
    for wrong in ("==0.0.9", "0.0.9+ours", "latest", "1", "0.0.9 "):
        monkeypatch.setenv("TMS_PINNED_VERSION", wrong)
        with pytest.raises(SystemExit) as end:
            setup_script.package_version()
        message = str(end.value)
        assert message.startswith(f"error: TMS_PINNED_VERSION={wrong} is no release number: set it to")
        assert "\n" not in message


@needs_source_tree
def test_wheels_are_tested_with_each_python() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert tuple(re.findall(r"Python :: (3\.\d+)", text)) == PYTHONS
    (build,) = re.findall(r'^build = "(.*)"$', text, re.MULTILINE)
    assert all(fnmatch(f"cp{release.replace('.', '')}-manylinux_aarch64", build) for release in PYTHONS)
    assert not fnmatch("cp39-manylinux_x86_64", build) and not fnmatch("cp314t-manylinux_x86_64", build)


@needs_source_tree
def test_the_package_has_the_files_of_the_pages(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="needs setuptools")
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "build_py", "-d", str(tmp_path / "lib")]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
    package = REPOSITORY / "torch_memory_saver"
    files = [path for kind in ("html", "css", "js") for path in package.rglob(f"*.{kind}")]
    assert {"template.html", "theme.css", "style.css", "elements.js"} <= {path.name for path in files}
    assert [path for path in files if not (tmp_path / "lib" / path.relative_to(REPOSITORY)).is_file()] == []


@pytest.mark.slow
def test_source_distribution_has_all_files_for_building_and_testing(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="needs setuptools")
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".*_cache", ".git", ".venv", ".hypothesis", "build", "dist", "*.egg-info")
    shutil.copytree(REPOSITORY, tree, ignore=ignored)
    command = [sys.executable, "setup.py", "-q", "sdist", "--formats=gztar", "--dist-dir", str(tmp_path / "dist")]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=120)
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    endings = (
        ".c",
        ".h",
        ".def",
        ".map",
        ".py",
        ".pyi",
        ".md",
        ".toml",
        ".in",
        ".json",
        ".txt",
        ".html",
        ".css",
        ".js",
        ".pickle",
    )
    present = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file() and path.name.endswith(endings)}
    present = {path for path in present if not path.startswith(".") and ".egg-info" not in path}
    assert len(present) > 50
    assert present - packed == set()
    assert {"LICENSE", "Makefile", ".ci/run", ".clang-format", ".clang-tidy"} <= packed
    assert {name for name in packed if name.endswith((".so", ".o", ".pyc"))} == set()

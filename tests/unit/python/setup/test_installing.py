"""Guards every way to install the package, each from a clone of its own: `pip install .`, an editable install, a wheel for
each Python, a source distribution, beside a requirement that pins another version; that uninstalling leaves nothing; and the
error of the import if the Python files and the native library do not match.

The C files are compiled only once for all tests, without optimisation: the compiler of these tests keeps every object file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from wheels import PACKAGE, PYTHONS, VirtualEnvironment, find_python, user_environment, write_cpp_wheel, write_wheel

from torch_memory_saver import __version__ as VERSION

REPOSITORY = Path(__file__).resolve().parents[4]
PRELOAD = "torch_memory_saver_hook_mode_preload.abi3.so"
LIBRARIES = ("torch_memory_saver/_core.abi3.so", "torch_memory_saver/_simulated_cuda.so", PRELOAD)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (REPOSITORY / "setup.py").is_file(), reason="needs the source tree"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]

#: Keeps compiled objects by the path of the file. All of these trees are copies of one, compiled with the same options.
COMPILER = """#!/bin/sh
source= output= before= compiles=
for argument; do
    case "$argument" in -c) compiles=1 ;; *.c) source=$argument ;; esac
    [ "$before" != -o ] || output=$argument
    before=$argument
done
[ -n "$compiles" ] || exec gcc "$@"
kept="$KEPT_OBJECTS/$source.o"
if [ ! -f "$kept" ]; then
    gcc "$@" -O0 -g1 -U_FORTIFY_SOURCE -w || exit 1
    cp "$output" "$kept.$$" && mv "$kept.$$" "$kept"
fi
cp "$kept" "$output"
"""

DEMO = ["-m", "torch_memory_saver", "demo", "--ascii"]
WHERE = "import torch_memory_saver as t; from torch_memory_saver import _core; print(t.__file__); print(_core.library_path)"


class Clone:
    """A copy of the sources with a virtual environment beside it. Packages that build are those of this environment."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.tree = folder / "clone"
        self.outside = folder / "elsewhere"
        self.outside.mkdir(parents=True)
        self._environment = environment
        ignored = shutil.ignore_patterns(".*_cache", ".git", ".venv", ".hypothesis", "build", "dist", "*.egg-info", "*.so")
        shutil.copytree(REPOSITORY, self.tree, ignore=ignored)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        self.python = folder / "venv" / "bin" / "python"
        self.site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
        # Behind its own packages: pip, setuptools and wheel; not an installed torch_memory_saver, which Python would find
        # before an editable one.
        tools = folder / "tools"
        tools.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if "torch_memory_saver" not in entry.name:
                (tools / entry.name).symlink_to(entry)
        (self.site / "zz_tools.pth").write_text(f"{tools}\n")

    def run(self, *arguments: str, folder: Path | None = None, status: int = 0, **variables: str) -> str:
        """The output of Python, followed by its errors."""
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=folder or self.outside,
            env=self._environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    def install(self, *what: str) -> None:
        options = ("--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--ignore-installed")
        self.run("-m", "pip", "install", *options, *what, folder=self.tree)

    def wheel(self, into: Path, **variables: str) -> Path:
        """Builds a wheel of the clone, in an empty folder."""
        options = ("--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(into))
        self.run("-m", "pip", "wheel", *options, ".", folder=self.tree, **variables)
        (path,) = into.iterdir()
        return path

    def imported(self, folder: Path | None = None) -> list[str]:
        """Paths of the package and of the library that holds the state, of Python started in that folder."""
        return [str(Path(line).resolve()) for line in self.run("-c", WHERE, folder=folder).splitlines()]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    for module in ("pip", "setuptools"):  # not imported here: pip and setuptools conflict in one process
        if subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode:
            pytest.skip(f"needs {module}")
    makes_wheels = "from importlib.util import find_spec as f; exit(not (f('setuptools.command.bdist_wheel') or f('wheel')))"
    if subprocess.run([sys.executable, "-c", makes_wheels], capture_output=True).returncode:
        pytest.skip("needs setuptools 70.1, or the package wheel, to build wheels without the package index")
    folder = tmp_path_factory.mktemp("compiler")
    (folder / "compiler").write_text(COMPILER)
    (folder / "compiler").chmod(0o755)
    for source in (REPOSITORY / "csrc").rglob("*.c"):
        (folder / "kept" / source.relative_to(REPOSITORY)).parent.mkdir(parents=True, exist_ok=True)
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LD_PRELOAD", "CFLAGS")}
    return own | {
        "CC": str(folder / "compiler"),
        # As that of a Python that was built for a folder of its own.
        "LDSHARED": "gcc -shared -Wl,-rpath,/opt/python/lib",
        "LD_RUN_PATH": "/opt/python/lib",
        "KEPT_OBJECTS": str(folder / "kept"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def libraries_of(root: Path) -> Sequence[Path]:
    return [root / name for name in LIBRARIES if (root / name).is_file()]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Clone:
    """After `pip install .` in a fresh clone."""
    clone = Clone(tmp_path_factory.mktemp("installed"), environment)
    clone.install(".")
    return clone


def test_an_install_works_started_inside_the_clone(installed: Clone) -> None:
    assert "Every check held" in installed.run(*DEMO, folder=installed.tree)
    package, library = installed.imported(installed.tree)
    assert package == str(installed.tree / "torch_memory_saver" / "__init__.py")
    assert library == str(installed.tree / LIBRARIES[0])
    assert len(libraries_of(installed.tree)) == len(LIBRARIES)
    assert [path.name for path in installed.tree.rglob(".*.so")] == []  # temporary files of the build


def test_an_install_works_started_elsewhere(installed: Clone) -> None:
    assert "Every check held" in installed.run(*DEMO)
    assert installed.imported()[0] == str(installed.site / "torch_memory_saver" / "__init__.py")
    assert len(libraries_of(installed.site)) == len(LIBRARIES)


def test_every_python_file_and_the_script_are_installed(installed: Clone) -> None:
    sources, found = (
        {str(path.relative_to(root)) for path in (root / "torch_memory_saver").rglob("*.py")}
        for root in (installed.tree, installed.site)
    )
    assert sources == found
    script = installed.python.with_name("torch-memory-saver")
    version = installed.run("-m", "torch_memory_saver", "--version")
    assert installed.run(str(script), "--version") == version
    assert installed.run(str(script), "compare", "/nonexistent", status=2).startswith("torch-memory-saver compare: error: ")


def output_of(*command: object) -> str:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, timeout=60).stdout


def test_no_library_names_the_folder_of_the_building_python(installed: Clone) -> None:
    for library in libraries_of(installed.site) + libraries_of(installed.tree):
        assert not re.search(r"\bR(UN)?PATH\b", output_of("readelf", "--wide", "--dynamic", library))


def sections(library: Path) -> set[str]:
    return set(re.findall(r"\] (\.[\w.-]+)", output_of("readelf", "--wide", "--sections", library)))


def test_a_wheel_has_no_debug_data_and_a_build_keeps_it(installed: Clone, tmp_path: Path) -> None:
    """With the address of a function in a user's library the symbols give its file."""
    symbols = tmp_path / "symbols"
    (tmp_path / "wheel").mkdir()
    archive = installed.wheel(tmp_path / "wheel", TMS_SYMBOLS=str(symbols))
    shutil.unpack_archive(archive, tmp_path / "unpacked", format="zip")
    libraries = libraries_of(tmp_path / "unpacked")
    assert len(libraries) == len(list(symbols.rglob("*.debug"))) == len(LIBRARIES)
    for library, kept in zip(libraries, libraries_of(installed.tree), strict=True):
        assert [name for name in sections(library) if "debug" in name] == []
        assert {".symtab", ".note.gnu.build-id"} <= sections(library)
        assert {".symtab", ".debug_line"} <= sections(kept)
        (identity,) = re.findall("Build ID: (\\w+)", output_of("readelf", "--notes", library))
        assert identity in output_of("readelf", "--notes", kept)
        debug = symbols / ".build-id" / identity[:2] / f"{identity[2:]}.debug"
        (address,) = re.findall(r"(\w+) T (?:tms_get_api|cuInit)$", output_of("nm", library), re.MULTILINE)
        where = output_of("addr2line", "--exe", debug, f"0x{address}")
        assert re.search(r"csrc/(abi/api|simulator/[\w/]+)\.c:\d+", where), where


def test_without_a_compiler_an_install_says_so_in_one_sentence(installed: Clone) -> None:
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--ignore-installed")
    printed = installed.run("-m", "pip", "install", *options, ".", folder=installed.tree, status=1, CC="/nonexistent/gcc")
    assert "[1 lines of output]" in printed
    assert "error: the libraries of torch_memory_saver cannot be compiled, because the C compiler /nonexistent" in printed


def test_a_build_leaves_processes_the_library_that_they_have_loaded(installed: Clone) -> None:
    library = installed.tree / LIBRARIES[0]
    with library.open("rb") as loaded:
        before = loaded.read()
        installed.run("setup.py", "-q", "build_ext", "--inplace", folder=installed.tree)
        assert os.fstat(loaded.fileno()).st_nlink == 0  # another file has the name
        loaded.seek(0)
        assert loaded.read() == before
    assert library.stat().st_mode & 0o111


def test_a_wheel_and_a_source_distribution(installed: Clone, tmp_path: Path, environment: dict[str, str]) -> None:
    """A source distribution of a clone with libraries beside the sources, the wheel of it, and that one installed."""
    installed.run("setup.py", "-q", "sdist", "--formats=gztar", "--dist-dir", str(tmp_path), folder=installed.tree)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (sources,) = (tmp_path / "unpacked").iterdir()
    assert libraries_of(sources) == []
    other = Clone(tmp_path / "other", environment)
    wheels = ("wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(tmp_path))
    other.run("-m", "pip", *wheels, str(sources))
    (wheel,) = tmp_path.glob("*.whl")
    other.install(str(wheel))
    assert "Every check held" in other.run(*DEMO)
    assert other.imported()[0] == str(other.site / "torch_memory_saver" / "__init__.py")
    assert "torch_memory_saver has no native library" in other.run(*DEMO, folder=other.tree, status=1)


def test_an_editable_install_survives_the_edit_of_a_python_file(tmp_path: Path, environment: dict[str, str]) -> None:
    clone = Clone(tmp_path, environment)
    clone.install("--editable", ".")
    assert clone.imported()[0] == str(clone.tree / "torch_memory_saver" / "__init__.py")
    saver = clone.tree / "torch_memory_saver" / "saver.py"
    saver.write_text(saver.read_text() + "\nEDITED = True\n")
    assert clone.run("-c", "import torch_memory_saver.saver as saver; print(saver.EDITED)") == "True\n"
    assert "Every check held" in clone.run(*DEMO)
    assert clone.run(
        "-c", "from torch_memory_saver._engine.preload import library_path as path; print(path().is_file())"
    ) == ("True\n")


# The wheel.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, installed: Clone) -> Path:
    return installed.wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("release", PYTHONS)
def test_one_wheel_works_with_each_python(wheel: Path, tmp_path: Path, release: str) -> None:
    python = find_python(release)
    if python is None:
        pytest.skip(f"needs Python {release}, in PATH or installed by pyenv")
    for_it = ("--only-binary=:all:", "--implementation=cp", f"--python-version={release}", "--target", str(tmp_path))
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    subprocess.run([*install, *for_it, str(wheel)], check=True)
    environment = user_environment() | {"PYTHONPATH": str(tmp_path)}
    command = [python, *DEMO, "--device", "simulated"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert "Every check held" in done.stdout, done.stderr


def test_uninstalling_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    environment = VirtualEnvironment(tmp_path / "venv", wheel.parent)
    before = environment.files()
    environment.pip("install", str(wheel))
    assert "Every check held" in environment.run(*DEMO)
    assert environment.package_check()["status"] == "ok"
    assert len(libraries_of(environment.site)) == len(LIBRARIES)
    environment.pip("uninstall", "--yes", PACKAGE)
    assert environment.files() - before == set()


def test_an_install_over_the_cpp_package_replaces_it(wheel: Path, tmp_path: Path) -> None:
    cpp = write_cpp_wheel(tmp_path, "0.0.10")
    environment = VirtualEnvironment(tmp_path / "venv", wheel.parent)
    environment.pip("install", str(cpp))
    environment.pip("install", str(wheel))
    check = environment.package_check()
    assert (check["status"], check["found"]) == ("ok", f"torch_memory_saver {VERSION}")
    assert sorted(path.name for path in environment.site.glob("*.so")) == [PRELOAD]


def test_an_install_beside_files_of_the_cpp_package_says_so(wheel: Path, tmp_path: Path) -> None:
    """pip then knows two packages of one name. What the doctor advises leaves only this one."""
    cpp = write_cpp_wheel(tmp_path, "0.0.10")
    environment = VirtualEnvironment(tmp_path / "venv", wheel.parent)
    before = environment.files()
    environment.pip("install", str(cpp))
    environment.pip("install", "--ignore-installed", str(wheel))
    check = environment.package_check()
    assert (check["status"], check["found"]) == (
        "warn",
        "files of another torch_memory_saver, such as the C++ package, lie beside this one",
    )
    left = {Path(line).name for line in check["details"][2:]}
    suffixes = ("torch", "torch_cu12", "torch_cu13", "preload_cu12", "preload_cu13")
    assert left == {f"torch_memory_saver_hook_mode_{suffix}.abi3.so" for suffix in suffixes} | {
        "torch_memory_saver-0.0.10.dist-info"
    }
    for _ in range(2):
        environment.pip("uninstall", "--yes", PACKAGE)
    assert environment.files() - before == set()


def test_a_pinned_version_keeps_the_package(installed: Clone, tmp_path: Path) -> None:
    """Releases of an engine pin the C++ package. pip finds that package too, and keeps this one."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    ours = installed.wheel(wheels, TMS_PINNED_VERSION="0.0.9")
    version = f"0.0.9+ours.{VERSION}"
    assert ours.name.startswith(f"torch_memory_saver-{version}-cp310-abi3-")
    write_cpp_wheel(wheels, "0.0.9")
    write_wheel(wheels, "engine", "1.0", requirement="torch_memory_saver==0.0.9")
    write_wheel(wheels, "engine", "1.1", requirement="torch-memory-saver==0.0.9")
    environment = VirtualEnvironment(tmp_path / "venv", wheels)
    environment.pip("install", str(ours))
    for command in ("engine==1.0", "--upgrade engine", "--upgrade --upgrade-strategy=eager engine", PACKAGE):
        environment.pip("install", *command.split())
        assert environment.versions()[PACKAGE] == version
        assert "No broken requirements found" in environment.pip("check")
    assert environment.versions()["engine"] == "1.1"
    assert environment.run("-c", "import torch_memory_saver as t; print(t.__version__)") == f"{VERSION}\n"
    check = environment.package_check()
    assert (check["status"], check["found"]) == ("ok", f"torch_memory_saver {VERSION}, which pip knows as {version}")


def test_without_a_pinned_version_a_pin_replaces_the_package(wheel: Path, tmp_path: Path) -> None:
    """What the pinned version prevents; a constraint does not."""
    write_cpp_wheel(tmp_path, "0.0.9")
    engine = write_wheel(tmp_path, "engine", "1.0", requirement="torch_memory_saver==0.0.9")
    environment = VirtualEnvironment(tmp_path / "venv", tmp_path)
    environment.pip("install", str(wheel))
    environment.pip("install", str(engine))
    assert environment.versions()[PACKAGE] == "0.0.9"
    environment.pip("install", "--no-deps", str(wheel))
    assert environment.versions()[PACKAGE] == VERSION
    assert "torch-memory-saver==0.0.9" in environment.pip("check", status=1).replace("_", "-")
    (tmp_path / "constraints").write_text(f"torch_memory_saver=={VERSION}\n")
    environment.pip("install", "--constraint", str(tmp_path / "constraints"), "--force-reinstall", str(engine), status=1)


# The interface between the Python files and the library.


def copy_of_the_package(tmp_path: Path) -> Path:
    """The package as it is imported here, with a setup.py beside it, as in a clone."""
    import torch_memory_saver

    package = Path(torch_memory_saver.__file__).parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "setup.py").touch()
    return tmp_path / package.name


def import_error(package: Path) -> str:
    code = "import torch_memory_saver"
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=package, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_a_library_of_another_interface_is_refused_in_one_sentence(tmp_path: Path) -> None:
    package = copy_of_the_package(tmp_path)
    declarations = package / "_core.pyi"
    declarations.write_text(declarations.read_text() + "\ndef added() -> None: ...\n")
    assert import_error(package) == (
        f"ImportError: the native library {package / '_core.abi3.so'} was not built for the Python files of "
        f"torch_memory_saver in {package}: build it with 'pip install .' in {tmp_path}"
    )


def test_a_missing_library_is_one_sentence(tmp_path: Path) -> None:
    package = copy_of_the_package(tmp_path)
    (package / "_core.abi3.so").unlink()
    begin = f"ImportError: torch_memory_saver has no native library in {package}: "
    assert import_error(package) == f"{begin}build it with 'pip install .' in {tmp_path}"
    (tmp_path / "setup.py").unlink()
    again = (
        "install the package again from where it came, such as with 'pip install --force-reinstall .' in a clone "
        "of this project (the package of this name on PyPI is another one)"
    )
    assert import_error(package) == begin + again


def test_the_library_was_built_for_these_declarations() -> None:
    from torch_memory_saver import _core

    declarations = Path(_core.__file__).with_name("_core.pyi")
    assert zlib.crc32(declarations.read_bytes()) == _core.INTERFACE

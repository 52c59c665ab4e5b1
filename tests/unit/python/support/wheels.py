"""Virtual environments and wheels for tests of installing: other projects' wheels, and interpreters of other releases."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

__all__ = ["PACKAGE", "PYTHONS", "VirtualEnvironment", "find_python", "user_environment", "write_cpp_wheel", "write_wheel"]

PACKAGE = "torch_memory_saver"
#: Releases of Python that the one wheel works with.
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def user_environment() -> dict[str, str]:
    """The environment of programs that write files of bytecode and see installed packages only."""
    unwanted = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "LD_PRELOAD")
    return {name: value for name, value in os.environ.items() if name not in unwanted}


class VirtualEnvironment:
    """An empty one. The pip of these tests installs into it, from the folder of wheels only."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.site = next((folder / "lib").glob("python*")) / "site-packages"
        self._wheels = wheels

    def pip(self, command: str, *arguments: str, status: int = 0) -> str:
        options = ("--no-index", "--find-links", str(self._wheels)) if command == "install" else ()
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.python))
        return self._run(*pip, command, *options, *arguments, status=status)

    def run(self, *arguments: str, status: int = 0) -> str:
        return self._run(str(self.python), *arguments, status=status)

    def versions(self) -> dict[str, str]:
        """The version of each package that pip finds."""
        return {row["name"].replace("-", "_"): row["version"] for row in json.loads(self.pip("list", "--format=json"))}

    def files(self) -> set[Path]:
        return set(self.folder.rglob("*"))

    def package_check(self) -> dict[str, Any]:
        """What the doctor says of the package."""
        rows = json.loads(self._start(str(self.python), "-m", PACKAGE, "doctor", "--json").stdout)
        (row,) = (row for row in rows if row["name"] == "package")
        return row

    def _run(self, *command: str, status: int) -> str:
        done = self._start(*command)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def _start(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.folder, env=user_environment(), capture_output=True, text=True, check=False, timeout=600
        )


def write_wheel(folder: Path, name: str, version: str, *files: str, requirement: str | None = None) -> Path:
    """A wheel with empty files: a stand-in for another project."""
    record = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    contents = dict.fromkeys(files, "") | {
        f"{record}/METADATA": metadata + (f"Requires-Dist: {requirement}\n" if requirement else ""),
        f"{record}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents[f"{record}/RECORD"] = "".join(f"{path},,\n" for path in (*contents, f"{record}/RECORD"))
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in contents.items():
            archive.writestr(file, text)
    return path


def write_cpp_wheel(folder: Path, version: str) -> Path:
    """A stand-in for the C++ package, with the names of its files."""
    suffixes = ("", "_cu12", "_cu13")
    libraries = [
        f"torch_memory_saver_hook_mode_{mode}{suffix}.abi3.so" for mode in ("preload", "torch") for suffix in suffixes
    ]
    return write_wheel(folder, PACKAGE, version, *libraries, f"{PACKAGE}/__init__.py", f"{PACKAGE}/binary_wrapper.py")


def find_python(release: str) -> str | None:
    """An interpreter of that release, from pyenv or in PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, *map(str, sorted(pyenv.glob(f"{release}.*/bin/python"))), shutil.which(f"python{release}")]
    ask = "import sys, sysconfig; print(sysconfig.get_config_var('Py_GIL_DISABLED') or '%d.%d' % sys.version_info[:2])"
    for python in filter(None, candidates):
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
        if (done.returncode, done.stdout.strip()) == (0, release):
            return python
    return None

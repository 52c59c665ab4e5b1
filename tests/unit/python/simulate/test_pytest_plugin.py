"""Guards ``pytest --simulated-gpus N``: how pytest is started again. A folder stands for PyTorch, which no test here
imports."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from built import needs_source_tree
from plugin_entry import add_plugin_entry
from processes import PACKAGE, TIMEOUT_S, environment

from torch_memory_saver import simulate

pytestmark = [needs_source_tree, pytest.mark.slow]

GIB = 1 << 30
#: Each process of pytest that imports it adds a line that describes the process.
CONFTEST = """
import ctypes, json, os, sys
with open(os.path.join(os.path.dirname(__file__), "processes"), "a") as file:
    variables = {name: value for name, value in os.environ.items() if "SIMULATED" in name}
    loaded = "_simulated_cuda.so" in open("/proc/self/maps").read()
    imported = [name for name in ("torch", "torch_memory_saver") if name in sys.modules]
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    print(json.dumps([variables, loaded, imported, sys.orig_argv[1:], os.getpid(), worker]), file=file)
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


class Seen:
    """A process of pytest, as it saw itself before its tests."""

    def __init__(self, line: str) -> None:
        variables, self.loaded, self.imported, self.arguments, self.pid, self.worker = json.loads(line)
        self.variables: dict[str, str] = {name.removeprefix("TMS_SIMULATED_"): value for name, value in variables.items()}

    @property
    def shape(self) -> tuple[str | None, str | None]:
        return self.variables.get("DEVICES"), self.variables.get("MEMORY")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a test."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_them.py").write_text("def test_one(): print('ran')\ndef test_failing(): assert False\n")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -k test_one\n")
    return folder


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The environment of a pytest that has the plugin by its entry point, and finds the folder that stands for PyTorch."""
    site = tmp_path / "site"
    make_torch(site, "13.0")
    add_plugin_entry(site)
    result = {name: value for name, value in environment(False).items() if not name.startswith(("PYTEST", "CUDA", "TMS_"))}
    paths = [str(site), str(PACKAGE.parent)]
    return result | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(paths)}


def make_torch(site: Path, cuda: str | None) -> None:
    (site / "torch" / "lib").mkdir(parents=True, exist_ok=True)
    (site / "torch" / "__init__.py").write_text("raise ImportError('this must not be imported')\n")
    (site / "torch" / "version.py").write_text(f"__version__ = '2.11.0'\ncuda = {cuda!r}\n")


@pytest.fixture
def run(project: Path, variables: dict[str, str]) -> Run:
    """Runs a Python with arguments in the project's folder. It must end with `status`."""

    def start(*arguments: str, status: int = 0, text: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=variables | more,
            cwd=project,
            input=text,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
        return done

    return start


def processes(project: Path) -> list[Seen]:
    path = project / "processes"
    return [Seen(line) for line in path.read_text().splitlines()] if path.exists() else []


def console_script(folder: Path) -> str:
    """The program `pytest` as pip installs it."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="pytest")
    path = folder / "pytest-program.py"
    path.write_text(f"import sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())\n")
    return str(path)


# How it is started


def test_pytest_starts_again_once_with_the_same_command_line(run: Run, project: Path, tmp_path: Path) -> None:
    options = ["--simulated-gpus", "2", "--simulated-memory=4GiB", "-p", "no:cacheprovider", "-q"]
    for command in (["-X", "dev", "-W", "ignore", "-m", "pytest", *options], [console_script(tmp_path), *options]):
        done = run(*command)
        assert "1 passed" in done.stdout
        (seen,) = processes(project)
        assert seen.shape == ("2", str(4 * GIB))
        assert seen.loaded
        assert "torch" not in seen.imported
        assert seen.arguments == command
        (project / "processes").unlink()


def test_the_header_names_the_machine(run: Run) -> None:
    done = run("-m", "pytest", "--simulated-gpus=3")
    assert "torch_memory_saver: simulated GPUs: 3, each with 8 GiB\n" in done.stdout
    assert done.stdout.count("test session starts") == 1


def test_without_the_option_nothing_is_done_or_imported(run: Run, project: Path) -> None:
    assert "plugin-1" in run("-m", "pytest").stdout
    (seen,) = processes(project)
    assert (seen.shape, seen.loaded, seen.imported) == ((None, None), False, [])


def test_the_exit_status_is_that_of_the_tests(run: Run) -> None:
    run("-m", "pytest", "--simulated-gpus=1", "-k", "failing", status=1)
    run("-m", "pytest", "--simulated-gpus=1", "-k", "nothing", status=5)


@pytest.mark.parametrize("ini", [True, False], ids=["pytest.ini", "PYTEST_ADDOPTS"])
def test_options_that_are_set_elsewhere(run: Run, project: Path, ini: bool) -> None:
    options = "--simulated-gpus 2 -k test_one"
    if ini:
        (project / "pytest.ini").write_text(f"[pytest]\naddopts = {options}\n")
    run("-m", "pytest", **({} if ini else {"PYTEST_ADDOPTS": options}))
    (seen,) = processes(project)
    assert seen.shape == ("2", str(8 * GIB))


def test_standard_input_and_output_are_those_of_pytest(run: Run, project: Path) -> None:
    text = "import sys\ndef test_one(): print('read:', sys.stdin.read(), sys.stdout.fileno())\n"
    (project / "test_them.py").write_text(text)
    assert "read: words 1\n" in run("-m", "pytest", "-s", "--simulated-gpus=1", text="words").stdout


@pytest.mark.slow
def test_processes_of_xdist_do_not_start_again(run: Run, project: Path) -> None:
    pytest.importorskip("xdist")
    done = run("-m", "pytest", "--simulated-gpus=2", "-n2")
    assert "1 passed" in done.stdout
    seen = processes(project)
    assert sorted(str(each.worker) for each in seen) == ["None", "gw0", "gw1"]
    assert {each.shape for each in seen} == {("2", str(8 * GIB))}
    assert len({each.variables["SHARED"] for each in seen}) == 1


@pytest.mark.slow
def test_a_pytest_that_a_process_of_xdist_starts_is_a_program_of_its_own(run: Run, project: Path) -> None:
    run("-m", "pytest", "--simulated-gpus=2", PYTEST_XDIST_WORKER="gw0")
    (seen,) = processes(project)
    assert seen.shape == ("2", str(8 * GIB))


@pytest.mark.slow
def test_a_program_that_runs_pytest_is_run_again(run: Run, project: Path) -> None:
    """Like coverage: a program that runs the module pytest as the main one."""
    runner = project / "runner.py"
    runner.write_text("import runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_module('pytest', run_name='__main__')\n")
    run("runner.py", "pytest", "--simulated-gpus=2")
    (seen,) = processes(project)
    assert seen.loaded
    assert seen.arguments == ["runner.py", "pytest", "--simulated-gpus=2"]


# Under simulate


def machine(variables: dict[str, str], **arguments: Any) -> dict[str, str]:
    return simulate.environment(base=variables, **arguments)


@pytest.mark.slow
def test_pytest_on_such_a_machine_is_not_started_again(run: Run, project: Path, variables: dict[str, str]) -> None:
    there = machine(variables, devices=2, memory="1GiB", bandwidth=1000)
    for options in (["--simulated-gpus=2"], ["--simulated-gpus=2", "--simulated-memory=1024MiB"]):
        run("-m", "pytest", *options, **there)
    for seen in processes(project):
        assert seen.variables["SHARED"] == there["TMS_SIMULATED_SHARED"]
        assert seen.variables["BANDWIDTH"] == "1000"


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--simulated-gpus=3"], ["--simulated-gpus=2", "--simulated-memory=3GiB"]])
def test_another_machine_is_a_new_one(run: Run, project: Path, variables: dict[str, str], options: list[str]) -> None:
    there = machine(variables, devices=2, memory="1GiB")
    run("-m", "pytest", *options, **there)
    (seen,) = processes(project)
    assert seen.shape == (options[0][-1], str((3 if len(options) == 2 else 8) * GIB))
    assert seen.variables["SHARED"] != there["TMS_SIMULATED_SHARED"]


# Refusals, in one sentence


def refused(done: subprocess.CompletedProcess[str], project: Path, *words: str) -> None:
    # With pytest 7 the plugin manager adds a warning of its own.
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert done.stdout == ""
    assert processes(project) == [], "a conftest.py was imported"


@pytest.mark.slow
def test_a_program_that_calls_pytest(run: Run, project: Path, variables: dict[str, str]) -> None:
    program = "import pytest, sys; sys.exit(pytest.main(['--simulated-gpus=2', '-q']))"
    how = "python -m torch_memory_saver simulate --devices 2 --memory 8GiB -- python"
    refused(run("-c", program, status=4), project, "pytest.main()", how)
    assert "1 passed" in run("-c", program, **machine(variables, devices=2)).stdout


def test_no_pytorch(run: Run, project: Path, tmp_path: Path) -> None:
    # A module that is None in sys.modules cannot be found.
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None\n")
    refused(run("-m", "pytest", "--simulated-gpus=2", status=4), project, "has no PyTorch", "pip install --no-deps torch")


def test_a_pytorch_without_cuda(run: Run, project: Path, tmp_path: Path) -> None:
    make_torch(tmp_path / "site", None)
    refused(run("-m", "pytest", "--simulated-gpus=2", status=4), project, "built without CUDA", "pip install")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--simulated-gpus=9"], "--simulated-gpus: the number of simulated devices must be 0 to 8, not 9"),
        (["--simulated-gpus=1", "--simulated-memory=8GB"], "--simulated-memory: '8GB' is not a size"),
        (["--simulated-gpus=1", "--simulated-memory=1MiB"], "--simulated-memory: a simulated device has at least 2 MiB"),
        (["--simulated-memory=8GiB"], "needs the number of simulated GPUs: set it with --simulated-gpus"),
    ],
)
def test_options_that_make_no_machine(run: Run, project: Path, options: list[str], words: str) -> None:
    refused(run("-m", "pytest", *options, status=4), project, words)


def test_a_simulated_gpu_that_is_not_loaded_does_not_start_pytest_for_ever(run: Run, project: Path) -> None:
    (project / "early.py").write_text("import os; os.environ.pop('LD_PRELOAD', None)\n")
    done = run("-m", "pytest", "-p", "early", "--simulated-gpus=2", status=4)
    refused(done, project, "changes LD_PRELOAD")


# Hints


def test_a_pytorch_without_its_cuda_libraries_is_explained_once(run: Run, project: Path, tmp_path: Path) -> None:
    missing = "libcudnn.so.9: cannot open shared object file: No such file or directory"
    (tmp_path / "site" / "torch" / "__init__.py").write_text(f"raise ImportError({missing!r})\n")
    (project / "test_them.py").write_text("import torch\n")
    done = run("-m", "pytest", status=2)
    assert done.stdout.count("pytest --simulated-gpus 1") == 1
    assert "PyTorch's CUDA libraries are missing. Install them, or run the tests without a GPU" in done.stdout
    (project / "test_them.py").write_text("import torch_is_elsewhere\n")
    assert "--simulated-gpus" not in run("-m", "pytest", status=2).stdout


def test_the_marker_is_declared(run: Run) -> None:
    assert "@pytest.mark.device_memory(limit): fail the test if" in run("-m", "pytest", "--markers").stdout

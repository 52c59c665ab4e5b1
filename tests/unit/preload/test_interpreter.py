"""Guards that a Python process that never imports the package can send managed tensors, and is disturbed by nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Any: pytest shares no module with conftest.py, where the types of the fixtures are.
Run = Callable[..., "subprocess.CompletedProcess[str]"]

PROGRAM = Path(__file__).resolve().parent / "programs" / "unaware.py"
ENABLED = {"TMS_INIT_ENABLE": "1"}


def outcome(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("scenario", ["on_main_thread", "while_the_main_thread_waits", "without_torch"])
def test_the_first_managed_allocation(run: Run, libraries: Any, scenario: str, tmp_path: Path) -> None:
    """`-S`: the package is not on the path of the process. The working directory has nothing either."""
    done = run([sys.executable, "-S", PROGRAM, scenario, libraries.simulator], env=ENABLED, cwd=tmp_path)
    assert outcome(done) == (0, "done\n", "")


def test_a_forked_child_makes_no_call_of_its_parent(run: Run, libraries: Any, tmp_path: Path) -> None:
    """It would make it before its locks are new, and could wait for ever for a thread of the parent."""
    command = [sys.executable, "-S", "-W", "ignore::DeprecationWarning", PROGRAM, "fork_before_the_pending_call"]
    done = run([*command, libraries.simulator], env=ENABLED, cwd=tmp_path)
    assert outcome(done) == (0, "done\n", "")


@pytest.mark.parametrize("options", [["-S"], ["-I"], ["-I", "-S"]], ids=" ".join)
def test_a_program_of_ctypes_pauses(run: Run, libraries: Any, options: list[str], tmp_path: Path) -> None:
    """-I ignores PYTHON* variables and the working directory, as -S leaves out installed packages."""
    env = {**ENABLED, "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    done = run([sys.executable, *options, PROGRAM, "with_ctypes_only", libraries.simulator], env=env, cwd=tmp_path)
    assert outcome(done) == (0, "done\n", "")


def test_without_init_enable_nothing_is_installed(run: Run, libraries: Any, tmp_path: Path) -> None:
    done = run([sys.executable, "-S", PROGRAM, "not_enabled", libraries.simulator], cwd=tmp_path)
    assert outcome(done) == (0, "done\n", "")


def test_a_library_without_the_package_beside_it_disturbs_nothing(run: Run, libraries: Any, tmp_path: Path) -> None:
    alone = shutil.copy(libraries.preload, tmp_path)
    done = run(
        [sys.executable, "-S", PROGRAM, "without_torch", libraries.simulator], preload=[alone], env=ENABLED, cwd=tmp_path
    )
    assert outcome(done) == (0, "done\n", "")


def test_a_package_that_cannot_be_imported_disturbs_nothing(run: Run, libraries: Any, tmp_path: Path) -> None:
    """As with another version of Python, or with the C++ package of the same name before ours."""
    (tmp_path / "torch_memory_saver").mkdir()
    (tmp_path / "torch_memory_saver" / "__init__.py").write_text("raise ImportError('another one')\n")
    done = run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
            f"sys.argv = ['x', 'cannot', {str(libraries.simulator)!r}]\nexec(open({str(PROGRAM)!r}).read())",
        ],
        env=ENABLED,
    )
    assert outcome(done) == (0, "done\n", "")


def plant_modules(folder: Path, marker: Path) -> Path:
    """Make a folder as another user could: with each module of the standard library, and with this package."""
    planted = f"with open({str(marker)!r}, 'a') as file: print(__name__, file=file)\n"
    package = folder / "torch_memory_saver"
    (package / "_engine").mkdir(parents=True)
    files = [
        package / "__init__.py",
        package / "_startup.py",
        package / "_engine" / "preloaded.py",
        folder / "only_there.py",
    ]
    for path in [*files, *(folder / f"{name}.py" for name in sys.stdlib_module_names)]:
        path.write_text(planted)
    return folder


@pytest.mark.parametrize("scenario", ["after_a_change_of_folder", "change_of_folder_without_torch"])
@pytest.mark.parametrize("by_name", [False, True], ids=["absolute", "relative"])
@pytest.mark.parametrize("as_text", [False, True], ids=["script", "-c"])
def test_no_code_of_another_folder_runs(
    run: Run, libraries: Any, scenario: str, by_name: bool, as_text: bool, tmp_path: Path
) -> None:
    """LD_PRELOAD may name the library by a relative path, and `python -c` has the working directory on its path."""
    marker = tmp_path / "marker"
    env = {**ENABLED, "FOREIGN": str(plant_modules(tmp_path / "foreign", marker))}
    arguments = [scenario, str(libraries.simulator)]
    text = f"import sys; sys.argv = ['x', *{arguments!r}]; exec(open({str(PROGRAM)!r}).read())"
    done = run(
        [sys.executable, "-S", *(["-c", text] if as_text else [PROGRAM, *arguments])],
        preload=[f"./{libraries.preload.name}" if by_name else libraries.preload],
        env=env,
        cwd=libraries.preload.parent,
    )
    assert outcome(done) == (0, "done\n", "")
    assert not marker.exists(), marker.read_text()

"""Guards that the code of README and docs that needs PyTorch runs on the simulated GPU.

Each Python program runs as it is and with TMS_DISABLE=1, where assertions about managed memory cannot hold. Blocks that need
no PyTorch, and a list of the blocks that are not run, are in tests/docs/test_code_blocks.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from document_blocks import REPOSITORY, Program, pages, read
from plugin_entry import add_plugin_entry
from warm_python import torch_programs

import torch_memory_saver

if not (REPOSITORY / "docs").is_dir():
    pytest.skip("needs the sources: there is no docs/", allow_module_level=True)

_WITH_TORCH = [program for page in pages() for program in read(page)[0] if program.needs_torch]
PROGRAMS = {program.name: program for program in _WITH_TORCH if program.language == "python"}
COMMANDS = {program.name: program for program in _WITH_TORCH if program.language == "bash"}
_NOTE_ASSERTIONS = Path(__file__).parent / "programs" / "note_assertions.py"
_TIMEOUT_S = 300
#: Assertions about what is managed, paused, dropped, or in a host copy (`state`).
_ABOUT_MANAGED = re.compile(
    r"paused|tag_of|bytes|isnan|fresh|unwritten|== 0\)|registered|phase|pauses|physical|backup|^bool\(\(state\["
)


Ended = tuple[int, str, Path]


def run_all(tmp_path_factory: pytest.TempPathFactory, *runner: str, **variables: str) -> dict[str, Ended]:
    """The exit status of every program, what it printed, and its path."""
    folder = tmp_path_factory.mktemp("documents")
    ended = {}
    for name, program in PROGRAMS.items():
        path = folder / (name.replace("/", "-").replace(":", "-") + ".py")
        path.write_text(program.text, encoding="utf-8")
        process = torch_programs.start([*runner, str(path)], os.environ | variables, folder)
        printed = "".join(process.communicate(_TIMEOUT_S))
        ended[name] = (process.wait(), printed, path)
    return ended


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return run_all(tmp_path_factory)


@pytest.fixture(scope="module")
def disabled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return run_all(tmp_path_factory, str(_NOTE_ASSERTIONS), TMS_DISABLE="1")


def _skip_without_transformers(name: str) -> None:
    if "from transformers import" in PROGRAMS[name].text and importlib.util.find_spec("accelerate") is None:
        pytest.skip("needs transformers and accelerate")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_page_runs(name: str, results: dict[str, Ended]) -> None:
    _skip_without_transformers(name)
    status, printed, _ = results[name]
    assert status == 0, f"{name}:\n{printed}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_page_runs_with_the_package_disabled(name: str, disabled: dict[str, Ended]) -> None:
    """To its end, and with the right contents of tensors. What does not hold is about managed memory, and is printed."""
    _skip_without_transformers(name)
    status, printed, path = disabled[name]
    assert status == 0, f"{name}:\n{printed}"
    failed = path.with_name(path.name + ".failed").read_text(encoding="utf-8").splitlines()
    print("does not hold:", *failed, sep="\n")
    assert [text for text in failed if not _ABOUT_MANAGED.search(text)] == []


def test_with_the_package_disabled_nothing_is_managed(disabled: dict[str, Ended]) -> None:
    paths = [path.with_name(path.name + ".failed") for _, _, path in disabled.values()]
    failed = "".join(path.read_text(encoding="utf-8") for path in paths)
    assert "torch_memory_saver.is_paused(managed)" in failed
    assert all(printed.count("TMS_DISABLE is set") <= 1 for _, printed, _ in disabled.values())


@pytest.fixture
def user_environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a user's shell: without a simulated GPU, and with the installed package."""
    ours = ("TMS_", "PYTEST", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH")
    result = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    add_plugin_entry(tmp_path / "site")
    result["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), str(Path(torch_memory_saver.__file__).parent.parent)])
    result["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return result


@pytest.mark.parametrize("program", COMMANDS.values(), ids=COMMANDS)
def test_a_command_of_a_page_runs(program: Program, tmp_path: Path, user_environment: dict[str, str]) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in program.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program.text],
        cwd=folder,
        env=user_environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    print(done.stdout)
    assert done.returncode == 0, f"{program.name}:\n{done.stdout}\n{done.stderr}"

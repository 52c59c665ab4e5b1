"""Guards `run`: the environment of the program, that it takes this process's place, and what a program that never imports
the package has recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from processes import ELSEWHERE, PACKAGE, SIMULATOR, TIMEOUT_S, Program, environment, run_python

from torch_memory_saver import _startup
from torch_memory_saver._cli import main
from torch_memory_saver._engine import preload
from torch_memory_saver.observe.events import load_events

#: Each starts programs.
pytestmark = pytest.mark.slow

STARTUP = _startup.FOLDER
HOOK = str(preload.library_path())
MIB = 1 << 20
PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def given(command: Program, *options: str, **variables: str) -> Mapping[str, str]:
    """The environment of a program that runs with these options."""
    done = command("run", *options, "--", sys.executable, "-S", "-c", PRINT_ENVIRONMENT, **variables)
    result: Mapping[str, str] = json.loads(done.stdout)
    return result


def test_without_options_the_environment_stays(command: Program) -> None:
    assert given(command) == environment(False)


def test_the_hook_library_comes_before_what_is_preloaded(command: Program) -> None:
    assert given(command, "--preload")["LD_PRELOAD"] == HOOK
    assert given(command, "--preload", LD_PRELOAD=f"{SIMULATOR} libm.so.6")["LD_PRELOAD"] == f"{HOOK}:{SIMULATOR}:libm.so.6"
    assert given(command, "--preload", LD_PRELOAD=HOOK)["LD_PRELOAD"] == HOOK
    assert "PYTHONPATH" in (with_it := given(command, "--preload")) and STARTUP not in with_it["PYTHONPATH"]


def test_what_is_recorded(command: Program, tmp_path: Path) -> None:
    folder = tmp_path / "a folder" / "below"
    found = given(command, "--directory", str(folder), "--record", "History,events", PYTHONPATH=f"{PACKAGE.parent}:/x")
    assert (found["TMS_DEBUG"], found["TMS_DEBUG_DIR"]) == ("events,history", str(folder))
    assert found["PYTHONPATH"] == f"{STARTUP}:{PACKAGE.parent}:/x"
    assert "LD_PRELOAD" not in found and "TMS_INIT_ENABLE" not in found
    assert folder.is_dir() and list(folder.iterdir()) == []


def test_a_folder_is_relative_to_where_run_is_called(tmp_path: Path) -> None:
    arguments = ("run", "--record", "events", "--directory", "here", "--", "env")
    done = run_python("-m", "torch_memory_saver", *arguments, cwd=tmp_path)
    assert f"TMS_DEBUG_DIR={tmp_path}/here\n" in done.stdout


def test_a_relative_path_in_a_variable_is_too(tmp_path: Path) -> None:
    """The program reads the variables when it uses CUDA, and may have changed its working directory by then."""
    variables = {"TMS_DEBUG": "oom", "TMS_DEBUG_DIR": "here", "TMS_METRICS_FILE": "./metrics-{pid}"}
    done = run_python("-m", "torch_memory_saver", "run", "--", "env", cwd=tmp_path, **variables)
    assert f"TMS_DEBUG_DIR={tmp_path}/here\n" in done.stdout
    assert f"TMS_METRICS_FILE={tmp_path}/metrics-{{pid}}\n" in done.stdout


def test_variables_that_are_set_already_are_started_too(command: Program) -> None:
    assert given(command, "--preload", TMS_METRICS_FILE="/x")["PYTHONPATH"].startswith(f"{STARTUP}:")


def test_managing_everything_preloads(command: Program) -> None:
    found = given(command, "--manage")
    assert (found["LD_PRELOAD"], found["TMS_INIT_ENABLE"]) == (HOOK, "1")


def assert_refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    """One sentence, and the program was not started."""
    assert done.stderr.startswith("python -m torch_memory_saver run: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr
    assert done.stdout == ""


def test_what_cannot_be_done_is_one_sentence(command: Program, tmp_path: Path) -> None:
    program = ("--", "echo", "started")
    assert_refused(command("run", status=2), "there is no command to run")
    assert_refused(command("run", "--preload", "--", status=2), "there is no command to run")
    assert_refused(command("run", "--directory", "x", *program, status=2), "--directory has no effect without --record")
    (tmp_path / "file").touch()
    for folder in ("/proc/none", f"{tmp_path}/file", f"{tmp_path}/file/below"):
        assert_refused(
            command("run", "--record", "events", "--directory", folder, *program, status=2),
            f"{folder}: it cannot be written to: ",
        )
    for words in ("", "all", "events,all"):
        assert "is not one or more of events, snapshots" in command("run", "--record", words, *program, status=2).stderr


@pytest.mark.parametrize("name", ["a:b", "a b"])
def test_a_path_that_ld_preload_cannot_hold(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    library = tmp_path / name / preload.LIBRARY_NAME
    library.touch()
    monkeypatch.setattr(preload, "library_path", lambda: library)
    for command in (["run", "--preload", "--", "true"], ["run", "--preload", "--print-env"]):
        assert main.main(command) == 1
        output, errors = capsys.readouterr()
        assert output == "" and errors.count("\n") == 1
        assert f"LD_PRELOAD cannot name '{library}', because of the space or colon in it: install" in errors
    library.unlink()
    assert main.main(["run", "--preload", "--", "true"]) == 1
    assert "the preload library is not installed" in capsys.readouterr().err


def test_a_path_that_pythonpath_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_startup, "FOLDER", str(tmp_path / "a:b"))
    assert main.main(["run", "--record", "history", "--print-env"]) == 1
    assert "PYTHONPATH cannot name" in capsys.readouterr().err


# The program takes this process's place.


def test_the_program_is_the_same_process_with_the_same_files() -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "torch_memory_saver", "run", "--preload", "--", "sh", "-c", "echo $$; exec cat"],
        env=environment(False),
        cwd=ELSEWHERE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = started.communicate("typed\n", timeout=TIMEOUT_S)
    assert output == f"{started.pid}\ntyped\n"
    assert started.returncode == 0


def test_the_exit_status_is_the_program_s(command: Program) -> None:
    command("run", "--", "sh", "-c", "exit 7", status=7)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM])
def test_signals_are_the_program_s(command: Program, number: int) -> None:
    done = command("run", "--", "sh", "-c", f"kill -{number} $$; echo alive", status=-number)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_program_that_cannot_be_started(command: Program, tmp_path: Path) -> None:
    assert_refused(
        command("run", "--", "train.py", status=2), "train.py is no program but a Python script: write run -- python"
    )
    done = command("run", "--", "no-such-program", status=127)
    assert (
        done.stderr
        == "python -m torch_memory_saver run: error: no-such-program could not be started: No such file or directory\n"
    )
    (tmp_path / "text").write_text("text")
    assert (
        "text could not be started: Permission denied\n" in command("run", "--", str(tmp_path / "text"), status=126).stderr
    )


# A program that never imports the package

#: A PyTorch that initialises CUDA lazily, as the real one does, and allocates by the CUDA runtime.
TORCH = """
import ctypes
_initialized = False
nested = 0
def is_initialized():
    return _initialized
def _lazy_init():
    global _initialized, nested
    if _initialized or nested:
        return
    nested = 1
    import torch.cuda
    torch.cuda._lazy_init()  # as calls that were queued do
    _initialized = True
    runtime = ctypes.CDLL(None)
    address = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(4 << 20)) == 0
"""


@pytest.fixture
def torch_program(command: Program, tmp_path: Path) -> Program:
    """Runs Python text under `run --manage --record events` with a planted torch; returns what it prints."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from torch import cuda\n__version__ = '2.11.0'\n")
    (package / "cuda.py").write_text(TORCH)

    def run(text: str, *before: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([*before, str(tmp_path / "site"), str(PACKAGE.parent)])
        options = ("--manage", "--record", "events", "--directory", str(tmp_path))
        variables = {"PYTHONPATH": path, "LD_PRELOAD": str(SIMULATOR)} | variables
        return command("run", *options, "--", sys.executable, "-c", f"import sys\n{text}", **variables)

    return run


def event_files(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("events/*"))


USES_CUDA = "import torch\ntorch.cuda._lazy_init()\n"
#: The planted torch has no operators that could be replaced: counts the installations instead.
COUNTS_INSTALLATIONS = (
    "import types\ninstallations = []\n"
    "sys.modules['torch_memory_saver._simulate.operators.install'] = types.SimpleNamespace(\n"
    "    install=lambda: installations.append(1))\n"
)
#: What `simulate` adds to the environment for the startup.
ON_SIMULATED_GPU = {_startup.SIMULATED: f"test-{os.getpid()}"}
SEES = "print([name for name in ('torch', 'torch_memory_saver') if name in sys.modules])"


def test_its_events_are_written(torch_program: Program, tmp_path: Path) -> None:
    done = torch_program(f"import torch\n{SEES}\ntorch.cuda._lazy_init()\nprint(torch.cuda._lazy_init.__module__)\n{SEES}")
    before, function, after = done.stdout.splitlines()
    assert (before, function, after) == ("['torch']", "torch.cuda", "['torch', 'torch_memory_saver']")
    (path,) = event_files(tmp_path)
    (event,) = load_events(path).events
    assert (event.kind, event.bytes, event.tag) == ("allocate", 4 * MIB, "default")
    assert done.stderr == ""


@pytest.mark.parametrize("simulate_too", [False, True])
def test_a_program_may_look_for_torch_before_it_imports_it(
    torch_program: Program, tmp_path: Path, simulate_too: bool
) -> None:
    text = "import importlib.util\nassert importlib.util.find_spec('torch') and importlib.util.find_spec('torch').origin\n"
    after = "\nprint(sys.modules['torch'].__spec__.loader is sys.modules['torch'].__loader__, sys.meta_path[0])"
    text = COUNTS_INSTALLATIONS + text + USES_CUDA + after + "\nprint(len(installations))"
    first, installations = torch_program(text, **(ON_SIMULATED_GPU if simulate_too else {})).stdout.splitlines()
    assert first.startswith("True ") and "_startup" not in first
    assert int(installations) == simulate_too
    assert len(event_files(tmp_path)) == 1


def test_nothing_happens_without_cuda(torch_program: Program, tmp_path: Path) -> None:
    assert torch_program(f"import torch\n{SEES}").stdout == "['torch']\n"
    assert torch_program(SEES).stdout == "[]\n"
    assert event_files(tmp_path) == []


def test_a_disabled_program_is_not_recorded(torch_program: Program, tmp_path: Path) -> None:
    text = "import torch_memory_saver\nprint(torch_memory_saver.patches(), torch_memory_saver.stats().total.allocations)"
    done = torch_program(f"import torch\nprint(torch.cuda._lazy_init.__module__)\n{USES_CUDA}{text}", TMS_DISABLE="1")
    assert done.stdout == "torch.cuda\n() 0\n"
    start = "from torch_memory_saver._engine import background\nbackground.start_from_environment()"
    count = "import threading\nprint(threading.active_count())"
    done = torch_program(f"{start}\n{USES_CUDA}{count}", TMS_DISABLE="1", TMS_RELEASE_CACHED="1000")
    assert (done.stdout, done.stderr.count("TMS_DISABLE is set")) == ("1\n", 1)
    assert event_files(tmp_path) == []


def test_nothing_starts_inside_the_initialisation(torch_program: Program) -> None:
    text = (
        "import torch, torch_memory_saver\nfrom torch_memory_saver._engine import background\nseen = []\n"
        "background.start_from_environment = lambda: seen.append(torch.cuda.is_initialized())\n"
        "torch.cuda._lazy_init(); torch.cuda._lazy_init(); print(seen)"
    )
    assert torch_program(text).stdout == "[True]\n"


def test_child_processes_have_files_of_their_own(torch_program: Program, tmp_path: Path) -> None:
    text = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {USES_CUDA!r}], check=True)\n"
    torch_program(text + USES_CUDA)
    assert len(event_files(tmp_path)) == 2


@pytest.mark.parametrize("simulate_too", [False, True])
def test_the_users_own_sitecustomize_runs_once(torch_program: Program, tmp_path: Path, simulate_too: bool) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.users_own = getattr(sys, 'users_own', 0) + 1\n")
    text = f"{COUNTS_INSTALLATIONS}{USES_CUDA}print(sys.users_own, len(installations))"
    done = torch_program(text, str(own), **(ON_SIMULATED_GPU if simulate_too else {}))
    assert done.stdout == f"1 {int(simulate_too)}\n"
    assert len(event_files(tmp_path)) == 1


def test_a_pytorch_that_initialises_cuda_in_another_way_is_warned_of(torch_program: Program, tmp_path: Path) -> None:
    path = tmp_path / "site" / "torch" / "cuda.py"
    path.write_text("")
    done = torch_program("import torch\nprint('goes on')")
    assert done.stdout == "goes on\n"
    assert done.stderr == (
        "the TMS_* variables of this process: this PyTorch has no torch.cuda._lazy_init, so they take effect at the first "
        "use of torch_memory_saver\n"
    )


def test_a_python_that_does_not_find_the_package(torch_program: Program, tmp_path: Path) -> None:
    path = f"{STARTUP}:{tmp_path}/site"
    text = (
        f"import os, subprocess\nenvironment = os.environ | {{'PYTHONPATH': {path!r}}}\n"
        f"subprocess.run([sys.executable, '-c', {USES_CUDA!r}], env=environment, cwd={str(tmp_path)!r}, check=True)"
    )
    torch_program(text)
    assert len(event_files(tmp_path)) == 1


def test_a_program_is_not_disturbed_by_a_failure(torch_program: Program, tmp_path: Path) -> None:
    other = tmp_path / "other" / "torch_memory_saver"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('of another release')")
    done = torch_program(f"sys.path.insert(0, {str(tmp_path / 'other')!r})\n{USES_CUDA}print('goes on')")
    assert done.stdout == "goes on\n"
    assert "could not be started" in done.stderr and "of another release" in done.stderr


@pytest.mark.parametrize(
    ("variables", "raised", "times"),
    [
        (ON_SIMULATED_GPU, "ImportError('libcudnn.so.9: cannot open')", 1),
        (ON_SIMULATED_GPU, "ModuleNotFoundError('sympy')", 0),
        ({}, "ImportError('libcudnn.so.9: cannot open')", 0),
    ],
)
def test_a_torch_that_does_not_load_on_the_simulated_gpu_points_to_its_python(
    torch_program: Program, tmp_path: Path, variables: dict[str, str], raised: str, times: int
) -> None:
    (tmp_path / "site" / "torch" / "__init__.py").write_text(f"raise {raised}")
    done = torch_program("try:\n    import torch\nexcept ImportError as error:\n    print(error)", **variables)
    assert done.stdout.count(f"run `{sys.executable} -m torch_memory_saver simulate -- python ...`") == times

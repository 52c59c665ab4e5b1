"""Guards ``python -m torch_memory_saver simulate`` and the environment that it makes, without a torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import PACKAGE, SIMULATOR, Program

from torch_memory_saver import simulate
from torch_memory_saver._engine import preload
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError

#: Each starts programs.
pytestmark = pytest.mark.slow

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process finds no torch, whether one is installed or not, and an empty cache."""
    monkeypatch.setattr(simulate, "find_torch", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run_simulate(command: Program, tmp_path: Path) -> Program:
    """Runs ``simulate`` in a process that has an own cache, and no compiler unless PATH is given: none is needed."""

    def run(*arguments: str, status: int = 0, **variables: str):  # type: ignore[no-untyped-def]
        hidden = tmp_path / "hidden"
        hidden.mkdir(exist_ok=True)
        # A module named torch without a file would be no torch; one that is None in sys.modules cannot be found at all.
        (hidden / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None\n")
        paths = os.pathsep.join([str(hidden), str(PACKAGE.parent)])
        defaults = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": paths, "PATH": "/nowhere"}
        return command("simulate", *arguments, status=status, **(defaults | variables))

    return run


# Sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("8GiB", 8 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        (" 512MiB ", GIB // 2),
        ("2KiB", 2048),
        ("1TiB", 1024 * GIB),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert simulate.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "8GB", "8 gib", "eight", "1e3", "0.1B", "99999999TiB", "8GiBs", "٣"])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a size"):
        simulate.parse_bytes(text)


# The environment


def test_defaults() -> None:
    before = {"HOME": "/home/x", "CUDA_VISIBLE_DEVICES": "3"}
    result = simulate.environment(base=before)
    assert before == {"HOME": "/home/x", "CUDA_VISIBLE_DEVICES": "3"}
    folder = result.pop("LD_LIBRARY_PATH")
    assert result.pop("TMS_SIMULATED_SHARED") != simulate.environment(base=before)["TMS_SIMULATED_SHARED"]
    assert result == {
        "HOME": "/home/x",
        "CUDA_VISIBLE_DEVICES": "3",
        "LD_PRELOAD": str(SIMULATOR),
        "TMS_CUDA_DRIVER": str(SIMULATOR),
        "TMS_SIMULATED_DEVICES": "1",
        "TMS_SIMULATED_VISIBLE": "1",
        "TMS_SIMULATED_MEMORY": str(8 * GIB),
        "PYTHONPATH": str(SIMULATOR.parent / "_site"),
    }
    links = {name: os.readlink(Path(folder, name)) for name in ("libcuda.so.1", "libcudart.so.12", "libcudart.so.13")}
    assert set(links.values()) == {str(SIMULATOR)}


def test_every_argument(tmp_path: Path) -> None:
    result = simulate.environment(
        devices=2,
        memory="512MiB",
        bandwidth=1000,
        preload_hook=True,
        report=True,
        trace="calls.txt",
        base={},
    )
    assert result["LD_PRELOAD"] == f"{preload.library_path()}:{SIMULATOR}"
    # Behind the simulated runtime it would have no effect.
    inherited = simulate.environment(base={"LD_PRELOAD": f"/a.so:{preload.library_path()}"})
    assert inherited["LD_PRELOAD"] == f"{preload.library_path()}:{SIMULATOR}:/a.so"
    simulated = {name.removeprefix("TMS_SIMULATED_"): value for name, value in result.items() if "SIMULATED" in name}
    assert simulated.pop("SHARED")
    assert simulated == {
        "DEVICES": "2",
        "VISIBLE": "1",
        "MEMORY": str(GIB // 2),
        "BANDWIDTH": "1000",
        "REPORT": "1",
        "TRACE": os.path.abspath("calls.txt"),
    }


def test_other_entries_are_kept_and_ours_are_not_repeated() -> None:
    base = {"LD_PRELOAD": f"/a/x.so {SIMULATOR}:/b/y.so", "LD_LIBRARY_PATH": "/c:/d", "TMS_SIMULATED_SHARED": "name"}
    result = simulate.environment(base=base)
    assert result["LD_PRELOAD"] == f"{SIMULATOR}:/a/x.so:/b/y.so"
    folder, _, rest = result["LD_LIBRARY_PATH"].partition(":")
    assert rest == "/c:/d"
    assert result["TMS_SIMULATED_SHARED"] == "name"
    assert simulate.environment(base=result) == result
    assert Path(folder).is_dir()


def test_this_process_is_the_base_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMETHING", "here")
    before = dict(os.environ)
    assert simulate.environment()["SOMETHING"] == "here"
    assert dict(os.environ) == before


@pytest.mark.parametrize("arguments", [{"devices": -1}, {"devices": 9}, {"memory": "lots"}, {"memory": 0}])
def test_bad_arguments(arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        simulate.environment(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["with space", "with:colon"])
def test_a_path_that_the_linker_cannot_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    with pytest.raises(InvalidStateError, match="LD_LIBRARY_PATH cannot name"):
        simulate.environment(base={})


def test_an_incomplete_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "simulator_path", lambda: tmp_path / "none.so")
    with pytest.raises(InvalidStateError, match=r"incomplete: there is no .*none\.so"):
        simulate.environment(base={})


def test_the_limit_of_devices_is_the_simulated_gpu_s() -> None:
    header = Path(__file__).resolve().parents[4] / "csrc" / "simulator" / "simulator.h"
    assert f"TMS_SIM_MAX_DEVICES = {simulate.MAX_DEVICES}," in header.read_text()


# The command

#: Prints the machine that a program finds.
ASK = (
    "from torch_memory_saver import _core; from torch_memory_saver._engine import preload\n"
    "count, memory = _core.device_count(), _core.device_memory(0)\n"
    "print(f'{count} devices of {memory.total / 2**30} GiB, hook mode {preload.mode_in_force()}')"
)


def test_a_program_gets_the_requested_devices(run_simulate: Program) -> None:
    done = run_simulate("--devices", "2", "--memory", "1.5GiB", "--", "python", "-c", ASK)
    assert done.stdout == "2 devices of 1.5 GiB, hook mode torch\n"


def test_a_program_sees_the_devices_that_were_chosen(run_simulate: Program) -> None:
    ask = ("--", "python", "-c", ASK)
    assert run_simulate("--devices", "3", *ask, CUDA_VISIBLE_DEVICES="2,0").stdout.startswith("2 devices ")
    assert "DriverUnavailableError" in run_simulate(*ask, CUDA_VISIBLE_DEVICES="", status=1).stderr


def test_without_the_two_dashes(run_simulate: Program) -> None:
    assert run_simulate("python", "-c", "import sys; print(sys.argv)", "--memory", "x").stdout == "['-c', '--memory', 'x']\n"


def test_child_processes_are_on_it_too(run_simulate: Program) -> None:
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ASK!r}], check=True)"
    assert run_simulate("--devices", "2", "--", "python", "-c", text).stdout.startswith("2 devices ")


def test_the_hook_library_is_preloaded_on_request(run_simulate: Program) -> None:
    assert run_simulate("--preload", "--", "python", "-c", ASK).stdout.endswith("hook mode preload\n")


def test_the_exit_status_is_the_command_s(run_simulate: Program) -> None:
    run_simulate("--", "python", "-c", "raise SystemExit(7)", status=7)
    run_simulate("--", "python", "-c", "import os; os.kill(os.getpid(), 9)", status=-9)


def test_python_is_the_interpreter_that_runs_simulate(run_simulate: Program) -> None:
    assert run_simulate("--", "python", "-c", "import sys; print(sys.executable)").stdout.strip() == sys.executable


def test_a_program_that_cannot_be_started(run_simulate: Program, tmp_path: Path) -> None:
    assert "no-such-program could not be started: No such file" in run_simulate("--", "no-such-program", status=127).stderr
    (tmp_path / "text").write_text("text")
    assert "could not be started" in run_simulate("--", str(tmp_path / "text"), status=126).stderr


def test_memory_in_use_at_the_end_is_reported_on_request(run_simulate: Program) -> None:
    text = (
        "import ctypes; runtime = ctypes.CDLL('libcudart.so.13'); address = ctypes.c_void_p();"
        "assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(4 << 20)) == 0"
    )
    assert run_simulate("--", "python", "-c", text).stderr == ""
    report = run_simulate("--report", "--", "python", "-c", text).stderr
    assert "in use at the end on device 0: 4194304 bytes" in report
    assert "leak" not in report  # it may be alive
    text += "; runtime.cudaFree(address)"
    assert "nothing in use at the end" in run_simulate("--report", "--", "python", "-c", text).stderr


def test_calls_are_traced_on_request(run_simulate: Program, tmp_path: Path) -> None:
    text = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"
    run_simulate("--trace", str(tmp_path / "new" / "trace"), "--", "python", "-c", text)
    assert "cuInit" in (tmp_path / "new" / "trace").read_text()


def assert_one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.stderr.startswith("python -m torch_memory_saver simulate: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert done.stdout == ""


def test_a_script_is_no_program(run_simulate: Program) -> None:
    done = run_simulate("--", "train.py", "--steps", "3", status=2)
    assert_one_sentence(done, "train.py is no program but a Python script: write simulate -- python train.py")


def test_a_trace_that_cannot_be_written(run_simulate: Program, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "such"):
        done = run_simulate("--trace", str(path), "--", "python", "-c", "print('started')", status=2)
        assert_one_sentence(done, f"the trace cannot be written to {path}")


def test_a_cache_that_cannot_be_written(run_simulate: Program, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        done = run_simulate("--", "python", "-c", "print('started')", status=1, XDG_CACHE_HOME=str(path))
        assert_one_sentence(done, "the stub libraries cannot be made", str(tmp_path / "file"), "XDG_CACHE_HOME")


def test_a_script_that_imports_a_torch_that_is_not_there(run_simulate: Program, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    for text in ("import os, torch.cuda\n", "from torch import nn\n"):
        script.write_text(text)
        done = run_simulate("--", "python", str(script), status=1)
        assert_one_sentence(done, f"{script} imports torch, which is not installed", "pip install")
    script.write_text("try:\n    import torch\nexcept ImportError:\n    pass\nfrom . import torch\n")
    assert "no known parent package" in run_simulate("--", "python", str(script), status=1).stderr


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--memory", "8GB", "--", "python"], 2, "'8GB' is not a size"),
        (["--memory", "8", "--", "python"], 2, "at least 2 MiB, not 8 bytes"),
        (["--bandwidth", "fast", "--", "python"], 2, "'fast' is not a size"),
        (["--devices", "9", "--", "python"], 2, "'9' is not a number of GPUs from 0 to 8"),
        (["--devices", "two", "--", "python"], 2, "'two' is not a number of GPUs from 0 to 8"),
        ([], 2, "there is no command to run"),
        (["--"], 2, "there is no command to run"),
    ],
)
def test_usage_errors(run_simulate: Program, arguments: list[str], status: int, words: str) -> None:
    done = run_simulate(*arguments, status=status)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_help(command: Program) -> None:
    assert "simulate" in command("--help").stdout
    text = command("simulate", "--help").stdout
    assert "usage: python -m torch_memory_saver simulate [options] -- command" in text


USE_AND_END = """if True:
    import ctypes, os, signal
    assert ctypes.CDLL(os.environ["TMS_CUDA_DRIVER"]).cuInit(0) == 0
    shared = "/dev/shm/tms_simulated_" + os.environ["TMS_SIMULATED_SHARED"]
    assert os.path.exists(shared)
    print(shared, flush=True)
    {end}
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this Python cannot wait for a process that is not its child")
@pytest.mark.parametrize(
    ("end", "status"),
    [("pass", 0), ("os._exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -9)],
    ids=["returned", "left", "killed"],
)
def test_the_machine_ends_with_the_program(run_simulate: Program, end: str, status: int) -> None:
    done = run_simulate("--", "python", "-c", USE_AND_END.format(end=end), status=status)
    shared = Path(done.stdout.strip())
    # The process that removes it learns of the end at the same time as this one.
    deadline = time.monotonic() + 60
    while shared.exists() and time.monotonic() < deadline:
        os.sched_yield()
    assert not shared.exists()


def test_a_machine_that_was_there_before_stays(run_simulate: Program) -> None:
    name = f"{os.getpid()}-stays"
    text = USE_AND_END.format(end="os._exit(0)")
    done = run_simulate("--", "python", "-c", text, TMS_SIMULATED_SHARED=name)
    shared = Path(done.stdout.strip())
    assert shared.name == f"tms_simulated_{name}"
    shared.unlink()


def test_the_program_has_no_child_that_it_did_not_start(run_simulate: Program) -> None:
    text = "import os\ntry: print(os.wait())\nexcept ChildProcessError: print('none')"
    assert run_simulate("--", "python", "-c", text).stdout == "none\n"


def test_an_environment_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base = {"LD_PRELOAD": "/a.so /b.so", "TMS_LOG_LEVEL": "debug", "TMS_SIMULATED_DEVICES": "5", "OTHER": "kept"}
    made = simulate.environment_without_torch(devices=2, memory="1GiB", base=base)
    library, simulator, *others = made.pop("LD_PRELOAD").split(":")
    assert library.endswith("torch_memory_saver_hook_mode_preload.abi3.so")
    assert Path(simulator) == simulate.simulator_path()
    assert others == ["/a.so", "/b.so"]
    assert made == {
        "OTHER": "kept",
        "TMS_CUDA_DRIVER": simulator,
        "TMS_SIMULATED_DEVICES": "2",
        "TMS_SIMULATED_MEMORY": str(1 << 30),
    }
    assert "TMS_LOG_LEVEL" in base
    with pytest.raises(InvalidArgumentError, match="0 to 8"):
        simulate.environment_without_torch(devices=9)
    monkeypatch.setattr(simulate, "simulator_path", lambda: tmp_path / "none.so")
    with pytest.raises(InvalidStateError, match="incomplete"):
        simulate.environment_without_torch()

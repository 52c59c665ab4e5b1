"""Guards that the saver stands alone: it works in an installation that lacks folders of `observe`, and loads none itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from processes import PACKAGE, PRELUDE, run_python

from torch_memory_saver._additions import ADDITIONS
from torch_memory_saver._engine import preload

OBSERVERS = PACKAGE / "observe"
ROOMS = sorted(path.name for path in OBSERVERS.iterdir() if path.suffix in ("", ".py") and not path.name.startswith("__"))
_LOADED = "print(*(name for name in sys.modules if name.startswith('torch_memory_saver.observe')))\n"
#: A cycle, with a resume that finds no memory in it.
_CYCLE = """
with module.region(tag="kept", enable_cpu_backup=True):
    address = cuda_malloc(4 * MIB)
fill(address, 4 * MIB, 7)
before = free_bytes()
module.pause("kept")
assert free_bytes() == before + 4 * MIB
assert module.stats().tags["kept"].paused_bytes == 4 * MIB
other = cuda_malloc(free_bytes())
try:
    module.resume("kept")
    sys.exit("it had memory")
except module.OutOfMemoryError as error:
    print(error)
cuda_free(other)
module.resume("kept")
assert read(address, 4 * MIB) == bytes([7]) * (4 * MIB)
assert module.stats().tags["kept"].paused_bytes == 0
assert "kept" in str(module.stats())
assert [patch.name for patch in module.patches()] == ["concurrent.futures.ThreadPoolExecutor.submit"]
"""


def copy_without(folder: Path, *names: str) -> Path:
    """An installed copy of the package and the preload library, in which folders or files of `observe` are missing."""
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy)
    shutil.copy(preload.library_path(), folder)
    for name in names:
        removed = copy / "observe" / name
        shutil.rmtree(removed) if removed.is_dir() else removed.unlink()
    return copy


def run_in(copy: Path, *arguments: str, preloaded: bool = True, **requests: str) -> tuple[str, str]:
    """Run Python with a copy of the package, and return what it writes to stdout and stderr."""
    simulator = copy / "_simulated_cuda.so"
    variables = {"PYTHONPATH": str(copy.parent), "TMS_CUDA_DRIVER": str(simulator)}
    if preloaded:
        variables["LD_PRELOAD"] = f"{copy.parent / Path(preload.library_path()).name}:{simulator}"
    done = run_python(*arguments, preloaded=preloaded, **variables, **requests)
    return done.stdout, done.stderr


@pytest.mark.slow  # the next test lacks all of them
@pytest.mark.parametrize("room", ROOMS)
def test_the_saver_works_without_any_room(room: str, tmp_path: Path) -> None:
    """Everything is requested of the other rooms, which may need the missing one."""
    copy = copy_without(tmp_path, room)
    requests = {"TMS_DEBUG": ",".join(ADDITIONS["recording"]), "TMS_DEBUG_DIR": str(tmp_path / "recorded")}
    text = f"assert module.__file__ == {str(copy / '__init__.py')!r} and _core.preloaded\n{_CYCLE}"
    output, _ = run_in(copy, "-c", PRELUDE + text, **requests)
    assert output.startswith("resume: ")


def test_the_saver_works_without_all_of_them(tmp_path: Path) -> None:
    copy = copy_without(tmp_path, "")
    assert not (copy / "observe").exists()
    output, log = run_in(copy, "-c", PRELUDE + _CYCLE + _LOADED)
    *error, loaded = output.split("\n")[:-1]
    assert error[0] == "resume: device 0 needs 4.0 MiB and has 0 bytes free: 4.0 MiB are missing."
    assert error[-1] == "- cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY (2) for 4.0 MiB of tag 'kept'."
    assert loaded == log == ""
    commands, _ = run_in(copy, "-m", "torch_memory_saver", "--help", preloaded=False)
    assert [name for name in ADDITIONS["command"] if f"\n    {name} " in commands] == ["demo", "run", "simulate"]
    output, _ = run_in(copy, "-m", "torch_memory_saver", "demo", "--device", "simulated", preloaded=False)
    assert "Every check held" in output


def test_nothing_is_requested_of_what_is_missing(tmp_path: Path) -> None:
    copy = copy_without(tmp_path, "")
    text = (
        f"import os\nos.environ['TMS_DEBUG'] = 'events'\nos.environ['TMS_METRICS_FILE'] = 'metrics'\n{PRELUDE}module.pause()"
    )
    _, log = run_in(copy, "-c", text)
    assert "TMS_DEBUG: 'events' is ignored" in log


@pytest.mark.parametrize("preloaded", [True, False])
def test_an_import_loads_no_observer(preloaded: bool) -> None:
    text = "import sys\nfrom torch_memory_saver import nccl, ranks, simulate, torch_memory_saver\n"
    assert run_python("-c", text + _LOADED, preloaded=preloaded).stdout == "\n"


def test_a_submodule_is_loaded_at_its_first_use() -> None:
    text = (
        "import sys, torch_memory_saver as package\n"
        "names = package._SUBMODULES\n"
        "print([name for name in names if f'torch_memory_saver.{name}' in sys.modules])\n"
        "print({*names, 'pause', 'hook_mode'} <= {*dir(package)}, all(getattr(package, name) for name in names))\n"
        "print(package.observe.events.__name__, package.observe.memory.__name__)\n"
        "print(hasattr(package, 'rank'), hasattr(package.observe, 'event'))\n"
    )
    assert run_python("-c", text, preloaded=False).stdout.splitlines() == [
        "[]",
        "True True",
        "torch_memory_saver.observe.events torch_memory_saver.observe.memory",
        "False False",
    ]

"""Guards the NVTX ranges as a tool sees them that NVTX loads from NVTX_INJECTION64_PATH: in both hook modes, on several
threads, with failures, and in forked children. What each call tells is in tests/unit/base/test_nvtx.c and
tests/unit/core/transition/test_nvtx_ranges.c."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from built import LIBRARIES
from processes import ELSEWHERE, TIMEOUT_S, environment, run_python

from torch_memory_saver import _core

REPOSITORY = Path(__file__).resolve().parents[4]
SOURCES = REPOSITORY / "tests/unit/support"
PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "nvtx_calls.py"
MIB = 1 << 20


def nvtx_include() -> str | None:
    """The folder with the headers of NVTX, as setup.py finds it."""
    specification = importlib.util.spec_from_file_location("setup_for_nvtx", REPOSITORY / "setup.py")
    assert specification is not None and specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    found: str | None = script.find_nvtx_include()
    return found


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library for NVTX_INJECTION64_PATH. Skips the test where it cannot be made, or where no range is built in."""
    if not _core.NVTX:
        pytest.skip("this build of the library has no NVTX ranges: the headers of nvtx3 were not found")
    if not (REPOSITORY / "setup.py").is_file():
        pytest.skip("needs the source tree")
    compiler, include = shutil.which("cc"), nvtx_include()
    if compiler is None or include is None:
        pytest.skip("needs a C compiler named cc, and the headers of nvtx3 (pip install nvidia-nvtx)")
    library = tmp_path_factory.mktemp("nvtx") / "recorder.so"
    options = [
        "-std=c11",
        "-D_GNU_SOURCE",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pthread",
    ]
    options += [*shlex.split(os.environ.get("CFLAGS", "")), f"-I{SOURCES}", "-isystem", include]
    subprocess.run([compiler, *options, str(SOURCES / "nvtx_recorder.c"), "-ldl", "-o", str(library)], check=True)
    return library


class Ranges:
    """The record of one process: for each thread, its ranges from the outermost on, as they end."""

    def __init__(self, path: Path) -> None:
        self.records: list[str] = []
        self.ranges: list[tuple[str, ...]] = []
        self.threads: dict[str, set[str]] = defaultdict(set)
        self.bytes: dict[tuple[str, ...], int] = defaultdict(int)
        opened: dict[str, list[str]] = defaultdict(list)
        for line in path.read_text().splitlines():
            thread, what, *rest = line.split(" ", 4)
            if what == "push":
                _category, size, message = rest
                opened[thread].append(message.removeprefix("*"))
                self.bytes[tuple(opened[thread])] += 0 if size == "-" else int(size)
            elif what == "pop":
                assert opened[thread], f"{line}: nothing is open"
                self.ranges.append(tuple(opened[thread]))
                self.threads[opened[thread][0]].add(thread)
                opened[thread].pop()
            else:
                self.records.append(" ".join((what, *rest)))
        assert [stack for stack in opened.values() if stack] == [], "all ranges have ended"


def run(recorder: Path, folder: Path, *, preloaded: bool, **variables: str) -> tuple[Ranges, int]:
    """Runs the program. Returns what its process has recorded, and the child's number."""
    variables = {"NVTX_INJECTION64_PATH": str(recorder), "NVTX_RECORD": str(folder / "record")} | variables
    started = subprocess.Popen(
        [sys.executable, str(PROGRAM)],
        env=environment(preloaded, **variables),
        cwd=ELSEWHERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = started.communicate(timeout=TIMEOUT_S)
    assert started.returncode == 0, err
    word, child = out.split()
    assert word == "ok"
    return Ranges(folder / f"record.{started.pid}"), int(child)


@pytest.mark.parametrize("preloaded", [True, False], ids=["preload", "torch"])
def test_a_tool_sees_every_call(recorder: Path, tmp_path: Path, preloaded: bool) -> None:
    seen, child = run(recorder, tmp_path, preloaded=preloaded)
    calls = [path[0] for path in seen.ranges if len(path) == 1]
    assert calls == ["pause kv", "resume kv", "pause kv, other", "resume", "pause", "resume", "resume"]
    assert {path[1] for path in seen.ranges if path[0] == "pause kv" and len(path) > 1} == {
        "turn",
        "synchronize",
        "plan",
        "unmap",
    }
    assert seen.bytes["pause kv", "unmap"] == 6 * MIB
    assert seen.bytes["resume kv", "map"] == 6 * MIB
    (main,), (other,) = seen.threads["pause kv"], seen.threads["pause kv, other"]
    assert main != other
    assert len(seen.threads["resume"]) == 2, "one of them went on in the background"
    moved = [record.split()[2:] for record in seen.records if record.startswith("mark")]
    assert moved == [[str(6 * MIB), "moved"]] * 5 + [["-", "failed:", "OUT_OF_DEVICE_MEMORY"], [str(6 * MIB), "moved"]]
    assert [record for record in seen.records if record.startswith("domain")] == ["domain torch_memory_saver"]
    assert not (tmp_path / f"record.{child}").exists(), "the child has recorded nothing"


@pytest.mark.usefixtures("recorder")
def test_a_tool_that_cannot_be_loaded_is_no_failure() -> None:
    done = run_python(PROGRAM, "without", NVTX_INJECTION64_PATH="/nonexistent.so")
    assert done.stdout.startswith("ok"), done.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")
@pytest.mark.parametrize("name", ["core", "preload"])
def test_no_library_exports_a_symbol_of_nvtx(name: str) -> None:
    symbols = subprocess.run(["nm", "-D", str(LIBRARIES[name])], capture_output=True, text=True, check=True).stdout
    assert "dlopen" in symbols
    assert "nvtx" not in symbols.lower()

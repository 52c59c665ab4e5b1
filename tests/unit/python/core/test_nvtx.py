"""Guards the NVTX ranges as a tool sees them that NVTX loads from NVTX_INJECTION64_PATH: in both hook modes, on several
threads, with failures, and in forked children. What each call tells is in tests/unit/base/test_nvtx.c and
tests/unit/core/transition/test_nvtx_ranges.c."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from built import LIBRARIES
from nvtx_tool import Ranges, compile_recorder
from processes import ELSEWHERE, TIMEOUT_S, environment

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "nvtx_calls.py"


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_recorder(tmp_path_factory.mktemp("nvtx"))


def run(recorder: Path, folder: Path, *, preloaded: bool, **variables: str) -> tuple[Ranges, int]:
    """Runs the program. Returns what its process told, and the child's number."""
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


MIB = 1 << 20


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
    moved = [told.split()[2:] for told in seen.told if told.startswith("mark")]
    assert moved == [[str(6 * MIB), "moved"]] * 5 + [["-", "failed:", "OUT_OF_DEVICE_MEMORY"], [str(6 * MIB), "moved"]]
    assert [told for told in seen.told if told.startswith("domain")] == ["domain torch_memory_saver"]
    assert not (tmp_path / f"record.{child}").exists(), "the child has told nothing"


@pytest.mark.usefixtures("recorder")
def test_a_tool_that_cannot_be_loaded_is_no_failure() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "without"],
        env=environment(False, NVTX_INJECTION64_PATH="/nonexistent.so"),
        cwd=ELSEWHERE,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.stdout.startswith("ok"), done.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")
@pytest.mark.parametrize("name", ["core", "preload"])
def test_no_library_exports_a_symbol_of_nvtx(name: str) -> None:
    symbols = subprocess.run(["nm", "-D", str(LIBRARIES[name])], capture_output=True, text=True, check=True).stdout
    assert "dlopen" in symbols
    assert "nvtx" not in symbols.lower()

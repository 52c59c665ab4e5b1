"""Guards NVTX ranges beside those of PyTorch, which loads the same tool, in both hook modes."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_support import SIMULATED, STARTED_PRELOADED
from nvtx_tool import Ranges, compile_recorder
from processes import Program


@pytest.mark.parametrize("preload", [False, True], ids=["torch", "preload"])
def test_a_tool_sees_pauses_between_ranges_of_pytorch(preload: bool, tmp_path: Path) -> None:
    if SIMULATED and preload != STARTED_PRELOADED:
        pytest.skip("only in the other hook mode of this suite")
    tool = {"NVTX_INJECTION64_PATH": str(compile_recorder(tmp_path)), "NVTX_RECORD": str(tmp_path / "record")}
    process = Program("nvtx_ranges.py", (), tuple(tool.items()), preload=preload).start()
    output, error = process.communicate(timeout=110)
    assert process.returncode == 0, error
    seen, size = Ranges(tmp_path / f"record.{process.pid}"), int(output)
    calls = [path[0] for path in seen.ranges if len(path) == 1]
    assert calls == ["pause weights", "resume weights"]
    assert seen.bytes["pause weights", "copy"] == seen.bytes["resume weights", "copy"] == size
    assert seen.bytes["pause weights", "unmap"] == size
    assert seen.threads["pause weights"].isdisjoint(seen.threads["resume weights"]), "that goes on in the background"
    assert [told.split()[2:] for told in seen.told if told.startswith("mark")] == [[str(size), "moved"]] * 2

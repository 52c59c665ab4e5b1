"""Guards programs that have replaced PyTorch's allocator: preload mode works, and torch mode says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_programs import Program, run_programs


@pytest.mark.outer
@pytest.mark.parametrize("preload", [False, True], ids=["torch", "preload"])
def test_another_current_allocator(preload: bool, tmp_path: Path) -> None:
    program = Program("other_allocator.py", (str(tmp_path),), preload=preload)
    assert run_programs([program])[0].check().output.splitlines()[-1] == "ok"

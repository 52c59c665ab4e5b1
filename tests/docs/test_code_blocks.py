"""Guards that the code of README and docs runs: every code block that needs no PyTorch runs here, on the simulated GPU.

Those that need PyTorch run in tests/torch/test_documentation.py. Blocks that cannot run are listed as skipped, with the
reason that their page gives.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from document_blocks import REPOSITORY, Program, Skipped, pages, read

if not (REPOSITORY / "docs").is_dir():
    pytest.skip("needs the sources: there is no docs/", allow_module_level=True)

_READ = [read(page) for page in pages()]
PROGRAMS = [program for programs, _ in _READ for program in programs]
SKIPPED = [block for _, blocks in _READ for block in blocks]


#: TMS_DISABLE is for programs; the shell blocks call commands.
DISABLED = [
    pytest.param(program, {"TMS_DISABLE": "1"}, id=f"disabled-{program.name}")
    for program in PROGRAMS
    if program.language == "python"
]


@pytest.mark.parametrize(
    ("program", "variables"), [*(pytest.param(program, {}, id=program.name) for program in PROGRAMS), *DISABLED]
)
def test_a_block_runs(program: Program, variables: dict[str, str], tmp_path: Path) -> None:
    if program.language == "python":
        compile(program.text, str(program.page), "exec")
    if program.needs_torch:
        pytest.skip("needs PyTorch's CUDA build on the simulated GPU: run 'make torch-test'")
    script = tmp_path / (program.page.name + (".py" if program.language == "python" else ".sh"))
    script.write_text(program.text, encoding="utf-8")
    shell = ["bash", "-euo", "pipefail", str(script)]
    done = subprocess.run(
        [sys.executable, str(script)] if program.language == "python" else shell,
        env=os.environ | variables | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, f"{program.name}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", SKIPPED, ids=lambda block: block.name)
def test_a_block_that_is_not_run_says_why(block: Skipped) -> None:
    pytest.skip(f"the page says: {block.reason}")

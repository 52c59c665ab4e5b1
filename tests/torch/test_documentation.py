"""Guards that what README and docs show with PyTorch can be run: their programs, on the simulated GPU.

Those that need no PyTorch, and a list of the blocks that are not run, are in tests/docs/test_code_blocks.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from document_blocks import REPOSITORY, pages, read

if not (REPOSITORY / "docs").is_dir():
    pytest.skip("needs the sources: there is no docs/", allow_module_level=True)

PROGRAMS = {program.name: program for page in pages() for program in read(page)[0] if program.needs_torch}
_RUNNER = Path(__file__).parent / "programs" / "run_documents.py"
_TIMEOUT_S = 300


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit status of every program, and what it printed. They run in one go, because importing PyTorch takes longer."""
    folder = tmp_path_factory.mktemp("documents")
    paths = {}
    for name, program in PROGRAMS.items():
        path = folder / (name.replace("/", "-").replace(":", "-") + ".py")
        path.write_text(program.text, encoding="utf-8")
        paths[str(path)] = name
    done = subprocess.run(
        [sys.executable, str(_RUNNER), *paths], stdout=subprocess.PIPE, text=True, check=True, timeout=_TIMEOUT_S, cwd=folder
    )
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return {paths[path]: (int(status), Path(path + ".log").read_text(encoding="utf-8")) for status, path in lines}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_page_runs(name: str, results: dict[str, tuple[int, str]]) -> None:
    status, printed = results[name]
    assert status == 0, f"{name}:\n{printed}"

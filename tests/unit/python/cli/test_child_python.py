"""Guards that commands import nothing from the working directory, where another user may have put modules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import TIMEOUT_S, environment

#: Each starts programs.
pytestmark = pytest.mark.slow

#: The command as its entry point starts it, which does not put the working directory on the path.
ENTRY_POINT = "import sys\nfrom torch_memory_saver._cli.main import main\nsys.exit(main())\n"


def run_in_foreign_folder(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder with a package of our name, torch and each module of the standard library."""
    foreign, marker = tmp_path / "foreign", tmp_path / "marker"
    (foreign / "torch_memory_saver").mkdir(parents=True)
    names = ["torch_memory_saver/__init__", "torch_memory_saver/__main__", "torch", *sys.stdlib_module_names]
    for name in names:
        (foreign / f"{name}.py").write_text(f"with open({str(marker)!r}, 'a') as file: print(__name__, file=file)\n")
    script = tmp_path / "bin" / "torch-memory-saver"
    script.parent.mkdir()
    script.write_text(ENTRY_POINT)
    variables = environment(False)
    del variables["CUDA_VISIBLE_DEVICES"]  # the simulated GPU follows it under `simulate`
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=variables,
        cwd=foreign,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert not marker.exists(), marker.read_text()
    return done


def test_the_demo_runs_in_a_folder_of_another_user(tmp_path: Path) -> None:
    done = run_in_foreign_folder(tmp_path, "demo", "--device", "simulated")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Every check held.\n")


def test_the_doctor_runs_in_a_folder_of_another_user(tmp_path: Path) -> None:
    done = run_in_foreign_folder(tmp_path, "doctor", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["simulated GPU"]["status"] == "ok", rows["simulated GPU"]

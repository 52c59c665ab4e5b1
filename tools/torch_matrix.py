"""Runs the tests of PyTorch on the simulated GPU with several releases of PyTorch: ``make torch-matrix``.

The wheel of this package is built once. For each release a virtual environment is made with that wheel and PyTorch's CUDA
build (without its CUDA packages). The tests run in both hook modes. Tensors are sent from each release to every other. The
environments are removed at the end. A table is printed. It also shows the releases that cannot be installed with this
Python. The exit status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "tests" / "torch" / "requirements.txt"

NEWEST = "newest"
VERSIONS = ("2.8.0", "2.11.0", NEWEST)
#: Options of simulate for each run: one for each hook mode, and one that sends tensors.
MODES: dict[str, list[str]] = {"torch": [], "preload": ["--preload"], "sharing": []}
#: The tests of a run, if they differ from those of the command line.
TESTS = {"sharing": ["--gpu", *(f"tests/gpu/test_sharing{part}.py" for part in ("", "_lifetimes", "_pauses"))]}
#: Has the interpreters of the other releases, for tests/gpu/test_sharing.py. Without TMS_: the package warns of variables
#: of its own that it does not know.
IMPORTERS = "IMPORTER_PYTHONS"
MACHINE = ("--devices", "2", "--memory", "4GiB")
#: How many of the last lines of a failed build are shown.
_LAST_LINES = 20
DESCRIBE = "import torch; print(torch.__version__, torch.version.cuda)"


@dataclass(frozen=True)
class Row:
    """The outcome of one release in one run."""

    version: str
    mode: str
    outcome: str
    seconds: float
    good: bool


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a command and captures its output."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def build_wheel(folder: Path) -> Path:
    """Builds the wheel of this package in `folder`. Returns its path."""
    done = run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    if done.returncode != 0:
        raise SystemExit("the wheel could not be built:\n" + "\n".join(done.stderr.splitlines()[-_LAST_LINES:]))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(folder: Path, version: str, wheel: Path) -> tuple[str, str]:
    """Makes the environment. Returns its interpreter, and "" or the reason why the release cannot be installed."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    torch = "torch" if version == NEWEST else f"torch=={version}"
    for arguments in (["--no-deps", torch], ["-r", str(REQUIREMENTS)], [f"{wheel}[test]"]):
        done = run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return python, "cannot be installed: " + (errors or ["pip failed"])[-1].removeprefix("ERROR: ")
    return python, ""


def count(report: Path) -> tuple[str, bool]:
    """The counts of a JUnit report as text, and whether no test failed and at least one passed."""
    try:
        suite = ElementTree.parse(report).getroot().find("testsuite")
    except (OSError, ElementTree.ParseError):
        suite = None
    if suite is None:
        return "crashed: there is no report", False
    total, skipped, failures, errors = (int(suite.get(name, "0")) for name in ("tests", "skipped", "failures", "errors"))
    failed = failures + errors
    return f"{total - skipped - failed:5} {skipped:7} {failed:6}", failed == 0 and total > skipped


def test(python: str, mode: str, tests: list[str], scratch: Path, log: Path) -> tuple[str, float, bool]:
    """Runs the tests in one mode. Returns the counts as text, the seconds, and whether all is well."""
    report = scratch / f"{mode}.xml"
    command = [python, "-m", "torch_memory_saver", "simulate", *MACHINE, *MODES[mode], "--"]
    command += ["python", "-m", "pytest", *tests, f"--junitxml={report}", "-q", "-p", "no:cacheprovider"]
    start = time.monotonic()
    done = run(*command)
    seconds = time.monotonic() - start
    log.write_text(done.stdout + done.stderr)
    outcome, good = count(report)
    return outcome, seconds, good and done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the tests on the simulated GPU with several releases of PyTorch.")
    parser.add_argument("--versions", nargs="+", default=VERSIONS, help=f'releases, such as 2.8.0 or "{NEWEST}"')
    parser.add_argument("--tests", nargs="+", default=["tests/torch"], help="the tests that pytest runs")
    parser.add_argument("--wheel", type=Path, help="the wheel of this package, if it is built already")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "torch-matrix", help="the folder for pytest's output")
    arguments = parser.parse_args()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PYTHONPATH", None)  # The installed wheel is what is tested.
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="torch-matrix-") as scratch:
        wheel = arguments.wheel.resolve() if arguments.wheel else build_wheel(Path(scratch))
        pythons: dict[str, str] = {}
        for version in arguments.versions:
            python, problem = install(Path(scratch, version), version, wheel)
            if problem:
                rows.append(Row(version, "-", problem, 0, good=True))
            else:
                pythons[version] = python
        for version, python in pythons.items():
            os.environ[IMPORTERS] = os.pathsep.join(other for other in pythons.values() if other != python)
            found = run(python, "-m", "torch_memory_saver", "simulate", "--", "python", "-c", DESCRIBE)
            name = found.stdout.strip().replace(" ", ", CUDA ") or f"{version} (cannot be imported)"
            for mode in MODES:
                log = arguments.logs / f"{version}-{mode}.log"
                outcome, seconds, good = test(python, mode, TESTS.get(mode, arguments.tests), Path(scratch, version), log)
                rows.append(Row(name, mode, outcome, seconds, good))
                print(f"{name}, {mode}: {'good' if good else f'see {log}'}", file=sys.stderr)
    print(f"{'PyTorch':28} {'mode':8} passed skipped failed seconds")
    for row in rows:
        print(f"{row.version:28} {row.mode:8} {row.outcome}" + (f" {row.seconds:7.0f}" if row.seconds else ""))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

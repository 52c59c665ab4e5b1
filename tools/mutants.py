"""Plants one bug at a time and runs the tests that must notice it: `make mutants`.

The files of tests/mutants list the bugs. Each is put into a copy of the source tree (build/mutants), in which only
changed files are built. Each test that is named for the bug must fail *cleanly*: by an assertion, not by a crash and
not by its time limit. Before that, all those tests must pass without a bug.

Exit status: 0 if every bug was noticed; 1 if one survived, was not noticed cleanly, or no longer applies to the sources; 2
if nothing can be concluded, because the tests fail without a bug or the sources cannot be copied.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))

import awake  # noqa: E402
import bench  # noqa: E402
import by_fingerprint  # noqa: E402
import changes  # noqa: E402
import command_line  # noqa: E402
import comparisons  # noqa: E402
import devices  # noqa: E402
import disabled  # noqa: E402
import events  # noqa: E402
import following  # noqa: E402
import guard  # noqa: E402
import handles  # noqa: E402
import hook_calls  # noqa: E402
import host_memory  # noqa: E402
import layer_graphs  # noqa: E402
import ledger  # noqa: E402
import managing  # noqa: E402
import memory  # noqa: E402
import native  # noqa: E402
import other_users  # noqa: E402
import out_of_memory  # noqa: E402
import pools  # noqa: E402
import published  # noqa: E402
import ranks  # noqa: E402
import regions_and_graphs  # noqa: E402
import releases_and_logs  # noqa: E402
import runs  # noqa: E402
import shared_pages  # noqa: E402
import shared_store  # noqa: E402
import sharing  # noqa: E402
import simulator  # noqa: E402
import slack  # noqa: E402
import store_views  # noqa: E402
import timeline  # noqa: E402
import turns  # noqa: E402
from mutant import Mutant, TableError, check  # noqa: E402

_TABLES = (
    awake,
    bench,
    by_fingerprint,
    changes,
    command_line,
    comparisons,
    devices,
    disabled,
    events,
    following,
    guard,
    handles,
    hook_calls,
    host_memory,
    layer_graphs,
    ledger,
    managing,
    memory,
    native,
    other_users,
    out_of_memory,
    pools,
    published,
    ranks,
    regions_and_graphs,
    releases_and_logs,
    runs,
    shared_pages,
    shared_store,
    sharing,
    simulator,
    slack,
    store_views,
    timeline,
    turns,
)
MUTANTS = tuple(mutant for table in _TABLES for mutant in table.MUTANTS)

#: Folder in the copy that holds the built C tests and the output of `make site`.
_BUILD = Path("build/c/plain")
#: The time limit of one test, far above what any test takes.
_SECONDS = 120
_BUILD_SECONDS = 1200
#: How many of the last lines of output are shown after an unexpected outcome.
_SHOWN_LINES = 25


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test or build, such as "passed" or "failed", and its output."""

    what: str
    output: str


class Tree:
    """A copy of the sources, and what is built in it."""

    def __init__(self, folder: Path, seconds: int) -> None:
        self.folder = folder
        self.seconds = seconds
        # No bytecode files: Python compares the time of a source in seconds, and two mutants may follow within one second.
        self.environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
            self.environment.pop(name, None)

    def copy(self) -> None:
        """Makes the copy the same as the sources. Unchanged files keep their times, so that little is built again."""
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        wanted = {name for name in names if name and (ROOT / name).is_file()}
        for name in wanted:
            source, target = ROOT / name, self.folder / name
            if target.is_file() and target.read_bytes() == source.read_bytes():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copymode(source, target)
        for top in ("csrc", "torch_memory_saver", "tests", "tools"):
            for path in (self.folder / top).rglob("*"):
                if path.is_file() and str(path.relative_to(self.folder)) not in wanted:
                    path.unlink()

    def build(self, tests: tuple[str, ...]) -> Outcome:
        """Builds what the tests need. The outcome is "0" if it was built."""
        programs = [test for test in tests if test.endswith(".c")]
        targets = ["ctest-build", "C_TESTS=" + " ".join(programs)] if programs else []
        targets += ["site"] if len(programs) < len(tests) else []
        # A bug may leave a function or a parameter unused.
        flags = [f"PYTHON={sys.executable}", "C_FLAGS_plain=-O1 -w"]
        return self._run(["make", "-s", f"-j{os.cpu_count()}", *flags, *targets], _BUILD_SECONDS)

    def test(self, test: str) -> Outcome:
        """Runs one test. The outcome is "passed", "failed" (by an assertion), or says what else happened."""
        if test.endswith(".c"):
            outcome = self._run([str(self.folder / _BUILD / test.removesuffix(".c"))], self.seconds)
            ended = re.search(r"^\[=+\] \d+ test\(s\) run", outcome.output, re.MULTILINE)
            failed = re.search(r"^\[  (FAILED|ERROR) +\]", outcome.output, re.MULTILINE)
            crashed = "failed with exception" in outcome.output
            return _judge(outcome, re.match(r"\d+$", outcome.what) and ended and failed and not crashed)
        mode, _, name = test.rpartition(":tests/")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "", "-q", "-x"]
        if mode:
            simulate = [sys.executable, "-m", "torch_memory_saver", "simulate", "--devices", "2", "--memory", "8GiB"]
            command = [*simulate, *(["--preload"] if mode == "preload" else []), "--", *command, "--gpu"]
            test = f"tests/{name}"
        # Not in the copy's root: Python would import the package that is there, which has no libraries.
        outcome = self._run([*command, str(self.folder / test)], self.seconds, self.folder / _BUILD / "site")
        if outcome.what == "0" and not re.search(r"\b\d+ passed", outcome.output):
            return Outcome("was skipped", outcome.output)
        return _judge(outcome, outcome.what == "1" and re.search(r"\b\d+ failed", outcome.output))

    def _run(self, command: list[str], seconds: int, folder: Path | None = None) -> Outcome:
        environment = {
            **self.environment,
            "TMS_CUDA_DRIVER": str(self.folder / _BUILD / "_simulated_cuda.so"),
            "PYTHONPATH": str(self.folder / _BUILD / "site"),
        }
        if command[0] != sys.executable:
            del environment["PYTHONPATH"]
        else:
            del environment["TMS_CUDA_DRIVER"]
        # A session of its own, so that all processes that it has started can be killed together.
        process = subprocess.Popen(
            command,
            cwd=folder or self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return Outcome(f"ran into the limit of {seconds} s", output)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return Outcome(str(process.returncode), output)


def _judge(outcome: Outcome, failed_cleanly: object) -> Outcome:
    if outcome.what == "0":
        return Outcome("passed", outcome.output)
    if failed_cleanly:
        return Outcome("failed", outcome.output)
    if re.match(r"-?\d+$", outcome.what):
        return Outcome(f"crashed (status {outcome.what})", outcome.output)
    return outcome


def _show(output: str) -> None:
    for line in output.rstrip().splitlines()[-_SHOWN_LINES:]:
        print(f"    | {line}")


def _has_torch() -> bool:
    """Whether this Python has PyTorch's CUDA build, which some of the tests need."""
    torch = importlib.util.find_spec("torch")  # not imported, because libraries that it is linked with may be missing
    return torch is not None and torch.origin is not None and (Path(torch.origin).parent / "lib/libtorch_cuda.so").is_file()


def _passes_without_bugs(tree: Tree, mutants: list[Mutant]) -> bool:
    """Whether all tests that the mutants name pass without a bug. Prints those that do not."""
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    built = tree.build(tests)
    if built.what != "0":
        print("the sources do not build")
        _show(built.output)
        return False
    passed = True
    for test in tests:
        outcome = tree.test(test)
        if outcome.what != "passed":
            print(f"without any bug {test} {outcome.what}")
            _show(outcome.output)
            passed = False
    if passed:
        print(f"without any bug all {len(tests)} tests pass")
    return passed


def _try_mutant(tree: Tree, mutant: Mutant) -> bool:
    """Plants the bug and prints in one line what its tests did. Returns whether all of them noticed it."""
    started = time.monotonic()
    path = tree.folder / mutant.file
    original = path.read_text(encoding="utf-8")
    wrong: list[tuple[str, Outcome]] = []
    try:
        path.write_text(mutant.apply(original))
        built = tree.build(mutant.tests)
        if built.what == "0":
            outcomes = [(test, tree.test(test)) for test in mutant.tests]
            wrong = [(test, outcome) for test, outcome in outcomes if outcome.what != "failed"]
        else:
            wrong = [("", Outcome("does not build", built.output))]
    finally:
        path.write_text(original, encoding="utf-8")
    seconds = time.monotonic() - started
    if not wrong:
        print(f"noticed   {mutant.name} ({mutant.file}) by {', '.join(mutant.tests)} [{seconds:.0f} s]", flush=True)
        return True
    said = "; ".join(f"{test} {outcome.what}".strip() for test, outcome in wrong)
    word = "SURVIVED" if any(outcome.what == "passed" for _, outcome in wrong) else "UNCLEAN "
    print(f"{word}  {mutant.name} ({mutant.file}): {said} [{seconds:.0f} s]", flush=True)
    for _, outcome in wrong:
        if outcome.what != "passed":
            _show(outcome.output)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description="Plants bugs, and runs the tests that must notice each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only mutants whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="list the mutants, and check that they apply to the sources")
    parser.add_argument("--seconds", type=int, default=_SECONDS, help="the time limit of one test (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants", help="the folder for the copy")
    arguments = parser.parse_args()
    problems = check(MUTANTS, ROOT)
    for problem in problems:
        print(f"DOES NOT APPLY  {problem}")
    if arguments.list:
        for mutant in MUTANTS:
            print(f"{mutant.name} ({mutant.file}): {', '.join(mutant.tests)}")
    if arguments.list or problems:
        return 1 if problems else 0
    chosen = [mutant for mutant in MUTANTS if not arguments.names or any(name in mutant.name for name in arguments.names)]
    left_out = [mutant for mutant in chosen if mutant.needs_torch] if not _has_torch() else []
    chosen = [mutant for mutant in chosen if mutant not in left_out]
    tree = Tree(arguments.folder.resolve(), arguments.seconds)
    try:
        tree.copy()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the sources cannot be copied to {tree.folder}: {error}")
        return 2
    if not _passes_without_bugs(tree, chosen):
        return 2
    noticed = sum(_try_mutant(tree, mutant) for mutant in chosen)
    for mutant in left_out:
        print(f"not run   {mutant.name} ({mutant.file}): {sys.executable} has no PyTorch with CUDA")
    print(f"{noticed} of {len(chosen)} mutants noticed, {len(left_out)} not run")
    return 0 if chosen and noticed == len(chosen) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TableError as error:
        sys.exit(str(error))

"""Guards that nothing is lost, leaked or untrue after any call of any scenario has failed once.

Each scenario runs in a worker process of its own (worker.py), which continues from injection to injection, because each must
end clean. After one that did not, or that killed the worker, a new worker continues with the next.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from torch_memory_saver._engine.preload import LIBRARY_NAME, library_path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
SCENARIOS = sorted(importlib.import_module("all_scenarios").SCENARIOS)
#: These run also with the preload library loaded, which then holds the state in place of the package's own library.
PRELOADED = [
    "allocate_first_in_process",
    "count_guard_bytes",
    "end_capture_with_deferred_frees",
    "free_while_resuming",
    "pause_saving_live_bytes",
    "pause_to_filled_pool",
    "pause_with_disk_backup",
    "resume_in_background_with_waiting_stream",
    "resume_in_guard_mode",
    "resume_mixed_backups_on_two_devices",
]

#: A worker ends itself long before, if an injection hangs.
WORKER_SECONDS = 3600
DISK_CHUNK_MB = "1"

#: The name of a scenario, and whether the preload library is there.
Case = tuple[str, bool]
#: Which injection: its number, and that of the second failure that goes with the first, or 0.
Position = tuple[int, int]


@dataclass
class Result:
    injected: int = 0
    visited: set[str] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


class Run:
    """One scenario, by as many workers as necessary."""

    def __init__(self, scenario: str, preloaded: bool, interposer: Path, directory: Path, shared: Path, full: bool) -> None:
        self.shared = shared
        self.scenario, self.preloaded, self.directory, self.full = scenario, preloaded, directory, full
        self.libraries = [str(interposer), str(library_path())] if preloaded else [str(interposer)]
        self.result = Result()
        self.log = directory / "log"
        for name in ("locks", "pages"):  # else the first try alone would make them
            (directory / name).mkdir(mode=0o700)

    def _worker(self, skip: Position) -> tuple[int, list[dict[str, Any]]]:
        backups = self.directory / f"from-{skip[0]}-{skip[1]}"
        backups.mkdir()
        environment = {
            **os.environ,
            "LD_PRELOAD": ":".join(self.libraries),
            "TMS_DISK_BACKUP_DIR": str(backups / "backups"),
            "TMS_DISK_BACKUP_CHUNK_MB": DISK_CHUNK_MB,
            "TMS_LOCK_DIR": str(self.directory / "locks"),
            "TMS_SHARED_DIR": str(self.shared),
            "TMS_SHARED_PAGE": str(self.directory / "pages"),
            # A worker injects many failures, of which the log would report equal ones once (checks.py, read_log).
            "TMS_LOG_LEVEL": "debug",
        }
        command = [sys.executable, str(HERE / "worker.py"), self.scenario, "--directory", str(backups)]
        command += ["--skip", *map(str, skip)]
        with self.log.open("ab") as log:
            done = subprocess.run(
                command + ["--full"] * self.full, env=environment, stdout=subprocess.PIPE, stderr=log, timeout=WORKER_SECONDS
            )
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]

    def go(self) -> Result:
        skip: Position | None = (0, 0)
        while skip is not None:
            skip = self._read(skip, *self._worker(skip))
        return self.result

    def _read(self, skip: Position, status: int, rows: list[dict[str, Any]]) -> Position | None:
        """Reads a worker's report. Returns where the next one continues, or None."""
        result, begun, following = self.result, None, None
        finished = False
        for row in rows:
            if "library" in row:
                if (row["library"] == LIBRARY_NAME) != self.preloaded:
                    result.problems.append(f"{self.scenario}: the state is held by {row['library']}")
                result.problems += [f"{self.scenario}, with nothing failing: {problem}" for problem in row["problems"]]
            elif "begin" in row:
                begun = row
            elif "end" in row:
                result.injected += row["fired"]
                result.visited.add(row["end"].partition("=")[0])
                result.problems += [f"{self.scenario}, {row['end']}: {problem}" for problem in row["problems"]]
                begun = None
            elif "restart" in row:
                following = (row["restart"][0], row["restart"][1])
            elif "done" in row:
                finished = True
                result.wanted = set(row["points"])
        if status == 0 and (finished or following is not None):
            return following
        tail = self.log.read_text(errors="replace")[-3000:]
        name = begun["begin"] if begun else "no injection"
        result.problems.append(f"{self.scenario}, {name}: the worker ended with status {status}:\n{tail}")
        return (begun["number"][0], begun["number"][1]) if begun and tuple(begun["number"]) > skip else None


#: Variants of scenarios that only `make faults` has the time for.
ONLY_FULL_ALONE = {
    "adopt_on_two_devices",
    "adopt_with_little_device_memory",
    "end_capture_with_deferred_frees_in_runs",
    "pause_exported_run",
    "pause_saving_live_bytes_to_retained_backup",
    "pause_to_discard_with_retained_backups",
    "pause_to_disk_after_pause_to_host",
    "pause_to_disk_with_retained_backups",
    "pause_to_pool_that_is_too_small",
    "pause_to_reserved_host_memory",
    "pause_with_disk_backup_again",
    "reserve_more_host_memory",
    "resume_in_background_on_two_devices_with_waiting_stream",
    "resume_in_background_without_waiter",
    "resume_in_background_writing_zeros",
    "resume_live_bytes_writing_zeros",
    "resume_mixed_backups_on_two_devices",
    "resume_retaining_host_memory",
}
ONLY_FULL_PRELOADED = {"pause_with_disk_backup", "pause_saving_live_bytes", "resume_mixed_backups_on_two_devices"}
ONLY_FULL: set[Case] = {(name, False) for name in ONLY_FULL_ALONE} | {(name, True) for name in ONLY_FULL_PRELOADED}

CASES: list[Case] = [(name, False) for name in SCENARIOS] + [(name, True) for name in PRELOADED]

#: Scenarios of few calls, which every run of pytest includes; the others run in `make slow` and `make faults`.
SHORT = {
    "allocate",
    "allocate_after_reclaiming_refused_memory",
    "allocate_from_slack",
    "allocate_in_capture",
    "allocate_on_other_device",
    "allocate_with_memory_margin",
    "end_capture_with_deferred_frees",
    "free_active",
    "free_paused_with_mmap_backup",
    "free_paused_with_pinned_backup",
    "free_paused_with_shared_backup",
    "free_paused_without_backup",
    "pause_each_kind_to_discard",
    "pause_that_releases_device_lock",
    "pause_with_shared_backup",
    "pause_without_backup",
    "release_backup_views_after_free",
    "reserve_host_memory",
    "resume_after_pause_to_discard",
    "resume_without_backup",
}


def parameter(case: Case) -> Any:
    name, preloaded = case
    marks = () if name in SHORT and not preloaded else (pytest.mark.slow,)
    return pytest.param(case, id=name + "-preloaded" * preloaded, marks=marks)


@pytest.mark.parametrize("case", [parameter(case) for case in CASES])
def test_every_call_fails(
    case: Case, full: bool, interposer: Path, tmp_path: Path, shared: Path, count_injected: Callable[[int], None]
) -> None:
    if case in ONLY_FULL and not full:
        pytest.skip("one of those that only make faults has the time for")
    result = Run(*case, interposer, tmp_path, shared, full).go()
    count_injected(result.injected)
    print(f"{case[0]}: {len(result.wanted)} calls, {result.injected} injected failures")
    assert not result.problems, f"{len(result.problems)} problems:\n" + "\n".join(result.problems[:40])
    assert result.wanted
    assert result.wanted <= result.visited, f"not visited: {sorted(result.wanted - result.visited)}"
    assert result.injected >= len(result.wanted)


#: Functions of the C library that the library calls and the interposer ignores, and why.
NOT_FAILED = {
    "cannot fail": {
        *("__ctype_b_loc", "__errno_location", "__tls_get_addr", "free", "getpid", "geteuid", "clock_gettime"),
        *("getauxval", "getenv", "secure_getenv"),
        "time",
        "uname",
        *(
            "memcpy",
            "memset",
            "memcmp",
            "memmove",
            "strcasecmp",
            "strchr",
            "strcmp",
            "strlen",
            "strncmp",
            "strnlen",
            "strncpy",
            "strrchr",
            "stpcpy",
            "strcspn",
            "strpbrk",
            "strspn",
            "strstr",
            "strtok_r",
            "__isoc99_sscanf",
            "__sched_cpucount",
        ),
        *(
            "gmtime_r",
            "strftime",
            "strerror",
            "strerror_r",
            "snprintf",
            "vsnprintf",
            "strtod",
            "strtol",
            "strtoul",
            "strtoull",
            "sysconf",
            "dirfd",
            "qsort",
        ),
        *(
            "pthread_self",
            "sigaddset",
            "sigemptyset",
            "sigfillset",
            "sigismember",
            "__stack_chk_fail",
            "nanosleep",
            "sched_yield",
            "dl_iterate_phdr",
        ),
    },
    "fails for wrong arguments only": {
        *("pthread_mutex_destroy", "pthread_mutex_lock", "pthread_mutex_unlock", "pthread_mutex_trylock"),
        *("pthread_cond_destroy", "pthread_cond_signal", "pthread_cond_broadcast", "pthread_cond_wait"),
        *("pthread_cond_timedwait", "pthread_condattr_init", "pthread_condattr_setclock", "pthread_condattr_destroy"),
        *("pthread_attr_init", "pthread_attr_setdetachstate", "pthread_attr_destroy", "pthread_detach", "pthread_join"),
        *("pthread_mutex_init", "pthread_cond_init", "pthread_sigmask", "sigpending", "sigtimedwait", "closedir"),
        *("pthread_setcancelstate", "pthread_mutexattr_init", "clock_nanosleep", "readdir", "rewinddir", "fclose"),
    },
    "variables": {"__progname", "program_invocation_short_name"},
    "ends what the system says of itself": {"fgets", "__getdelim"},
    "once a process, tested in tests/unit": {"__cxa_atexit", "__cxa_finalize", "__register_atfork", "getrlimit"},
    "finding the driver, tested in tests/unit": {"dladdr", "dlclose", "dlerror", "dlopen", "dlsym", "realpath"},
    "only makes a message longer": {"kill"},
    "names the program in the ledger, or leaves it without a name": {"readlink"},
    "the log": {"write", "fprintf", "fwrite"},
}


def imported_functions(library: Path) -> set[str]:
    """What a library imports, except from Python."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.split()[-2] == "U"}
    return {name for name in names if not name.startswith(("Py", "_Py"))}


def plain(name: str) -> str:
    """The function that a fortified call (``__read_chk``, ``__open_2``) checks and calls; others unchanged."""
    fortified = re.fullmatch(r"__(\w+)_(?:chk|2)", name)
    return fortified[1] if fortified else name


def test_nothing_that_can_fail_is_left_out(interposer: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("needs nm of the binutils")
    specification = importlib.util.find_spec("torch_memory_saver._core")
    assert specification is not None
    assert specification.origin is not None
    interposed = subprocess.run(
        ["nm", "-D", "--defined-only", str(interposer)], capture_output=True, text=True, check=True
    ).stdout.split()
    # A fortified call of what can fail has a name of its own, which must be interposed as well.
    wanted = imported_functions(Path(specification.origin)) - set(interposed)
    left_out = {name for name in wanted if plain(name) not in set().union(*NOT_FAILED.values())}
    assert not left_out, f"let these fail in interposer_calls.c, or say why not: {sorted(left_out)}"

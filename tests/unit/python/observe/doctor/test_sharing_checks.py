"""Guards the checks of what sending tensors to other processes needs: each check's outcomes."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from findings import assert_complete
from processes import ELSEWHERE, environment
from restrictions import refuse_pidfd_getfd

from torch_memory_saver.observe._doctor import sharing_checks
from torch_memory_saver.observe._doctor.check import Finding, Status

#: The check of the doctor alone, as JSON.
TRIAL = """
import json
from torch_memory_saver.observe._doctor import sharing_checks
(check,) = [check for check in sharing_checks.CHECKS if check.name == "pidfd_getfd"]
print(json.dumps(check.look()))
"""


def trial_where_it_fails_with(number: int) -> Finding:
    done = subprocess.run(
        [sys.executable, "-c", TRIAL],
        env=environment(False),
        cwd=ELSEWHERE,
        preexec_fn=lambda: refuse_pidfd_getfd(number),
        capture_output=True,
        text=True,
        check=True,
    )
    return Finding(*json.loads(done.stdout))


@pytest.mark.parametrize(
    ("number", "found", "advice"),
    [
        (errno.EPERM, "permission denied", "--cap-add=SYS_PTRACE"),
        (errno.ENOSYS, "not implemented", "Linux 5.6"),
        (errno.EMFILE, os.strerror(errno.EMFILE), "tensor.cpu()"),
    ],
)
def test_a_call_that_the_kernel_refuses(number: int, found: str, advice: str) -> None:
    result = trial_where_it_fails_with(number)
    assert_complete(result, Status.FAIL)
    assert found in result.found and advice in result.advice


def test_a_trial_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    result = sharing_checks.descriptors_of_siblings()
    assert_complete(result)
    assert result.status == Status.WARN


@pytest.mark.parametrize(
    ("value", "privileged", "status", "found"),
    [
        ("0\n", False, Status.OK, "is 0"),
        ("1\n", False, Status.WARN, "an ancestor of the sender"),
        ("1\n", True, Status.OK, "has CAP_SYS_PTRACE"),
        ("2\n", False, Status.WARN, "needs CAP_SYS_PTRACE"),
        ("2\n", True, Status.OK, "has CAP_SYS_PTRACE"),
        ("3\n", True, Status.FAIL, "no process"),
        ("?\n", False, Status.WARN, "cannot be read"),
        (None, False, Status.OK, "has no kernel.yama.ptrace_scope"),
    ],
)
def test_the_scope_of_ptrace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None, privileged: bool, status: str, found: str
) -> None:
    path = tmp_path / "ptrace_scope"
    if value is not None:
        path.write_text(value)
    monkeypatch.setattr(sharing_checks, "_PTRACE_SCOPE", path)
    monkeypatch.setattr(sharing_checks, "has_capability", lambda number: privileged)
    result = sharing_checks.ptrace_scope()
    assert_complete(result)
    assert result.status == status and found in result.found


@pytest.mark.parametrize(
    ("limits", "status", "text"),
    [
        ((1024, 1 << 20), Status.WARN, "ulimit -n 65536"),
        ((1024, 4096), Status.WARN, "ulimit -n 4096"),
        ((1025, 4096), Status.OK, "1025 files"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), Status.OK, "any number"),
    ],
)
def test_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], status: str, text: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    result = sharing_checks.open_files()
    assert_complete(result)
    assert result.status == status and text in f"{result.found} {result.advice}"


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sharing_checks, "_SHARED_MEMORY", tmp_path)
    assert sharing_checks.shared_memory().status == Status.OK
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(sharing_checks, "_SHARED_MEMORY", tmp_path / "missing")
    result = sharing_checks.shared_memory()
    assert_complete(result)
    assert result.status == Status.FAIL and os.strerror(errno.ENOENT) in result.found

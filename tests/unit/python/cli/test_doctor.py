"""Guards the doctor: each check's outcomes, the exit status and both forms of the output."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ELSEWHERE, Program, environment
from restrictions import refuse_pidfd_getfd

from torch_memory_saver._cli import doctor, sharing_checks
from torch_memory_saver._cli.check import Result, Status

NAMES = ["pidfd_getfd", "ptrace_scope", "open files", "/dev/shm", "PyTorch"]


def assert_complete(result: Result) -> None:
    assert result.name in NAMES and result.found
    assert bool(result.advice) == (result.status != Status.OK), result
    assert not result.found.endswith(".") and not result.advice.endswith(".")


def test_each_check_gives_a_name_a_status_and_a_sentence() -> None:
    results = [check() for check in doctor.CHECKS]
    assert [result.name for result in results] == NAMES
    for result in results:
        assert_complete(result)


def test_lines_and_objects_say_the_same(command: Program) -> None:
    status = int(any(check().status == Status.FAIL for check in doctor.CHECKS))
    lines = command("doctor", status=status).stdout
    rows = json.loads(command("doctor", "--json", status=status).stdout)
    assert [row["name"] for row in rows] == NAMES
    for row in rows:
        assert list(row) == ["name", "status", "found", "advice"]
        assert row["status"] in lines and row["found"] in lines and row["advice"] in lines


@pytest.mark.parametrize(("worst", "status"), [(Status.OK, 0), (Status.WARN, 0), (Status.FAIL, 1)])
def test_only_a_failure_is_a_status(capsys: pytest.CaptureFixture[str], worst: str, status: int) -> None:
    results = [Result("one", Status.OK, "it is well"), Result("another", worst, "it is so", "change it")]
    assert doctor.run_doctor(as_json=False, checks=[lambda: results[0], lambda: results[1]]) == status
    assert capsys.readouterr().out == (
        f"ok    one      it is well\n{worst:<4}  another  it is so\n               -> change it\n"
    )


def doctor_where_it_fails_with(number: int) -> tuple[int, Result]:
    """The exit status, and the result of the trial."""
    done = subprocess.run(
        [sys.executable, "-m", "torch_memory_saver", "doctor", "--json"],
        env=environment(False),
        cwd=ELSEWHERE,
        preexec_fn=lambda: refuse_pidfd_getfd(number),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, Result(**json.loads(done.stdout)[0])


@pytest.mark.parametrize(
    ("number", "found", "advice"),
    [
        (errno.EPERM, "permission denied", "--cap-add=SYS_PTRACE"),
        (errno.ENOSYS, "not implemented", "Linux 5.6"),
        (errno.EMFILE, os.strerror(errno.EMFILE), "tensor.cpu()"),
    ],
)
def test_a_call_that_the_kernel_refuses(number: int, found: str, advice: str) -> None:
    status, result = doctor_where_it_fails_with(number)
    assert (status, result.name, result.status) == (1, "pidfd_getfd", Status.FAIL)
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
    monkeypatch.setattr(sharing_checks, "_may_trace_all", lambda: privileged)
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


@pytest.mark.parametrize(
    ("release", "status"), [("2.11.0+cu130", Status.OK), ("2.6.0", Status.OK), ("2.5.1", Status.FAIL), (None, Status.WARN)]
)
def test_the_release_of_pytorch(monkeypatch: pytest.MonkeyPatch, release: str | None, status: str) -> None:
    def version(name: str) -> str:
        if release is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = sharing_checks.pytorch()
    assert_complete(result)
    assert result.status == status and (release is None or release in result.found)

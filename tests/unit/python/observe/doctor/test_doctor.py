"""Guards the doctor: both forms of its output, the exit status, and checks that fail themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from findings import assert_complete
from processes import ELSEWHERE, environment, run_python

from torch_memory_saver.observe._doctor import doctor
from torch_memory_saver.observe._doctor.check import Check, Finding, Status, fail, ok, skip, warn

#: Programs rely on them.
NAMES = {
    "installation": [
        "package",
        "Python",
        "PyTorch",
        "simulated GPU",
        "libcudart",
        "LD_PRELOAD",
        "hook mode",
        "preloaded programs",
        "expandable segments",
        "NVTX ranges",
        "settings",
        "output folders",
    ],
    "GPU": ["driver", "CUDA versions", "GPUs", "virtual memory", "pause", "RDMA", "peers", "NUMA"],
    "host": ["host memory", "huge pages", "locked memory", "disk directory", "shared store"],
    "sending tensors to other processes": ["pidfd_getfd", "ptrace_scope", "open files", "/dev/shm"],
}
KEYS = ["group", "name", "status", "found", "advice", "details"]


def groups(*findings: Finding) -> dict[str, Sequence[Check]]:
    """A group with a check for each."""
    return {"a group": [Check(f"check {number}", lambda f=f: f) for number, f in enumerate(findings)]}  # type: ignore[misc]


def test_the_names_are_those_that_programs_rely_on() -> None:
    assert {group: [check.name for check in checks] for group, checks in doctor.GROUPS.items()} == NAMES


def test_each_check_gives_a_status_and_a_sentence() -> None:
    for checks in doctor.GROUPS.values():
        for check in checks:
            assert_complete(check.look())


def test_without_a_driver_and_torch_lines_and_objects_say_the_same() -> None:
    variables = {"TMS_CUDA_DRIVER": "/nonexistent.so", "TMS_EVNTS": "1"}
    lines, rows = (run_doctor(*arguments, **variables) for arguments in ((), ("--json",)))
    found = {row["name"]: row for row in json.loads(rows.stdout)}
    assert found["driver"]["status"] == Status.FAIL and "could not be loaded" in found["driver"]["found"]
    assert [found[name]["status"] for name in ("GPUs", "virtual memory", "pause", "RDMA", "peers")] == [Status.SKIP] * 5
    assert [[row["group"], row["name"]] for row in json.loads(rows.stdout)] == [
        [group, name] for group, names in NAMES.items() for name in names
    ]
    assert lines.returncode == rows.returncode == 1
    assert lines.stdout.endswith(
        "run programs on the simulated GPU, by `python -m torch_memory_saver simulate -- python my.py`.\n"
    )
    for row in json.loads(rows.stdout):
        assert list(row) == KEYS
        if row["name"] == "preloaded programs":  # other tests run some
            continue
        assert f"{row['status']:<4}  {row['name']}" in lines.stdout
        if row["name"] not in ("GPUs", "host memory", "disk directory", "shared store"):  # free memory differs
            assert all(text in lines.stdout for text in (row["found"], row["advice"], *row["details"]))
    assert "\x1b" not in lines.stdout
    assert (lines.stderr, rows.stderr) == ("", "")


def run_doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "torch_memory_saver", "doctor", *arguments, status=None, COLUMNS="0", **variables)


@pytest.mark.parametrize(
    ("finding", "status"),
    [(ok("it is so"), 0), (warn("it is so", "change it"), 0), (skip("it is so", "look"), 0), (fail("it is so", "do it"), 1)],
)
def test_only_a_failure_is_a_status(capsys: pytest.CaptureFixture[str], finding: Finding, status: int) -> None:
    assert doctor.run_doctor(as_json=False, groups=groups(finding)) == status
    advice = f"               -> {finding.advice}\n" if finding.advice else ""
    expected = f"a group\n{finding.status:<4}  check 0  it is so\n{advice}\n1 {finding.status}\n"
    assert capsys.readouterr().out == expected


def test_a_group_has_a_title_and_the_numbers_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    checks = {
        "one": [Check("a", lambda: ok("yes")), Check("b", lambda: ok("yes", ["more"]))],
        "two": groups(ok("so"))["a group"],
    }
    assert doctor.run_doctor(as_json=False, groups=checks) == 0
    assert capsys.readouterr().out == (
        "one\nok    a        yes\nok    b        yes\n               more\n\ntwo\nok    check 0  so\n\n3 ok\n"
    )


def test_a_check_that_raises_is_a_failure_of_that_check(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Finding:
        raise ValueError("a file\nhas no number")

    checks = {"a group": [Check("broken", broken), Check("next", lambda: ok("it is well"))]}
    assert doctor.run_doctor(as_json=True, groups=checks) == 1
    output, errors = capsys.readouterr()
    rows = json.loads(output)
    assert errors == ""
    assert [row["status"] for row in rows] == [Status.FAIL, Status.OK]
    assert rows[0]["found"] == "the check itself has failed: ValueError: a file has no number"
    assert "report" in rows[0]["advice"]
    doctor.run_doctor(as_json=True, debug=True, groups=checks)
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


def test_sentences_are_as_wide_as_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    finding = warn("a few words " * 20, "and more " * 20, ["a line of details " * 10, "/a/path" * 20])
    doctor.run_doctor(as_json=False, groups=groups(finding))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == [" " * 15 + "/a/path" * 20]  # a path is not broken
    assert sum(line.startswith(" " * 15 + "-> ") for line in lines) == 1


def test_names_that_the_encoding_lacks_are_escaped() -> None:
    text = (
        "from torch_memory_saver.observe._doctor import doctor\n"
        "from torch_memory_saver.observe._doctor.check import Check, ok\n"
        "doctor.run_doctor(as_json=False, groups={'g': [Check('n', lambda: ok('/ä\\udcff'))]})"
    )
    done = run_python("-c", text, text=False, PYTHONIOENCODING="ascii")
    assert rb"/\xe4\udcff" in done.stdout


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_are_for_terminals(variables: dict[str, str], coloured: bool) -> None:
    leader, follower = os.openpty()
    text = (
        "from torch_memory_saver.observe._doctor import doctor\n"
        "from torch_memory_saver.observe._doctor.check import Check, fail\n"
        "doctor.run_doctor(as_json=False, groups={'g': [Check('n', lambda: fail('found', 'advice'))]})"
    )
    kept = environment(False) | {"TERM": "xterm"}
    kept.pop("NO_COLOR", None)
    try:
        subprocess.run([sys.executable, "-c", text], env=kept | variables, cwd=ELSEWHERE, stdout=follower, check=True)
        shown = os.read(leader, 4096).decode()
    finally:
        os.close(leader)
        os.close(follower)
    assert ("\x1b[31mfail\x1b[0m  n  found" in shown) == coloured
    assert ("\x1b" in shown) == coloured

"""Guards stream captures that the interposers see."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Compile = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
Scenario = Callable[..., "subprocess.CompletedProcess[str]"]


def test_pause_during_a_capture_fails_and_changes_nothing(run_scenario: Scenario) -> None:
    done = run_scenario("capture", "pause_fails", silent=False)
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert " error: pause: " in lines[0] and " error: resume: " in lines[1]
    assert all("capture is under way" in line for line in lines)


@pytest.mark.parametrize(
    "scenario",
    [
        "free_is_deferred",
        "allocation_during_capture",
        "every_begin",
        "failed_begin",
        "count_cannot_drift",
        "destroyed_stream",
        "unseen_end",
        "announced_settings",
        "captures_of_many_threads",
        "end_by_the_driver",
        "reset_device",
    ],
)
def test_scenario_without_log_output(run_scenario: Scenario, scenario: str) -> None:
    run_scenario("capture", scenario)


def test_a_capture_whose_end_failed_still_counts(run_scenario: Scenario) -> None:
    done = run_scenario("capture", "failed_end", silent=False)
    assert len(done.stderr.splitlines()) == 1 and " error: pause: " in done.stderr


def test_a_capture_does_not_wait_for_a_callback_that_waits_for_its_thread(run_scenario: Scenario) -> None:
    done = run_scenario("capture", "begin_with_what_a_callback_needs", silent=False)
    assert len(done.stderr.splitlines()) == 1
    assert " warning: capture_begin: " in done.stderr and "perhaps because this thread holds the GIL" in done.stderr


def test_more_captures_than_can_be_remembered_are_one_warning(run_scenario: Scenario) -> None:
    done = run_scenario("capture", "many_captures", silent=False)
    assert len(done.stderr.splitlines()) == 1
    assert " warning: more than 16 stream captures" in done.stderr


def test_default_streams_of_threads_are_different_streams(compile_program: Compile, run: Run, stub_runtime: Path) -> None:
    """They have the same handle on every thread. The runtime here is a stub whose captures always succeed."""
    program = compile_program("per_thread_streams", str(stub_runtime))
    done = run([program], env={"LD_LIBRARY_PATH": str(stub_runtime.parent)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")

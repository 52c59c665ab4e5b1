"""Guards cudaMalloc and cudaFree through the interposers, and the C functions kept for existing programs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

MIB = 1 << 20

Scenario = Callable[..., "subprocess.CompletedProcess[str]"]


def warnings_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if " warning: " in line]


def test_the_first_cuda_call_of_a_process_may_be_a_managed_allocation(run_scenario: Scenario) -> None:
    run_scenario("memory", "first_call", env={"TMS_INIT_ENABLE": "1"})


def test_an_allocation_outside_of_regions_is_the_runtimes(run_scenario: Scenario) -> None:
    run_scenario("memory", "first_call_ordinary")


@pytest.mark.parametrize(
    "scenario",
    [
        "first_call_of_a_thread",
        "second_device",
        "toggled_region",
        "pause_and_resume",
        "pinned_backup",
        "mmap_backup",
        "retained_backup",
        "size_zero",
        "enable_peer_access",
    ],
)
def test_scenario_without_log_output(run_scenario: Scenario, scenario: str) -> None:
    silent = scenario != "pause_and_resume"
    program = "backups" if scenario.endswith("_backup") else "memory"
    done = run_scenario(program, scenario, silent=silent)
    if not silent:
        # A tag that was never used is a no-op with a warning.
        assert len(done.stderr.splitlines()) == 1
        assert "an unused tag" in warnings_in(done.stderr)[0]


def test_a_device_without_access_is_named_by_the_simulated_gpu(run_scenario: Scenario) -> None:
    (line,) = run_scenario("memory", "no_peer_access", silent=False).stderr.splitlines()
    assert line.startswith("simulated GPU: ") and line.endswith("where its device has no memory")


def test_free_in_every_state_of_every_kind_of_pointer(run_scenario: Scenario) -> None:
    done = run_scenario("memory", "free_in_every_state", silent=False)
    # Only interior pointers are logged; the runtime answers for foreign ones.
    assert len(done.stderr.splitlines()) == 2
    assert all("lies inside an allocation" in line for line in warnings_in(done.stderr))


def test_ipc_handles_of_managed_memory_are_explained_once(run_scenario: Scenario) -> None:
    done = run_scenario("memory", "ipc_handles", silent=False)
    (line,) = done.stderr.splitlines()
    assert "cudaIpcGetMemHandle failed, because the memory is managed (tag 'weights', 2097152 bytes)" in line
    assert "import it and call torch_memory_saver.stats() before the first tensor is sent" in line


def test_out_of_memory_is_an_error_code_and_the_program_continues(run_scenario: Scenario) -> None:
    done = run_scenario("memory", "out_of_memory", silent=False)
    # The failed resume; an allocation that finds no memory is not unusual.
    assert len(done.stderr.splitlines()) == 1
    assert " error: resume: " in done.stderr and "CUDA_ERROR_OUT_OF_MEMORY" in done.stderr


def test_out_of_memory_can_be_seen_in_the_log(run_scenario: Scenario) -> None:
    done = run_scenario("memory", "out_of_memory", silent=False, env={"TMS_LOG_LEVEL": "info"})
    assert len(re.findall(r" info: allocate: ", done.stderr)) == 4


def test_a_failing_driver_call_keeps_its_number_and_leaves_nothing(run_scenario: Scenario) -> None:
    done = run_scenario("memory", "failing_driver", silent=False)
    assert "cuMemSetAccess failed with CUDA_ERROR_NOT_SUPPORTED" in warnings_in(done.stderr)[0]


def test_a_runtime_that_does_not_start_makes_the_allocation_ordinary(run_scenario: Scenario) -> None:
    done = run_scenario("memory", "failing_runtime", silent=False)
    (line,) = warnings_in(done.stderr)
    assert "an allocation in a region is not managed and cannot be paused: " in line
    assert "the CUDA runtime did not initialise" in line


def test_a_failure_to_give_access_is_a_warning(run_scenario: Scenario) -> None:
    done = run_scenario("memory", "failing_peer_access", silent=False)
    assert len(done.stderr.splitlines()) == 1
    assert "cuMemSetAccess failed with CUDA_ERROR_NOT_SUPPORTED" in warnings_in(done.stderr)[0]


def test_without_a_device_the_program_gets_the_runtimes_error(run_scenario: Scenario) -> None:
    run_scenario("memory", "no_device", env={"TMS_SIMULATED_DEVICES": "0"})


def test_without_a_driver_the_allocation_is_ordinary_and_logged_once(run_scenario: Scenario, tmp_path: Path) -> None:
    missing = str(tmp_path / "libcuda.so.1")
    done = run_scenario("memory", "initial_settings", silent=False, env={"TMS_CUDA_DRIVER": missing, "TMS_INIT_ENABLE": "1"})
    assert done.returncode == 0
    assert "ordinary\n" in done.stdout
    assert len(warnings_in(done.stderr)) == 1 and missing in done.stderr


def test_entry_points_for_torch(run_scenario: Scenario) -> None:
    done = run_scenario("memory", "torch_entry_points", silent=False)
    lines = warnings_in(done.stderr)
    assert len(lines) == len(done.stderr.splitlines()) == 3
    assert "device 99" in lines[0]
    assert "3145728 bytes from a MemPool with this package's allocator outside every region" in lines[1]
    assert "0x123456789" in lines[2]


def test_two_backups_at_once_are_one_and_wrong_use_is_one_warning(run_scenario: Scenario) -> None:
    done = run_scenario("backups", "both_backups", silent=False)
    assert len(done.stderr.splitlines()) == 1
    assert "one backup" in warnings_in(done.stderr)[0]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "ordinary"),
        *(({"TMS_INIT_ENABLE": text}, "managed default none") for text in ("1", "true", "TRUE", "True", "yes", "YES")),
        *(({"TMS_INIT_ENABLE": text}, "ordinary") for text in ("0", "false", "False", "no", "NO", "")),
        ({"TMS_INIT_ENABLE_CPU_BACKUP": "1"}, "ordinary"),
        ({"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "yes"}, "managed default pinned"),
        (
            {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1", "TMS_INIT_CPU_BACKUP_BACKEND": "mmap"},
            "managed default mmap",
        ),
        ({"TMS_INIT_ENABLE": "1", "TMS_INIT_CPU_BACKUP_BACKEND": "mmap"}, "managed default none"),
        ({"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_DISK_BACKUP": "true"}, "managed default disk"),
    ],
    ids=lambda value: ",".join(f"{k[4:]}={v}" for k, v in value.items()) or "unset" if isinstance(value, dict) else "",
)
def test_initial_settings(run_scenario: Scenario, tmp_path: Path, variables: dict[str, str], expected: str) -> None:
    done = run_scenario("memory", "initial_settings", env={"TMS_DISK_BACKUP_DIR": str(tmp_path), **variables})
    assert done.stdout == f"{expected}\ndone\n"


@pytest.mark.parametrize(
    ("variables", "expected", "named"),
    [
        ({"TMS_INIT_ENABLE": "on"}, "ordinary", "TMS_INIT_ENABLE"),
        (
            {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1", "TMS_INIT_CPU_BACKUP_BACKEND": "paper"},
            "managed default pinned",
            "TMS_INIT_CPU_BACKUP_BACKEND",
        ),
        (
            {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1", "TMS_INIT_ENABLE_DISK_BACKUP": "1"},
            "managed default pinned",
            "TMS_INIT_ENABLE_DISK_BACKUP",
        ),
    ],
)
def test_malformed_initial_settings_are_reported_once(
    run_scenario: Scenario, variables: dict[str, str], expected: str, named: str
) -> None:
    done = run_scenario("memory", "initial_settings", silent=False, env=variables)
    assert done.stdout == f"{expected}\ndone\n"
    assert len(done.stderr.splitlines()) == 1
    assert named in warnings_in(done.stderr)[0]


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def answer(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_disk_backups_are_files_that_go_with_the_allocation_and_the_process(
    cuda_program: Callable[[str], Path], environment: dict[str, str], tmp_path: Path
) -> None:
    backups = tmp_path / "made by the library"
    environment["BACKUP_DIRECTORY"] = str(backups)
    with subprocess.Popen(
        [str(cuda_program("backups")), "disk_backup"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        seen: list[list[tuple[str, int]]] = []
        for _ in range(2):
            assert read_line(process) == "paused"
            seen.append([(path.name, path.stat().st_size) for path in backups.iterdir() if path.stat().st_size])
            answer(process)
        assert len(seen[0]) == 1 and seen[0][0][1] >= 5 * MIB
        assert seen[1] == seen[0], "the file keeps its name and size over cycles"
        assert read_line(process) == "freed"
        assert not [path for path in backups.iterdir() if path.stat().st_size]
        answer(process)
        assert read_line(process) == "left"
        assert len([path for path in backups.iterdir() if path.stat().st_size]) == 1
        answer(process)
        assert read_line(process) == "done"
        assert process.wait() == 0
    assert os.listdir(backups) == []
